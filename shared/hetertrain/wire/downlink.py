"""An aggregator's end of the conversation with its nodes: collects contents, answers, broadcasts
versions by tier.

The cloud speaks so to its gateways and vehicles, and a gateway to its cell. Per tier it keeps the
model that the tier's nodes hold and broadcasts the compressed difference to it, with error
feedback: the kept model moves by what was decoded, so what a budget left out goes with the next
difference. All nodes of a tier hold bit-identical models, checked by digest. A whole model restarts
a tier's chain: at a synchronisation, and when a node's heartbeat shows that it lost it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hetertrain import codec
from hetertrain.core.aggregator import SyncNotice
from hetertrain.core.gate import Verdict
from hetertrain.core.tiers import TIERS, Tier
from hetertrain.core.update import Checkpoint, model_digest
from hetertrain.core.worker import PERIODS_MAX
from hetertrain.errors import FrameError
from hetertrain.wire import topics
from hetertrain.wire.contents import JobTerms, model_head, verdict_message
from hetertrain.wire.frames import (
    Begin,
    Chunk,
    Flushed,
    Message,
    Missing,
    NodeState,
    Pull,
    Sync,
    TierConfirmed,
    pack,
    unpack,
)
from hetertrain.wire.transfer import Receiver, Sender
from hetertrain.wire.uplink import HEARTBEAT_SECONDS, FrameRefused, Outgoing

SILENCE_HEARTBEATS = 4
"""A node that was not heard for so many heartbeats counts as gone until it is heard again."""
GATHER_SECONDS = 1.0
"""How long a whole model waits for more nodes that need it."""
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


@dataclass(slots=True)
class _Chain:
    """What the nodes of one tier hold."""

    tier: Tier
    held: Checkpoint | None = None
    digest: str = ""
    newest: tuple[str, int] | None = None
    """Lineage and version of ``held``."""
    recent: list[str] = field(default_factory=list)
    """Digests that a node may still hold because the newest is on its way."""
    seq: int = 0
    sent_at: float = -1e9
    free_at: float = 0.0
    """When the link has had time for what was sent."""
    whole_until: float = 0.0
    """Until then a whole model is on its way; nobody needs to ask for one."""
    needs_whole: bool = True


@dataclass(slots=True)
class Downlink:
    """One aggregator's conversation with the nodes of its cell."""

    job: str
    cell: str
    tiers: Mapping[str, Tier] = field(default_factory=lambda: TIERS)
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    nodes: dict[str, NodeState] = field(default_factory=dict)
    _heard_at: dict[str, float] = field(default_factory=dict)
    _receivers: dict[str, Receiver] = field(default_factory=dict)
    _verdicts: dict[str, Verdict] = field(default_factory=dict)
    _chains: dict[str, _Chain] = field(default_factory=dict)
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
        for node, heard_at in list(self._heard_at.items()):
            if now > heard_at + self.silence_seconds:
                self._forget(node)
        wake_at = now + self.heartbeat_seconds
        for chain in self._chains.values():
            if self._has_news(chain):
                if now >= chain.free_at:
                    self._broadcast(chain, now, None)
                wake_at = min(wake_at, max(chain.free_at, now + 0.05))
        ready = DownlinkReady(tuple(self._send), tuple(self._events), wake_at)
        self._send.clear()
        self._events.clear()
        return ready

    def _has_news(self, chain: _Chain) -> bool:
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
            chain = _Chain(tier, free_at=now + GATHER_SECONDS)
            self._chains[tier.name] = chain
            self._continue(chain, state.model)
        if now >= chain.whole_until and self._has_lost_chain(chain, state.model, now):
            # Those who ask together share one broadcast, and need not put it off.
            chain.needs_whole = True
            chain.free_at = max(chain.free_at, now + GATHER_SECONDS)
            chain.whole_until = chain.free_at + self.heartbeat_seconds

    def _confirm(self, state: NodeState, now: float) -> None:
        """Let a node into the tier that it proposes, when it holds what its tier was sent last.

        The first one to come takes the model along: the new tier goes on from there, without a
        whole model.
        """
        tier = self.tiers.get(state.proposed_tier)
        if tier is None:
            raise FrameError("tier", f"unknown tier {state.proposed_tier!r}")
        left = self._chains.get(state.tier)
        is_current = left is not None and state.model == left.digest
        if left is not None and state.model in left.recent and now < left.free_at:
            return  # A difference is on its way; the proposal comes again.
        if tier.name not in self._chains:
            chain = _Chain(tier, free_at=now)
            if left is not None and is_current:
                chain.held, chain.digest, chain.newest = left.held, left.digest, left.newest
                chain.needs_whole = False
            self._chains[tier.name] = chain
        self._publish(topics.inbox(state.node), TierConfirmed(tier=tier.name))

    def _leave(self, tier: str) -> None:
        """Forget what a tier holds when its last node has gone to another one."""
        if all(state.tier != tier for state in self.nodes.values()):
            self._chains.pop(tier, None)

    def _continue(self, chain: _Chain, model: str) -> None:
        """Begin a chain where its first node stands, if that is the newest model."""
        checkpoint, terms = self._checkpoint, self._terms
        if checkpoint is None or terms is None or not model:
            return
        if model == model_digest(checkpoint.vector, checkpoint.integers, terms.lineage):
            chain.held, chain.digest, chain.needs_whole = checkpoint, model, False
            chain.newest = (terms.lineage, checkpoint.version)

    def _has_lost_chain(self, chain: _Chain, model: str, now: float) -> bool:
        if model == chain.digest:
            return False
        return model not in chain.recent or now > chain.free_at + self.silence_seconds

    def _forget(self, node: str) -> None:
        del self._heard_at[node]
        self.nodes.pop(node, None)
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

    def _broadcast(self, chain: _Chain, now: float, sync: int | None) -> None:
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
            base, vector = "", checkpoint.vector
            payload = codec.encode(vector, None).payload
        else:
            assert chain.held is not None, "a difference has a base"
            base = chain.digest
            difference = checkpoint.vector - chain.held.vector
            encoded = codec.encode(difference, max(budget, codec.MINIMUM_BUDGET_BYTES))
            vector, payload = chain.held.vector.copy(), encoded.payload
            encoded.decoded.add_to(vector)
        chain.held = Checkpoint(checkpoint.version, vector, checkpoint.integers)
        chain.newest = (terms.lineage, checkpoint.version)
        if chain.digest:
            chain.recent = [*chain.recent[-7:], chain.digest]
        chain.digest = model_digest(vector, checkpoint.integers, terms.lineage)
        head = model_head(
            version=checkpoint.version,
            sync=sync,
            base=base,
            model=chain.digest,
            size=vector.size,
            integers=checkpoint.integers,
            terms=terms,
        )
        content = pack(head, payload)
        self._send_chunks(chain, content)
        airtime = chain.tier.seconds_for(len(content))
        chain.sent_at = now
        chain.free_at = max(now, chain.free_at) + airtime
        if is_whole:
            chain.needs_whole = False
            chain.whole_until = chain.free_at + self.heartbeat_seconds
        else:
            chain.free_at = max(chain.free_at, now + airtime / policy.budget_share)

    def _send_chunks(self, chain: _Chain, content: bytes) -> None:
        chain.seq += 1
        sender = Sender(
            node=self.cell,
            seq=chain.seq,
            content=content,
            chunk_bytes=chain.tier.chunk_bytes,
            window=len(content),
            airtime_seconds=0.0,
        )
        topic = topics.down(self.job, self.cell, chain.tier.name)
        for message, chunk in sender.due(0.0):
            self._publish(topic, message, chunk)
