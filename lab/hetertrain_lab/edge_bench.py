"""What does a gateway save its cell of 500 vehicles on the way to the cloud, and what does it take?

The saving is measured in virtual time: the same vehicles learn digits without a gateway and behind
one, in each form of its partials, for as long; counted are the bytes of updates that reach the
cloud, and compared is what accuracy they came to. Partials that are encoded go over a thin link.

Rate and memory are a real gateway's, between a real aggregator and a load of 500 nodes that send
updates which were encoded before; gateway, aggregator, broker and load share this machine.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetertrain.errors import HetertrainError
from hetertrain.service import ConnectionSettings
from hetertrain.task import Node, Task
from hetertrain.transport.broker import EmbeddedBroker
from hetertrain_lab.agent_bench import cpu_seconds, memory_mib
from hetertrain_lab.aggregate_bench import (
    JOB,
    Kind,
    VectorTask,
    await_first,
    pass_seconds,
    run_load,
)
from hetertrain_lab.codec_bench import DENSITY, bytes_per_value
from hetertrain_lab.digits import Batch, SmallDigitsTask
from hetertrain_lab.page import Rows
from hetertrain_lab.scenario import parse_scenario
from hetertrain_lab.simulator import SimulatedFleet

NUM_VEHICLES, NUM_VEHICLES_QUICK = 500, 60
SECONDS, SECONDS_QUICK = 90.0, 15.0
SEED = 1
NUM_PARAMETERS = 1_000_000
"""Of the model that messages count as, and that the real gateway merges."""
FINAL_EVALUATIONS = 10
WORKERS = 2
NUM_LOADS = 2
WARM_UP_SECONDS, MEASURED_SECONDS, QUICK_SECONDS = 8.0, 30.0, 8.0
STOP_SECONDS = 30.0


class MillionTask(VectorTask):
    """A model of a million parameters that nobody trains."""

    num_parameters = NUM_PARAMETERS


class PairedDigitsTask(SmallDigitsTask):
    """Two vehicles have the same images: there are not enough for 500 shares."""

    def train_batches(self, node: Node) -> Iterator[Batch]:
        """Yield the pair's images."""
        return super().train_batches(_paired(node))

    def examples(self, node: Node) -> int:
        """Count the pair's images."""
        return super().examples(_paired(node))


def _paired(node: Node) -> Node:
    index, of = int(node.labels["index"]), int(node.labels["of"])
    return replace(
        node, labels=dict(node.labels) | {"index": str(index // 2), "of": str(-(-of // 2))}
    )


@dataclass(frozen=True, slots=True)
class Way:
    """How updates reach the cloud."""

    name: str
    gateways: dict[str, Any]


WAYS = (
    Way("no gateway", {"count": 0}),
    Way("exact, 500 Mbit/s", {"count": 1, "rate_bits_per_second": (5e8, 5e8)}),
    Way(
        "encoded, 50 Mbit/s",
        {"count": 1, "rate_bits_per_second": (5e7, 5e7), "forward": "encoded"},
    ),
)


@dataclass(frozen=True, slots=True)
class Saving:
    """What one way came to."""

    way: str
    uplink_bytes: int
    """Of updates as they reached the cloud, as if each model were of ``NUM_PARAMETERS``."""
    updates: int
    versions: int
    accuracy: float
    """The mean of the last evaluations."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a real gateway bears."""

    num_parameters: int
    updates_per_second: float
    milliseconds_per_update: float
    """Of the gateway's processor time."""
    peak_memory_mib: float


def run_edge(
    directory: Path, *, is_quick: bool, on_progress: Callable[[float], None]
) -> tuple[list[Saving], list[Load]]:
    """Simulate each way, then load a real gateway.

    Raises:
        HetertrainError: no update was acknowledged in time, or a part of it ended.
    """
    tasks = (MillionTask, VectorTask)[: 1 if is_quick else 2]
    num_parts = len(WAYS) + len(tasks)
    savings = []
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(WORKERS, context) as pool:
        futures = [pool.submit(_simulate, way, is_quick=is_quick) for way in WAYS]
        for future in as_completed(futures):
            savings.append(future.result())
            on_progress(len(savings) / num_parts)
    names = [way.name for way in WAYS]
    savings.sort(key=lambda saving: names.index(saving.way))
    loads = []
    for task in tasks:
        loads.append(_bear(directory / task.__name__, task, is_quick=is_quick))
        on_progress((len(savings) + len(loads)) / num_parts)
    return savings, loads


def _simulate(way: Way, *, is_quick: bool) -> Saving:
    scenario = parse_scenario(
        {
            "name": "cell",
            "seconds": SECONDS_QUICK if is_quick else SECONDS,
            "installed": True,
            "heartbeat_seconds": 5.0,
            "message_bytes": 4 * NUM_PARAMETERS,
            "vehicles": [
                {
                    "count": NUM_VEHICLES_QUICK if is_quick else NUM_VEHICLES,
                    "step_seconds": (0.1, 1.0),
                    "rate_bits_per_second": (1e6, 5e7),
                }
            ],
            "gateways": way.gateways,
            "learning": {
                "task": _reference(PairedDigitsTask),
                "labels": {"alpha": "0.3"},
                "learning_rate": 0.3,
            },
        }
    )
    with tempfile.TemporaryDirectory(prefix="hetertrain-edge-") as directory:
        fleet = SimulatedFleet(scenario, SEED, Path(directory), is_checked=False)
        result = fleet.run()
        traffic = fleet.cloud.driver.cell.downlink.traffic
    last = [next(iter(each.metrics.values())) for each in result.evaluations[-FINAL_EVALUATIONS:]]
    return Saving(
        way.name,
        round(traffic.uplink_bytes * NUM_PARAMETERS / fleet.layout.size),
        result.updates,
        result.versions,
        sum(last) / len(last),
    )


def _bear(directory: Path, task: type[VectorTask], *, is_quick: bool) -> Load:
    num_nodes = (NUM_VEHICLES_QUICK if is_quick else NUM_VEHICLES) // NUM_LOADS
    kind = Kind(
        "1 %, 8 bits",
        int(DENSITY * task.num_parameters * bytes_per_value(8)),
        8,
        in_flight=16,
        num_parameters=task.num_parameters,
        cell="edge-1",
        num_nodes=num_nodes,
    )
    directory.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    counter = context.Value("q", 0)
    with EmbeddedBroker(directory / "broker") as broker:
        settings = ConnectionSettings(broker_host=broker.host, broker_port=broker.port)
        loads = [
            context.Process(target=run_load, args=(settings, kind, index, counter), daemon=True)
            for index in range(NUM_LOADS)
        ]
        parts = []
        try:
            parts.append(_start(directory, broker, "aggregator", "--task", _reference(task)))
            gateway = _start(directory, broker, "edge", "--node", "edge-1")
            parts.append(gateway)
            for load in loads:
                load.start()
            await_first(counter, list(loads))
            pass_seconds(WARM_UP_SECONDS, list(loads))
            before = counter.value, cpu_seconds(gateway.pid), time.monotonic()
            pass_seconds(QUICK_SECONDS if is_quick else MEASURED_SECONDS, list(loads))
            if any(part.poll() is not None for part in parts):
                raise HetertrainError(f"a part ended while it was measured: see {directory}")
            after = counter.value, cpu_seconds(gateway.pid), time.monotonic()
            peak_memory_mib = memory_mib(gateway.pid, "VmHWM")
        finally:
            for load in loads:
                if load.pid is not None:
                    load.kill()
                    load.join()
            for part in reversed(parts):
                part.terminate()
            for part in parts:
                part.wait(STOP_SECONDS)
    updates, cpu, seconds = (late - early for early, late in zip(before, after, strict=True))
    return Load(
        task.num_parameters,
        round(updates / seconds, 1),
        round(1e3 * cpu / max(updates, 1), 3),
        round(peak_memory_mib, 1),
    )


def _reference(task: type[Task]) -> str:
    return f"{task.__module__}:{task.__name__}"


def _start(directory: Path, broker: EmbeddedBroker, *command: str) -> subprocess.Popen[bytes]:
    program = Path(sys.executable).with_name("hetertrain")
    log = (directory / f"{command[0]}.log").open("ab")
    flags = ["--job", JOB, "--state-directory", str(directory / "state")]
    flags += ["--broker-host", broker.host, "--broker-port", str(broker.port)]
    return subprocess.Popen([program, *command, *flags], stdout=log, stderr=log)  # noqa: S603  # ours


def figures(savings: list[Saving], loads: list[Load]) -> dict[str, float]:
    """Return the figures by which a gateway is judged."""
    direct = savings[0]
    found: dict[str, float] = {}
    for saving in savings[1:]:
        form = saving.way.partition(",")[0]
        found[f"uplink_reduction_{form}"] = round(direct.uplink_bytes / saving.uplink_bytes, 2)
        found[f"accuracy_loss_points_{form}"] = round(100 * (direct.accuracy - saving.accuracy), 2)
    small = loads[0]
    found["uplink_reduction"] = found["uplink_reduction_encoded"]
    found["updates_per_second"] = small.updates_per_second
    found["peak_memory_mib"] = small.peak_memory_mib
    if loads[1:]:
        found["updates_per_second_resnet18"] = loads[1].updates_per_second
        found["peak_memory_resnet18_mib"] = loads[1].peak_memory_mib
    return found


def saving_rows(savings: list[Saving]) -> Rows:
    """Return the table of what reached the cloud."""
    direct = savings[0]
    lines: list[tuple[str, ...]] = [
        (
            each.way,
            f"{each.uplink_bytes / 1e6:,.0f}",
            f"{direct.uplink_bytes / each.uplink_bytes:.1f}",
            f"{each.updates:,}",
            f"{each.versions:,}",
            f"{100 * each.accuracy:.2f}",
        )
        for each in savings
    ]
    header = ("to the cloud", "MB", "times fewer", "updates", "versions", "accuracy, %")
    return f"one cell of vehicles, a model of {NUM_PARAMETERS:,} parameters", header, lines


def load_rows(loads: list[Load]) -> Rows:
    """Return the table of what a real gateway bears."""
    lines: list[tuple[str, ...]] = [
        (
            f"{each.num_parameters:,}",
            f"{each.updates_per_second:,.0f}",
            f"{each.milliseconds_per_update:.2f}",
            f"{each.peak_memory_mib:,.0f}",
        )
        for each in loads
    ]
    header = ("parameters", "updates/s", "its ms per update", "peak memory, MiB")
    return "one gateway, updates of 1 %", header, lines
