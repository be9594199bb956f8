"""What a simulation says when it is over: tables for people, JSON for machines, a page to keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetertrain_lab.live import human_bytes
from hetertrain_lab.page import BLUE, Rows, draw, image, section, write_page
from hetertrain_lab.simulator import Result


def result_rows(result: Result) -> Rows:
    """Return the figures of a run as a table."""
    rows: list[tuple[str, ...]] = [
        ("virtual seconds", f"{result.seconds:.1f}"),
        ("versions", str(result.versions)),
        ("local steps", str(result.steps)),
        ("updates merged", str(result.updates)),
        ("bytes up", human_bytes(result.bytes_up)),
        ("bytes down", human_bytes(result.bytes_down)),
        ("frames delivered", str(result.frames)),
        ("crashes", f"{result.crashes}, {result.disks_lost} with the disk"),
        ("refused", ", ".join(f"{n} {reason}" for reason, n in result.refused.items()) or "none"),
    ]
    if result.evaluations:
        last = result.evaluations[-1].metrics
        rows += [(name, f"{value:.4f}") for name, value in last.items()]
        reached = "not reached" if result.reached_at is None else f"{result.reached_at:.1f} s"
        rows.append(("target", reached))
    rows += [("model", result.model_digest), ("all deliveries", result.event_digest)]
    title = f"{result.scenario}, {result.policy}, seed {result.seed}"
    return title, ("", "value"), rows


def write_simulation_page(path: Path, result: Result) -> None:
    """Write the run's page: the metric over virtual time, how late updates were, the figures."""
    title = f"Simulation of {result.scenario}"
    parts = [f"<h1>{title}</h1><p>{result.policy}, seed {result.seed}; the clock is virtual</p>"]
    if result.evaluations:
        png = draw(lambda axes: _draw_metric(axes, result), (8.6, 3.9))
        parts.append(f"<section>{image(png, 'metric over virtual time')}</section>")
    png = draw(lambda axes: _draw_lags(axes, result), (8.6, 3.0))
    parts.append(f"<section>{image(png, 'staleness of updates')}</section>")
    parts.append(section(result_rows(result)))
    write_page(path, title, parts)


def _draw_metric(axes: Any, result: Result) -> None:
    name = result.metric()
    assert name is not None, "there are evaluations"
    times = [item.seconds for item in result.evaluations]
    axes.plot(times, [item.metrics[name] for item in result.evaluations], color=BLUE, linewidth=2)
    if result.reached_at is not None:
        axes.axvline(result.reached_at, color="#7a828c", linestyle="--", linewidth=1)
        axes.text(result.reached_at, axes.get_ylim()[0], " target", size=9, va="bottom")
    axes.set_xlabel("virtual seconds")
    axes.set_title(f"{name} over time")


def _draw_lags(axes: Any, result: Result) -> None:
    axes.bar(list(result.lags), list(result.lags.values()), 0.85, color=BLUE)
    axes.set_xlabel("lag (versions behind when merged)")
    axes.set_ylabel("updates")
    axes.set_title("Staleness of updates")
    axes.grid(visible=False, axis="x")
