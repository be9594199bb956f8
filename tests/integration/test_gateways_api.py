"""What the API says of gateways and of the members of their cells."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient

from hetertrain.wire.messages import CellMembers, Member
from hetertrain_cloud.control.search import members_known
from tests.builders import make_status
from tests.control import Bench, enrol, say


def tell(bench: Bench, gateway: str, number: int, *members: Member) -> None:
    """Say what a gateway says of its cell; of nodes that are enrolled, as the service does."""
    report = CellMembers(job="fleet", cell=gateway, number=number, part=0, parts=1, members=members)
    with bench.plane.database.read() as transaction:
        known = members_known(transaction, gateway, [member.node for member in members])
    bench.plane.live.hear_members(report, known)


# Gateways


@pytest.fixture
def cells(any_bench: Bench) -> tuple[Bench, TestClient]:
    """Three gateways, of which one has a broker of its own, and their vehicles; and a viewer."""
    client = any_bench.client()
    enrol(any_bench, client, ["rsu-1", "rsu-2", "rsu-3"], role="edge")
    enrol(any_bench, client, ["car-1", "car-2", "car-3"])
    gateway = {"role": "edge", "doing": "collecting; trains too", "version": 7, "bytes_up": 10}
    say(any_bench, "rsu-1", **gateway, backlog_updates=2, backlog_bytes=99, waiting_for="the cloud")
    say(any_bench, "rsu-2", **gateway)
    say(any_bench, "car-3", cell="rsu-2", doing="training")
    training, resting = (
        Member(node=n, tier="t1", doing=d) for n, d in (("car-1", "training"), ("car-2", "resting"))
    )
    stranger = Member(node="stranger", tier="t1", doing="training")
    tell(any_bench, "rsu-1", 1, training, resting, stranger)
    return any_bench, any_bench.client("viewer")


def test_gateways_are_listed_with_their_cells_and_what_they_have_still_to_deliver(
    cells: tuple[Bench, TestClient],
) -> None:
    found = {each["name"]: each for each in cells[1].get("/api/v1/gateways").json()["items"]}
    assert found.keys() == {"rsu-1", "rsu-2", "rsu-3"}
    own, shared, unheard = (found[f"rsu-{number}"] for number in (1, 2, 3))
    assert own["members"] == {"resting": 1, "training": 1}
    assert (own["has_own_broker"], own["is_online"], own["job"]) == (True, True, "fleet")
    assert (own["backlog_updates"], own["backlog_bytes"], own["version"]) == (2, 99, 7)
    assert (own["bytes_up"], own["bytes_down"], own["waiting_for"]) == (10, 0, "the cloud")
    assert (shared["has_own_broker"], shared["members"]) == (False, {"training": 1})
    assert (unheard["is_online"], unheard["job"], unheard["members"]) == (False, None, {})


def test_a_gateways_local_versions_and_what_its_cell_sent_are_shown_while_it_speaks(
    cells: tuple[Bench, TestClient],
) -> None:
    bench, viewer = cells
    status = make_status(cell="rsu-1", version=7, active=2, local=3, uplink_bytes=500)
    bench.plane.live.hear(status)
    found = viewer.get("/api/v1/gateways?limit=2").json()
    assert [each["local"] for each in found["items"]] == [3, None]
    assert [each["cell_bytes_up"] for each in found["items"]] == [500, None]
    rest = viewer.get(f"/api/v1/gateways?cursor={found['next_cursor']}").json()
    assert [each["name"] for each in rest["items"]] == ["rsu-3"]


def test_members_of_a_cell_with_its_own_broker_are_nodes_like_others(
    cells: tuple[Bench, TestClient],
) -> None:
    found = cells[1].get("/api/v1/nodes?cell=rsu-1").json()["items"]
    assert [(node["name"], node["live"]["via"]) for node in found] == [
        ("car-1", "rsu-1"),
        ("car-2", "rsu-1"),
    ]
    assert all(node["live"]["is_online"] for node in found)
    assert cells[1].get("/api/v1/nodes/car-3").json()["live"]["via"] == ""
    assert cells[1].get("/api/v1/fleet").json()["by_cell"]["rsu-1"] == 2


def test_a_vehicle_or_a_revoked_gateway_has_no_word_in_who_is_in_a_cell(
    cells: tuple[Bench, TestClient],
) -> None:
    bench, viewer = cells
    assert bench.client().post("/api/v1/nodes/rsu-2/revoke").status_code == 200
    for teller in ("rsu-2", "car-1", "stranger"):
        tell(bench, teller, 1, Member(node="car-2", tier="t1", doing="training"))
    assert viewer.get("/api/v1/nodes/car-2").json()["live"]["via"] == "rsu-1"


def test_a_member_that_was_revoked_is_not_told_of_any_more(
    cells: tuple[Bench, TestClient],
) -> None:
    bench, viewer = cells
    bench.client().post("/api/v1/nodes/car-1/revoke")
    clock = bench.plane.live.clock
    bench.plane.live.clock = lambda: clock() + 10  # Reports are seconds apart.
    tell(bench, "rsu-1", 2, Member(node="car-1", tier="t1", doing="training"))
    assert not viewer.get("/api/v1/nodes/car-1").json()["live"]["is_online"]


# Lists and counts
