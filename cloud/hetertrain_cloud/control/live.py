"""What the fleet says right now: the newest heartbeat of each node and status of each aggregator.

Kept in memory only: the broker retains heartbeats, and aggregators repeat their status twice a
second. When a node was last seen, and what happened to it, is written to the database now and then.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, replace

from hetertrain.wire.messages import NOT_ELIGIBLE, AggregatorStatus, CellMembers, NodeState
from hetertrain_cloud.control.cells import REPORT_SECONDS_MAX, Cell, state_of
from hetertrain_cloud.control.changes import Change, PendingChanges, changes, doing_of, held_by

ONLINE_SECONDS = 20.0
"""A node is online until so long after its last heartbeat."""
DIRECT_SECONDS = 8.0
"""A gateway's word counts against a node's own heartbeat when that is so much older."""
STATUS_SECONDS_MAX = 5.0
NODES_MAX = 1_000_000
TALLY_SECONDS_MAX = 1.0
TALLY_NODES_MIN = 1000
"""Fewer are counted each time: that takes less than a millisecond."""
TALLY_SHARE = 0.02
"""Of one core's time goes into counting a large fleet at most: one of 10,000 nodes is counted about
twice a second.
"""
OFFLINE = "offline"


@dataclass(frozen=True, slots=True)
class Seen:
    """A node's newest heartbeat."""

    state: NodeState
    at: float
    """Monotonic seconds."""
    change: int
    """Counts all changes in the fleet; this one's number."""
    via: str = ""
    """The gateway that told of it; empty: the node itself did."""


@dataclass(frozen=True, slots=True)
class Heard:
    """An aggregator's newest status."""

    status: AggregatorStatus
    at: float
    change: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFilter:
    """What is asked of a node's newest heartbeat; None: anything."""

    doing: str | None = None
    tier: str | None = None
    cell: str | None = None
    job: str | None = None
    is_online: bool | None = None
    held_by: str | None = None
    """The rule or budget by which it may not train, as ``changes.held_by`` says it."""

    @property
    def asks_nothing(self) -> bool:
        """Whether every node matches, heard of or not."""
        return self == LiveFilter()

    def matches(self, state: NodeState | None, is_online: bool) -> bool:
        """Tell whether a node does that said this, or nothing yet, and is there or not."""
        if self.is_online not in (None, is_online):
            return False
        if state is None:
            said = (self.tier, self.cell, self.job, self.held_by)
            return self.doing in (None, OFFLINE) and not any(said)
        return (
            self.tier in (None, state.tier)
            and self.cell in (None, state.cell)
            and self.job in (None, state.job)
            and (self.doing is None or self._is_doing(self.doing, state, is_online))
            and (self.held_by is None or self._is_held_by(self.held_by, state, is_online))
        )

    @staticmethod
    def _is_held_by(rule: str, state: NodeState, is_online: bool) -> bool:
        is_held = is_online and state.doing == NOT_ELIGIBLE
        return is_held and rule == held_by(state.waiting_for)

    def _is_doing(self, doing: str, state: NodeState, is_online: bool) -> bool:
        if is_online:
            return doing == doing_of(state)
        # Of one that took its leave, the reason counts too: that it closed its link.
        return doing == OFFLINE or (not state.is_online and doing == doing_of(state))


@dataclass(slots=True)
class Tally:
    """The fleet, counted; by job where it says so."""

    at: float
    seconds: float = 0.0
    """How long this is good for."""
    online: Counter[str] = field(default_factory=Counter)
    not_eligible: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Vehicles that may not train, by the rule that does not hold."""
    metrics: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, state: NodeState) -> None:
        """Count a node that is there."""
        self.online[state.job] += 1
        if state.doing == NOT_ELIGIBLE:
            self.not_eligible[state.job][held_by(state.waiting_for)] += 1
        if state.metrics:
            found = self.metrics.setdefault(state.job, {})
            for name, value in state.metrics.items():
                found.setdefault(name, []).append(value)


class LiveFleet:
    """The newest of everything; any thread may use it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._nodes: dict[str, Seen] = {}
        self._jobs: dict[tuple[str, str], Heard] = {}
        self._cells: dict[str, Cell] = {}
        """Cells with a broker of their own, by gateway."""
        self._change = 0
        self._unsaved: set[str] = set()
        self._tally: Tally | None = None
        self._up: set[str] = set()
        """Who was last known to be online; while we hear nothing, nobody is taken to have gone."""
        self._agents: dict[str, str] = {}
        """What each node's agent called itself when it last did."""
        self._pending = PendingChanges()
        self._listens_since = 0.0
        self._broker_error = "not connected yet"

    @property
    def broker_error(self) -> str:
        """Why the broker cannot be heard; empty: connected to it."""
        return self._broker_error

    @broker_error.setter
    def broker_error(self, error: str) -> None:
        if self._broker_error and not error:
            self._listens_since = self.clock()
        self._broker_error = error

    @property
    def has_settled(self) -> bool:
        """Whether the broker was heard for so long that who is not heard is not there, and who is
        heard for the first time has only just come.
        """
        return self._has_listened(ONLINE_SECONDS)

    def _has_listened(self, seconds: float) -> bool:
        listens = self.clock() - self._listens_since
        return not self._broker_error and listens >= seconds

    def see(self, state: NodeState) -> None:
        """Take a heartbeat, and note what it says that is new."""
        with self._lock:
            before, now = self._nodes.get(state.node), self.clock()
            is_seen_through = before is not None and before.via and self._is_fresh(before, now)
            # A last will may come long after its node has gone over to a gateway.
            if state.is_online or not is_seen_through:
                self._put(state, now)

    def _put(self, state: NodeState, at: float, via: str = "") -> None:
        before = self._nodes.get(state.node)
        if before is None and len(self._nodes) >= NODES_MAX:
            return
        self._change += 1
        seen = self._nodes[state.node] = Seen(state, at, self._change, via)
        self._follow(before, seen)

    def expects(self, report: CellMembers) -> bool:
        """Tell whether a gateway's report is worth looking up who is in it."""
        return self._cells.get(report.cell, Cell()).expects(report, self.clock())

    def hear_members(self, report: CellMembers, known: Container[str]) -> None:
        """Take a part of what a gateway tells of its cell, as far as nodes are in ``known``."""
        with self._lock:
            now = self.clock()
            cell = self._cells.setdefault(report.cell, Cell())
            if not cell.expects(report, now):
                return
            cell.begin(report, now)
            for member in report.members:
                is_there = member.seconds_ago < ONLINE_SECONDS
                if is_there and member.node in known and cell.add(member.node):
                    at = now - member.seconds_ago
                    if self._is_news(member.node, report.cell, at, now):
                        self._put(state_of(report, member), at, report.cell)
            for node in cell.end(report):
                seen = self._nodes.get(node)
                if seen is not None and seen.via == report.cell and seen.state.is_online:
                    state = replace(
                        seen.state,
                        is_online=False,
                        active=0,
                        doing=OFFLINE,
                        waiting_for="the node, which its gateway does not hear",
                    )
                    self._put(state, seen.at, report.cell)

    def _is_news(self, node: str, gateway: str, at: float, now: float) -> bool:
        """Whether a gateway's word of a node counts more than what was heard of it before."""
        before = self._nodes.get(node)
        if before is None or before.via == gateway or not self._is_fresh(before, now):
            return before is None or at >= before.at
        return at > before.at + (0.0 if before.via else DIRECT_SECONDS)

    def has_own_broker(self, gateway: str) -> bool:
        """Whether a gateway tells of its cell, since nobody else hears that."""
        cell = self._cells.get(gateway)
        return cell is not None and self.clock() < cell.at + REPORT_SECONDS_MAX

    def _follow(self, before: Seen | None, seen: Seen) -> None:
        """Note what a heartbeat says that is new."""
        state = seen.state
        # Who is in a gateway's first report need not have come just now.
        is_settled = self._has_listened(REPORT_SECONDS_MAX) if seen.via else self.has_settled
        if before is not None or is_settled:
            said = None if before is None else before.state
            was_up, label = state.node in self._up, self._agents.get(state.node, "")
            for kind, text in changes(said, state, was_up=was_up, label=label):
                self._pending.add(Change(state.node, kind, text, seen.at))
        if state.label:
            self._agents[state.node] = state.label
        if state.is_online:
            self._up.add(state.node)
            self._unsaved.add(state.node)
        else:
            self._up.discard(state.node)

    def note(self, node: str, kind: str, text: str) -> None:
        """Note what happened to a node that it does not say itself."""
        with self._lock:
            self._pending.add(Change(node, kind, text, self.clock()))

    def hear(self, status: AggregatorStatus) -> None:
        """Take an aggregator's status."""
        with self._lock:
            self._change += 1
            self._jobs[status.job, status.cell] = Heard(status, self.clock(), self._change)

    def node(self, name: str) -> Seen | None:
        """Return a node's newest heartbeat."""
        return self._nodes.get(name)

    def is_online(self, name: str) -> bool:
        """Whether a node is there."""
        seen = self._nodes.get(name)
        return seen is not None and self._is_fresh(seen, self.clock())

    def _is_fresh(self, seen: Seen, now: float) -> bool:
        if not seen.via:
            return seen.state.is_online and now - seen.at < ONLINE_SECONDS
        cell, gateway = self._cells[seen.via], self._nodes.get(seen.via)
        speaks = gateway is not None and not gateway.via and self._is_fresh(gateway, now)
        return seen.state.is_online and speaks and now < cell.at + REPORT_SECONDS_MAX

    def states(self, names: Iterable[str]) -> list[tuple[NodeState | None, bool]]:
        """Return what each node said last (None: nothing yet), and whether it is there."""
        now, nodes = self.clock(), self._nodes
        found = [nodes.get(name) for name in names]
        return [
            (None, False) if seen is None else (seen.state, self._is_fresh(seen, now))
            for seen in found
        ]

    def online_by_job(self) -> Counter[str]:
        """Return how many nodes are there, by the job that they work on, a moment ago."""
        return Counter(self._count().online)

    def num_online(self, job: str | None = None) -> int:
        """Return how many nodes are there, on one job or all, a moment ago."""
        online = self._count().online
        return online.total() if job is None else online[job]

    def online(self) -> list[str]:
        """Return the nodes that are there."""
        now = self.clock()
        with self._lock:
            return [name for name, seen in self._nodes.items() if self._is_fresh(seen, now)]

    def not_eligible(self, job: str) -> Counter[str]:
        """Count a job's vehicles that may not train, a moment ago, by the rule that does not
        hold.
        """
        return self._count().not_eligible.get(job, Counter())

    def metrics(self, job: str) -> dict[str, list[float]]:
        """Return what a job's nodes that are there have measured on their own data, by metric."""
        return self._count().metrics.get(job, {})

    def _count(self) -> Tally:
        """Return the fleet, counted now or a moment ago."""
        began, tally = self.clock(), self._tally
        is_large = len(self._nodes) >= TALLY_NODES_MIN
        if is_large and tally is not None and began - tally.at < tally.seconds:
            return tally
        with self._lock:
            nodes = list(self._nodes.values())
        tally = Tally(began)
        for seen in nodes:
            if self._is_fresh(seen, began):
                tally.add(seen.state)
        tally.seconds = min(TALLY_SECONDS_MAX, (self.clock() - began) / TALLY_SHARE)
        self._tally = tally
        return tally

    def job(self, job: str, cell: str) -> AggregatorStatus | None:
        """Return an aggregator's status, if it is new."""
        heard = self._jobs.get((job, cell))
        if heard is None or self.clock() - heard.at > STATUS_SECONDS_MAX:
            return None
        return heard.status

    def since(self, change: int) -> tuple[int, list[NodeState], list[AggregatorStatus]]:
        """Return what changed after ``change``, and the number to ask with next."""
        with self._lock:
            if change == self._change:
                return change, [], []
            nodes = [seen.state for seen in self._nodes.values() if seen.change > change]
            jobs = [heard.status for heard in self._jobs.values() if heard.change > change]
            return self._change, nodes, jobs

    def take_unsaved(self) -> set[str]:
        """Return who was seen since the last call."""
        with self._lock:
            unsaved, self._unsaved = self._unsaved, set()
        return unsaved

    def take_changes(self) -> list[Change]:
        """Return what happened to nodes and is due to be written down, the oldest first; who fell
        silent is noticed here.
        """
        with self._lock:
            now = self.clock()
            if self.has_settled:
                silent = [name for name in self._up if not self._is_fresh(self._nodes[name], now)]
                self._up.difference_update(silent)
                for name in silent:
                    seen = self._nodes[name]
                    through = f" through {seen.via}" if seen.via else ""
                    text = f"nothing was heard of it{through} for {now - seen.at:.0f} s"
                    self._pending.add(Change(name, OFFLINE, text, now))
            return self._pending.take(now)

    def give_back(self, unwritten: list[Change]) -> None:
        """Keep changes that could not be written until the next call."""
        with self._lock:
            for change in unwritten:
                self._pending.put_back(change)

    @property
    def num_changes_lost(self) -> int:
        """How many changes were dropped since the start because too many waited."""
        return self._pending.num_lost
