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
from hetertrain.wire.messages import Begin, Chunk, Message

RETRY_SECONDS_MIN = 5.0
FRAME_BYTES_MAX = 1024
"""What topic, packet and frame add to a chunk at most."""
CHUNK_BYTES_MIN = 256
"""The least that the protocol allows."""
MEASURE_SECONDS = 2.0
"""A slow transfer is measured so often, not only at its end."""
WINDOW_LIMITED = 0.8
"""Near a window per round trip, it is the window that limits, and not the link."""
ROUND_TRIP_SHARE_MAX = 0.75
"""Of a span, at most so much counts as waiting for the round trip."""


def chunk_bytes_for(chunk_bytes: int, packet_bytes_max: int | None) -> int:
    """Return a tier's chunk size, or less where the broker takes no packets so large."""
    if packet_bytes_max is None:
        return chunk_bytes
    return max(CHUNK_BYTES_MIN, min(chunk_bytes, packet_bytes_max - FRAME_BYTES_MAX))


def content_digest(*parts: bytes | bytearray | memoryview) -> str:
    """Digest a whole content (BLAKE2b, 128 bits)."""
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


@dataclass(frozen=True, slots=True)
class Content:
    """Bytes in two parts, so that a model's numbers need not be copied behind their head."""

    head: bytes
    body: memoryview

    def __len__(self) -> int:
        return len(self.head) + len(self.body)

    def part(self, start: int, stop: int) -> bytes | memoryview:
        """Return a range of it."""
        border = len(self.head)
        if start >= border:
            return self.body[start - border : stop - border]
        return self.head[start:stop] + bytes(self.body[: max(0, stop - border)])

    def digest(self) -> str:
        """Digest it as a whole."""
        return content_digest(self.head, self.body)


@dataclass(frozen=True, slots=True)
class Goodput:
    """How fast chunks were taken over a span of time."""

    bits_per_second: float
    num_chunks: int


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
    relays: bool = False
    """The content is of other nodes' work."""
    _todo: deque[int | None] = field(default_factory=deque)
    """Chunk indices to send; None stands for Begin."""
    _unacknowledged: deque[tuple[int, float]] = field(default_factory=deque)
    """Bytes (0: a Begin) and time of each message that the broker has not taken yet."""
    _ask_at: float = 0.0
    _round_trip_seconds: float = 0.0
    _span_began_at: float | None = None
    """When the first chunk went out that is not measured yet."""
    _span_bytes: int = 0
    _span_chunks: int = 0

    def __post_init__(self) -> None:
        self._todo.extend((None, *range(self.num_chunks)))

    @property
    def num_chunks(self) -> int:
        """How many chunks the content has."""
        return -(-len(self.content) // self.chunk_bytes)

    @property
    def num_unacknowledged(self) -> int:
        """How many messages the broker has not taken yet."""
        return len(self._unacknowledged)

    def due(self, now: float) -> list[tuple[Message, memoryview]]:
        """Return what the window allows now; each must be reported as ``delivered``."""
        if not self._todo and now >= self._ask_at and not self._unacknowledged:
            self._todo.append(None)
        messages: list[tuple[Message, memoryview]] = []
        while self._todo and self.num_unacknowledged < self.window:
            message, chunk = self._message(self._todo.popleft())
            if chunk and self._span_began_at is None:
                self._span_began_at, self._span_bytes, self._span_chunks = now, 0, 0
            messages.append((message, chunk))
            self._unacknowledged.append((len(chunk), now))
            self._ask_at = now + self._patience_seconds
        return messages

    def delivered(self, now: float) -> Goodput | None:
        """Note that the broker has taken one message; return what can be said of the link."""
        if not self._unacknowledged:
            return None
        num_bytes, sent_at = self._unacknowledged.popleft()
        if not num_bytes or self._span_began_at is None:
            self._round_trip_seconds = now - sent_at
            return None
        self._span_bytes += num_bytes
        self._span_chunks += 1
        is_last = not self._todo and not self._unacknowledged
        if not is_last and now < self._span_began_at + MEASURE_SECONDS:
            return None
        goodput = Goodput(self._bits_per_second(now - self._span_began_at), self._span_chunks)
        self._span_began_at = None if is_last else now
        self._span_bytes = self._span_chunks = 0
        return goodput

    def _bits_per_second(self, span: float) -> float:
        """Return the link's rate, from what went over it in ``span`` seconds."""
        span, waits = max(span, 1e-6), self._round_trip_seconds
        window_bytes = self.window * self.chunk_bytes
        if self._span_bytes * waits > WINDOW_LIMITED * window_bytes * max(span - waits, 0.0):
            # The link idled while a full window waited for its acknowledgement.
            waits *= -(-self._span_chunks // self.window)
        return 8 * self._span_bytes / (span - min(waits, ROUND_TRIP_SHARE_MAX * span))

    def reconnected(self) -> None:
        """Start with a question: what had arrived before the connection broke is not sent again."""
        self._unacknowledged.clear()
        self._span_began_at = None
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
                relays=self.relays,
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
