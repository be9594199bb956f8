"""What a gateway has accepted and the cloud has not settled: the updates in its inbox, and the
partial of some of them that is in flight.

The inbox's mark of a record is 0 while it is collected, below 0 while the partial that it is in
waits sealed (the newest has the least), and the partial's number while that is in flight. An update
leaves the inbox once the cloud has said that it has it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

from hetertrain.core.combiner import COLLECTED_MAX, Combiner, Forward
from hetertrain.core.gate import Verdict
from hetertrain.core.update import Update
from hetertrain.logging import Logger
from hetertrain.transport.inbox import Inbox
from hetertrain.transport.outbox import Outbox
from hetertrain.wire.contents import pack_update, unpack_update
from hetertrain_edge.forwarding import Forwarding, Passage

INBOX_BYTES_MAX = 1 << 30
COMMIT_BYTES_MAX = 4 << 20
"""Accepted updates share a commit of the inbox up to so many bytes."""
_OPEN = 0
_SEALED_MIN = -(1 << 62)


class Backlog:
    """The stores of one gateway; one thread owns them."""

    def __init__(
        self,
        directory: Path,
        first_seq: int,
        forwarding: Forwarding,
        log: Logger,
        inbox_bytes_max: int = INBOX_BYTES_MAX,
    ) -> None:
        """Open the stores; a new outbox counts from ``first_seq``.

        Raises:
            StoreError: the directory is not usable.
        """
        self.inbox = Inbox(directory / "inbox.db")
        self.outbox = Outbox(directory / "outbox.db", first_seq)
        self.inbox_bytes_max = inbox_bytes_max
        self._forwarding = forwarding
        self._sealed: deque[int] = deque()
        """The marks of the sealed partials' updates, the oldest first."""
        self._accepted: list[bytes | bytearray] = []
        """Since the last commit; nothing was said of them yet."""
        self._accepted_bytes = 0
        for name, damage in (("inbox", self.inbox.damage), ("outbox", self.outbox.damage)):
            if damage:
                log.error(f"{name}_damaged", damage=damage)

    def recover(self, combiner: Combiner, now: float) -> tuple[int, bytes] | None:
        """Take up what a crash interrupted; return the partial in flight, if there is one."""
        pending = self.outbox.pending()
        self._recollect(combiner, None if pending is None else pending.seq, now)
        if pending is None:
            return None
        in_flight = combiner.take_up(self._updates(pending.seq))
        self._forwarding.take_up(pending.seq, pending.content, in_flight)
        return pending.seq, pending.content

    def _recollect(self, combiner: Combiner, in_flight: int | None, now: float) -> None:
        """Take back all that is not in flight, section by section, the oldest first."""
        marks = self.inbox.marks()
        for mark in list(marks):
            if mark > _OPEN and mark != in_flight:
                # The crash came before its partial was in the outbox.
                marks.insert(0, min(marks[0], _OPEN) - 1)
                self.inbox.remark(mark, marks[0])
        for mark in reversed([mark for mark in marks if mark < _OPEN]):
            combiner.recollect(self._updates(mark), now)
            if combiner.open.contributions:
                combiner.seal()
                self._sealed.append(mark)
            else:
                self.inbox.forget(mark, mark)
        combiner.recollect(self._updates(_OPEN), now)

    def _updates(self, mark: int) -> Iterator[Update]:
        return map(unpack_update, self.inbox.read(mark, mark))

    @property
    def is_commit_due(self) -> bool:
        """Whether so much was accepted that it should be made durable now."""
        return self._accepted_bytes >= COMMIT_BYTES_MAX

    def accept(self, contents: list[bytes | bytearray]) -> None:
        """Take updates in; they are durable after the next ``commit``."""
        self._accepted.extend(contents)
        self._accepted_bytes += sum(len(content) for content in contents)

    def commit(self) -> None:
        """Make durable what was accepted.

        Raises:
            StoreError: the disk is full or broken; so for all that follow.
        """
        accepted, self._accepted, self._accepted_bytes = self._accepted, [], 0
        self.inbox.append(_OPEN, accepted)

    def seal(self) -> None:
        """Set the collected updates apart: their partial was sealed."""
        self._sealed.append(min(self._sealed, default=_OPEN) - 1)
        self.inbox.remark(_OPEN, self._sealed[-1])

    def forget(self) -> None:
        """Forget all that was collected: the models that it was learnt on no longer exist."""
        self.inbox.forget(_SEALED_MIN, _OPEN)
        self._sealed.clear()

    def store(
        self, forward: Forward, combiner: Combiner, budget_bytes: int | None
    ) -> tuple[int, bytes]:
        """Put a partial into the outbox; its updates stay in the inbox until the cloud has it."""
        seq, mark = self.outbox.next_seq, self._sealed[0] if forward.is_sealed else _OPEN
        passage = Passage(
            seq,
            forward.sync,
            forward.partial,
            combiner.gate.lineage,
            combiner.statistics,
            budget_bytes,
            self.inbox.bytes_of(mark),
        )
        content = self._forwarding.write(passage, self.inbox.read(mark, mark))
        self.inbox.remark(mark, seq)
        if forward.is_sealed:
            self._sealed.popleft()
        self.outbox.put(seq, content)
        return seq, content

    def take_back(self, verdict: Verdict, combiner: Combiner) -> list[Update]:
        """Collect the updates of a refused partial again, but for those that the cloud has; return
        them, to be merged again.
        """
        kept = [u for u in self._updates(verdict.seq) if (u.node, u.seq) not in verdict.known]
        # After a kill some are there already; and another run has no use for any.
        missing = [u for u in kept if combiner.has_use_for(u)]
        if not combiner.has_room_for(missing):
            combiner.seal()
            self.seal()
        self.inbox.append(_OPEN, [pack_update(update) for update in missing])
        return kept

    def settle(self, seq: int) -> None:
        """End the duty for a partial and its updates."""
        self.inbox.forget(seq, seq)
        self.outbox.settle(seq)

    def room_bytes(self, combiner: Combiner) -> int:
        """Return how much may be taken in; an empty inbox takes an update of any size."""
        if combiner.num_collected >= COLLECTED_MAX:
            return 0
        held_bytes = self.inbox.num_bytes + self._accepted_bytes
        room_bytes = max(0, self.inbox_bytes_max - held_bytes)
        if not held_bytes:
            room_bytes = max(room_bytes, 8 * combiner.gate.size + (1 << 20))
        return room_bytes

    def close(self) -> None:
        """Close the stores."""
        self.inbox.close()
        self.outbox.close()
