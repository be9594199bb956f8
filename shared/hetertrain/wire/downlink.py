"""An aggregator's end of the conversation with its nodes: who is there, contents and their
verdicts, and versions (``broadcast``). The cloud speaks so to its gateways and vehicles, and a
gateway to its cell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hetertrain.core.events import SyncNotice
from hetertrain.core.gate import Verdict
from hetertrain.core.tiers import TIERS, Tier
from hetertrain.core.update import Checkpoint
from hetertrain.errors import FrameError
from hetertrain.wire import topics
from hetertrain.wire.broadcast import Broadcaster
from hetertrain.wire.contents import JobTerms, verdict_message
from hetertrain.wire.events import (
    ContentReceived,
    DownlinkEvent,
    DownlinkReady,
    FlushReported,
    FrameRefused,
    NodeGone,
    NodeSeen,
    Outgoing,
    TransferDeferred,
)
from hetertrain.wire.frames import HEADER_BYTES_MAX, pack, unpack
from hetertrain.wire.messages import Begin, Chunk, Flushed, Message, Missing, NodeState, Pull, Sync
from hetertrain.wire.signing import Check, Sign, check_signature, signed
from hetertrain.wire.traffic import Traffic
from hetertrain.wire.transfer import Receiver
from hetertrain.wire.uplink import HEARTBEAT_SECONDS

SILENCE_HEARTBEATS = 4
"""A node that was not heard for so many heartbeats counts as gone until it is heard again."""
CONTENT_GROUPS_MAX = 64
RECEIVERS_MAX = 4096
"""Transfers under way at a time."""
AWAY_MAX = 64
"""Half-arrived transfers that are kept of nodes which are away; each goes on when its node is
back."""


@dataclass(slots=True)
class Downlink:
    """One aggregator's conversation with the nodes of its cell."""

    job: str
    cell: str
    tiers: Mapping[str, Tier] = field(default_factory=lambda: TIERS)
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    nodes: dict[str, NodeState] = field(default_factory=dict)
    sign: Sign | None = None
    """Signs versions and notices; None: nobody asks for it."""
    check: Check | None = None
    """Insists on nodes' signatures of what they announce; None: it is taken on trust."""
    room_bytes: int | None = None
    """How much more may be taken, what is under way included; None: there is no limit."""
    traffic: Traffic = field(default_factory=Traffic)
    _heard_at: dict[str, float] = field(default_factory=dict)
    _silence_at: float = 0.0
    """When to look next for those who fell silent: not at each frame of a fleet of thousands."""
    _receivers: dict[str, Receiver] = field(default_factory=dict)
    _deferred: set[str] = field(default_factory=set)
    """Nodes whose last transfer found no room."""
    _away: dict[str, None] = field(default_factory=dict)
    """Nodes that are away with a transfer half arrived, the longest first."""
    _verdicts: dict[str, Verdict] = field(default_factory=dict)
    _send: list[Outgoing] = field(default_factory=list)
    _events: list[DownlinkEvent] = field(default_factory=list)
    broadcaster: Broadcaster = field(init=False)

    def __post_init__(self) -> None:
        self.broadcaster = Broadcaster(
            self.job,
            self.cell,
            self.tiers,
            self.heartbeat_seconds,
            self.nodes,
            self._publish,
            self.traffic,
            sign=self.sign,
        )

    @property
    def num_parameters(self) -> int:
        """Of the model that is given out; 0: none is yet."""
        checkpoint = self.broadcaster.checkpoint
        return 0 if checkpoint is None else int(checkpoint.vector.size)

    @property
    def silence_seconds(self) -> float:
        """How long a node may be silent before it counts as gone."""
        return SILENCE_HEARTBEATS * self.heartbeat_seconds

    @property
    def subscriptions(self) -> tuple[str, ...]:
        """The topics that the driver subscribes to."""
        return (topics.up(self.job, self.cell, "+", "+"), topics.state("+"))

    def silence_of(self, node: str, now: float) -> float:
        """Return how many seconds ago a node was heard that is there."""
        return max(0.0, now - self._heard_at[node])

    def connected(self, packet_bytes_max: int | None) -> None:
        """The connection stands; nothing larger than the broker takes is offered from now on."""
        self.broadcaster.connected(packet_bytes_max)

    def release(
        self, checkpoint: Checkpoint, sync: int | None, terms: JobTerms, now: float
    ) -> DownlinkReady:
        """Announce a version."""
        self.broadcaster.release(checkpoint, sync, terms, now)
        return self.tick(now)

    def notice(self, notice: SyncNotice, now: float) -> DownlinkReady:
        """Announce a synchronisation."""
        message = Sync(sync=notice.sync, deadline_seconds=notice.deadline_seconds)
        message = signed(message, self.job, self.cell, self.sign)
        self._publish(topics.sync(self.job, self.cell), message)
        return self.tick(now)

    def pull(self, node: str, now: float) -> DownlinkReady:
        """Ask a node for what it has."""
        checkpoint = self.broadcaster.checkpoint
        version = checkpoint.version if checkpoint else 0
        self._publish(topics.inbox(node), Pull(version=version))
        return self.tick(now)

    def answer(self, verdict: Verdict, now: float) -> DownlinkReady:
        """Acknowledge a content; call it only when what the verdict says is durable."""
        self._verdicts[verdict.node] = verdict
        self._publish(topics.inbox(verdict.node), verdict_message(verdict))
        return self.tick(now)

    def received(self, topic: str, frame: bytes, now: float) -> DownlinkReady:
        """A frame arrived; a bad one becomes a ``FrameRefused``."""
        try:
            message, payload = unpack(frame)
            self._take(topic, message, payload, now)
        except FrameError as error:
            sender = _sender(topic)
            known = sender if topics.is_name(sender) else ""
            self._events.append(FrameRefused(error.reason, str(error), known))
        return self.tick(now)

    def tick(self, now: float) -> DownlinkReady:
        """Broadcast what is due, and notice who fell silent."""
        if now >= self._silence_at:
            self._silence_at = now + self.heartbeat_seconds / 2
            for node, heard_at in list(self._heard_at.items()):
                if now > heard_at + self.silence_seconds:
                    self._forget(node)
        wake_at = self.broadcaster.tick(now)
        ready = DownlinkReady(tuple(self._send), tuple(self._events), wake_at)
        self._send.clear()
        self._events.clear()
        return ready

    def _publish(self, topic: str, message: Message, payload: bytes | memoryview = b"") -> None:
        self._send.append(Outgoing(topic, pack(message, payload)))

    def _take(self, topic: str, message: Message, payload: memoryview, now: float) -> None:
        sender = _sender(topic)
        if getattr(message, "node", sender) != sender:
            raise FrameError("identity", f"{sender} sent a message in another node's name")
        if sender in self._heard_at:
            self._heard_at[sender] = now  # Whatever it says, it is there.
        match message:
            case NodeState():
                self._hear(message, now)
            case Begin():
                self._begin(message)
            case Chunk():
                receiver = self._receivers.get(message.node)
                if receiver is None or receiver.begin.seq != message.seq:
                    return  # Its Begin was lost; the sender asks again.
                content = receiver.chunk(message.index, payload)
                if content is not None:
                    del self._receivers[message.node]
                    self._events.append(
                        ContentReceived(message.node, message.seq, content, receiver.begin.relays)
                    )
            case Missing():
                self.broadcaster.resend(sender, message.seq, payload, now)
            case Flushed():
                self._events.append(FlushReported(message.node, message.sync))
            case _:
                raise FrameError("direction", f"{type(message).__name__} is not for an aggregator")

    def _hear(self, state: NodeState, now: float) -> None:
        is_ours = state.job == self.job and state.cell == self.cell
        if not is_ours or not state.is_online:
            # States are one topic for all who watch. Who says that it is elsewhere has left; the
            # last will of another cell may be older than its node's arrival here.
            if state.node in self._heard_at and is_ours != state.is_online:
                self._forget(state.node)
            return
        if state.tier not in self.tiers:
            raise FrameError("tier", f"unknown tier {state.tier!r}")
        before = self.nodes.get(state.node)
        self.nodes[state.node] = state
        self._heard_at[state.node] = now
        self._away.pop(state.node, None)
        self._events.append(NodeSeen(state))
        self.broadcaster.hear(state, before, now)

    def _forget(self, node: str) -> None:
        del self._heard_at[node]
        self.nodes.pop(node, None)
        self.broadcaster.forget(node)
        # What has arrived of its transfer stays: it goes on when the node is back.
        if node in self._receivers:
            self._away[node] = None
            while len(self._away) > AWAY_MAX:
                longest = next(iter(self._away))
                del self._away[longest]
                self._receivers.pop(longest, None)
        self._events.append(NodeGone(node))

    def _begin(self, announced: Begin) -> None:
        check_signature(announced, self.job, self.cell, self.check)
        # A signature is another one each time; what is announced stays the same.
        begin = replace(announced, signature=b"", certificate=b"")
        verdict = self._verdicts.get(begin.node)
        if verdict is not None and verdict.seq == begin.seq:
            self._publish(topics.inbox(begin.node), verdict_message(verdict))
            return
        receiver = self._receivers.get(begin.node)
        if receiver is not None and receiver.begin == begin:
            self._publish(topics.inbox(begin.node), Missing(seq=begin.seq), receiver.missing())
            return
        limit = payload_bytes_max(self.num_parameters) + HEADER_BYTES_MAX
        if self.num_parameters and begin.size_bytes > limit:
            raise FrameError(
                "size", f"{begin.node} announces {begin.size_bytes} bytes; limit {limit}"
            )
        if not self.num_parameters or not self._has_room(begin.size_bytes, begin.node):
            # Without a model nobody knows how large an update may be.
            self._receivers.pop(begin.node, None)
            if len(self._deferred) < RECEIVERS_MAX:
                self._deferred.add(begin.node)
            self._events.append(TransferDeferred(begin.node, begin.size_bytes))
            return
        self._receivers.pop(begin.node, None)
        if len(self._receivers) >= RECEIVERS_MAX:
            del self._receivers[next(iter(self._receivers))]  # The oldest; its sender begins anew.
        receiver = self._receivers[begin.node] = Receiver(begin)
        self._away.pop(begin.node, None)
        if begin.node in self._deferred:
            # Its chunks came when there was no room for them, and do not come again by themselves.
            self._deferred.discard(begin.node)
            self._publish(topics.inbox(begin.node), Missing(seq=begin.seq), receiver.missing())

    def _has_room(self, size_bytes: int, asking: str) -> bool:
        if self.room_bytes is None:
            return True
        here = (
            each
            for node, each in self._receivers.items()
            if node not in self._away and node != asking
        )
        return size_bytes + sum(each.begin.size_bytes for each in here) <= self.room_bytes


def payload_bytes_max(num_parameters: int) -> int:
    """Return how much an aggregator takes at a time of a model of this size, beside a head."""
    return CONTENT_GROUPS_MAX * 8 * num_parameters + (1 << 20)


def _sender(topic: str) -> str:
    """Return the node whose topic it is; the broker lets nobody else publish there."""
    return topic.rsplit("/", 2)[1 if topic.endswith("/state") else 2]
