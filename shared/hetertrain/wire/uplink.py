"""A node's end of the conversation with its aggregator: offers updates, follows versions, obeys
notices.

A vehicle speaks so to its gateway or to the cloud, and a gateway so to the cloud. The machine sees
frames and time and returns frames to send and what happened; the driver owns the connection and the
outbox.

It holds the chain of models of its tier: a whole model starts the chain, a difference continues it
if it applies to the model that is held; when it does not, or when chunks are lost, the next
heartbeat says which model is held and the aggregator's next broadcast to the tier is a whole one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from hetertrain import codec
from hetertrain.core.aggregator import Pulled
from hetertrain.core.gate import Verdict
from hetertrain.core.layout import Integers, Vector
from hetertrain.core.tiers import Tier
from hetertrain.core.update import model_digest
from hetertrain.errors import FrameError, LayoutError, PayloadError
from hetertrain.wire import topics
from hetertrain.wire.contents import JobTerms, model_terms, read_verdict, unpack_as
from hetertrain.wire.frames import (
    Begin,
    Chunk,
    Flushed,
    Message,
    Missing,
    ModelContent,
    NodeState,
    Pull,
    Sync,
    VerdictMessage,
    pack,
    unpack,
)
from hetertrain.wire.transfer import Receiver, Sender

HEARTBEAT_SECONDS = 2.0
MODEL_BYTES_MAX = 1 << 32


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One frame to publish."""

    topic: str
    frame: bytes
    retain: bool = False
    token: int | None = None
    """Where set, the driver reports when the broker has taken the frame."""


@dataclass(frozen=True, slots=True)
class ModelReceived:
    """A version, whole and decoded."""

    version: int
    vector: Vector
    integers: Integers
    sync: int | None
    terms: JobTerms


@dataclass(frozen=True, slots=True)
class SyncAnnounced:
    """A synchronisation begins."""

    sync: int
    deadline_seconds: float


@dataclass(frozen=True, slots=True)
class Settled:
    """The verdict on the content that was offered."""

    verdict: Verdict
    content: bytes


@dataclass(frozen=True, slots=True)
class FrameRefused:
    """A frame that could not be used, by reason."""

    reason: str
    detail: str


UplinkEvent = ModelReceived | SyncAnnounced | Pulled | Settled | FrameRefused


@dataclass(frozen=True, slots=True)
class UplinkReady:
    """What to send, what happened, and when to call ``tick``."""

    send: tuple[Outgoing, ...]
    events: tuple[UplinkEvent, ...]
    wake_at: float


@dataclass(slots=True)
class Uplink:
    """One node's conversation with the aggregator of its cell."""

    state: NodeState
    """The heartbeat; the driver keeps its figures current through ``report``."""
    tier: Tier
    layout: str | None = None
    """Digest of the layout that the node's own task has; None: any (a gateway has no task)."""
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    is_connected: bool = False
    _sender: Sender | None = None
    _receivers: dict[str, Receiver] = field(default_factory=dict)
    _model: ModelReceived | None = None
    _digest: str = ""
    _heartbeat_at: float = 0.0
    _send: list[Outgoing] = field(default_factory=list)
    _events: list[UplinkEvent] = field(default_factory=list)

    @property
    def subscriptions(self) -> tuple[str, ...]:
        """The topics that the driver subscribes to."""
        job, cell = self.state.job, self.state.cell
        return (
            topics.down(job, cell, self.tier.name),
            topics.sync(job, cell),
            topics.inbox(self.state.node),
        )

    @property
    def will(self) -> Outgoing:
        """The last will: the broker says offline where we no longer can."""
        return Outgoing(
            topics.state(self.state.node), pack(replace(self.state, is_online=False)), retain=True
        )

    def hold(self, model: ModelReceived) -> None:
        """Begin with a model that the node has from elsewhere: installed with it, or kept."""
        self._model = model
        self._digest = model_digest(model.vector, model.integers, model.terms.lineage)

    def connected(self, now: float) -> UplinkReady:
        """The connection stands and the subscriptions are made."""
        self.is_connected = True
        if self._sender is not None:
            self._sender.reconnected()
        return self.beat(now)

    def beat(self, now: float) -> UplinkReady:
        """Send the heartbeat at once."""
        self._heartbeat_at = now
        return self.tick(now)

    def disconnected(self, now: float) -> UplinkReady:
        """The connection broke; what is under way waits."""
        self.is_connected = False
        self._receivers.clear()
        return self.tick(now)

    def offer(self, seq: int, content: bytes, now: float) -> UplinkReady:
        """Send a content that is durable in the outbox; one at a time."""
        assert self._sender is None, "one content is in flight at a time"
        self._sender = Sender(
            node=self.state.node,
            seq=seq,
            content=content,
            chunk_bytes=self.tier.chunk_bytes,
            window=self.tier.window_chunks,
            airtime_seconds=self.tier.seconds_for(len(content)),
        )
        return self.tick(now)

    def flushed(self, sync: int, now: float) -> UplinkReady:
        """Say that there is nothing (more) to flush for a synchronisation."""
        self._publish(self._up, Flushed(node=self.state.node, sync=sync))
        return self.tick(now)

    def report(self, state: NodeState) -> None:
        """Replace the heartbeat's figures; they go out with the next one."""
        self.state = replace(
            state, version=self._model.version if self._model else -1, model=self._digest
        )

    def delivered(self, token: int, now: float) -> UplinkReady:
        """The broker has taken the frame of this token."""
        if self._sender is not None and token == self._sender.seq:
            self._sender.delivered()
        return self.tick(now)

    def received(self, topic: str, frame: bytes, now: float) -> UplinkReady:
        """A frame arrived; a bad one becomes a ``FrameRefused``."""
        try:
            message, payload = unpack(frame)
            self._take(topic, message, payload)
        except (FrameError, PayloadError, LayoutError) as error:
            reason = error.reason if isinstance(error, FrameError) else error.code
            self._events.append(FrameRefused(reason, str(error)))
        return self.tick(now)

    def tick(self, now: float) -> UplinkReady:
        """Send what is due."""
        wake_at = self._heartbeat_at
        if self.is_connected:
            if now >= self._heartbeat_at:
                self._heartbeat_at = wake_at = now + self.heartbeat_seconds
                self.report(self.state)
                self._publish(topics.state(self.state.node), self.state, retain=True)
            if self._sender is not None:
                for message, chunk in self._sender.due(now):
                    self._publish(self._up, message, chunk, token=self._sender.seq)
                wake_at = min(wake_at, max(self._sender.ask_at, now + 0.05))
        else:
            wake_at = now + self.heartbeat_seconds
        ready = UplinkReady(tuple(self._send), tuple(self._events), wake_at)
        self._send.clear()
        self._events.clear()
        return ready

    @property
    def _up(self) -> str:
        return topics.up(self.state.job, self.state.cell, self.tier.name, self.state.node)

    def _publish(
        self,
        topic: str,
        message: Message,
        payload: bytes | memoryview = b"",
        *,
        retain: bool = False,
        token: int | None = None,
    ) -> None:
        self._send.append(Outgoing(topic, pack(message, payload), retain, token))

    def _take(self, topic: str, message: Message, payload: memoryview) -> None:
        match message:
            case Begin():
                if message.size_bytes > MODEL_BYTES_MAX:
                    raise FrameError("size", f"a model of {message.size_bytes} bytes")
                self._receivers[topic] = Receiver(message)
            case Chunk():
                self._take_chunk(topic, message, payload)
            case Missing():
                if self._sender is not None and self._sender.seq == message.seq:
                    self._sender.missing(payload)
            case VerdictMessage():
                self._settle(read_verdict(message))
            case Sync():
                self._events.append(SyncAnnounced(message.sync, message.deadline_seconds))
            case Pull():
                self._events.append(Pulled())
            case _:
                raise FrameError("direction", f"{type(message).__name__} is not for a node")

    def _take_chunk(self, topic: str, chunk: Chunk, payload: memoryview) -> None:
        receiver = self._receivers.get(topic)
        if receiver is None or receiver.begin.seq != chunk.seq:
            return  # Joined in the middle: the heartbeat asks for a whole model.
        content = receiver.chunk(chunk.index, payload)
        if content is not None:
            del self._receivers[topic]
            self._take_model(content)

    def _settle(self, verdict: Verdict) -> None:
        sender = self._sender
        if sender is not None and sender.seq == verdict.seq and verdict.node == self.state.node:
            self._sender = None
            self._events.append(Settled(verdict, sender.content))

    def _take_model(self, content: bytearray) -> None:
        head, encoded = unpack_as(ModelContent, memoryview(content))
        if self.layout is not None and head.layout != self.layout:
            raise LayoutError(f"the job's layout {head.layout} is not this task's {self.layout}")
        if head.base and head.base != self._digest:
            return  # A difference to a model that we do not hold: the heartbeat tells.
        if head.model == self._digest and head.sync is None:
            return  # Sent again for somebody else of this tier.
        vector, integers = self._decode(head, encoded)
        if model_digest(vector, integers, head.lineage) != head.model:
            self._digest = ""
            raise FrameError("model", f"version {head.version} is not what its aggregator holds")
        self._digest = head.model
        self._model = ModelReceived(head.version, vector, integers, head.sync, model_terms(head))
        self._events.append(self._model)

    def _decode(self, head: ModelContent, encoded: memoryview) -> tuple[Vector, Integers]:
        integers = np.asarray(head.integers, np.int64)
        if not head.base:
            if head.size > len(encoded):
                raise FrameError("size", "a whole model has at least a byte per parameter")
            return codec.decode(encoded, head.size), integers
        assert self._model is not None, "a held digest has a model"
        return self._model.vector + codec.decode(encoded, head.size), integers
