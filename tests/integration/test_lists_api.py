"""How lists of claims, tokens and changes are narrowed, on SQLite and on PostgreSQL."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.control import Bench


def listed(client: TestClient, path: str, **query: object) -> list[dict[str, Any]]:
    answer = client.get(f"/api/v1{path}", params=query)
    assert answer.status_code == 200, answer.text
    items: list[dict[str, Any]] = answer.json()["items"]
    return items


def test_claims_that_can_be_used_are_told_from_those_that_cannot(any_bench: Bench) -> None:
    admin = any_bench.client()
    any_bench.enrol(admin, "car-1")
    any_bench.claim(admin, node="expired", hours=1)
    any_bench.clock.move(hours=2)
    any_bench.claim(admin, node="revoked")
    any_bench.claim(admin, node="good")
    by_node = {claim["node"]: claim["id"] for claim in listed(admin, "/claims")}
    admin.delete(f"/api/v1/claims/{by_node['revoked']}")

    usable = listed(admin, "/claims", is_usable="true")
    others = listed(admin, "/claims", is_usable="false")

    assert [claim["node"] for claim in usable] == ["good"]
    assert {claim["node"] for claim in others} == {None, "expired", "revoked"}


def test_tokens_are_listed_by_user_and_nobody_sees_anothers_so(any_bench: Bench) -> None:
    admin, viewer = any_bench.client(), any_bench.client("viewer")

    assert {token["user"] for token in listed(admin, "/tokens")} == {"a-admin", "a-viewer"}
    assert [token["user"] for token in listed(admin, "/tokens", user="a-viewer")] == ["a-viewer"]
    assert listed(viewer, "/tokens", user="a-admin") == []


def test_the_audit_trail_is_listed_by_who_acted(any_bench: Bench) -> None:
    admin, operator = any_bench.client(), any_bench.client("operator")
    any_bench.claim(admin)
    any_bench.enrol(operator, "car-1")
    claim = listed(operator, "/audit", kind="claim", actor="a-operator")
    enrolled = listed(operator, "/audit", actor=f"claim {claim[0]['object']}")

    assert [entry["action"] for entry in claim] == ["claim_created"]
    assert [entry["object"] for entry in enrolled] == ["car-1"]


def test_the_audit_trail_is_listed_from_one_time_to_another(any_bench: Bench) -> None:
    admin = any_bench.client()
    times = []
    for _ in range(3):
        times.append(any_bench.clock.now())
        any_bench.claim(admin)
        any_bench.clock.move(hours=1)
    east = datetime.timezone(datetime.timedelta(hours=9))
    first, second, third = (str(at.astimezone(east)) for at in times)

    def found(**asked: str) -> list[str]:
        return [entry["at"] for entry in listed(admin, "/audit", kind="claim", **asked)]

    every = found()
    assert len(every) == 3
    assert found(since=second) == every[:2]
    assert found(until=second) == every[2:]
    assert found(since=second, until=third) == every[1:2]
    assert found(since=first) == every


@pytest.mark.parametrize("at", ["yesterday", "2026-01-31T08:00", "0001-01-01T00:00+14:00"])
def test_a_time_that_is_none_is_refused(any_bench: Bench, at: str) -> None:
    answer = any_bench.client().get("/api/v1/audit", params={"since": at})
    assert (answer.status_code, answer.json()["code"]) == (422, "request_invalid")
