"""Overview: what each job is doing, what the fleet does, and why not more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetertrain_cloud.console import words
from hetertrain_cloud.console.curves import by_metric, leading, lines
from hetertrain_cloud.console.elements import (
    Chart,
    Region,
    card,
    empty,
    icon,
    link,
    stat,
    tag,
)
from hetertrain_cloud.console.job_parts import figures, state_pill, waits
from hetertrain_cloud.console.node_parts import work_shares
from hetertrain_cloud.console.screens.alerts import alert_item
from hetertrain_cloud.console.view import Screen, View, to

JOBS = 20
"""More are on the screen of jobs."""
ALERTS = 3
RULES = 6
CURVE_POINTS = 300
CURVE_SECONDS = 6.0
FLEET_SECONDS = 4.0
ALERT_SECONDS = 10.0


class JobCard:
    """One job: its figures and its curve."""

    def __init__(self, name: str) -> None:
        self.name = name
        with card():
            with tag("div", "", "heading"):
                with tag("h2"):
                    link(self.name, to(f"/jobs/{self.name}"))
                self._state = Region(state_pill, name="span")
            self._waits = Region(waits)
            with tag("div", "", "grid-wide"):
                self._curve = Region(self._chart)
                self._figures = Region(figures)
        self._drawn: Chart | None = None

    def show(self, job: Mapping[str, Any]) -> None:
        """Show the job as it is now."""
        self._state.show(job["state"])
        seen = (
            "state",
            "waiting_for",
            "live",
            "version",
            "newest",
            "nodes_eligible",
            "nodes_online",
            "versions_per_hour",
        )
        now = {key: job[key] for key in seen}
        self._waits.show(
            {key: now[key] for key in ("state", "waiting_for")} | {"live": bool(now["live"])}
        )
        self._figures.show(now)

    def draw(self, rows: list[dict[str, Any]]) -> None:
        """Draw its curve."""
        curves = by_metric(rows)
        name = leading(list(curves))
        if not name:
            self._curve.show("")
            return
        self._curve.show(name)
        if self._drawn is not None:
            self._drawn.draw(lines({name: curves[name]}, "version"))

    def _chart(self, metric: str) -> None:
        if not metric:
            self._drawn = None
            empty("No measurement yet", "The first version that is evaluated is drawn here.")
            return
        label = f"{words.plain(metric)} of {self.name} over versions"
        tag("h3", words.plain(metric).capitalize(), "muted")
        self._drawn = Chart(label, lines({metric: []}, "version"))
        self._drawn.classes("chart-small")


def fleet_card(counts: Mapping[str, Any]) -> None:
    """Show what nodes do."""
    active = counts["by_state"].get("active", 0)
    with tag("div", "", "stats"):
        stat("Nodes online", f"{counts['online']:,}", f"of {active:,} enrolled")
        stat("Sent by nodes", words.size(counts["bytes_up"]), "since each started")
        stat("Received by nodes", words.size(counts["bytes_down"]), "since each started")
    work_shares(counts["by_doing"])


def reasons(counts: Mapping[str, Any]) -> list[tuple[int, str, str]]:
    """Return why nodes do not train: how many, why, and the address of just those."""
    found = [
        (
            num,
            f"may not train by the rule {rule}",
            to("/fleet", held_by=rule, state="active"),
        )
        for rule, num in list(counts["not_eligible_by_rule"].items())[:RULES]
    ]
    texts = {
        "offline": "are offline",
        "resting": "rest until their job runs",
        "link_closed": "have closed their link",
        "train_failed": "have a trainer that fails",
    }
    found += [
        (num, texts[doing], to("/fleet", doing=doing, state="active"))
        for doing, num in counts["by_doing"].items()
        if doing in texts
    ]
    pending = counts["by_state"].get("pending", 0)
    if pending:
        found.append((pending, "wait to be approved", to("/fleet", state="pending")))
    return sorted(found, reverse=True)


def why_not_more(counts: Mapping[str, Any]) -> None:
    """Show why nodes do not train, most first, each with the way to them."""
    found = reasons(counts)
    if not found:
        empty("Everybody takes part", "No node is held up right now.")
        return
    with tag("ul", "", "reasons"):
        for num, text, href in found:
            with tag("li"), tag("a", "", "reason", href=href):
                tag("strong", f"{num:,}")
                tag("span", text)
                icon("chevron_right")


class Overview:
    """The screen."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._cards: dict[str, JobCard] = {}

    async def build(self) -> None:
        """Make the screen."""
        view = self._view
        with view.head("Overview"):
            if view.may("jobs:write"):
                link("New job", to("/new-job"), "button")
        if view.may("nodes:read"):
            self._alerts = Region(self._needs_somebody, "stack alerts")
            await view.live(self._warn, ALERT_SECONDS)
            with tag("div", "", "grid"):
                with card("The fleet"):
                    self._fleet = Region(fleet_card, "stack")
                with card("Why not more?"):
                    self._reasons = Region(why_not_more)
            await view.live(self._count, FLEET_SECONDS)
        self._jobs = Region(self._make_cards, "stack")
        self._more = link("All jobs", to("/jobs"))
        await view.live(self._refresh)
        await view.live(self._draw, CURVE_SECONDS)

    async def _refresh(self) -> None:
        page = await self._view.api.get("/jobs", limit=JOBS)
        self._jobs.show([job["name"] for job in page["items"]])
        self._more.set_visibility(page["next_cursor"] is not None)
        for job in page["items"]:
            self._cards[job["name"]].show(job)

    def _make_cards(self, names: list[str]) -> None:
        self._cards = {name: JobCard(name) for name in names}
        if not names:
            with card():
                empty(
                    "No job yet",
                    "A job is one model that the fleet trains: say which task, and which nodes.",
                    to("/new-job"),
                    "Create a job",
                )

    async def _draw(self) -> None:
        for name, each in self._cards.items():
            path = f"/jobs/{name}/metrics"
            each.draw(await self._view.api.get(path, points=CURVE_POINTS))

    def _needs_somebody(self, found: list[dict[str, Any]]) -> None:
        for alert in found:
            alert_item(self._view, alert)
        if found:
            link("All alerts", to("/alerts"))

    async def _warn(self) -> None:
        found = (await self._view.api.get("/alerts"))["items"]
        self._alerts.show([alert for alert in found if alert["severity"] != "info"][:ALERTS])

    async def _count(self) -> None:
        counts = await self._view.api.get("/fleet")
        self._fleet.show(counts)
        self._reasons.show(
            {key: counts[key] for key in ("not_eligible_by_rule", "by_doing", "by_state")}
        )


async def build(view: View) -> None:
    """Make the screen."""
    await Overview(view).build()


SCREEN = Screen("/", "Overview", build, "jobs:read", "Watch", "dashboard")
