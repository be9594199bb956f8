"""One gateway's machines and stores as a whole, driven by events and time: no thread, no clock, no
socket.

South it collects its vehicles' updates, makes them durable and answers; north it sends one merged
partial at a time and follows the cloud's versions, which it passes on to each tier of its cell. It
is an application relay with its own inbox and outbox, not a bridge of brokers, and needs no task
and no torch.

Without the cloud it goes on: what it acknowledges stays in its inbox, and where there is no more
room, in its vehicles' outboxes; and if it may, it makes versions of its own for its cell.
"""

from __future__ import annotations

import base64
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

from hetertrain.cell import Cell, Link
from hetertrain.cell import Event as CellEvent
from hetertrain.core.combiner import (
    Combiner,
    Event,
    Forward,
    PartialSettled,
    Ready,
    VersionAnnounced,
)
from hetertrain.core.events import BundleArrived, PartialArrived, Pulled, SyncNotice, Tick, Waiting
from hetertrain.core.gate import Finding, Gate, Outcome, Reason, Verdict
from hetertrain.core.worker import PERIODS_MAX
from hetertrain.errors import StoreError, TransportError
from hetertrain.logging import Logger
from hetertrain.transport import mqtt
from hetertrain.transport.newest import NewestNote
from hetertrain.wire import topics
from hetertrain.wire.contents import (
    model_head,
    model_terms,
    unpack_as,
)
from hetertrain.wire.downlink import Downlink
from hetertrain.wire.events import (
    FrameRefused,
    JobOrdered,
    ModelReceived,
    Outgoing,
    Settled,
    SyncAnnounced,
    TierChanged,
    UplinkEvent,
    UplinkReady,
)
from hetertrain.wire.frames import pack
from hetertrain.wire.messages import AggregatorStatus, ModelContent
from hetertrain.wire.uplink import Uplink
from hetertrain_edge.backlog import INBOX_BYTES_MAX, Backlog
from hetertrain_edge.cell_versions import CellVersions
from hetertrain_edge.forwarding import Form, Forwarding

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
        log: Logger,
        relays_orders: bool = False,
        forward: Form = Form.EXACT,
        inbox_bytes_max: int = INBOX_BYTES_MAX,
        local_after_seconds: float | None = None,
    ) -> None:
        """Open the stores in ``directory``; a new outbox counts from ``first_seq``. Where the
        cell has a broker of its own, an operator's orders must be relayed to it.

        Partials go up in the form ``forward``. Updates that the cloud has not settled take
        ``inbox_bytes_max`` of the disk. Once the cloud is out of reach for ``local_after_seconds``,
        the gateway makes versions for its cell; None: it never does.

        Raises:
            StoreError: the directory is not usable.
        """
        self.uplink = uplink
        self._node = uplink.state.node
        self._north = north
        self._relays_orders = relays_orders
        self._order: bytes | None = None
        """The newest order of an operator, as it came."""
        self._is_wanted = True
        """By that order, the job runs."""
        self._log = log
        self._forwarding = Forwarding(forward, self._node, directory, log)
        self._backlog = Backlog(directory, first_seq, self._forwarding, log, inbox_bytes_max)
        self._newest = NewestNote(self._backlog.outbox, uplink)
        self.cell = Cell(downlink, south, self._take_cell, log)
        # Nodes may hold a version before their gateway does: until then they keep their work.
        self.cell.limit(0)
        self._combiner: Combiner | None = None
        self.num_partials = 0
        self._forwarded_at = 0.0
        self._verdicts: list[Verdict] = []
        """Of what was accepted since the last commit; the cell has not heard them yet."""
        self._versions = CellVersions(
            self.cell, self._backlog.inbox, directory, log, local_after_seconds
        )
        self._down_since: float | None = 0.0
        """When the link to the cloud broke; None: it stands."""
        self.own_work = ""
        """How the cell's node on this machine is, for people; empty: there is none."""
        self._started_at = 0.0
        self._uplink_wakes_at = 0.0
        self._combiner_wakes_at = 0.0
        self._updates_by_lag: Counter[int] = Counter()

    def recover(self, now: float) -> None:
        """Take up what a crash interrupted: the partial in flight, updates not yet in one, and the
        version that the cell had.
        """
        self._started_at = self._down_since = self._forwarded_at = now
        noted = self._backlog.inbox.noted("model")
        if noted is None:
            return
        head, _ = unpack_as(ModelContent, base64.b64decode(noted))
        self._combiner = self._build_combiner(head)
        in_flight = self._backlog.recover(self._combiner, now)
        if in_flight is not None:
            self._apply_uplink(self.uplink.offer(*in_flight, now), now)
        self._limit()
        model = self._versions.recover(self._combiner, now)
        if model is not None:
            self.uplink.hold(model)
        self._log.info("gateway_recovered", updates=self._combiner.num_collected)

    def _build_combiner(self, head: ModelContent) -> Combiner:
        terms = model_terms(head)
        policy = terms.policy
        gate = Gate(head.layout, head.size, len(head.integers), policy.max_lag, head.lineage)
        combiner = Combiner(gate, policy, terms.weights, head.version, dict(terms.statistics))
        combiner.bytes_max = self._forwarding.updates_bytes_max(head.size)
        combiner.makes_local = self._versions.makes_local
        for state in self.cell.downlink.nodes.values():
            combiner.members.seen(state.node, state.active)
        return combiner

    @property
    def wakes_at(self) -> float:
        """When to call ``tick``, if nothing happens before."""
        machines = min(self._uplink_wakes_at, self._combiner_wakes_at, self.cell.wakes_at)
        return min(machines, self._versions.local_due_at(self._combiner, self._down_since))

    def tick(self, now: float) -> None:
        """Do what is due.

        Raises:
            StoreError: a store cannot be written.
        """
        self._commit(now)
        if now >= self._combiner_wakes_at:
            self._step(Tick(), now)
        if now >= self._uplink_wakes_at:
            self._report(now)
            self._apply_uplink(self.uplink.tick(now), now)
        if now >= self._versions.local_due_at(self._combiner, self._down_since):
            assert self._combiner is not None, "without it none is due"
            self._versions.make_local(self._combiner, now)
        if now >= self.cell.wakes_at:
            self.cell.tick(now)
        self._newest.tick(now)

    def take(self, side: Side, event: mqtt.Event, now: float, *, has_more: bool = False) -> None:
        """Take what happened on one of the links. Where the caller has more, and calls ``tick``
        after it, one commit of the inbox may serve several updates; their verdicts follow it.

        Raises:
            TransportError: the connection ended for good.
            StoreError: a store cannot be written; nothing was acknowledged.
        """
        if side == "north":
            self._commit(now)  # It may change what accepted updates belong to.
        self._take(side, event, now)
        if not has_more or self._backlog.is_commit_due:
            self._commit(now)

    def _commit(self, now: float) -> None:
        """Make durable what was accepted, then say so."""
        verdicts, self._verdicts = self._verdicts, []
        self._backlog.commit()
        if verdicts:
            self.cell.answer(verdicts, now)
            self._limit()

    def _take(self, side: Side, event: mqtt.Event, now: float) -> None:
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
                self._down_since = None
                self._report(now)
                self._apply_uplink(self.uplink.connected(now, packet_bytes_max), now)
            case _, mqtt.Delivered(token):
                self._apply_uplink(self.uplink.delivered(token, now), now)
            case _, mqtt.Disconnected(reason, is_final):
                self._log.warning("disconnected", reason=reason)
                if is_final:
                    raise TransportError(reason)
                if self._down_since is None:
                    self._down_since = now
                self._versions.save(now)
                self._apply_uplink(self.uplink.disconnected(now), now)
            case _, mqtt.Denied(what, reason):
                self._log.error("access_denied", what=what, reason=reason)

    def _take_cell(self, event: CellEvent, now: float) -> None:
        if isinstance(event, PartialArrived | BundleArrived):
            reason = "a gateway merges updates, not partials"
            finding = Finding(Reason.PARTIAL)
            verdict = Verdict(event.node, event.seq, Outcome.QUARANTINED, reason, finding=finding)
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
                self._order, self._is_wanted = frame, state == "running"
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
        goes_on = combiner is not None and combiner.gate.lineage == terms.lineage
        if combiner is not None and goes_on:
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
        self._backlog.inbox.note("model", base64.b64encode(pack(head)).decode())
        if self._combiner is None:
            self._combiner = self._build_combiner(head)
        announced = VersionAnnounced(
            model.version, model.terms.statistics, model.sync, model.terms.lineage
        )
        self._step(announced, now)
        if not goes_on:
            # What was collected on models that no longer exist has nowhere to go.
            self._backlog.forget()
            self._limit()
        self._versions.take(model, now)

    def _step(self, event: Event, now: float) -> None:
        if self._combiner is None:
            self._combiner_wakes_at = now + 1.0
            return  # There is no version yet to work on.
        before = self._combiner.num_orphaned
        ready = self._combiner.handle(event, now)
        self._show_orphans(before)
        self._apply(ready, now)

    def _apply(self, ready: Ready, now: float) -> None:
        assert self._combiner is not None, "the combiner has just stepped"
        if ready.seals:
            self._commit(now)
            self._backlog.seal()
        self._backlog.accept([arrived.content for arrived in ready.persist])
        self._verdicts.extend(ready.verdicts)
        self._versions.worked((arrived.update.node for arrived in ready.persist), now)
        self._combiner_wakes_at = ready.wake_at if ready.wake_at is not None else now + 1.0
        for arrived in ready.persist:
            self._updates_by_lag[self._combiner.version - arrived.update.base_version] += 1
        does_more = (ready.forward, ready.settled, ready.notice, ready.flushed) != (None,) * 4
        if not does_more:
            return
        self._commit(now)
        if ready.settled is not None:
            self._forwarding.settled(ready.settled.seq, ready.settled.outcome)
        # The next partial is stored before a refused one returns its updates to the open section.
        forwarded = None if ready.forward is None else self._store(ready.forward, now)
        if ready.settled is not None:
            self._settle(ready.settled, now)
        if forwarded is not None:
            self._apply_uplink(self.uplink.offer(*forwarded, now), now)
        if ready.notice is not None:
            self.cell.notice(ready.notice, now)
        if ready.flushed is not None:
            self._apply_uplink(self.uplink.flushed(ready.flushed, now), now)
        self._limit()

    def _limit(self) -> None:
        """Take in no more than there is room for."""
        assert self._combiner is not None, "there is a version to work on"
        self.cell.limit(self._backlog.room_bytes(self._combiner))

    def _store(self, forward: Forward, now: float) -> tuple[int, bytes]:
        """Make a partial durable."""
        combiner = self._combiner
        assert combiner is not None, "the combiner made the partial"
        budget_bytes = self._budget_bytes(combiner, forward.sync is not None, now)
        self._forwarded_at = now
        self.num_partials += 1
        return self._backlog.store(forward, combiner, budget_bytes)

    def _budget_bytes(self, combiner: Combiner, is_flush: bool, now: float) -> int | None:
        """Return what an encoded partial may take, by the rule that an update's budget has."""
        policy, tier = combiner.policy, self.uplink.tier
        if policy.is_dense:
            return None
        period = policy.period_seconds(tier.rate_bits_per_second, combiner.gate.size)
        seconds = min(max(now - self._forwarded_at, period), PERIODS_MAX * period)
        factor = policy.flush_factor if is_flush else 1.0
        return tier.budget_bytes(seconds * factor, policy.budget_share)

    def _settle(self, verdict: Verdict, now: float) -> None:
        """End the duty for a partial's updates, or collect again those the cloud has not got."""
        assert self._combiner is not None, "a partial was in flight"
        if verdict.outcome is Outcome.REJECTED:
            self._log.warning("partial_refused", seq=verdict.seq, reason=verdict.reason)
            self.cell.refused["partial"] += 1
            kept = self._backlog.take_back(verdict, self._combiner)
            before = self._combiner.num_orphaned
            self._combiner.recollect(kept, now)
            self._show_orphans(before)
        elif verdict.outcome is Outcome.QUARANTINED:
            self._log.error("partial_quarantined", seq=verdict.seq, reason=verdict.reason)
            self.cell.refused["partial"] += 1
        self._backlog.settle(verdict.seq)

    def _show_orphans(self, before: int) -> None:
        """Count and log accepted updates whose run of versions ended before the cloud had them."""
        assert self._combiner is not None, "the combiner collects"
        lost = self._combiner.num_orphaned - before
        if lost:
            self.cell.refused["orphaned"] += lost
            self._log.error("updates_orphaned", updates=lost)

    def _waiting_for(self, now: float) -> Waiting:
        """Say what the gateway waits for: its own affairs first, then its machine's."""
        if self._combiner is None:
            return Waiting("model", "the first model")
        away = ""
        if self._down_since is not None:
            away = f"the cloud, out of reach for {now - self._down_since:.0f} s"
        rests = "" if self._is_wanted else "the job's start"
        if self.cell.is_full:
            backlog = self._backlog
            held, limit = backlog.inbox.num_bytes >> 20, backlog.inbox_bytes_max >> 20
            why = away or rests or "the cloud's verdicts on what is in it"
            text = f"the inbox is full ({held} of {limit} MiB), nodes keep their updates: {why}"
            return Waiting("inbox", text)
        if not away:
            return Waiting("order", rests) if rests else self._combiner.waiting_for()
        number = self._versions.local_number
        own = f"; local version {number} on {self._combiner.version}" if number else ""
        return Waiting("cloud", away + own)

    def _report(self, now: float) -> None:
        inbox = self._backlog.inbox
        doing = "joining" if self._combiner is None else "collecting"
        if not self._is_wanted:
            # Its backlog may have to wait, too: who would settle it may have ended first.
            doing = "resting"
        self.uplink.report(
            replace(
                self.uplink.state,
                active=len(self.cell.downlink.nodes),
                doing=f"{doing}; {self.own_work}"[:500] if self.own_work else doing,
                waiting_for=self._waiting_for(now).text[:500],
                updates=self.num_partials,
                backlog_updates=inbox.num_records,
                backlog_bytes=inbox.num_bytes,
                bytes_up=self._north.bytes_up,
                bytes_down=self._north.bytes_down,
            )
        )

    def status(self, now: float) -> AggregatorStatus | None:
        """Say what the gateway does right now; None before the first model."""
        combiner = self._combiner
        if combiner is None:
            return None
        waiting = self._waiting_for(now)
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
            num_parameters=self.cell.downlink.num_parameters,
            **asdict(self.cell.downlink.traffic),
            local=self._versions.local_number,
        )

    def keep(self, now: float) -> None:
        """Have the newest version on disk before a stop."""
        self._versions.save(now)

    def close(self) -> None:
        """Close the stores."""
        try:
            self._newest.write()
        except StoreError as error:  # The note of some seconds before stands.
            self._log.error("outbox_failed", error=str(error))
        self._backlog.close()
