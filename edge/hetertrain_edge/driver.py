"""One gateway's machines and stores as a whole, driven by events and time: no thread, no clock, no
socket.

South it collects its vehicles' updates, makes them durable and answers; north it sends one merged
partial at a time and follows the cloud's versions, which it passes on to each tier of its cell. It
is an application relay with its own inbox and outbox, not a bridge of brokers, and needs no task
and no torch.

The inbox's mark of a record is 0 while it is collected, and the partial's number while that is in
flight.
"""

from __future__ import annotations

import base64
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from structlog.typing import FilteringBoundLogger

from hetertrain.cell import Cell, Link
from hetertrain.cell import Event as CellEvent
from hetertrain.core.aggregator import PartialArrived, Pulled, SyncNotice, Tick
from hetertrain.core.combiner import (
    Combiner,
    Event,
    Forward,
    PartialSettled,
    Ready,
    VersionAnnounced,
)
from hetertrain.core.gate import Gate, Outcome, Verdict
from hetertrain.core.update import Checkpoint
from hetertrain.errors import StoreError, TransportError
from hetertrain.transport import mqtt
from hetertrain.transport.inbox import Inbox
from hetertrain.transport.newest import NewestNote
from hetertrain.transport.outbox import Outbox
from hetertrain.wire import topics
from hetertrain.wire.contents import (
    model_head,
    model_terms,
    pack_partial,
    pack_update,
    unpack_as,
    unpack_partial,
    unpack_update,
)
from hetertrain.wire.downlink import Downlink
from hetertrain.wire.frames import AggregatorStatus, ModelContent, pack
from hetertrain.wire.uplink import (
    FrameRefused,
    JobOrdered,
    ModelReceived,
    Outgoing,
    Settled,
    SyncAnnounced,
    TierChanged,
    Uplink,
    UplinkEvent,
    UplinkReady,
)

_OPEN = 0

Side = Literal["north", "south"]


class GatewayDriver:
    """One gateway at work, between its cell's link (south) and the cloud's (north)."""

    def __init__(
        self,
        *,
        uplink: Uplink,
        downlink: Downlink,
        directory: Path,
        first_seq: int,
        north: Link,
        south: Link,
        log: FilteringBoundLogger,
        relays_orders: bool = False,
    ) -> None:
        """Open the stores in ``directory``; a new outbox counts from ``first_seq``. Where the
        cell has a broker of its own, an operator's orders must be relayed to it.

        Raises:
            StoreError: the directory is not usable.
        """
        self.uplink = uplink
        self._node = uplink.state.node
        self._north = north
        self._relays_orders = relays_orders
        self._order: bytes | None = None
        """The newest order of an operator, as it came."""
        self._log = log
        self._inbox = Inbox(directory / "inbox.db")
        self._outbox = Outbox(directory / "outbox.db", first_seq)
        self._newest = NewestNote(self._outbox, uplink)
        self.cell = Cell(downlink, south, self._take_cell, log)
        self._combiner: Combiner | None = None
        self.num_partials = 0
        self._started_at = 0.0
        self._uplink_wakes_at = 0.0
        self._combiner_wakes_at = 0.0
        self._updates_by_lag: Counter[int] = Counter()

    def recover(self, now: float) -> None:
        """Take up what a crash interrupted: the partial in flight, and updates not yet in one."""
        self._started_at = now
        for name, damage in (("inbox", self._inbox.damage), ("outbox", self._outbox.damage)):
            if damage:
                self._log.error(f"{name}_damaged", damage=damage)
        noted = self._inbox.noted("model")
        if noted is None:
            return
        head, _ = unpack_as(ModelContent, base64.b64decode(noted))
        self._combiner = self._build_combiner(head)
        pending = self._outbox.pending()
        in_flight = _OPEN if pending is None else pending.seq
        self._inbox.remark_all_but(in_flight, _OPEN)
        self._combiner.recollect(map(unpack_update, self._inbox.read(_OPEN, _OPEN)), now)
        if pending is not None:
            _, partial = unpack_partial(pending.content)
            self._combiner.is_in_flight = True
            self._combiner.bases_in_flight = frozenset(partial.groups)
            self._apply_uplink(self.uplink.offer(pending.seq, pending.content, now), now)
        self._log.info("gateway_recovered", updates=len(self._combiner.open.contributions))

    def _build_combiner(self, head: ModelContent) -> Combiner:
        terms = model_terms(head)
        policy = terms.policy
        gate = Gate(head.layout, head.size, len(head.integers), policy.max_lag, head.lineage)
        combiner = Combiner(gate, policy, terms.weights, head.version, dict(terms.statistics))
        for state in self.cell.downlink.nodes.values():
            combiner.members.seen(state.node, state.active)
        return combiner

    @property
    def wakes_at(self) -> float:
        """When to call ``tick``, if nothing happens before."""
        return min(self._uplink_wakes_at, self._combiner_wakes_at, self.cell.wakes_at)

    def tick(self, now: float) -> None:
        """Do what is due.

        Raises:
            StoreError: a store cannot be written.
        """
        if now >= self._combiner_wakes_at:
            self._step(Tick(), now)
        if now >= self._uplink_wakes_at:
            self._report()
            self._apply_uplink(self.uplink.tick(now), now)
        if now >= self.cell.wakes_at:
            self.cell.tick(now)
        self._newest.tick(now)

    def take(self, side: Side, event: mqtt.Event, now: float) -> None:
        """Take what happened on one of the links.

        Raises:
            TransportError: the connection ended for good.
            StoreError: a store cannot be written; nothing was acknowledged.
        """
        match side, event:
            case "south", mqtt.Connected():
                self.cell.take(event, now)
                self._relay_order()
            case "south", _:
                self.cell.take(event, now)
            case _, mqtt.Received(topic, frame):
                self._apply_uplink(self.uplink.received(topic, frame, now), now)
            case _, mqtt.Connected(packet_bytes_max):
                self._log.info("connected", cell=self.uplink.state.cell)
                self._report()
                self._apply_uplink(self.uplink.connected(now, packet_bytes_max), now)
            case _, mqtt.Delivered(token):
                self._apply_uplink(self.uplink.delivered(token, now), now)
            case _, mqtt.Disconnected(reason, is_final):
                self._log.warning("disconnected", reason=reason)
                if is_final:
                    raise TransportError(reason)
                self._apply_uplink(self.uplink.disconnected(now), now)
            case _, mqtt.Denied(what, reason):
                self._log.error("access_denied", what=what, reason=reason)

    def _take_cell(self, event: CellEvent, now: float) -> None:
        if isinstance(event, PartialArrived):
            reason = "a gateway merges updates, not partials"
            verdict = Verdict(event.node, event.seq, Outcome.QUARANTINED, reason)
            self.cell.answer((verdict,), now)
        else:
            self._step(event, now)

    def _apply_uplink(self, ready: UplinkReady, now: float) -> None:
        if ready.resubscribes:
            self._north.resubscribe(self.uplink.subscriptions)
        self._north.publish(ready.send)
        self._uplink_wakes_at = ready.wake_at
        for event in ready.events:
            self._take_uplink(event, now)

    def _take_uplink(self, event: UplinkEvent, now: float) -> None:
        match event:
            case ModelReceived():
                self._take_model(event, now)
            case SyncAnnounced(sync, deadline_seconds):
                self._step(SyncNotice(sync, deadline_seconds), now)
            case Pulled():
                self._step(Pulled(), now)
            case JobOrdered(state, frame):
                self._log.info("job_ordered", state=state)
                self._order = frame
                self._relay_order()
            case TierChanged(tier):
                self._log.info("tier_changed", tier=tier.name)
            case Settled(verdict, _):
                self._step(PartialSettled(verdict), now)
            case FrameRefused(reason, detail):
                self.cell.refuse(reason, detail)

    def _relay_order(self) -> None:
        """Pass the newest order on; a cell's broker that started again has forgotten it."""
        if self._relays_orders and self._order is not None:
            topic = topics.order(self.uplink.state.job)
            self.cell.link.publish((Outgoing(topic, self._order, retain=True),))

    def _take_model(self, model: ModelReceived, now: float) -> None:
        """Learn a version, and pass it on to the cell."""
        terms, combiner = model.terms, self._combiner
        if combiner is not None and combiner.gate.lineage == terms.lineage:
            # After a restart, journalled updates are weighed as they were when they arrived.
            terms = replace(terms, statistics=combiner.statistics | terms.statistics)
        head = model_head(
            version=model.version,
            sync=model.sync,
            base="",
            model="",
            size=model.vector.size,
            integers=model.integers,
            terms=terms,
        )
        self._inbox.note("model", base64.b64encode(pack(head)).decode())
        if self._combiner is None:
            self._combiner = self._build_combiner(head)
        announced = VersionAnnounced(
            model.version, model.terms.statistics, model.sync, model.terms.lineage
        )
        self._step(announced, now)
        checkpoint = Checkpoint(model.version, model.vector, model.integers)
        self.cell.release(checkpoint, model.sync, model.terms, now)

    def _step(self, event: Event, now: float) -> None:
        if self._combiner is None:
            self._combiner_wakes_at = now + 1.0
            return  # No version yet, so no node of the cell has one either.
        before = self._combiner.num_orphaned
        ready = self._combiner.handle(event, now)
        self._show_orphans(before)
        self._apply(ready, now)

    def _apply(self, ready: Ready, now: float) -> None:
        assert self._combiner is not None, "the combiner has just stepped"
        self._inbox.append(_OPEN, [arrived.content for arrived in ready.persist])
        self._combiner_wakes_at = ready.wake_at if ready.wake_at is not None else now + 1.0
        for arrived in ready.persist:
            self._updates_by_lag[self._combiner.version - arrived.update.base_version] += 1
        self.cell.answer(ready.verdicts, now)
        # The next partial is stored before a refused one returns its updates to the open section.
        forwarded = None if ready.forward is None else self._store(ready.forward)
        if ready.settled is not None:
            self._settle(ready.settled, now)
        if forwarded is not None:
            self._apply_uplink(self.uplink.offer(*forwarded, now), now)
        if ready.notice is not None:
            self.cell.notice(ready.notice, now)
        if ready.flushed is not None:
            self._apply_uplink(self.uplink.flushed(ready.flushed, now), now)

    def _store(self, forward: Forward) -> tuple[int, bytes]:
        """Put a partial into the outbox; its updates stay in the inbox until the cloud has it."""
        seq = self._outbox.next_seq
        assert self._combiner is not None, "the combiner made the partial"
        lineage = self._combiner.gate.lineage
        content = pack_partial(self._node, seq, forward.sync, forward.partial, lineage)
        self._inbox.remark(_OPEN, seq)
        self._outbox.put(seq, content)
        self.num_partials += 1
        return seq, content

    def _settle(self, verdict: Verdict, now: float) -> None:
        """End the duty for a partial's updates, or collect again those the cloud has not got."""
        assert self._combiner is not None, "a partial was in flight"
        if verdict.outcome is Outcome.REJECTED:
            self._log.warning("partial_refused", seq=verdict.seq, reason=verdict.reason)
            self.cell.refused["partial"] += 1
            updates = [unpack_update(c) for c in self._inbox.read(verdict.seq, verdict.seq)]
            kept = [u for u in updates if (u.node, u.seq) not in verdict.known]
            self._inbox.append(_OPEN, [pack_update(update) for update in kept])
            before = self._combiner.num_orphaned
            self._combiner.recollect(kept, now)
            self._show_orphans(before)
        elif verdict.outcome is Outcome.QUARANTINED:
            self._log.error("partial_quarantined", seq=verdict.seq, reason=verdict.reason)
            self.cell.refused["partial"] += 1
        self._inbox.forget(verdict.seq, verdict.seq)
        self._outbox.settle(verdict.seq)

    def _show_orphans(self, before: int) -> None:
        """Count and log accepted updates whose run of versions ended before the cloud had them."""
        assert self._combiner is not None, "the combiner collects"
        lost = self._combiner.num_orphaned - before
        if lost:
            self.cell.refused["orphaned"] += lost
            self._log.error("updates_orphaned", updates=lost)

    def _report(self) -> None:
        combiner = self._combiner
        waiting = "the first model" if combiner is None else combiner.waiting_for().text
        self.uplink.report(
            replace(
                self.uplink.state,
                active=len(self.cell.downlink.nodes),
                doing="joining" if combiner is None else "collecting",
                waiting_for=waiting[:500],
                updates=self.num_partials,
                bytes_up=self._north.bytes_up,
                bytes_down=self._north.bytes_down,
            )
        )

    def status(self, now: float) -> AggregatorStatus | None:
        """Say what the gateway does right now; None before the first model."""
        combiner = self._combiner
        if combiner is None:
            return None
        waiting = combiner.waiting_for()
        return AggregatorStatus(
            job=self.cell.downlink.job,
            cell=self._node,
            version=combiner.version,
            elapsed_seconds=now - self._started_at,
            sync=combiner.members.sync or 0,
            sync_in_seconds=None,
            is_syncing=combiner.members.sync is not None,
            active=combiner.members.num_active,
            open_updates=len(combiner.open.contributions),
            metrics={},
            updates_by_lag=dict(self._updates_by_lag),
            refused=dict(self.cell.refused),
            waiting_code=waiting.code,
            waiting_for=waiting.text[:500],
        )

    def close(self) -> None:
        """Close the stores."""
        with suppress(StoreError):  # The note of some seconds before stands.
            self._newest.write()
        self._inbox.close()
        self._outbox.close()
