"""When to cut and sync, what an update is worth, how a node paces itself.

One machine serves all synchronisation schemes; a scheme is a preset of these numbers. ``sap`` is
Heter-Train's own (semi-asynchronous with global interval synchronisation, after Geng et al. 2024);
``fedavg`` (McMahan et al. 2017), ``fedbuff`` (Nguyen et al. 2022) and ``fedasync`` (Xie et al.
2019), ``ssp`` (Ho et al. 2013), and ``ssgd`` and ``asgd`` (a message for each step) run on the
same code, so they compare fairly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

STEP_FACTOR_MAX = 4.0
"""How far step normalisation may raise or lower an update's weight."""

EXAMPLES_CAP_FIRST = 1 << 16
"""The cap on examples before the first cut has shown what is usual."""

VALUE_BYTES = 2.0
"""About what a sparse update pays for a value that it keeps."""

FACTOR_GRID = 1 << 20
"""Factors from ``pow`` are rounded to this grid: libm differs in the last bit between machines, the
sums must not.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncPolicy:
    """When the aggregator cuts and syncs, and how a node paces its updates."""

    name: str = "sap"
    cut_fraction: float = 0.25
    """A cut needs updates from this share of the active nodes (at least one)."""
    cut_seconds: float = 2.0
    """A cut comes at the latest this long after the first update of a version."""
    sync_seconds: float | None = 20.0
    """Time between global synchronisations; None: never."""
    sync_deadline_seconds: float = 1.0
    """How long a sync waits for flushes, and a node for the sync's checkpoint."""
    sync_quorum: float = 0.5
    """The share of active nodes whose flush closes a sync before its deadline."""
    flush_factor: float = 2.0
    """The byte budget of a flush, as a multiple of an ordinary update's."""
    clock_bound: int | None = None
    """A node may be so many updates ahead of the slowest one, and then waits for it (stale
    synchronous parallel, Ho et al. 2013); None: nodes never wait for each other."""
    pull_lag: int | None = 16
    """A node whose last work started from a version so far back is asked to send what it has
    (urgent pull, as in Port, Su and Li 2022); None: never."""
    max_lag: int = 64
    """Updates of a larger lag are refused; their node puts them back into its unsent progress."""
    residual_decay: float = 1.0
    """What a node keeps of its residual from one update to the next; below 1, what a thin link
    cannot send in time is let go instead of sent late."""
    late_damping: float = 0.5
    """What a node keeps of a delta that was refused as too old."""
    pace_seconds: float | None = 1.0
    """A node publishes at the latest this long after its last update, if its link is free."""
    pace_steps: int | None = None
    """A node publishes after so many local steps."""
    pace_density: float = 0.001
    """A thin link paces itself so that an update can hold this share of the parameters."""
    hold_after_update: bool = False
    """A node waits for the next version after each update (synchronous schemes)."""
    hold_at_sync: bool = True
    """A node that has flushed waits for the sync's model; else it trains on meanwhile."""
    hold_seconds: float = 3600.0
    """The longest that a node waits for a version, whatever happens to its aggregator."""
    evaluate_on_nodes: bool = False
    """Nodes measure each sync's model on their own held-out data, and say so in their heartbeat."""
    is_dense: bool = False
    """Updates and versions travel as float32, whatever the tier (uncompressed baselines)."""
    budget_seconds: float = 1.0
    """The time whose share of the link an update may fill, in schemes that pace by steps."""
    budget_share: float = 0.5
    """The share of a link's time that updates may take."""

    def __post_init__(self) -> None:
        if self.pace_seconds is None and self.pace_steps is None:
            raise ValueError("a policy needs pace_seconds, pace_steps, or both")
        if not 0 < self.cut_fraction <= 1 or not 0 < self.sync_quorum <= 1:
            raise ValueError("cut_fraction and sync_quorum are shares in (0, 1]")
        if self.max_lag < 0 or self.cut_seconds <= 0 or self.sync_deadline_seconds <= 0:
            raise ValueError("max_lag, cut_seconds and sync_deadline_seconds cannot be negative")

    def period_seconds(self, bits_per_second: float, size: int) -> float:
        """Return the least time between two messages of a model of ``size`` on such a link.

        A thin link gets longer periods, so that ``pace_density`` of the parameters fits into its
        share of one; a fast one is not flooded.
        """
        pace = self.pace_seconds if self.pace_seconds is not None else self.budget_seconds
        if self.is_dense:
            return pace
        least_bits = 8 * VALUE_BYTES * self.pace_density * size
        return max(pace, least_bits / (bits_per_second * self.budget_share))

    def nodes_for_cut(self, num_active: int) -> int:
        """Return how many nodes must have reported before a cut."""
        return max(1, ceil(num_active * self.cut_fraction))


@dataclass(frozen=True, slots=True)
class Statistics:
    """What is usual in the fleet, frozen at a cut, so that a weight never depends on the order of
    arrival.

    Travels in the manifest; an update is weighed by the statistics of its *base version*,
    everywhere alike.
    """

    examples_cap: int = EXAMPLES_CAP_FIRST
    reference_steps: float = 0.0
    """The running median of local steps per update; 0 while unknown."""
    norm_median: float = 0.0
    """The running median of the deltas' L2 norm; 0 while unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPolicy:
    """What an update is worth: ``examples · (reference_steps / steps)^β · s(lag)``, each factor
    bounded.
    """

    lag_exponent: float = 0.25
    """a in s(lag) = (1 + lag)^-a, as in FedAsync and FedBuff."""
    step_exponent: float = 0.0
    """β of step normalisation (FedNova, Wang et al. 2020): 0 trusts long updates more, 1 all alike.
    """
    examples_cap_medians: float = 4.0
    """No node counts for more than this many times the fleet's median of examples."""
    server_rate: float = 0.5
    """η: how far a cut moves the checkpoint along the weighted mean. A cut of a quarter of a fleet
    whose nodes' data differ must not follow that quarter all the way."""
    outer: Literal["none", "sgd", "momentum", "nesterov", "adam"] = "none"
    """What a synchronisation makes of its interval's drift; see ``core.outer``."""
    outer_rate: float = 1.0
    outer_momentum: float = 0.5

    def weight(self, examples: int, steps: int, statistics: Statistics) -> float:
        """Weigh an update as a share of ``unit``, in (0, 1]; the lag counts at the cut."""
        capped = min(examples, statistics.examples_cap) / statistics.examples_cap
        return capped * self.step_factor(steps, statistics) / STEP_FACTOR_MAX

    def step_factor(self, steps: int, statistics: Statistics) -> float:
        """Return what the number of local steps does to an update's weight."""
        if statistics.reference_steps <= 0:
            return 1.0
        raw = (statistics.reference_steps / steps) ** self.step_exponent
        return min(max(_on_grid(raw), 1 / STEP_FACTOR_MAX), STEP_FACTOR_MAX)

    def unit(self, statistics: Statistics) -> float:
        """Return how many examples a weight of 1 stands for."""
        return statistics.examples_cap * STEP_FACTOR_MAX

    def discount(self, lag: int) -> float:
        """Return s(lag) before it is normalised by its running mean."""
        return _on_grid((1.0 + lag) ** -self.lag_exponent)


def _on_grid(factor: float) -> float:
    return max(round(factor * FACTOR_GRID), 1) / FACTOR_GRID


_SAP = SyncPolicy()
_NEVER_SYNC = replace(_SAP, sync_seconds=None, pull_lag=None)
_ONE_UPDATE = 1e-9
"""The share of any fleet that is one node."""

SYNC_PRESETS: dict[str, SyncPolicy] = {
    "sap": _SAP,
    "fedavg": replace(
        _NEVER_SYNC,
        name="fedavg",
        cut_fraction=1.0,
        cut_seconds=3600.0,
        pace_seconds=None,
        pace_steps=10,
        hold_after_update=True,
        is_dense=True,
    ),
    "fedbuff": replace(
        _NEVER_SYNC, name="fedbuff", pace_seconds=None, pace_steps=20, is_dense=True
    ),
    "fedasync": replace(
        _NEVER_SYNC,
        name="fedasync",
        cut_fraction=_ONE_UPDATE,
        pace_seconds=None,
        pace_steps=20,
        is_dense=True,
    ),
}
_ASGD = replace(SYNC_PRESETS["fedasync"], name="asgd", pace_steps=1, hold_after_update=True)
SYNC_PRESETS |= {
    "ssgd": replace(SYNC_PRESETS["fedavg"], name="ssgd", pace_steps=1),
    "asgd": _ASGD,
    "ssp": replace(_ASGD, name="ssp", clock_bound=3),
}
"""The synchronisation schemes by name."""

WEIGHT_PRESETS: dict[str, WeightPolicy] = {
    "sap": WeightPolicy(),
    "fedavg": WeightPolicy(lag_exponent=0.5, server_rate=1.0),
    "fedbuff": WeightPolicy(lag_exponent=0.5, server_rate=1.0),
    "fedasync": WeightPolicy(lag_exponent=0.5, server_rate=0.6),
    "ssgd": WeightPolicy(lag_exponent=0.5, server_rate=1.0),
    "asgd": WeightPolicy(lag_exponent=0.0, server_rate=1.0),
    "ssp": WeightPolicy(lag_exponent=0.0, server_rate=1.0),
}
"""The weights that go with each scheme."""
