"""What screens say of what the API answers."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from hetertrain_cloud.console import words
from hetertrain_cloud.console.screens import (
    account,
    accounts,
    alerts,
    audit,
    claim_form,
    enrolment,
    settings,
)
from hetertrain_cloud.console.view import to

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("String should have at least 12 characters", "at least 12 characters"),
        ("Dictionary should have at most 16 items after validation, not 17", "at most 16 lines"),
        ("Input should be greater than or equal to 1", "at least 1"),
        ("Input should be less than 5", "less than 5"),
        ("Input should be a valid integer, unable to parse", "write a number"),
        ("Value error, no such task", "no such task"),
        ("Field required", "this is needed"),
        ("something new", "something new"),
    ],
)
def test_a_refusal_is_said_in_the_forms_own_words(message: str, said: str) -> None:
    assert words.refusal(message) == said


def claim(**changes: Any) -> dict[str, Any]:
    return {
        "id": "c1",
        "role": "vehicle",
        "node": None,
        "labels": {},
        "uses": 1,
        "uses_max": 4,
        "needs_approval": False,
        "created_by": "anna",
        "expires_at": (NOW + timedelta(hours=1)).isoformat(),
        "revoked_at": None,
    } | changes


def alert(**changes: Any) -> dict[str, Any]:
    return {"code": "other", "kind": "job", "name": ""} | changes


def test_a_difference_names_each_field_that_changed_however_deep() -> None:
    before = {"wanted": "stopped", "specification": {"labels": {"region": "north"}, "every": 5}}
    after = {"wanted": "stopped", "specification": {"labels": {"region": "south"}, "every": 5}}

    changes, num_equal = audit.difference(before, after)

    assert changes == [("specification.labels.region", "north", "south")]
    assert num_equal == 2


def test_what_is_new_or_gone_differs_in_all_that_it_has() -> None:
    assert audit.difference(None, {"role": "edge", "node": None})[0] == [
        ("role", "–", "edge"),
        ("node", "–", "null"),
    ]
    assert audit.difference({"promoted": [1, 2]}, None)[0] == [("promoted", "[1, 2]", "–")]
    assert audit.difference(None, None) == ([], 0)


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "usable"),
        ({"uses": 4}, "used up"),
        ({"expires_at": NOW.isoformat()}, "expired"),
        ({"revoked_at": NOW.isoformat(), "uses": 4}, "revoked"),
    ],
)
def test_a_claim_says_whether_it_can_be_used_and_only_then_be_revoked(
    changes: dict[str, Any], state: str
) -> None:
    row = enrolment.claim_row(claim(**changes), NOW)

    assert row["state"]["text"] == state
    assert row["without"] == ([] if state == "usable" else ["revoke"])


@pytest.mark.parametrize(
    ("days", "is_online", "advice", "without"),
    [
        (-1, False, "too late", []),
        (3, True, "did not renew", ["claim"]),
        (3, False, "when it is online again", ["claim"]),
    ],
)
def test_a_certificate_about_to_end_comes_with_what_to_do(
    days: int, is_online: bool, advice: str, without: list[str]
) -> None:
    node = {
        "name": "car-1",
        "expires_at": (NOW + timedelta(days=days)).isoformat(),
        "seen_at": None,
        "live": {"is_online": is_online},
    }

    row = enrolment.expiring_row(node, NOW)

    assert advice in row["advice"]
    assert row["without"] == without


def test_a_claim_is_in_no_command_line_and_a_name_cannot_end_one() -> None:
    text = claim_form.command("edge", "https://cloud:8443", "htc.a.b.c", "x; rm -rf /")
    writes, enrols = text.splitlines()

    assert "htc.a.b.c" in writes
    assert "htc.a.b.c" not in enrols
    arguments = shlex.split(enrols)
    assert arguments[arguments.index("--node") + 1] == "x; rm -rf /"


@pytest.mark.parametrize(
    ("changes", "href"),
    [
        ({"code": "job_failed", "name": "driving"}, to("/jobs/driving")),
        ({"code": "updates_refused", "name": "driving"}, to("/quarantine", job="driving")),
        ({"code": "nodes_pending", "kind": "node"}, to("/enrolment")),
        ({"code": "nodes_unseen", "kind": "node"}, to("/fleet")),
        ({"code": "broker_unreachable", "kind": "broker"}, to("/settings")),
    ],
)
def test_an_alert_leads_to_where_something_can_be_done(changes: dict[str, Any], href: str) -> None:
    assert alerts.place(alert(**changes))[0] == href


def test_nobody_is_offered_to_shut_themselves_out() -> None:
    user = {
        "name": "anna",
        "role": "admin",
        "is_active": True,
        "locked_until": None,
        "created_at": NOW.isoformat(),
    }

    assert "deactivate" in accounts.row(user, NOW, "anna")["without"]
    assert "deactivate" not in accounts.row(user, NOW, "otto")["without"]


def test_rights_are_told_by_what_may_be_changed_and_what_only_seen() -> None:
    rights = ["audit:read", "jobs:read", "jobs:write", "nodes:read"]

    assert account.divided(rights) == {
        "See and change": ["jobs"],
        "See": ["nodes", "the audit trail"],
    }


def test_a_setting_is_found_by_words_of_its_name_value_or_description() -> None:
    setting = {
        "name": "listen_port",
        "description": "its port",
        "value": "8443",
        "variable": "HETERTRAIN_CLOUD_LISTEN_PORT",
    }

    assert settings.matching([setting], "PORT 84") == [setting]
    assert settings.matching([setting], "port host") == []
