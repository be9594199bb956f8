"""Fleet: every node, by whatever tells them apart; and what is done to many at once."""

from __future__ import annotations

from typing import Any

from hetertrain_cloud.console import words
from hetertrain_cloud.console.elements import Column, DataTable, card
from hetertrain_cloud.console.view import Screen, View, to

COLUMNS = (
    Column("name", "Node", "link"),
    Column("state", "State", "pill"),
    Column("doing", "Doing", "pill"),
    Column("tier", "Tier"),
    Column("cell", "Cell"),
    Column("labels", "Labels", "labels"),
    Column("version", "Version", "number"),
    Column("updates", "Updates", "number"),
    Column("bytes_up", "Sent", "bytes"),
    Column("seen", "Last seen", "time"),
)


def row(node: dict[str, Any]) -> dict[str, Any]:
    """Lay a node out as a row."""
    live = node["live"] or {}
    return {
        "key": node["name"],
        "name": {"text": node["name"], "href": to(f"/nodes/{node['name']}")},
        "state": {"text": node["state"], "tone": words.NODE_TONES[node["state"]]},
        "doing": {"text": live.get("doing", "offline"), "tone": "quiet"},
        "tier": live.get("tier"),
        "cell": live.get("cell"),
        "labels": node["labels"],
        "version": live.get("version"),
        "updates": live.get("updates"),
        "bytes_up": live.get("bytes_up"),
        "seen": node["seen_at"],
    }


async def build(view: View) -> None:
    """Make the screen."""
    view.head("Fleet")
    with card("", "card-flush"):
        table = DataTable("Nodes", COLUMNS, on_choose=None)

    async def refresh() -> None:
        page = await view.api.get("/nodes", limit=50, **view.query)
        table.show([row(node) for node in page["items"]])

    await view.live(refresh)


SCREEN = Screen("/fleet", "Fleet", build, "nodes:read", "Watch", "directions_car")
