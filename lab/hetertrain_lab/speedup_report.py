"""The speed-up bench's table and page."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from hetertrain_lab.live import human_bytes
from hetertrain_lab.page import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    Rows,
    draw,
    image,
    markdown,
    section,
    write_page,
)
from hetertrain_lab.speedup import MEASURE_FINAL, NUM_NODES, TARGETS, Entry, throughput_bound

_COLOURS = {"sap": BLUE, "fedavg": ORANGE, "fedavg_same_codec": "#b8860b", "ssgd": "#b23b3b"}
_COLOURS |= {"fedbuff": "#8fb79f", "fedbuff_same_codec": GREEN}


def scenario_rows(scenario: str, entries: list[Entry]) -> Rows:
    """Return one scenario's table: time to the target by policy, and what was chosen."""
    mine = [entry for entry in entries if entry.scenario == scenario]
    sap = next(entry for entry in mine if entry.name == "sap").median_seconds
    target = TARGETS[scenario.split("_")[1]]
    header: tuple[str, ...] = ("policy", f"s to {target:.2f}", "range", "SAP is faster by")
    header += ("final", "after s", "up per node", "chosen", "trials")
    rows: list[tuple[str, ...]] = []
    for entry in sorted(mine, key=lambda e: e.median_seconds or float("inf")):
        middle = entry.median_seconds
        is_final = entry.name == "sap" or entry.name in MEASURE_FINAL
        rows.append(
            (
                entry.name,
                _seconds(middle),
                _range(entry),
                _ratio(middle, sap),
                f"{entry.final:.4f}" if is_final else "",
                f"{median(run.seconds for run in entry.runs):,.0f}" if is_final else "",
                _up_per_node(entry),
                _chosen(entry),
                str(len(entry.trials)),
            )
        )
    bound = throughput_bound(scenario)
    return f"{scenario} (throughput bound {bound:.2f} ×)", header, rows


def _seconds(value: float | None) -> str:
    return "not reached" if value is None else f"{value:,.1f}"


def _range(entry: Entry) -> str:
    times = entry.reached
    missed = len(entry.runs) - len(times)
    text = f"{min(times):,.1f} to {max(times):,.1f}" if times else ""
    return f"{text} ({missed} missed)" if missed else text


def _ratio(other: float | None, sap: float | None) -> str:
    if other is None or sap is None:
        return "–"
    ratio = other / sap
    return f"{ratio:,.0f} ×" if ratio >= 100 else f"{ratio:.2f} ×"


def _up_per_node(entry: Entry) -> str:
    return human_bytes(sum(r.bytes_up for r in entry.runs) // (len(entry.runs) * NUM_NODES))


def _chosen(entry: Entry) -> str:
    rules = {**entry.chosen.rules, **entry.chosen.weights}
    shown = " ".join(f"{k}={v}" for k, v in rules.items() if k != "is_dense")
    return f"lr={entry.chosen.learning_rate} {shown}".strip()


def write_speedup_page(
    directory: Path, entries: list[Entry], figures: dict[str, dict[str, float | None]]
) -> Path:
    """Write a plot for each scenario as PNG, the tables, and a page of all; return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    title = "Time to accuracy"
    parts = [
        f"<h1>{title}</h1><p>Virtual clock; medians over seeds; learning rate and rules of each "
        "policy tuned with seeds that do not report.</p>"
    ]
    for scenario in figures:
        mine = [entry for entry in entries if entry.scenario == scenario]
        png = draw(partial(_draw, scenario=scenario, entries=mine), (8.6, 3.9))
        (directory / f"{scenario}.png").write_bytes(png)
        parts.append(f"<section>{image(png, f'accuracy over time in {scenario}')}</section>")
        parts.append(section(scenario_rows(scenario, entries)))
    tables = [markdown(scenario_rows(scenario, entries)) for scenario in figures]
    (directory / "speedup.md").write_text("\n".join(tables), encoding="utf-8")
    path = directory / "speedup.html"
    write_page(path, title, parts)
    return path


def _draw(axes: Any, scenario: str, entries: list[Entry]) -> None:
    for entry in entries:
        colour = _COLOURS.get(entry.name, GREY)
        for index, run in enumerate(entry.runs):
            times = [max(seconds, 0.1) for seconds, _ in run.curve]
            label = entry.name if index == 0 and entry.name in _COLOURS else None
            axes.plot(
                times,
                [value for _, value in run.curve],
                color=colour,
                linewidth=2 if entry.name == "sap" else 1,
                alpha=0.9 if entry.name in _COLOURS else 0.4,
                label=label,
            )
    axes.axhline(TARGETS[scenario.split("_")[1]], color=GREY, linestyle="--", linewidth=1)
    axes.set_xscale("log")
    axes.set_ylim(0.5, 0.97)
    axes.set_xlabel("virtual seconds (log scale); grey: fedasync, ssp, asgd")
    axes.set_title(f"{scenario}: accuracy on held-out data")
    axes.legend(frameon=False, fontsize=8, loc="upper left")
