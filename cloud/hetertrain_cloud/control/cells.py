"""Who is in cells that the control plane does not hear itself: what their gateways tell, report by
report, with bounds on what a hostile one can have it keep.

::

    another number, a second after the last ──> open ──parts, each later than the one before──> open
                                                  └──the last part──> whole: who is not in it left

Pure: whoever uses it brings the time and a lock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hetertrain.wire.messages import CellMembers, Member, NodeState

REPORT_SECONDS_MIN = 1.0
"""Reports that follow each other faster are dropped."""
REPORT_SECONDS_MAX = 75.0
"""A gateway repeats its report each half minute; this lets one be lost."""
CELL_NODES_MAX = 10_000


@dataclass(slots=True)
class Cell:
    """A cell as its gateway tells of it."""

    number: int = -1
    """Of the newest report."""
    at: float = 0.0
    """When that began, in monotonic seconds."""
    part: int = -1
    """The newest of its parts."""
    members: dict[str, int] = field(default_factory=dict)
    """The report that each node was in last."""

    def expects(self, report: CellMembers, now: float) -> bool:
        """Tell whether a part is to be taken, or comes too soon or again."""
        if report.part >= report.parts:
            return False
        if report.number == self.number:
            return report.part > self.part
        return self.number < 0 or now >= self.at + REPORT_SECONDS_MIN

    def begin(self, report: CellMembers, now: float) -> None:
        """Take a part that is expected."""
        if report.number != self.number:
            self.number, self.at = report.number, now
        self.part = report.part

    def add(self, node: str) -> bool:
        """Note that a node is in the newest report; False: the cell has too many."""
        if node not in self.members and len(self.members) >= CELL_NODES_MAX:
            return False
        self.members[node] = self.number
        return True

    def end(self, report: CellMembers) -> list[str]:
        """Return who is in the cell no more, and forget them; nobody, before the last part."""
        if report.part < report.parts - 1:
            return []
        gone = [node for node, number in self.members.items() if number != self.number]
        for node in gone:
            del self.members[node]
        return gone


def state_of(report: CellMembers, member: Member) -> NodeState:
    """Return a member's heartbeat, as far as its gateway tells of it."""
    return NodeState(
        node=member.node,
        job=report.job,
        cell=report.cell,
        tier=member.tier,
        role="vehicle",
        is_online=True,
        active=member.active,
        version=member.version,
        doing=member.doing,
        waiting_for=member.waiting_for,
        updates=member.updates,
        bytes_up=member.bytes_up,
        bytes_down=member.bytes_down,
        backlog_updates=member.backlog_updates,
        backlog_bytes=member.backlog_bytes,
    )
