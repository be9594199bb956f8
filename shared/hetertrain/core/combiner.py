"""The state machine of an edge gateway: collect a cell's updates, merge them, pass one partial to
the cloud at a time.

::

               enough nodes, or age                       verdict of the cloud
    COLLECTING --------------------> forward, IN FLIGHT ----------------------> COLLECTING
        |  ^ while a partial is in flight, updates gather in the next one;|
        |  | one that is full is sealed, and waits for its turn           |
        +--------------------------------------------------------+ +-- sync announced --> relay to
        the cell --> all flushed or deadline --> forward with the sync's number

It weighs exactly as the cloud would, since the statistics come with each version. An update is
acknowledged once it is durable here; from then on it is the gateway's duty to bring it to the
cloud, exactly once.

While the cloud is out of reach, ``local_cut`` makes the model that its newest checkpoint and all
that is collected give: the cell's own, until the cloud's next version takes its place.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hetertrain import codec
from hetertrain.core.events import (
    Pulled,
    SyncNotice,
    Tick,
    UpdateArrived,
    Waiting,
    waiting_for_updates,
)
from hetertrain.core.gate import Finding, Gate, Outcome, Reason, Seen, Verdict
from hetertrain.core.members import FlushSettled, MemberGone, Members, MemberSeen
from hetertrain.core.policy import Statistics, SyncPolicy, WeightPolicy
from hetertrain.core.update import (
    CONTRIBUTIONS_MAX,
    GROUPS_MAX,
    Checkpoint,
    Contribution,
    Partial,
    Update,
    cut,
)

CELL_SHARE = 0.7
"""The share of a synchronisation's deadline that the cell gets; the rest is for the way to the
cloud.
"""
REFUSED_SECONDS = 30.0
"""A partial that was refused goes up again at the next version, at the latest after so long."""
SEALED_AT = 1 << 15
"""A partial's head names each contribution, in 128 bytes at most: so many fit into a frame's."""
UPDATE_HEAD_BYTES = 512
"""An update takes no more beside its payload, its integer buffers apart."""
COLLECTED_MAX = CONTRIBUTIONS_MAX - SEALED_AT
"""Updates that wait for their turn; with those in flight a local cut's sums cannot overflow."""


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
    is_sealed: bool = False
    """It is the oldest of those that were sealed, not the open one."""


@dataclass(frozen=True, slots=True)
class Ready:
    """What the driver must do after one step, in this order."""

    seals: bool = False
    """The open partial was sealed, before what is persisted now."""
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
    open_bytes: int = 0
    """What the open partial's updates take, one by one."""
    bytes_max: int | None = None
    """Seal the open partial before its updates take more; None: they go as their sum."""
    sealed: deque[Partial] = field(default_factory=deque)
    """Full ones, the oldest first; each goes before the open one. An update takes more of the disk
    than its share of a sum takes of memory, so the inbox's limit bounds these too."""
    is_in_flight: bool = False
    bases_in_flight: frozenset[int] = frozenset()
    """The base versions of the partial in flight; it may come back to be collected again."""
    in_flight: Partial | None = None
    """The partial in flight, where ``makes_local`` asks for it."""
    makes_local: bool = False
    """Keep what ``local_cut`` needs, at the cost of one partial's memory."""
    num_orphaned: int = 0
    """Accepted updates of a lineage that ended before they reached the cloud."""
    _not_before: float = -math.inf
    """The cloud refused a partial: the next one waits so long, or for a version."""
    _first_at: float | None = None
    _sync_closes_at: float | None = None
    _seals: bool = False
    _waiting: Partial | None = None
    """What a local cut needs of the partials in flight and sealed, in one; None: not made yet."""

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
                self.in_flight = self._waiting = None
                settled = verdict
                if verdict.outcome is Outcome.REJECTED and not verdict.known:
                    # It is of another run, or the cloud is full: only a version changes that.
                    self._not_before = now + REFUSED_SECONDS
            case Pulled():
                self._first_at = None if self._first_at is None else -math.inf
            case Tick():
                pass
        forward, flushed = self._close(now)
        seals, self._seals = self._seals, False
        return Ready(seals, persist, verdicts, settled, forward, flushed, notice, self._wake_at())

    def take_up(self, updates: Iterable[Update]) -> Partial:
        """Note after a restart what is in flight, and will have its verdict; return its sum."""
        in_flight = Partial()
        for update in updates:
            key = (update.node, update.seq)
            if update.lineage == self.gate.lineage and key not in in_flight.contributions:
                self._add(in_flight, update)
            self.seen.add((update.node, update.seq))
        self._fly(in_flight)
        return in_flight

    def _add(self, partial: Partial, update: Update) -> None:
        """Add an update that was accepted before."""
        delta = codec.parse(update.payload, self.gate.size)
        statistics = self.statistics.get(update.base_version, Statistics())
        partial.add(update, delta, self.weights, statistics)

    def serve(self, version: int, statistics: Mapping[int, Statistics]) -> None:
        """Note that the cell is served an older version than the newest until there is another:
        what starts from it is no laggard's.
        """
        lag = max(0, self.version - version)
        self.gate = replace(self.gate, max_lag=self.policy.max_lag + lag)
        self.statistics = dict(statistics) | self.statistics

    def _fly(self, partial: Partial) -> None:
        self.is_in_flight, self.bases_in_flight = True, frozenset(partial.groups)
        self._not_before = -math.inf
        self.in_flight = partial if self.makes_local else None
        self._waiting = None

    def seal(self) -> None:
        """Close the open partial, to be forwarded as it is when its turn comes."""
        self.sealed.append(self._take_open())
        self._waiting = None

    def _take_open(self) -> Partial:
        partial, self.open, self.open_bytes, self._first_at = self.open, Partial(), 0, None
        return partial

    def has_use_for(self, update: Update) -> bool:
        """Tell whether an update accepted before is of this run, and not collected yet."""
        key = (update.node, update.seq)
        is_here = any(key in each.contributions for each in (self.open, *self.sealed))
        return update.lineage == self.gate.lineage and not is_here

    def has_room_for(self, updates: Sequence[Update]) -> bool:
        """Tell whether the open partial can take these too; an empty one can."""
        held = len(self.open.contributions)
        if held == 0 or not updates:
            return True
        num_bytes = self.open_bytes + sum(map(_num_bytes, updates))
        is_within = self.bytes_max is None or num_bytes <= self.bytes_max
        num_groups = len(self.open.groups.keys() | {update.base_version for update in updates})
        return held + len(updates) <= SEALED_AT and is_within and num_groups <= GROUPS_MAX

    @property
    def num_collected(self) -> int:
        """How many updates wait for their turn."""
        return len(self.open.contributions) + sum(len(each.contributions) for each in self.sealed)

    def local_cut(self, checkpoint: Checkpoint) -> Checkpoint:
        """Merge all that the cloud is not known to have into its newest checkpoint, as a cut would.

        Each node's mass counts once, so the sum of all rounds' means comes out; made anew from the
        checkpoint each time, nothing adds up twice. The version stays the checkpoint's: what starts
        from this model is to the cloud as what starts from that one, since deltas add. A fresh
        update counts in full.
        """
        assert self.makes_local, "the partial in flight is kept only then"
        if self._waiting is None:
            self._waiting = _together(piece for piece in self._pieces() if piece is not self.open)
        together = _together((self._waiting, self.open))
        newest = max(checkpoint.version, *together.groups)
        made = cut(
            replace(checkpoint, version=newest),
            together,
            self.weights,
            mean_discount=1.0,
            max_lag=self.policy.max_lag,
        )
        return replace(made, version=checkpoint.version)

    def nodes(self) -> set[str]:
        """Return whose work it is that the cloud is not known to have."""
        return {node for each in self._pieces() for node in each.nodes()}

    @property
    def has_work(self) -> bool:
        """Whether there is anything that the cloud is not known to have."""
        return any(each.contributions for each in self._pieces())

    def _pieces(self) -> Iterator[Partial]:
        if self.in_flight is not None:
            yield self.in_flight
        yield from self.sealed
        yield self.open

    def recollect(self, updates: Iterable[Update], now: float) -> None:
        """Take back updates accepted before: after a restart, or from a refused partial."""
        for update in updates:
            if not self.has_use_for(update):
                self.num_orphaned += update.lineage != self.gate.lineage
                continue
            self._add(self.open, update)
            self.open_bytes += _num_bytes(update)
            self.seen.add((update.node, update.seq))
            self._first_at = now

    def _accept(self, update: Update, now: float) -> Verdict:
        examined = self.gate.examine(update, self.version, self.statistics, self.seen)
        if isinstance(examined, Verdict):
            verdict = examined
        elif self.num_collected >= COLLECTED_MAX:
            reason, finding = "the inbox is full", Finding(Reason.FULL, update.base_version)
            verdict = Verdict(update.node, update.seq, Outcome.REJECTED, reason, finding=finding)
        else:
            if not self.has_room_for((update,)):
                self.seal()
                self._seals = True
            self.open.add(update, examined, self.weights, self.statistics[update.base_version])
            self.open_bytes += _num_bytes(update)
            self.seen.add((update.node, update.seq))
            self._first_at = now if self._first_at is None else self._first_at
            verdict = Verdict(update.node, update.seq, Outcome.MERGED)
        self.members.flush(update.node, update.sync)
        return verdict

    def _learn(self, event: VersionAnnounced) -> None:
        if event.lineage != self.gate.lineage:
            # The models that the open updates started from no longer exist anywhere.
            self.gate = replace(self.gate, lineage=event.lineage)
            self.num_orphaned += self.num_collected
            self.sealed.clear()
            self._take_open()
            self.in_flight = self._waiting = None
            self.statistics = {}
        self.version = event.version
        self._not_before = -math.inf
        self.gate = replace(self.gate, max_lag=self.policy.max_lag)
        # Updates may be collected again after a refusal, so the statistics of their bases outlive
        # the gate's need of them.
        needed = self.bases_in_flight.union(self.open.groups, *(p.groups for p in self.sealed))
        oldest = event.version - self.policy.max_lag
        kept = {v: s for v, s in self.statistics.items() if v >= oldest or v in needed}
        self.statistics = kept | dict(event.statistics)
        if event.sync is not None and event.sync == self.members.sync:
            self.members.end_sync()
            self._sync_closes_at = None

    def _close(self, now: float) -> tuple[Forward | None, int | None]:
        """Forward the open partial if it is time; say so when there is nothing to flush."""
        if self.is_in_flight or now < self._not_before:
            return None, None
        if self.sealed:
            return self._forward(self.sealed.popleft(), None, is_sealed=True), None
        sync = self.members.sync
        if sync is not None:
            assert self._sync_closes_at is not None, "every sync has a deadline"
            if self.members.unflushed() and now < self._sync_closes_at:
                return None, None
            self.members.end_sync()
            self._sync_closes_at = None
            return (self._forward_open(sync), None) if self.open.contributions else (None, sync)
        if self._first_at is None:
            return None, None
        enough = len(self.open.nodes()) >= self.policy.nodes_for_cut(self.members.num_active)
        if enough or now >= self._first_at + self.policy.cut_seconds * CELL_SHARE:
            return self._forward_open(None), None
        return None, None

    def _forward_open(self, sync: int | None) -> Forward:
        return self._forward(self._take_open(), sync, is_sealed=False)

    def _forward(self, partial: Partial, sync: int | None, *, is_sealed: bool) -> Forward:
        self._fly(partial)
        return Forward(partial, sync, is_sealed)

    def _wake_at(self) -> float | None:
        if self.is_in_flight:
            return None
        if self.sealed:
            return self._not_before
        if self._sync_closes_at is not None:
            return max(self._sync_closes_at, self._not_before)
        if self._first_at is None:
            return None
        return max(self._first_at + self.policy.cut_seconds * CELL_SHARE, self._not_before)

    def waiting_for(self) -> Waiting:
        """Say what the machine waits for, for people and programs."""
        if self.is_in_flight:
            return Waiting("verdict", "the cloud's verdict on the partial in flight")
        if self._not_before > -math.inf:
            return Waiting("version", "the cloud's next version: it refused the last partial")
        if self.members.sync is not None:
            names = ", ".join(self.members.unflushed()) or "nobody"
            return Waiting("flush", f"sync {self.members.sync}: flush of {names}")
        if not self.members.num_active:
            return Waiting("members", "no active node is connected")
        need = self.policy.nodes_for_cut(self.members.num_active)
        return waiting_for_updates(need, len(self.open.nodes()))


def _num_bytes(update: Update) -> int:
    return len(update.payload) + UPDATE_HEAD_BYTES + 9 * len(update.integers)


def _together(pieces: Iterable[Partial]) -> Partial:
    """Merge partials for a cut that is not kept: of each node its heaviest contribution is named,
    which is all that counts there, and a day's are too many to be counted again each time.
    """
    together = Partial()
    for piece in pieces:
        heaviest: dict[str, Contribution] = {}
        for item in piece.contributions.values():
            if item.node not in heaviest or heaviest[item.node].mass < item.mass:
                heaviest[item.node] = item
        named = {(item.node, item.seq): item for item in heaviest.values()}
        together.absorb(replace(piece, contributions=named))
    return together
