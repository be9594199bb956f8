"""What must hold in every simulation, after every event.

The ledger follows each update from the outbox to the version that counts it, and repeats each
version serially from the updates' own bytes: whatever the order of arrival, the gateways between,
the crashes and repetitions, the model must be the same bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from hetertrain import codec
from hetertrain.core.aggregator import Aggregator
from hetertrain.core.outer import OuterOptimizer
from hetertrain.core.policy import Statistics, SyncPolicy, WeightPolicy
from hetertrain.core.update import Checkpoint, Partial, Update, cut, summarise
from hetertrain.errors import HetertrainError

Key = tuple[str, int]
"""An update: (node, seq)."""

SLACK_SECONDS = 1.0
LINK_FRAMES_MAX = 4096
WAIT_SECONDS_MAX = 7200.0


class ViolationError(HetertrainError):
    """A promise was broken in a simulation."""

    code = "promise_broken"
    exit_code = 1


@dataclass(slots=True)
class Ledger:
    """Every update from its outbox on, and a serial repetition of every version."""

    policy: SyncPolicy
    weights: WeightPolicy
    initial: Checkpoint
    is_buffer: NDArray[np.bool_]
    may_restart: bool
    """The cloud may lose its disk, and count again what it counted before."""
    is_exact: bool = True
    """Gateways pass sums on as they are; else a version cannot be repeated from its updates."""
    stored: dict[Key, Update] = field(default_factory=dict)
    acknowledged: dict[Key, float] = field(default_factory=dict)
    counted: set[Key] = field(default_factory=set)
    forgiven: set[Key] = field(default_factory=set)
    """Updates that a lost disk may have taken along."""
    checkpoint: Checkpoint = field(init=False)
    digest: str = field(init=False)
    """Of the newest version."""
    statistics: dict[int, Statistics] = field(init=False)
    mean_discount: float = field(init=False)
    outer: OuterOptimizer = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin again with version 0: the cloud lost its disk."""
        self.forgiven |= self.stored.keys() | self.counted
        self.counted.clear()
        self.checkpoint, self.digest = self.initial, self.initial.digest()
        self.statistics = {0: Statistics()}
        self.mean_discount = 1.0
        self.outer = OuterOptimizer.start(self.initial.vector)

    def version_made(
        self, version: int, digest: str, keys: Iterable[Key], *, ends_sync: bool
    ) -> None:
        """Count a version's updates, and compare it with its serial repetition."""
        if version != self.checkpoint.version + 1:
            raise ViolationError(f"version {version} follows version {self.checkpoint.version}")
        partial = Partial()
        for key in sorted(keys):
            if key in self.counted:
                raise ViolationError(f"update {key} is counted twice, now in version {version}")
            if key not in self.stored:
                raise ViolationError(f"update {key} of version {version} was never made")
            self.counted.add(key)
            update = self.stored[key] if self.may_restart else self.stored.pop(key)
            delta = codec.parse(update.payload, self.initial.vector.size)
            statistics = self.statistics.get(update.base_version, Statistics())
            partial.add(update, delta, self.weights, statistics)
        before = self.checkpoint
        self.checkpoint = cut(
            before,
            partial,
            self.weights,
            mean_discount=self.mean_discount,
            max_lag=self.policy.max_lag,
        )
        if ends_sync:
            vector = self.outer.step(self.checkpoint.vector, self.weights, self.is_buffer)
            self.checkpoint = replace(self.checkpoint, vector=vector)
        frozen, self.mean_discount = summarise(
            partial,
            self.weights,
            self.statistics[before.version],
            before.version,
            mean_discount=self.mean_discount,
            max_lag=self.policy.max_lag,
        )
        self.statistics[version] = frozen
        self.digest = digest
        if self.is_exact and self.checkpoint.digest() != digest:
            raise ViolationError(f"version {version} is not what its updates give serially")

    def lost(self, kept: set[Key], before: float) -> list[Key]:
        """Return the updates acknowledged before a time that are nowhere any more."""
        known = self.counted | kept
        lost = self.acknowledged.keys() - known - self.forgiven
        return sorted(key for key in lost if self.acknowledged[key] < before)


def check_aggregator(
    machine: Aggregator, open_since: float | None, now: float, *, has_gateways: bool
) -> None:
    """Check that nobody blocks a cut, that staleness is bounded, and memory.

    ``open_since``: when the open version got its first update, if it has any. Gateways may bring
    accepted updates later than ``max_lag``.
    """
    policy = machine.policy
    if open_since is not None:
        limit = policy.cut_seconds + policy.sync_deadline_seconds + SLACK_SECONDS
        if now > open_since + limit:
            raise ViolationError(f"a cut waits since {open_since:.3f}: {machine.waiting_for()}")
    if len(machine.statistics) > policy.max_lag + 2:
        raise ViolationError(f"statistics of {len(machine.statistics)} versions are kept")
    oldest = min(machine.open.groups, default=machine.checkpoint.version)
    if oldest < machine.checkpoint.version - policy.max_lag and not has_gateways:
        raise ViolationError(f"an update of version {oldest} is merged, over {policy.max_lag} late")


def check_wait(name: str, wakes_at: float, now: float) -> None:
    """Check that a process has a deadline for what it waits for."""
    if not math.isfinite(wakes_at) or wakes_at > now + WAIT_SECONDS_MAX:
        raise ViolationError(f"{name} waits without a deadline: it wakes at {wakes_at}")


def check_queue(name: str, num_frames: int) -> None:
    """Check that what waits for a link is bounded."""
    if num_frames > LINK_FRAMES_MAX:
        raise ViolationError(f"{name} holds {num_frames} frames for its link")
