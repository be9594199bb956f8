"""The state machine of an edge gateway: collect a cell's updates, merge them, pass one partial to
the cloud at a time.

::

               enough nodes, or age                       verdict of the cloud
    COLLECTING --------------------> forward, IN FLIGHT ----------------------> COLLECTING
        |  ^ while a partial is in flight, updates gather in the next one |
        +--------------------------------------------------------+ +-- sync announced --> relay to
        the cell --> all flushed or deadline --> forward with the sync's number

It weighs exactly as the cloud would, since the statistics come with each version. An update is
acknowledged once it is durable here; from then on it is the gateway's duty to bring it to the
cloud, exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from hetertrain import codec
from hetertrain.core.aggregator import Pulled, SyncNotice, Tick, UpdateArrived, Waiting
from hetertrain.core.gate import Gate, Outcome, Seen, Verdict
from hetertrain.core.members import FlushSettled, MemberGone, Members, MemberSeen
from hetertrain.core.policy import Statistics, SyncPolicy, WeightPolicy
from hetertrain.core.update import CONTRIBUTIONS_MAX, Partial, Update

CELL_SHARE = 0.7
"""The share of a synchronisation's deadline that the cell gets; the rest is for the way to the
cloud.
"""


@dataclass(frozen=True, slots=True)
class VersionAnnounced:
    """A version arrived, with the statistics of those that updates may start from."""

    version: int
    statistics: Mapping[int, Statistics]
    sync: int | None
    lineage: str = ""


@dataclass(frozen=True, slots=True)
class PartialSettled:
    """The cloud's verdict on the partial in flight."""

    verdict: Verdict


Event = (
    Pulled
    | MemberSeen
    | MemberGone
    | UpdateArrived
    | FlushSettled
    | VersionAnnounced
    | SyncNotice
    | PartialSettled
    | Tick
)


@dataclass(frozen=True, slots=True)
class Forward:
    """A partial to hand to the outbox, and the synchronisation that it flushes for."""

    partial: Partial
    sync: int | None


@dataclass(frozen=True, slots=True)
class Ready:
    """What the driver must do after one step, in this order."""

    persist: tuple[UpdateArrived, ...] = ()
    """Durable before the verdicts go out."""
    verdicts: tuple[Verdict, ...] = ()
    settled: Verdict | None = None
    """The partial in flight is settled: merged or duplicate ends the duty for its updates,
    otherwise they are collected again by ``recollect``, without those that the verdict names as
    known."""
    forward: Forward | None = None
    flushed: int | None = None
    """The cell has nothing (more) to flush for this synchronisation."""
    notice: SyncNotice | None = None
    wake_at: float | None = None


@dataclass(slots=True)
class Combiner:
    """The open partial of one cell and the rules of its forwarding."""

    gate: Gate
    policy: SyncPolicy
    weights: WeightPolicy
    version: int = -1
    """The newest version known; -1 before the first."""
    statistics: dict[int, Statistics] = field(default_factory=dict)
    seen: Seen = field(default_factory=Seen)
    members: Members = field(default_factory=Members)
    open: Partial = field(default_factory=Partial)
    is_in_flight: bool = False
    bases_in_flight: frozenset[int] = frozenset()
    """The base versions of the partial in flight; it may come back to be collected again."""
    num_orphaned: int = 0
    """Accepted updates of a lineage that ended before they reached the cloud."""
    _first_at: float | None = None
    _sync_closes_at: float | None = None

    def handle(self, event: Event, now: float) -> Ready:
        """Take one event at time ``now`` (seconds of any monotonic clock)."""
        persist: tuple[UpdateArrived, ...] = ()
        verdicts: tuple[Verdict, ...] = ()
        settled: Verdict | None = None
        notice: SyncNotice | None = None
        match event:
            case MemberSeen() | MemberGone() | FlushSettled():
                self.members.take(event)
            case UpdateArrived(update=update):
                verdict = self._accept(update, now)
                verdicts = (verdict,)
                if verdict.outcome is Outcome.MERGED:
                    persist = (event,)
            case VersionAnnounced():
                self._learn(event)
            case SyncNotice(sync, deadline_seconds):
                notice = SyncNotice(sync, deadline_seconds * CELL_SHARE)
                self.members.begin_sync(sync)
                self._sync_closes_at = now + notice.deadline_seconds
            case PartialSettled(verdict):
                self.is_in_flight, self.bases_in_flight = False, frozenset()
                settled = verdict
            case Pulled():
                self._first_at = None if self._first_at is None else -math.inf
            case Tick():
                pass
        forward, flushed = self._close(now)
        return Ready(persist, verdicts, settled, forward, flushed, notice, self._wake_at())

    def recollect(self, updates: Iterable[Update], now: float) -> None:
        """Take back updates accepted before: after a restart, or from a refused partial."""
        for update in updates:
            if (update.node, update.seq) in self.open.contributions:
                continue
            if update.lineage != self.gate.lineage:
                self.num_orphaned += 1
                continue
            delta = codec.parse(update.payload, self.gate.size)
            statistics = self.statistics.get(update.base_version, Statistics())
            self.open.add(update, delta, self.weights, statistics)
            self.seen.add((update.node, update.seq))
            self._first_at = now

    def _accept(self, update: Update, now: float) -> Verdict:
        examined = self.gate.examine(update, self.version, self.statistics, self.seen)
        if isinstance(examined, Verdict):
            verdict = examined
        elif len(self.open.contributions) >= CONTRIBUTIONS_MAX:
            verdict = Verdict(update.node, update.seq, Outcome.REJECTED, "the open partial is full")
        else:
            self.open.add(update, examined, self.weights, self.statistics[update.base_version])
            self.seen.add((update.node, update.seq))
            self._first_at = now if self._first_at is None else self._first_at
            verdict = Verdict(update.node, update.seq, Outcome.MERGED)
        self.members.flush(update.node, update.sync)
        return verdict

    def _learn(self, event: VersionAnnounced) -> None:
        if event.lineage != self.gate.lineage:
            # The models that the open updates started from no longer exist anywhere.
            self.gate = replace(self.gate, lineage=event.lineage)
            self.num_orphaned += len(self.open.contributions)
            self.open, self._first_at = Partial(), None
            self.statistics = {}
        self.version = event.version
        # Updates may be collected again after a refusal, so the statistics of their bases outlive
        # the gate's need of them.
        needed = self.bases_in_flight | self.open.groups.keys()
        oldest = event.version - self.policy.max_lag
        kept = {v: s for v, s in self.statistics.items() if v >= oldest or v in needed}
        self.statistics = kept | dict(event.statistics)
        if event.sync is not None and event.sync == self.members.sync:
            self.members.end_sync()
            self._sync_closes_at = None

    def _close(self, now: float) -> tuple[Forward | None, int | None]:
        """Forward the open partial if it is time; say so when there is nothing to flush."""
        if self.is_in_flight:
            return None, None
        sync = self.members.sync
        if sync is not None:
            assert self._sync_closes_at is not None, "every sync has a deadline"
            if self.members.unflushed() and now < self._sync_closes_at:
                return None, None
            self.members.end_sync()
            self._sync_closes_at = None
            return (self._forward(sync), None) if self.open.contributions else (None, sync)
        if self._first_at is None:
            return None, None
        enough = len(self.open.nodes()) >= self.policy.nodes_for_cut(self.members.num_active)
        if enough or now >= self._first_at + self.policy.cut_seconds * CELL_SHARE:
            return self._forward(None), None
        return None, None

    def _forward(self, sync: int | None) -> Forward:
        partial, self.open = self.open, Partial()
        self._first_at = None
        self.is_in_flight, self.bases_in_flight = True, frozenset(partial.groups)
        return Forward(partial, sync)

    def _wake_at(self) -> float | None:
        if self.is_in_flight:
            return None
        if self._sync_closes_at is not None:
            return self._sync_closes_at
        if self._first_at is None:
            return None
        return self._first_at + self.policy.cut_seconds * CELL_SHARE

    def waiting_for(self) -> Waiting:
        """Say what the machine waits for, for people and programs."""
        if self.is_in_flight:
            return Waiting("verdict", "the cloud's verdict on the partial in flight")
        if self.members.sync is not None:
            names = ", ".join(self.members.unflushed()) or "nobody"
            return Waiting("flush", f"sync {self.members.sync}: flush of {names}")
        if not self.members.num_active:
            return Waiting("members", "no active node is connected")
        need = self.policy.nodes_for_cut(self.members.num_active)
        return Waiting("updates", f"{need} nodes' updates needed, {len(self.open.nodes())} present")
