"""An aggregator's versions on their way to its nodes, tier by tier.

Per tier it keeps the model that the tier's nodes hold and broadcasts the compressed difference to
it, with error feedback: the kept model moves by what was decoded, so what a budget left out goes
with the next difference. All nodes of a tier hold bit-identical models, checked by digest
(``chain``). A whole model restarts a tier's chain at a synchronisation; a node whose heartbeat
shows that it fell behind is given what it lacks, alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hetertrain import codec
from hetertrain.core.layout import Vector
from hetertrain.core.tiers import Tier
from hetertrain.core.update import Checkpoint, model_digest
from hetertrain.core.worker import PERIODS_MAX
from hetertrain.errors import FrameError
from hetertrain.wire import topics
from hetertrain.wire.chain import Chain, Newest, Offer
from hetertrain.wire.contents import JobTerms, model_head
from hetertrain.wire.frames import pack_head
from hetertrain.wire.messages import Begin, ModelContent, NodeState, TierConfirmed
from hetertrain.wire.signing import Sign, signed
from hetertrain.wire.traffic import Traffic
from hetertrain.wire.transfer import RETRY_SECONDS_MIN, Content, chunk_bytes_for

GATHER_SECONDS = 1.0
"""How long a whole model waits for more nodes that need it."""
DUE_HEARTBEATS = 2
"""A node that lacks a difference so many heartbeats after its broadcast has missed it."""
WHOLE_IDLE_SECONDS = 60.0
"""A whole model that nobody asked for so long is no longer kept ready."""
SERVE_SECONDS = 0.1
"""A crowd that needs whole models is served a burst at a time, so often."""
RETURNS_PER_SECOND = 100
"""After an outage a fleet comes back at this rate."""
BURST_BYTES = 4 << 20
"""A longer broadcast goes out in bursts, at its tier's rate, so that no queue has to hold it."""


@dataclass(slots=True)
class Broadcaster:
    """Brings each node of one cell the model that its tier holds."""

    job: str
    cell: str
    tiers: Mapping[str, Tier]
    heartbeat_seconds: float
    nodes: Mapping[str, NodeState]
    """Those who are there, by name; their owner keeps them."""
    publish: Callable[..., None]
    """Sends a message, and a payload if there is one, on a topic."""
    traffic: Traffic
    sign: Sign | None = None
    checkpoint: Checkpoint | None = None
    chains: dict[str, Chain] = field(default_factory=dict)
    _terms: JobTerms | None = None
    _seq: int = 0
    """Numbers everything that goes out in chunks."""
    _served_until: dict[str, float] = field(default_factory=dict)
    """Until then a node has what it was given last under way."""
    _packet_bytes_max: int | None = None

    def connected(self, packet_bytes_max: int | None) -> None:
        """The connection stands; nothing larger than the broker takes is offered from now on."""
        if packet_bytes_max == self._packet_bytes_max:
            return
        self._packet_bytes_max = packet_bytes_max
        for chain in self.chains.values():
            chain.restart()
            chain.sending = chain.sent_whole = chain.whole = None

    def release(
        self, checkpoint: Checkpoint, sync: int | None, terms: JobTerms, now: float
    ) -> None:
        """Announce a version: to each tier when its link is free, at once and whole where it ends a
        sync.
        """
        self.checkpoint, self._terms = checkpoint, terms
        for chain in self.chains.values():
            if chain.held is None:
                self._continue(chain, {s.model for s in self._nodes_of(chain)})
            if sync is not None:
                self._broadcast(chain, now, sync)

    def tick(self, now: float) -> float:
        """Send what is due; return when to come again."""
        wakes = [self._tick_chain(chain, now) for chain in self.chains.values()]
        return min(wakes, default=now + self.heartbeat_seconds)

    def hear(self, state: NodeState, before: NodeState | None, now: float) -> None:
        """Take a node's heartbeat, and the one before it: is it in its tier, and does it hold what
        the tier holds?

        Raises:
            FrameError: it proposes a tier that there is not.
        """
        if before is not None and before.tier != state.tier:
            self._leave(before.tier)
        if state.proposed_tier:
            self._confirm(state, now)
        chain = self.chains.get(state.tier)
        if chain is None:
            # Those who join together share the first broadcast.
            chain = Chain(self.tiers[state.tier], free_at=now + GATHER_SECONDS)
            self.chains[state.tier] = chain
            self._continue(chain, {state.model})
        if not state.follows:
            return
        if state.model == chain.digest:
            chain.needy.pop(state.node, None)
            self._served_until.pop(state.node, None)
        elif now >= self._served_until.get(state.node, 0.0):
            self._catch_up(chain, state, now)

    def forget(self, node: str) -> None:
        """A node is gone."""
        self._served_until.pop(node, None)

    def _tick_chain(self, chain: Chain, now: float) -> float:
        """Do what is due in one tier; return when to come again."""
        wake_at = now + self.heartbeat_seconds
        if chain.needy and self.checkpoint is not None:
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
        if self.checkpoint is None or self._terms is None:
            return False
        newest = _newest(self.checkpoint, self._terms)
        return chain.held is None or chain.newest != newest or chain.needs_whole

    def _catch_up(self, chain: Chain, state: NodeState, now: float) -> None:
        """Give a node the difference that it misses, or see that it gets a whole model."""
        difference = chain.after(state.model)
        if difference is not None:
            if now >= difference.due_at:
                self._give(chain, state.node, difference, now)
        elif now >= chain.whole_until and not chain.needs_whole:
            if not chain.needy:
                chain.serve_at = now + GATHER_SECONDS
            chain.needy[state.node] = None

    def _serve(self, chain: Chain, now: float) -> None:
        """Give those who need a whole model one: each alone, or by broadcast if most do."""
        needy = [node for node in chain.needy if node in self.nodes]
        chain.needy.clear()
        num_nodes = len(self._nodes_of(chain))
        assert self._terms is not None, "there is a version to give"
        is_current = chain.newest is not None and chain.newest[0] == self._terms.lineage
        # Those whom a broadcast has just not reached are not sent another one.
        may_broadcast = now > chain.whole_until + WHOLE_IDLE_SECONDS
        are_most = may_broadcast and 2 * len(needy) > num_nodes
        # For who is overtaken at most every other second of the link: differences go on between.
        is_due = chain.is_overtaken and now > chain.whole_until + chain.whole_airtime
        if chain.held is None or not is_current or are_most or is_due:
            chain.needs_whole = True
            chain.is_overtaken = False
            return
        whole = self._whole(chain, now)
        window_bytes = chain.tier.window_chunks * whole.begin.chunk_bytes
        at_once = max(1, BURST_BYTES // window_bytes)
        for node in needy[:at_once]:
            self._give(chain, node, whole, now)
        chain.needy.update(dict.fromkeys(needy[at_once:]))
        chain.serve_at = now + SERVE_SECONDS

    def _whole(self, chain: Chain, now: float) -> Offer:
        """Return a whole model from which differences go on, made now if there is none."""
        assert chain.held is not None, "the tier holds a model"
        assert self._terms is not None, "a model is held, so there was a version"
        if not chain.offers_whole:
            head = self._head(chain.held, chain.digest, None, "", self._terms)
            content = _whole_content(head, chain.held.vector)
            chain.whole = self._offer(chain, content, "", now)
        assert chain.whole is not None, "it is on offer now"
        return chain.whole

    def _give(self, chain: Chain, node: str, offer: Offer, now: float) -> None:
        """Offer a content to one node, with its first chunks."""
        self.publish(topics.inbox(node), offer.begin)
        self._send_to(chain, node, offer, range(offer.num_chunks), now)

    def resend(self, node: str, seq: int, bitmap: memoryview, now: float) -> None:
        """Send the next chunks that a node misses; it asks again when it has them."""
        state = self.nodes.get(node)
        chain = None if state is None else self.chains.get(state.tier)
        if state is None or chain is None or chain.held is None:
            return  # Not heard yet; its heartbeat tells what it needs.
        offer = chain.find(seq)
        if offer is None:
            # A broadcast that has not reached it, or what it was given is long past.
            chain.needy[node] = None
            chain.is_overtaken |= state.model != chain.digest and chain.after(state.model) is None
            return
        bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")
        missing = np.flatnonzero(bits[: offer.num_chunks]).tolist()
        self._send_to(chain, node, offer, missing, now)

    def _send_to(
        self, chain: Chain, node: str, offer: Offer, indices: Sequence[int], now: float
    ) -> None:
        window = indices[: chain.tier.window_chunks]
        self._publish(topics.inbox(node), offer, window)
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
        left = self.chains.get(state.tier)
        if left is not None and left.held is not None and tier.name not in self.chains:
            if left.after(state.model) is not None and now < left.free_at:
                return  # A difference is on its way; the proposal comes again.
            chain = Chain(tier, free_at=now, needs_whole=state.model != left.digest)
            if left.newest is not None and not chain.needs_whole:
                chain.hold(left.held, left.digest, left.newest)
            self.chains[tier.name] = chain
        self._served_until.pop(state.node, None)
        self.publish(topics.inbox(state.node), TierConfirmed(tier=tier.name))

    def _leave(self, tier: str) -> None:
        """Forget what a tier holds when its last node has gone to another one."""
        chain = self.chains.get(tier)
        if chain is not None and not self._nodes_of(chain):
            del self.chains[tier]

    def _continue(self, chain: Chain, models: set[str]) -> None:
        """Begin a chain where its first nodes stand, if one of them has the newest model."""
        checkpoint, terms = self.checkpoint, self._terms
        if checkpoint is None or terms is None or not any(models):
            return
        digest = model_digest(checkpoint.vector, checkpoint.integers, terms.lineage)
        if digest in models:
            chain.hold(checkpoint, digest, _newest(checkpoint, terms))
            chain.needs_whole = False

    def _nodes_of(self, chain: Chain) -> list[NodeState]:
        return [state for state in self.nodes.values() if state.tier == chain.tier.name]

    def _broadcast(self, chain: Chain, now: float, sync: int | None) -> None:
        """Send the newest version to one tier, as a difference where that is less."""
        assert self.checkpoint is not None, "there is a version to send"
        assert self._terms is not None, "a version comes with its terms"
        checkpoint, terms = self.checkpoint, self._terms
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
        chain.hold(held, digest, _newest(checkpoint, terms))
        head = self._head(held, digest, sync, base, terms)
        content = (
            _whole_content(head, vector)
            if is_whole
            else Content(pack_head(head, payload), memoryview(payload))
        )
        airtime = chain.tier.seconds_for(len(content))
        chain.sent_at = now
        chain.free_at = max(now, chain.free_at) + airtime
        due_at = chain.free_at + DUE_HEARTBEATS * self.heartbeat_seconds
        offer = self._offer(chain, content, base, due_at)
        self.publish(topics.down(self.job, self.cell, chain.tier.name), offer.begin)
        chain.sending, chain.send_from = offer, 0
        self._go_on(chain, now)
        if is_whole:
            chain.restart()
            chain.sent_whole = offer
            chain.needs_whole = False
            chain.whole_until = chain.free_at + self.heartbeat_seconds
            chain.whole_airtime = airtime
        else:
            chain.remember(offer)
            chain.free_at = max(chain.free_at, now + airtime / policy.budget_share)

    def _offer(self, chain: Chain, content: Content, base: str, due_at: float) -> Offer:
        """Wrap up a content that leads to what the tier holds."""
        self._seq += 1
        begin = Begin(
            node=self.cell,
            seq=self._seq,
            size_bytes=len(content),
            chunk_bytes=chunk_bytes_for(chain.tier.chunk_bytes, self._packet_bytes_max),
            digest=content.digest(),
        )
        return Offer(begin, content, base, chain.digest, due_at)

    def _go_on(self, chain: Chain, now: float) -> None:
        """Send the next burst of a broadcast; what is short is one burst."""
        offer = chain.sending
        assert offer is not None, "a broadcast is under way"
        size = offer.begin.chunk_bytes
        stop = min(chain.send_from + max(1, BURST_BYTES // size), offer.num_chunks)
        topic = topics.down(self.job, self.cell, chain.tier.name)
        self._publish(topic, offer, range(chain.send_from, stop))
        chain.send_at = now + chain.tier.seconds_for((stop - chain.send_from) * size)
        chain.send_from = stop
        if stop == offer.num_chunks:
            chain.sending = None

    def _publish(self, topic: str, offer: Offer, indices: Sequence[int]) -> None:
        """Send chunks of a content."""
        assert self.checkpoint is not None, "what is on offer is a version"
        num_bytes = 0
        for message, chunk in offer.messages(indices):
            self.publish(topic, message, chunk)
            num_bytes += len(chunk)
        self.traffic.went(num_bytes, len(offer.content), self.checkpoint.vector.size)

    def _head(
        self, held: Checkpoint, digest: str, sync: int | None, base: str, terms: JobTerms
    ) -> ModelContent:
        head = model_head(
            version=held.version,
            sync=sync,
            base=base,
            model=digest,
            size=held.vector.size,
            integers=held.integers,
            terms=terms,
        )
        head = replace(head, return_seconds=len(self.nodes) / RETURNS_PER_SECOND)
        return signed(head, self.job, self.cell, self.sign)


def _newest(checkpoint: Checkpoint, terms: JobTerms) -> Newest:
    return terms.lineage, checkpoint.version, terms.local


def _whole_content(head: ModelContent, vector: Vector) -> Content:
    """Put a head before a model, whose memory the content shares."""
    codec_head, values = codec.whole(vector)
    return Content(pack_head(head, codec_head, values) + codec_head, values)
