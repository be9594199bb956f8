"""What holds everywhere in the control plane, on SQLite and on PostgreSQL."""

from __future__ import annotations

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text
from sqlalchemy.exc import DatabaseError

from hetertrain.wire.messages import NodeState
from hetertrain_cloud.control import trail
from hetertrain_cloud.control.tables import Table
from tests.control import PASSWORD, Bench, code


def test_who_changes_what_another_has_changed_meanwhile_is_told(any_bench: Bench) -> None:
    client = any_bench.client()
    any_bench.enrol(client, "car-1")
    etag = client.get("/api/v1/nodes/car-1").headers["etag"]
    body = {"labels": {"a": "b"}}

    assert code(client.patch("/api/v1/nodes/car-1", json=body)) == "if_match_missing"
    first = client.patch("/api/v1/nodes/car-1", json=body, headers={"If-Match": etag})
    second = client.patch("/api/v1/nodes/car-1", json=body, headers={"If-Match": etag})
    assert first.status_code == 200
    assert code(second) == "changed_meanwhile"


def test_a_repeated_request_is_done_once_and_shows_no_secret_again(any_bench: Bench) -> None:
    client = any_bench.client()
    key = {"Idempotency-Key": "once"}
    body = {"role": "vehicle"}
    first = client.post("/api/v1/claims", json=body, headers=key).json()
    again = client.post("/api/v1/claims", json=body, headers=key).json()
    other = client.post("/api/v1/claims", json={"role": "edge"}, headers=key)

    assert again == {"claim": first["claim"], "secret": None}
    assert code(other) == "idempotency_key_used"
    assert len(client.get("/api/v1/claims").json()["items"]) == 1


def test_pages_of_nodes_are_whole_though_nodes_come_meanwhile(any_bench: Bench) -> None:
    client = any_bench.client()
    secret = any_bench.claim(client, uses=100)
    for number in range(5):
        body = {"claim": secret, "request": any_bench.request(f"car-{number}", key="all")}
        client.post("/api/v1/enrolments", json=body)
    first = client.get("/api/v1/nodes?limit=2").json()
    body = {"claim": secret, "request": any_bench.request("car-00", key="all")}
    client.post("/api/v1/enrolments", json=body)
    rest = client.get(f"/api/v1/nodes?limit=10&cursor={first['next_cursor']}").json()

    names = [node["name"] for node in first["items"] + rest["items"]]
    assert names == ["car-0", "car-1", "car-2", "car-3", "car-4"]
    assert rest["next_cursor"] is None


def test_nodes_are_filtered_by_state_role_label_and_name(any_bench: Bench) -> None:
    client = any_bench.client()
    any_bench.enrol(client, "car-1", labels={"region": "north"})
    any_bench.enrol(client, "car-2", labels={"region": "south"})
    any_bench.enrol(client, "edge-1", role="edge")
    client.post("/api/v1/nodes/car-2/revoke")

    def names(query: str) -> list[str]:
        return [n["name"] for n in client.get(f"/api/v1/nodes?{query}").json()["items"]]

    assert names("state=revoked") == ["car-2"]
    assert names("role=edge") == ["edge-1"]
    assert names("label=region=north") == ["car-1"]
    assert names("prefix=car") == ["car-1", "car-2"]


def test_the_audit_trail_cannot_be_changed_and_shows_where_it_was(any_bench: Bench) -> None:
    client = any_bench.client()
    any_bench.enrol(client, "car-1")
    database = any_bench.plane.database
    change = text("UPDATE audit_entry SET actor = 'nobody' WHERE number = 3")
    with pytest.raises(DatabaseError, match="append-only"), database.begin() as transaction:
        transaction.execute(change)

    assert client.get("/api/v1/audit/verification").json()["broken_at"] is None
    with database.begin() as transaction:
        if database.url.get_backend_name() == "sqlite":
            transaction.execute(text("DROP TRIGGER audit_entry_no_update"))
        else:
            transaction.execute(
                text("ALTER TABLE audit_entry DISABLE TRIGGER audit_entry_append_only")
            )
        transaction.execute(change)
    assert client.get("/api/v1/audit/verification").json()["broken_at"] == 3


def test_a_removed_end_of_the_audit_trail_is_noticed(bench: Bench) -> None:
    client = bench.client()
    bench.enrol(client, "car-1")
    with bench.plane.database.begin() as transaction:
        before = trail.verify(transaction)
        transaction.execute(text("DROP TRIGGER audit_entry_no_delete"))
        transaction.execute(text(f"DELETE FROM audit_entry WHERE number = {before.entries}"))
        assert trail.verify(transaction).broken_at == before.entries


def test_the_audit_trail_says_who_changed_what_from_what_to_what(bench: Bench) -> None:
    client = bench.client("operator")
    bench.enrol(client, "car-1")
    client.patch("/api/v1/nodes/car-1", json={"labels": {"a": "b"}}, headers={"If-Match": "*"})
    admin = bench.client("admin")
    newest = admin.get("/api/v1/audit?kind=node&object=car-1").json()["items"][0]

    assert (newest["actor"], newest["action"]) == ("a-operator", "node_relabelled")
    assert (newest["before"]["labels"], newest["after"]["labels"]) == ({}, {"a": "b"})


def test_migrations_give_the_schema_that_the_code_expects(any_bench: Bench) -> None:
    with any_bench.plane.database.engine.begin() as connection:
        differences = compare_metadata(MigrationContext.configure(connection), Table.metadata)
    assert differences == []
    any_bench.plane.database.migrate()  # Again, with what is there: nothing to do.


def test_secrets_are_nowhere_in_the_database(bench: Bench) -> None:
    client = bench.client()
    secret = bench.claim(client).split(".")[2]
    made = client.post("/api/v1/tokens", json={"label": "x", "scopes": ["nodes:read"]}).json()
    dump = b"".join(path.read_bytes() for path in bench.directory.glob("control.db*"))
    for hidden in (secret, made["secret"].split("_", 2)[2], PASSWORD):
        assert hidden.encode() not in dump


def test_figures_for_prometheus_need_a_token(bench: Bench) -> None:
    bench.enrol(bench.client(), "car-1")
    assert code(bench.client(None).get("/metrics")) == "credential_missing"
    text = bench.client("viewer").get("/metrics").text
    assert 'hetertrain_nodes{role="vehicle",state="active"} 1.0' in text
    assert "hetertrain_node_events_lost 0.0" in text


def test_readiness_names_what_is_wrong(bench: Bench) -> None:
    client = bench.client(None)
    assert client.get("/readyz").json()["is_ready"] is True
    bench.plane.live.broker_error = "connection refused"
    assert client.get("/readyz").status_code == 503
    assert client.get("/readyz").json()["broker"] == "connection refused"
    assert client.get("/healthz").status_code == 200


def test_live_events_carry_the_newest_state_of_what_changed(bench: Bench) -> None:
    state = {"node": "car-1", "job": "fleet", "cell": "cloud", "tier": "t2", "role": "vehicle"}
    bench.plane.live.see(NodeState(**state, is_online=True, doing="training"))
    text = bench.client().get("/api/v1/events?seconds=0.1").text
    assert "event: node" in text
    assert '"doing": "training"' in text


def test_a_body_that_is_too_large_is_refused(bench: Bench) -> None:
    answer = bench.client().post("/api/v1/jobs", content=b"x" * (65 << 10))
    assert code(answer) == "body_too_large"
