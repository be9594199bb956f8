"""The state machine of a version: accept updates, cut, synchronise. Runs in the cloud; the
simulator drives the same.

::

            updates in, or cut_seconds since the first            all or quorum flushed, or deadline
    OPEN ------------------------------------------> cut -> OPEN        ^
      |   sync_seconds since the last sync, or command                  |
      +------------------------------------------> SYNCING -------------+--> cut, key-frame -> OPEN

While SYNCING, updates are still accepted and nothing is cut: what arrives becomes part of the
sync's version. Nobody is waited for without a deadline. The machine does no IO: each step returns a
``Ready`` that says what to persist, then what to send, then when to wake it.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetertrain.core.events import (
    BundleArrived,
    ContentArrived,
    CutRecord,
    PartialArrived,
    Record,
    SyncNotice,
    SyncOrdered,
    TermsRecord,
    Tick,
    UpdateArrived,
    Waiting,
    waiting_for_updates,
)
from hetertrain.core.gate import (
    Finding,
    Gate,
    Outcome,
    Reason,
    Seen,
    Verdict,
)
from hetertrain.core.members import FlushSettled, MemberGone, Members, MemberSeen
from hetertrain.core.outer import OuterOptimizer
from hetertrain.core.partial_gate import refuse_partial
from hetertrain.core.policy import Statistics, SyncPolicy, WeightPolicy
from hetertrain.core.update import (
    CONTRIBUTIONS_MAX,
    OPEN_GROUPS_MAX,
    Checkpoint,
    Contribution,
    Partial,
    Update,
    contribution_weights,
    cut,
    summarise,
)

FULL = "the open version is full"


Note = MemberSeen | MemberGone | FlushSettled | SyncOrdered | Tick
Event = ContentArrived | Note


@dataclass(frozen=True, slots=True)
class Release:
    """A model to announce: a new version, or the same again as a synchronisation's key-frame."""

    checkpoint: Checkpoint
    sync: int | None
    """The synchronisation that this model ends; it goes out as a key-frame."""
    contributions: tuple[Contribution, ...]
    """What the version was made of."""
    weights: tuple[float, ...] = ()
    """What each of them counted for, in examples."""


@dataclass(frozen=True, slots=True)
class Ready:
    """What the driver must do after one step, in this order."""

    persist: tuple[Record, ...] = ()
    """Durable, in this order, before anything below is done."""
    verdicts: tuple[Verdict, ...] = ()
    notice: SyncNotice | None = None
    release: Release | None = None
    pulls: tuple[str, ...] = ()
    """Nodes to ask for what they have."""
    wake_at: float | None = None
    """When to send a Tick; None: nothing is pending."""


@dataclass(slots=True)
class Aggregator:
    """The open version of one job and the rules of its cut."""

    gate: Gate
    policy: SyncPolicy
    weights: WeightPolicy
    checkpoint: Checkpoint
    is_buffer: NDArray[np.bool_] | None = None
    """Marks the elements that the outer optimiser leaves alone; None: there are none."""
    statistics: dict[int, Statistics] = field(default_factory=dict)
    """By version, for each version that an update may start from."""
    mean_discount: float = 1.0
    seen: Seen = field(default_factory=Seen)
    last_sync: int = 0
    members: Members = field(default_factory=Members)
    open: Partial = field(default_factory=Partial)
    outer: OuterOptimizer | None = None
    _first_at: float | None = None
    _sync_due_at: float | None = None
    _sync_closes_at: float | None = None

    def __post_init__(self) -> None:
        self.statistics.setdefault(self.checkpoint.version, Statistics())
        if self.is_buffer is None:
            self.is_buffer = np.zeros(self.gate.size, np.bool_)
        if self.weights.outer != "none":
            self.outer = OuterOptimizer.start(self.checkpoint.vector)

    def handle(self, event: Event, now: float) -> Ready:
        """Take one event at time ``now`` (seconds of any monotonic clock)."""
        persist: list[Record] = []
        verdicts: tuple[Verdict, ...] = ()
        if isinstance(event, ContentArrived):
            verdicts = (self._accept(event),)
            if verdicts[0].outcome is Outcome.MERGED:
                persist.append(event)
        else:
            self._note(event, now)
        notice = self._begin_sync(now) if self._sync_is_due(now) else None
        release = self._close(now)
        pulls: tuple[str, ...] = ()
        if release is not None and release.contributions:
            persist.append(CutRecord(release.checkpoint.version, release.sync))
            if self.policy.pull_lag is not None:
                pulls = self.members.laggards(self.checkpoint.version, self.policy.pull_lag)
        return Ready(tuple(persist), verdicts, notice, release, pulls, self._wake_at())

    def _note(self, event: Note, now: float) -> None:
        match event:
            case MemberSeen() | MemberGone() | FlushSettled():
                self.members.take(event)
            case SyncOrdered():
                self._sync_due_at = now
            case Tick():
                pass

    def adopt(self, policy: SyncPolicy, weights: WeightPolicy, lineage: str) -> TermsRecord | None:
        """Go by other terms from now on; return what must be made durable first, if anything."""
        terms = TermsRecord(policy, weights, lineage)
        if terms == self.terms:
            return None
        self.policy, self.weights = policy, weights
        self.gate = replace(self.gate, max_lag=policy.max_lag, lineage=lineage)
        if weights.outer == "none":
            self.outer = None
        elif self.outer is None:
            self.outer = OuterOptimizer.start(self.checkpoint.vector)
        return terms

    @property
    def terms(self) -> TermsRecord:
        """What the job goes by."""
        return TermsRecord(self.policy, self.weights, self.gate.lineage)

    def replay(self, record: Record) -> Release | None:
        """Repeat a persisted record after a restart; sums and versions come out identical.

        A cut returns its release, for drivers that keep a history; it was announced before.
        """
        match record:
            case UpdateArrived() | PartialArrived() | BundleArrived():
                self._accept(record)
                return None
            case TermsRecord(policy, weights, lineage):
                self.adopt(policy, weights, lineage)
                return None
            case CutRecord(version, sync):
                release = self._cut(sync)
                assert self.checkpoint.version == version, "the journal repeats what happened"
                self.last_sync = max(self.last_sync, sync or 0)
                return release

    def _accept(self, event: ContentArrived) -> Verdict:
        match event:
            case UpdateArrived(update=update):
                verdict = self._accept_update(update)
                node, sync = update.node, update.sync
            case PartialArrived(node=node, sync=sync):
                verdict = self._accept_partial(event)
            case BundleArrived(node=node, sync=sync):
                verdict = self._accept_bundle(event)
        self.members.flush(node, sync)
        return verdict

    def _merge(
        self, update: Update, gate: Gate, statistics: Mapping[int, Statistics]
    ) -> Verdict | None:
        """Add an admissible update to the open version; return the verdict on another."""
        examined = gate.examine(update, self.checkpoint.version, statistics, self.seen)
        if isinstance(examined, Verdict):
            return examined
        if len(self.open.contributions) >= CONTRIBUTIONS_MAX:
            reason, finding = FULL, Finding(Reason.FULL, update.base_version)
            return Verdict(update.node, update.seq, Outcome.REJECTED, reason, finding=finding)
        self.open.add(update, examined, self.weights, statistics[update.base_version])
        self.seen.add((update.node, update.seq))
        return None

    def _accept_update(self, update: Update) -> Verdict:
        refusal = self._merge(update, self.gate, self.statistics)
        if refusal is not None:
            return refusal
        self.members.worked(update.node, update.base_version)
        hold = 0
        if self.policy.clock_bound is not None:
            hold = self.members.clocks.get(update.node, 0) - self.policy.clock_bound
        hold = hold if hold > self.members.slowest else 0
        return Verdict(update.node, update.seq, Outcome.MERGED, hold_until_clock=hold)

    def _refuse_relayed(
        self, event: PartialArrived | BundleArrived, num_updates: int, bases: Set[int]
    ) -> Verdict | None:
        node, seq = event.node, event.seq
        if (node, seq) in self.seen:
            return Verdict(node, seq, Outcome.DUPLICATE)
        if event.lineage != self.gate.lineage:
            reason = f"bases {event.lineage} are not of this run, {self.gate.lineage}"
            finding = Finding(Reason.LINEAGE)
            return Verdict(node, seq, Outcome.REJECTED, reason, finding=finding)
        num_groups = len(self.open.groups.keys() | bases)
        is_full = num_groups > max(OPEN_GROUPS_MAX, self.policy.max_lag + 2)
        if is_full or len(self.open.contributions) + num_updates > CONTRIBUTIONS_MAX:
            return Verdict(node, seq, Outcome.REJECTED, FULL, finding=Finding(Reason.FULL))
        return None

    def _accept_bundle(self, event: BundleArrived) -> Verdict:
        """Examine each update as if its node had sent it here. The gateway has admitted it in time,
        so none is too late; one that was merged before is passed over.
        """
        refusal = self._refuse_relayed(
            event, len(event.updates), {update.base_version for update in event.updates}
        )
        if refusal is not None:
            return refusal
        gate = replace(self.gate, max_lag=self.checkpoint.version)
        statistics = {**event.statistics, **self.statistics}
        verdicts = [self._merge(update, gate, statistics) for update in event.updates]
        refused = tuple(
            verdict
            for verdict in verdicts
            if verdict is not None and verdict.outcome is not Outcome.DUPLICATE
        )
        self.seen.add((event.node, event.seq))
        self.members.worked(event.node, max(update.base_version for update in event.updates))
        return Verdict(event.node, event.seq, Outcome.MERGED, refused=refused)

    def _accept_partial(self, event: PartialArrived) -> Verdict:
        node, seq, partial = event.node, event.seq, event.partial
        refusal = self._refuse_relayed(event, len(partial.contributions), partial.groups.keys())
        if refusal is not None:
            return refusal
        unusable = refuse_partial(
            partial, self.gate, self.weights, self.checkpoint.version, self.statistics, self.open
        )
        if unusable is not None:
            code, reason = unusable
            finding = Finding(code, max(partial.groups, default=None))
            return Verdict(node, seq, Outcome.QUARANTINED, reason, finding=finding)
        known = tuple(sorted(key for key in partial.contributions if key in self.seen))
        if known:
            reason, finding = "contributions were merged before", Finding(Reason.KNOWN)
            return Verdict(node, seq, Outcome.REJECTED, reason, known, finding=finding)
        self.open.absorb(partial)
        for key in partial.contributions:
            self.seen.add(key)
        self.seen.add((node, seq))
        self.members.worked(node, max(partial.groups))
        return Verdict(node, seq, Outcome.MERGED)

    def _sync_is_due(self, now: float) -> bool:
        if self.members.sync is not None:
            return False
        if self._sync_due_at is None and self.members.num_active and self.policy.sync_seconds:
            self._sync_due_at = now + self.policy.sync_seconds
        return self._sync_due_at is not None and now >= self._sync_due_at

    def _begin_sync(self, now: float) -> SyncNotice:
        self.last_sync += 1
        self.members.begin_sync(self.last_sync)
        self._sync_due_at = None
        self._sync_closes_at = now + self.policy.sync_deadline_seconds
        return SyncNotice(self.last_sync, self.policy.sync_deadline_seconds)

    def _close(self, now: float) -> Release | None:
        """Cut if it is time; end the synchronisation if it is over."""
        if self.members.sync is not None:
            assert self._sync_closes_at is not None, "every sync has a deadline"
            is_over = self.members.share_flushed() >= self.policy.sync_quorum
            if not is_over and now < self._sync_closes_at:
                return None
            sync = self.members.sync
            self.members.end_sync()
            self._sync_closes_at = None
            if self.policy.sync_seconds:
                self._sync_due_at = now + self.policy.sync_seconds
            if self.open.contributions:
                return self._cut(sync)
            return Release(self.checkpoint, sync, ())
        if not self.open.contributions:
            return None
        if self._first_at is None:
            self._first_at = now  # What a replay brought back waits from now on.
        enough = len(self.open.nodes()) >= self.nodes_for_cut
        if enough or now >= self._first_at + self.policy.cut_seconds:
            return self._cut(None)
        return None

    def _cut(self, sync: int | None) -> Release:
        """Make the next version of all that is open; ``sync`` is the synchronisation that ends."""
        closed, version = self.open, self.checkpoint.version
        counted = contribution_weights(
            closed,
            self.weights,
            self.statistics,
            version,
            mean_discount=self.mean_discount,
            max_lag=self.policy.max_lag,
        )
        self.checkpoint = cut(
            self.checkpoint,
            closed,
            self.weights,
            mean_discount=self.mean_discount,
            max_lag=self.policy.max_lag,
        )
        if sync is not None and self.outer is not None:
            assert self.is_buffer is not None, "set at the start"
            vector = self.outer.step(self.checkpoint.vector, self.weights, self.is_buffer)
            self.checkpoint = replace(self.checkpoint, vector=vector)
        frozen, self.mean_discount = summarise(
            closed,
            self.weights,
            self.statistics[version],
            version,
            mean_discount=self.mean_discount,
            max_lag=self.policy.max_lag,
        )
        self.statistics[version + 1] = frozen
        self.statistics.pop(version - self.policy.max_lag, None)
        self.open = Partial()
        self._first_at = None
        contributions = tuple(sorted(closed.contributions.values()))
        return Release(self.checkpoint, sync, contributions, counted)

    def _wake_at(self) -> float | None:
        if self._sync_closes_at is not None:
            return self._sync_closes_at
        times = [self._sync_due_at]
        if self._first_at is not None:
            times.append(self._first_at + self.policy.cut_seconds)
        return min((time for time in times if time is not None), default=None)

    def seconds_to_sync(self, now: float) -> float | None:
        """Return the time until the next synchronisation, or until the running one must end."""
        at = self._sync_due_at if self._sync_closes_at is None else self._sync_closes_at
        return None if at is None else max(0.0, at - now)

    def seconds_to_cut(self, now: float) -> float | None:
        """Return the time until the open version is cut, however few its updates are; None: it has
        none yet, or a synchronisation ends it.
        """
        if self._first_at is None or self.members.sync is not None:
            return None
        return max(0.0, self._first_at + self.policy.cut_seconds - now)

    @property
    def nodes_for_cut(self) -> int:
        """How many nodes' updates cut the open version at once."""
        return self.policy.nodes_for_cut(self.members.num_active)

    def waiting_for(self) -> Waiting:
        """Say what the machine waits for, for people and programs."""
        if self.members.sync is not None:
            names = ", ".join(self.members.unflushed()) or "nobody"
            return Waiting("flush", f"sync {self.members.sync}: flush of {names}")
        if not self.members.num_active:
            return Waiting("members", "no active node is connected")
        have = len(self.open.nodes())
        return waiting_for_updates(self.nodes_for_cut, have)

    def snapshot(self) -> dict[str, Any]:
        """Return the state beside the model at a cut, as plain data for its metadata."""
        assert not self.open.contributions, "a snapshot is taken right after a cut"
        return {
            "statistics": {
                str(v): [s.examples_cap, s.reference_steps, s.norm_median]
                for v, s in self.statistics.items()
            },
            "mean_discount": self.mean_discount,
            "seen": self.seen.to_plain(),
            "last_sync": self.last_sync,
            "terms": asdict(self.terms),
        }

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Return the arrays that belong to a snapshot, by name."""
        return {} if self.outer is None else self.outer.arrays()

    def restore(
        self, snapshot: Mapping[str, Any], arrays: Mapping[str, NDArray[np.generic]]
    ) -> None:
        """Take back what ``snapshot`` and ``arrays`` returned beside this machine's checkpoint."""
        if self.outer is not None and arrays:
            self.outer = OuterOptimizer.from_arrays(arrays)
        self.statistics = {int(v): Statistics(*s) for v, s in snapshot["statistics"].items()}
        self.mean_discount = float(snapshot["mean_discount"])
        self.seen = Seen.from_plain(snapshot["seen"])
        self.last_sync = int(snapshot["last_sync"])
