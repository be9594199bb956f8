"""Virtual time and a virtual network: links that are slow, lose, repeat, reorder and break, and one
broker between them.

It stands where ``transport.mqtt`` and a real broker stand. What it keeps of MQTT is what the parts
rely on and suffer from: at-least-once delivery in order while a connection stands, persistent
sessions with a bounded queue that drops silently beyond it, retained messages, last wills, and an
acknowledgement that means no more than that the broker has the frame.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hetertrain.transport import mqtt
from hetertrain.transport.mqtt import FRAME_OVERHEAD_BYTES
from hetertrain.wire.events import Outgoing
from hetertrain.wire.frames import payload_share

BROKER_QUEUE_MAX = 1000
"""Messages that the broker keeps for one client; Mosquitto's default."""
REORDER_SECONDS = 0.5
WILL_SECONDS = 45.0
"""A broker notices a dead connection after one and a half keepalives."""


@dataclass(slots=True)
class Clock:
    """Virtual seconds, and what is to happen when."""

    now: float = 0.0
    _heap: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _count: int = 0

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Have ``action`` called at ``time``, never before now; equal times in order of asking."""
        self._count += 1
        heapq.heappush(self._heap, (max(time, self.now), self._count, action))

    def step(self, until: float) -> bool:
        """Do the next thing; False where there is none before ``until``."""
        if not self._heap or self._heap[0][0] > until:
            self.now = max(self.now, until)
            return False
        self.now, _, action = heapq.heappop(self._heap)
        action()
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkShape:
    """How a link behaves, in each direction alike."""

    rate_bits_per_second: float
    latency_seconds: float = 0.02
    loss: float = 0.0
    """Probability that the broker acknowledges a frame and then drops it."""
    duplication: float = 0.0
    reordering: float = 0.0
    """Probability that a frame is delayed past those behind it."""


class _Pipe:
    """One direction of a link: frames leave one after the other at the link's rate."""

    def __init__(self, broker: VirtualBroker, shape: LinkShape, limit: int) -> None:
        self.is_open = False
        self.bytes_sent = 0
        self.num_dropped = 0
        self.queue: deque[tuple[float, Callable[[bool], None]]] = deque()
        self._broker, self._clock, self._shape = broker, broker.clock, shape
        self._limit = limit
        self._epoch = 0
        self._is_busy = False

    def send(self, frame: bytes, arrive: Callable[[bool], None]) -> None:
        """Queue a frame; ``arrive`` hears at the other end whether it is a repetition."""
        if len(self.queue) >= self._limit:
            self.num_dropped += 1
            return
        share = payload_share(frame)
        num_bytes = len(frame) + FRAME_OVERHEAD_BYTES + (self._broker.scale - 1) * share
        self.queue.append((num_bytes, arrive))
        self._pump()

    def open(self) -> None:
        self.is_open = True
        self._pump()

    def close(self) -> None:
        """Break: what was under way is sent again once the pipe is open."""
        self.is_open = self._is_busy = False
        self._epoch += 1

    def clear(self) -> None:
        self.queue.clear()

    def _pump(self) -> None:
        if not self.is_open or self._is_busy or not self.queue:
            return
        self._is_busy = True
        num_bytes, _ = self.queue[0]
        epoch = self._epoch
        seconds = num_bytes * 8 / self._shape.rate_bits_per_second
        self._clock.at(self._clock.now + seconds, lambda: self._sent(epoch))

    def _sent(self, epoch: int) -> None:
        if epoch != self._epoch or not self.queue:
            return
        num_bytes, arrive = self.queue.popleft()
        self.bytes_sent += int(num_bytes)
        self._is_busy = False
        self._pump()
        shape, rng = self._shape, self._broker.rng
        at = self._clock.now + shape.latency_seconds
        if self._broker.is_calm:
            self._clock.at(at, lambda: arrive(False))
            return
        if shape.loss and rng.random() < shape.loss:
            self.num_dropped += 1
            self._clock.at(at, lambda: arrive(True))
            return
        if shape.reordering and rng.random() < shape.reordering:
            at += rng.random() * REORDER_SECONDS
        self._clock.at(at, lambda: arrive(False))
        if shape.duplication and rng.random() < shape.duplication:
            later = at + rng.random() * REORDER_SECONDS
            self._clock.at(later, lambda: arrive(False))


class VirtualLink:
    """One client's connection to the broker; a ``hetertrain.cell.Link``."""

    def __init__(
        self,
        broker: VirtualBroker,
        client_id: str,
        subscriptions: Iterable[str],
        on_event: Callable[[mqtt.Event], None],
        shape: LinkShape,
        will: Outgoing | None = None,
    ) -> None:
        self.client_id = client_id
        self.subscriptions = tuple(subscriptions)
        self.will = will
        self.is_connected = False
        self.fuse: int | None = None
        """Break down before so many more publications: a crash in the middle of a step."""
        self._broker = broker
        self._on_event = on_event
        self._shape = shape
        self._epoch = 0
        self._up = broker.pipe(shape)
        self._down = broker.session(client_id, shape)

    @property
    def bytes_up(self) -> int:
        """Bytes that left this client."""
        return self._up.bytes_sent

    @property
    def bytes_down(self) -> int:
        """Bytes that reached this client."""
        return self._down.bytes_sent

    @property
    def num_queued(self) -> int:
        """Frames that wait for the link here."""
        return len(self._up.queue)

    def connect(self) -> None:
        """Connect after a round trip."""
        self._epoch += 1
        epoch = self._epoch
        clock = self._broker.clock
        clock.at(clock.now + 2 * self._shape.latency_seconds, lambda: self._connected(epoch))

    def disconnect(self, reason: str, *, is_abrupt: bool = False) -> None:
        """Break the connection; the broker notices at once where the process died."""
        self._epoch += 1
        if not self.is_connected:
            return
        self.is_connected = False
        self._up.close()
        self._down.close()
        self._broker.left(self, 0.1 if is_abrupt else WILL_SECONDS)
        if not is_abrupt:
            self._on_event(mqtt.Disconnected(reason))

    def publish(self, outgoing: tuple[Outgoing, ...]) -> None:
        """Queue frames; they wait while the link is down."""
        for item in outgoing:
            if self.fuse is not None:
                if self.fuse <= 0:
                    raise SimulatedCrashError(self.client_id)
                self.fuse -= 1
            self._up.send(item.frame, self._arrival(item))

    def resubscribe(self, subscriptions: tuple[str, ...]) -> None:
        """Subscribe to these topics and no others."""
        self.subscriptions = subscriptions
        self._broker.resubscribed()

    def receive(self, event: mqtt.Event) -> None:
        """Hand an event to the client."""
        self._on_event(event)

    def _connected(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        self.is_connected = True
        self._up.open()
        self._down.open()
        self._broker.joined(self)
        self._on_event(mqtt.Connected())

    def _arrival(self, item: Outgoing) -> Callable[[bool], None]:
        clock = self._broker.clock
        is_acknowledged = False

        def arrive(is_lost: bool) -> None:
            nonlocal is_acknowledged
            if not is_acknowledged and item.token is not None:
                is_acknowledged = True
                token, epoch = item.token, self._epoch
                at = clock.now + self._shape.latency_seconds
                clock.at(at, lambda: self._acknowledged(token, epoch))
            if not is_lost:
                self._broker.route(item)

        return arrive

    def _acknowledged(self, token: int, epoch: int) -> None:
        if epoch == self._epoch and self.is_connected:
            self._on_event(mqtt.Delivered(token))


class SimulatedCrashError(Exception):
    """A process died in the middle of a step."""


class VirtualBroker:
    """Routes frames by topic."""

    def __init__(
        self,
        clock: Clock,
        rng: random.Random,
        message_scale: float,
        on_delivery: Callable[[str, str, bytes], None] | None,
    ) -> None:
        """``message_scale``: bytes that a byte of a model stands for; headers count as they are.

        ``on_delivery`` hears of each delivery, for the digest of which there must be one.
        """
        self.clock = clock
        self.is_calm = False
        """Nothing is lost, repeated or reordered any more."""
        self.num_frames = 0
        self._on_delivery = on_delivery
        self.rng = rng
        self.scale = message_scale
        self._online: dict[str, VirtualLink] = {}
        self._known: dict[str, VirtualLink] = {}
        self._sessions: dict[str, _Pipe] = {}
        self._retained: dict[str, bytes] = {}
        self._routes: dict[str, tuple[str, ...]] = {}
        self._digest = hashlib.blake2b(digest_size=16)

    def pipe(self, shape: LinkShape) -> _Pipe:
        """Make one direction of a link."""
        return _Pipe(self, shape, limit=1 << 20)

    def session(self, client_id: str, shape: LinkShape) -> _Pipe:
        """Return what the broker keeps for a client, over reconnections and restarts."""
        if client_id not in self._sessions:
            self._sessions[client_id] = _Pipe(self, shape, BROKER_QUEUE_MAX)
        return self._sessions[client_id]

    def _note(self, client_id: str, topic: str, frame: bytes) -> None:
        self.num_frames += 1
        if self._on_delivery is not None:
            self._digest.update(f"{self.clock.now!r} {client_id} {topic} ".encode())
            self._digest.update(frame)
            self._on_delivery(client_id, topic, frame)

    def digest(self) -> str:
        """Digest the time, receiver, topic and bytes of every delivery so far."""
        return self._digest.hexdigest()

    def joined(self, link: VirtualLink) -> None:
        """Take a client in, and give it what is retained."""
        if self._known.get(link.client_id) is not link:
            self._routes.clear()
        self._online[link.client_id] = self._known[link.client_id] = link
        for topic, frame in self._retained.items():
            if any(matches(pattern, topic) for pattern in link.subscriptions):
                self._deliver(link.client_id, topic, frame)

    def resubscribed(self) -> None:
        """Note that a client's subscriptions are others now."""
        self._routes.clear()

    def left(self, link: VirtualLink, will_after_seconds: float) -> None:
        """Note that a client's connection broke; its will follows, unless it is back before."""
        self._online.pop(link.client_id, None)
        self.clock.at(self.clock.now + will_after_seconds, lambda: self._publish_will(link))

    def _publish_will(self, link: VirtualLink) -> None:
        if link.will is not None and link.client_id not in self._online:
            self.route(link.will)

    def restart(self, *, loses_sessions: bool) -> None:
        """Break all connections; a broker without a database of its own forgets what it held."""
        if loses_sessions:
            for session in self._sessions.values():
                session.clear()
            self._retained.clear()
        for link in list(self._online.values()):
            link.disconnect("the broker restarts")

    def route(self, item: Outgoing) -> None:
        """Pass a frame to all who subscribed to its topic, or keep it for them."""
        if item.retain:
            self._retained[item.topic] = item.frame
        if item.topic not in self._routes:
            self._routes[item.topic] = tuple(
                link.client_id
                for link in self._known.values()
                if any(matches(pattern, item.topic) for pattern in link.subscriptions)
            )
        for client_id in self._routes[item.topic]:
            self._deliver(client_id, item.topic, item.frame)

    def _deliver(self, client_id: str, topic: str, frame: bytes) -> None:
        def arrive(is_lost: bool) -> None:
            link = self._online.get(client_id)
            if link is not None and not is_lost:
                self._note(client_id, topic, frame)
                link.receive(mqtt.Received(topic, frame))

        self._sessions[client_id].send(frame, arrive)

    def num_queued(self) -> int:
        """Return the longest queue of a session."""
        return max((len(session.queue) for session in self._sessions.values()), default=0)


def matches(pattern: str, topic: str) -> bool:
    """Tell whether a topic filter with ``+`` matches a topic."""
    wanted, found = pattern.split("/"), topic.split("/")
    return len(wanted) == len(found) and all(
        w in ("+", f) for w, f in zip(wanted, found, strict=True)
    )
