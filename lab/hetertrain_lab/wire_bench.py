"""What does learning cost on the wire? The same local steps with dense float32, and by tier.

In virtual time with real gradients: vehicles of equal speed, all on one tier, messages of
ResNet-50's size (headers count as they are). *Dense* is FedAvg with float32 both ways, what most
users run. ``fedavg`` in a tier differs from it by the codec alone; ``sap`` in everything. Bytes are
those of one node over the whole run, accuracy is the mean over its last evaluations.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from statistics import median
from typing import Any

from hetertrain.core.tiers import TIERS
from hetertrain_lab.page import Rows
from hetertrain_lab.scenario import Scenario, parse_scenario
from hetertrain_lab.simulator import simulate

TASK = "hetertrain_lab.digits:SmallDigitsTask"
NUM_VEHICLES = 8
STEP_SECONDS = 0.05
MESSAGE_BYTES = 102.2e6
LOCAL_STEPS = 20
LEARNING_RATE = 0.2
STEPS, QUICK_STEPS = 40_000, 8_000
TARGET = 0.92
FINAL_EVALUATIONS = 20
SEEDS = (21, 22, 23)
WORKERS = 2
LOSS_MAX_POINTS = 0.3
"""What a way may lose to count for the headline."""

DENSE = "dense"
POLICIES: dict[str, dict[str, Any]] = {
    DENSE: {"policy": "fedavg", "sync": {"pace_steps": LOCAL_STEPS}},
    "fedavg": {"policy": "fedavg", "sync": {"pace_steps": LOCAL_STEPS, "is_dense": False}},
    "sap": {"policy": "sap", "sync": {"pace_steps": LOCAL_STEPS}},
}
WAYS = ((DENSE, "t4"), *((policy, tier) for policy in ("fedavg", "sap") for tier in TIERS))


@dataclass(frozen=True, slots=True)
class Run:
    """One seed of one way."""

    way: tuple[str, str]
    bytes_up: float
    bytes_down: float
    seconds_to_target: float | None
    final: float


@dataclass(frozen=True, slots=True)
class Measure:
    """One way against dense; medians."""

    policy: str
    tier: str
    bytes_up: float
    bytes_down: float
    uplink_ratio: float
    downlink_ratio: float
    seconds_to_target: float | None
    final: float
    loss_points: float


def scenario_of(way: tuple[str, str], steps: int) -> Scenario:
    """Build the scenario of a policy in a tier."""
    policy, tier = way
    rate = float(TIERS[tier].rate_bits_per_second)
    vehicles = {
        "count": NUM_VEHICLES,
        "step_seconds": (STEP_SECONDS, STEP_SECONDS),
        "rate_bits_per_second": (rate, rate),
    }
    learning = {
        "task": TASK,
        "labels": {"alpha": "1000"},
        "learning_rate": LEARNING_RATE,
        "target": TARGET,
    }
    return parse_scenario(
        POLICIES[policy]
        | {
            "name": f"{policy} {tier}",
            "seconds": 1e7,
            "steps": steps,
            "stops_at_target": False,
            "installed": True,
            "message_bytes": MESSAGE_BYTES,
            "tier_rates": (rate,),
            "vehicles": [vehicles],
            "learning": learning,
        }
    )


def run_one(way: tuple[str, str], seed: int, steps: int) -> Run:
    """Run one seed."""
    result = simulate(scenario_of(way, steps), seed, is_checked=False)
    last = [next(iter(e.metrics.values())) for e in result.evaluations[-FINAL_EVALUATIONS:]]
    return Run(
        way,
        result.bytes_up / NUM_VEHICLES,
        result.bytes_down / NUM_VEHICLES,
        result.reached_at,
        sum(last) / len(last),
    )


def run_wire(*, is_quick: bool, on_progress: Callable[[float], None]) -> list[Measure]:
    """Measure dense, and each policy in each tier."""
    steps = QUICK_STEPS if is_quick else STEPS
    seeds = SEEDS[:1] if is_quick else SEEDS
    jobs = [(way, seed) for way in WAYS for seed in seeds]
    runs: list[Run] = []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hetertrain_lab.wire_bench", "torch", "torch._dynamo"])
    with ProcessPoolExecutor(WORKERS, context) as pool:
        futures = [pool.submit(run_one, way, seed, steps) for way, seed in jobs]
        for future in as_completed(futures):
            runs.append(future.result())
            on_progress(len(runs) / len(jobs))
    dense = _measure(WAYS[0], runs, None)
    return [dense, *(_measure(way, runs, dense) for way in WAYS[1:])]


def _measure(way: tuple[str, str], runs: list[Run], dense: Measure | None) -> Measure:
    mine = [run for run in runs if run.way == way]
    up, down = median(run.bytes_up for run in mine), median(run.bytes_down for run in mine)
    final = median(run.final for run in mine)
    never = float("inf")
    middle = median(run.seconds_to_target or never for run in mine)
    return Measure(
        policy=way[0],
        tier=way[1],
        bytes_up=up,
        bytes_down=down,
        uplink_ratio=1.0 if dense is None else round(dense.bytes_up / up, 2),
        downlink_ratio=1.0 if dense is None else round(dense.bytes_down / down, 2),
        seconds_to_target=None if middle == never else round(middle, 2),
        final=round(final, 4),
        loss_points=0.0 if dense is None else round(100 * (dense.final - final), 2),
    )


def figures(measures: list[Measure]) -> dict[str, float]:
    """Return the figures of the way that saves most uplink without losing more than allowed; of
    the most accurate one where all lose more.
    """
    ways = measures[1:]
    able = [m for m in ways if m.loss_points <= LOSS_MAX_POINTS]
    best = max(able, key=lambda m: m.uplink_ratio, default=max(ways, key=lambda m: m.final))
    return {
        "uplink_ratio": best.uplink_ratio,
        "downlink_ratio": best.downlink_ratio,
        "accuracy_loss_points": best.loss_points,
    }


def wire_rows(measures: list[Measure]) -> Rows:
    """Return the table."""
    header: tuple[str, ...] = (
        "policy, tier",
        "MB up",
        "ratio",
        "MB down",
        "ratio",
        f"s to {TARGET}",
        "accuracy",
        "points lost",
    )
    lines: list[tuple[str, ...]] = [
        (
            f"{m.policy}, {m.tier}",
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
    return "digits, the same local steps: bytes of one node", header, lines
