"""What does learning cost on the wire? The digits task to the same accuracy, dense and by tier.

In virtual time with real gradients: vehicles of equal speed, all on one tier, messages of
ResNet-50's size (headers count as they are). *Dense* is FedAvg with float32 both ways, what most
users run. Bytes are those of one node until the target is reached; accuracy is that at the end of
the same number of local steps for all.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from statistics import median

from hetertrain.core.tiers import TIERS
from hetertrain_lab.page import Rows
from hetertrain_lab.scenario import Scenario, parse_scenario
from hetertrain_lab.simulator import simulate

TASK = "hetertrain_lab.digits:SmallDigitsTask"
NUM_VEHICLES = 8
STEP_SECONDS = 0.05
MESSAGE_BYTES = 102.2e6
LOCAL_STEPS = 20
STEPS, QUICK_STEPS = 40_000, 10_000
TARGET = 0.92
LEARNING_RATE = 0.2
FINAL_EVALUATIONS = 10
SEEDS = (21, 22, 23)
WORKERS = 2
DENSE = "dense"
LOSS_MAX_POINTS = 0.3
"""What a tier may lose to count for the headline."""


@dataclass(frozen=True, slots=True)
class Run:
    """One seed of one tier."""

    name: str
    reached: bool
    up_to_target: float
    """Bytes a node sent until the target, or in all if it was never reached."""
    down_to_target: float
    seconds: float | None
    final: float


@dataclass(frozen=True, slots=True)
class Measure:
    """One tier against dense."""

    name: str
    bytes_up: float
    bytes_down: float
    uplink_ratio: float
    downlink_ratio: float
    seconds_to_target: float | None
    final: float
    loss_points: float
    num_reached: int


def scenario_of(name: str, steps: int) -> Scenario:
    """Build the scenario of a tier, or of ``DENSE``."""
    rate = TIERS["t4" if name == DENSE else name].rate_bits_per_second
    dense = {"policy": "fedavg", "sync": {"pace_steps": LOCAL_STEPS}}
    return parse_scenario(
        (dense if name == DENSE else {"policy": "sap", "sync": {"pace_steps": LOCAL_STEPS}})
        | {
            "name": name,
            "seconds": 1e7,
            "steps": steps,
            "installed": True,
            "message_bytes": MESSAGE_BYTES,
            "tier_rates": (float(rate),),
            "vehicles": [
                {
                    "count": NUM_VEHICLES,
                    "step_seconds": (STEP_SECONDS, STEP_SECONDS),
                    "rate_bits_per_second": (float(rate), float(rate)),
                }
            ],
            "learning": {
                "task": TASK,
                "labels": {"alpha": "1000"},
                "target": TARGET,
                "learning_rate": LEARNING_RATE,
            },
        }
    )


def run_one(name: str, seed: int, steps: int) -> Run:
    """Run one seed twice: to the target for its bytes, and to the end for its accuracy."""
    scenario = scenario_of(name, steps)
    first = simulate(scenario, seed, is_checked=False)
    whole = simulate(scenario.model_copy(update={"stops_at_target": False}), seed, is_checked=False)
    last = [next(iter(e.metrics.values())) for e in whole.evaluations[-FINAL_EVALUATIONS:]]
    return Run(
        name,
        first.reached_at is not None,
        first.bytes_up / NUM_VEHICLES,
        first.bytes_down / NUM_VEHICLES,
        first.reached_at,
        sum(last) / len(last),
    )


def run_wire(*, is_quick: bool, on_progress: Callable[[float], None]) -> list[Measure]:
    """Measure dense and every tier."""
    steps = QUICK_STEPS if is_quick else STEPS
    seeds = SEEDS[:1] if is_quick else SEEDS
    jobs = [(name, seed) for name in (DENSE, *TIERS) for seed in seeds]
    runs: list[Run] = []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hetertrain_lab.wire_bench", "torch", "torch._dynamo"])
    with ProcessPoolExecutor(WORKERS, context) as pool:
        futures = [pool.submit(run_one, name, seed, steps) for name, seed in jobs]
        for future in as_completed(futures):
            runs.append(future.result())
            on_progress(len(runs) / len(jobs))
    dense = _measure(DENSE, runs, None)
    return [dense, *(_measure(name, runs, dense) for name in TIERS)]


def _measure(name: str, runs: list[Run], dense: Measure | None) -> Measure:
    mine = [run for run in runs if run.name == name]
    up, down = (
        median(run.up_to_target for run in mine),
        median(run.down_to_target for run in mine),
    )
    final = median(run.final for run in mine)
    times = sorted(run.seconds if run.seconds is not None else float("inf") for run in mine)
    middle = median(times)
    return Measure(
        name=name,
        bytes_up=up,
        bytes_down=down,
        uplink_ratio=1.0 if dense is None else round(dense.bytes_up / up, 2),
        downlink_ratio=1.0 if dense is None else round(dense.bytes_down / down, 2),
        seconds_to_target=None if middle == float("inf") else round(middle, 2),
        final=round(final, 4),
        loss_points=0.0 if dense is None else round(100 * (dense.final - final), 2),
        num_reached=sum(run.reached for run in mine),
    )


def figures(measures: list[Measure]) -> dict[str, float]:
    """Return the figures of the tier that saves most uplink without losing more than allowed; of
    the most accurate one where all lose more.
    """
    tiers = [m for m in measures if m.name != DENSE and m.seconds_to_target is not None]
    able = [m for m in tiers if m.loss_points <= LOSS_MAX_POINTS]
    best = max(able, key=lambda m: m.uplink_ratio, default=None)
    if best is None:
        best = max(measures[1:], key=lambda m: m.final)
    return {
        "uplink_ratio": best.uplink_ratio,
        "downlink_ratio": best.downlink_ratio,
        "accuracy_loss_points": best.loss_points,
    }


def wire_rows(measures: list[Measure]) -> Rows:
    """Return the table."""
    header: tuple[str, ...] = (
        "tier",
        "MB up",
        "ratio",
        "MB down",
        "ratio",
        f"s to {TARGET}",
        "end",
        "points lost",
    )
    lines: list[tuple[str, ...]] = [
        (
            m.name,
            f"{m.bytes_up / 1e6:,.2f}",
            f"{m.uplink_ratio:,.1f}",
            f"{m.bytes_down / 1e6:,.2f}",
            f"{m.downlink_ratio:,.1f}",
            "never" if m.seconds_to_target is None else f"{m.seconds_to_target:,.1f}",
            f"{m.final:.4f}",
            f"{m.loss_points:.2f}",
        )
        for m in measures
    ]
    return "digits to the same accuracy: bytes of one node", header, lines
