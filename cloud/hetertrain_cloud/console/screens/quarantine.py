"""Quarantine: what a job's aggregator refused, of whom, why, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from hetertrain_cloud.console import words
from hetertrain_cloud.console.elements import (
    Address,
    Column,
    DataTable,
    Field,
    Pager,
    Region,
    card,
    empty,
    link,
    moment,
    tag,
)
from hetertrain_cloud.console.view import Screen, View, to

PAGE = 50
SECONDS = 5.0
JOBS = 200
FILTERS = ("job", "node", "reason")
COLUMNS = (
    Column("at", "When", "date"),
    Column("node", "Node", "link"),
    Column("reason", "Why", "pill"),
    Column("outcome", "So it"),
    Column("count", "Times", "number"),
    Column("version", "From version", "number"),
    Column("detail", "What was found"),
)
OUTCOMES = {
    "rejected": "may come again",
    "quarantined": "was set aside",
    "frame": "was dropped",
}


def row(refusal: Mapping[str, Any]) -> dict[str, Any]:
    """Lay a refusal out as a row."""
    node, outcome = refusal["node"], refusal["outcome"]
    return {
        "key": str(refusal["number"]),
        "at": refusal["at"],
        "node": {"text": node or "not known", "href": to(f"/nodes/{node}") if node else ""},
        "reason": {
            "text": words.plain(refusal["reason"]),
            "tone": "bad" if outcome == "quarantined" else "warning",
        },
        "outcome": OUTCOMES.get(outcome, outcome),
        "count": refusal["count"],
        "version": refusal["base_version"],
        "detail": refusal["detail"],
    }


def reasons_list(shown: tuple[str, Sequence[Mapping[str, Any]], str | None]) -> None:
    """Show how much was refused for each reason, what it means, and what to do."""
    job, reasons, since = shown
    if not reasons:
        return
    with tag("ul", "", "explained"):
        for each in reasons:
            with tag("li"):
                tag("strong", f"{each['count']:,}", "explained-count")
                with tag("div"):
                    with tag("h3"):
                        code = each["reason"]
                        href = to("/quarantine", job=job, reason=code)
                        link(words.plain(code).capitalize(), href)
                    tag("p", words.sentence(each["explanation"]))
                    if each["advice"]:
                        tag("p", words.sentence(each["advice"]), "muted")
    if since:
        with tag("p", "", "hint"):
            tag("span", "What is kept goes back to ")
            moment(since, "date")


class Quarantine:
    """The screen."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._asked = {name: view.query.get(name, "") for name in FILTERS}

    async def build(self) -> None:
        """Make the screen."""
        view = self._view
        self._address = Address()
        view.head("Quarantine")
        jobs = [job["name"] for job in (await view.api.get("/jobs", limit=JOBS))["items"]]
        if not jobs:
            with card():
                empty(
                    "No job yet",
                    "What a job refuses of its nodes is listed here.",
                    to("/new-job") if view.may("jobs:write") else "",
                    "Create a job",
                )
            return
        self._asked["job"] = self._asked["job"] or jobs[0]
        self._make(jobs)
        await view.live(self._refresh, SECONDS)

    def _make(self, jobs: list[str]) -> None:
        asked, reason = self._asked, self._asked["reason"]
        if asked["job"] not in jobs:
            jobs = [*jobs, asked["job"]]
        with card(), tag("div", "", "form filters", role="search", aria_label="Filter refusals"):
            Field(
                "Job",
                asked["job"],
                kind="select",
                options=[(name, name) for name in jobs],
                on_value=lambda value: self._ask("job", value),
            )
            Field(
                "Node",
                asked["node"],
                kind="search",
                placeholder="whole name",
                on_value=lambda value: self._ask("node", value),
            )
            self._reason = Field(
                "Why",
                reason,
                kind="select",
                options=_options([], reason),
                on_value=lambda value: self._ask("reason", value),
            )
        self._why_card = card("Reasons")
        with self._why_card:
            self._why = Region(reasons_list, "stack")
        with card("", "card-flush"):
            self._table = DataTable("Refused, newest first", COLUMNS)
            self._none = Region(self._nothing)
            self._pager = Pager(lambda: self._view.attempt(self._read(), ""))

    async def _refresh(self) -> None:
        # Who looks at older ones does not want them to move.
        if not self._pager.number:
            await self._read()

    async def _read(self) -> None:
        asked = self._asked
        page = await self._view.api.get(
            f"/jobs/{asked['job']}/refusals",
            limit=PAGE,
            node=asked["node"],
            reason=asked["reason"],
            cursor=self._pager.cursor,
        )
        self._table.show([row(refusal) for refusal in page["items"]])
        self._table.set_visibility(bool(page["items"]))
        self._none.show((bool(page["items"]), bool(asked["node"] or asked["reason"])))
        self._why.show((asked["job"], page["by_reason"], page["since"]))
        self._why_card.set_visibility(bool(page["by_reason"]))
        if not asked["reason"]:
            codes = [each["reason"] for each in page["by_reason"]]
            self._reason.offer(_options(sorted(codes), ""))
        self._pager.show(
            words.seen(self._pager.number, PAGE, len(page["items"])), page["next_cursor"]
        )
        self._address.show(urlencode({name: v for name, v in asked.items() if v}))

    async def _ask(self, name: str, value: str) -> None:
        self._asked[name] = value.strip()
        if name == "job":
            self._asked["reason"] = ""
            self._reason.set("")
        await self._pager.restart()

    def _nothing(self, shown: tuple[bool, bool]) -> None:
        is_some, is_filtered = shown
        if is_some:
            return
        if is_filtered:
            every = to("/quarantine", job=self._asked["job"])
            empty("Nothing matches", "Loosen a filter, or show all.", every, "Show all")
        else:
            empty("Nothing was refused", "All that the job's nodes sent could be used.")


def _options(codes: Sequence[str], asked: str) -> list[tuple[str, str]]:
    shown = [*codes, *([asked] if asked and asked not in codes else [])]
    return [("", "any"), *((code, words.plain(code)) for code in shown)]


async def build(view: View) -> None:
    """Make the screen."""
    await Quarantine(view).build()


SCREEN = Screen("/quarantine", "Quarantine", build, "jobs:read", "Manage", "gpp_bad")
