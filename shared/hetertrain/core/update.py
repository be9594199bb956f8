"""The data that travels and the algebra that merges it: exact, order-free, crash-proof.

A vehicle's update, a gateway's partial and the cloud's open version are one commutative monoid at
different sizes: ``Partial`` holds, per base version, the weighted sum of deltas as *fixed-point
int64*, and who contributed. Each term ``weight · delta`` is rounded once to the grid of 2**-32;
then integers add, so the model of a version is bit for bit the same whatever the order of arrival,
the tree of gateways between, or a crash and replay in the middle.

Overflow is impossible by construction: the gate bounds |delta| to ``DELTA_MAX`` = 2**10, a weight
is at most 1, and a partial takes at most ``CONTRIBUTIONS_MAX`` = 2**20 updates, so |sum| < 2**62.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hetertrain import codec
from hetertrain.core.layout import Integers, Vector
from hetertrain.core.policy import Statistics, WeightPolicy

DELTA_MAX = codec.VALUE_MAX
CONTRIBUTIONS_MAX = 1 << 20
GROUPS_MAX = 16
"""A gateway's partial has so many base versions at most: each takes a model's memory, twice over,
of whoever merges it."""
OPEN_GROUPS_MAX = 128
"""And an open version so many, or as many as may come late."""
RUN_VALUES = 1 << 16
"""A cut computes so many values at a time, which stay in the cache."""
DISCOUNT_MAX = 2.0
"""A fresh update counts at most this much more than the fleet's usual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What a node learnt since it was last heard."""

    node: str
    seq: int
    """Rises with each update of the node; (node, seq) is applied at most once."""
    base_version: int
    examples: int
    steps: int
    layout: str
    """Digest of the parameter layout that the delta is of."""
    lineage: str = ""
    """The run of versions that ``base_version`` counts in."""
    sync: int | None = None
    """The synchronisation that this update flushes for, if any."""
    integers: tuple[int, ...] = ()
    """The node's integer buffers (absolute values, merged by maximum)."""
    payload: bytes | memoryview = b""
    """The delta, encoded by ``hetertrain.codec``."""


@dataclass(frozen=True, slots=True, order=True)
class Contribution:
    """What is remembered of an update after its delta went into a sum."""

    node: str
    seq: int
    base_version: int
    examples: int
    mass: int
    """Examples after the cap: what the update adds to the divisor."""
    steps: int
    norm: float


@dataclass(slots=True)
class Group:
    """The weighted sum of the deltas that started from one version."""

    unit: float
    """How many examples a weight of 1 stands for (a function of the base version's statistics)."""
    sums: NDArray[np.int64]
    """Shape (layout.size,), in units of 2**-32."""


@dataclass(slots=True)
class Partial:
    """The weighted sum of many updates: a commutative monoid under ``absorb``."""

    groups: dict[int, Group] = field(default_factory=dict)
    integers: Integers | None = None
    contributions: dict[tuple[str, int], Contribution] = field(default_factory=dict)

    def add(
        self, update: Update, delta: codec.Decoded, weights: WeightPolicy, statistics: Statistics
    ) -> None:
        """Add one admitted update, weighed by the statistics of its base version."""
        key = (update.node, update.seq)
        assert key not in self.contributions, "an update enters a partial at most once"
        assert len(self.contributions) < CONTRIBUTIONS_MAX, "sums could overflow"
        weight = weights.weight(update.examples, update.steps, statistics)
        group = self.groups.get(update.base_version)
        if group is None:
            group = Group(weights.unit(statistics), np.zeros(delta.size, np.int64))
            self.groups[update.base_version] = group
        codec.add_into(group.sums, delta, weight)
        self._raise_integers(np.asarray(update.integers, np.int64))
        self.contributions[key] = Contribution(
            update.node,
            update.seq,
            update.base_version,
            update.examples,
            min(update.examples, statistics.examples_cap),
            update.steps,
            delta.norm(),
        )

    def absorb(self, other: Partial) -> None:
        """Merge a disjoint partial into this one, in place."""
        assert not self.contributions.keys() & other.contributions.keys(), "partials are disjoint"
        assert len(self.contributions) + len(other.contributions) <= CONTRIBUTIONS_MAX
        for version, theirs in other.groups.items():
            mine = self.groups.get(version)
            if mine is None:
                self.groups[version] = Group(theirs.unit, theirs.sums.copy())
            else:
                assert mine.unit == theirs.unit, "one base version has one unit"
                mine.sums += theirs.sums
        if other.integers is not None:
            self._raise_integers(other.integers)
        self.contributions.update(other.contributions)

    def _raise_integers(self, integers: Integers) -> None:
        if self.integers is None:
            self.integers = integers.copy()
        else:
            np.maximum(self.integers, integers, out=self.integers)

    def nodes(self) -> set[str]:
        """Return the nodes that contributed."""
        return {node for node, _ in self.contributions}

    def mass(self) -> int:
        """Return Σ examples after the cap, each node counted once however many updates it sent."""
        by_node: dict[str, int] = {}
        for item in self.contributions.values():
            by_node[item.node] = max(by_node.get(item.node, 0), item.mass)
        return sum(by_node.values())

    def digest(self) -> str:
        """Return a digest of the exact content, equal for equal partials."""
        hasher = hashlib.blake2b(digest_size=16)
        for version, group in sorted(self.groups.items()):
            hasher.update(f"{version} {group.unit!r}".encode())
            hasher.update(np.ascontiguousarray(group.sums).data)
        hasher.update(b"" if self.integers is None else self.integers.tobytes())
        for item in sorted(self.contributions.values()):
            hasher.update(repr(item).encode())
        return hasher.hexdigest()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The global model at a version. The arrays are owned by the checkpoint and never written
    again.
    """

    version: int
    vector: Vector
    integers: Integers

    def digest(self) -> str:
        """Return the digest by which two holders know that they hold the same model."""
        return model_digest(self.vector, self.integers)


def model_digest(vector: Vector, integers: Integers, lineage: str = "") -> str:
    """Digest a model's content, whatever version it is called, and the lineage it is held in."""
    hasher = hashlib.blake2b(lineage.encode(), digest_size=16)
    hasher.update(np.ascontiguousarray(vector).data)
    hasher.update(np.ascontiguousarray(integers).data)
    return hasher.hexdigest()


def cut(
    checkpoint: Checkpoint,
    partial: Partial,
    weights: WeightPolicy,
    *,
    mean_discount: float,
    max_lag: int,
) -> Checkpoint:
    """Merge ``partial`` into the next version: ``checkpoint + η · Σ w·delta / Σ mass``.

    The divisor is the mass without discounts: dividing by Σ w would cancel an update's discount
    whenever it is alone. ``mean_discount`` is the running mean of s(lag): a fleet's usual lag
    counts as 1. A partial that was admitted in time and delayed afterwards counts with the discount
    of ``max_lag``.
    """
    mass = partial.mass()
    assert mass > 0, "a cut has at least one update"
    terms = []
    for version, group in sorted(partial.groups.items()):
        lag = min(checkpoint.version - version, max_lag)
        discount = _discount(weights, lag, mean_discount)
        terms.append((group.sums, discount * group.unit * 2.0**-codec.FRACTION_BITS / mass))
    vector = np.empty_like(checkpoint.vector)
    for start in range(0, vector.size, RUN_VALUES):
        run = slice(start, start + RUN_VALUES)
        step = np.zeros(vector[run].shape, np.float64)
        for sums, factor in terms:
            step += sums[run] * factor
        vector[run] = checkpoint.vector[run] + weights.server_rate * step
    integers = checkpoint.integers
    if partial.integers is not None and partial.integers.size:
        integers = np.maximum(integers, partial.integers)
    return Checkpoint(checkpoint.version + 1, vector, integers)


def contribution_weights(
    partial: Partial,
    weights: WeightPolicy,
    statistics: Mapping[int, Statistics],
    version: int,
    *,
    mean_discount: float,
    max_lag: int,
) -> tuple[float, ...]:
    """Return what each contribution, in their order, counts for in a cut of ``version``: its
    examples after cap, step factor and discount.

    For people who ask who made a version; the sums have it in them already. ``statistics`` are by
    base version; of one that is long gone, the step factor is no longer known and left out.
    """
    found = []
    for item in sorted(partial.contributions.values()):
        factor = weights.step_factor(item.steps, statistics.get(item.base_version, Statistics()))
        lag = max(0, min(version - item.base_version, max_lag))
        found.append(item.mass * factor * _discount(weights, lag, mean_discount))
    return tuple(found)


def _discount(weights: WeightPolicy, lag: int, mean_discount: float) -> float:
    return min(weights.discount(lag) / mean_discount, DISCOUNT_MAX)


def summarise(
    partial: Partial,
    weights: WeightPolicy,
    before: Statistics,
    version: int,
    *,
    mean_discount: float,
    max_lag: int,
) -> tuple[Statistics, float]:
    """Freeze the statistics for the next version, and the running mean of the discount.

    Medians are smoothed over cuts; all of it depends on the set of contributions only, never on
    their order. What was admitted in time and delayed over ``max_lag`` is not a fleet's usual lag:
    a gateway's day without the cloud would make everybody's next work count twice.
    """
    items = sorted(partial.contributions.values())
    steps = _smooth(before.reference_steps, _median(item.steps for item in items))
    norm = _smooth(before.norm_median, _median(item.norm for item in items))
    cap = max(1, round(weights.examples_cap_medians * _median(item.examples for item in items)))
    lags = (max(0, version - item.base_version) for item in items)
    discounts = [weights.discount(lag) for lag in lags if lag <= max_lag]
    if discounts:
        usual = sum(discounts) / len(discounts)
        mean_discount = SMOOTHING * mean_discount + (1 - SMOOTHING) * usual
    return Statistics(cap, steps, norm), mean_discount


SMOOTHING = 0.8


def _smooth(before: float, value: float) -> float:
    return value if before == 0 else SMOOTHING * before + (1 - SMOOTHING) * value


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return float(ordered[middle])
    return (ordered[middle - 1] + ordered[middle]) / 2
