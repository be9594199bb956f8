"""The control plane's promises, through its API, on SQLite and on PostgreSQL."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import schemathesis
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from cryptography import x509
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, assume, given, settings
from hypothesis.strategies import SearchStrategy
from safetensors.numpy import load
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance
from sqlalchemy import text
from sqlalchemy.exc import DatabaseError

from hetertrain.core.layout import ParameterLayout
from hetertrain.core.update import Checkpoint
from hetertrain.errors import CredentialError
from hetertrain.wire.frames import AggregatorStatus, NodeState
from hetertrain_cloud.checkpoints import CheckpointStore
from hetertrain_cloud.control import trail
from hetertrain_cloud.control.access import node_rights
from hetertrain_cloud.control.api.convention import Limiter
from hetertrain_cloud.control.authority import Authority
from hetertrain_cloud.control.problems import ProblemError
from hetertrain_cloud.control.tables import Table
from hetertrain_cloud.history import append_line
from tests.control import PASSWORD, TASK, Bench

EXAMPLES = 10
JOB = {"name": "fleet", "specification": {"task": TASK}}


def code(response: Any) -> str:
    assert response.headers["content-type"] == "application/problem+json"
    return str(response.json()["code"])


# Accounts


def test_the_first_admin_needs_the_one_time_token_and_there_is_no_second(bench: Bench) -> None:
    client = bench.client(None)
    bench.plane.bootstrap_file.write_text("the token")
    body = {"name": "anna", "password": PASSWORD}

    assert code(client.post("/api/v1/bootstrap", json=body | {"token": "guess"})) == (
        "bootstrap_refused"
    )
    assert client.post("/api/v1/bootstrap", json=body | {"token": "the token"}).status_code == 201
    again = client.post("/api/v1/bootstrap", json=body | {"token": "the token"})
    assert code(again) == "bootstrap_done"
    assert not bench.plane.bootstrap_file.exists()


def test_five_wrong_passwords_lock_an_account_for_a_while(bench: Bench) -> None:
    bench.client("viewer")
    client = bench.client(None)
    right = {"name": "a-viewer", "password": PASSWORD}
    wrong = right | {"password": "not the right one"}

    refused = [code(client.post("/api/v1/sessions", json=wrong)) for _ in range(5)]
    locked = client.post("/api/v1/sessions", json=right)
    bench.clock.move(minutes=16)
    later = client.post("/api/v1/sessions", json=right)

    assert refused == ["credential_invalid"] * 5
    assert code(locked) == "account_locked"
    assert int(locked.headers["retry-after"]) > 0
    assert later.status_code == 201


def test_a_session_changes_nothing_without_its_csrf_token_and_ends(bench: Bench) -> None:
    bench.client("operator")
    client = bench.client(None)
    login = client.post("/api/v1/sessions", json={"name": "a-operator", "password": PASSWORD})
    csrf = {"X-CSRF-Token": login.json()["csrf_token"]}

    assert client.get("/api/v1/claims").status_code == 200
    assert code(client.post("/api/v1/jobs", json=JOB)) == "csrf_token_missing"
    assert client.post("/api/v1/jobs", json=JOB, headers=csrf).status_code == 201
    assert client.delete("/api/v1/sessions/current", headers=csrf).status_code == 204
    assert code(client.get("/api/v1/claims")) == "credential_missing"


def test_a_session_is_over_after_its_time(bench: Bench) -> None:
    bench.client("viewer")
    client = bench.client(None)
    client.post("/api/v1/sessions", json={"name": "a-viewer", "password": PASSWORD})
    bench.clock.move(hours=9)
    # The cookie is the browser's to keep; the server has the last word.
    assert code(client.get("/api/v1/me")) == "credential_invalid"


def test_a_viewer_can_change_nothing(bench: Bench) -> None:
    schema = bench.app.openapi()
    viewer = bench.client("viewer")
    of_ones_own = {
        "/api/v1/tokens",
        "/api/v1/tokens/{identifier}",
        "/api/v1/sessions/current",
        "/api/v1/me/filters/{name}",
    }
    public = {"/api/v1/bootstrap", "/api/v1/sessions", "/api/v1/enrolments", "/api/v1/renewals"}
    bodies: dict[str, Any] = {
        "/api/v1/users": {"name": "eve", "password": PASSWORD, "role": "admin"},
        "/api/v1/users/{name}": {"role": "admin"},
        "/api/v1/claims": {"role": "vehicle"},
        "/api/v1/nodes/{name}": {"labels": {}},
        "/api/v1/nodes/actions": {"action": "revoke", "nodes": ["x"]},
        "/api/v1/jobs": JOB,
        "/api/v1/jobs/{name}": JOB["specification"],
    }
    changes = [
        (method, path)
        for path, operations in schema["paths"].items()
        for method in operations
        if method != "get" and path not in public | of_ones_own
    ]
    assert len(changes) >= 15
    for method, path in changes:
        url = path.format(name="x", identifier="x", version=1)
        response = viewer.request(method, url, json=bodies.get(path), headers={"If-Match": "*"})
        assert (path, code(response)) == (path, "right_missing")


def test_a_token_has_no_more_rights_than_its_owner_and_ends_when_revoked(bench: Bench) -> None:
    viewer = bench.client("viewer")
    body = {"label": "mine", "scopes": ["nodes:read"]}

    assert code(viewer.post("/api/v1/tokens", json=body | {"scopes": ["jobs:write"]})) == (
        "right_missing"
    )
    made = viewer.post("/api/v1/tokens", json=body).json()
    narrow = bench.client(None)
    narrow.headers["Authorization"] = f"Bearer {made['secret']}"
    assert narrow.get("/api/v1/nodes").status_code == 200
    assert code(narrow.get("/api/v1/jobs")) == "right_missing"
    assert viewer.delete(f"/api/v1/tokens/{made['token']['id']}").status_code == 204
    assert code(narrow.get("/api/v1/nodes")) == "credential_invalid"


def test_a_token_outlives_what_it_was_made_with_in_no_way(bench: Bench) -> None:
    admin = bench.client("admin")
    body = {"label": "prometheus", "scopes": ["metrics:read"], "days": 366}

    def client(made: dict[str, Any]) -> TestClient:
        child = bench.client(None)
        child.headers["Authorization"] = f"Bearer {made['secret']}"
        return child

    first = admin.post("/api/v1/tokens", json=body | {"days": 1}).json()
    thief = client(first)
    second = thief.post("/api/v1/tokens", json=body).json()
    listed = admin.get("/api/v1/tokens").json()["items"]
    (others,) = [token["id"] for token in listed if token["label"] == "test"]

    assert second["token"]["expires_at"] == first["token"]["expires_at"]
    assert code(thief.delete(f"/api/v1/tokens/{others}")) == "token_unknown"
    admin.delete(f"/api/v1/tokens/{first['token']['id']}")
    assert code(client(second).get("/metrics")) == "credential_invalid"


def test_a_new_password_ends_sessions_and_tokens(bench: Bench) -> None:
    viewer, admin = bench.client("viewer"), bench.client("admin")
    change = {"password": "another long password"}
    admin.patch("/api/v1/users/a-viewer", json=change, headers={"If-Match": "*"})
    assert code(viewer.get("/api/v1/nodes")) == "credential_invalid"


def test_the_last_admin_cannot_be_taken_away(bench: Bench) -> None:
    admin = bench.client("admin")
    last = admin.patch("/api/v1/users/a-admin", json={"role": "viewer"}, headers={"If-Match": "*"})
    assert code(last) == "last_admin"
    assert "users:write" in admin.get("/api/v1/me").json()["rights"]


def test_calls_without_a_credential_are_limited_by_address() -> None:
    limiter = Limiter(clock=lambda: 0.0)
    for _ in range(10):
        limiter.check("login", "10.0.0.1", 10)
    with pytest.raises(ProblemError, match="at most 10 a minute"):
        limiter.check("login", "10.0.0.1", 10)
    limiter.check("login", "10.0.0.2", 10)


# Enrolment


def test_a_node_enrols_once_with_its_own_key_and_a_repeat_is_harmless(any_bench: Bench) -> None:
    bench = any_bench
    client = bench.client()
    secret = bench.claim(client, labels={"region": "north"})
    body = {"claim": secret, "request": bench.request("car-1")}

    first = client.post("/api/v1/enrolments", json=body)
    again = client.post("/api/v1/enrolments", json=body)
    other = client.post("/api/v1/enrolments", json=body | {"request": bench.request("car-2")})

    certificate = x509.load_pem_x509_certificate(first.json()["certificate"].encode())
    authority = x509.load_pem_x509_certificate(first.json()["authority"].encode())
    certificate.verify_directly_issued_by(authority)
    assert certificate.subject.rfc4514_string() == "CN=car-1"
    assert again.json()["certificate"] == first.json()["certificate"]
    assert code(other) == "claim_used_up"
    shown = client.get("/api/v1/nodes/car-1").json()
    assert (shown["state"], shown["labels"]) == ("active", {"region": "north"})


def test_a_claim_that_is_over_is_refused_with_the_reason(bench: Bench) -> None:
    client = bench.client()
    expired, revoked = bench.claim(client, hours=1), bench.claim(client, hours=100)
    bench.clock.move(hours=2)
    client.delete(f"/api/v1/claims/{revoked.split('.')[1]}")

    def refusal(claim: str) -> str:
        body = {"claim": claim, "request": bench.request("car-1")}
        return code(client.post("/api/v1/enrolments", json=body))

    assert refusal(expired) == "claim_expired"
    assert refusal(revoked) == "claim_revoked"


def test_a_claim_that_was_guessed_or_is_another_nodes_is_refused(bench: Bench) -> None:
    client = bench.client()
    parts = bench.claim(client, node="car-1").split(".")
    guessed = ".".join([parts[0], parts[1], "x" * len(parts[2]), parts[3]])
    request = bench.request("car-1")
    of_another = {"claim": ".".join(parts), "request": bench.request("car-2")}

    assert code(client.post("/api/v1/enrolments", json={"claim": guessed, "request": request})) == (
        "claim_refused"
    )
    assert code(client.post("/api/v1/enrolments", json=of_another)) == "claim_for_another"


def test_nobody_takes_an_enrolled_nodes_name_without_a_claim_for_it(bench: Bench) -> None:
    client = bench.client()
    bench.enrol(client, "car-1")
    request = bench.request("car-1", key="thief")
    with_any = {"claim": bench.claim(client, uses=5), "request": request}
    with_its_own = {"claim": bench.claim(client, node="car-1"), "request": request}

    assert code(client.post("/api/v1/enrolments", json=with_any)) == "node_exists"
    assert client.post("/api/v1/enrolments", json=with_its_own).status_code == 200


@pytest.mark.parametrize("name", ["aggregator", "control", "a/b", "+", "#", "a b", "ä"])
def test_a_name_that_the_broker_would_misread_is_refused(bench: Bench, name: str) -> None:
    client = bench.client()
    body = {"claim": bench.claim(client), "request": bench.request(name, key="any")}
    assert code(client.post("/api/v1/enrolments", json=body)) == "name_invalid"


def test_a_node_waits_to_be_approved_where_its_claim_says_so(bench: Bench) -> None:
    client = bench.client()
    answer = bench.enrol(client, "car-1", needs_approval=True)
    assert (answer["state"], answer["certificate"]) == ("pending", None)
    assert "car-1" not in bench.plane.rights()

    assert client.post("/api/v1/nodes/car-1/approve").json()["state"] == "active"
    assert "car-1" in bench.plane.rights()
    assert code(client.post("/api/v1/nodes/car-1/approve")) == "node_not_pending"


def test_a_certificate_is_renewed_with_the_enrolled_key_only(bench: Bench) -> None:
    client = bench.client()
    first = bench.enrol(client, "car-1")
    bench.clock.move(days=25)

    renewed = client.post("/api/v1/renewals", json={"request": bench.request("car-1")})
    thief = client.post("/api/v1/renewals", json={"request": bench.request("car-1", key="x")})
    client.post("/api/v1/nodes/car-1/revoke")
    revoked = client.post("/api/v1/renewals", json={"request": bench.request("car-1")})

    assert renewed.json()["expires_at"] > first["expires_at"]
    assert code(thief) == "node_refused"
    assert code(revoked) == "node_refused"


def test_a_revoked_node_has_no_rights_and_its_certificates_are_on_the_list(bench: Bench) -> None:
    client = bench.client()
    pem = bench.enrol(client, "car-1")["certificate"]
    client.post("/api/v1/nodes/car-1/revoke")

    revoked = x509.load_pem_x509_crl(client.get("/api/v1/authority/revocations").content)
    serial = x509.load_pem_x509_certificate(pem.encode()).serial_number
    assert revoked.get_revoked_certificate_by_serial_number(serial) is not None
    assert "car-1" not in bench.plane.rights()
    again = bench.enrol(client, "car-1", node="car-1")
    assert again["state"] == "active"


def test_a_stolen_key_gets_no_rights_back_with_its_nodes_name(bench: Bench) -> None:
    client = bench.client()
    bench.enrol(client, "car-1")
    client.post("/api/v1/nodes/car-1/revoke")
    claim = bench.claim(client, node="car-1", hours=2000)
    body = {"claim": claim, "request": bench.request("car-1", key="new device")}

    assert code(client.post("/api/v1/enrolments", json=body)) == "old_certificate_valid"
    bench.clock.move(days=31)
    assert client.post("/api/v1/enrolments", json=body).status_code == 200


def test_the_authoritys_key_is_encrypted_and_survives_a_restart(
    bench: Bench, tmp_path: Path
) -> None:
    key = tmp_path / "authority" / "authority.key"
    assert b"ENCRYPTED" in key.read_bytes()
    assert key.stat().st_mode & 0o077 == 0
    again = Authority(tmp_path / "authority", bench.clock.now())
    assert again.pem == bench.plane.authority.pem
    (tmp_path / "authority" / "authority.passphrase").write_text("another")
    with pytest.raises(CredentialError, match="passphrase"):
        Authority(tmp_path / "authority", bench.clock.now())


def test_a_vehicle_may_speak_in_its_own_name_and_hear_its_jobs_only() -> None:
    rights = node_rights("car-1", "vehicle", ["fleet"])
    assert rights.publish == {"ht/1/node/car-1/state", "ht/1/fleet/+/up/+/car-1"}
    assert rights.subscribe == {
        "ht/1/node/car-1/in",
        "ht/1/node/car-1/state",
        "ht/1/fleet/+/down/+",
        "ht/1/fleet/+/sync",
        "ht/1/fleet/order",
    }


# Jobs


def test_labels_decide_which_jobs_a_node_may_hear(bench: Bench) -> None:
    client = bench.client()
    north = {"name": "north", "specification": {"task": TASK, "eligible_labels": {"r": "n"}}}
    client.post("/api/v1/jobs", json=north)
    client.post("/api/v1/jobs", json=JOB)

    assert bench.enrol(client, "car-1", labels={"r": "n"})["jobs"] == ["fleet", "north"]
    assert bench.enrol(client, "car-2", labels={"r": "s"})["jobs"] == ["fleet"]
    client.patch("/api/v1/nodes/car-2", json={"labels": {"r": "n"}}, headers={"If-Match": '"1"'})
    assert "ht/1/north/+/sync" in bench.plane.rights()["car-2"].subscribe


def test_a_job_says_why_it_does_not_go_on(bench: Bench) -> None:
    client = bench.client()

    def waiting() -> str:
        return str(client.get("/api/v1/jobs/fleet").json()["waiting_for"]["code"])

    client.post("/api/v1/jobs", json=JOB)
    bench.enrol(client, "car-0")
    assert waiting() == "job_stopped"
    client.post("/api/v1/jobs/fleet/start")
    assert waiting() == "aggregator_starting"
    seen = {"job": "fleet", "cell": "cloud", "tier": "t2", "role": "vehicle", "is_online": True}
    for number, speed in enumerate((52, 70, 0)):
        resting = f"Vehicle.Speed < 1: it is {speed}"
        doing = {"doing": "not_eligible", "waiting_for": resting} if speed else {}
        bench.plane.live.see(NodeState(node=f"car-{number}", **seen, **doing))
    bench.plane.live.hear(
        AggregatorStatus(
            job="fleet",
            cell="cloud",
            version=1,
            elapsed_seconds=1.0,
            sync=0,
            sync_in_seconds=None,
            is_syncing=False,
            active=1,
            open_updates=1,
            metrics={},
            updates_by_lag={},
            refused={},
            waiting_code="updates",
            waiting_for="2 needed, 1 present",
        )
    )
    text = client.get("/api/v1/jobs/fleet").json()["waiting_for"]["text"]
    assert text.startswith("2 needed, 1 present (1 eligible nodes, 3 online, 2 not eligible now")
    assert text.endswith("2 of them by Vehicle.Speed < 1)")
    bench.plane.live.broker_error = "connection refused"
    assert waiting() == "broker_unreachable"
    assert client.post("/api/v1/jobs/fleet/pause").status_code == 200
    assert waiting() == "job_paused"


@pytest.mark.parametrize(
    "specification",
    [
        {"task": "no-colon"},
        {"task": TASK, "stop_when": "accuracy ~ 3"},
        {"task": TASK, "cut_fraction": 1.5},
        {"task": TASK, "unknown": 1},
        {"task": TASK, "train_when": ["Vehicle.Speed is low"]},
    ],
)
def test_a_wrong_specification_is_refused_and_says_where(
    bench: Bench, specification: dict[str, Any]
) -> None:
    answer = bench.client().post(
        "/api/v1/jobs", json={"name": "fleet", "specification": specification}
    )
    assert code(answer) == "request_invalid"
    assert answer.json()["errors"][0]["where"].startswith("body.specification")


def test_versions_are_paged_newest_first_with_their_metrics_and_updates(
    bench: Bench, tmp_path: Path
) -> None:
    client = bench.client()
    client.post("/api/v1/jobs", json=JOB)
    directory = tmp_path / "jobs" / "fleet"
    directory.mkdir(parents=True)
    for version in range(1, 6):
        row = {
            "version": version,
            "elapsed_seconds": 1.0,
            "sync": None,
            "lineage": "l",
            "digest": "d",
            "contributions": [["car-1", version, version - 1, 10, 5]],
        }
        append_line(directory / "versions.jsonl", row)
    append_line(
        directory / "metrics.jsonl",
        {"version": 5, "elapsed_seconds": 1.0, "metrics": {"r2": 0.5}},
    )

    first = client.get("/api/v1/jobs/fleet/versions?limit=3").json()
    rest = client.get(f"/api/v1/jobs/fleet/versions?cursor={first['next_cursor']}").json()
    one = client.get("/api/v1/jobs/fleet/versions/5").json()

    assert [row["version"] for row in first["items"] + rest["items"]] == [5, 4, 3, 2, 1]
    assert first["items"][0]["metrics"] == {"r2": 0.5}
    assert one["contributions"][0] | {"lag": 0} == one["contributions"][0]
    assert code(client.get("/api/v1/jobs/fleet/versions/9")) == "version_unknown"
    assert code(client.post("/api/v1/jobs/fleet/versions/5/rollback")) == "version_unknown"


def test_a_model_is_downloaded_whole_or_in_parts_and_without_what_is_not_the_models(
    bench: Bench, tmp_path: Path
) -> None:
    client = bench.client()
    client.post("/api/v1/jobs", json=JOB)
    layout = ParameterLayout.of({"w": np.zeros((4, 2), np.float32)}, {"w"}, ())
    checkpoint = Checkpoint(3, np.arange(8, dtype=np.float32), np.empty(0, np.int64))
    store = CheckpointStore(tmp_path / "jobs" / "fleet" / "checkpoints", layout)
    store.save(checkpoint, {"secret": "contributors"}, {"sums": np.zeros(9)})
    url = "/api/v1/jobs/fleet/versions/3/model"

    whole = client.get(url)
    part = client.get(url, headers={"Range": "bytes=10-19", "If-Range": whole.headers["etag"]})
    beyond = client.get(url, headers={"Range": "bytes=999999-"})

    assert list(load(whole.content)) == ["w"]
    assert b"contributors" not in whole.content
    assert (part.status_code, part.content) == (206, whole.content[10:20])
    assert beyond.status_code == 416
    promoted = client.post("/api/v1/jobs/fleet/versions/3/promote").json()
    assert promoted["promoted"] == [3]


# What holds everywhere


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
    for hidden in (secret, made["secret"].rpartition("_")[2], PASSWORD):
        assert hidden.encode() not in dump


def test_figures_for_prometheus_need_a_token(bench: Bench) -> None:
    bench.enrol(bench.client(), "car-1")
    assert code(bench.client(None).get("/metrics")) == "credential_missing"
    text = bench.client("viewer").get("/metrics").text
    assert 'hetertrain_nodes{role="vehicle",state="active"} 1.0' in text


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


def test_a_certificate_is_valid_for_clocks_that_are_a_little_behind(bench: Bench) -> None:
    pem = bench.enrol(bench.client(), "car-1")["certificate"]
    begins = x509.load_pem_x509_certificate(pem.encode()).not_valid_before_utc
    assert bench.clock.now() - begins >= datetime.timedelta(minutes=5)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_the_api_answers_as_its_description_says(bench: Bench, mode: GenerationMode) -> None:
    client = bench.client()
    bench.enrol(client, "car-1")
    client.post("/api/v1/jobs", json=JOB)
    # Events would be waited for as long as was asked for.
    schema = schemathesis.openapi.from_asgi("/openapi.json", bench.app)
    operations = [each.ok() for each in schema.exclude(path="/api/v1/events").get_all_operations()]

    for operation in operations:
        if mode is GenerationMode.POSITIVE or operation.body or operation.query:
            converse(operation.as_strategy(generation_mode=mode), dict(client.headers))
    assert len(operations) > 35


def vanishes(value: object) -> bool:
    """Tell whether nothing of a value stands in an address."""
    if isinstance(value, dict):
        value = list(value.values())
    return value is None or (isinstance(value, list) and all(map(vanishes, value)))


def converse(cases: SearchStrategy[Case], headers: dict[str, str]) -> None:
    authorization = {"Authorization": headers["authorization"]}

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def check(case: Case) -> None:
        # A wrong value that no address can carry makes a request that is right.
        assume(not any(map(vanishes, (case.query or {}).values())))
        # What is well formed may still be refused, as a certificate request that is none.
        case.call_and_validate(headers=authorization, excluded_checks=[positive_data_acceptance])

    check()
