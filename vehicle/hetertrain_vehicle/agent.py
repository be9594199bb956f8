"""The in-vehicle agent: drives a vehicle's machines with the broker's connection and the trainer
process.

One thread takes events from one mailbox: frames from the broker, reports from the trainer, the
clock. It never trains and never imports torch.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
from pydantic import Field

from hetertrain.core.layout import Vector
from hetertrain.core.policy import SYNC_PRESETS
from hetertrain.core.tiers import TIERS
from hetertrain.core.worker import Trained, TrainOrder, Worker
from hetertrain.errors import FrameError, SettingsError, TrainError
from hetertrain.logging import get_logger
from hetertrain.service import BrokerSettings, Mailbox, Stop, node_claim
from hetertrain.transport import mqtt
from hetertrain.transport.database import own_directory
from hetertrain.transport.outbox import Outbox
from hetertrain.transport.pipe import AgentEnd
from hetertrain.wire import topics
from hetertrain.wire.frames import NodeState, TrainCommand, TrainedReport, TrainerReady, TrainFailed
from hetertrain.wire.uplink import Uplink
from hetertrain_vehicle.driver import VehicleDriver

RESTART_SECONDS_MAX = 60.0
"""A trainer that fails again and again is started so seldom in the end."""
SETTLED_SECONDS = 60.0
"""One that lived so long fails for the first time."""
TRAINER_SECONDS_MAX = 120.0
"""How long a trainer may take to load its task."""


class VehicleSettings(BrokerSettings):
    """Settings of one vehicle."""

    section: ClassVar[str] = "vehicle"

    node: str = Field(description="this node's stable id")
    cell: str = Field(topics.CLOUD_CELL, description="the gateway to speak to, or 'cloud'")
    tier: str = Field("t2", description="the class of this node's link to begin with: t0 to t4")
    follow_link: bool = Field(
        True, description="change the tier when transfers show that the link is in another one"
    )
    task: str | None = Field(
        None, description="the task to train, as module:Class; a loop of your own needs none"
    )
    labels: dict[str, str] = Field({}, description="labels of this node, as key=value")
    seed: int = Field(0, ge=0, description="seeds the order of batches")
    step_seconds_min: float = Field(0.0, ge=0, description="pad each step to this duration")
    trainer_nice: int = Field(
        0, ge=0, le=19, description="how much the trainer gives way to other programs"
    )
    trainer_memory_mib: int | None = Field(
        None, ge=64, description="memory that the trainer may have; unset: what there is"
    )
    trainer_cpu_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of one core that the trainer may take, by rests between its steps",
    )
    limit_link: bool = Field(
        False, description="hold the link to the tier's rate, and stay in the tier"
    )

    @property
    def directory(self) -> Path:
        """The folder of this node's state."""
        return self.state_directory / self.node


class TrainerEnded:
    """The pipe to the trainer closed."""


@dataclass(frozen=True, slots=True)
class Said:
    """What the trainer said that was started as number ``life``."""

    life: int
    event: TrainerReady | TrainFailed | Trained | TrainerEnded


Input = mqtt.Event | Said


class TrainerSource(Protocol):
    """Starts trainers, one at a time."""

    def start(self) -> Connection:
        """Start one, in place of the one before; return our end of its pipe."""

    def ending(self) -> str:
        """Say how the one ended that closed its pipe."""

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


class Agent:
    """One vehicle at work."""

    def __init__(self, settings: VehicleSettings, trainers: TrainerSource) -> None:
        topics.check_name("node", settings.node)
        topics.check_name("job", settings.job)
        topics.check_name("cell", settings.cell)
        if settings.tier not in TIERS:
            raise SettingsError(f"tier {settings.tier!r} is unknown: use one of {', '.join(TIERS)}")
        self._owner = own_directory(settings.directory)
        self._settings = settings
        self._trainers = trainers
        self._life = 0
        """How many trainers there were."""
        self._failures = 0
        """How many trainers failed in a row."""
        self._is_loaded = False
        """Whether a trainer was ready once: the task is well."""
        self._ready_at = 0.0
        self._restart_at = self._ready_by = math.inf
        self._mailbox: Mailbox[Input] = Mailbox()
        self._log = get_logger(node=settings.node)

    def run(self) -> int:
        """Work until stopped; return the exit code.

        Raises:
            TrainError: the task cannot be loaded.
        """
        self._mailbox.stop_on_signals()
        self._start()
        try:
            self._start_trainer()
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
        state = NodeState(
            node=settings.node,
            job=settings.job,
            cell=settings.cell,
            tier=settings.tier,
            role="vehicle",
            is_online=True,
        )
        follows_link = settings.follow_link and not settings.limit_link
        uplink = Uplink(
            state,
            tier,
            follows_link=follows_link,
            sign=settings.signer(),
            check=settings.verifier(),
        )
        rate = tier.rate_bits_per_second if settings.limit_link else None
        endpoint = settings.endpoint(settings.node, rate)
        self._connection = mqtt.Connection(
            endpoint,
            uplink.subscriptions,
            self._mailbox.put,
            uplink.will,
            uplink.other_subscriptions,
            node_claim(uplink, endpoint),
        )
        self._driver = VehicleDriver(
            worker, uplink, outbox, self._connection, TrainerPipe(self), self._log
        )
        self._driver.await_trainer()
        self._driver.recover(time.monotonic())
        self._stop_renewer = settings.start_renewer()
        self._connection.start()
        self._log.info("agent_started", tier=settings.tier)

    def _serve(self) -> None:
        while True:
            wakes_at = min(self._driver.wakes_at, self._restart_at, self._ready_by)
            event = self._mailbox.take(wakes_at)
            now = time.monotonic()
            match event:
                case Stop():
                    return
                case None:
                    pass
                case Said(life, said):
                    if life == self._life:
                        self._hear(said, now)
                case _:
                    self._driver.take(event, now)
            if now >= self._restart_at:
                self._start_trainer()
            elif now >= self._ready_by:
                self._lose_trainer(f"not ready within {TRAINER_SECONDS_MAX:g} s", now)
            self._driver.tick(now)

    def _hear(self, said: TrainerReady | TrainFailed | Trained | TrainerEnded, now: float) -> None:
        """Take what the trainer says; where it fails, have another one, after a while."""
        match said:
            case Trained():
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
        self._stop_renewer()
        self._connection.publish((self._driver.uplink.will,))
        self._connection.stop()
        self._driver.close()
        if self._life:
            self.pipe.close()
        self._trainers.stop()
        self._log.info("agent_stopped", updates=self._driver.worker.num_updates)

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
