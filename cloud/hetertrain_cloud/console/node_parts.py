"""What several screens show of nodes: what they do, all together, and whose cell one is in."""

from __future__ import annotations

from collections.abc import Mapping

from hetertrain.wire.topics import CLOUD_CELL
from hetertrain_cloud.console import words
from hetertrain_cloud.console.elements import shares
from hetertrain_cloud.console.view import to


def work_shares(by_doing: Mapping[str, int]) -> None:
    """Show what nodes do, by how many."""
    parts = [(words.plain(doing), num, words.doing_tone(doing)) for doing, num in by_doing.items()]
    shares(parts, "what nodes do")


def gateway(cell: str) -> str:
    """Return the address of the gateway whose cell it is; empty: the cloud's own."""
    return "" if cell == CLOUD_CELL else to(f"/nodes/{cell}")


def cell_address(gateway_name: str) -> str:
    """Return the address of the active nodes in a gateway's cell."""
    return to("/fleet", cell=gateway_name, state="active")
