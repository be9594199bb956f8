"""How much faster than the other schemes: time to accuracy of every policy on the same virtual
fleets.

One code path, one clock (virtual), the same data, model, initial weights and links for all. Each
policy gets the same number of trials for its own learning rate and a rule or two of its own, with a
seed that reports nothing; the two best are tried again with a second one. What is reported comes
from other seeds. Every trial is in the result.

- The *target* of a scenario is reached when the mean of three evaluations has reached it.
- A run ends at its target, or after a number of local steps of the whole fleet. Policies that never
  wait may make up to ``NEVER_WAITING_FACTOR`` times as many, as far as their fleet computes them in
  the virtual time that the others need for theirs; the table shows the time.
- Runs that also measure the *final accuracy* (SAP and FedAvg with either codec) go on to the end of
  their steps; it is the mean over their last evaluations.
- The *throughput bound* is the fleet's sum of speeds over N times the slowest speed: what never
  waiting can gain over waiting for the slowest where messages cost nothing.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from hetertrain_lab.scenario import Scenario, parse_scenario, plan_vehicles
from hetertrain_lab.simulator import simulate

TASK = "hetertrain_lab.digits:SmallDigitsTask"
NUM_NODES = 16
RESNET18_BYTES = 46.8e6
ALPHAS = {"iid": "1000", "dir03": "0.3"}
TARGETS = {"iid": 0.92, "dir03": 0.90}
TUNING_SEED, SECOND_SEED = 100, 101
NUM_FINALISTS = 2
SEEDS = (31, 32, 33)
"""Not those that the defaults were chosen with."""
STEPS = {"paper": 10_000, "compute": 6_000, "harsh": 6_000, "homog": 6_000}
"""Local steps of the whole fleet in one run; 125 are an epoch."""
NEVER_WAITING_FACTOR = 3.0
SLOW_HEARTBEAT_SECONDS = 240.0
FINAL_EVALUATIONS = 10
WORKERS = 2
SECONDS_MAX = 1e7

_SLOW_TO_FAST: dict[str, Any] = {"count": NUM_NODES, "step_seconds": (0.05, 0.5)}
FLEETS: dict[str, dict[str, Any]] = {
    # Cloud, edges and vehicles: compute 1 to 10 times, links 1 to 100 Mbit/s, a large model.
    "paper": {
        "vehicles": [_SLOW_TO_FAST | {"rate_bits_per_second": (1e6, 1e8)}],
        "tier_rates": (1e6, 2e6, 4e6, 8e6, 16e6, 32e6, 64e6),
        "message_bytes": RESNET18_BYTES,
    },
    # The same fleet, with the small model's own messages: waiting dominates.
    "compute": {
        "vehicles": [_SLOW_TO_FAST | {"rate_bits_per_second": (1e6, 1e8)}],
        "tier_rates": (1e6, 2e6, 4e6, 8e6, 16e6, 32e6, 64e6),
    },
    # Compute 1 to 30 times, links 64 kbit/s to 1 Gbit/s, a fifth of the time without network.
    "harsh": {
        "vehicles": [
            {
                "count": NUM_NODES,
                "step_seconds": (0.05, 1.5),
                "rate_bits_per_second": (64e3, 1e9),
                "outage_share": 0.2,
                "outage_seconds": (5.0, 30.0),
            }
        ],
        "tier_rates": (64e3, 256e3, 1e6, 4e6, 16e6, 64e6, 256e6),
    },
    # The control: all alike.
    "homog": {
        "vehicles": [
            {"count": NUM_NODES, "step_seconds": (0.05, 0.05), "rate_bits_per_second": (1e7, 1e7)}
        ],
        "tier_rates": (1e7,),
    },
}
SCENARIOS = (
    *(f"{fleet}_{data}" for fleet in ("paper", "compute", "harsh") for data in ALPHAS),
    "homog_iid",
)
QUICK_SCENARIOS = ("compute_iid", "paper_dir03")
QUICK_STRIDE = 3
"""A quick run makes every third trial only, and none with a second seed."""


Choice = tuple[dict[str, Any], dict[str, Any]]
"""Rules of cut, sync and pace, and of weights."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy as the bench runs it, and what it may choose among."""

    policy: str
    learning_rates: tuple[float, ...]
    choices: tuple[Choice, ...] = (({}, {}),)
    measures_final: bool = False

    def trials(self) -> Iterator[Trial]:
        """Return all that may be chosen."""
        for rate, (rules, weights) in product(self.learning_rates, self.choices):
            yield Trial(rate, rules, weights)


@dataclass(frozen=True, slots=True)
class Trial:
    """One choice of learning rate and rules."""

    learning_rate: float
    rules: dict[str, Any]
    weights: dict[str, Any]


_THREE = (0.2, 0.4, 0.8)
_SIX = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4)


def contenders(fleet: str) -> dict[str, Contender]:
    """Return the policies by name: six trials each."""
    few, many = (10, 40) if fleet == "paper" else (3, 10)
    pace, ours = {"pace_steps": few}, {"pace_steps": few, "is_dense": False}
    steps: tuple[Choice, ...] = ((pace, {}), ({"pace_steps": many}, {}))
    half, full = {"server_rate": 0.5}, {"server_rate": 1.0}
    return {
        "sap": Contender(
            "sap",
            (0.2, 0.4),
            (
                ({"pace_steps": 5}, {"server_rate": 0.35}),
                ({"pace_steps": 5}, half),
                ({"pace_steps": 3, "hold_at_sync": False}, full),
            ),
            measures_final=True,
        ),
        "ssgd": Contender("ssgd", (0.1, 0.2, 0.4, 0.6, 0.8, 1.2)),
        "fedavg": Contender("fedavg", _THREE, steps, measures_final=True),
        "fedavg_same_codec": Contender(
            "fedavg",
            _THREE,
            ((ours | {"budget_seconds": 2.0}, {}), (ours | {"budget_seconds": 8.0}, {})),
            measures_final=True,
        ),
        "fedbuff": Contender("fedbuff", _THREE, ((pace, half), (pace, full))),
        "fedbuff_same_codec": Contender("fedbuff", _THREE, ((ours, half), (ours, full))),
        "fedasync": Contender(
            "fedasync", _THREE, ((pace, {"server_rate": 0.1}), (pace, {"server_rate": 0.6}))
        ),
        "ssp": Contender("ssp", _SIX),
        "asgd": Contender("asgd", _SIX),
    }


WAITING = ("ssgd", "fedavg", "fedavg_same_codec")
MEASURE_FINAL = ("fedavg", "fedavg_same_codec")
"""The synchronous policies that SAP's final accuracy is held against."""


def build(name: str, contender: Contender, trial: Trial) -> Scenario:
    """Build the scenario of one run."""
    fleet, data = name.split("_")
    slow = fleet == "paper" and contender.policy != "sap"
    return parse_scenario(
        FLEETS[fleet]
        | {
            "name": name,
            "policy": contender.policy,
            "sync": trial.rules,
            "weights": trial.weights,
            "installed": True,
            "seconds": SECONDS_MAX,
            # A round of dense messages takes a quarter of an hour: few heartbeats are enough.
            "heartbeat_seconds": SLOW_HEARTBEAT_SECONDS if slow else 2.0,
            "learning": {
                "task": TASK,
                "labels": {"alpha": ALPHAS[data]},
                "learning_rate": trial.learning_rate,
                "target": TARGETS[data],
            },
        }
    )


def throughput_bound(name: str) -> float:
    """Return the sum of the nodes' speeds over N times the slowest."""
    plans = plan_vehicles(build(name, contenders("paper")["sap"], Trial(0.1, {}, {})), "cloud")
    speeds = [1 / plan.step_seconds for plan in plans]
    return sum(speeds) / (len(speeds) * min(speeds))


@dataclass(slots=True)
class Run:
    """What one run came to."""

    seed: int
    trial: Trial
    reached_at: float | None
    final: float
    """The mean headline metric of the last evaluations."""
    seconds: float
    steps: int
    versions: int
    bytes_up: int
    bytes_down: int
    curve: list[tuple[float, float]] = field(default_factory=list)


def run_once(
    name: str,
    contender: Contender,
    trial: Trial,
    seed: int,
    *,
    steps: int,
    seconds: float = SECONDS_MAX,
    to_end: bool = False,
) -> Run:
    """Run one seed of one trial: to its target, or to the end of its steps or virtual seconds."""
    scenario = build(name, contender, trial)
    changes = {"steps": steps, "seconds": seconds, "stops_at_target": not to_end}
    result = simulate(scenario.model_copy(update=changes), seed, is_checked=False)
    curve = [(e.seconds, next(iter(e.metrics.values()))) for e in result.evaluations]
    last = [value for _, value in curve[-FINAL_EVALUATIONS:]]
    return Run(
        seed,
        trial,
        result.reached_at,
        sum(last) / len(last),
        result.seconds,
        result.steps,
        result.versions,
        result.bytes_up,
        result.bytes_down,
        curve,
    )


@dataclass(slots=True)
class Entry:
    """One policy in one scenario."""

    scenario: str
    name: str
    trials: list[Run]
    chosen: Trial
    runs: list[Run]
    wall_seconds: float

    @property
    def reached(self) -> list[float]:
        """Times to the target, of the seeds that reached it."""
        return [run.reached_at for run in self.runs if run.reached_at is not None]

    @property
    def median_seconds(self) -> float | None:
        """The median time to the target; None where half of the seeds never reached it."""
        times = sorted(run.reached_at or float("inf") for run in self.runs)
        middle = median(times)
        return middle if middle < float("inf") else None

    @property
    def final(self) -> float:
        """The median final accuracy."""
        return median(run.final for run in self.runs)


def enter(name: str, contender_name: str, seeds: tuple[int, ...], *, is_quick: bool) -> Entry:
    """Tune a policy on a scenario, then run the seeds that report."""
    began = time.monotonic()
    contender = contenders(name.split("_")[0])[contender_name]
    steps = steps_of(name, contender_name)
    trials: list[Run] = []
    for trial in list(contender.trials())[:: QUICK_STRIDE if is_quick else 1]:
        # Nothing slower than the second best so far can be among the finalists.
        times = sorted(run.reached_at for run in trials if run.reached_at is not None)
        limit = times[NUM_FINALISTS - 1] if len(times) >= NUM_FINALISTS else SECONDS_MAX
        trials.append(run_once(name, contender, trial, TUNING_SEED, steps=steps, seconds=limit))
    finalists = sorted(trials, key=_badness)[: 1 if is_quick else NUM_FINALISTS]
    again = [
        run_once(name, contender, each.trial, SECOND_SEED, steps=steps)
        for each in finalists
        if not is_quick
    ]
    both = zip(finalists, again or finalists, strict=True)
    chosen = min(both, key=lambda pair: max(_badness(run) for run in pair))[0].trial
    runs = [report(name, contender_name, chosen, seed) for seed in seeds]
    seconds = time.monotonic() - began
    return Entry(name, contender_name, [*trials, *again], chosen, runs, seconds)


def steps_of(name: str, contender_name: str) -> int:
    """Return how many local steps the whole fleet may make in one run."""
    factor = min(NEVER_WAITING_FACTOR, throughput_bound(name))
    return round(STEPS[name.split("_")[0]] * (1.0 if contender_name in WAITING else factor))


def report(name: str, contender_name: str, trial: Trial, seed: int) -> Run:
    """Run a seed that reports."""
    contender = contenders(name.split("_")[0])[contender_name]
    steps, to_end = steps_of(name, contender_name), contender.measures_final
    return run_once(name, contender, trial, seed, steps=steps, to_end=to_end)


def _badness(run: Run) -> tuple[bool, float]:
    """Order runs: by the time to the target, those that missed it last, by their accuracy."""
    if run.reached_at is None:
        return True, -run.final
    return False, run.reached_at


def run_speedup(
    *, is_quick: bool, on_progress: Callable[[float], None], partial: Path
) -> tuple[list[Entry], dict[str, dict[str, float | None]]]:
    """Run all; return the entries, and the figures by scenario.

    What is there so far is kept in the file ``partial``, one entry a line.
    """
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.unlink(missing_ok=True)
    scenarios = QUICK_SCENARIOS if is_quick else SCENARIOS
    seeds = SEEDS[:1] if is_quick else SEEDS
    jobs = [(s, c) for s in scenarios for c in contenders(s.split("_")[0])]
    # The longest first, so that both cores end together.
    jobs.sort(key=lambda job: job[1] not in ("ssgd", "asgd", "ssp"))
    entries: list[Entry] = []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hetertrain_lab.speedup", "torch", "torch._dynamo"])
    with ProcessPoolExecutor(WORKERS, context) as pool:
        futures = [pool.submit(enter, s, name, seeds, is_quick=is_quick) for s, name in jobs]
        for future in as_completed(futures):
            entries.append(future.result())
            with partial.open("a", encoding="utf-8") as file:
                file.write(json.dumps(as_plain(entries[-1:])[0]) + "\n")
            on_progress(len(entries) / len(jobs))
    order = {job: i for i, job in enumerate((s, c) for s in scenarios for c in contenders("paper"))}
    entries.sort(key=lambda entry: order[entry.scenario, entry.name])
    return entries, {name: figures(name, entries) for name in scenarios}


def figures(scenario: str, entries: list[Entry]) -> dict[str, float | None]:
    """Return the ratios of one scenario, of medians; None where one side never reached it."""
    mine = {entry.name: entry for entry in entries if entry.scenario == scenario}
    sap = mine["sap"].median_seconds

    def ratio(name: str) -> float | None:
        other = mine[name].median_seconds
        return None if other is None or sap is None else round(other / sap, 3)

    others = {name: ratio(name) for name in mine if name != "sap"}
    known = [value for value in others.values() if value is not None]
    best_final = max(mine[name].final for name in MEASURE_FINAL)
    return {f"vs_{name}": value for name, value in others.items()} | {
        "vs_best_other": min(known, default=None),
        "accuracy_gap_points": round(100 * (best_final - mine["sap"].final), 3),
        "throughput_bound": round(throughput_bound(scenario), 3),
    }


def as_plain(entries: list[Entry]) -> list[dict[str, Any]]:
    """Return all entries with all trials as plain data, curves left out."""
    plain = []
    for entry in entries:
        row = asdict(entry)
        for run in (*row["trials"], *row["runs"]):
            del run["curve"]
        plain.append(row | {"median_seconds": entry.median_seconds, "final": entry.final})
    return plain
