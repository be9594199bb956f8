"""Compare: the curves of several jobs on one chart a metric, and the best that each reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hetertrain_cloud.console import words
from hetertrain_cloud.console.client import ProblemAnswer
from hetertrain_cloud.console.curves import COLOURS, is_better_low, lines
from hetertrain_cloud.console.elements import (
    Chart,
    Column,
    DataTable,
    Field,
    Region,
    card,
    empty,
    icon,
    link,
    tag,
)
from hetertrain_cloud.console.screens.job import ACROSS, CURVE_POINTS, HISTORY_SECONDS
from hetertrain_cloud.console.view import Screen, View, crumbs, to

JOBS_MAX = len(COLOURS)
"""So many colours can be told apart."""
COLUMNS = (
    Column("metric", "Metric"),
    Column("job", "Job", "link"),
    Column("best", "Best", "number"),
    Column("version", "At version", "number"),
    Column("after", "After", "seconds"),
    Column("received", "Received by then", "bytes"),
    Column("newest", "Newest", "number"),
    Column("newest_version", "At version", "number"),
)
Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""Each job's measurements."""


def metrics_of(runs: Runs) -> list[str]:
    """Return the metrics that any job has."""
    return sorted({name for rows in runs.values() for row in rows for name in row["metrics"]})


def curves_of(runs: Runs, metric: str, across: str) -> dict[str, list[tuple[float, float]]]:
    """Return each job's points of a metric."""
    return {
        job: [
            (row[across], row["metrics"][metric])
            for row in rows
            if metric in row["metrics"] and row.get(across) is not None
        ]
        for job, rows in runs.items()
    }


def unmeasured(runs: Runs) -> tuple[str, ...]:
    """Return the jobs that have no measurement, where another has one."""
    without = tuple(job for job, rows in runs.items() if not metrics_of({job: rows}))
    return without if len(without) < len(runs) else ()


def best_rows(runs: Runs) -> list[dict[str, Any]]:
    """Lay out the best of each job by metric, the best job first."""
    found = []
    for metric in metrics_of(runs):
        sign = 1 if is_better_low(metric) else -1
        of_metric = []
        for job, rows in runs.items():
            with_it = [row for row in rows if metric in row["metrics"]]
            if with_it:
                best = min(with_it, key=lambda row: sign * row["metrics"][metric])
                of_metric.append((best["metrics"][metric], _best_row(job, metric, best, with_it)))
        found += [row for _, row in sorted(of_metric, key=lambda item: sign * item[0])]
    return found


def _best_row(
    job: str, metric: str, best: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    newest = rows[-1]
    way = "lowest" if is_better_low(metric) else "highest"
    return {
        "key": f"{metric} {job}",
        "metric": f"{words.plain(metric).capitalize()}, {way}",
        "job": {"text": job, "href": to(f"/jobs/{job}")},
        "best": best["metrics"][metric],
        "version": best["version"],
        "after": best["elapsed_seconds"],
        "received": best.get("uplink_bytes"),
        "newest": newest["metrics"][metric],
        "newest_version": newest["version"],
    }


class Compare:
    """The screen."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._jobs = list(dict.fromkeys(view.asked("jobs")))[:JOBS_MAX]
        self._across = "version"
        self._runs: dict[str, list[dict[str, Any]]] = {}
        self._charts: dict[str, Chart] = {}

    async def build(self) -> None:
        """Make the screen."""
        view = self._view
        crumbs(("Jobs", "/jobs"), here="compare")
        with view.head("Compare jobs"), tag("div", "", "actions fields"):
            Field(
                "Over",
                self._across,
                kind="select",
                options=[(field, text) for field, (text, _) in ACROSS.items()],
                on_value=self._choose_axis,
            )
            names = [job["name"] for job in (await view.api.get("/jobs", limit=200))["items"]]
            others = [name for name in names if name not in self._jobs]
            if others and len(self._jobs) < JOBS_MAX:
                Field(
                    "Add a job",
                    kind="select",
                    options=[("", "choose"), *((name, name) for name in others)],
                    on_value=self._add,
                )
        if not self._jobs:
            with card():
                empty("No job chosen", "Choose two or more to see which does better.")
            return
        self._chosen()
        self._unknown = Region(self._say_unknown)
        self._unmeasured = Region(self._say_unmeasured)
        self._grid = Region(self._make_charts, "grid")
        with card("", "card-flush"):
            tag("h2", "The best of each", "card-title")
            self._table = DataTable("The best of each job", COLUMNS)
        await view.live(self._refresh, HISTORY_SECONDS)

    def _chosen(self) -> None:
        with tag("ul", "", "chips", aria_label="Jobs that are compared"):
            for job in self._jobs:
                with tag("li", "", "chip"):
                    link(job, to(f"/jobs/{job}"))
                    others = [name for name in self._jobs if name != job]
                    href = to("/compare", jobs=others)
                    with tag("a", "", "chip-end", href=href, aria_label=f"Take {job} out"):
                        icon("close")

    def _add(self, job: str) -> None:
        if job:
            self._view.go("/compare", jobs=[*self._jobs, job])

    async def _refresh(self) -> None:
        unknown = []
        for job in self._jobs:
            try:
                path = f"/jobs/{job}/metrics"
                self._runs[job] = await self._view.api.get(path, points=CURVE_POINTS)
            except ProblemAnswer as problem:
                if problem.status not in (404, 422):
                    raise
                unknown.append(job)
        self._unknown.show(tuple(unknown))
        self._unmeasured.show(unmeasured(self._runs))
        self._grid.show(tuple(metrics_of(self._runs)))
        self._redraw()
        self._table.show(best_rows(self._runs))

    def _say_unknown(self, jobs: tuple[str, ...]) -> None:
        if jobs:
            with tag("div", "", "callout callout-warning"):
                tag("span", f"There is no job {', '.join(jobs)}.")

    def _say_unmeasured(self, jobs: tuple[str, ...]) -> None:
        if jobs:
            with tag("div", "", "callout"):
                tag("span", f"Not measured yet, so not drawn: {', '.join(jobs)}.")

    def _choose_axis(self, across: str) -> None:
        self._across = across if across in ACROSS else "version"
        self._redraw()

    def _make_charts(self, metrics: tuple[str, ...]) -> None:
        self._charts = {}
        if not metrics:
            with card():
                empty("No measurement yet", "The first version that is evaluated is drawn here.")
        for metric in metrics:
            with card(words.plain(metric).capitalize()):
                label = f"{words.plain(metric)} of {', '.join(self._jobs)}"
                self._charts[metric] = Chart(label, lines({}, self._across))

    def _redraw(self) -> None:
        text, unit = ACROSS[self._across]
        for metric, chart in self._charts.items():
            curves = curves_of(self._runs, metric, self._across)
            chart.draw(lines(curves, text, along=unit, has_legend=True), along=unit)


async def build(view: View) -> None:
    """Make the screen."""
    await Compare(view).build()


SCREEN = Screen("/compare", "Compare jobs", build, "versions:read", below="/jobs")
