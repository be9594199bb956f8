"""The in-vehicle agent: connects a worker's state machine to the broker, the outbox and the trainer
process.

One thread takes events from one mailbox: frames from the broker, reports from the trainer, the
clock. It never trains and never imports torch. An update is durable in the outbox before its first
publish and leaves it with the aggregator's verdict only.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import Field

from hetertrain.core.aggregator import SyncNotice, Tick
from hetertrain.core.gate import Outcome, Verdict
from hetertrain.core.policy import SYNC_PRESETS
from hetertrain.core.tiers import TIERS
from hetertrain.core.update import Update
from hetertrain.core.worker import (
    Event,
    ModelArrived,
    Ready,
    Trained,
    TrainOrder,
    UpdateSettled,
    Worker,
)
from hetertrain.errors import (
    FrameError,
    SettingsError,
    StoreError,
    TrainError,
    TransportError,
)
from hetertrain.logging import get_logger
from hetertrain.service import BrokerSettings, Mailbox, Stop
from hetertrain.transport import mqtt
from hetertrain.transport.outbox import Outbox
from hetertrain.wire import topics
from hetertrain.wire.contents import pack_update, unpack_update
from hetertrain.wire.frames import (
    InterruptCommand,
    NodeState,
    TrainCommand,
    TrainedReport,
    TrainerReady,
    TrainFailed,
    pack,
    unpack,
)
from hetertrain.wire.uplink import (
    FrameRefused,
    ModelReceived,
    Settled,
    SyncAnnounced,
    Uplink,
    UplinkEvent,
    UplinkReady,
)

TRAINER_SECONDS_MAX = 120.0
"""How long a trainer may take to load its task."""


class VehicleSettings(BrokerSettings):
    """Settings of one vehicle."""

    section: ClassVar[str] = "vehicle"

    node: str = Field(description="this node's stable id")
    cell: str = Field(topics.CLOUD_CELL, description="the gateway to speak to, or 'cloud'")
    tier: str = Field("t2", description="the class of this node's link: t0 to t4")
    task: str = Field(description="the task to train, as module:Class")
    labels: dict[str, str] = Field({}, description="labels of this node, as key=value")
    seed: int = Field(0, ge=0, description="seeds the order of batches")
    step_seconds_min: float = Field(0.0, ge=0, description="pad each step to this duration")
    limit_link: bool = Field(False, description="hold the link to the tier's rate")

    @property
    def directory(self) -> Path:
        """The folder of this node's state."""
        return self.state_directory / self.node


class TrainerEnded:
    """The pipe to the trainer closed."""


Input = mqtt.Event | TrainerReady | TrainFailed | Trained | TrainerEnded


class Agent:
    """One vehicle at work."""

    def __init__(self, settings: VehicleSettings, pipe: Pipe) -> None:
        topics.check_name("node", settings.node)
        topics.check_name("job", settings.job)
        topics.check_name("cell", settings.cell)
        if settings.tier not in TIERS:
            raise SettingsError(f"tier {settings.tier!r} is unknown: use one of {', '.join(TIERS)}")
        self._settings = settings
        self._tier = TIERS[settings.tier]
        self._pipe = pipe
        self._mailbox: Mailbox[Input] = Mailbox()
        self._log = get_logger(node=settings.node)
        self._refused: Counter[str] = Counter()
        self._uplink_wakes_at = 0.0
        self._worker_wakes_at: float | None = None
        self._step_seconds = 0.0

    def run(self) -> int:
        """Work until stopped; return the exit code.

        Raises:
            TrainError: the trainer failed; the aggregator was told.
        """
        self._mailbox.stop_on_signals()
        threading.Thread(target=self._read_pipe, name="trainer-pipe", daemon=True).start()
        ready = self._await_trainer()
        if ready is None:
            return 0
        self._start(ready)
        try:
            self._serve()
        finally:
            self._end()
        return 0

    def _await_trainer(self) -> TrainerReady | None:
        event = self._mailbox.take(time.monotonic() + TRAINER_SECONDS_MAX)
        match event:
            case TrainerReady():
                return event
            case Stop():
                return None
            case TrainFailed(error=error, message=message):
                raise TrainError(f"the task cannot be loaded: {error}: {message}")
            case _:
                raise TrainError(f"the trainer was not ready within {TRAINER_SECONDS_MAX:g} s")

    def _start(self, trainer: TrainerReady) -> None:
        settings = self._settings
        # A new outbox counts from the clock, so that a node that lost its disk uses no number
        # twice.
        self._outbox = Outbox(settings.directory / "outbox.db", int(time.time() * 1000))
        self._worker = Worker(
            node=settings.node,
            policy=SYNC_PRESETS["sap"],
            tier=self._tier,
            examples=trainer.examples,
            layout=trainer.layout,
            next_seq=self._outbox.next_seq,
        )
        state = NodeState(
            node=settings.node,
            job=settings.job,
            cell=settings.cell,
            tier=settings.tier,
            role="vehicle",
            is_online=True,
            label=trainer.label,
        )
        self._uplink = Uplink(state, self._tier, trainer.layout)
        rate = self._tier.rate_bits_per_second if settings.limit_link else None
        self._connection = mqtt.Connection(
            settings.endpoint(settings.node, rate),
            self._uplink.subscriptions,
            self._mailbox.put,
            self._uplink.will,
        )
        pending = self._outbox.pending()
        if pending is not None:
            self._worker.is_in_flight = True
            self._apply_uplink(self._uplink.offer(pending.seq, pending.content, time.monotonic()))
        self._connection.start()
        self._log.info("agent_started", tier=settings.tier, examples=trainer.examples)

    def _serve(self) -> None:
        while True:
            until = self._uplink_wakes_at
            if self._worker_wakes_at is not None:
                until = min(until, self._worker_wakes_at)
            event = self._mailbox.take(until)
            if isinstance(event, Stop):
                return
            now = time.monotonic()
            self._take(event, now)
            if self._worker_wakes_at is not None and now >= self._worker_wakes_at:
                self._step(Tick(), now)
            self._report()

    def _take(self, event: Input | None, now: float) -> None:
        match event:
            case None:
                self._apply_uplink(self._uplink.tick(now))
            case mqtt.Connected():
                self._log.info("connected")
                self._apply_uplink(self._uplink.connected(now))
            case mqtt.Disconnected(reason, is_final):
                self._log.warning("disconnected", reason=reason)
                if is_final:
                    raise TransportError(reason)
                self._apply_uplink(self._uplink.disconnected(now))
            case mqtt.Received(topic, frame):
                self._apply_uplink(self._uplink.received(topic, frame, now))
            case mqtt.Delivered(token):
                self._apply_uplink(self._uplink.delivered(token, now))
            case mqtt.Denied(what, reason):
                self._log.error("access_denied", what=what, reason=reason)
            case _:
                self._take_trainer(event, now)

    def _take_trainer(
        self, event: TrainerReady | Trained | TrainFailed | TrainerEnded, now: float
    ) -> None:
        match event:
            case Trained():
                if event.steps:
                    self._step_seconds = event.seconds / event.steps
                self._step(event, now)
            case TrainFailed(error=error, message=message):
                self._report(doing=f"train_failed: {error}: {message}")
                self._apply_uplink(self._uplink.beat(now))
                raise TrainError(f"{error}: {message}")
            case TrainerEnded():
                raise TrainError("the trainer process ended unexpectedly")
            case TrainerReady():
                self._log.debug("trainer_ready_again")

    def _apply_uplink(self, ready: UplinkReady) -> None:
        self._connection.publish(ready.send)
        self._uplink_wakes_at = ready.wake_at
        for event in ready.events:
            self._take_uplink(event, time.monotonic())

    def _take_uplink(self, event: UplinkEvent, now: float) -> None:
        match event:
            case ModelReceived(version, vector, integers, sync, terms):
                self._worker.policy = terms.policy
                self._step(ModelArrived(version, vector, integers, sync), now)
            case SyncAnnounced(sync, deadline_seconds):
                self._step(SyncNotice(sync, deadline_seconds), now)
            case Settled(verdict, content):
                if verdict.outcome not in (Outcome.MERGED, Outcome.DUPLICATE):
                    self._log.warning("update_refused", seq=verdict.seq, reason=verdict.reason)
                self._outbox.settle(verdict.seq)
                self._step(UpdateSettled(verdict, unpack_update(content).payload), now)
            case FrameRefused(reason, detail):
                self._refused[reason] += 1
                self._log.warning("frame_refused", reason=reason, detail=detail)

    def _step(self, event: Event, now: float) -> None:
        self._apply_worker(self._worker.handle(event, now))

    def _apply_worker(self, ready: Ready) -> None:
        self._worker_wakes_at = ready.wake_at
        if ready.publish is not None:
            self._publish(ready.publish)
        if ready.flushed is not None:
            self._apply_uplink(self._uplink.flushed(ready.flushed, time.monotonic()))
        if ready.train is not None:
            self._order(ready.train)
        if ready.interrupt:
            self._pipe.send_bytes(pack(InterruptCommand()))

    def _publish(self, update: Update) -> None:
        content = pack_update(update)
        try:
            self._outbox.put(update.seq, content)
        except StoreError as error:
            self._log.error("outbox_failed", error=str(error))
            refused = Verdict(update.node, update.seq, Outcome.REJECTED, str(error))
            self._step(UpdateSettled(refused, update.payload), time.monotonic())
            return
        self._apply_uplink(self._uplink.offer(update.seq, content, time.monotonic()))

    def _order(self, order: TrainOrder) -> None:
        vector, integers = order.start if order.start is not None else (None, ())
        command = TrainCommand(
            steps=order.steps, is_fresh=order.is_fresh, integers=tuple(int(i) for i in integers)
        )
        self._pipe.send_bytes(pack(command, b"" if vector is None else vector.tobytes()))

    def _report(self, doing: str | None = None) -> None:
        waiting = self._worker.waiting_for()
        self._uplink.report(
            replace(
                self._uplink.state,
                doing=doing or str(self._worker.state),
                waiting_for=waiting.text,
                steps=self._worker.num_steps,
                step_seconds=self._step_seconds,
                updates=self._worker.num_updates,
                bytes_up=self._connection.bytes_up,
                bytes_down=self._connection.bytes_down,
            )
        )

    def _end(self) -> None:
        self._connection.publish((self._uplink.will,))
        self._connection.stop()
        self._outbox.close()
        self._pipe.close()
        self._log.info("agent_stopped", updates=self._worker.num_updates)

    def _read_pipe(self) -> None:
        """Put the trainer's reports into the mailbox."""
        try:
            while True:
                message, payload = unpack(self._pipe.recv_bytes())
                match message:
                    case TrainedReport(steps=steps, seconds=seconds, integers=integers):
                        local = np.frombuffer(payload, np.float32)
                        self._mailbox.put(
                            Trained(local, np.asarray(integers, np.int64), steps, seconds)
                        )
                    case TrainerReady() | TrainFailed():
                        self._mailbox.put(message)
                    case _:
                        raise FrameError("direction", f"{type(message).__name__} from a trainer")
        except (OSError, EOFError, FrameError) as error:
            self._log.debug("trainer_pipe_ended", error=str(error))
            self._mailbox.put(TrainerEnded())
