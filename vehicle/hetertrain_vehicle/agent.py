"""The in-vehicle agent: drives a vehicle's machines with the broker's connection and the trainer
process.

One thread takes events from one mailbox: frames from the broker, reports from the trainer, the
clock. It never trains and never imports torch.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from multiprocessing.connection import Connection
from typing import Protocol

import numpy as np

from hetertrain.core.layout import Vector
from hetertrain.core.policy import SYNC_PRESETS
from hetertrain.core.tiers import TIERS
from hetertrain.core.worker import Trained, TrainOrder, Worker
from hetertrain.errors import FrameError, StoreError, TrainError
from hetertrain.logging import get_logger, last_lines
from hetertrain.service import Mailbox, Stop, node_claim, resident_mib
from hetertrain.transport import mqtt
from hetertrain.transport.database import own_directory
from hetertrain.transport.outbox import Outbox
from hetertrain.transport.pipe import AgentEnd
from hetertrain.wire import topics
from hetertrain.wire.log_share import LogShare
from hetertrain.wire.messages import TrainCommand, TrainedReport, TrainerReady, TrainFailed
from hetertrain.wire.uplink import Uplink
from hetertrain_vehicle.budgets import Ledger
from hetertrain_vehicle.driver import Circumstances, VehicleDriver
from hetertrain_vehicle.link import Linked, VehicleLink
from hetertrain_vehicle.permission import Permissions
from hetertrain_vehicle.position import NAMES, coarse_position
from hetertrain_vehicle.settings import VehicleSettings
from hetertrain_vehicle.signals import SignalsHeard, SignalSource, SignalTable, open_source

RESTART_SECONDS_MAX = 60.0
"""A trainer that fails again and again is started so seldom in the end."""
SETTLED_SECONDS = 60.0
"""One that lived so long fails for the first time."""
TRAINER_SECONDS_MAX = 120.0
"""How long a trainer may take to load its task."""
CHECK_SECONDS = 1.0
"""How often rules and budgets are looked at when no signal has changed."""


class TrainerEnded:
    """The pipe to the trainer closed."""


@dataclass(frozen=True, slots=True)
class Said:
    """What the trainer said that was started as number ``life``."""

    life: int
    event: TrainerReady | TrainFailed | Trained | TrainerEnded


Input = Linked | Said | SignalsHeard


class TrainerSource(Protocol):
    """Starts trainers, one at a time."""

    def start(self) -> Connection:
        """Start one, in place of the one before; return our end of its pipe."""

    def ending(self) -> str:
        """Say how the one ended that closed its pipe."""

    def pause(self) -> None:
        """Stop it at once, in the middle of a step, where that is possible."""

    def resume(self) -> None:
        """Let it go on from there."""

    def stop(self) -> None:
        """End the trainer."""


class TrainerPipe:
    """The trainer process, as the driver sees it."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def order(self, order: TrainOrder) -> None:
        """Send a ``TrainCommand``."""
        vector, integers = order.start if order.start is not None else (None, ())
        command = TrainCommand(
            steps=order.steps,
            is_fresh=order.is_fresh,
            measures=order.measures,
            integers=tuple(int(i) for i in integers),
            version=order.version,
        )
        self._agent.pipe.order(command, vector)

    def interrupt(self) -> None:
        """Send an ``InterruptCommand``."""
        self._agent.pipe.interrupt()

    def rest(self) -> None:
        """Pause the process; what it has done it reports when it goes on."""
        self._agent.pause_trainer()

    def resume(self) -> None:
        """Let the process go on."""
        self._agent.resume_trainer()


class Agent:
    """One vehicle at work."""

    def __init__(self, settings: VehicleSettings, trainers: TrainerSource) -> None:
        self._state = settings.state()
        self._owner = own_directory(settings.directory)
        self._settings = settings
        self._trainers = trainers
        self._life = 0
        """How many trainers there were."""
        self._failures = 0
        """How many trainers failed in a row."""
        self._is_loaded = False
        """Whether a trainer was ready once: the task is well."""
        self._ready_at = self._restart_at = 0.0
        self._ready_by = math.inf
        self._mailbox: Mailbox[Input] = Mailbox()
        self._log = get_logger(node=settings.node)
        ledger = Ledger(settings.directory, settings.limits, self._log)
        table = SignalTable(settings.signals_seconds_max)
        self._permissions = Permissions(settings.train_when, settings.send_when, table, ledger)
        self._table = table
        self._job_rules: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self._source: SignalSource | None = None
        if settings.signals is not None:
            ca_file = settings.signals_ca_file
            self._source = open_source(settings.signals, ca_file, self._mailbox.put)
        self._check_at = 0.0
        self._lost_at: float | None = None
        """Since when there is no link."""
        self._bytes_counted = 0

    def run(self) -> int:
        """Work until stopped; return the exit code.

        Raises:
            TrainError: the task cannot be loaded.
        """
        self._mailbox.stop_on_signals()
        self._start()
        try:
            self._serve()
        finally:
            self._end()
        return 0

    def _start_trainer(self) -> None:
        self._life += 1
        self._restart_at = math.inf
        self._ready_by = time.monotonic() + TRAINER_SECONDS_MAX
        self.pipe = AgentEnd(self._trainers.start())
        threading.Thread(
            target=self._read_pipe, args=(self.pipe, self._life), name="trainer-pipe", daemon=True
        ).start()

    def _start(self) -> None:
        """Connect; the trainer, which is slower, comes later."""
        settings = self._settings
        tier = TIERS[settings.tier]
        # A new outbox counts from the clock, so that a node that lost its disk uses no number
        # twice.
        outbox = Outbox(settings.directory / "outbox.db", int(time.time() * 1000))
        if outbox.damage:
            self._log.error("outbox_damaged", damage=outbox.damage)
        worker = Worker(
            node=settings.node,
            policy=SYNC_PRESETS["sap"],
            tier=tier,
            examples=0,
            layout="",
            next_seq=outbox.next_seq,
        )
        follows_link = settings.follow_link and not settings.limit_link
        uplink = Uplink(
            self._state,
            tier,
            follows_link=follows_link,
            sign=settings.signer(),
            check=settings.verifier(),
            log_share=LogShare(last_lines if settings.share_log else None),
        )
        self._link = VehicleLink(lambda put: self._connect(uplink, put), self._mailbox.put)
        self._driver = VehicleDriver(
            worker, uplink, outbox, self._link, TrainerPipe(self), self._log
        )
        self._driver.await_trainer()
        self._driver.recover(time.monotonic(), has_moved=settings.roams)
        self._stop_renewer = settings.start_renewer()
        self._log.info("agent_started", tier=settings.tier)

    def _connect(self, uplink: Uplink, put: Callable[[mqtt.Event], None]) -> mqtt.Connection:
        """Make a connection to the broker of the cell that the vehicle is in."""
        endpoint = self._settings.endpoint_in(uplink.state.cell)
        return mqtt.Connection(
            endpoint,
            uplink.subscriptions,
            put,
            uplink.will,
            uplink.other_subscriptions,
            node_claim(uplink, endpoint),
        )

    def _serve(self) -> None:
        self._check(time.monotonic())
        while True:
            restart_at = math.inf if self._driver.rests else self._restart_at
            wakes_at = min(self._driver.wakes_at, restart_at, self._ready_by, self._check_at)
            event = self._mailbox.take(wakes_at)
            now = time.monotonic()
            if isinstance(event, Stop):
                return
            if event is not None:
                self._take(event, now)
            if now >= self._check_at:
                self._check(now)
            if now >= self._restart_at and not self._driver.rests:
                self._start_trainer()
            elif now >= self._ready_by:
                self._lose_trainer(f"not ready within {TRAINER_SECONDS_MAX:g} s", now)
            self._driver.tick(now)

    def _take(self, event: Input, now: float) -> None:
        match event:
            case Said(life, said):
                if life == self._life:
                    self._hear(said, now)
            case SignalsHeard():
                if self._permissions.hear(event, now):
                    self._check_at = now
            case Linked():
                self._take_link(event, now)

    def _take_link(self, linked: Linked, now: float) -> None:
        event = self._link.hear(linked)
        if event is None:
            return
        match event:
            case mqtt.Connected():
                self._lost_at = None
            case mqtt.Disconnected():
                self._lost_at = now if self._lost_at is None else self._lost_at
        self._driver.take(event, now)
        self._link.return_within(self._driver.uplink.return_seconds)
        if self._settings.follow_job_rules and self._driver.job_rules != self._job_rules:
            self._job_rules = self._driver.job_rules
            try:
                self._permissions.take_job_rules(*self._job_rules)
            except ValueError as error:
                self._log.error("job_rules_refused", error=str(error))
            self._check_at = now

    def _check(self, now: float) -> None:
        """See what the vehicle may do now, and which cell it is in."""
        self._check_at = now + CHECK_SECONDS
        permissions, ledger = self._permissions, self._permissions.ledger
        wall = datetime.now()  # months and times of day are the owner's
        if self._source is not None:
            position = NAMES if self._settings.share_position else frozenset()
            self._source.want(permissions.names | position)
        num_bytes = self._link.bytes_up + self._link.bytes_down
        network = permissions.network(now)
        ledger.count_bytes(network, num_bytes - self._bytes_counted, wall)
        self._bytes_counted = num_bytes
        permission = permissions.judge(network, now, wall)
        is_shared = self._settings.share_position
        self._driver.circumstances = Circumstances(
            budgets=ledger.shown(),
            month_bytes=ledger.month_bytes,
            rss_mib=resident_mib(),
            position=coarse_position(self._table.known(now)) if is_shared else None,
        )
        self._driver.permit(permission.train, now)
        self._use_link(permission.send, self._wanted_cell(now), now)
        self._save_ledger(now)

    def _save_ledger(self, now: float) -> None:
        try:
            self._permissions.ledger.save(now)
        except StoreError as error:
            self._log.error("ledger_failed", error=str(error))

    def _wanted_cell(self, now: float) -> str:
        """Return the cell that signals name, or the next where there has been no link for long;
        else the present one.
        """
        named, known = self._permissions.cell(now), self._settings.cells
        if named and (named in known if known else topics.is_name(named)):
            return named
        present, cells = self._driver.uplink.state.cell, list(known)
        if self._lost_at is None or now < self._lost_at + self._settings.cell_patience_seconds:
            return present
        place = cells.index(present) + 1 if present in cells else 0
        return cells[place % len(cells)] if cells else present

    def _use_link(self, refusal: str, cell: str, now: float) -> None:
        """Be connected in this cell, or not at all where ``refusal`` says why."""
        uplink = self._driver.uplink
        moves = cell != uplink.state.cell
        if self._link.is_open and (refusal or moves):
            reason = refusal or f"goes over to cell {cell}"
            self._log.info("link_closed", reason=reason)
            self._link.close(uplink.farewell("link_closed", reason))
            self._driver.take(mqtt.Disconnected(reason), now)
            self._lost_at = None  # It was not lost.
        if moves:
            self._driver.move(cell, now)
        if not self._link.is_open and not refusal:
            self._lost_at = now
            self._link.open()

    def _hear(self, said: TrainerReady | TrainFailed | Trained | TrainerEnded, now: float) -> None:
        """Take what the trainer says; where it fails, have another one, after a while."""
        match said:
            case Trained():
                wall = datetime.now()  # days are the owner's
                self._permissions.ledger.count_processor(said.cpu_seconds, wall)
                self._driver.trained(said, now)
            case TrainerReady():
                self.pipe.accept(said)
                if not self._is_loaded:
                    self._is_loaded = True
                    self._driver.introduce(said)
                    self._log.info("task_loaded", examples=said.examples)
                self._ready_at, self._ready_by = now, math.inf
                self._driver.trainer_replaced(now)
            case TrainFailed(error=error, message=message, peak_mib=peak):
                self._lose_trainer(f"{error}: {message} (peak {peak} MiB)", now)
            case TrainerEnded():
                self._lose_trainer(self._trainers.ending(), now)

    def _lose_trainer(self, reason: str, now: float) -> None:
        if not self._is_loaded:
            raise TrainError(f"the task cannot be loaded: {reason}")
        self._ready_by = math.inf
        self._life += 1  # What the old one may still say is no longer of interest.
        self.pipe.close()
        has_lived = now - self._ready_at > SETTLED_SECONDS
        self._failures = 1 if has_lived else self._failures + 1
        self._restart_at = now + min(RESTART_SECONDS_MAX, 2.0 ** min(self._failures - 1, 16))
        self._driver.trainer_failed(reason, now)

    def _end(self) -> None:
        self._mailbox.close()
        if self._source is not None:
            self._source.stop()
        self._stop_renewer()
        self._link.close(self._driver.uplink.will)
        self._driver.close()
        self._save_ledger(math.inf)
        if self._life:
            self.pipe.close()
        self._trainers.stop()
        self._log.info("agent_stopped", updates=self._driver.worker.num_updates)

    def pause_trainer(self) -> None:
        """Stop the trainer; one that still loads goes on with that, and waits then."""
        if not self._life:
            return  # There is none yet.
        self.pipe.interrupt()
        if self._ready_by == self._restart_at == math.inf:
            self._trainers.pause()

    def resume_trainer(self) -> None:
        """Let the trainer go on."""
        self._trainers.resume()

    def _read_pipe(self, pipe: AgentEnd, life: int) -> None:
        """Put a trainer's reports into the mailbox."""
        try:
            while True:
                match pipe.receive():
                    case (report, local):
                        self._mailbox.put(Said(life, trained_of(report, local)))
                    case said:
                        self._mailbox.put(Said(life, said))
        except FrameError as error:
            failed = TrainFailed(error=error.code, message=str(error)[:500])
            self._mailbox.put(Said(life, failed))
        # A TypeError is what a pipe raises that our own end closes while we read.
        except (OSError, EOFError, TypeError) as error:
            self._log.debug("trainer_pipe_ended", error=str(error))
            self._mailbox.put(Said(life, TrainerEnded()))


def trained_of(report: TrainedReport, local: Vector) -> Trained:
    """Return what a report means to the worker."""
    return Trained(
        local=local,
        integers=np.asarray(report.integers, np.int64),
        steps=report.steps,
        seconds=report.seconds,
        metrics=report.metrics,
        cpu_seconds=report.cpu_seconds,
        examples=report.examples,
    )
