"""Versions of a job, newest first: what each measured and where it came from; one is kept for good,
downloaded, or made the model to go on from.
"""

from __future__ import annotations

from typing import Any

from hetertrain_cloud.console.elements import (
    Column,
    DataTable,
    Pager,
    Region,
    Tone,
    card,
    empty,
)
from hetertrain_cloud.console.job_parts import job_tabs, measured, rolling_back, state_pill
from hetertrain_cloud.console.view import Screen, View, crumbs, to

PAGE = 25
COLUMNS = (
    Column("name", "Version", "link"),
    Column("at", "Made", "time"),
    Column("metrics", "Metrics"),
    Column("updates", "Updates", "number"),
    Column("nodes", "Nodes", "number"),
    Column("sync", "Sync", "number"),
    Column("lineage", "Lineage", "code"),
    Column("kept", "Kept", "pill"),
    Column("model", "Model", "link"),
)
ACTIONS: tuple[tuple[str, str, Tone], ...] = (
    ("promote", "Promote", "quiet"),
    ("rollback", "Roll back", "bad"),
)
LINEAGE_CHARACTERS = 8


def model_address(job: str, version: int) -> str:
    """Return where the API serves a version's model; the browser's session is good for it too."""
    return f"/api/v1/jobs/{job}/versions/{version}/model"


def kept(version: dict[str, Any]) -> tuple[str, Tone] | None:
    """Say how a version's model is kept; None: it is not."""
    if version["is_promoted"]:
        return "promoted", "good"
    return ("for now", "quiet") if version["is_kept"] else None


def row(job: str, version: dict[str, Any], newest: int | None) -> dict[str, Any]:
    """Lay a version out as a row."""
    number, keeps = version["version"], kept(version)
    without = []
    if not version["is_kept"] or version["is_promoted"]:
        without.append("promote")
    if not version["is_kept"] or number == newest:
        without.append("rollback")
    back = version["rolled_back_to"]
    pill = keeps and {"text": keeps[0], "tone": keeps[1]}
    if back is not None:
        note = f"rolled back to {back:,}"
        pill = (pill or {"text": note, "tone": "warning"}) | ({"note": note} if pill else {})
    return {
        "key": str(number),
        "name": {"text": f"{number:,}", "href": to(f"/jobs/{job}/versions/{number}")},
        "at": version["at"],
        "metrics": measured(version["metrics"]),
        "updates": version["num_updates"],
        "nodes": version["num_nodes"],
        "sync": version["sync"],
        "lineage": version["lineage"][:LINEAGE_CHARACTERS],
        "kept": pill,
        "model": {"text": "Download", "href": model_address(job, number)}
        if version["is_kept"]
        else None,
        "without": without,
    }


class VersionOrders:
    """What can be done with a version, on this screen and on its own."""

    def __init__(self, view: View, job: str) -> None:
        self._view = view
        self._job = job

    async def promote(self, version: int) -> bool:
        """Keep it for good."""
        path = f"/jobs/{self._job}/versions/{version}/promote"
        done = f"Version {version:,} is kept for good."
        return await self._view.attempt(self._view.api.send("POST", path), done) is not None

    async def roll_back(self, version: int) -> bool:
        """Make it what the job goes on from, if that is meant."""
        # Asked for, it is kept until the question is answered.
        if not await self._view.api.has(f"/jobs/{self._job}/versions/{version}/model"):
            self._view.say(f"The model of version {version:,} is no longer kept.", is_bad=True)
            return False
        text = (
            f"The model of version {version:,} becomes the next version, and all nodes go on from "
            "it. What was learnt since is not in it; the versions themselves stay listed."
        )
        title = f"Roll {self._job} back to version {version:,}?"
        if not await self._view.confirm(title, text, "Roll back", word=str(version)):
            return False
        path = f"/jobs/{self._job}/versions/{version}/rollback"
        done = f"{self._job} goes on from version {version:,} within seconds."
        return await self._view.attempt(self._view.api.send("POST", path), done) is not None


class Versions:
    """The screen."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._name = view.path["name"]
        self._path = f"/jobs/{self._name}"
        self._orders = VersionOrders(view, self._name)

    async def build(self) -> None:
        """Make the screen."""
        view, name = self._view, self._name
        crumbs(("Jobs", "/jobs"), (name, self._path), here="versions")
        with view.head(name):
            self._state = Region(state_pill, name="span")
        job_tabs(name, f"{self._path}/versions")
        self._rollback = Region(rolling_back)
        with card("", "card-flush"):
            self._table = DataTable(
                f"Versions of {name}",
                COLUMNS,
                actions=ACTIONS if view.may("versions:write") else (),
                on_act=self._act,
            )
            self._none = Region(self._nothing)
            self._pager = Pager(lambda: view.attempt(self._refresh(), ""))
        await view.live(self._refresh)

    async def _refresh(self) -> None:
        api = self._view.api
        job = await api.get(self._path)
        page = await api.get(f"{self._path}/versions", limit=PAGE, cursor=self._pager.cursor)
        items = page["items"]
        self._state.show(job["state"])
        self._rollback.show(job["rollback_to"])
        self._table.set_visibility(bool(items))
        self._table.show([row(self._name, item, job["version"]) for item in items])
        self._none.show(bool(items))
        self._pager.show(self._where(items), page["next_cursor"])

    def _where(self, items: list[dict[str, Any]]) -> str:
        if not self._pager.number:
            return "the newest"
        return f"{items[0]['version']:,} to {items[-1]['version']:,}" if items else "none"

    def _nothing(self, has_versions: bool) -> None:
        if not has_versions:
            empty("No version yet", "The first is there once the job has started.")

    async def _act(self, action: str, key: str) -> None:
        order = self._orders.promote if action == "promote" else self._orders.roll_back
        if await order(int(key)):
            await self._refresh()


async def build(view: View) -> None:
    """Make the screen."""
    await Versions(view).build()


SCREEN = Screen("/jobs/{name}/versions", "Versions", build, "versions:read", below="/jobs")
