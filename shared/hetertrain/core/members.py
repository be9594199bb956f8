"""Who is there: the members of a fleet or cell, and who has flushed for the running
synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Members:
    """The nodes that speak to one aggregator, with how many active nodes each stands for (a
    gateway: its cell's).
    """

    active: dict[str, int] = field(default_factory=dict)
    sync: int | None = None
    """The running synchronisation, if any."""
    flushed: set[str] = field(default_factory=set)

    def seen(self, node: str, num_active: int) -> None:
        """Note that a node is there."""
        self.active[node] = num_active

    def gone(self, node: str) -> None:
        """Forget a node that said goodbye or fell silent."""
        self.active.pop(node, None)

    @property
    def num_active(self) -> int:
        """How many training nodes are there, those behind gateways included."""
        return sum(self.active.values())

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
