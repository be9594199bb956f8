"""What does an agent cost a vehicle that has nothing to do? Its memory, its processor time, and how
soon after its start it is there. And what does it cost to hand a model to the trainer and back?

A real ``hetertrain vehicle`` process is started against the embedded broker, with a job that has no
aggregator. Figures are of the agent's own process: the trainer, with torch, is another. A round
trip is an order of no steps with a start, and its report, to and from a real trainer process.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hetertrain.errors import HetertrainError
from hetertrain.transport.broker import EmbeddedBroker
from hetertrain.transport.pipe import AgentEnd
from hetertrain.wire.messages import TrainCommand, TrainerReady
from hetertrain_lab.monitor import Monitor
from hetertrain_lab.page import Rows
from hetertrain_vehicle.settings import VehicleSettings
from hetertrain_vehicle.trainer_process import TrainerProcess

JOB, NODE = "idle", "car-1"
TASK = "hetertrain_lab.aggregate_bench:VectorTask"
STARTS, STARTS_QUICK = 5, 2
IDLE_SECONDS, IDLE_SECONDS_QUICK = 30.0, 8.0
SETTLE_SECONDS = 12.0
"""The trainer has loaded torch by then."""
START_SECONDS_MAX = 60.0
ROUND_TRIPS = 15
POLL_SECONDS = 0.01
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Measure:
    """What an idle agent costs."""

    start_seconds: float
    """From the process's start to its first heartbeat at the broker; the median."""
    idle_rss_mib: float
    idle_cpu_percent: float
    """Of one core."""
    vector_round_trip_ms: float
    """A model of ResNet-18's size to the trainer and back; the median."""
    vector_memcpy_ms: float
    """One copy of it in memory."""


def run_agent(output: Path, *, is_quick: bool, on_progress: Callable[[float], None]) -> Measure:
    """Start agents one after the other; watch the last one.

    Raises:
        HetertrainError: one was not there in time.
    """
    num_starts = STARTS_QUICK if is_quick else STARTS
    idle_seconds = IDLE_SECONDS_QUICK if is_quick else IDLE_SECONDS
    with EmbeddedBroker(output / "broker") as broker:
        monitor = Monitor(broker.host, broker.port, JOB)
        starts = []
        for number in range(num_starts):
            node = f"{NODE}-{number}"
            began = time.monotonic()
            agent = _start(node, broker.port, output)
            try:
                while node not in monitor.nodes():
                    if time.monotonic() - began > START_SECONDS_MAX:
                        raise HetertrainError(f"no heartbeat within {START_SECONDS_MAX:g} s")
                    time.sleep(POLL_SECONDS)
                starts.append(time.monotonic() - began)
                on_progress((number + 1) / (num_starts + 1))
                if number == num_starts - 1:
                    time.sleep(SETTLE_SECONDS)
                    rss_mib, cpu_percent = _watch(agent.pid, idle_seconds)
            finally:
                agent.terminate()
                agent.wait(20)
        monitor.stop()
    median = sorted(starts)[len(starts) // 2]
    round_trip_ms, memcpy_ms = _time_vectors(output)
    return Measure(
        round(median, 2),
        round(rss_mib, 1),
        round(cpu_percent, 2),
        round(round_trip_ms, 1),
        round(memcpy_ms, 1),
    )


def agent_rows(measure: Measure) -> Rows:
    """Return the table."""
    lines: list[tuple[str, ...]] = [
        ("start to first heartbeat, s", f"{measure.start_seconds:.2f}"),
        ("memory, MiB", f"{measure.idle_rss_mib:.1f}"),
        ("processor, % of a core", f"{measure.idle_cpu_percent:.2f}"),
        ("a model to the trainer and back, ms", f"{measure.vector_round_trip_ms:.1f}"),
        ("one copy of it in memory, ms", f"{measure.vector_memcpy_ms:.1f}"),
    ]
    return "an agent with nothing to do", ("", "agent alone"), lines


def _start(node: str, port: int, output: Path) -> subprocess.Popen[bytes]:
    command = Path(sys.executable).with_name("hetertrain")
    settings = {"job": JOB, "node": node, "task": TASK, "broker-port": str(port)}
    settings["state-directory"] = str(output / "state")
    flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
    log = (output / "agent.log").open("ab")
    return subprocess.Popen([command, "vehicle", *flags], stdout=log, stderr=log)  # noqa: S603  # ours


def _time_vectors(output: Path) -> tuple[float, float]:
    settings = VehicleSettings(job=JOB, node=NODE, task=TASK, state_directory=output / "state")
    trainers = TrainerProcess(multiprocessing.get_context("spawn"), settings)
    pipe = AgentEnd(trainers.start())
    try:
        ready = pipe.receive()
        if not isinstance(ready, TrainerReady):
            raise HetertrainError(f"the trainer is not ready: {ready}")
        pipe.accept(ready)
        vector = np.ones(ready.size, np.float32)
        other = np.empty_like(vector)

        def round_trip() -> None:
            pipe.order(TrainCommand(steps=0, is_fresh=False), vector)
            pipe.receive()

        return _median_ms(round_trip), _median_ms(lambda: np.copyto(other, vector))
    finally:
        pipe.close()
        trainers.stop()


def _median_ms(action: Callable[[], None]) -> float:
    times = []
    for _ in range(ROUND_TRIPS):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def _watch(pid: int, seconds: float) -> tuple[float, float]:
    before = cpu_seconds(pid)
    time.sleep(seconds)
    return memory_mib(pid, "VmRSS"), 100 * (cpu_seconds(pid) - before) / seconds


def memory_mib(pid: int, kind: str) -> float:
    """Return how much memory a process holds (``VmRSS``), or ever held (``VmHWM``)."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith(kind))
    return int(line.split()[1]) / 1024


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has had, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND
