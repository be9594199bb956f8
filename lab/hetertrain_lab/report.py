"""The report of a run: plots that a person looks at first, tables after, in one HTML file without
external parts.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from html import escape
from math import isfinite
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType

from hetertrain_lab.live import human_bytes
from hetertrain_lab.page import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    Rows,
    draw,
    image,
    section,
    terminal_table,
    write_page,
)

LEVELS = (0.9, 0.95)
METRIC_SHOWN_MIN = -0.25
LABEL_GAP = 0.085
"""Between the labels at the ends of lines, in units of the metric."""
FEW_POINTS = 30
"""A curve of fewer evaluations shows each of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A metric over time: (seconds since training began, value)."""

    label: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What one run added up to; bytes are those of the vehicles."""

    versions: int
    updates: int
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """What one vehicle was and did."""

    node: str
    label: str
    cell: str
    tier: str
    step_seconds: float
    steps: int
    updates: int
    bytes_up: int
    bytes_down: int
    alone: float | None
    """The headline metric of a model trained on this vehicle's data only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """All that a report shows."""

    title: str
    metric: str
    settings: dict[str, str | int | float]
    machine: str
    seconds: float
    curves: tuple[Curve, ...]
    """The fleet's first, then the baseline's."""
    totals: tuple[Totals, ...]
    """Of the same runs."""
    pooled: dict[str, float]
    """Metrics of a model trained on all vehicles' data; empty where it was not trained."""
    final: dict[str, float]
    baseline_final: dict[str, float]
    nodes: tuple[NodeRow, ...]
    updates_by_lag: dict[int, int]
    dense_bytes_per_update: int
    notes: tuple[str, ...]

    @property
    def alone_mean(self) -> float | None:
        """The mean over vehicles of what each learns alone."""
        values = [row.alone for row in self.nodes if row.alone is not None]
        return sum(values) / len(values) if values else None


def seconds_to(curve: Curve, level: float) -> float | None:
    """Return when the metric first reached ``level`` and held it; None: never.

    It holds where the mean with the next two evaluations, as far as there are any, is not
    below: one lucky evaluation does not count, and a scheme with few versions need not wait.
    """
    for index, (seconds, value) in enumerate(curve.points):
        window = [value for _, value in curve.points[index : index + 3]]
        if value >= level and sum(window) / len(window) >= level:
            return seconds
    return None


def write_report(record: RunRecord, directory: Path) -> Path:
    """Write three PNG files and ``report.html`` into ``directory``; return the latter's path."""
    directory.mkdir(parents=True, exist_ok=True)
    images: dict[str, bytes] = {}
    for name, paint in (("metric", _draw_metric), ("bytes", _draw_bytes), ("lag", _draw_lag)):
        size = (8.6, 3.9) if name == "metric" else (4.2, 3.4)
        images[name] = draw(partial(paint, record=record), size)
        (directory / f"{name}.png").write_bytes(images[name])
    path = directory / "report.html"
    write_page(path, record.title, _parts(record, images))
    return path


def _draw_metric(axes: Any, record: RunRecord) -> None:
    axes.set_ylim(METRIC_SHOWN_MIN, 1.04)
    labels: list[tuple[float, str, str]] = []
    for curve, colour in zip(record.curves, (BLUE, ORANGE), strict=False):
        points = [(time, value) for time, value in curve.points if isfinite(value)]
        if points:
            times, values = zip(*points, strict=True)
            marker = "o" if len(times) < FEW_POINTS else ""
            axes.plot(times, values, color=colour, linewidth=2, marker=marker, ms=5)
            labels.append((values[-1], f"{curve.label} {values[-1]:.3f}", colour))
    lines = (
        ("all data pooled", record.pooled.get(record.metric), GREEN),
        ("alone (mean)", record.alone_mean, GREY),
    )
    for name, value, colour in lines:
        if value is None or not isfinite(value):
            continue
        is_shown = value >= METRIC_SHOWN_MIN
        if is_shown:
            axes.axhline(value, color=colour, linestyle="--", linewidth=1.5)
        labels.append((value, f"{name} {value:.3f}" + ("" if is_shown else " ↓ off axis"), colour))
    _label_ends(axes, labels)
    axes.set_xlim(0, None)
    axes.set_xlabel("seconds since training began")
    axes.set_ylabel(f"{record.metric} on held-out data")
    axes.set_title(f"{record.metric} over time")


def _label_ends(axes: Any, labels: list[tuple[float, str, str]]) -> None:
    """Write each (value, text, colour) right of the plot, at its height but never overlapping."""
    low, high = axes.get_ylim()
    beside = axes.get_yaxis_transform()
    heights = [min(max(value, low), high) for value, _, _ in sorted(labels, reverse=True)]
    for index in range(1, len(heights)):
        heights[index] = min(heights[index], heights[index - 1] - LABEL_GAP)
    floor = low
    for index in reversed(range(len(heights))):
        heights[index] = max(heights[index], floor)
        floor = heights[index] + LABEL_GAP
    for height, (_, text, colour) in zip(heights, sorted(labels, reverse=True), strict=True):
        axes.text(1.01, height, text, color=colour, size=9, va="center", transform=beside)


def _draw_bytes(axes: Any, record: RunRecord) -> None:
    up: dict[str, int] = defaultdict(int)
    down: dict[str, int] = defaultdict(int)
    dense: dict[str, int] = defaultdict(int)
    for row in record.nodes:
        up[row.tier] += row.bytes_up
        down[row.tier] += row.bytes_down
        dense[row.tier] += row.updates * record.dense_bytes_per_update
    tiers = sorted(up)
    left, right = ([place + shift for place in range(len(tiers))] for shift in (-0.2, 0.2))
    axes.bar(
        left,
        [dense[tier] for tier in tiers],
        0.36,
        facecolor="#eef2f7",
        edgecolor="#98a4b3",
        label="up, if dense",
    )
    axes.bar(left, [up[tier] for tier in tiers], 0.36, color=BLUE, label="up")
    axes.bar(right, [down[tier] for tier in tiers], 0.36, color=ORANGE, label="down")
    axes.set_xticks(range(len(tiers)), tiers)
    sizes = [size for sums in (up, down, dense) for size in sums.values() if size > 0]
    if sizes:
        axes.set_yscale("log")
        axes.set_ylim(min(sizes) / 3, max(sizes) * 1.5)
    axes.yaxis.set_major_formatter(lambda value, _: human_bytes(int(value)))
    axes.grid(visible=False, axis="x")
    axes.set_title("Bytes by tier", pad=26)
    axes.set_xlabel("tier of the vehicle's link (log scale)")
    axes.legend(
        frameon=False,
        fontsize=8.5,
        ncols=3,
        loc="lower left",
        bbox_to_anchor=(-0.03, 0.99),
        handlelength=1.2,
        columnspacing=1.2,
    )


def _draw_lag(axes: Any, record: RunRecord) -> None:
    lags = record.updates_by_lag
    axes.bar(list(lags), list(lags.values()), 0.85, color=BLUE)
    axes.set_xlabel("lag (versions behind when merged)")
    axes.set_ylabel("updates")
    axes.set_title("Staleness of updates", pad=26)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(visible=False, axis="x")
    if sum(lags.values()):
        half, seen = sum(lags.values()) / 2, 0
        for median in sorted(lags):
            seen += lags[median]
            if seen >= half:
                break
        text = f"median {median}, most {max(lags)}"
        axes.text(0, 1.03, text, transform=axes.transAxes, color="#39424e", fontsize=8.5)


def summary_table(record: RunRecord) -> RenderableType:
    """Return the summary for a terminal."""
    return Group(terminal_table(_outcome(record)), terminal_table(_speed(record)))


def _outcome(record: RunRecord) -> Rows:
    """Compare what was learnt, overall and by part of the held-out data."""
    labels = [curve.label for curve in record.curves]
    rows = []
    for name, value in record.final.items():
        row = [name, f"{value:.3f}"]
        if len(labels) > 1:
            row.append(_number(record.baseline_final.get(name)))
        row.append(_number(record.alone_mean if name == record.metric else None))
        row.append(_number(record.pooled.get(name)))
        rows.append(tuple(row))
    header = ("on held-out data", *labels, "alone (mean)", "pooled")
    return f"After {record.seconds:.0f} s", header, rows


def _speed(record: RunRecord) -> Rows:
    rows = []
    for level in LEVELS:
        times = [seconds_to(curve, level) for curve in record.curves]
        row = [f"seconds to {record.metric} {level:g}", *(_seconds(time) for time in times)]
        if len(times) > 1:
            first, second = times[0], times[1]
            ratio = f"{second / first:.1f} ×" if first and second else "–"
            row.append(ratio)
        rows.append(tuple(row))
    blank = ("",) if len(record.curves) > 1 else ()
    rows.append(("versions", *(str(total.versions) for total in record.totals), *blank))
    rows.append(("updates", *(str(total.updates) for total in record.totals), *blank))
    rows.append(("bytes up", *(human_bytes(total.bytes_up) for total in record.totals), *blank))
    rows.append(("bytes down", *(human_bytes(t.bytes_down) for t in record.totals), *blank))
    header = ["", *(curve.label for curve in record.curves)]
    if len(record.curves) > 1:
        header.append("times faster")
    return "How it got there", tuple(header), rows


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _seconds(value: float | None) -> str:
    return "not reached" if value is None else f"{value:.1f}"


def _parts(record: RunRecord, images: dict[str, bytes]) -> list[str]:
    totals = record.totals[:1]
    headline = [
        (_number(record.final.get(record.metric)), f"{record.metric}, the fleet"),
        (_number(record.alone_mean), f"{record.metric}, a vehicle alone (mean)"),
        (_number(record.pooled.get(record.metric)), f"{record.metric}, all data pooled"),
        *((str(total.versions), f"versions in {record.seconds:.0f} s") for total in totals),
        *((human_bytes(total.bytes_up), "sent by vehicles") for total in totals),
    ]
    figures = "".join(f"<div><b>{escape(v)}</b>{escape(text)}</div>" for v, text in headline)
    notes = "".join(f"<p>{escape(note)}</p>" for note in record.notes)
    settings: Rows = (
        "Settings",
        ("setting", "value"),
        [
            (name, str(value))
            for name, value in (record.settings | {"machine": record.machine}).items()
        ],
    )
    return [
        f"<h1>{escape(record.title)}</h1><p>Heter-Train run report</p>",
        f'<section class="figures">{figures}</section>',
        f"<section>{image(images['metric'], 'metric over time')}</section>",
        f'<section class="pair">{image(images["bytes"], "bytes by tier")}'
        f"{image(images['lag'], 'staleness of updates')}</section>",
        *(section(rows) for rows in (_outcome(record), _speed(record), _nodes(record), settings)),
        f"<section><h2>How to read this</h2>{notes}</section>",
    ]


def _nodes(record: RunRecord) -> Rows:
    header: tuple[str, ...] = ("vehicle", "data", "cell", "tier", "ms/step", "steps")
    header += ("updates", "up", "down", "alone", "fleet")
    rows: list[tuple[str, ...]] = [
        (
            row.node,
            row.label,
            row.cell,
            row.tier,
            f"{row.step_seconds * 1000:.0f}",
            str(row.steps),
            str(row.updates),
            human_bytes(row.bytes_up),
            human_bytes(row.bytes_down),
            _number(row.alone),
            _number(record.final.get(record.metric)),
        )
        for row in record.nodes
    ]
    return f"Vehicles ({record.metric} alone and as a fleet, on all held-out data)", header, rows
