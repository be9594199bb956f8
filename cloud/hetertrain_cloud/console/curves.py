"""Charts of a job's history, as ECharts takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

COLOURS = tuple(f"var(--series-{number})" for number in range(1, 7))
Points = Sequence[tuple[float, float]]
INTERVALS_MAX = 6
POINTS_MIN = 20
"""With fewer, none is an outlier."""
FAR_OFF = 4
"""An outlier is so many times as far away as most values are from each other."""
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
# Up to two minutes, hours and days are written in the next smaller unit (static/format.js).
_STEPS_SECONDS = (
    *(1, 2, 5, 10, 20),
    *(each * _MINUTE for each in (1, 2, 5, 10, 20)),
    *(each * _HOUR for each in (1, 2, 4, 8)),
)


def lines(
    curves: Mapping[str, Points],
    across: str,
    *,
    along: str = "",
    has_legend: bool = False,
) -> dict[str, Any]:
    """Return a chart of curves by name over what ``across`` names, from zero where that has a unit:
    ``along``, seconds or bytes.
    """
    axis = _axis()
    has_legend = has_legend or len(curves) > 1
    return {
        "animation": False,
        "color": list(COLOURS),
        "grid": {
            "left": 8,
            "right": 36,  # Half of the last label stands beyond the axis.
            "top": 34 if has_legend else 14,
            "bottom": 30,
            "containLabel": True,
        },
        "legend": {"show": has_legend, "top": 0, "textStyle": {"color": "var(--text)"}},
        "tooltip": _tooltip() | {"trigger": "axis"},
        "xAxis": axis
        | {
            "type": "value",
            "axisLine": axis["axisLine"] | {"onZero": False},
            "name": across,
            "nameLocation": "middle",
            "nameGap": 28,
            "max": "dataMax",
            "splitLine": {"show": False},
        }
        | _ticks(curves, along),
        "yAxis": axis | {"type": "value", "scale": True, "ends": ends(curves)},
        "series": [
            {
                "type": "line",
                "name": name,
                "data": [list(point) for point in points],
                "showSymbol": len(points) < 2,
                "sampling": "lttb",
                "lineStyle": {"width": 2},
            }
            for name, points in curves.items()
        ],
    }


def ends(curves: Mapping[str, Points]) -> dict[str, float] | None:
    """Return between which values to draw, where a few first or stray ones are so far off that all
    others would be drawn as one flat line: from the 5th to the 95th percentile of each curve, and
    half as much again on either side; None: between the least and the greatest.
    """
    least, low, high, greatest = math.inf, math.inf, -math.inf, -math.inf
    for points in curves.values():
        values = sorted(value for _, value in points)
        if not values:
            continue
        few = len(values) // 20 if len(values) >= POINTS_MIN else 0
        least, greatest = min(least, values[0]), max(greatest, values[-1])
        low, high = min(low, values[few]), max(high, values[-1 - few])
    span = high - low
    is_below, is_above = least < low - FAR_OFF * span, greatest > high + FAR_OFF * span
    if not 0 < span < math.inf or not (is_below or is_above):
        return None
    return {
        "min": low - span / 2 if is_below else least,
        "max": high + span / 2 if is_above else greatest,
    }


def step(span: float, unit: str = "") -> float:
    """Return how far apart whole, round numbers stand on an axis of so much; in seconds, those that
    are whole minutes, hours or days.
    """
    least = span / INTERVALS_MAX
    if unit == "seconds" and least <= 2 * _DAY / INTERVALS_MAX:
        return next(each for each in _STEPS_SECONDS if each >= least)
    of = _DAY if unit == "seconds" else 1
    power = 10.0 ** math.floor(math.log10(max(least / of, 1)))
    return of * next(each * power for each in (1, 2, 5, 10) if each * power >= least / of)


def _ticks(curves: Mapping[str, Points], unit: str) -> dict[str, Any]:
    """Return where an axis begins and is labelled; at its end, only if that is round, too."""
    found = [point[0] for points in curves.values() for point in points]
    first, last = 0 if unit else min(found, default=0), max(found, default=1)
    interval = step(last - first, unit)
    start = first - first % interval
    return {
        "min": start if start < last else start - interval,
        "interval": interval,
        "axisLabel": _axis()["axisLabel"]
        | {"hideOverlap": True, "showMaxLabel": last % interval == 0},
    }


def places(groups: Mapping[str, tuple[str, Sequence[tuple[float, float, str]]]]) -> dict[str, Any]:
    """Return a map without tiles: longitude, latitude and name of nodes, by group and colour."""
    axis = _axis() | {"type": "value", "scale": True}
    return {
        "animation": False,
        "grid": {"left": 8, "right": 18, "top": 34, "bottom": 30, "containLabel": True},
        "legend": {"top": 0, "textStyle": {"color": "var(--text)"}},
        "tooltip": _tooltip() | {"trigger": "item"},
        "dataZoom": [{"type": "inside", "xAxisIndex": 0}, {"type": "inside", "yAxisIndex": 0}],
        "xAxis": axis | {"name": "degrees east", "nameLocation": "middle", "nameGap": 28},
        "yAxis": axis | {"name": "degrees north"},
        "series": [
            {
                "type": "scatter",
                "name": name,
                "symbolSize": 9,
                "itemStyle": {"color": colour, "opacity": 0.85},
                "data": [{"name": node, "value": [east, north]} for east, north, node in points],
            }
            for name, (colour, points) in groups.items()
        ],
    }


def _axis() -> dict[str, Any]:
    return {
        "axisLine": {"lineStyle": {"color": "var(--line)"}},
        "axisLabel": {"color": "var(--soft)"},
        "nameTextStyle": {"color": "var(--soft)"},
        "splitLine": {"lineStyle": {"color": "var(--line)"}},
    }


def _tooltip() -> dict[str, Any]:
    return {
        "backgroundColor": "var(--card)",
        "borderColor": "var(--line)",
        "textStyle": {"color": "var(--text)"},
    }


def bars(values: Mapping[str, float], across: str, name: str) -> dict[str, Any]:
    """Return a chart of bars of one kind, by what each stands for."""
    axis = _axis()
    return {
        "animation": False,
        "color": list(COLOURS),
        "grid": {"left": 8, "right": 18, "top": 14, "bottom": 30, "containLabel": True},
        "tooltip": _tooltip() | {"trigger": "axis"},
        "xAxis": axis
        | {
            "type": "category",
            "data": list(values),
            "name": across,
            "nameLocation": "middle",
            "nameGap": 28,
            "splitLine": {"show": False},
            "axisTick": {"show": False},
        },
        "yAxis": axis | {"type": "value", "minInterval": 1},
        "series": [
            {
                "type": "bar",
                "name": name,
                "data": [[key, value] for key, value in values.items()],
                "barMaxWidth": 44,
                "itemStyle": {"borderRadius": [4, 4, 0, 0]},
            }
        ],
    }


def by_metric(rows: Sequence[Mapping[str, Any]], across: str = "version") -> dict[str, Points]:
    """Return each metric's points over versions, or over another field where rows have it."""
    names = sorted({name for row in rows for name in row["metrics"]})
    return {
        name: [
            (row[across], row["metrics"][name])
            for row in rows
            if name in row["metrics"] and row.get(across) is not None
        ]
        for name in names
    }


def is_better_low(name: str) -> bool:
    """Whether a metric is better the lower it is, as far as its name tells."""
    return any(word in name for word in ("loss", "error", "mse", "mae", "perplexity"))


def leading(names: Sequence[str]) -> str:
    """Return the metric to show where there is room for one: what is better when it is higher."""
    good = [name for name in names if not is_better_low(name)]
    return (good or list(names) or [""])[0]
