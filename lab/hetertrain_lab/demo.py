"""The main job: a fleet of real processes trains a model, beside the synchronous baseline, and a
report is written.

The two runs follow one another on the same machine: same data, seeds, speeds, links and gateways,
one code path; only the policy differs. Ctrl-C ends the run that is under way, and the report shows
what there is.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.live import Live

from hetertrain.core.policy import SYNC_PRESETS
from hetertrain.errors import HetertrainError
from hetertrain.task import Node, load_task, read_tensors
from hetertrain.transport.broker import EmbeddedBroker
from hetertrain.wire import topics
from hetertrain.wire.messages import AggregatorStatus, NodeState
from hetertrain_cloud.history import METRICS_FILE, VERSIONS_FILE
from hetertrain_lab.fleet import Fleet, FleetPlan
from hetertrain_lab.live import FleetView
from hetertrain_lab.monitor import Monitor
from hetertrain_lab.references import (
    ALONE_STEPS,
    POOLED_STEPS,
    TRAIN_SECONDS_MAX,
    References,
    measure_references,
)
from hetertrain_lab.report import Curve, NodeRow, RunRecord, Totals, summary_table, write_report
from hetertrain_vehicle.trainer_process import node_of

TASKS = {
    "driving": "hetertrain_lab.driving:DrivingTask",
    "digits": "hetertrain_lab.digits:DigitsTask",
}
STEP_SECONDS = {"driving": 0.02, "digits": 0.06}
"""Duration of a step on the fastest vehicle: more than this machine needs for it, with all vehicles
at work.
"""
START_SECONDS_MAX = 90.0
REFRESH_SECONDS = 0.25
LABELS = {"sap": "SAP-SGD", "fedavg": "synchronous FedAvg"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """What the demo runs."""

    task: str = "driving"
    num_vehicles: int = 12
    num_edges: int = 2
    seconds: float = 60.0
    seed: int = 1
    has_baseline: bool = True
    directory: Path = Path("runs/demo")
    is_quiet: bool = False
    """Print nothing but what was asked for as JSON."""


@dataclass(slots=True)
class RunResult:
    """What one fleet did."""

    policy: str
    curve: Curve
    seconds: float
    versions: int
    final: dict[str, float]
    nodes: dict[str, NodeState]
    updates_by_lag: dict[int, int]
    plan: FleetPlan

    def totals(self) -> Totals:
        """Add up what the vehicles sent and received."""
        vehicles = [state for state in self.nodes.values() if state.role == "vehicle"]
        return Totals(
            versions=self.versions,
            updates=sum(self.updates_by_lag.values()),
            bytes_up=sum(state.bytes_up for state in vehicles),
            bytes_down=sum(state.bytes_down for state in vehicles),
        )


@dataclass(slots=True)
class Interruption:
    """Whether the user asked to stop; the report of what there is is still written."""

    event: threading.Event = field(default_factory=threading.Event)

    def install(self) -> None:
        """Listen to SIGINT and SIGTERM."""

        def interrupt(_number: int, _frame: FrameType | None) -> None:
            self.event.set()

        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, interrupt)

    def __bool__(self) -> bool:
        return self.event.is_set()


def run_demo(settings: DemoSettings) -> dict[str, object]:
    """Run fleet and baseline, write report and model, and return the summary.

    Raises:
        HetertrainError: the fleet did not start, or a part of it died.
    """
    console = Console(quiet=settings.is_quiet)
    interruption = Interruption()
    interruption.install()
    results = [run_fleet(settings, "sap", console, interruption)]
    if settings.has_baseline and not interruption:
        results.append(run_fleet(settings, "fedavg", console, interruption))
    references = None
    if not interruption:
        references = _references(settings, results[0].plan, console, interruption)
    record = _record(settings, results, references, is_complete=not interruption)
    report = write_report(record, settings.directory)
    console.print(summary_table(record))
    model = results[0].plan.aggregator().final_model
    console.print(f"report      {report.resolve()}\ncheckpoint  {model.resolve()}")
    return _summary(record, report, model)


def run_fleet(
    settings: DemoSettings, policy: str, console: Console, interruption: Interruption
) -> RunResult:
    """Train one fleet under one policy for the set time."""
    directory = settings.directory / policy
    forget_earlier_run(directory)
    with EmbeddedBroker(directory / "broker") as broker:
        plan = FleetPlan(
            job=f"{settings.task}-{policy}",
            task=TASKS[settings.task],
            policy=policy,
            num_vehicles=settings.num_vehicles,
            num_edges=settings.num_edges,
            seed=settings.seed,
            step_seconds=STEP_SECONDS[settings.task],
            host=broker.host,
            port=broker.port,
            directory=directory,
        )
        monitor = Monitor(broker.host, broker.port, plan.job)
        fleet = Fleet(plan)
        view = FleetView(f"{LABELS[policy]} · {settings.task}", settings.seconds)
        try:
            fleet.start()
            with Live(console=console, auto_refresh=False, transient=settings.is_quiet) as live:

                def show(elapsed: float) -> None:
                    monitor.each(view.node, view.aggregator)
                    if not settings.is_quiet:
                        live.update(view.render(elapsed), refresh=True)

                _watch(settings, fleet, monitor, show, interruption)
            statuses, nodes = monitor.statuses(), monitor.nodes()
        finally:
            fleet.stop()
            monitor.stop()
    return _result(policy, plan, statuses.get(topics.CLOUD_CELL), nodes)


def _watch(
    settings: DemoSettings,
    fleet: Fleet,
    monitor: Monitor,
    show: Callable[[float], None],
    interruption: Interruption,
) -> None:
    """Wait for the fleet to begin, then for the set time, showing it all the while."""
    give_up_at = time.monotonic() + START_SECONDS_MAX
    while not interruption.event.wait(REFRESH_SECONDS):
        status = monitor.statuses().get(topics.CLOUD_CELL)
        elapsed = 0.0 if status is None else status.elapsed_seconds
        show(elapsed)
        if elapsed >= settings.seconds:
            return
        dead = fleet.dead()
        if dead:
            logs = fleet.plan.directory / "logs"
            raise HetertrainError(f"{', '.join(dead)} ended unexpectedly: see {logs}")
        if elapsed == 0 and time.monotonic() > give_up_at:
            raise HetertrainError(f"no vehicle began to train within {START_SECONDS_MAX:g} s")


def forget_earlier_run(directory: Path) -> None:
    """Delete what an earlier demo left in its own directory; a job would go on from it."""
    if not directory.exists():
        return
    for path in sorted(directory.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()


def _result(
    policy: str, plan: FleetPlan, status: AggregatorStatus | None, nodes: dict[str, NodeState]
) -> RunResult:
    """Read what the cloud wrote down."""
    cloud = plan.aggregator().directory
    metrics = _rows(cloud / METRICS_FILE)
    versions = _rows(cloud / VERSIONS_FILE)
    points = [
        (float(r["elapsed_seconds"]), float(next(iter(r["metrics"].values())))) for r in metrics
    ]
    lags: dict[int, int] = {}
    for row in versions:
        for contribution in row["contributions"]:
            lag = row["version"] - 1 - contribution[2]
            lags[lag] = lags.get(lag, 0) + 1
    return RunResult(
        policy=policy,
        curve=Curve(label=LABELS[policy], points=tuple(points)),
        seconds=0.0 if status is None else status.elapsed_seconds,
        versions=versions[-1]["version"] if versions else 0,
        final=metrics[-1]["metrics"] if metrics else {},
        nodes=nodes,
        updates_by_lag=lags,
        plan=plan,
    )


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _references(
    settings: DemoSettings, plan: FleetPlan, console: Console, interruption: Interruption
) -> References | None:
    """Train each vehicle alone, and one model on all data."""
    nodes: list[Node] = [node_of(vehicle) for vehicle in plan.vehicles()]
    with console.status("trains each vehicle alone, and one model on all data …") as status:

        def progress(done: int, total: int) -> None:
            status.update(f"trains each vehicle alone, and one model on all data: {done}/{total}")

        return measure_references(plan.task, nodes, settings.seed, progress, interruption.event)


def _record(
    settings: DemoSettings,
    results: list[RunResult],
    references: References | None,
    *,
    is_complete: bool,
) -> RunRecord:
    ours, baseline = results[0], results[1] if len(results) > 1 else None
    alone = references.alone if references is not None else {}
    vehicles = {vehicle.node: vehicle for vehicle in ours.plan.vehicles()}
    rows = tuple(
        NodeRow(
            node=state.node,
            label=state.label,
            cell=state.cell,
            tier=state.tier,
            step_seconds=vehicles[state.node].step_seconds_min,
            steps=state.steps,
            updates=state.updates,
            bytes_up=state.bytes_up,
            bytes_down=state.bytes_down,
            alone=alone.get(state.node),
        )
        for state in sorted(ours.nodes.values(), key=lambda state: state.node)
        if state.node in vehicles
    )
    return RunRecord(
        title=f"{settings.task}: {settings.num_vehicles} vehicles, {settings.num_edges} gateways",
        metric=next(iter(ours.final), "metric"),
        settings={
            "vehicles": settings.num_vehicles,
            "gateways": settings.num_edges,
            "seconds": settings.seconds,
            "seed": settings.seed,
            "step of the fastest vehicle (ms)": STEP_SECONDS[settings.task] * 1000,
            "step of the slowest vehicle (ms)": STEP_SECONDS[settings.task] * 10_000,
            "links": "t0 64 kbit/s, t1 512 kbit/s, t2 5 Mbit/s, t3 50 Mbit/s, each way",
        },
        machine=f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        seconds=ours.seconds,
        curves=tuple(result.curve for result in results),
        totals=tuple(result.totals() for result in results),
        pooled={} if references is None else references.pooled,
        final=ours.final,
        baseline_final={} if baseline is None else baseline.final,
        nodes=rows,
        updates_by_lag=ours.updates_by_lag,
        dense_bytes_per_update=_dense_bytes(ours.plan.task),
        notes=_notes(is_complete=is_complete),
    )


def _notes(*, is_complete: bool) -> tuple[str, ...]:
    notes = (
        "Both runs are real processes over a real broker on one machine, one after the other, "
        "with the same data, seeds, speeds, links and gateways. Steps are padded to each "
        "vehicle's speed, and each client holds its link to its tier's rate both ways.",
        "The synchronous baseline is FedAvg over all vehicles, dense float32 both ways, "
        f"{SYNC_PRESETS['fedavg'].pace_steps} local steps a round. It shows what waiting and "
        "bytes cost in this fleet; it claims nothing about other fleets, links or baselines.",
        f"A vehicle alone trains {ALONE_STEPS} steps and the pooled model {POOLED_STEPS}, "
        f"unslowed, or as many as fit in {TRAIN_SECONDS_MAX:g} s.",
        "A level counts as reached when the mean with the next two evaluations holds it.",
    )
    return notes if is_complete else (*notes, "The run was interrupted: this is what there was.")


def _dense_bytes(task: str) -> int:
    tensors = read_tensors(load_task(task).model())
    return sum(4 * tensor.size for tensor in tensors.values())


def _summary(record: RunRecord, report: Path, model: Path) -> dict[str, object]:
    name, totals = record.metric, record.totals[0]
    return {
        "versions": totals.versions,
        "seconds": round(record.seconds, 1),
        f"{name}_federated": record.final.get(name),
        f"{name}_synchronous": record.baseline_final.get(name),
        f"{name}_alone_mean": record.alone_mean,
        f"{name}_pooled": record.pooled.get(name),
        "metrics_federated": record.final,
        "uplink_bytes": totals.bytes_up,
        "downlink_bytes": totals.bytes_down,
        "report": str(report.resolve()),
        "checkpoint": str(model.resolve()),
    }
