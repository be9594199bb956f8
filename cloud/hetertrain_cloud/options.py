"""What can be chosen for a job: its task, scheme, rules and end. The API, the CLI and the
aggregator's settings have the same options.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field

from hetertrain.core.policy import SYNC_PRESETS, WEIGHT_PRESETS, SyncPolicy, WeightPolicy

_COMPARISONS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}
_RULE = re.compile(
    r"(?P<metric>[A-Za-z_][\w.]{0,63}) *(?P<sign>>=|<=|>|<) *(?P<value>-?\d{1,12}(\.\d{1,12})?)"
    r"( +for +(?P<times>[1-9]\d{0,4}))?"
)
TaskReference = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z_][\w.]{0,127}:[A-Za-z_]\w{0,63}$",
        description="the task to train, as module:Class",
        examples=["hetertrain_lab.driving:DrivingTask"],
    ),
]
Seconds = Annotated[float | None, Field(gt=0, le=1e9, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class StopRule:
    """End the job when a metric was so for some evaluations in a row."""

    metric: str
    sign: str
    value: float
    times: int

    @classmethod
    def parse(cls, text: str) -> StopRule:
        """Read ``METRIC >= VALUE for TIMES``.

        Raises:
            ValueError: it is not of this form.
        """
        found = _RULE.fullmatch(text.strip())
        if found is None:
            raise ValueError("write METRIC >= VALUE for TIMES, as 'accuracy >= 0.9 for 3'")
        return cls(found["metric"], found["sign"], float(found["value"]), int(found["times"] or 1))

    def holds(self, metrics: dict[str, float]) -> bool:
        """Tell whether one evaluation satisfies it; a metric that is not there does not."""
        value = metrics.get(self.metric)
        return value is not None and bool(_COMPARISONS[self.sign](value, self.value))


def _check_rule(text: str | None) -> str | None:
    if text is not None:
        StopRule.parse(text)
    return text


class JobOptions(BaseModel):
    """A job's options beside its task."""

    policy: Literal["sap", "fedavg", "fedbuff", "fedasync", "ssp", "ssgd", "asgd"] = Field(
        "sap", description="the synchronisation scheme"
    )
    sync_seconds: Seconds = Field(None, description="time between synchronisations")
    sync_deadline_seconds: Seconds = Field(None, description="how long a sync may take")
    cut_seconds: Seconds = Field(None, description="a cut at the latest so long after an update")
    cut_fraction: float | None = Field(
        None, gt=0, le=1, description="the share of nodes that makes a cut"
    )
    pace_steps: int | None = Field(
        None, ge=1, le=1 << 31, description="local steps per update (stepwise schemes)"
    )
    server_rate: float | None = Field(
        None, gt=0, le=100, description="how far a cut moves along the weighted mean"
    )
    seed: int = Field(0, ge=0, lt=1 << 63, description="seeds the initial model")
    keep_journal: bool = Field(
        False, description="keep every update, so that the whole job can be repeated"
    )
    evaluate_on_nodes: bool = Field(
        False, description="nodes measure each sync's model on their own held-out data"
    )
    max_versions: int | None = Field(
        None, ge=1, lt=1 << 62, description="end the job at this version; unset: never"
    )
    stop_when: Annotated[str | None, AfterValidator(_check_rule)] = Field(
        None,
        max_length=128,
        description="end the job when a metric is so: METRIC >= VALUE for TIMES",
        examples=["accuracy >= 0.9 for 3"],
    )

    def sync_policy(self) -> SyncPolicy:
        """Return the scheme's preset with what was set beside it."""
        names = (
            "sync_seconds",
            "sync_deadline_seconds",
            "cut_seconds",
            "cut_fraction",
            "pace_steps",
        )
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        given["evaluate_on_nodes"] = self.evaluate_on_nodes
        return replace(SYNC_PRESETS[self.policy], **given)

    def weight_policy(self) -> WeightPolicy:
        """Return the scheme's weights with what was set beside it."""
        weights = WEIGHT_PRESETS[self.policy]
        if self.server_rate is None:
            return weights
        return replace(weights, server_rate=self.server_rate)
