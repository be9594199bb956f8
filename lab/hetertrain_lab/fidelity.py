"""Is the simulator true? The same fleet as real processes over a real broker, and in virtual time.

Compared are the time between versions and the bytes that vehicles send and receive, in a window
after the start: joining takes real processes a moment that the simulator does not model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hetertrain.core.tiers import TIERS
from hetertrain.errors import HetertrainError
from hetertrain.transport.broker import EmbeddedBroker
from hetertrain.wire import topics
from hetertrain_lab.fleet import Fleet, FleetPlan
from hetertrain_lab.monitor import Monitor
from hetertrain_lab.page import Rows
from hetertrain_lab.scenario import Scenario, parse_scenario
from hetertrain_lab.simulator import simulate

TASK = "hetertrain_lab.driving:DrivingTask"
NUM_VEHICLES, NUM_EDGES = 8, 2
STEP_SECONDS = 0.05
WINDOW = (10.0, 50.0)
SEED = 1
START_SECONDS_MAX = 60.0
POLL_SECONDS = 0.05
TOLERANCE = 0.15


@dataclass(frozen=True, slots=True)
class Measure:
    """What is compared."""

    seconds_per_version: float
    bytes_up: float
    bytes_down: float

    def ratios(self, other: Measure) -> dict[str, float]:
        """Return each figure of ``other`` as a share of this one's."""
        return {
            "seconds_per_version": other.seconds_per_version / self.seconds_per_version,
            "bytes_up": other.bytes_up / self.bytes_up,
            "bytes_down": other.bytes_down / self.bytes_down,
        }


def run_fidelity(directory: Path, on_progress: Callable[[float], None]) -> dict[str, Measure]:
    """Measure both.

    Raises:
        HetertrainError: the real fleet did not start.
    """
    with EmbeddedBroker(directory / "broker") as broker:
        plan = FleetPlan(
            job="fidelity",
            task=TASK,
            policy="sap",
            num_vehicles=NUM_VEHICLES,
            num_edges=NUM_EDGES,
            seed=SEED,
            step_seconds=STEP_SECONDS,
            host=broker.host,
            port=broker.port,
            directory=directory / f"fleet-{time.time_ns()}",
        )
        real = _measure_real(plan, on_progress)
    return {"processes": real, "simulator": _measure_simulated(plan)}


def scenario_of(plan: FleetPlan) -> Scenario:
    """Describe a fleet of processes to the simulator."""
    vehicles = [
        {
            "count": 1,
            "step_seconds": (v.step_seconds_min, v.step_seconds_min),
            "step_jitter": 0.02,
            "rate_bits_per_second": (float(TIERS[v.tier].rate_bits_per_second),) * 2,
            "latency_seconds": 0.001,
        }
        for v in plan.vehicles()
    ]
    rate = float(TIERS["t4"].rate_bits_per_second)
    gateways = {"count": plan.num_edges, "rate_bits_per_second": (rate, rate)}
    return parse_scenario(
        {
            "name": "fidelity",
            "policy": plan.policy,
            "vehicles": vehicles,
            "gateways": gateways | {"latency_seconds": 0.001},
            "learning": {"task": plan.task},
        }
    )


def _measure_simulated(plan: FleetPlan) -> Measure:
    scenario = scenario_of(plan)
    first, last = (
        simulate(scenario.model_copy(update={"seconds": end}), SEED, is_checked=False)
        for end in WINDOW
    )
    return Measure(
        (WINDOW[1] - WINDOW[0]) / (last.versions - first.versions),
        last.bytes_up - first.bytes_up,
        last.bytes_down - first.bytes_down,
    )


def _measure_real(plan: FleetPlan, on_progress: Callable[[float], None]) -> Measure:
    monitor = Monitor(plan.host, plan.port, plan.job)
    fleet = Fleet(plan)
    try:
        fleet.start()
        begun, first = _await(WINDOW[0], monitor, on_progress)
        ended, last = _await(WINDOW[1], monitor, on_progress)
    finally:
        fleet.stop()
        monitor.stop()
    return Measure((ended - begun) / (last[0] - first[0]), last[1] - first[1], last[2] - first[2])


def _await(
    elapsed: float, monitor: Monitor, on_progress: Callable[[float], None]
) -> tuple[float, tuple[int, int, int]]:
    """Wait until the fleet has trained so long; return when, and versions and bytes by then."""
    give_up_at = time.monotonic() + START_SECONDS_MAX + elapsed
    while time.monotonic() < give_up_at:
        time.sleep(POLL_SECONDS)
        status = monitor.statuses().get(topics.CLOUD_CELL)
        if status is None:
            continue
        on_progress(status.elapsed_seconds / WINDOW[1])
        if status.elapsed_seconds >= elapsed:
            nodes = [n for n in monitor.nodes().values() if n.role == "vehicle"]
            up, down = (sum(getattr(n, f"bytes_{way}") for n in nodes) for way in ("up", "down"))
            return status.elapsed_seconds, (status.version, up, down)
    raise HetertrainError(f"the fleet did not train for {elapsed:g} s: see its logs")


def fidelity_rows(measures: dict[str, Measure]) -> Rows:
    """Return the comparison as a table."""
    real, simulated = measures["processes"], measures["simulator"]
    ratios = real.ratios(simulated)
    rows: list[tuple[str, ...]] = [
        (
            name.replace("_", " "),
            f"{getattr(real, name):,.3f}",
            f"{getattr(simulated, name):,.3f}",
            f"{ratio:.3f}",
            "yes" if abs(ratio - 1) <= TOLERANCE else "no",
        )
        for name, ratio in ratios.items()
    ]
    header = ("", "real processes", "simulator", "ratio", f"within {TOLERANCE:.0%}")
    return f"{NUM_VEHICLES} vehicles, {NUM_EDGES} gateways", header, rows
