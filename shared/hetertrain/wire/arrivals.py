"""Versions that are arriving at a node: what is broadcast to its tier, and what it is given alone.

Chunks that do not come are asked for, a window at a time, and given up where nobody answers: then
the node's heartbeat says which model it holds, and its aggregator begins anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hetertrain.core.tiers import Tier
from hetertrain.errors import FrameError
from hetertrain.wire.messages import Begin, Chunk, Missing
from hetertrain.wire.transfer import RETRY_SECONDS_MIN, Receiver

MODEL_BYTES_MAX = 1 << 32
RESUME_SECONDS = 1.0
"""A broker that kept our session sends by itself, so soon, what we have not acknowledged."""
ASKED_MAX = 4


@dataclass(slots=True)
class _Arrival:
    """A content that is arriving."""

    receiver: Receiver
    num_expected: int = 0
    """Chunks that are on their way without being asked for."""
    num_asked: int = 0
    """How often in a row the node asked and nothing came."""
    ask_at: float = 0.0


@dataclass(slots=True)
class Arrivals:
    """What one node is receiving, by topic."""

    tier: Tier
    _by_topic: dict[str, _Arrival] = field(default_factory=dict)

    def clear(self) -> None:
        """Give up all of it."""
        self._by_topic.clear()

    def resume(self, now: float) -> None:
        """The connection stands again."""
        for arrival in self._by_topic.values():
            arrival.ask_at = now + RESUME_SECONDS

    def begin(self, topic: str, begin: Begin, now: float, *, is_given: bool) -> None:
        """A content is announced: broadcast, which comes whole, or given, a window at a time.

        Raises:
            FrameError: it is too large.
        """
        if begin.size_bytes > MODEL_BYTES_MAX:
            raise FrameError("size", f"a model of {begin.size_bytes} bytes")
        arrival = self._by_topic.get(topic)
        if arrival is None or arrival.receiver.begin != begin:
            arrival = self._by_topic[topic] = _Arrival(Receiver(begin))
        num_chunks = arrival.receiver.num_chunks
        arrival.num_expected = min(self.tier.window_chunks, num_chunks) if is_given else num_chunks
        arrival.ask_at = now + self._patience_seconds(arrival)

    def take(self, chunk: Chunk, payload: memoryview, now: float) -> tuple[str, bytearray] | None:
        """Take a chunk; return the topic and the content that it completes, if it does.

        Raises:
            FrameError: it does not fit what was announced, or the content is not what was.
        """
        # A missing chunk of a broadcast is sent to this node alone, so the topic does not tell.
        found = ((t, a) for t, a in self._by_topic.items() if a.receiver.begin.seq == chunk.seq)
        topic, arrival = next(found, ("", None))
        if arrival is None:
            return None  # Joined in the middle: the heartbeat tells what is missing.
        content = arrival.receiver.chunk(chunk.index, payload)
        arrival.num_expected -= 1
        arrival.num_asked = 0
        waits = self._patience_seconds(arrival) if arrival.num_expected > 0 else 0.0
        arrival.ask_at = now + waits
        if content is None:
            return None
        del self._by_topic[topic]
        return topic, content

    def due(self, now: float) -> list[tuple[Missing, bytes]]:
        """Return what to ask for now."""
        asks = []
        for topic, arrival in list(self._by_topic.items()):
            if now < arrival.ask_at:
                continue
            arrival.num_asked += 1
            if arrival.num_asked > ASKED_MAX:
                del self._by_topic[topic]
                continue
            arrival.num_expected = self.tier.window_chunks
            arrival.ask_at = now + self._patience_seconds(arrival)
            receiver = arrival.receiver
            asks.append((Missing(seq=receiver.begin.seq), receiver.missing()))
        return asks

    @property
    def wake_at(self) -> float:
        """When to call ``due``."""
        return min((arrival.ask_at for arrival in self._by_topic.values()), default=float("inf"))

    def _patience_seconds(self, arrival: _Arrival) -> float:
        num_bytes = max(arrival.num_expected, 1) * arrival.receiver.begin.chunk_bytes
        return RETRY_SECONDS_MIN + 2 * self.tier.seconds_for(num_bytes)
