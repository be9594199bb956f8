"""One vehicle's machines and stores as a whole, driven by events and time: no thread, no clock, no
socket.

The agent drives it with a real connection and a trainer process; the simulator drives the same with
a virtual clock. An update is durable in the outbox before its first publish and leaves it with the
aggregator's verdict only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Protocol

from hetertrain.cell import Link
from hetertrain.core.events import Pulled, SyncNotice, Tick
from hetertrain.core.gate import Outcome, Verdict
from hetertrain.core.update import Update
from hetertrain.core.worker import (
    Event,
    ModelArrived,
    Ready,
    Trained,
    TrainerReplaced,
    TrainOrder,
    UpdateSettled,
    Worker,
)
from hetertrain.errors import StoreError, TransportError
from hetertrain.logging import Logger
from hetertrain.transport import mqtt
from hetertrain.transport.newest import NewestNote
from hetertrain.transport.outbox import Outbox
from hetertrain.wire.contents import pack_update, unpack_update
from hetertrain.wire.events import (
    FrameRefused,
    JobOrdered,
    ModelReceived,
    Settled,
    SyncAnnounced,
    TierChanged,
    UplinkEvent,
    UplinkReady,
)
from hetertrain.wire.messages import NOT_ELIGIBLE, TrainerReady
from hetertrain.wire.uplink import Uplink
from hetertrain_vehicle.position import Position

FAILURE_CHARACTERS_MAX = 200
"""A heartbeat stays small."""


class TrainerPort(Protocol):
    """What the driver asks of a trainer; its answers come back through ``trained``."""

    def order(self, order: TrainOrder) -> None:
        """Begin to train; never blocks."""

    def interrupt(self) -> None:
        """Stop at the next step boundary."""

    def rest(self) -> None:
        """Stop where it is, in the middle of a step where that is possible."""

    def resume(self) -> None:
        """Go on from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What a vehicle says of itself beside its training."""

    budgets: str = ""
    """What it has used of its owner's budgets; for people."""
    month_bytes: int = 0
    rss_mib: int = 0
    position: Position | None = None
    """Where its owner lets it say so."""


class VehicleDriver:
    """One vehicle at work, between its trainer and its link."""

    def __init__(
        self,
        worker: Worker,
        uplink: Uplink,
        outbox: Outbox,
        link: Link,
        trainer: TrainerPort,
        log: Logger,
    ) -> None:
        self.worker = worker
        self.uplink = uplink
        self.refused: Counter[str] = Counter()
        self._outbox = outbox
        self._newest = NewestNote(outbox, uplink)
        self._link = link
        self._trainer = trainer
        self._log = log
        self._step_seconds = 0.0
        self._uplink_wakes_at = 0.0
        self._worker_wakes_at: float | None = None
        self._metrics: dict[str, float] = {}
        self._measured = self._measuring = -1
        """The versions that were measured, and that the trainer measures next."""
        self.job_rules: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        """When the job lets a vehicle train, and use its link."""
        self.circumstances = Circumstances()
        """What goes out with the next heartbeat."""
        self._train_failures = 0
        self._failure = ""
        self._is_ordered_to_rest = False
        self._refusal = ""
        """Why the vehicle may not train now by its rules; empty: it may."""
        self._held: TrainOrder | None = None
        """What is to be trained when the rest is over."""
        self._without: tuple[str, str] | None = None
        """What the vehicle does and waits for while there is no trainer; None: there is one."""

    def recover(self, now: float, *, has_moved: bool = False) -> None:
        """Offer again what was under way when the vehicle last ended; ``has_moved``: it may have
        been in another cell then.
        """
        pending = self._outbox.pending()
        if pending is not None:
            self.worker.is_in_flight = True
            ready = self.uplink.offer(pending.seq, pending.content, now, has_moved=has_moved)
            self._apply_uplink(ready, now)

    @property
    def rests(self) -> bool:
        """Whether the vehicle may not train now."""
        return self._is_ordered_to_rest or bool(self._refusal)

    def permit(self, refusal: str, now: float) -> None:
        """Train on where ``refusal`` is empty; else rest, and say so."""
        before, self._refusal = self.rests, refusal
        self._rest_or_work(before, now)

    def move(self, cell: str, now: float) -> None:
        """Go over to another cell's aggregator."""
        self._log.info("cell_changed", before=self.uplink.state.cell, cell=cell)
        self._apply_uplink(self.uplink.move(cell, now), now)

    def hold(self, model: ModelReceived, now: float) -> None:
        """Begin with a model that the vehicle has from elsewhere: installed with it, or kept."""
        self.uplink.hold(model)
        self._take_uplink(model, now)

    @property
    def wakes_at(self) -> float:
        """When to call ``tick``, if nothing happens before."""
        if self._worker_wakes_at is None:
            return self._uplink_wakes_at
        return min(self._uplink_wakes_at, self._worker_wakes_at)

    def take(self, event: mqtt.Event, now: float) -> None:
        """Take what happened on the link.

        Raises:
            TransportError: the connection ended for good.
        """
        match event:
            case mqtt.Connected(packet_bytes_max):
                self._log.info("connected")
                self._apply_uplink(self.uplink.connected(now, packet_bytes_max), now)
            case mqtt.Disconnected(reason, is_final):
                self._log.warning("disconnected", reason=reason)
                if is_final:
                    raise TransportError(reason)
                self._apply_uplink(self.uplink.disconnected(now), now)
            case mqtt.Received(topic, frame):
                self._apply_uplink(self.uplink.received(topic, frame, now), now)
            case mqtt.Delivered(token):
                self._apply_uplink(self.uplink.delivered(token, now), now)
            case mqtt.Denied(what, reason):
                self._log.error("access_denied", what=what, reason=reason)

    def trained(self, event: Trained, now: float) -> None:
        """Take the trainer's report."""
        if event.steps:
            self._step_seconds = event.seconds / event.steps
        if event.metrics:
            self._metrics, self._measured = dict(event.metrics), self._measuring
        self._step(event, now)

    def await_trainer(self) -> None:
        """There is no trainer yet: what comes before it is ready waits for it."""
        self._without = ("loading", "the trainer, which loads the task")

    def introduce(self, trainer: TrainerReady) -> None:
        """Learn from the first trainer what its task is.

        Raises:
            LayoutError: the job's model, which came meanwhile, is another task's.
        """
        self.worker.examples, self.worker.layout = trainer.examples, trainer.layout
        self.uplink.state = replace(self.uplink.state, label=trainer.label)
        self.uplink.require_layout(trainer.layout)

    def trainer_failed(self, reason: str, now: float) -> None:
        """There is no trainer for a while; the aggregator is told why at once."""
        self._without = ("train_failed", f"another trainer: {reason[:400]}")
        self._train_failures += 1
        self._failure = reason[:FAILURE_CHARACTERS_MAX]
        self._log.error("train_failed", reason=reason)
        self.beat(None, now)

    def trainer_replaced(self, now: float) -> None:
        """There is a trainer again: it goes on from what the last one reported."""
        self._without, self._held = None, None
        self._step(TrainerReplaced(), now)
        self.beat(None, now)

    def tick(self, now: float) -> None:
        """Do what is due."""
        if now >= self._uplink_wakes_at:
            self.report()
            self._apply_uplink(self.uplink.tick(now), now)
        if self._worker_wakes_at is not None and now >= self._worker_wakes_at:
            self._step(Tick(), now)
        try:
            self._newest.tick(now)
        except StoreError as error:
            self._log.error("outbox_failed", error=str(error))

    def beat(self, doing: str | None, now: float) -> None:
        """Tell the aggregator at once what the vehicle does."""
        self.report(doing)
        self._apply_uplink(self.uplink.beat(now), now)

    def close(self) -> None:
        """Close the outbox."""
        try:
            self._newest.write()
        except StoreError as error:
            self._log.error("outbox_failed", error=str(error))
        self._outbox.close()

    def report(self, doing: str | None = None) -> None:
        """Bring the figures of the next heartbeat up to date."""
        worker = self.worker
        doing_now, waiting_for = str(worker.state), worker.waiting_for().text
        if self._is_ordered_to_rest:
            doing_now, waiting_for = "resting", "the job's start"
        elif self._refusal:
            doing_now, waiting_for = NOT_ELIGIBLE, self._refusal[:500]
        elif self._without is not None:
            doing_now, waiting_for = self._without
        own = self.circumstances
        latitude, longitude = own.position or (None, None)
        self.uplink.report(
            replace(
                self.uplink.state,
                active=int(self._without is None and not self.rests),
                doing=doing or doing_now,
                waiting_for=waiting_for,
                steps=worker.num_steps,
                step_seconds=self._step_seconds,
                updates=worker.num_updates,
                bytes_up=self._link.bytes_up,
                bytes_down=self._link.bytes_down,
                metrics=self._metrics,
                measured=self._measured,
                budgets=own.budgets[:500],
                month_bytes=own.month_bytes,
                backlog_updates=int(self._outbox.num_bytes > 0),
                backlog_bytes=self._outbox.num_bytes,
                train_failures=self._train_failures,
                failure=self._failure,
                rss_mib=own.rss_mib,
                latitude=latitude,
                longitude=longitude,
            )
        )

    def _apply_uplink(self, ready: UplinkReady, now: float) -> None:
        if ready.resubscribes:
            self._link.resubscribe(self.uplink.subscriptions)
        self._link.publish(ready.send)
        self._uplink_wakes_at = ready.wake_at
        for event in ready.events:
            self._take_uplink(event, now)

    def _take_uplink(self, event: UplinkEvent, now: float) -> None:
        match event:
            case ModelReceived(version, vector, integers, sync, terms):
                self.worker.policy = terms.policy
                model = ModelArrived(version, vector, integers, sync, terms.lineage, terms.slowest)
                self._step(model, now)
            case SyncAnnounced(sync, deadline_seconds):
                self._step(SyncNotice(sync, deadline_seconds), now)
            case Pulled():
                self._step(Pulled(), now)
            case JobOrdered():
                self._obey(event, now)
            case TierChanged(tier):
                self._log.info("tier_changed", before=self.worker.tier.name, tier=tier.name)
                self.worker.tier = tier
            case Settled(verdict, content, has_moved):
                self._log.debug("update_settled", seq=verdict.seq, outcome=str(verdict.outcome))
                if verdict.outcome not in (Outcome.MERGED, Outcome.DUPLICATE):
                    self._log.warning("update_refused", seq=verdict.seq, reason=verdict.reason)
                self._forget(verdict.seq)
                payload = unpack_update(content).payload
                self._step(UpdateSettled(verdict, payload, may_return=not has_moved), now)
            case FrameRefused(reason, detail):
                self.refused[reason] += 1
                self._log.warning("frame_refused", reason=reason, detail=detail)

    def _obey(self, ordered: JobOrdered, now: float) -> None:
        """Rest or train on, as an operator wants, and by which rules."""
        self._log.info("job_ordered", state=ordered.state)
        self.job_rules = (ordered.train_when, ordered.send_when)
        before, self._is_ordered_to_rest = self.rests, not ordered.trains
        self._rest_or_work(before, now)

    def _rest_or_work(self, rested: bool, now: float) -> None:
        """Work so far is kept, and goes on from there; versions are of no use meanwhile."""
        if self.rests is rested:
            return
        self._log.info("rests" if self.rests else "works", reason=self._refusal)
        if self.rests:
            self._trainer.rest()
        else:
            self._trainer.resume()
            if self._held is not None and self._without is None:
                order, self._held = self._held, None
                self._trainer.order(order)
        self._apply_uplink(self.uplink.follow(not self.rests, now), now)
        self.beat(None, now)

    def _forget(self, seq: int) -> None:
        try:
            self._outbox.settle(seq)
        except StoreError as error:
            # The next one takes its place; after a restart before that it is sent once more.
            self._log.error("outbox_failed", error=str(error))

    def _step(self, event: Event, now: float) -> None:
        self._apply_worker(self.worker.handle(event, now), now)

    def _apply_worker(self, ready: Ready, now: float) -> None:
        self._worker_wakes_at = ready.wake_at
        if ready.publish is not None:
            self._publish(ready.publish, now)
        if ready.flushed is not None:
            self._apply_uplink(self.uplink.flushed(ready.flushed, now), now)
        if ready.train is not None and ready.train.measures:
            self._measuring = self.worker.version
        if ready.train is not None and (self.rests or self._without is not None):
            self._held = ready.train
        elif ready.train is not None:
            self._trainer.order(ready.train)
        if ready.interrupt:
            self._trainer.interrupt()

    def _publish(self, update: Update, now: float) -> None:
        content = pack_update(update)
        try:
            self._outbox.put(update.seq, content)
        except StoreError as error:
            self._log.error("outbox_failed", error=str(error))
            refused = Verdict(update.node, update.seq, Outcome.REJECTED, str(error))
            self._step(UpdateSettled(refused, update.payload), now)
            return
        self._apply_uplink(self.uplink.offer(update.seq, content, now), now)
