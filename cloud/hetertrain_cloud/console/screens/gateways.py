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
    link,
)
from hetertrain_cloud.console.node_parts import cell_address
from hetertrain_cloud.console.view import Screen, View, to

PAGE = 50
ENROL = to("/enrolment", role="edge")
COLUMNS = (
    Column("name", "Gateway", "link"),
    Column("doing", "Does", "pill"),
    Column("members", "Members of its cell", "link"),
    Column("uplink", "Its link"),
    Column("backlog", "To deliver"),
    Column("version", "Version"),
    Column("cell_bytes_up", "From its cell", "bytes"),
    Column("bytes_up", "To the cloud", "bytes"),
    Column("bytes_down", "From the cloud", "bytes"),
    Column("seen", "Last seen", "time"),
)


def row(gateway: Mapping[str, Any]) -> dict[str, Any]:
    """Lay a gateway out as a row."""
    name, is_online = gateway["name"], gateway["is_online"]
    doing, _, more = str(gateway["doing"] or "").partition(";")
    waits = f"waits for {gateway['waiting_for']}" if gateway["waiting_for"] else ""
    shown, tone = (doing, words.doing_tone(doing)) if is_online else ("offline", "bad")
    if gateway["state"] != "active":
        shown, tone = gateway["state"], words.NODE_TONES[gateway["state"]]
    found: dict[str, Any] = {
        "key": name,
        "name": {"text": name, "href": to(f"/nodes/{name}")},
        "doing": {
            "text": words.plain(shown),
            "tone": tone,
            "note": "; ".join(filter(None, (more.strip(), waits))),
        },
        "members": members(gateway),
        "seen": "now" if is_online else gateway["seen_at"],
    }
    if gateway["job"] is not None:
        version, local = gateway["version"], gateway["local"]
        found |= {
            "uplink": f"{gateway['tier']}, {words.rate(gateway['goodput_bits_per_second'])}",
            "backlog": f"{words.many(gateway['backlog_updates'], 'update')}, "
            f"{words.size(gateway['backlog_bytes'])}"
            if gateway["backlog_updates"]
            else "nothing",
            "version": "none yet" if version < 0 else f"{version:,}",
            "cell_bytes_up": gateway["cell_bytes_up"],
            "bytes_up": gateway["bytes_up"],
            "bytes_down": gateway["bytes_down"],
        }
        if local:
            found["version"] += f", and {words.many(local, 'model')} of its own"
    return found


def members(gateway: Mapping[str, Any]) -> dict[str, str]:
    """Show how many are in the cell, what they do, and how it is known."""
    by_doing = gateway["members"]
    notes = [f"{count:,} {words.plain(doing)}" for doing, count in by_doing.items()]
    if gateway["has_own_broker"]:
        notes.append("seen through it")
    return {
        "text": words.many(sum(by_doing.values()), "node"),
        "href": cell_address(gateway["name"]),
        "note": ", ".join(notes),
    }


def nothing(is_empty: bool) -> None:
    """Say what a gateway is for, where there is none."""
    if not is_empty:
        return
    empty(
        "No gateway yet",
        "A gateway stands between a cell's vehicles and the cloud: it merges their updates, so "
        "that one partial goes up in place of many. Vehicles work without one, too.",
        ENROL,
        "Make a claim for a gateway",
    )


async def build(view: View) -> None:
    """Make the screen."""
    with view.head("Gateways"):
        if view.may("claims:write"):
            link("Enrol a gateway", ENROL, "button button-primary")
    with card("", "card-flush"):
        table = DataTable("Gateways", COLUMNS)
        none = Region(nothing)
        pager = Pager(lambda: view.attempt(refresh(), ""))

    async def refresh() -> None:
        page = await view.api.get("/gateways", limit=PAGE, cursor=pager.cursor)
        found = page["items"]
        pager.show(words.seen(pager.number, PAGE, len(found)), page["next_cursor"])
        table.set_visibility(bool(found))
        table.show([row(gateway) for gateway in found])
        none.show(not found)

    await view.live(refresh)


SCREEN = Screen("/gateways", "Gateways", build, "nodes:read", "Watch", "cell_tower")
