"""Who may log in at the control plane, with what rights, and for how long."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient
from httpx2 import Response

from hetertrain_cloud.control.api.convention import Limiter
from hetertrain_cloud.control.problems import ProblemError
from tests.control import JOB, PASSWORD, Bench, code


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


def test_who_changes_the_own_password_stays_and_whatever_knew_the_old_one_is_out(
    bench: Bench,
) -> None:
    token = bench.client("viewer")
    mine, other = bench.client(None), bench.client(None)
    credentials = {"name": "a-viewer", "password": PASSWORD}
    for client in (mine, other):
        csrf_token = client.post("/api/v1/sessions", json=credentials).json()["csrf_token"]
        client.headers["X-CSRF-Token"] = csrf_token
    change = {"old": PASSWORD, "new": "another horse battery"}

    def put(client: TestClient, **changes: str) -> Response:
        return client.put("/api/v1/me/password", json=change | changes)

    assert code(put(token)) == "session_needed"
    assert code(put(mine, old="a guess of somebody")) == "password_wrong"
    assert put(mine, new="short").status_code == 422
    assert put(mine).status_code == 204
    assert mine.get("/api/v1/me").status_code == 200
    assert code(other.get("/api/v1/me")) == "credential_invalid"
    assert code(token.get("/api/v1/me")) == "credential_invalid"
    fresh = bench.client(None)
    assert code(fresh.post("/api/v1/sessions", json=credentials)) == "credential_invalid"
    renewed = credentials | {"password": change["new"]}
    assert fresh.post("/api/v1/sessions", json=renewed).status_code == 201


def test_guesses_of_a_present_password_lock_the_account(bench: Bench) -> None:
    bench.client("viewer")
    client = bench.client(None)
    credentials = {"name": "a-viewer", "password": PASSWORD}
    csrf_token = client.post("/api/v1/sessions", json=credentials).json()["csrf_token"]
    change = {"old": "a guess of somebody", "new": "another horse battery"}
    codes = [
        code(client.put("/api/v1/me/password", json=change, headers={"X-CSRF-Token": csrf_token}))
        for _ in range(6)
    ]
    assert codes == ["password_wrong"] * 5 + ["account_locked"]


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
        "/api/v1/me/password",
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
        if method not in ("get", "head") and path not in public | of_ones_own
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
