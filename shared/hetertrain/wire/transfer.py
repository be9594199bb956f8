"""Moving one payload in chunks: the sender's and the receiver's state machine.

::

    sender     Begin, chunks (at most ``window`` without the broker's acknowledgement) ... verdict
    -> done
                 ^--------- no verdict in time, or reconnected: Begin again -----------'
    receiver   Begin -> collect -> all there and digest right -> content
                         '-- Begin again while chunks are missing --> Missing(bitmap)

The broker's acknowledgement only opens the window; a transfer is done when the application's
verdict is in. So it survives brokers that drop, connections that break, and a restart of either
end: chunks are idempotent.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from hetertrain.errors import FrameError
from hetertrain.wire.frames import Begin, Chunk, Message

RETRY_SECONDS_MIN = 5.0


def content_digest(content: bytes | bytearray) -> str:
    """Digest a whole content (BLAKE2b, 128 bits)."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


@dataclass(slots=True)
class Sender:
    """Sends one content; ``due`` yields what may go out now."""

    node: str
    seq: int
    content: bytes
    chunk_bytes: int
    window: int
    airtime_seconds: float
    """How long the whole content takes on this link: the patience before asking again."""
    _todo: deque[int | None] = field(default_factory=deque)
    """Chunk indices to send; None stands for Begin."""
    _num_unacknowledged: int = 0
    _ask_at: float = 0.0

    def __post_init__(self) -> None:
        self._todo.extend((None, *range(self.num_chunks)))

    @property
    def num_chunks(self) -> int:
        """How many chunks the content has."""
        return -(-len(self.content) // self.chunk_bytes)

    def due(self, now: float) -> list[tuple[Message, memoryview]]:
        """Return what the window allows now; each must be reported as ``delivered``."""
        if not self._todo and now >= self._ask_at and not self._num_unacknowledged:
            self._todo.append(None)
        messages: list[tuple[Message, memoryview]] = []
        while self._todo and self._num_unacknowledged < self.window:
            messages.append(self._message(self._todo.popleft()))
            self._num_unacknowledged += 1
            self._ask_at = now + self._patience_seconds
        return messages

    def delivered(self) -> None:
        """Note that the broker has taken one message."""
        self._num_unacknowledged = max(0, self._num_unacknowledged - 1)

    def reconnected(self) -> None:
        """Start with a question: what had arrived before the connection broke is not sent again."""
        self._num_unacknowledged = 0
        self._todo.clear()
        self._todo.append(None)

    def missing(self, bitmap: bytes | memoryview) -> None:
        """Send the chunks again whose bits are set."""
        bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")[: self.num_chunks]
        waiting = {index for index in self._todo if index is not None}
        self._todo.extend(int(i) for i in np.flatnonzero(bits) if int(i) not in waiting)

    @property
    def ask_at(self) -> float:
        """When ``due`` has something to say again, if nothing arrives before."""
        return self._ask_at

    @property
    def _patience_seconds(self) -> float:
        return RETRY_SECONDS_MIN + 2 * self.airtime_seconds

    def _message(self, index: int | None) -> tuple[Message, memoryview]:
        if index is None:
            begin = Begin(
                node=self.node,
                seq=self.seq,
                size_bytes=len(self.content),
                chunk_bytes=self.chunk_bytes,
                digest=content_digest(self.content),
            )
            return begin, memoryview(b"")
        start = index * self.chunk_bytes
        chunk = memoryview(self.content)[start : start + self.chunk_bytes]
        return Chunk(node=self.node, seq=self.seq, index=index), chunk


@dataclass(slots=True)
class Receiver:
    """Collects the chunks of one announced content; memory is the content's size, and bounded by
    the caller.
    """

    begin: Begin
    _content: bytearray = field(default_factory=bytearray)
    _have: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._content = bytearray(self.begin.size_bytes)

    @property
    def num_chunks(self) -> int:
        """How many chunks were announced."""
        return -(-self.begin.size_bytes // self.begin.chunk_bytes)

    def chunk(self, index: int, data: memoryview) -> bytearray | None:
        """Take one chunk; return the content when it is whole.

        Raises:
            FrameError: the chunk does not fit (``chunk``), or the whole is not what was announced
            (``content``);
                in the latter case all chunks are forgotten.
        """
        start = index * self.begin.chunk_bytes
        expected = min(self.begin.chunk_bytes, self.begin.size_bytes - start)
        if index >= self.num_chunks or len(data) != expected:
            raise FrameError(
                "chunk", f"chunk {index} of {len(data)} bytes does not fit its transfer"
            )
        self._content[start : start + expected] = data
        self._have.add(index)
        if len(self._have) < self.num_chunks:
            return None
        if content_digest(self._content) != self.begin.digest:
            self._have.clear()
            raise FrameError("content", "the chunks are not what was announced")
        return self._content

    def missing(self) -> bytes:
        """Return the bitmap of the chunks that have not arrived (lowest bit first)."""
        bits = np.ones(self.num_chunks, np.uint8)
        bits[list(self._have)] = 0
        return np.packbits(bits, bitorder="little").tobytes()
