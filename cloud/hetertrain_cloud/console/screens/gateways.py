"""Gateways: each with its cell, its way to the cloud, and what it has not delivered yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetertrain_cloud.console import words
from hetertrain_cloud.console.elements import (
    Column,
    DataTable,
    Pager,
    Region,
    card,
    empty,
)
from hetertrain_cloud.console.view import Screen, View, to

PAGE = 50
COLUMNS = (
    Column("name", "Gateway", "link"),
    Column("doing", "Does", "pill"),
    Column("members", "Members of its cell", "link"),
    Column("uplink", "Way to the cloud"),
    Column("backlog", "Still to deliver"),
    Column("version", "Version", "number"),
    Column("bytes_up", "Sent", "bytes"),
    Column("bytes_down", "Received", "bytes"),
    Column("month_bytes", "This month", "bytes"),
    Column("seen", "Last seen", "time"),
)


def row(node: Mapping[str, Any], members: int) -> dict[str, Any]:
    """Lay a gateway out as a row."""
    name, live = node["name"], node["live"] or {}
    is_online = bool(live.get("is_online"))
    doing, _, more = str(live.get("doing", "")).partition(";")
    shown, tone = (doing, words.doing_tone(doing)) if is_online else ("offline", "bad")
    if node["state"] != "active":
        shown, tone = node["state"], words.NODE_TONES[node["state"]]
    found: dict[str, Any] = {
        "key": name,
        "name": {"text": name, "href": to(f"/nodes/{name}")},
        "doing": {"text": words.plain(shown), "tone": tone, "note": more.strip()},
        "members": {
            "text": words.many(members, "node"),
            "href": to("/fleet", cell=name, state="active"),
        },
        "seen": "now" if is_online else node["seen_at"],
    }
    if live:
        found |= {
            "uplink": f"{live['tier']}, {words.rate(live['goodput_bits_per_second'])}",
            "backlog": f"{words.many(live['backlog_updates'], 'update')}, "
            f"{words.size(live['backlog_bytes'])}",
            "version": live["version"] if live["version"] >= 0 else None,
            "bytes_up": live["bytes_up"],
            "bytes_down": live["bytes_down"],
            "month_bytes": live["month_bytes"],
        }
    return found


def nothing(is_empty: bool) -> None:
    """Say what a gateway is for, where there is none."""
    if not is_empty:
        return
    empty(
        "No gateway yet",
        "A gateway stands between a cell's vehicles and the cloud: it merges their updates, so "
        "that one partial goes up in place of many. Vehicles work without one, too.",
        to("/enrolment"),
        "Make a claim for a gateway",
    )


async def build(view: View) -> None:
    """Make the screen."""
    view.head("Gateways")
    with card("", "card-flush"):
        table = DataTable("Gateways", COLUMNS)
        none = Region(nothing)
        pager = Pager(lambda: view.attempt(refresh(), ""))

    async def refresh() -> None:
        page = await view.api.get("/nodes", role="edge", limit=PAGE, cursor=pager.cursor)
        found = page["items"]
        cells = (await view.api.get("/fleet"))["by_cell"]
        pager.show(words.seen(pager.number, PAGE, len(found)), page["next_cursor"])
        table.set_visibility(bool(found))
        table.show([row(node, cells.get(node["name"], 0)) for node in found])
        none.show(not found)

    await view.live(refresh)


SCREEN = Screen("/gateways", "Gateways", build, "nodes:read", "Watch", "cell_tower")
