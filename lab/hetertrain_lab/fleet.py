"""A fleet of real processes on one machine: who is in it, and starting, watching, killing and
ending it.

Every part is an operating-system process with its own connection. All are forked from one server
process that has imported torch once, so that twelve trainers do not cost twelve imports. The
processes of a fleet end when this one does, however it ends.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from hetertrain.logging import configure
from hetertrain.service import end_with_parent
from hetertrain_cloud.service import AggregatorService, AggregatorSettings
from hetertrain_edge.service import EdgeService, EdgeSettings
from hetertrain_vehicle.agent import Agent
from hetertrain_vehicle.settings import VehicleSettings
from hetertrain_vehicle.trainer_process import GivenTrainer, start_trainer

TIER_CYCLE = ("t3", "t2", "t1", "t0")
SLOWDOWN_MAX = 10.0
PRELOADED = (
    "torch",
    "torch._dynamo",  # the first optimiser imports it
    "hetertrain_lab.driving",
    "hetertrain_cloud.service",
    "hetertrain_edge.service",
    "hetertrain_vehicle.agent",
    "hetertrain_vehicle.trainer",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """Who is in a fleet: speeds from 1 to 10 times a step's duration, links from t3 to t0."""

    job: str
    task: str
    policy: str
    num_vehicles: int
    num_edges: int
    seed: int
    step_seconds: float
    """Duration of a step on the fastest vehicle."""
    host: str
    port: int
    directory: Path
    overrides: dict[str, Any] = field(default_factory=dict)
    """Settings of the aggregator's policy that differ from the preset's."""

    def aggregator(self) -> AggregatorSettings:
        """Return the cloud's settings."""
        return AggregatorSettings(
            job=self.job,
            task=self.task,
            policy=self.policy,
            seed=self.seed,
            state_directory=self.directory,
            broker_host=self.host,
            broker_port=self.port,
            **self.overrides,
        )

    def edges(self) -> list[EdgeSettings]:
        """Return the gateways' settings."""
        return [
            EdgeSettings(
                node=f"edge-{index + 1}",
                job=self.job,
                state_directory=self.directory,
                broker_host=self.host,
                broker_port=self.port,
            )
            for index in range(self.num_edges)
        ]

    def vehicles(self) -> list[VehicleSettings]:
        """Return the vehicles' settings; they differ in data, speed, tier and cell."""
        return [self._vehicle(index) for index in range(self.num_vehicles)]

    def _vehicle(self, index: int) -> VehicleSettings:
        # Speeds and tiers go through the fleet at different strides, so that slow and thin do not
        # coincide.
        place = (index * 7) % self.num_vehicles / max(1, self.num_vehicles - 1)
        node = f"vehicle-{index + 1:02d}"
        return VehicleSettings(
            node=node,
            job=self.job,
            cell=f"edge-{index % self.num_edges + 1}" if self.num_edges else "cloud",
            tier=TIER_CYCLE[(index // 2 + index) % len(TIER_CYCLE)],
            task=self.task,
            labels={"index": str(index), "of": str(self.num_vehicles)},
            seed=self.seed * 1000 + index,
            step_seconds_min=self.step_seconds * SLOWDOWN_MAX ** min(place, 1.0),
            limit_link=True,
            state_directory=self.directory,
            broker_host=self.host,
            broker_port=self.port,
        )


class Fleet:
    """The running processes of a plan."""

    def __init__(self, plan: FleetPlan) -> None:
        self.plan = plan
        self.processes: dict[str, BaseProcess] = {}
        self._trainers: list[BaseProcess] = []
        self._context = fork_server()

    def start(self) -> None:
        """Start cloud, gateways and vehicles."""
        self.start_aggregator()
        for edge in self.plan.edges():
            self.start_edge(edge)
        for vehicle in self.plan.vehicles():
            self.start_vehicle(vehicle)

    def start_aggregator(self) -> None:
        """Start the cloud's aggregator."""
        self._start("cloud", run_aggregator, self.plan.aggregator())

    def start_edge(self, settings: EdgeSettings) -> None:
        """Start one gateway."""
        self._start(settings.node, run_edge, settings)

    def start_vehicle(self, settings: VehicleSettings) -> None:
        """Start one vehicle: its trainer and its agent."""
        trainer, pipe = start_trainer(self._context, settings)
        self._trainers.append(trainer)
        self._start(settings.node, run_vehicle, settings, pipe)
        pipe.close()

    def kill(self, name: str) -> None:
        """Kill a part outright (SIGKILL), as a crash would."""
        process = self.processes.pop(name)
        process.kill()
        process.join(5.0)

    def dead(self) -> list[str]:
        """Return the names of parts that ended by themselves."""
        return [name for name, process in self.processes.items() if not process.is_alive()]

    def stop(self, timeout_seconds: float = 4.0) -> None:
        """End all processes: ask, wait, and kill who does not listen."""
        deadline = time.monotonic() + timeout_seconds
        vehicles_first = sorted(self.processes.items(), key=lambda item: item[0] == "cloud")
        for _, process in vehicles_first:
            process.terminate()
        everyone = [*self.processes.values(), *self._trainers]
        while any(p.is_alive() for p in everyone) and time.monotonic() < deadline:
            wait([p.sentinel for p in everyone if p.is_alive()], deadline - time.monotonic())
        for process in everyone:
            if process.is_alive():
                process.kill()
            process.join(1.0)
        self.processes.clear()
        self._trainers.clear()

    def _start(self, name: str, target: Callable[..., None], *arguments: Any) -> None:
        log = self.plan.directory / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        process = self._context.Process(
            target=run_part, args=(log, target, *arguments), name=name, daemon=True
        )
        process.start()
        self.processes[name] = process


def fork_server() -> ForkServerContext:
    """Return the context whose server has torch loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def run_part(log: Path, target: Callable[..., None], *arguments: Any) -> None:
    """Be one part's process: log to a file, and end when the parent does."""
    with log.open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    configure("info", json=True)
    end_with_parent()
    target(*arguments)


def run_aggregator(settings: AggregatorSettings) -> None:
    """Be the cloud."""
    AggregatorService(settings).run()


def run_edge(settings: EdgeSettings) -> None:
    """Be a gateway."""
    EdgeService(settings).run()


def run_vehicle(settings: VehicleSettings, pipe: Connection) -> None:
    """Be a vehicle's agent."""
    Agent(settings, GivenTrainer(pipe)).run()
