"""What the console shows of a gateway."""

from __future__ import annotations

from typing import Any

from hetertrain_cloud.console.screens.gateways import row

UNHEARD: dict[str, Any] = {
    "name": "rsu-1",
    "state": "active",
    "seen_at": None,
    "is_online": False,
    "job": None,
    "doing": None,
    "waiting_for": None,
    "has_own_broker": False,
    "members": {},
    "tier": None,
    "goodput_bits_per_second": None,
    "version": None,
    "local": None,
    "backlog_updates": None,
    "backlog_bytes": None,
    "cell_bytes_up": None,
    "bytes_up": None,
    "bytes_down": None,
    "month_bytes": None,
}
AT_WORK = UNHEARD | {
    "is_online": True,
    "job": "fleet",
    "doing": "collecting; trains too",
    "waiting_for": "the cloud, out of reach for 40 s",
    "has_own_broker": True,
    "members": {"training": 5, "not_eligible": 1},
    "tier": "t3",
    "goodput_bits_per_second": 48_000_000,
    "version": 17,
    "local": 3,
    "backlog_updates": 1,
    "backlog_bytes": 52_000,
    "cell_bytes_up": 9,
    "bytes_up": 1,
    "bytes_down": 2,
    "month_bytes": 3,
}


def test_a_gateway_at_work_is_shown_with_its_cell_and_how_that_is_known() -> None:
    shown = row(AT_WORK)
    assert shown["members"] == {
        "text": "6 nodes",
        "href": "/console/fleet?cell=rsu-1&state=active",
        "note": "5 training, 1 not eligible, seen through it",
    }
    assert shown["doing"] == {
        "text": "collecting",
        "tone": "good",
        "note": "trains too; waits for the cloud, out of reach for 40 s",
    }
    assert (shown["cell_bytes_up"], shown["bytes_up"]) == (9, 1)
    assert (shown["backlog"], shown["uplink"]) == ("1 update, 52 kB", "t3, 48 Mbit/s")
    assert shown["version"] == "17, and 3 models of its own"


def test_a_gateway_that_was_never_heard_is_shown_as_offline_without_figures() -> None:
    shown = row(UNHEARD)
    assert (shown["doing"]["text"], shown["members"]["text"]) == ("offline", "0 nodes")
    assert not shown.keys() & {"version", "backlog", "uplink", "bytes_up"}


def test_a_revoked_gateway_is_shown_as_that() -> None:
    assert row(AT_WORK | {"state": "revoked"})["doing"]["text"] == "revoked"
