"""What the fleet says right now: the newest heartbeat of each node and status of each aggregator.

Kept in memory only: the broker retains heartbeats, and aggregators repeat their status twice a
second. When a node was last seen is written to the database now and then.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from hetertrain.wire.frames import NOT_ELIGIBLE, AggregatorStatus, NodeState

ONLINE_SECONDS = 20.0
"""A node is online until so long after its last heartbeat."""
STATUS_SECONDS_MAX = 5.0
NODES_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class Seen:
    """A node's newest heartbeat."""

    state: NodeState
    at: float
    """Monotonic seconds."""
    change: int
    """Counts all changes in the fleet; this one's number."""


@dataclass(frozen=True, slots=True)
class Heard:
    """An aggregator's newest status."""

    status: AggregatorStatus
    at: float
    change: int


class LiveFleet:
    """The newest of everything; any thread may use it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._nodes: dict[str, Seen] = {}
        self._jobs: dict[tuple[str, str], Heard] = {}
        self._change = 0
        self._unsaved: set[str] = set()
        self.broker_error = "not connected yet"
        """Empty: connected to the broker."""

    def see(self, state: NodeState) -> None:
        """Take a heartbeat."""
        with self._lock:
            if state.node not in self._nodes and len(self._nodes) >= NODES_MAX:
                return
            self._change += 1
            self._nodes[state.node] = Seen(state, self.clock(), self._change)
            if state.is_online:
                self._unsaved.add(state.node)

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
        return seen is not None and self._is_fresh(seen)

    def _is_fresh(self, seen: Seen) -> bool:
        return seen.state.is_online and self.clock() - seen.at < ONLINE_SECONDS

    def num_online(self, job: str | None = None) -> int:
        """Return how many nodes are there, on one job or all."""
        with self._lock:
            nodes = list(self._nodes.values())
        return sum(self._is_fresh(n) and job in (None, n.state.job) for n in nodes)

    def not_eligible(self, job: str) -> Counter[str]:
        """Count a job's vehicles that may not train now, by the rule that does not hold."""
        with self._lock:
            nodes = [seen for seen in self._nodes.values() if seen.state.job == job]
        return Counter(
            # What is the case differs by vehicle, as the speed does.
            seen.state.waiting_for.partition(":")[0]
            for seen in nodes
            if seen.state.doing == NOT_ELIGIBLE and self._is_fresh(seen)
        )

    def metrics(self, job: str) -> dict[str, list[float]]:
        """Return what a job's nodes that are there have measured on their own data, by metric."""
        with self._lock:
            nodes = [seen for seen in self._nodes.values() if seen.state.job == job]
        found: dict[str, list[float]] = {}
        for seen in nodes:
            if self._is_fresh(seen):
                for name, value in seen.state.metrics.items():
                    found.setdefault(name, []).append(value)
        return found

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
