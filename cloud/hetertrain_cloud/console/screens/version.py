"""One version: what it measured, where it came from, and who contributed, by weight and lag."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from hetertrain_cloud.console import words
from hetertrain_cloud.console.curves import bars, leading
from hetertrain_cloud.console.elements import (
    Chart,
    Column,
    DataTable,
    Pager,
    Region,
    button,
    card,
    empty,
    facts,
    icon,
    link,
    moment,
    pill,
    stat,
    tag,
)
from hetertrain_cloud.console.screens.versions import VersionOrders, kept, model_address
from hetertrain_cloud.console.view import Screen, View, crumbs, to

PAGE = 50
COLUMNS = (
    Column("node", "Node", "link"),
    Column("share", "Share of the version", "bar"),
    Column("lag", "Lag", "number"),
    Column("base", "Started from", "number"),
    Column("examples", "Examples", "number"),
    Column("steps", "Steps", "number"),
    Column("seq", "Number of the update", "number"),
)


def by_weight(contributions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return contributions, those that counted for most first."""
    return sorted(contributions, key=lambda c: (-(c["share"] or 0), c["lag"], c["node"], c["seq"]))


def row(contribution: dict[str, Any]) -> dict[str, Any]:
    """Lay a contribution out as a row; its bar is as long as its share."""
    share = contribution["share"]
    return {
        "key": f"{contribution['node']} {contribution['seq']}",
        "node": {"text": contribution["node"], "href": to(f"/nodes/{contribution['node']}")},
        "share": None if share is None else {"share": share, "text": f"{100 * share:.1f} %"},
        "lag": contribution["lag"],
        "base": contribution["base_version"],
        "examples": contribution["examples"],
        "steps": contribution["steps"],
        "seq": contribution["seq"],
    }


def share_by_lag(contributions: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return how much of the version came with which lag, in percent; empty: that is not known."""
    shares: Counter[int] = Counter()
    for each in contributions:
        if each["share"] is None:
            return {}
        shares[each["lag"]] += each["share"]
    return {str(lag): round(100 * shares[lag], 2) for lag in range(max(shares, default=-1) + 1)}


class Version:
    """The screen."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._name = view.path["name"]
        self._number = view.path["version"]
        self._path = f"/jobs/{self._name}/versions/{self._number}"
        self._orders = VersionOrders(view, self._name)
        self._newest: int | None = None
        self._contributions: list[dict[str, Any]] = []

    async def build(self) -> None:
        """Make the screen."""
        view, name = self._view, self._name
        version = await view.api.get(self._path)
        number = version["version"]
        self._newest = (await view.api.get(f"/jobs/{name}"))["version"]
        versions = f"/jobs/{name}/versions"
        crumbs(
            ("Jobs", "/jobs"),
            (name, f"/jobs/{name}"),
            ("versions", versions),
            here=f"{number:,}",
        )
        with view.head(f"Version {number:,}"):
            self._actions = Region(self._buttons, "actions")
        self._neighbours(versions, number)
        with card(), tag("div", "", "stats"):
            self._metrics(version["metrics"] or {})
            stat("Updates", f"{version['num_updates']:,}", f"of {_nodes(version)}")
            if version["seconds"] is not None:
                text = words.duration(version["seconds"])
                stat("Made in", text, "since the version before")
        with tag("div", "", "grid"):
            with card("Where it comes from"):
                facts(self._facts(version))
            with card("Share by lag"):
                self._lag_chart(version["contributions"])
        with card("", "card-flush"):
            tag("h2", "Who contributed", "card-title")
            self._contributors(version["contributions"])
        self._show(version)

    def _show(self, version: dict[str, Any]) -> None:
        is_newest = version["version"] == self._newest
        self._actions.show((version["is_kept"], version["is_promoted"], is_newest))

    def _buttons(self, shown: tuple[bool, bool, bool]) -> None:
        is_kept, is_promoted, is_newest = shown
        keeps = kept({"is_kept": is_kept, "is_promoted": is_promoted})
        if keeps is None:
            pill("its model is no longer kept")
            return
        pill("kept for good" if is_promoted else "kept for now", keeps[1])
        with tag("a", "", "button", href=model_address(self._name, int(self._number))):
            icon("download")
            tag("span", "Download")
        if self._view.may("versions:write"):
            if not is_promoted:
                button("Promote", self._promote, picture="push_pin")
            if not is_newest:
                button("Roll back to it", self._roll_back, "button-bad")

    async def _promote(self) -> None:
        if await self._orders.promote(int(self._number)):
            self._show(await self._view.api.get(self._path))

    async def _roll_back(self) -> None:
        if await self._orders.roll_back(int(self._number)):
            self._view.go(f"/jobs/{self._name}/versions")

    def _neighbours(self, versions: str, number: int) -> None:
        with tag("nav", "", "neighbours", aria_label="Versions beside it"):
            if number:
                link(f"← Version {number - 1:,}", to(f"{versions}/{number - 1}"))
            if self._newest is not None and number < self._newest:
                link(f"Version {number + 1:,} →", to(f"{versions}/{number + 1}"))

    def _metrics(self, metrics: dict[str, float]) -> None:
        first = leading(sorted(metrics))
        for name in sorted(metrics, key=lambda name: (name != first, name)):
            stat(words.plain(name).capitalize(), f"{metrics[name]:.4g}")

    def _facts(self, version: dict[str, Any]) -> list[Any]:
        sync, back = version["sync"], version["rolled_back_to"]
        rows: list[Any] = [
            ("Made", lambda: moment(version["at"], "date") if version["at"] else tag("span", "–")),
            (
                "After",
                "–"
                if version["elapsed_seconds"] is None
                else f"{words.duration(version['elapsed_seconds'])} since the first node",
            ),
            ("Synchronisation", "none ended with it" if sync is None else f"number {sync:,}"),
            ("Lineage", lambda: tag("code", version["lineage"])),
            ("Digest", lambda: tag("code", version["digest"])),
        ]
        if back is not None:
            path = f"/jobs/{self._name}/versions/{back}"
            rows.insert(0, ("Rolled back to", lambda: link(f"version {back:,}", to(path))))
        return rows

    def _lag_chart(self, contributions: list[dict[str, Any]]) -> None:
        found = share_by_lag(contributions)
        if not found:
            empty("Not known", "Nothing was merged, or weights were not noted yet.")
            return
        chart = Chart("share of the version by lag", bars(found, "lag", "percent of the version"))
        chart.classes("chart-small")
        tag("p", "Percent of the version, by how many versions behind updates were.", "hint")

    def _contributors(self, contributions: list[dict[str, Any]]) -> None:
        self._contributions = by_weight(contributions)
        if not contributions:
            empty("Nobody", "No update was merged into it.")
            return
        self._table = DataTable("Contributions by weight", COLUMNS)
        self._pager = Pager(self._turn)
        self._turn()

    def _turn(self) -> None:
        """Show a page of contributions: the first and the next are where the list is cut."""
        start = int(self._pager.cursor or 0)
        end, total = start + PAGE, len(self._contributions)
        shown = self._contributions[start:end]
        self._table.show([row(each) for each in shown])
        text = f"{start + 1:,} to {start + len(shown):,} of {total:,}"
        self._pager.show(text, str(end) if end < total else None)


def _nodes(version: dict[str, Any]) -> str:
    return words.many(version["num_nodes"], "node")


async def build(view: View) -> None:
    """Make the screen."""
    await Version(view).build()


SCREEN = Screen("/jobs/{name}/versions/{version}", "Version", build, "versions:read", below="/jobs")
