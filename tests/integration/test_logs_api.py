"""Who may ask for the end of a node's log, and what the API says where there is none."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

from hetertrain.wire.messages import CellMembers, LogLines, Member, NodeState
from hetertrain_cloud.control.log_desk import LogDesk
from tests.control import Bench, code

PATH = "/api/v1/nodes/car-1/log"
LINES = ("2026-01-01 agent_started", "\x1b[2Jcleared")


@pytest.fixture
def asked(bench: Bench) -> list[str]:
    """Nodes that were asked; each answers at once, and ``quiet`` does not share."""
    found: list[str] = []

    def send(node: str, number: int) -> None:
        found.append(node)
        is_shared = node != "quiet"
        lines = LINES if is_shared else ()
        said = LogLines(node=node, number=number, is_shared=is_shared, lines=lines)
        if node != "silent":
            desk.take(said)

    desk = bench.plane.logs = LogDesk(send)
    return found


def say(bench: Bench, node: str, **said: Any) -> None:
    usual: dict[str, Any] = {"job": "fleet", "cell": "cloud", "tier": "t2", "role": "vehicle"}
    bench.plane.live.see(NodeState(**usual | {"node": node, "is_online": True} | said))


def actions(client: TestClient) -> list[tuple[str, str, str]]:
    entries = client.get("/api/v1/audit?kind=node").json()["items"]
    found = [(e["action"], e["object"], e["actor"]) for e in entries]
    return [each for each in found if each[0] == "node_log_read"]


def test_an_operators_request_is_answered_and_stands_in_the_audit_trail(
    bench: Bench, asked: list[str]
) -> None:
    bench.enrol(bench.client(), "car-1")
    say(bench, "car-1")
    operator = bench.client("operator")
    found = operator.get(PATH).json()
    assert found["node"] == "car-1"
    assert found["lines"] == [LINES[0], " [2Jcleared"], "a terminal is told nothing"
    assert asked == ["car-1"]
    assert actions(operator) == [("node_log_read", "car-1", "a-operator")]
    events = operator.get("/api/v1/nodes/car-1/events").json()["items"]
    assert (events[0]["kind"], events[0]["actor"]) == ("log_read", "a-operator")


def test_a_viewer_may_not_ask_and_the_node_hears_nothing_of_it(
    bench: Bench, asked: list[str]
) -> None:
    bench.enrol(bench.client(), "car-1")
    say(bench, "car-1")
    assert code(bench.client("viewer").get(PATH)) == "right_missing"
    assert (asked, actions(bench.client())) == ([], [])


def test_each_reason_why_there_is_no_log_has_its_own_code(bench: Bench, asked: list[str]) -> None:
    client = bench.client()
    for name in ("car-1", "quiet", "behind", "silent"):
        bench.enrol(client, name)
    bench.enrol(client, "rsu-1", role="edge")
    say(bench, "rsu-1", role="edge")
    for name in ("quiet", "silent"):
        say(bench, name)
    member = Member(node="behind", tier="t1")
    report = CellMembers(job="fleet", cell="rsu-1", number=1, part=0, parts=1, members=(member,))
    bench.plane.live.hear_members(report, {"behind"})
    refusals = {
        name: client.get(f"/api/v1/nodes/{name}/log")
        for name in ("nobody", "car-1", "quiet", "behind", "silent")
    }
    assert {name: (r.status_code, code(r)) for name, r in refusals.items()} == {
        "nobody": (404, "node_unknown"),
        "car-1": (409, "node_offline"),
        "quiet": (409, "log_not_shared"),
        "behind": (409, "node_behind_gateway"),
        "silent": (504, "node_silent"),
    }
    assert "share_log" in refusals["quiet"].json()["detail"]
    assert "rsu-1" in refusals["behind"].json()["detail"]
    assert asked == ["quiet", "silent"]
    assert {entry[1] for entry in actions(client)} == {"quiet", "silent"}


def test_without_a_broker_nobody_is_asked(bench: Bench, asked: list[str]) -> None:
    bench.enrol(bench.client(), "car-1")
    say(bench, "car-1")
    bench.plane.live.broker_error = "gone"
    response = bench.client().get(PATH)
    assert (response.status_code, code(response), asked) == (503, "broker_unreachable", [])
