"""Jobs: every job, what it does and what it waits for; several are chosen to be compared."""

from __future__ import annotations

from typing import Any

from hetertrain_cloud.console import words
from hetertrain_cloud.console.elements import (
    Column,
    DataTable,
    Pager,
    Region,
    Tone,
    button,
    card,
    empty,
    link,
    tag,
)
from hetertrain_cloud.console.job_parts import (
    ORDERS,
    crew,
    give_order,
    measured,
    orders_of,
)
from hetertrain_cloud.console.view import Screen, View, to

PAGE = 50
COLUMNS = (
    Column("name", "Job", "link"),
    Column("state", "State", "pill"),
    Column("version", "Version", "number"),
    Column("newest", "Newest metrics"),
    Column("per_hour", "Versions an hour", "number"),
    Column("nodes", "Nodes online"),
    Column("waits", "Waits for"),
)
ACTIONS: list[tuple[str, str, Tone]] = [
    (action, label, "quiet") for action, (label, _, _) in ORDERS.items()
]


def row(job: dict[str, Any]) -> dict[str, Any]:
    """Lay a job out as a row."""
    is_tried = job["state"] in ("running", "starting")
    per_hour = job["versions_per_hour"]
    return {
        "key": job["name"],
        "name": {"text": job["name"], "href": to(f"/jobs/{job['name']}")},
        "state": {"text": job["state"], "tone": words.JOB_TONES.get(job["state"], "quiet")},
        "version": job["version"],
        "newest": measured((job["newest"] or {}).get("metrics")),
        "per_hour": round(per_hour) if per_hour and is_tried else None,
        "nodes": crew(job),
        "waits": job["waiting_for"]["text"] if is_tried else job["reason"],
        "without": [action for action in ORDERS if action not in orders_of(job)],
    }


class Jobs:
    """The screen."""

    def __init__(self, view: View) -> None:
        self._view = view

    async def build(self) -> None:
        """Make the screen."""
        view = self._view
        with view.head("Jobs"):
            if view.may("jobs:write"):
                link("New job", to("/new-job"), "button button-primary")
        with card("", "card-flush"):
            self._bulk = Region(self._chosen_row, "bar-row bulk")
            self._table = DataTable(
                "Jobs",
                COLUMNS,
                on_choose=self._bulk_of if view.may("versions:read") else None,
                actions=ACTIONS if view.may("jobs:write") else (),
                on_act=self._order,
            )
            self._none = Region(self._nothing)
            self._pager = Pager(lambda: view.attempt(self._refresh(), ""))
        await view.live(self._refresh)

    async def _refresh(self) -> None:
        page = await self._view.api.get("/jobs", limit=PAGE, cursor=self._pager.cursor)
        jobs = page["items"]
        self._table.set_visibility(bool(jobs))
        self._table.show([row(job) for job in jobs])
        self._none.show(bool(jobs))
        text = f"{jobs[0]['name']} to {jobs[-1]['name']}" if jobs else "none"
        self._pager.show(text, page["next_cursor"])

    def _nothing(self, has_jobs: bool) -> None:
        if not has_jobs:
            text = "A job is one model that the fleet trains: say which task, and which nodes."
            if self._view.may("jobs:write"):
                empty("No job yet", text, to("/new-job"), "Create a job")
            else:
                empty("No job yet", f"{text} An operator can create one.")

    def _bulk_of(self, keys: list[str]) -> None:
        self._bulk.show(tuple(keys))

    def _chosen_row(self, keys: tuple[str, ...]) -> None:
        if not keys:
            return
        tag("strong", f"{words.many(len(keys), 'job')} chosen")
        if len(keys) < 2:
            tag("span", "Choose another one to compare them.", "muted")
        else:
            button(
                "Compare",
                lambda: self._view.go("/compare", jobs=list(keys)),
                "button-small button-primary",
            )

    async def _order(self, action: str, name: str) -> None:
        if await give_order(self._view, name, action):
            await self._refresh()


async def build(view: View) -> None:
    """Make the screen."""
    await Jobs(view).build()


SCREEN = Screen("/jobs", "Jobs", build, "jobs:read", "Watch", "model_training")
