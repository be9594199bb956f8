"""What needs a human is said with its severity and what to do; what is well is not."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from hetertrain_cloud.control.alerts import ClaimSurvey, JobSurvey, Names, Survey, alerts

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LONG_AGO = NOW - timedelta(days=1)
EVERY_2_SECONDS = tuple(NOW.timestamp() - 2.0 * back for back in range(20, 0, -1))
JOB = JobSurvey(
    name="driving",
    wanted="running",
    state="running",
    changed_at=LONG_AGO,
    times=EVERY_2_SECONDS,
    waiting_code="updates",
    waiting_text="updates of 3 nodes, 1 present",
)
WELL = Survey(
    now=NOW,
    jobs=(JOB,),
    authority_expires_at=NOW + timedelta(days=3000),
    certificates=(("the API", NOW + timedelta(days=60)),),
    disk_free_share=0.5,
)


CLAIM = ClaimSurvey(
    id="c1",
    role="edge",
    node=None,
    labels={"region": "north"},
    created_at=NOW - timedelta(hours=4),
    expires_at=NOW + timedelta(hours=1),
)


def job(**changes: object) -> dict[str, object]:
    return {"jobs": (replace(JOB, **changes),)}  # type: ignore[arg-type]


def ago(seconds: float) -> tuple[float, ...]:
    return tuple(at - seconds for at in EVERY_2_SECONDS)


TABLE: list[tuple[str, dict[str, object], list[tuple[str, str, str]]]] = [
    ("all is well", {}, []),
    ("broker", {"broker_error": "refused"}, [("critical", "broker_unreachable", "")]),
    ("rules", {"access_error": "no plugin"}, [("critical", "access_outdated", "")]),
    ("no job", {"jobs": ()}, [("info", "no_job", "")]),
    ("failed", job(state="failed", reason="boom"), [("critical", "job_failed", "driving")]),
    (
        "failed lately",
        job(restarts=2, changed_at=NOW - timedelta(minutes=1)),
        [("warning", "job_restarted", "driving")],
    ),
    ("failed long ago", job(restarts=2), []),
    ("disk of a job", job(waiting_code="store"), [("critical", "store_failed", "driving")]),
    (
        "silent",
        job(waiting_code="aggregator_starting"),
        [("critical", "aggregator_silent", "driving")],
    ),
    ("starting", job(waiting_code="aggregator_starting", changed_at=NOW), []),
    (
        "no nodes",
        job(waiting_code="no_active_nodes", times=()),
        [("warning", "job_without_nodes", "driving")],
    ),
    (
        "its nodes work on another job",
        job(waiting_code="nodes_elsewhere", times=()),
        [("warning", "job_without_nodes", "driving")],
    ),
    ("slower than usual", job(times=ago(50)), []),
    ("stalled", job(times=ago(90)), [("warning", "job_stalled", "driving")]),
    ("stalled, but started a moment ago", job(times=ago(90), changed_at=NOW), []),
    ("seldom by nature", job(times=tuple(500.0 * n for n in range(20)), changed_at=NOW), []),
    ("no version yet", job(times=()), [("warning", "job_stalled", "driving")]),
    ("paused", job(wanted="paused", state="paused", times=ago(9000)), []),
    (
        "without the broker",
        {"broker_error": "x"} | job(times=ago(90)),
        [("critical", "broker_unreachable", "")],
    ),
    (
        "refused",
        job(refused=(("norm", 3, Names(1, ("car-1",))), ("lag", 1, Names()))),
        [("warning", "updates_refused", "driving"), ("warning", "updates_refused", "driving")],
    ),
    ("refused, as after a rollback", job(refused=(("lineage", 9, Names(1, ("car-1",))),)), []),
    ("pending", {"pending": Names(1, ("car-1",))}, [("warning", "nodes_pending", "car-1")]),
    ("expiring", {"expiring": Names(7, ("a", "b"))}, [("warning", "certificates_expiring", "")]),
    ("unseen", {"unseen": Names(7, ("a", "b"))}, [("warning", "nodes_unseen", "")]),
    ("claim", {"claims": (CLAIM,)}, [("info", "claim_expiring", "c1")]),
    (
        "authority",
        {"authority_expires_at": NOW + timedelta(days=80)},
        [("warning", "authority_expiring", "")],
    ),
    (
        "authority, soon",
        {"authority_expires_at": NOW + timedelta(days=10)},
        [("critical", "authority_expiring", "")],
    ),
    (
        "own certificates",
        {"certificates": (("the API", NOW + timedelta(days=10)), ("control", NOW))},
        [
            ("critical", "server_certificate_expiring", "control"),
            ("warning", "server_certificate_expiring", "the API"),
        ],
    ),
    ("disk", {"disk_free_share": 0.09}, [("warning", "disk_low", "")]),
    ("disk, soon", {"disk_free_share": 0.01}, [("critical", "disk_low", "")]),
    ("disk not known", {"disk_free_share": None}, []),
    ("no admin", {"has_admin": False}, [("warning", "no_admin", "")]),
]


@pytest.mark.parametrize(
    ("changes", "expected"), [row[1:] for row in TABLE], ids=[r[0] for r in TABLE]
)
def test_what_needs_a_human_is_said(
    changes: dict[str, object], expected: list[tuple[str, str, str]]
) -> None:
    found = alerts(replace(WELL, **changes))  # type: ignore[arg-type]
    assert [(alert.severity, alert.code, alert.name) for alert in found] == expected
    for alert in found:
        assert alert.text.endswith(".")
        assert alert.advice.endswith(".")


def test_the_most_severe_comes_first() -> None:
    found = alerts(
        replace(WELL, jobs=(), disk_free_share=0.05, broker_error="refused", has_admin=False)
    )
    assert [alert.severity for alert in found] == ["critical", "warning", "warning", "info"]


@pytest.mark.parametrize(
    ("life_hours", "left_hours", "is_ending"),
    [(1, 0.9, False), (1, 0.2, True), (24, 7, False), (24, 6, True), (720, 25, False)],
)
def test_a_claim_is_ending_when_little_is_left_of_its_life(
    life_hours: float, left_hours: float, is_ending: bool
) -> None:
    expires_at = NOW + timedelta(hours=left_hours)
    created_at = expires_at - timedelta(hours=life_hours)
    claim = replace(CLAIM, created_at=created_at, expires_at=expires_at)
    assert claim.is_ending(NOW) is is_ending


def test_a_claim_is_told_by_what_it_lets_in() -> None:
    found = alerts(replace(WELL, claims=(CLAIM, replace(CLAIM, node="rsu-7", labels={}))))
    assert "The claim c1 for gateways with region=north expires at 2026-01-01" in found[0].text
    assert "The claim c1 for rsu-7 expires" in found[1].text


def test_many_names_are_cut_short() -> None:
    assert str(Names(7, ("a", "b"))) == "a, b and 5 more"
    assert str(Names(1, ("a",))) == "a"
