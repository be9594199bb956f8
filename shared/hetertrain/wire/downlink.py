"""An aggregator's end of the conversation with its nodes: collects contents, answers, broadcasts
versions by tier.

The cloud speaks so to its gateways and vehicles, and a gateway to its cell. Per tier it keeps the
model that the tier's nodes hold and broadcasts the compressed difference to it, with error
feedback: the kept model moves by what was decoded, so what a budget left out goes with the next
difference. All nodes of a tier hold bit-identical models, checked by digest (``chain``). A whole
model restarts a tier's chain at a synchronisation; a node whose heartbeat shows that it fell behind
is given what it lacks, alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hetertrain import codec
from hetertrain.core.aggregator import SyncNotice
from hetertrain.core.gate import Verdict
from hetertrain.core.layout import Vector
from hetertrain.core.tiers import TIERS, Tier
from hetertrain.core.update import Checkpoint, model_digest
from hetertrain.core.worker import PERIODS_MAX
from hetertrain.errors import FrameError
from hetertrain.wire import topics
from hetertrain.wire.chain import Chain, Offer
from hetertrain.wire.contents import JobTerms, model_head, verdict_message
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
    TierConfirmed,
    pack,
    pack_head,
    unpack,
)
from hetertrain.wire.transfer import RETRY_SECONDS_MIN, Content, Receiver, chunk_bytes_for
from hetertrain.wire.uplink import HEARTBEAT_SECONDS, FrameRefused, Outgoing

SILENCE_HEARTBEATS = 4
"""A node that was not heard for so many heartbeats counts as gone until it is heard again."""
GATHER_SECONDS = 1.0
"""How long a whole model waits for more nodes that need it."""
DUE_HEARTBEATS = 2
"""A node that lacks a difference so many heartbeats after its broadcast has missed it."""
WHOLE_IDLE_SECONDS = 60.0
"""A whole model that nobody asked for so long is no longer kept ready."""
BURST_BYTES = 4 << 20
"""A longer broadcast goes out in bursts, at its tier's rate, so that no queue has to hold it."""
CONTENT_GROUPS_MAX = 64
RECEIVERS_MAX = 4096
"""Transfers under way at a time."""


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """A node's heartbeat."""

    state: NodeState


@dataclass(frozen=True, slots=True)
class NodeGone:
    """A node's last will, or its silence."""

    node: str


@dataclass(frozen=True, slots=True)
class FlushReported:
    """A node has nothing (more) to flush."""

    node: str
    sync: int


@dataclass(frozen=True, slots=True)
class ContentReceived:
    """A whole content of a node: an update or a partial, still to be examined."""

    node: str
    seq: int
    content: bytearray


DownlinkEvent = NodeSeen | NodeGone | FlushReported | ContentReceived | FrameRefused


@dataclass(frozen=True, slots=True)
class DownlinkReady:
    """What to send, what happened, and when to call ``tick``."""

    send: tuple[Outgoing, ...]
    events: tuple[DownlinkEvent, ...]
    wake_at: float


def _whole_content(head: ModelContent, vector: Vector) -> Content:
    """Put a head before a model, whose memory the content shares."""
    codec_head, values = codec.whole(vector)
    return Content(pack_head(head, codec_head, values) + codec_head, values)


@dataclass(slots=True)
class Downlink:
    """One aggregator's conversation with the nodes of its cell."""

    job: str
    cell: str
    tiers: Mapping[str, Tier] = field(default_factory=lambda: TIERS)
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    nodes: dict[str, NodeState] = field(default_factory=dict)
    _heard_at: dict[str, float] = field(default_factory=dict)
    _silence_at: float = 0.0
    """When to look next for those who fell silent: not at each frame of a fleet of thousands."""
    _receivers: dict[str, Receiver] = field(default_factory=dict)
    _verdicts: dict[str, Verdict] = field(default_factory=dict)
    _chains: dict[str, Chain] = field(default_factory=dict)
    _packet_bytes_max: int | None = None
    _seq: int = 0
    """Numbers everything that goes out in chunks."""
    _served_until: dict[str, float] = field(default_factory=dict)
    """Until then a node has what it was given last under way."""
    _checkpoint: Checkpoint | None = None
    _terms: JobTerms | None = None
    _send: list[Outgoing] = field(default_factory=list)
    _events: list[DownlinkEvent] = field(default_factory=list)

    @property
    def silence_seconds(self) -> float:
        """How long a node may be silent before it counts as gone."""
        return SILENCE_HEARTBEATS * self.heartbeat_seconds

    @property
    def subscriptions(self) -> tuple[str, ...]:
        """The topics that the driver subscribes to."""
        return (topics.up(self.job, self.cell, "+", "+"), topics.state("+"))

    def connected(self, packet_bytes_max: int | None) -> None:
        """The connection stands; nothing larger than the broker takes is offered from now on."""
        if packet_bytes_max == self._packet_bytes_max:
            return
        self._packet_bytes_max = packet_bytes_max
        for chain in self._chains.values():
            chain.restart()
            chain.sending = chain.sent_whole = chain.whole = None

    def _chunk_bytes(self, tier: Tier) -> int:
        return chunk_bytes_for(tier.chunk_bytes, self._packet_bytes_max)

    def release(
        self, checkpoint: Checkpoint, sync: int | None, terms: JobTerms, now: float
    ) -> DownlinkReady:
        """Announce a version: to each tier when its link is free, at once and whole where it ends a
        sync.
        """
        self._checkpoint, self._terms = checkpoint, terms
        for chain in self._chains.values():
            if sync is not None:
                self._broadcast(chain, now, sync)
        return self.tick(now)

    def notice(self, notice: SyncNotice, now: float) -> DownlinkReady:
        """Announce a synchronisation."""
        message = Sync(sync=notice.sync, deadline_seconds=notice.deadline_seconds)
        self._publish(topics.sync(self.job, self.cell), message)
        return self.tick(now)

    def pull(self, node: str, now: float) -> DownlinkReady:
        """Ask a node for what it has."""
        version = self._checkpoint.version if self._checkpoint else 0
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
            self._events.append(FrameRefused(error.reason, str(error)))
        return self.tick(now)

    def tick(self, now: float) -> DownlinkReady:
        """Broadcast what is due, and notice who fell silent."""
        if now >= self._silence_at:
            self._silence_at = now + self.heartbeat_seconds / 2
            for node, heard_at in list(self._heard_at.items()):
                if now > heard_at + self.silence_seconds:
                    self._forget(node)
        wakes = [self._tick_chain(chain, now) for chain in self._chains.values()]
        wake_at = min(wakes, default=now + self.heartbeat_seconds)
        ready = DownlinkReady(tuple(self._send), tuple(self._events), wake_at)
        self._send.clear()
        self._events.clear()
        return ready

    def _tick_chain(self, chain: Chain, now: float) -> float:
        """Do what is due in one tier; return when to come again."""
        wake_at = now + self.heartbeat_seconds
        if chain.needy and self._checkpoint is not None:
            if now >= chain.serve_at:
                self._serve(chain, now)
            wake_at = min(wake_at, max(chain.serve_at, now + 0.05))
        if chain.sending is not None:
            if now >= chain.send_at:
                self._go_on(chain, now)
            wake_at = min(wake_at, max(chain.send_at, now + 0.005))
        if self._has_news(chain):
            if now >= chain.free_at:
                self._broadcast(chain, now, None)
            wake_at = min(wake_at, max(chain.free_at, now + 0.05))
        if chain.whole is not None and now > chain.whole_used_at + WHOLE_IDLE_SECONDS:
            chain.whole = None
        if now > chain.whole_until + WHOLE_IDLE_SECONDS:
            chain.sent_whole = None
        return wake_at

    def _has_news(self, chain: Chain) -> bool:
        if self._checkpoint is None or self._terms is None:
            return False
        newest = (self._terms.lineage, self._checkpoint.version)
        return chain.held is None or chain.newest != newest or chain.needs_whole

    def _publish(self, topic: str, message: Message, payload: bytes | memoryview = b"") -> None:
        self._send.append(Outgoing(topic, pack(message, payload)))

    def _take(self, topic: str, message: Message, payload: memoryview, now: float) -> None:
        sender = topic.rsplit("/", 2)[1 if topic.endswith("/state") else 2]
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
                    self._events.append(ContentReceived(message.node, message.seq, content))
            case Missing():
                self._resend(sender, message.seq, payload, now)
            case Flushed():
                self._events.append(FlushReported(message.node, message.sync))
            case _:
                raise FrameError("direction", f"{type(message).__name__} is not for an aggregator")

    def _hear(self, state: NodeState, now: float) -> None:
        if state.job != self.job or state.cell != self.cell:
            return  # Another cell's node; states are one topic for all who watch.
        if not state.is_online:
            if state.node in self._heard_at:
                self._forget(state.node)
            return
        tier = self.tiers.get(state.tier)
        if tier is None:
            raise FrameError("tier", f"unknown tier {state.tier!r}")
        before = self.nodes.get(state.node)
        self.nodes[state.node] = state
        self._heard_at[state.node] = now
        self._events.append(NodeSeen(state))
        if before is not None and before.tier != state.tier:
            self._leave(before.tier)
        if state.proposed_tier:
            self._confirm(state, now)
        chain = self._chains.get(tier.name)
        if chain is None:
            # Those who join together share the first broadcast.
            chain = Chain(tier, free_at=now + GATHER_SECONDS)
            self._chains[tier.name] = chain
            self._continue(chain, state.model)
        if state.model == chain.digest:
            chain.needy.discard(state.node)
            self._served_until.pop(state.node, None)
        elif now >= self._served_until.get(state.node, 0.0):
            self._catch_up(chain, state, now)

    def _catch_up(self, chain: Chain, state: NodeState, now: float) -> None:
        """Give a node the difference that it misses, or see that it gets a whole model."""
        difference = chain.after(state.model)
        if difference is not None:
            if now >= difference.due_at:
                self._give(chain, state.node, difference, now)
        elif now >= chain.whole_until and not chain.needs_whole:
            if not chain.needy:
                chain.serve_at = now + GATHER_SECONDS
            chain.needy.add(state.node)

    def _serve(self, chain: Chain, now: float) -> None:
        """Give those who need a whole model one: each alone, or by broadcast if most do."""
        needy = sorted(chain.needy & self.nodes.keys())
        chain.needy.clear()
        num_nodes = sum(state.tier == chain.tier.name for state in self.nodes.values())
        assert self._terms is not None, "there is a version to give"
        is_current = chain.newest is not None and chain.newest[0] == self._terms.lineage
        # Those whom a broadcast has just not reached are not sent another one.
        may_broadcast = now > chain.whole_until + WHOLE_IDLE_SECONDS
        are_most = may_broadcast and 2 * len(needy) > num_nodes
        if chain.held is None or not is_current or chain.is_overtaken or are_most:
            chain.needs_whole = True
            chain.is_overtaken = False
            return
        whole = self._whole(chain, now)
        for node in needy:
            self._give(chain, node, whole, now)

    def _whole(self, chain: Chain, now: float) -> Offer:
        """Return a whole model from which differences go on, made now if there is none."""
        assert chain.held is not None, "the tier holds a model"
        assert self._terms is not None, "a model is held, so there was a version"
        if not chain.offers_whole:
            head = self._head(chain.held, chain.digest, None, "", self._terms)
            self._seq += 1
            content = _whole_content(head, chain.held.vector)
            size = self._chunk_bytes(chain.tier)
            chain.whole = chain.offer(self.cell, self._seq, content, size, "", chain.digest, now)
        assert chain.whole is not None, "it is on offer now"
        return chain.whole

    def _give(self, chain: Chain, node: str, offer: Offer, now: float) -> None:
        """Offer a content to one node, with its first chunks."""
        self._publish(topics.inbox(node), offer.begin)
        self._send_to(chain, node, offer, range(offer.num_chunks), now)

    def _resend(self, node: str, seq: int, bitmap: memoryview, now: float) -> None:
        """Send the next chunks that a node misses; it asks again when it has them."""
        state = self.nodes.get(node)
        chain = None if state is None else self._chains.get(state.tier)
        if state is None or chain is None or chain.held is None:
            return  # Not heard yet; its heartbeat tells what it needs.
        offer = chain.find(seq)
        if offer is None:
            # A broadcast that has not reached it, or what it was given is long past.
            chain.needy.add(node)
            chain.is_overtaken |= state.model != chain.digest and chain.after(state.model) is None
            return
        bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")
        missing = np.flatnonzero(bits[: offer.num_chunks]).tolist()
        self._send_to(chain, node, offer, missing, now)

    def _send_to(
        self, chain: Chain, node: str, offer: Offer, indices: Sequence[int], now: float
    ) -> None:
        window = indices[: chain.tier.window_chunks]
        for message, chunk in offer.messages(window):
            self._publish(topics.inbox(node), message, chunk)
        airtime = chain.tier.seconds_for(len(window) * offer.begin.chunk_bytes)
        self._served_until[node] = now + RETRY_SECONDS_MIN + 2 * airtime
        if offer is chain.whole:
            chain.whole_used_at = now

    def _confirm(self, state: NodeState, now: float) -> None:
        """Let a node into the tier that it proposes.

        The first one to come takes the model along that it holds, so the new tier goes on from
        there; one that comes later is given what it lacks.
        """
        tier = self.tiers.get(state.proposed_tier)
        if tier is None:
            raise FrameError("tier", f"unknown tier {state.proposed_tier!r}")
        left = self._chains.get(state.tier)
        if left is not None and left.held is not None and tier.name not in self._chains:
            if left.after(state.model) is not None and now < left.free_at:
                return  # A difference is on its way; the proposal comes again.
            chain = Chain(tier, free_at=now, needs_whole=state.model != left.digest)
            if left.newest is not None and not chain.needs_whole:
                chain.hold(left.held, left.digest, left.newest)
            self._chains[tier.name] = chain
        self._served_until.pop(state.node, None)
        self._publish(topics.inbox(state.node), TierConfirmed(tier=tier.name))

    def _leave(self, tier: str) -> None:
        """Forget what a tier holds when its last node has gone to another one."""
        if all(state.tier != tier for state in self.nodes.values()):
            self._chains.pop(tier, None)

    def _continue(self, chain: Chain, model: str) -> None:
        """Begin a chain where its first node stands, if that is the newest model."""
        checkpoint, terms = self._checkpoint, self._terms
        if checkpoint is None or terms is None or not model:
            return
        if model == model_digest(checkpoint.vector, checkpoint.integers, terms.lineage):
            chain.hold(checkpoint, model, (terms.lineage, checkpoint.version))
            chain.needs_whole = False

    def _forget(self, node: str) -> None:
        del self._heard_at[node]
        self.nodes.pop(node, None)
        self._served_until.pop(node, None)
        # What has arrived of its transfer stays: it goes on when the node is back.
        self._events.append(NodeGone(node))

    def _begin(self, begin: Begin) -> None:
        verdict = self._verdicts.get(begin.node)
        if verdict is not None and verdict.seq == begin.seq:
            self._publish(topics.inbox(begin.node), verdict_message(verdict))
            return
        receiver = self._receivers.get(begin.node)
        if receiver is not None and receiver.begin == begin:
            self._publish(topics.inbox(begin.node), Missing(seq=begin.seq), receiver.missing())
            return
        limit = self._content_bytes_max()
        if begin.size_bytes > limit:
            raise FrameError(
                "size", f"{begin.node} announces {begin.size_bytes} bytes; limit {limit}"
            )
        self._receivers.pop(begin.node, None)
        if len(self._receivers) >= RECEIVERS_MAX:
            del self._receivers[next(iter(self._receivers))]  # The oldest; its sender begins anew.
        self._receivers[begin.node] = Receiver(begin)

    def _content_bytes_max(self) -> int:
        if self._checkpoint is None:
            return 0
        return CONTENT_GROUPS_MAX * 8 * self._checkpoint.vector.size + (1 << 20)

    def _broadcast(self, chain: Chain, now: float, sync: int | None) -> None:
        """Send the newest version to one tier, as a difference where that is less."""
        assert self._checkpoint is not None, "there is a version to send"
        assert self._terms is not None, "a version comes with its terms"
        checkpoint, terms = self._checkpoint, self._terms
        policy = terms.policy
        whole_bytes = 4 * checkpoint.vector.size + codec.MINIMUM_BUDGET_BYTES
        rate = chain.tier.rate_bits_per_second
        period = policy.period_seconds(rate, checkpoint.vector.size)
        seconds = min(max(now - chain.sent_at, period), PERIODS_MAX * period)
        if sync is not None:
            seconds *= policy.flush_factor
        budget = chain.tier.budget_bytes(seconds, policy.budget_share)
        fits_sync = chain.tier.seconds_for(whole_bytes) <= policy.sync_deadline_seconds
        is_whole = (
            chain.held is None
            or chain.needs_whole
            or (sync is not None and fits_sync)
            or policy.is_dense
            or whole_bytes <= budget
        )
        if is_whole:
            base, vector, payload = "", checkpoint.vector, b""
        else:
            assert chain.held is not None, "a difference has a base"
            base = chain.digest
            difference = checkpoint.vector - chain.held.vector
            encoded = codec.encode(difference, max(budget, codec.MINIMUM_BUDGET_BYTES))
            vector, payload = chain.held.vector.copy(), encoded.payload
            encoded.decoded.add_to(vector)
        held = Checkpoint(checkpoint.version, vector, checkpoint.integers)
        digest = model_digest(vector, checkpoint.integers, terms.lineage)
        chain.hold(held, digest, (terms.lineage, checkpoint.version))
        head = self._head(held, digest, sync, base, terms)
        self._seq += 1
        content = (
            _whole_content(head, vector)
            if is_whole
            else Content(pack_head(head, payload), memoryview(payload))
        )
        airtime = chain.tier.seconds_for(len(content))
        chain.sent_at = now
        chain.free_at = max(now, chain.free_at) + airtime
        due_at = chain.free_at + DUE_HEARTBEATS * self.heartbeat_seconds
        size = self._chunk_bytes(chain.tier)
        offer = chain.offer(self.cell, self._seq, content, size, base, digest, due_at)
        self._publish(topics.down(self.job, self.cell, chain.tier.name), offer.begin)
        chain.sending, chain.send_from = offer, 0
        self._go_on(chain, now)
        if is_whole:
            chain.restart()
            chain.sent_whole = offer
            chain.needs_whole = False
            chain.whole_until = chain.free_at + self.heartbeat_seconds
        else:
            chain.remember(offer)
            chain.free_at = max(chain.free_at, now + airtime / policy.budget_share)

    def _go_on(self, chain: Chain, now: float) -> None:
        """Send the next burst of a broadcast; what is short is one burst."""
        offer = chain.sending
        assert offer is not None, "a broadcast is under way"
        size = offer.begin.chunk_bytes
        stop = min(chain.send_from + max(1, BURST_BYTES // size), offer.num_chunks)
        topic = topics.down(self.job, self.cell, chain.tier.name)
        for message, chunk in offer.messages(range(chain.send_from, stop)):
            self._publish(topic, message, chunk)
        chain.send_at = now + chain.tier.seconds_for((stop - chain.send_from) * size)
        chain.send_from = stop
        if stop == offer.num_chunks:
            chain.sending = None

    def _head(
        self, held: Checkpoint, digest: str, sync: int | None, base: str, terms: JobTerms
    ) -> ModelContent:
        return model_head(
            version=held.version,
            sync=sync,
            base=base,
            model=digest,
            size=held.vector.size,
            integers=held.integers,
            terms=terms,
        )
