"""The state machine of a training node: train, publish, rebase, flush and hold. It never trains or
sends itself.

::

    JOINING --model--> TRAINING --pace reached, link free--> publish, TRAINING
    (semi-asynchronous)
                          |   ^                          \\-> publish, HOLDING
                          (hold_after_update)
             sync notice  |   |  the sync's model, the next version, or the deadline
                          v   |
                       FLUSHING --flush published, or nothing to flush--> HOLDING

What a codec left out is the *residual*; it goes with the next delta (error feedback: Seide et al.
2014; Karimireddy et al. 2019) and is kept apart from the local model: a node goes on from what the
fleet will know of its work, ``model + decoded``. Training on with the residual inside drifts a thin
link's node towards its own data. When a version arrives the node rebases at its next step boundary,
``local = model + (local - reference)``: unsent progress survives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from hetertrain import codec
from hetertrain.core.events import Pulled, SyncNotice, Tick, Waiting
from hetertrain.core.gate import Outcome, Verdict
from hetertrain.core.layout import Integers, Vector
from hetertrain.core.policy import SyncPolicy
from hetertrain.core.tiers import Tier
from hetertrain.core.update import Update

PERIODS_MAX = 4
"""A node that could not send for long may fill this many periods' budgets at once."""
SLICE_SECONDS = 0.25
"""How much training is ordered at a time; a step boundary is at most one step away in any case."""


class State(StrEnum):
    """What a worker is doing."""

    JOINING = "joining"
    TRAINING = "training"
    FLUSHING = "flushing"
    HOLDING = "holding"


@dataclass(frozen=True, slots=True)
class ModelArrived:
    """A version as this node's tier holds it."""

    version: int
    vector: Vector
    integers: Integers
    sync: int | None
    """The synchronisation that this model ends."""
    lineage: str = ""
    slowest: int = 0
    """The clock of the fleet's slowest node."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The trainer stopped at a step boundary after ``steps`` steps, and gave up ``local``."""

    local: Vector
    integers: Integers
    steps: int
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the model measured that the order began with, where the order asked for it."""
    cpu_seconds: float = 0.0
    """Processor time that the steps took, over all threads."""
    examples: int = 0
    """How many the node holds by now; 0: as many as before."""


@dataclass(frozen=True, slots=True)
class TrainerReplaced:
    """The trainer failed, and another one is ready: steps since the last report are lost."""


@dataclass(frozen=True, slots=True)
class UpdateSettled:
    """The aggregator's verdict on the update in flight; ``payload`` is what was sent."""

    verdict: Verdict
    payload: bytes | memoryview
    may_return: bool = True
    """A delta that is refused as too old may go back to the unsent progress; False: another
    aggregator, which was offered it before, may have counted it."""


Event = ModelArrived | Trained | TrainerReplaced | UpdateSettled | SyncNotice | Pulled | Tick


@dataclass(frozen=True, slots=True)
class TrainOrder:
    """Train up to ``steps`` steps; from ``start`` where given, else go on from where the trainer
    stands.
    """

    steps: int
    start: tuple[Vector, Integers] | None
    is_fresh: bool
    """Reset the local optimiser's momentum (after a synchronisation)."""
    measures: bool = False
    """Measure ``start`` on the node's own held-out data first."""
    version: int = -1
    """The version that the node is on."""


@dataclass(frozen=True, slots=True)
class Ready:
    """What the driver must do after one step, in this order."""

    publish: Update | None = None
    """Durable in the outbox, then sent."""
    flushed: int | None = None
    """Nothing to flush for this synchronisation: tell the aggregator."""
    train: TrainOrder | None = None
    interrupt: bool = False
    """Ask the trainer to stop at its next step boundary."""
    wake_at: float | None = None


@dataclass(slots=True)
class Worker:
    """One node's training of one job."""

    node: str
    policy: SyncPolicy
    tier: Tier
    examples: int
    layout: str
    next_seq: int
    is_in_flight: bool = False
    """An update waits for its verdict; progress gathers in ``local - reference`` meanwhile."""
    state: State = State.JOINING
    version: int = -1
    lineage: str = ""
    _slowest: int = 0
    num_updates: int = 0
    num_steps: int = 0
    _reference: Vector = field(default_factory=lambda: np.empty(0, np.float32))
    _local: Vector = field(default_factory=lambda: np.empty(0, np.float32))
    _residual: Vector = field(default_factory=lambda: np.zeros(1, np.float32))
    """Shape (1,) and zero while there is none, else that of the model."""
    _integers: Integers = field(default_factory=lambda: np.empty(0, np.int64))
    _pending: ModelArrived | None = None
    _is_training: bool = False
    _is_interrupted: bool = False
    _must_restart: bool = False
    _is_fresh: bool = False
    _steps_unsent: int = 0
    _published_at: float = 0.0
    _step_seconds: float = SLICE_SECONDS
    _is_pulled: bool = False
    _hold_until_clock: int = 0
    _sync: int | None = None
    _hold_until: float | None = None

    def handle(self, event: Event, now: float) -> Ready:
        """Take one event at time ``now`` (seconds of any monotonic clock)."""
        match event:
            case ModelArrived():
                self._pending = event
            case Trained():
                self._take_progress(event)
            case TrainerReplaced():
                self._is_training = self._is_interrupted = False
                self._must_restart = True
            case UpdateSettled():
                self._settle(event, now)
            case SyncNotice(sync, deadline_seconds):
                if self.state is not State.JOINING:
                    self._sync = sync
                    self._hold_until = now + deadline_seconds
                    self.state = State.FLUSHING
            case Pulled():
                self._is_pulled = True
            case Tick():
                pass
        if self._is_training:
            interrupt = not self._is_interrupted and self._should_interrupt(now)
            self._is_interrupted = self._is_interrupted or interrupt
            return Ready(interrupt=interrupt)
        return self._at_boundary(now)

    def _should_interrupt(self, now: float) -> bool:
        is_asked = self.state is State.FLUSHING or self._is_pulled
        can_answer = is_asked and not self.is_in_flight
        must_hold = self.state is State.FLUSHING and self.policy.hold_at_sync
        return self._pending is not None or can_answer or must_hold or self._is_due(now)

    def _take_progress(self, event: Trained) -> None:
        self._is_training = self._is_interrupted = False
        self._local = event.local
        self._integers = event.integers
        self._steps_unsent += event.steps
        self.num_steps += event.steps
        self.examples = event.examples or self.examples
        if event.steps:
            self._step_seconds = event.seconds / event.steps

    def _settle(self, settled: UpdateSettled, now: float) -> None:
        """End the flight; a delta refused as too old returns, damped, to the unsent progress.

        A node that holds for the next version while its update was refused trains on: the version
        waits for an update of it.
        """
        verdict = settled.verdict
        self.is_in_flight = False
        is_refused = verdict.outcome in (Outcome.REJECTED, Outcome.QUARANTINED)
        if is_refused and self.state is State.HOLDING and self._sync is None:
            self._resume()
        if verdict.hold_until_clock > self._slowest:
            self._hold_until_clock = verdict.hold_until_clock
            self._hold_until = now + self.policy.hold_seconds
        if verdict.outcome is Outcome.REJECTED and settled.may_return and self._reference.size:
            refused = codec.decode(settled.payload, self._reference.size)
            self._residual = self._residual + np.float32(self.policy.late_damping) * refused
            self._steps_unsent = max(self._steps_unsent, 1)

    def _at_boundary(self, now: float) -> Ready:
        """Decide what to do between two steps."""
        if self.state is State.JOINING and self._pending is None:
            return Ready()
        publish: Update | None = None
        flushed: int | None = None
        if self.state is State.FLUSHING and not self.is_in_flight:
            publish = self._publish(now, self.policy.flush_factor, self._sync)
            flushed = self._sync if publish is None else None
            if self.policy.hold_at_sync:
                self.state = State.HOLDING
            else:
                self._resume()
        elif self.state is State.TRAINING and not self.is_in_flight and self._is_due(now):
            publish = self._publish(now, 1.0, None)
            if self.policy.hold_after_update:
                self.state = State.HOLDING
                self._hold_until = now + self.policy.hold_seconds
        self._rebase()
        if self.state is State.TRAINING and self._hold_until_clock > self._slowest:
            self.state = State.HOLDING
        if self.state in (State.HOLDING, State.FLUSHING) and self._is_hold_over(now):
            self._resume()
        trains_on = self.state is State.FLUSHING and not self.policy.hold_at_sync
        train = self._train() if self.state is State.TRAINING or trains_on else None
        return Ready(publish, flushed, train, False, None if train else self._hold_until)

    def _rebase(self) -> None:
        """Move onto the pending model, carrying the unsent progress."""
        model, self._pending = self._pending, None
        if model is None:
            return
        self._slowest = model.slowest
        ends_hold = self._sync is None or model.sync == self._sync
        ends_hold = ends_hold and self._hold_until_clock <= self._slowest
        if self.state is State.JOINING or self._local.size == 0:
            self._local = model.vector.copy()
        else:
            self._local = model.vector + (self._local - self._reference)
        self._reference = model.vector
        is_first = self._integers.shape != model.integers.shape
        self._integers = model.integers if is_first else np.maximum(model.integers, self._integers)
        self.version, self.lineage = model.version, model.lineage
        self._must_restart = True
        self._is_fresh = self._is_fresh or model.sync is not None
        if self.state is State.JOINING or (self.state is State.HOLDING and ends_hold):
            self._resume()

    def _resume(self) -> None:
        self.state = State.TRAINING
        self._hold_until_clock = 0
        self._sync = None
        self._hold_until = None

    def _is_hold_over(self, now: float) -> bool:
        return self._hold_until is not None and now >= self._hold_until

    def _is_due(self, now: float) -> bool:
        if self._steps_unsent == 0 or self.is_in_flight:
            return False
        if self._is_pulled:
            return True
        policy = self.policy
        if policy.pace_steps is not None and self._steps_unsent >= policy.pace_steps:
            return True
        if policy.pace_seconds is None:
            return False
        return now >= self._published_at + self._period_seconds()

    def _period_seconds(self) -> float:
        rate = self.tier.rate_bits_per_second
        return self.policy.period_seconds(rate, self._reference.size)

    def _publish(self, now: float, factor: float, sync: int | None) -> Update | None:
        """Encode the unsent progress to the tier's byte budget; None where there is none."""
        if self._steps_unsent == 0:
            return None
        delta = self._local - self._reference + self._residual
        encoded = codec.encode(delta, self._budget_bytes(now, factor))
        reference = self._reference.copy()
        encoded.decoded.add_to(reference)
        self._reference = reference
        encoded.decoded.subtract_from(delta)
        delta *= np.float32(self.policy.residual_decay)
        self._residual = delta
        if not self.policy.is_dense:
            self._local, self._must_restart = self._reference, True
        update = Update(
            node=self.node,
            seq=self.next_seq,
            base_version=self.version,
            examples=self.examples,
            steps=self._steps_unsent,
            layout=self.layout,
            lineage=self.lineage,
            sync=sync,
            integers=tuple(int(value) for value in self._integers),
            payload=encoded.payload,
        )
        self.next_seq += 1
        self.num_updates += 1
        self.is_in_flight = True
        self._steps_unsent = 0
        self._published_at = now
        self._is_pulled = False
        return update

    def _budget_bytes(self, now: float, factor: float) -> int | None:
        if self.policy.is_dense:
            return None
        period = self._period_seconds()
        seconds = min(max(now - self._published_at, period), PERIODS_MAX * period)
        budget = self.tier.budget_bytes(seconds * factor, self.policy.budget_share)
        return max(budget, codec.MINIMUM_BUDGET_BYTES)

    def _train(self) -> TrainOrder:
        steps = max(1, round(SLICE_SECONDS / max(self._step_seconds, 1e-6)))
        if self.policy.pace_steps is not None:
            steps = max(1, min(steps, self.policy.pace_steps - self._steps_unsent))
        start = (self._local, self._integers) if self._must_restart else None
        measures = self.policy.evaluate_on_nodes and self._is_fresh and start is not None
        order = TrainOrder(steps, start, self._is_fresh, measures, self.version)
        self._must_restart = self._is_fresh = False
        self._is_training = True
        return order

    def waiting_for(self) -> Waiting:
        """Say what the node does or waits for, for people and programs."""
        match self.state:
            case State.JOINING:
                return Waiting("model", "the first model")
            case State.TRAINING:
                return Waiting("nothing", f"trains on version {self.version}")
            case State.FLUSHING:
                return Waiting("flush", f"sync {self._sync}: the flush of its progress")
            case State.HOLDING if self._hold_until_clock > self._slowest:
                return Waiting("slowest", f"the slowest node's update {self._hold_until_clock}")
            case State.HOLDING if self._sync is not None:
                return Waiting("sync", f"sync {self._sync}: the synchronisation's model")
            case _:
                return Waiting("version", f"the version after {self.version}")
