"""What the API says of the fleet and does to many nodes, on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import event, func, insert, select, text
from sqlalchemy.exc import OperationalError

from hetertrain.errors import TransportError
from hetertrain_cloud.control import timeline
from hetertrain_cloud.control.access import Rights
from hetertrain_cloud.control.changes import Change
from hetertrain_cloud.control.database import Database
from hetertrain_cloud.control.tables import NodeEvent, Table, User
from tests.control import JOB, PASSWORD, Bench, enrol, say


class Broker:
    """A broker's rules, as far as it is told of them."""

    def __init__(self) -> None:
        self.rights: dict[str, Rights | None] = {}
        self.is_reached = True

    def reconcile(self, read: Callable[[], Any]) -> int:
        return len(read())

    def apply(self, user: str, read: Callable[[], Rights | None]) -> None:
        if not self.is_reached:
            raise TransportError("it does not answer")
        self.rights[user] = read()


def log_in(bench: Bench, role: str) -> TestClient:
    """Return a client with a session of a user of a role."""
    bench.client(role)  # Makes the user.
    client = TestClient(bench.app, base_url="https://testserver")
    login = client.post("/api/v1/sessions", json={"name": f"a-{role}", "password": PASSWORD})
    client.headers["X-CSRF-Token"] = login.json()["csrf_token"]
    return client


@pytest.fixture
def told(any_bench: Bench) -> tuple[Bench, TestClient]:
    """A fleet of which some nodes say something, and a viewer."""
    client = any_bench.client()
    enrol(any_bench, client, ["bus-1", "bus-2", "Bus-3"], labels={"region": "north"})
    enrol(any_bench, client, ["car-1", "car_2"], labels={"region": "south", "kind": "car"})
    client.post("/api/v1/nodes/bus-2/revoke")
    say(any_bench, "car-1", doing="training")
    any_bench.plane.save_seen()
    held = "Vehicle.Speed < 1: it is 52"
    gone: dict[str, Any] = {"doing": "link_closed", "waiting_for": held, "is_online": False}
    say(any_bench, "car-1", **gone, cell="rsu-1", version=7, updates=2)
    figures: dict[str, Any] = {"bytes_up": 10, "bytes_down": 1, "version": 7, "updates": 1}
    say(any_bench, "bus-1", doing="training", tier="t1", **figures)
    stopped: dict[str, Any] = {"doing": "not_eligible", "waiting_for": held, "job": "other"}
    say(any_bench, "Bus-3", **stopped, bytes_up=5, version=9, updates=4)
    say(any_bench, "bus-2", doing="training")
    say(any_bench, "stranger", doing="training")
    return any_bench, any_bench.client("viewer")


FOUND: dict[str, set[str]] = {
    "doing=training": {"bus-1", "bus-2"},
    "doing=training&state=active": {"bus-1"},
    "doing=offline": {"car-1", "car_2"},
    "doing=link_closed": {"car-1"},
    "tier=t1": {"bus-1"},
    "cell=rsu-1": {"car-1"},
    "job=other": {"Bus-3"},
    "is_online=true": {"bus-1", "bus-2", "Bus-3"},
    "is_online=false": {"car-1", "car_2"},
    "is_online=true&label=region=north&contains=BUS&state=active": {"bus-1", "Bus-3"},
    "contains=bus": {"bus-1", "bus-2", "Bus-3"},
    "held_by=Vehicle.Speed %3C 1": {"Bus-3"},
    "held_by=Vehicle.Speed %3C 2": set(),
    "contains=_": {"car_2"},
    "expires_within_days=29": set(),
    "expires_within_days=31": {"bus-1", "Bus-3", "car-1", "car_2"},
    "expires_within_days=31&is_online=true": {"bus-1", "Bus-3"},
}


def test_nodes_are_found_by_all_that_is_asked_for_and_counted(
    told: tuple[Bench, TestClient],
) -> None:
    answers = {query: told[1].get(f"/api/v1/nodes?{query}").json() for query in FOUND}
    found = {q: {node["name"] for node in answer["items"]} for q, answer in answers.items()}
    assert found == FOUND
    totals = {query: answer["total"] for query, answer in answers.items()}
    assert totals == {query: len(names) for query, names in FOUND.items()}


IN_ORDER = {
    "sort=bytes_up": ["bus-2", "car-1", "Bus-3", "bus-1", "car_2"],
    "sort=bytes_up&descending=true": ["bus-1", "Bus-3", "bus-2", "car-1", "car_2"],
    "sort=bytes_up&descending=true&is_online=true": ["bus-1", "Bus-3", "bus-2"],
    "sort=version": ["bus-1", "car-1", "Bus-3", "bus-2", "car_2"],
    "sort=version&descending=true": ["Bus-3", "bus-1", "car-1", "bus-2", "car_2"],
    "sort=updates&descending=true": ["Bus-3", "car-1", "bus-1", "bus-2", "car_2"],
    "sort=seen": ["car-1", "Bus-3", "bus-1", "bus-2", "car_2"],
    "sort=seen&descending=true": ["Bus-3", "bus-1", "bus-2", "car-1", "car_2"],
}


def test_nodes_are_sorted_by_what_they_said_and_who_said_nothing_is_last(
    told: tuple[Bench, TestClient],
) -> None:
    answers = {query: told[1].get(f"/api/v1/nodes?{query}").json() for query in IN_ORDER}
    found = {q: [node["name"] for node in answer["items"]] for q, answer in answers.items()}
    assert found == IN_ORDER


@pytest.mark.parametrize(
    "query",
    [
        "is_online=true",
        "",
        "sort=name&descending=true",
        "is_online=true&sort=name&descending=true",
        *IN_ORDER,
    ],
)
def test_pages_of_what_is_asked_for_are_whole_and_say_how_many_there_are(
    told: tuple[Bench, TestClient], query: str
) -> None:
    whole = told[1].get(f"/api/v1/nodes?{query}").json()
    names, cursor, totals = [], "", set()
    while cursor is not None:
        more = f"&cursor={cursor}" if cursor else ""
        page = told[1].get(f"/api/v1/nodes?limit=1&{query}{more}").json()
        names += [node["name"] for node in page["items"]]
        totals.add(page["total"])
        cursor = page["next_cursor"]
    assert names == [node["name"] for node in whole["items"]]
    assert totals == {len(names)}


def test_the_fleet_is_counted_as_lists_of_active_nodes_find_it(
    told: tuple[Bench, TestClient],
) -> None:
    viewer = told[1]
    fleet = viewer.get("/api/v1/fleet").json()

    assert fleet["by_state"] == {"active": 4, "revoked": 1}
    assert fleet["by_role"] == {"vehicle": 4}
    assert (fleet["online"], fleet["online_not_active"]) == (2, 2)
    assert fleet["by_doing"] == {"offline": 2, "not_eligible": 1, "training": 1}
    assert fleet["not_eligible_by_rule"] == {"Vehicle.Speed < 1": 1}
    assert fleet["labels"] == {"region": {"north": 2, "south": 2}, "kind": {"car": 2}}
    assert (fleet["bytes_up"], fleet["bytes_down"]) == (15, 1)
    assert fleet["certificates_expiring"] == 0
    menus = {"by_doing": "doing", "by_tier": "tier", "by_cell": "cell"}
    for menu, name in (menus | {"not_eligible_by_rule": "held_by"}).items():
        for choice, count in fleet[menu].items():
            asked = {"state": "active", name: choice}
            found = viewer.get("/api/v1/nodes", params=asked).json()
            assert (choice, found["total"]) == (choice, count)


def test_only_who_says_where_it_is_stands_on_the_map(told: tuple[Bench, TestClient]) -> None:
    bench, viewer = told
    say(bench, "bus-1", doing="training", latitude=48.1, longitude=11.5)
    say(bench, "car-1", is_online=False, latitude=48.2, longitude=0.0)
    say(bench, "stranger", latitude=1.0, longitude=1.0)
    every = viewer.get("/api/v1/fleet/positions").json()
    assert every["total"] == 2
    assert [(each["node"], each["doing"]) for each in every["items"]] == [
        ("bus-1", "training"),
        ("car-1", "offline"),
    ]
    found = viewer.get("/api/v1/fleet/positions?is_online=true").json()["items"]
    assert found == [{"node": "bus-1", "latitude": 48.1, "longitude": 11.5, "doing": "training"}]


def test_those_are_counted_for_which_all_that_is_asked_for_holds(
    told: tuple[Bench, TestClient],
) -> None:
    bench, viewer = told
    of_job = viewer.get("/api/v1/fleet?job=fleet").json()
    assert of_job["by_state"] == {"active": 2, "revoked": 1}
    assert of_job["by_doing"] == {"offline": 1, "training": 1}
    assert of_job["labels"] == {"kind": {"car": 1}, "region": {"north": 1, "south": 1}}
    north = viewer.get("/api/v1/fleet?label=region=north").json()
    assert north["by_doing"] == {"not_eligible": 1, "training": 1}
    assert (north["online"], north["online_not_active"]) == (2, 1)
    assert viewer.get("/api/v1/fleet?contains=car").json()["by_doing"] == {"offline": 2}
    bench.clock.move(days=24)
    assert viewer.get("/api/v1/fleet?contains=car").json()["certificates_expiring"] == 2


def test_a_list_by_what_nodes_do_takes_as_many_queries_whatever_the_fleets_size(
    bench: Bench,
) -> None:
    client = bench.client()
    enrol(bench, client, [f"car-{number:02}" for number in range(20)])
    statements: list[str] = []
    event.listen(
        bench.plane.database.engine,
        "before_cursor_execute",
        lambda _conn, _cursor, statement, *_: statements.append(statement),
    )
    for limit in (1, 20):
        client.get(f"/api/v1/nodes?is_online=false&limit={limit}")
    assert len([each for each in statements if " FROM node" in each.replace("\n", " ")]) == 4


# Explanations


def test_a_node_says_why_it_does_not_train(bench: Bench) -> None:
    client = bench.client()

    def why(node: str = "car-1") -> dict[str, Any]:
        answer: dict[str, Any] = client.get(f"/api/v1/nodes/{node}/explanation").json()
        return answer

    enrol(bench, client, ["car-1"])
    assert why()["summary"] == "There is no job yet."
    client.post("/api/v1/jobs", json=JOB)
    stopped = why()
    assert stopped["summary"] == "Job fleet is stopped."
    failing = next(check for check in stopped["checks"] if check["state"] == "failing")
    assert (failing["code"], failing["link"]) == ("job", "/jobs/fleet")
    assert client.get("/api/v1/nodes/nobody/explanation").status_code == 404


# Timelines


def test_a_nodes_timeline_has_what_was_done_to_it_and_what_it_said(any_bench: Bench) -> None:
    client, live = any_bench.client("operator"), any_bench.plane.live
    enrol(any_bench, client, ["car-1"])
    any_bench.clock.move(seconds=60)
    say(any_bench, "car-1", doing="training")
    say(any_bench, "car-1", doing="not_eligible", waiting_for="Vehicle.Speed < 1: it is 52")
    live.note("nobody", "online", "")
    any_bench.plane.save_changes()
    any_bench.clock.move(seconds=60)
    patch = {"labels": {"region": "north"}}
    client.patch("/api/v1/nodes/car-1", json=patch, headers={"If-Match": "*"})
    renewed = client.post("/api/v1/renewals", json={"request": any_bench.request("car-1", "all")})
    assert renewed.status_code == 200
    any_bench.clock.move(seconds=60)
    any_bench.plane.save_changes()

    def page(query: str, by: TestClient = client) -> dict[str, Any]:
        answer: dict[str, Any] = by.get(f"/api/v1/nodes/car-1/events?{query}").json()
        return answer

    lines = page("limit=10")["items"]
    assert [line["kind"] for line in lines] == ["renewed", "relabelled", "not_eligible", "enrolled"]
    assert (lines[1]["text"], lines[1]["actor"]) == ("region=north", "a-operator")
    assert lines[2]["text"] == "Vehicle.Speed < 1: it is 52"
    first = page("limit=3")
    rest = page(f"limit=3&cursor={first['next_cursor']}")
    assert first["items"] + rest["items"] == lines
    assert rest["next_cursor"] is None
    seen = page("limit=10", any_bench.client("viewer"))["items"]
    assert {line["actor"] for line in seen} == {None}


def test_the_newest_events_of_each_node_are_kept(
    any_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "KEPT_MAX", 3)
    client = any_bench.client()
    enrol(any_bench, client, ["car-1", "car-2"])
    any_bench.clock.move(seconds=60)
    for number in range(5):
        changes = [Change("car-1", f"kind-{number}", "", 0.0), Change("car-1", "also", "", 0.0)]
        if number == 0:
            changes.append(Change("car-2", "only", "", 0.0))
        with any_bench.plane.database.begin() as transaction:
            timeline.save(transaction, changes, any_bench.clock.now())

    with any_bench.plane.database.read() as transaction:
        query = select(NodeEvent.node, func.count()).group_by(NodeEvent.node)
        assert {row[0]: row[1] for row in transaction.execute(query)} == {"car-1": 3, "car-2": 1}
    newest = client.get("/api/v1/nodes/car-1/events?limit=2").json()["items"]
    assert [line["kind"] for line in newest] == ["also", "kind-4"]


def test_what_the_database_does_not_take_now_it_is_given_later(bench: Bench) -> None:
    client, plane = bench.client(), bench.plane
    enrol(bench, client, ["car-1"])
    bench.clock.move(seconds=60)
    plane.live.note("car-1", "renewed", "")
    with plane.database.begin() as transaction:
        transaction.execute(text("ALTER TABLE node_event RENAME TO away"))
    with pytest.raises(OperationalError):
        plane.save_changes()
    with plane.database.begin() as transaction:
        transaction.execute(text("ALTER TABLE away RENAME TO node_event"))
    plane.save_changes()
    lines = client.get("/api/v1/nodes/car-1/events").json()["items"]
    assert [line["kind"] for line in lines] == ["renewed", "enrolled"]


# Actions


def test_an_action_on_many_nodes_does_what_can_be_done_and_says_what_not(any_bench: Bench) -> None:
    client = any_bench.client("operator")
    broker = Broker()
    any_bench.plane.access = broker
    enrol(any_bench, client, ["car-1", "car-2"], needs_approval=True)
    enrol(any_bench, client, ["car-3"])

    def act(action: str, *nodes: str, **more: Any) -> list[tuple[str, bool, str]]:
        body = {"action": action, "nodes": nodes} | more
        results = client.post("/api/v1/nodes/actions", json=body).json()["results"]
        return [(each["node"], each["is_done"], each["code"]) for each in results]

    assert act("approve", "car-1", "nobody", "car-3", "car-1") == [
        ("car-1", True, "done"),
        ("nobody", False, "node_unknown"),
        ("car-3", False, "node_not_pending"),
    ]
    assert broker.rights["car-1"] is not None
    any_bench.plane.access_changed.clear()
    labels = {"region": "north", "kind": None}
    assert act("label", "car-1", "car-3", labels=labels) == [
        ("car-1", True, "done"),
        ("car-3", True, "done"),
    ]
    assert any_bench.plane.access_changed.is_set()
    assert client.get("/api/v1/nodes/car-3").json()["labels"] == {"region": "north"}
    assert act("label", "car-3", labels={"region": None, "kind": "car"})[0][1]
    assert client.get("/api/v1/nodes/car-3").json()["labels"] == {"kind": "car"}
    assert act("revoke", "car-1", "car-2") == [("car-1", True, "done"), ("car-2", True, "done")]
    assert broker.rights["car-1"] is broker.rights["car-2"] is None
    entries = client.get("/api/v1/audit?kind=node&object=car-1").json()["items"]
    assert [entry["action"] for entry in entries] == [
        "node_revoked",
        "node_relabelled",
        "node_approved",
        "node_enrolled",
    ]
    assert client.get("/api/v1/audit/verification").json()["broken_at"] is None


def test_a_broker_that_is_away_is_told_of_revoked_nodes_later(bench: Bench) -> None:
    client = bench.client()
    enrol(bench, client, ["car-1", "car-2"])
    broker = Broker()
    broker.is_reached = False
    bench.plane.access = broker
    bench.plane.access_changed.clear()
    body = {"action": "revoke", "nodes": ["car-1", "car-2"]}
    results = client.post("/api/v1/nodes/actions", json=body).json()["results"]
    assert {(each["is_done"], each["code"]) for each in results} == {(True, "broker_unreachable")}
    assert bench.plane.access_changed.is_set()
    assert client.get("/api/v1/nodes?state=revoked").json()["total"] == 2


@pytest.mark.parametrize(
    "body",
    [
        {"action": "label", "nodes": ["car-1"]},
        {"action": "revoke", "nodes": ["car-1"], "labels": {}},
        {"action": "revoke", "nodes": []},
        {"action": "revoke", "nodes": [f"car-{number}" for number in range(501)]},
        {"action": "paint", "nodes": ["car-1"]},
    ],
)
def test_a_wrong_action_is_refused_before_anything_is_done(
    bench: Bench, body: dict[str, Any]
) -> None:
    client = bench.client()
    assert client.post("/api/v1/nodes/actions", json=body).status_code == 422
    viewer = bench.client("viewer").post(
        "/api/v1/nodes/actions", json={"action": "revoke", "nodes": ["car-1"]}
    )
    assert viewer.json()["code"] == "right_missing"


def test_a_node_takes_no_more_labels_than_it_may_have(bench: Bench) -> None:
    client = bench.client()
    enrol(bench, client, ["car-1"], labels={f"a{number}": "x" for number in range(10)})
    body = {"action": "label", "nodes": ["car-1"], "labels": dict.fromkeys("bcdefgh", "x")}
    (result,) = client.post("/api/v1/nodes/actions", json=body).json()["results"]
    assert (result["is_done"], result["code"]) == (False, "labels_too_many")


# Saved filters


def test_anybody_with_a_login_keeps_filters_of_their_own(any_bench: Bench) -> None:
    viewer, operator = log_in(any_bench, "viewer"), log_in(any_bench, "operator")

    def names(client: TestClient) -> list[str]:
        return [item["name"] for item in client.get("/api/v1/me/filters").json()["items"]]

    kept = viewer.put("/api/v1/me/filters/Slow links", json={"query": "state=active&tier=t0"})
    assert kept.json()["query"] == "state=active&tier=t0"
    viewer.put("/api/v1/me/filters/Slow links", json={"query": "tier=t1"})
    viewer.put("/api/v1/me/filters/all", json={"query": ""})
    assert names(viewer) == ["Slow links", "all"]
    assert viewer.get("/api/v1/me/filters").json()["items"][0]["query"] == "tier=t1"
    assert names(operator) == []
    assert operator.delete("/api/v1/me/filters/all").status_code == 404
    assert viewer.delete("/api/v1/me/filters/all").status_code == 204
    assert names(viewer) == ["Slow links"]
    bad = viewer.put("/api/v1/me/filters/x", json={"query": "<script>"})
    assert bad.status_code == 422


def test_a_token_reads_its_users_filters_and_changes_none(bench: Bench) -> None:
    log_in(bench, "viewer").put("/api/v1/me/filters/mine", json={"query": "tier=t0"})
    token = bench.client("viewer")
    assert len(token.get("/api/v1/me/filters").json()["items"]) == 1
    assert token.delete("/api/v1/me/filters/mine").json()["code"] == "login_needed"
    assert token.put("/api/v1/me/filters/x", json={"query": ""}).json()["code"] == "login_needed"


def test_a_user_keeps_so_many_filters(bench: Bench) -> None:
    viewer = log_in(bench, "viewer")
    for number in range(50):
        viewer.put(f"/api/v1/me/filters/{number}", json={"query": ""})
    more = viewer.put("/api/v1/me/filters/more", json={"query": ""})
    assert more.json()["code"] == "filters_too_many"
    assert viewer.put("/api/v1/me/filters/7", json={"query": "tier=t0"}).status_code == 200


# The schema


def test_a_database_of_the_first_schema_keeps_what_it_has(any_bench: Bench) -> None:
    database = Database(any_bench.plane.database.url.render_as_string(hide_password=False))
    Table.metadata.drop_all(database.engine)
    with database.engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE alembic_version")
        if database.url.get_backend_name() == "postgresql":
            connection.exec_driver_sql("DROP FUNCTION audit_entry_refuse()")
    database.migrate("0001")
    row = {"name": "anna", "password_hash": "x", "role": "admin"}
    with database.begin() as transaction:
        transaction.execute(insert(User).values(**row, created_at=any_bench.clock.now()))
    database.migrate()
    with database.begin() as transaction:
        assert transaction.scalar(select(User.name)) == "anna"
        assert transaction.scalar(select(func.count()).select_from(NodeEvent)) == 0
    database.close()
