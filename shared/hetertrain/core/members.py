"""Who is there: the members of a fleet or cell, how far each has come, and who has flushed for the
running synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class MemberSeen:
    """A node or gateway is there; a gateway stands for ``num_active`` nodes of its cell."""

    node: str
    num_active: int = 1


@dataclass(frozen=True, slots=True)
class MemberGone:
    """A node or gateway said goodbye, or was silent for too long."""

    node: str


@dataclass(frozen=True, slots=True)
class FlushSettled:
    """A node has nothing (more) to flush for this synchronisation."""

    node: str
    sync: int


@dataclass(slots=True)
class Members:
    """The nodes that speak to one aggregator, with how many active nodes each stands for (a
    gateway: its cell's).
    """

    active: dict[str, int] = field(default_factory=dict)
    sync: int | None = None
    """The running synchronisation, if any."""
    flushed: set[str] = field(default_factory=set)
    clocks: dict[str, int] = field(default_factory=dict)
    """How many updates each sent; one who joins begins where the slowest is."""
    bases: dict[str, int] = field(default_factory=dict)
    """The version that each one's last work started from, or that it was asked for it."""

    def take(self, event: MemberSeen | MemberGone | FlushSettled) -> None:
        """Take what a cell heard of its members."""
        match event:
            case MemberSeen(node, num_active):
                self.seen(node, num_active)
            case MemberGone(node):
                self.gone(node)
            case FlushSettled(node, sync):
                self.flush(node, sync)

    def seen(self, node: str, num_active: int) -> None:
        """Note that a node is there."""
        self.active[node] = num_active
        if node not in self.clocks:
            self.clocks[node] = self.slowest

    def gone(self, node: str) -> None:
        """Forget a node that said goodbye or fell silent."""
        self.active.pop(node, None)
        self.clocks.pop(node, None)
        self.bases.pop(node, None)

    @property
    def num_active(self) -> int:
        """How many training nodes are there, those behind gateways included."""
        return sum(self.active.values())

    @property
    def slowest(self) -> int:
        """The clock of the slowest node."""
        return min(self.clocks.values(), default=0)

    def worked(self, node: str, base_version: int) -> None:
        """Note an update."""
        if node in self.active:
            self.clocks[node] += 1
            self.bases[node] = max(base_version, self.bases.get(node, 0))

    def laggards(self, version: int, lag: int) -> tuple[str, ...]:
        """Return those whose last work is older than ``lag``, each once until it works again."""
        late = sorted(n for n in self.active if version - self.bases.get(n, version) > lag)
        for node in late:
            self.bases[node] = version
        return tuple(late)

    def begin_sync(self, sync: int) -> None:
        """Start to count flushes."""
        self.sync = sync
        self.flushed = set()

    def end_sync(self) -> None:
        """Stop counting flushes."""
        self.sync = None
        self.flushed = set()

    def flush(self, node: str, sync: int | None) -> None:
        """Note that a node has flushed for ``sync``; one for another synchronisation is ignored."""
        if sync is not None and sync == self.sync:
            self.flushed.add(node)

    def unflushed(self) -> list[str]:
        """Return the members whose flush is awaited, in order."""
        return sorted(n for n, count in self.active.items() if count > 0 and n not in self.flushed)

    def share_flushed(self) -> float:
        """Return the share of active nodes that have flushed; 1 where nobody is there."""
        total = self.num_active
        done = sum(count for node, count in self.active.items() if node in self.flushed)
        return done / total if total else 1.0
