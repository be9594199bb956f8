"""One job: what it waits for, how good its model is, how its updates come, and its orders."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from hetertrain_cloud.console import words
from hetertrain_cloud.console.curves import bars, by_metric, leading, lines
from hetertrain_cloud.console.elements import (
    Chart,
    Column,
    DataTable,
    Field,
    Region,
    button,
    card,
    empty,
    facts,
    icon,
    link,
    tag,
)
from hetertrain_cloud.console.job_parts import (
    ORDERS,
    figures,
    give_order,
    job_tabs,
    orders_of,
    rolling_back,
    state_pill,
    waits,
)
from hetertrain_cloud.console.node_parts import work_shares
from hetertrain_cloud.console.specification import (
    Specification,
    form_of,
    without_defaults,
    written,
)
from hetertrain_cloud.console.view import Screen, View, crumbs, to

CURVE_POINTS = 500
HISTORY_SECONDS = 6.0
NODES_SECONDS = 4.0
ACROSS = {
    "version": ("version", ""),
    "elapsed_seconds": ("time since the first node", "seconds"),
    "uplink_bytes": ("received by then", "bytes"),
}
"""What metrics are drawn over: the field, what it is called, its unit."""
LAGS_SHOWN = 12
ON_NODES = (
    Column("metric", "Metric"),
    Column("mean", "Mean of nodes", "number"),
    Column("least", "Least", "number"),
    Column("nodes", "Nodes that measured", "number"),
)
_SHOWN = (
    *("state", "waiting_for", "version", "versions_per_hour", "newest"),
    *("nodes_eligible", "nodes_online", "live"),
)


def by_lag(counts: Mapping[str, int]) -> dict[str, float]:
    """Return counts by lag, every lag up to the highest; a long tail stands together."""
    found = {int(lag): num for lag, num in counts.items()}
    last = max(found, default=0)
    shown = {str(lag): float(found.get(lag, 0)) for lag in range(min(last, LAGS_SHOWN) + 1)}
    if last > LAGS_SHOWN:
        shown[f"over {LAGS_SHOWN}"] = float(sum(n for lag, n in found.items() if lag > LAGS_SHOWN))
    return shown


def on_nodes_row(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Lay out what nodes measured of one metric."""
    name = measured["metric"]
    return {**measured, "key": name, "metric": words.plain(name)}


def specification_facts(specification: Specification) -> None:
    """Show what is set."""
    facts(
        [
            (words.plain(name).capitalize(), partial(_value_lines, value))
            for name, value in specification.items()
        ]
    )


def _value_lines(value: object) -> None:
    for line in written(value):
        tag("div", line)


class OneJob:
    """The screen."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._name = view.path["name"]
        self._path = f"/jobs/{self._name}"
        self._metric = ""
        self._across = "version"
        self._rows: list[dict[str, Any]] = []

    async def build(self) -> None:
        """Make the screen."""
        view, name = self._view, self._name
        # One that is not there is said to be so before anything is drawn.
        await view.api.get(self._path)
        self._options = (await form_of(view.api)).options
        crumbs(("Jobs", "/jobs"), here=name)
        with view.head(name):
            self._state = Region(state_pill, name="span")
            self._orders = self._order_buttons()
        job_tabs(name, self._path)
        self._waits = Region(waits)
        self._rollback = Region(rolling_back)
        with card():
            self._figures = Region(figures)
        if view.may("versions:read"):
            self._curve_card()
        self._detail_cards()
        self._specification_card()
        await view.live(self._refresh)
        await view.live(self._look_at_refused, HISTORY_SECONDS)
        if view.may("versions:read"):
            await view.live(self._draw, HISTORY_SECONDS)
        if view.may("nodes:read"):
            await view.live(self._count, NODES_SECONDS)

    def _detail_cards(self) -> None:
        with tag("div", "", "grid"):
            if self._view.may("nodes:read"):
                with card("What its nodes do"):
                    self._nodes = Region(self._work)
            with card("How far behind updates were"):
                self._lags = Region(self._lag_chart)
            with card("Refused"):
                self._refused = Region(self._refusals)
        with card("", "card-flush") as self._own_data:
            tag("h2", "On the nodes' own data", "card-title")
            self._on_nodes = DataTable("What nodes measured on their own data", ON_NODES)

    def _specification_card(self) -> None:
        with card():
            with tag("div", "", "heading"):
                tag("h2", "Specification")
                with tag("div", "", "actions"):
                    if self._view.may("jobs:write"):
                        link("Edit", to(f"{self._path}/edit"), "button button-small")
            self._specification = Region(specification_facts)
            tag("p", "All else is as the scheme has it.", "hint")

    def _order_buttons(self) -> dict[str, Any]:
        if not self._view.may("jobs:write"):
            return {}
        return {
            action: button(label, lambda action=action: self._order(action), picture=picture)
            for action, (label, picture, _) in ORDERS.items()
        }

    async def _order(self, action: str) -> None:
        if await give_order(self._view, self._name, action):
            await self._refresh()

    async def _refresh(self) -> None:
        self._show(await self._view.api.get(self._path))

    def _show(self, job: dict[str, Any]) -> None:
        allowed = orders_of(job)
        for action, made in self._orders.items():
            if made.visible is not (action in allowed):
                made.set_visibility(action in allowed)
        self._state.show(job["state"])
        live = job["live"] or {}
        self._waits.show(
            {key: job[key] for key in ("state", "waiting_for", "restarts")} | {"live": bool(live)}
        )
        self._rollback.show(job["rollback_to"])
        self._figures.show({key: job[key] for key in _SHOWN})
        self._lags.show((bool(live), bool(live.get("updates_by_lag"))))
        if live.get("updates_by_lag"):
            self._lag_bars.draw(bars(by_lag(live["updates_by_lag"]), "lag", "updates"))
        self._own_data.set_visibility(bool(job["on_nodes"]))
        self._on_nodes.show([on_nodes_row(each) for each in job["on_nodes"]])
        self._specification.show(without_defaults(job["specification"], self._options))

    def _curve_card(self) -> None:
        with card():
            with tag("div", "", "heading"):
                tag("h2", "How good the model is")
                with tag("div", "", "actions fields"):
                    self._metrics = Field("Metric", kind="select", on_value=self._choose_metric)
                    self._axis = Field(
                        "Over",
                        self._across,
                        kind="select",
                        options=[(field, text) for field, (text, _) in ACROSS.items()],
                        on_value=self._choose_axis,
                    )
            self._curve = Region(self._curve_chart)

    async def _draw(self) -> None:
        self._rows = await self._view.api.get(f"{self._path}/metrics", points=CURVE_POINTS)
        names = sorted({name for row in self._rows for name in row["metrics"]})
        if self._metric not in names:
            self._metric = leading(names)
            self._metrics.set(self._metric)
        self._metrics.offer([(name, words.plain(name)) for name in names])
        self._redraw()

    def _choose_metric(self, name: str) -> None:
        self._metric = name
        self._redraw()

    def _choose_axis(self, across: str) -> None:
        self._across = across if across in ACROSS else "version"
        self._redraw()

    def _redraw(self) -> None:
        self._curve.show(self._metric)
        if self._metric:
            text, unit = ACROSS[self._across]
            points = by_metric(self._rows, self._across)[self._metric]
            self._curves.draw(lines({self._metric: points}, text, along=unit), along=unit)

    def _curve_chart(self, metric: str) -> None:
        if not metric:
            empty("No measurement yet", "The first version that is evaluated is drawn here.")
            return
        label = f"{words.plain(metric)} of {self._name}"
        self._curves = Chart(label, lines({metric: []}, self._across))

    async def _count(self) -> None:
        counts = await self._view.api.get("/fleet", job=self._name)
        self._nodes.show(counts["by_doing"])

    def _work(self, by_doing: dict[str, int]) -> None:
        if not by_doing:
            empty("No node speaks of it", "Nodes that work on the job are counted here.")
            return
        work_shares(by_doing)
        link("Show these nodes", to("/fleet", job=self._name))

    def _lag_chart(self, shown: tuple[bool, bool]) -> None:
        is_live, has_updates = shown
        if not is_live:
            empty("Not at work", "It is counted while the job runs.")
            return
        if not has_updates:
            empty("No update yet", "The first that is merged is counted here.")
            return
        self._lag_bars = Chart("updates by lag", bars({}, "lag", "updates"))
        self._lag_bars.classes("chart-small")
        tag("p", "Versions that were made while a node worked on its update.", "hint")

    async def _look_at_refused(self) -> None:
        page = await self._view.api.get(f"{self._path}/refusals", limit=1)
        self._refused.show(page["by_reason"])

    def _refusals(self, reasons: list[dict[str, Any]]) -> None:
        if not reasons:
            empty("Nothing refused", "Updates that are not fit to be merged are counted here.")
            return
        with tag("ul", "", "reasons"):
            for each in reasons:
                href = to("/quarantine", job=self._name, reason=each["reason"])
                with tag("li"), tag("a", "", "reason", href=href):
                    tag("strong", f"{each['count']:,}")
                    with tag("span"):
                        tag("span", words.plain(each["reason"]).capitalize())
                        tag("span", each["explanation"], "note")
                    icon("chevron_right")


async def build(view: View) -> None:
    """Make the screen."""
    await OneJob(view).build()


SCREEN = Screen("/jobs/{name}", "Job", build, "jobs:read", below="/jobs")
