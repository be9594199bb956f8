"""A fleet in virtual time: the drivers of production over a virtual network, with real stores, real
crashes of state, and no waiting.

``SimulatedFleet`` is the world that the processes (``processes.py``) live in: it makes them, starts
their troubles, measures versions, and checks the promises (``invariants.py``) after each step. The
same scenario and seed give the same bytes.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from hetertrain.core.aggregator import Aggregator, Release
from hetertrain.core.gate import Outcome
from hetertrain.core.layout import ParameterLayout
from hetertrain.core.policy import Statistics
from hetertrain.core.update import Checkpoint
from hetertrain.core.worker import State
from hetertrain.errors import HetertrainError
from hetertrain.logging import silent_logger
from hetertrain.task import Node, Task, layout_of, load_task, read_tensors, write_tensors
from hetertrain.wire import topics
from hetertrain.wire.contents import JobTerms, unpack_update
from hetertrain.wire.events import ModelReceived
from hetertrain.wire.frames import unpack
from hetertrain.wire.messages import VerdictMessage
from hetertrain_cloud.history import VERSIONS_FILE, Progress, whole_lines
from hetertrain_edge.forwarding import Form
from hetertrain_lab.invariants import (
    Ledger,
    ViolationError,
    check_aggregator,
    check_queue,
    check_wait,
)
from hetertrain_lab.network import (
    Clock,
    VirtualBroker,
)
from hetertrain_lab.process import Process, between
from hetertrain_lab.processes import CLOUD_SHAPE, CloudProcess, GatewayProcess, VehicleProcess
from hetertrain_lab.scenario import (
    Scenario,
    plan_gateways,
    plan_vehicles,
)
from hetertrain_lab.trainers import Learner, SyntheticLearner
from hetertrain_vehicle.trainer import Trainer

CALM_SECONDS = 60.0
"""At the end all troubles stop for so long; then everything accepted must have been counted."""
EVALUATION_SPACING = 0.02
"""Evaluations are so far apart, as a share of the time since the start."""
EVALUATION_SECONDS_MIN = 0.25
EVALUATIONS_MEAN = 3
"""A target is reached when the mean of so many evaluations has reached it."""
_MILLISECONDS = 1_700_000_000_000
"""The wall clock at virtual second 0."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The metrics of a version, and when it was made."""

    seconds: float
    version: int
    metrics: dict[str, float]


@dataclass(slots=True, kw_only=True)
class Result:
    """What a simulation came to."""

    scenario: str
    policy: str
    seed: int
    seconds: float
    versions: int
    steps: int
    updates: int
    bytes_up: int
    bytes_down: int
    crashes: int
    disks_lost: int
    frames: int
    refused: dict[str, int]
    lags: dict[int, int]
    model_digest: str
    event_digest: str
    reached_at: float | None
    """When the target was reached; None: never, or there is none."""
    evaluations: list[Evaluation]

    def metric(self) -> str | None:
        """Name the headline metric."""
        return next(iter(self.evaluations[-1].metrics)) if self.evaluations else None


class SimulatedFleet:
    """All processes of a scenario, in one virtual world."""

    def __init__(
        self,
        scenario: Scenario,
        seed: int,
        directory: Path,
        *,
        is_checked: bool = True,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        """Prepare; ``is_checked``: hold the ledger, which costs as much again as the aggregator."""
        self.scenario, self.seed, self.directory = scenario, seed, directory
        self.clock = Clock()
        self.rng = random.Random(f"{scenario.name} {seed}")  # noqa: S311  # replayed, not secret
        self.log = silent_logger()
        self.is_calm = False
        self.num_crashes = 0
        self.num_disks_lost = 0
        self.num_steps = 0
        self.evaluations: list[Evaluation] = []
        self._evaluate_at = 0.0
        self._on_progress = on_progress
        self._is_checked = is_checked
        self._open_since: float | None = None
        self._is_orphaned = False
        self.policy, self.weights = scenario.policies()
        plans = plan_vehicles(scenario, topics.CLOUD_CELL)
        self._prepare_model(len(plans))
        scale = 1.0
        if scenario.message_bytes is not None:
            scale = scenario.message_bytes / (4 * self.layout.size)
        self.tiers = scenario.tiers(scale)
        self.broker = VirtualBroker(
            self.clock, self.rng, scale, self._delivered if is_checked else None
        )
        may_restart = scenario.cloud.disk_loss > 0
        is_exact = scenario.gateways.forward is not Form.ENCODED
        self.ledger = Ledger(
            self.policy, self.weights, self.initial, self.layout.buffers(), may_restart, is_exact
        )
        terms = JobTerms(
            self.layout.digest,
            self.policy,
            self.weights,
            {0: Statistics()},
            self.lineage(),
        )
        self.installed = ModelReceived(0, self.initial.vector, self.initial.integers, None, terms)
        self.cloud = CloudProcess(self, topics.CLOUD_CELL, CLOUD_SHAPE, scenario.cloud)
        self.cells = tuple(plan.name for plan in plan_gateways(scenario))
        self.gateways = [GatewayProcess(self, plan) for plan in plan_gateways(scenario)]
        self.vehicles = [VehicleProcess(self, plan, i) for i, plan in enumerate(plans)]
        self._joins = [plan.joins_within_seconds for plan in plans]

    @property
    def processes(self) -> tuple[Process, ...]:
        """All processes."""
        return (self.cloud, *self.gateways, *self.vehicles)

    def _prepare_model(self, num_vehicles: int) -> None:
        """Lay out the model, and make version 0."""
        learning = self.scenario.learning
        self._task: Task | None = None
        self._nodes = [
            Node(
                id=f"vehicle-{i:03d}",
                labels={"index": str(i), "of": str(num_vehicles)} | learning.labels,
                seed=self.seed * 1000 + i,
            )
            for i in range(num_vehicles)
        ]
        if learning.task is None:
            tensors: dict[str, NDArray[np.generic]] = {
                "x": np.zeros(learning.parameters, np.float32)
            }
            self.layout = ParameterLayout.of(tensors, {"x"})
        else:
            torch.set_num_threads(1)
            torch.manual_seed(self.seed)
            self._task = load_task(learning.task)
            self._model = self._task.model()
            tensors = read_tensors(self._model)
            self.layout = layout_of(self._task, self._model)
        self.initial = Checkpoint(0, *self.layout.flatten(tensors))

    def learner(self, index: int, life: int) -> Learner:
        """Build what a vehicle trains, in its so-many-th life."""
        seed = (self.seed * 1000 + index) * 1000 + life
        if self._task is None:
            return SyntheticLearner(self.layout.size, seed)
        node = replace(self._nodes[index], seed=seed)
        return Trainer(self._task, node, learning_rate=self.scenario.learning.learning_rate)

    def examples(self, index: int) -> int:
        """Count the examples that a vehicle holds."""
        return 100 if self._task is None else self._task.examples(self._nodes[index])

    def lineage(self) -> str:
        """Name the run that the cloud would begin now: each lost disk makes another."""
        return f"{self.seed:x}-{self.num_disks_lost:x}"

    def wall_milliseconds(self) -> int:
        """Return the wall clock."""
        return _MILLISECONDS + int(self.clock.now * 1000)

    def stepped(self, steps: int) -> None:
        """Count local steps."""
        self.num_steps += steps

    def version_made(self, release: Release, progress: Progress) -> None:
        """Check a version against its serial repetition, and measure it if it is time."""
        del progress  # Its own clock: it begins with the first node.
        checkpoint = release.checkpoint
        if release.contributions:
            self._open_since = None
            if self._is_checked:
                keys = [(item.node, item.seq) for item in release.contributions]
                self.ledger.version_made(
                    checkpoint.version,
                    checkpoint.digest(),
                    keys,
                    ends_sync=release.sync is not None,
                )
        if self._task is not None and self.clock.now >= self._evaluate_at:
            self._evaluate(checkpoint)

    def _evaluate(self, checkpoint: Checkpoint) -> None:
        assert self._task is not None, "only a task can be measured"
        now = self.clock.now
        self._evaluate_at = now + max(EVALUATION_SECONDS_MIN, EVALUATION_SPACING * now)
        write_tensors(self._model, self.layout.unflatten(checkpoint.vector, checkpoint.integers))
        metrics = self._task.evaluate(self._model, None)
        self.evaluations.append(Evaluation(now, checkpoint.version, metrics))

    def update_stored(self, content: bytes) -> None:
        """Note an update that entered its outbox."""
        if self._is_checked:
            update = unpack_update(content)
            self.ledger.stored[update.node, update.seq] = update

    def cloud_recovered(self, machine: Aggregator) -> None:
        """Let the ledger catch up with versions made in the moment of a crash."""
        self._open_since = None
        if not self._is_checked:
            return
        history = self.directory / topics.CLOUD_CELL / VERSIONS_FILE
        for line in whole_lines(history):
            row = json.loads(line)
            if row["version"] > self.ledger.checkpoint.version:
                keys = [(item[0], item[1]) for item in row["contributions"]]
                self.ledger.version_made(
                    row["version"], row["digest"], keys, ends_sync=row["sync"] is not None
                )
        if machine.checkpoint.digest() != self.ledger.digest:
            raise ViolationError(f"version {machine.checkpoint.version} came back otherwise")

    def disk_lost(self, name: str) -> None:
        """What only that disk knew may be lost, and nothing else."""
        self.num_disks_lost += 1
        if name == topics.CLOUD_CELL:
            self.ledger.restart()
            # What gateways have accepted on versions that no longer exist has no model to go to.
            self._is_orphaned = bool(self.gateways)
        for vehicle in self.vehicles:
            if name in vehicle.cells:
                mine = {key for key in self.ledger.stored if key[0] == vehicle.name}
                self.ledger.forgiven |= mine

    def _delivered(self, client_id: str, topic: str, frame: bytes) -> None:
        """Note acknowledgements as they reach their vehicles."""
        if not topic.endswith("/in"):
            return
        message, _ = unpack(frame)
        if isinstance(message, VerdictMessage) and client_id.startswith("vehicle"):
            key = (message.node, message.seq)
            if message.outcome in (Outcome.MERGED, Outcome.DUPLICATE):
                self.ledger.acknowledged.setdefault(key, self.clock.now)

    def check(self, process: Process) -> None:
        """Check what must hold after each step of a process."""
        if not self._is_checked:
            return
        now = self.clock.now
        check_wait(process.name, process.driver.wakes_at, now)
        process.check_rest()
        for link in process.links:
            check_queue(link.client_id, link.num_queued)
        if process is self.cloud:
            machine = self.cloud.driver.machine
            if not machine.open.contributions:
                self._open_since = None
            elif self._open_since is None:
                self._open_since = now
            check_aggregator(machine, self._open_since, now, has_gateways=bool(self.gateways))

    def run(self) -> Result:
        """Run to the end of the scenario.

        Raises:
            ViolationError: a promise was broken; the message says which and when.
        """
        self.cloud.start()
        for gateway in self.gateways:
            gateway.start()
        for vehicle, within in zip(self.vehicles, self._joins, strict=True):
            self.clock.at(self.rng.random() * within, vehicle.start)
        for process in self.processes:
            process.begin_troubles()
        self._trouble_broker()
        result = self._result(self._train())
        if self._is_checked:
            self._calm_down()
        for process in self.processes:
            if process.is_up:
                process.dismantle()
        return result

    def _trouble_broker(self) -> None:
        troubles, rng = self.scenario.broker, self.rng
        if troubles.crash_seconds is None:
            return
        mean = troubles.crash_seconds

        def crash() -> None:
            if self.is_calm:
                return
            self.broker.restart(loses_sessions=rng.random() < troubles.disk_loss)
            for process in self.processes:
                after = between(rng, troubles.restart_seconds)
                self.clock.at(self.clock.now + after, process.connect)
            self.clock.at(self.clock.now + 2 * mean * rng.random(), crash)

        self.clock.at(2 * mean * rng.random(), crash)

    def _train(self) -> float | None:
        scenario = self.scenario
        reached_at: float | None = None
        num_seen = 0
        told = 0.0
        while self.clock.now < scenario.seconds:
            if not self._step(scenario.seconds):
                break
            if self._on_progress is not None and self.clock.now >= told:
                told = self.clock.now + scenario.seconds / 200
                self._on_progress(self.clock.now)
            if len(self.evaluations) != num_seen:
                num_seen = len(self.evaluations)
                if reached_at is None and self._has_reached():
                    reached_at = self.clock.now
                    if scenario.stops_at_target:
                        break
            if scenario.steps is not None and self.num_steps >= scenario.steps:
                break
        if self._task is not None and self.cloud.is_up:
            self._evaluate(self.cloud.driver.machine.checkpoint)
        return reached_at

    def _step(self, until: float) -> bool:
        try:
            return self.clock.step(until)
        except ViolationError:
            raise
        except (AssertionError, HetertrainError, ArithmeticError, LookupError, ValueError) as error:
            raise ViolationError(f"{type(error).__name__}: {error}") from error

    def _has_reached(self) -> bool:
        target = self.scenario.learning.target
        if target is None or len(self.evaluations) < EVALUATIONS_MEAN:
            return False
        last = self.evaluations[-EVALUATIONS_MEAN:]
        mean = sum(next(iter(e.metrics.values())) for e in last) / EVALUATIONS_MEAN
        return mean >= target

    def _calm_down(self) -> None:
        """End all troubles; then all that was accepted must be counted, and training go on."""
        calm_at = self.clock.now
        self.is_calm = self.broker.is_calm = True
        while self._step(calm_at + CALM_SECONDS):
            pass
        machine = self.cloud.driver.machine
        kept = set(machine.open.contributions)
        lost = self.ledger.lost(kept, calm_at)
        if lost and not self._is_orphaned:
            raise ViolationError(
                f"update {lost[0]} was acknowledged and is lost ({len(lost)} in all)"
            )
        idle = [v.name for v in self.vehicles if v.driver.worker.state is State.JOINING]
        if idle:
            raise ViolationError(
                f"{idle[0]} still waits for a model after {CALM_SECONDS:g} calm seconds"
            )
        # A stepwise node holds on where a gateway lost its disk with the only update on it.
        if self.vehicles and not (self.ledger.counted | self.ledger.forgiven):
            raise ViolationError("nothing was merged at all")

    def _result(self, reached_at: float | None) -> Result:
        machine = self.cloud.driver.machine
        lags: Counter[int] = self.cloud.driver.updates_by_lag
        return Result(
            scenario=self.scenario.name,
            policy=self.scenario.policy,
            seed=self.seed,
            seconds=self.clock.now,
            versions=machine.checkpoint.version,
            steps=self.num_steps,
            updates=sum(lags.values()),
            bytes_up=sum(link.bytes_up for v in self.vehicles for link in v.links),
            bytes_down=sum(link.bytes_down for v in self.vehicles for link in v.links),
            crashes=self.num_crashes,
            disks_lost=self.num_disks_lost,
            frames=self.broker.num_frames,
            refused=dict(sorted(self.cloud.driver.cell.refused.items())),
            lags=dict(sorted(lags.items())),
            model_digest=machine.checkpoint.digest(),
            event_digest=self.broker.digest(),
            reached_at=reached_at,
            evaluations=self.evaluations,
        )


def simulate(
    scenario: Scenario,
    seed: int,
    *,
    is_checked: bool = True,
    on_progress: Callable[[float], None] | None = None,
) -> Result:
    """Run a scenario with a seed, its state in memory where the machine has a file system there.

    Raises:
        ViolationError: a promise was broken.
        SettingsError, TaskError: the scenario or its task cannot be used.
    """
    memory = Path("/dev/shm")  # noqa: S108  # only to be fast; the default is used where it is not
    parent = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="hetertrain-simulation-", dir=parent) as directory:
        fleet = SimulatedFleet(
            scenario, seed, Path(directory), is_checked=is_checked, on_progress=on_progress
        )
        return fleet.run()
