"""The edge gateway: a node to the cloud, an aggregator to its cell.

South it collects its vehicles' updates, makes them durable and answers; north it sends one merged
partial at a time and follows the cloud's versions, which it passes on to each tier of its cell. It
is an application relay with its own inbox and outbox, not a bridge of brokers, and needs no task
and no torch.

The inbox's mark of a record is 0 while it is collected, and the partial's number while that is in
flight.
"""

from __future__ import annotations

import base64
import time
from collections import Counter
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from hetertrain.cell import Cell
from hetertrain.cell import Event as CellEvent
from hetertrain.core.aggregator import (
    PartialArrived,
    SyncNotice,
    Tick,
)
from hetertrain.core.combiner import (
    Combiner,
    Event,
    Forward,
    PartialSettled,
    Ready,
    VersionAnnounced,
)
from hetertrain.core.gate import Gate, Outcome, Verdict
from hetertrain.core.tiers import TIERS
from hetertrain.core.update import Checkpoint
from hetertrain.errors import TransportError
from hetertrain.logging import get_logger
from hetertrain.service import BrokerSettings, Mailbox, Stop
from hetertrain.transport import mqtt
from hetertrain.transport.inbox import Inbox
from hetertrain.transport.outbox import Outbox
from hetertrain.wire import topics
from hetertrain.wire.contents import (
    model_head,
    model_terms,
    pack_partial,
    pack_update,
    unpack_as,
    unpack_update,
)
from hetertrain.wire.downlink import Downlink
from hetertrain.wire.frames import AggregatorStatus, ModelContent, NodeState, pack
from hetertrain.wire.uplink import (
    FrameRefused,
    ModelReceived,
    Outgoing,
    Settled,
    SyncAnnounced,
    Uplink,
    UplinkEvent,
    UplinkReady,
)

STATUS_SECONDS = 1.0
_OPEN = 0


class EdgeSettings(BrokerSettings):
    """Settings of one edge gateway. The broker is the cloud's (north); the cell's may be another
    (south).
    """

    section: ClassVar[str] = "edge"

    node: str = Field(description="this gateway's stable id, and the name of its cell")
    tier: str = Field("t4", description="the class of this gateway's link to the cloud: t0 to t4")
    south_host: str | None = Field(None, description="the cell's broker; unset: the same broker")
    south_port: int | None = Field(None, ge=1, le=65535, description="its port")


Side = Literal["north", "south"]
Input = tuple[Side, mqtt.Event]


class EdgeService:
    """One gateway at work."""

    def __init__(self, settings: EdgeSettings) -> None:
        topics.check_name("node", settings.node)
        topics.check_name("job", settings.job)
        self._settings = settings
        self._mailbox: Mailbox[Input] = Mailbox()
        self._log = get_logger(node=settings.node)
        directory = settings.state_directory / settings.node
        self._inbox = Inbox(directory / "inbox.db")
        self._outbox = Outbox(directory / "outbox.db", int(time.time() * 1000))
        state = NodeState(
            node=settings.node,
            job=settings.job,
            cell=topics.CLOUD_CELL,
            tier=settings.tier,
            role="edge",
            is_online=True,
            active=0,
            label="gateway",
        )
        self._uplink = Uplink(state, TIERS[settings.tier])
        downlink = Downlink(settings.job, settings.node)
        north = settings.endpoint(settings.node)
        south = replace(
            north,
            client_id=f"{settings.node}-south",
            host=settings.south_host or north.host,
            port=settings.south_port or north.port,
        )
        self._north = mqtt.Connection(
            north,
            self._uplink.subscriptions,
            lambda event: self._mailbox.put(("north", event)),
            self._uplink.will,
        )
        connection = mqtt.Connection(
            south, downlink.subscriptions, lambda event: self._mailbox.put(("south", event))
        )
        self._cell = Cell(downlink, connection, self._take_cell, self._log)
        self._combiner: Combiner | None = None
        self._num_partials = 0
        self._started_at = time.monotonic()
        self._wakes_at = {"combiner": 0.0, "uplink": 0.0, "status": 0.0}
        self._updates_by_lag: Counter[int] = Counter()

    def run(self) -> int:
        """Work until stopped; return the exit code."""
        self._mailbox.stop_on_signals()
        self._recover()
        self._north.start()
        self._cell.connection.start()
        self._log.info("gateway_started")
        try:
            self._serve()
        finally:
            self._end()
        return 0

    def _recover(self) -> None:
        """Take up what a crash interrupted: the partial in flight, and updates not yet in one."""
        noted = self._inbox.noted("model")
        if noted is None:
            return
        head, _ = unpack_as(ModelContent, base64.b64decode(noted))
        self._combiner = self._build_combiner(head)
        pending = self._outbox.pending()
        in_flight = _OPEN if pending is None else pending.seq
        self._inbox.remark_all_but(in_flight, _OPEN)
        now = time.monotonic()
        self._combiner.recollect(map(unpack_update, self._inbox.read(_OPEN, _OPEN)), now)
        if pending is not None:
            self._combiner.is_in_flight = True
            self._apply_uplink(self._uplink.offer(pending.seq, pending.content, now))
        self._log.info("gateway_recovered", updates=len(self._combiner.open.contributions))

    def _build_combiner(self, head: ModelContent) -> Combiner:
        terms = model_terms(head)
        policy = terms.policy
        gate = Gate(head.layout, head.size, len(head.integers), policy.max_lag)
        combiner = Combiner(gate, policy, terms.weights, head.version, dict(terms.statistics))
        for state in self._cell.downlink.nodes.values():
            combiner.members.seen(state.node, state.active)
        return combiner

    def _serve(self) -> None:
        while True:
            event = self._mailbox.take(min(self._cell.wakes_at, *self._wakes_at.values()))
            if isinstance(event, Stop):
                return
            now = time.monotonic()
            if event is not None:
                self._take(*event, now)
            if now >= self._wakes_at["combiner"]:
                self._step(Tick(), now)
            if now >= self._wakes_at["uplink"]:
                self._report()
                self._apply_uplink(self._uplink.tick(now))
            if now >= self._cell.wakes_at:
                self._cell.tick(now)
            if now >= self._wakes_at["status"]:
                self._wakes_at["status"] = now + STATUS_SECONDS
                self._publish_status(now)

    def _take(self, side: Side, event: mqtt.Event, now: float) -> None:
        match side, event:
            case "south", _:
                self._cell.take(event, now)
            case _, mqtt.Received(topic, frame):
                self._apply_uplink(self._uplink.received(topic, frame, now))
            case _, mqtt.Connected():
                self._log.info("connected", cell=topics.CLOUD_CELL)
                self._report()
                self._apply_uplink(self._uplink.connected(now))
            case _, mqtt.Delivered(token):
                self._apply_uplink(self._uplink.delivered(token, now))
            case _, mqtt.Disconnected(reason, is_final):
                self._log.warning("disconnected", reason=reason)
                if is_final:
                    raise TransportError(reason)
                self._apply_uplink(self._uplink.disconnected(now))
            case _, mqtt.Denied(what, reason):
                self._log.error("access_denied", what=what, reason=reason)

    def _take_cell(self, event: CellEvent, now: float) -> None:
        if isinstance(event, PartialArrived):
            reason = "a gateway merges updates, not partials"
            verdict = Verdict(event.node, event.seq, Outcome.QUARANTINED, reason)
            self._cell.answer((verdict,), now)
        else:
            self._step(event, now)

    def _apply_uplink(self, ready: UplinkReady) -> None:
        self._north.publish(ready.send)
        self._wakes_at["uplink"] = ready.wake_at
        for event in ready.events:
            self._take_uplink(event, time.monotonic())

    def _take_uplink(self, event: UplinkEvent, now: float) -> None:
        match event:
            case ModelReceived():
                self._take_model(event, now)
            case SyncAnnounced(sync, deadline_seconds):
                self._step(SyncNotice(sync, deadline_seconds), now)
            case Settled(verdict, _):
                self._step(PartialSettled(verdict), now)
            case FrameRefused(reason, detail):
                self._cell.refuse(reason, detail)

    def _take_model(self, model: ModelReceived, now: float) -> None:
        """Learn a version, and pass it on to the cell."""
        head = model_head(
            version=model.version,
            sync=model.sync,
            base="",
            model="",
            size=model.vector.size,
            integers=model.integers,
            terms=model.terms,
        )
        self._inbox.note("model", base64.b64encode(pack(head)).decode())
        if self._combiner is None:
            self._combiner = self._build_combiner(head)
        self._step(VersionAnnounced(model.version, model.terms.statistics, model.sync), now)
        checkpoint = Checkpoint(model.version, model.vector, model.integers)
        self._cell.release(checkpoint, model.sync, model.terms, now)

    def _step(self, event: Event, now: float) -> None:
        if self._combiner is None:
            self._wakes_at["combiner"] = now + 1.0
            return  # No version yet, so no node of the cell has one either.
        self._apply(self._combiner.handle(event, now), now)

    def _apply(self, ready: Ready, now: float) -> None:
        assert self._combiner is not None, "the combiner has just stepped"
        self._inbox.append(_OPEN, [pack_update(update) for update in ready.persist])
        self._wakes_at["combiner"] = ready.wake_at if ready.wake_at is not None else now + 1.0
        for update in ready.persist:
            self._updates_by_lag[self._combiner.version - update.base_version] += 1
        self._cell.answer(ready.verdicts, now)
        # The next partial is stored before a refused one returns its updates to the open section.
        forwarded = None if ready.forward is None else self._store(ready.forward)
        if ready.settled is not None:
            self._settle(ready.settled, now)
        if forwarded is not None:
            self._apply_uplink(self._uplink.offer(*forwarded, now))
        if ready.notice is not None:
            self._cell.notice(ready.notice, now)
        if ready.flushed is not None:
            self._apply_uplink(self._uplink.flushed(ready.flushed, now))

    def _store(self, forward: Forward) -> tuple[int, bytes]:
        """Put a partial into the outbox; its updates stay in the inbox until the cloud has it."""
        seq = self._outbox.next_seq
        content = pack_partial(self._settings.node, seq, forward.sync, forward.partial)
        self._inbox.remark(_OPEN, seq)
        self._outbox.put(seq, content)
        self._num_partials += 1
        return seq, content

    def _settle(self, verdict: Verdict, now: float) -> None:
        """End the duty for a partial's updates, or collect again those the cloud has not got."""
        assert self._combiner is not None, "a partial was in flight"
        if verdict.outcome is Outcome.REJECTED:
            self._log.warning("partial_refused", seq=verdict.seq, reason=verdict.reason)
            self._cell.refused["partial"] += 1
            updates = [unpack_update(c) for c in self._inbox.read(verdict.seq, verdict.seq)]
            kept = [u for u in updates if (u.node, u.seq) not in verdict.known]
            self._inbox.append(_OPEN, [pack_update(update) for update in kept])
            self._combiner.recollect(kept, now)
        elif verdict.outcome is Outcome.QUARANTINED:
            self._log.error("partial_quarantined", seq=verdict.seq, reason=verdict.reason)
            self._cell.refused["partial"] += 1
        self._inbox.forget(verdict.seq, verdict.seq)
        self._outbox.settle(verdict.seq)

    def _report(self) -> None:
        combiner = self._combiner
        waiting = "the first model" if combiner is None else combiner.waiting_for().text
        self._uplink.report(
            replace(
                self._uplink.state,
                active=len(self._cell.downlink.nodes),
                doing="joining" if combiner is None else "collecting",
                waiting_for=waiting[:500],
                updates=self._num_partials,
                bytes_up=self._north.bytes_up,
                bytes_down=self._north.bytes_down,
            )
        )

    def _publish_status(self, now: float) -> None:
        combiner = self._combiner
        if combiner is None:
            return
        waiting = combiner.waiting_for()
        status = AggregatorStatus(
            job=self._settings.job,
            cell=self._settings.node,
            version=combiner.version,
            elapsed_seconds=now - self._started_at,
            sync=combiner.members.sync or 0,
            sync_in_seconds=None,
            is_syncing=combiner.members.sync is not None,
            active=combiner.members.num_active,
            open_updates=len(combiner.open.contributions),
            metrics={},
            updates_by_lag=dict(self._updates_by_lag),
            refused=dict(self._cell.refused),
            waiting_code=waiting.code,
            waiting_for=waiting.text[:500],
        )
        topic = topics.status(self._settings.job, self._settings.node)
        self._north.publish((Outgoing(topic, pack(status)),))

    def _end(self) -> None:
        self._north.publish((self._uplink.will,))
        self._north.stop()
        self._cell.connection.stop()
        self._inbox.close()
        self._outbox.close()
        self._log.info("gateway_stopped", partials=self._num_partials)
