"""What to simulate, as a TOML file: a fleet, its links and its troubles, a policy, and what is
learnt.

Speeds and rates of a group are spread evenly on a logarithmic scale over its range, the rates in
another order than the speeds, so that slow and thin do not coincide. Nothing here is random.
"""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from hetertrain.core.policy import SYNC_PRESETS, WEIGHT_PRESETS, SyncPolicy, WeightPolicy
from hetertrain.core.tiers import TIERS, Tier
from hetertrain.errors import SettingsError
from hetertrain_edge.forwarding import Form
from hetertrain_lab.network import LinkShape

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Range = tuple[Positive, Positive]
"""The least and the greatest value of a group."""

CHUNK_BYTES_MIN, CHUNK_BYTES_MAX = 256, 128 * 1024
SCALED_CHUNK_BYTES_MIN = 8 * 1024
CHUNK_SECONDS = 0.25
"""A tier's chunk takes about so long on its link."""
STRIDE = 7
"""Coprime to usual group sizes: the order of rates against that of speeds."""


P = TypeVar("P", SyncPolicy, WeightPolicy)


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Troubles(_Part):
    """What happens to a node, its link, or the broker, at random times."""

    outage_share: Share = 0.0
    """The share of time that a link is down."""
    outage_seconds: Range = (5.0, 30.0)
    crash_seconds: Positive | None = None
    """The mean time between two crashes of the process."""
    restart_seconds: Range = (0.5, 10.0)
    disk_loss: Share = 0.0
    """The share of crashes that lose the disk as well."""


class Group(Troubles):
    """Nodes of one kind."""

    count: Annotated[int, Field(ge=0, le=100_000)]
    rate_bits_per_second: Range = (5e6, 5e6)
    latency_seconds: Annotated[float, Field(ge=0)] = 0.02
    loss: Share = 0.0
    duplication: Share = 0.0
    reordering: Share = 0.0


class Vehicles(Group):
    """Nodes that train."""

    step_seconds: Range = (0.05, 0.05)
    """How long a local step takes on the fastest and the slowest."""
    step_jitter: Share = 0.1
    """Each order's steps take up to so much longer or shorter."""
    joins_within_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Nodes join at random within this time, not all at the start."""
    roam_seconds: Positive | None = None
    """The mean time until a vehicle goes over to another gateway's cell; None: it stays."""


class Gateways(Group):
    """Nodes that merge a cell's updates. Their outages are of both links; these of the one to the
    cloud alone, while the cell's goes on.
    """

    uplink_outage_share: Share = 0.0
    """The share of time that the cloud is out of reach."""
    uplink_outage_seconds: Range = (5.0, 30.0)
    local_after_seconds: Annotated[float, Field(ge=0)] | None = None
    """How long the cloud must be out of reach until a gateway makes versions for its cell; None:
    it never does."""
    forward: Form = Form.EXACT
    """How partials go up."""
    inbox_bytes_max: Annotated[int, Field(ge=1)] = 1 << 30
    """What a gateway holds that the cloud has not settled."""


class Learning(_Part):
    """What is learnt: a task with real gradients, or a synthetic objective of a given size."""

    task: str | None = None
    """As module:Class; None: each node is drawn to an optimum of its own, with noise."""
    labels: dict[str, str] = {}
    """Labels of every node beside ``index`` and ``of``."""
    learning_rate: Positive | None = None
    """Replaces that of the task's optimiser."""
    parameters: Annotated[int, Field(ge=1, le=1 << 28)] = 1000
    """The size of a synthetic model."""
    target: float | None = None
    """Reached once the task's headline metric, the mean of three evaluations, is at least this."""


class Scenario(_Part):
    """A whole simulation but for its seed."""

    name: str
    policy: str = "sap"
    sync: dict[str, Any] = {}
    """Changes to the policy's rules of cut, sync and pace."""
    weights: dict[str, Any] = {}
    """Changes to the policy's weights."""
    seconds: Positive = 60.0
    steps: Annotated[int, Field(ge=1)] | None = None
    """Stop when the fleet has trained so many local steps in all."""
    stops_at_target: bool = True
    """Stop when the target is reached."""
    message_bytes: Positive | None = None
    """How large a dense model is on the wire; None: as large as it is."""
    heartbeat_seconds: Positive = 2.0
    tier_rates: tuple[Positive, ...] = ()
    """Bits per second of the tiers; empty: the default tiers."""
    follow_link: bool = False
    """Nodes begin in the slowest tier and go where their transfers show that their links are; else
    each is in its link's tier from the start, for good."""
    installed: bool = False
    """Vehicles come with version 0; else they wait for it to arrive."""
    vehicles: tuple[Vehicles, ...]
    gateways: Gateways = Gateways(count=0)
    cloud: Troubles = Troubles()
    broker: Troubles = Troubles()
    learning: Learning = Learning()

    def policies(self) -> tuple[SyncPolicy, WeightPolicy]:
        """Return the preset with the scenario's changes.

        Raises:
            SettingsError: the preset or a rule is unknown, or a value is impossible.
        """
        if self.policy not in SYNC_PRESETS:
            known = ", ".join(SYNC_PRESETS)
            raise SettingsError(f"policy {self.policy!r} is unknown: use one of {known}")
        sync = _changed(SYNC_PRESETS[self.policy], self.sync)
        return sync, _changed(WEIGHT_PRESETS[self.policy], self.weights)

    def tiers(self, message_scale: float) -> dict[str, Tier]:
        """Return the tiers, for messages whose bytes stand for ``message_scale`` each."""
        rates = {tier.name: float(tier.rate_bits_per_second) for tier in TIERS.values()}
        if self.tier_rates:
            rates = {f"t{i}": rate for i, rate in enumerate(sorted(self.tier_rates))}
        # Chunks of large messages stay few: what is simulated is their time, not their number.
        least = CHUNK_BYTES_MIN if message_scale <= 1 else SCALED_CHUNK_BYTES_MIN
        return {name: _tier(name, rate / message_scale, least) for name, rate in rates.items()}


def _changed(preset: P, changes: dict[str, Any]) -> P:
    """Return a policy with changes, checked like one that came over the wire."""
    known = {field.name for field in fields(preset)}
    unknown = sorted(changes.keys() - known)
    if unknown:
        raise SettingsError(f"{unknown[0]!r} is no rule of a policy; known: {', '.join(known)}")
    try:
        return TypeAdapter(type(preset)).validate_python(asdict(preset) | changes)
    except ValidationError as error:
        raise SettingsError(f"policy {changes}: {error.errors()[0]['msg']}") from error


def _tier(name: str, rate: float, chunk_min: int) -> Tier:
    chunk = min(max(int(rate / 8 * CHUNK_SECONDS), chunk_min), CHUNK_BYTES_MAX)
    return Tier(name, max(1, int(rate)), chunk, 8)


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node of a scenario."""

    name: str
    shape: LinkShape
    tier: str
    troubles: Troubles
    step_seconds: float = 0.0
    step_jitter: float = 0.0
    joins_within_seconds: float = 0.0
    cell: str = ""
    roam_seconds: float | None = None


def plan_vehicles(scenario: Scenario, cloud_cell: str) -> list[NodePlan]:
    """Return the vehicles, dealt to the gateways in turn."""
    plans: list[NodePlan] = []
    for group in scenario.vehicles:
        for index in range(group.count):
            number = len(plans)
            cell = f"edge-{number % scenario.gateways.count}" if scenario.gateways.count else ""
            plans.append(
                NodePlan(
                    f"vehicle-{number:03d}",
                    _shape(group, _other_order(index, group.count)),
                    _tier_of(scenario, group, _other_order(index, group.count)),
                    group,
                    _spread(group.step_seconds, index, group.count),
                    group.step_jitter,
                    group.joins_within_seconds,
                    cell or cloud_cell,
                    group.roam_seconds if scenario.gateways.count > 1 else None,
                )
            )
    return plans


def plan_gateways(scenario: Scenario) -> list[NodePlan]:
    """Return the gateways."""
    group = scenario.gateways
    return [
        NodePlan(f"edge-{i}", _shape(group, i), _tier_of(scenario, group, i), group)
        for i in range(group.count)
    ]


def _other_order(index: int, count: int) -> int:
    return index * STRIDE % count if count % STRIDE else (index + count // 2) % count


def _spread(bounds: Range, index: int, count: int) -> float:
    least, most = bounds
    return least if count < 2 else least * (most / least) ** (index / (count - 1))


def _shape(group: Group, index: int) -> LinkShape:
    return LinkShape(
        rate_bits_per_second=_spread(group.rate_bits_per_second, index, group.count),
        latency_seconds=group.latency_seconds,
        loss=group.loss,
        duplication=group.duplication,
        reordering=group.reordering,
    )


def _tier_of(scenario: Scenario, group: Group, index: int) -> str:
    """Return the fastest tier that the link can keep up with, or the slowest."""
    rate = _spread(group.rate_bits_per_second, index, group.count)
    slowest_first = list(scenario.tiers(1.0).values())
    able = [t for t in slowest_first if t.rate_bits_per_second <= rate * (1 + 1e-9)]
    return (able[-1] if able else slowest_first[0]).name


def load_scenario(path: Path) -> Scenario:
    """Read a scenario file.

    Raises:
        SettingsError: it cannot be read, or a key or value is wrong; the message names it.
    """
    try:
        plain = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"cannot read the scenario {path}: {error}") from error
    return parse_scenario({"name": path.stem} | plain)


def parse_scenario(plain: dict[str, Any]) -> Scenario:
    """Check a scenario.

    Raises:
        SettingsError: a key or value is wrong; the message names it.
    """
    try:
        scenario = Scenario.model_validate(plain)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise SettingsError(f"scenario: {where}: {first['msg']}") from error
    scenario.policies()
    return scenario
