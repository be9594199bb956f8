"""What a gateway tells the control plane of its cell, where that has a broker of its own: there
nobody else hears its nodes.

::

    link down ──connected──> due at once ──told──> waits ──some node changed, and the pause is over,
        ^                        ^                   │       or REPEAT_SECONDS──> due
        └───────── from each ────┴───────────────────┘

Counters alone are no change: in a cell at work they grow with each heartbeat. A report of a large
cell on a thin link is followed by a pause that keeps it to ``LINK_SHARE`` of the link.

Pure: whoever uses it brings the time, and publishes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hetertrain.wire import topics
from hetertrain.wire.downlink import Downlink
from hetertrain.wire.events import Outgoing
from hetertrain.wire.frames import header_bytes, pack
from hetertrain.wire.messages import (
    MEMBER_PARTS_MAX,
    MEMBERS_PART_MAX,
    CellMembers,
    Member,
    NodeState,
)
from hetertrain.wire.uplink import Uplink

CHANGED_SECONDS = 5.0
"""Changes are told so often at most."""
REPEAT_SECONDS = 30.0
"""And all of it at least so often: the control plane keeps it in memory only."""
PART_BYTES_MAX = 60 << 10
LINK_SHARE = 0.05
DOING_CHARACTERS, WAITING_CHARACTERS = 64, 320
"""So much has room for a rule and what holds it up."""
Looks = dict[str, tuple[str, str, str, int]]


class CellReport:
    """Says who is in the cell when that is due; the thread that owns the downlink owns it too."""

    def __init__(self, downlink: Downlink, first_number: int) -> None:
        """Count reports from ``first_number``: higher than any of an earlier life."""
        self._downlink = downlink
        self._number = first_number
        self._told: Looks | None = None
        """What the nodes did that were told of last; None: nobody was since the link stands."""
        self._told_at = 0.0
        self._pause_seconds = 0.0

    def tick(self, uplink: Uplink, now: float) -> tuple[Outgoing, ...]:
        """Return the report's parts, where one is due."""
        if not uplink.is_connected:
            self._told = None
            return ()
        looks = {
            name: (state.tier, state.doing, state.waiting_for, state.active)
            for name, state in self._downlink.nodes.items()
        }
        if not self._is_due(looks, now):
            return ()
        self._told, self._told_at = looks, now
        self._number += 1
        job, cell = self._downlink.job, self._downlink.cell
        members = self._members(now)
        groups = list(parts_of(members))
        if len(groups) > MEMBER_PARTS_MAX:
            # Who is there matters more than what each waits for.
            brief = [replace(member, waiting_for="") for member in members]
            groups = list(parts_of(brief))[:MEMBER_PARTS_MAX]
        frames = [
            pack(
                CellMembers(
                    job=job,
                    cell=cell,
                    number=self._number,
                    part=part,
                    parts=len(groups),
                    members=members,
                )
            )
            for part, members in enumerate(groups)
        ]
        num_bytes = sum(map(len, frames))
        seconds = uplink.tier.seconds_for(num_bytes) / LINK_SHARE
        self._pause_seconds = min(REPEAT_SECONDS, max(CHANGED_SECONDS, seconds))
        return tuple(Outgoing(topics.members(job, cell), frame) for frame in frames)

    def _is_due(self, looks: Looks, now: float) -> bool:
        silence = now - self._told_at
        if self._told is None or silence >= REPEAT_SECONDS:
            return True
        return silence >= self._pause_seconds and looks != self._told

    def _members(self, now: float) -> list[Member]:
        nodes = self._downlink.nodes
        return [member_of(nodes[n], self._downlink.silence_of(n, now)) for n in sorted(nodes)]


def member_of(state: NodeState, seconds_ago: float) -> Member:
    """Return what is told of a node; long texts are cut."""
    return Member(
        node=state.node,
        tier=state.tier,
        doing=state.doing[:DOING_CHARACTERS],
        waiting_for=state.waiting_for[:WAITING_CHARACTERS],
        active=state.active,
        version=state.version,
        updates=state.updates,
        bytes_up=state.bytes_up,
        bytes_down=state.bytes_down,
        backlog_updates=state.backlog_updates,
        backlog_bytes=state.backlog_bytes,
        seconds_ago=round(seconds_ago, 1),
    )


def parts_of(members: Sequence[Member]) -> Iterator[tuple[Member, ...]]:
    """Cut a cell into messages of at most ``PART_BYTES_MAX``; an empty cell is one, too."""
    part: list[Member] = []
    num_bytes = 0
    for member in members:
        size = len(
            header_bytes(CellMembers(job="", cell="", number=0, part=0, parts=1, members=(member,)))
        )
        if part and (num_bytes + size > PART_BYTES_MAX or len(part) == MEMBERS_PART_MAX):
            yield tuple(part)
            part, num_bytes = [], 0
        part.append(member)
        num_bytes += size
    yield tuple(part)
