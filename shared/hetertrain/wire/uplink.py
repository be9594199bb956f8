"""A node's end of the conversation with its aggregator: offers updates, follows versions, obeys
notices.

A vehicle speaks so to its gateway or to the cloud, and a gateway so to the cloud. The machine sees
frames and time and returns frames to send and what happened; the driver owns the connection and the
outbox.

It holds the chain of models of its tier: a whole model starts the chain, a difference continues it
if it applies to the model that is held. Chunks that do not come are asked for; where that is not
enough, the heartbeat says which model is held, and the aggregator gives this node what it lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from hetertrain import codec
from hetertrain.core.events import Pulled
from hetertrain.core.gate import Verdict
from hetertrain.core.layout import Integers, Vector
from hetertrain.core.tiers import TIERS, BandwidthEstimator, Tier
from hetertrain.core.update import model_digest
from hetertrain.errors import FrameError, LayoutError, PayloadError
from hetertrain.wire import topics
from hetertrain.wire.arrivals import Arrivals
from hetertrain.wire.contents import model_terms, read_verdict, unpack_as
from hetertrain.wire.events import (
    FrameRefused,
    JobOrdered,
    ModelReceived,
    Newest,
    Outgoing,
    Settled,
    SyncAnnounced,
    TierChanged,
    UplinkEvent,
    UplinkReady,
)
from hetertrain.wire.frames import pack, unpack
from hetertrain.wire.log_share import LogShare
from hetertrain.wire.messages import (
    Begin,
    Chunk,
    Flushed,
    JobOrder,
    LogRequest,
    Message,
    Missing,
    ModelContent,
    NodeState,
    Pull,
    Sync,
    TierConfirmed,
    VerdictMessage,
)
from hetertrain.wire.signing import (
    GATEWAY_ROLE,
    Check,
    Sign,
    Signable,
    check_signature,
    signed,
)
from hetertrain.wire.transfer import Sender, chunk_bytes_for

HEARTBEAT_SECONDS = 2.0
CLAIM_HEARTBEATS = 2
RETURN_SECONDS_MAX = 600.0


@dataclass(slots=True)
class Uplink:
    """One node's conversation with the aggregator of its cell."""

    state: NodeState
    """The heartbeat; the driver keeps its figures current through ``report``."""
    tier: Tier
    layout: str | None = None
    """Digest of the layout that the node's own task has; None: any (a gateway has no task)."""
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    tiers: Mapping[str, Tier] = field(default_factory=lambda: TIERS)
    follows_link: bool = False
    """Propose another tier when the link's measured goodput is another one's."""
    sign: Sign | None = None
    """Signs what we announce; None: our aggregator does not ask for it."""
    check: Check | None = None
    """Insists on signatures of versions and notices; None: they are taken on trust."""
    log_share: LogShare = field(default_factory=LogShare)
    newest: Newest | None = None
    """What was held last, in an earlier life too; None: nothing yet."""
    is_connected: bool = False
    return_seconds: float = 0.0
    """After an outage, connect again at random within this time, as our aggregator asks."""
    _packet_bytes_max: int | None = None
    _sender: Sender | None = None
    _has_moved: bool = False
    """What is offered was offered in another cell before."""
    _order: int = -1
    """Number of the newest order."""
    _model: ModelReceived | None = None
    _digest: str = ""
    _heartbeat_at: float = 0.0
    _send: list[Outgoing] = field(default_factory=list)
    _events: list[UplinkEvent] = field(default_factory=list)
    _resubscribes: bool = False
    _estimator: BandwidthEstimator = field(init=False)
    _arrivals: Arrivals = field(init=False)

    def __post_init__(self) -> None:
        self._estimator = BandwidthEstimator(self.tiers, self.tier)
        self._arrivals = Arrivals(self.tier)

    @property
    def subscriptions(self) -> tuple[str, ...]:
        """The topics that the driver subscribes to."""
        job, cell = self.state.job, self.state.cell
        mine = (
            self._down(self.tier.name),
            topics.sync(job, cell),
            topics.inbox(self.state.node),
            topics.order(job),
        )
        if not self.state.follows:
            return (topics.inbox(self.state.node), topics.order(job))
        # Listen before the proposal is confirmed, so that no difference is missed between.
        proposed = self.state.proposed_tier
        return (*mine, self._down(proposed)) if proposed else mine

    @property
    def publications(self) -> tuple[str, ...]:
        """The topics that the node publishes on."""
        return (self._up, topics.state(self.state.node))

    @property
    def other_subscriptions(self) -> tuple[str, ...]:
        """Topics that an earlier life of this node may have subscribed to."""
        others = (self._down(name) for name in self.tiers)
        return tuple(topic for topic in others if topic not in self.subscriptions)

    @property
    def will(self) -> Outgoing:
        """The last will: the broker says offline where we no longer can."""
        return self.farewell("offline", "the node, which is not connected")

    def farewell(self, doing: str, waiting_for: str) -> Outgoing:
        """The last heartbeat before a silence, and the reason for it."""
        state = replace(
            self.state, is_online=False, doing=doing, waiting_for=waiting_for[:500], active=0
        )
        return Outgoing(topics.state(self.state.node), pack(state), retain=True)

    @property
    def claim_seconds(self) -> float:
        """How long the next sign of life of a node with our name may take."""
        return CLAIM_HEARTBEATS * self.heartbeat_seconds

    def hold(self, model: ModelReceived) -> None:
        """Begin with a model that the node has from elsewhere: installed with it, or kept."""
        self._model, self.newest = model, Newest.of(model).newer(self.newest)
        self._digest = model_digest(model.vector, model.integers, model.terms.lineage)

    def require_layout(self, layout: str) -> None:
        """Take models of this layout only from now on.

        Raises:
            LayoutError: the one that is held has another.
        """
        self.layout = layout
        if self._model is not None:
            self._check_layout(self._model.terms.layout)

    def _check_layout(self, layout: str) -> None:
        if self.layout is not None and layout != self.layout:
            raise LayoutError(f"the job's layout {layout} is not this task's {self.layout}")

    def connected(self, now: float, packet_bytes_max: int | None = None) -> UplinkReady:
        """The connection stands and the subscriptions are made."""
        self.is_connected = True
        self._packet_bytes_max = packet_bytes_max
        sender = self._sender
        if sender is not None:
            sender.reconnected()
            if sender.chunk_bytes != chunk_bytes_for(sender.chunk_bytes, packet_bytes_max):
                # Another broker, with a lower limit: the transfer begins anew.
                self._sender = self._make_sender(sender.seq, sender.content)
        self._arrivals.resume(now)
        return self.beat(now)

    def beat(self, now: float) -> UplinkReady:
        """Send the heartbeat at once."""
        self._heartbeat_at = now
        return self.tick(now)

    def disconnected(self, now: float) -> UplinkReady:
        """The connection broke; what is under way waits."""
        self.is_connected = False
        return self.tick(now)

    def follow(self, follows: bool, now: float) -> UplinkReady:
        """Take versions from now on, or none; what is offered is sent in either case."""
        if follows != self.state.follows:
            self.state = replace(self.state, follows=follows)
            self._arrivals.clear()
            self._resubscribes = True
        return self.tick(now)

    def move(self, cell: str, now: float) -> UplinkReady:
        """Go over to another cell's aggregator; what is under way begins anew there."""
        self.state = replace(self.state, cell=cell, proposed_tier="")
        self._arrivals.clear()
        self._resubscribes = True
        self._heartbeat_at = 0.0
        if self._sender is not None:
            self._sender = self._make_sender(self._sender.seq, self._sender.content)
            self._has_moved = True
        return self.tick(now)

    def offer(
        self, seq: int, content: bytes, now: float, *, has_moved: bool = False
    ) -> UplinkReady:
        """Send a content that is durable in the outbox; one at a time. ``has_moved``: another
        cell's aggregator may have it.
        """
        assert self._sender is None, "one content is in flight at a time"
        self._sender = self._make_sender(seq, content)
        self._has_moved = has_moved
        return self.tick(now)

    def _make_sender(self, seq: int, content: bytes) -> Sender:
        return Sender(
            node=self.state.node,
            seq=seq,
            content=content,
            chunk_bytes=chunk_bytes_for(self.tier.chunk_bytes, self._packet_bytes_max),
            window=self.tier.window_chunks,
            airtime_seconds=self.tier.seconds_for(len(content)),
            relays=self.state.role == GATEWAY_ROLE,
        )

    def flushed(self, sync: int, now: float) -> UplinkReady:
        """Say that there is nothing (more) to flush for a synchronisation."""
        self._publish(self._up, Flushed(node=self.state.node, sync=sync))
        return self.tick(now)

    def report(self, state: NodeState) -> None:
        """Replace the heartbeat's figures; they go out with the next one."""
        self.state = replace(
            state,
            version=self._model.version if self._model else -1,
            model=self._digest,
            goodput_bits_per_second=round(self._estimator.goodput_bits_per_second),
        )

    def delivered(self, token: int, now: float) -> UplinkReady:
        """The broker has taken the frame of this token."""
        if self._sender is not None and token == self._sender.seq:
            self._delivered(self._sender, now)
        return self.tick(now)

    def _delivered(self, sender: Sender, now: float) -> None:
        """Propose the tier that the link is in, at once, if it is another one."""
        goodput = sender.delivered(now)
        if goodput is None:
            return
        tier = self._estimator.measured(goodput.bits_per_second, goodput.num_chunks)
        proposed = tier.name if self.follows_link and tier != self.tier else ""
        if proposed != self.state.proposed_tier:
            self.state = replace(self.state, proposed_tier=proposed)
            self._heartbeat_at = now
            self._resubscribes = True

    def received(self, topic: str, frame: bytes, now: float) -> UplinkReady:
        """A frame arrived; a bad one becomes a ``FrameRefused``."""
        try:
            message, payload = unpack(frame)
            if isinstance(message, JobOrder):
                self._take_order(message, frame)
            else:
                self._take(topic, message, payload, now)
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
            for missing, bitmap in self._arrivals.due(now):
                self._publish(self._up, missing, bitmap)
            wake_at = min(wake_at, max(self._arrivals.wake_at, now + 0.05))
        else:
            wake_at = now + self.heartbeat_seconds
        ready = UplinkReady(tuple(self._send), tuple(self._events), wake_at, self._resubscribes)
        self._send.clear()
        self._events.clear()
        self._resubscribes = False
        return ready

    def _down(self, tier: str) -> str:
        return topics.down(self.state.job, self.state.cell, tier)

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
        if isinstance(message, Begin):
            message = signed(message, self.state.job, self.state.cell, self.sign)
        self._send.append(Outgoing(topic, pack(message, payload), retain, token))

    def _take(self, topic: str, message: Message, payload: memoryview, now: float) -> None:
        match message:
            case Begin():
                self._begin(topic, message, now)
            case Chunk():
                self._take_chunk(message, payload, now)
            case Missing():
                if self._sender is not None and self._sender.seq == message.seq:
                    self._sender.missing(payload)
            case VerdictMessage():
                self._settle(read_verdict(message), now)
            case Sync():
                self._check(message)
                self._events.append(SyncAnnounced(message.sync, message.deadline_seconds))
            case Pull():
                self._events.append(Pulled())
            case TierConfirmed():
                self._move(message)
            case LogRequest():
                self._tell_log(message, now)
            case _:
                raise FrameError("direction", f"{type(message).__name__} is not for a node")

    def _take_order(self, order: JobOrder, frame: bytes) -> None:
        self._check(order)
        if order.number > self._order:
            self._order = order.number
            rules = (order.train_when, order.send_when)
            self._events.append(JobOrdered(order.state, frame, *rules))

    def _check(self, message: Signable) -> None:
        check_signature(message, self.state.job, self.state.cell, self.check)

    def _tell_log(self, request: LogRequest, now: float) -> None:
        if request.node != self.state.node:
            raise FrameError("identity", f"it asks for the log of {request.node}")
        self._check(request)
        answer = self.log_share.answer(request, now)
        if answer is not None:
            self._publish(topics.log(self.state.node), answer)

    def _check_age(self, head: ModelContent) -> None:
        """Refuse what was signed once and is sent again: an older run of the job, or a version that
        no tier can still hold.
        """
        newest = self.newest
        if self.check is None or newest is None:
            return
        if not newest.may_follow(head.lineage, head.version):
            raise FrameError("age", f"version {head.version} is older than {newest.version}")

    def _move(self, confirmed: TierConfirmed) -> None:
        """Go over to another tier; what is under way goes on with its chunks, and its window."""
        tier = self.tiers.get(confirmed.tier)
        if tier is None:
            raise FrameError("tier", f"unknown tier {confirmed.tier!r}")
        if tier == self.tier:
            return
        self._arrivals.clear()
        self.tier = self._arrivals.tier = tier
        self._estimator.settle(tier)
        self.state = replace(self.state, tier=tier.name, proposed_tier="")
        if self._sender is not None:
            self._sender.window = tier.window_chunks
        self._heartbeat_at = 0.0
        self._resubscribes = True
        self._events.append(TierChanged(tier))

    def _begin(self, topic: str, begin: Begin, now: float) -> None:
        is_given = topic == topics.inbox(self.state.node)
        if is_given or topic == self._down(self.tier.name):
            self._arrivals.begin(topic, begin, now, is_given=is_given)
        # Else it is of a tier that the node has left, or is not in yet.

    def _take_chunk(self, chunk: Chunk, payload: memoryview, now: float) -> None:
        arrived = self._arrivals.take(chunk, payload, now)
        if arrived is not None:
            topic, content = arrived
            self._take_model(content)
            if topic == topics.inbox(self.state.node):
                self._heartbeat_at = now  # There may be more to be given.

    def _settle(self, verdict: Verdict, now: float) -> None:
        sender = self._sender
        if sender is not None and sender.seq == verdict.seq and verdict.node == self.state.node:
            # What was judged has arrived, though the broker did not say so yet.
            while sender.num_unacknowledged:
                self._delivered(sender, now)
            self._sender = None
            self._events.append(Settled(verdict, sender.content, self._has_moved))

    def _take_model(self, content: bytearray) -> None:
        # Its chunks were compared with the announced digest.
        head, encoded = unpack_as(ModelContent, content, is_verified=True)
        self._check_layout(head.layout)
        self._check(head)
        self._check_age(head)
        if head.base and head.base != self._digest:
            return  # A difference to a model that we do not hold: the heartbeat tells.
        if head.model == self._digest and head.sync is None:
            return  # Sent again for somebody else of this tier.
        vector, integers = self._decode(head, encoded)
        if model_digest(vector, integers, head.lineage) != head.model:
            self._digest = ""
            raise FrameError("model", f"version {head.version} is not what its aggregator holds")
        self._digest = head.model
        self.return_seconds = min(head.return_seconds, RETURN_SECONDS_MAX)
        self._model = ModelReceived(head.version, vector, integers, head.sync, model_terms(head))
        self.newest = Newest.of(self._model).newer(self.newest)
        self._events.append(self._model)

    def _decode(self, head: ModelContent, encoded: memoryview) -> tuple[Vector, Integers]:
        integers = np.asarray(head.integers, np.int64)
        if not head.base:
            if head.size > len(encoded):
                raise FrameError("size", "a whole model has at least a byte per parameter")
            return codec.decode_owned(encoded, head.size), integers
        assert self._model is not None, "a held digest has a model"
        vector = self._model.vector.copy()
        codec.parse(encoded, head.size).add_to(vector)
        return vector, integers
