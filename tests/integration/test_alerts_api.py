"""What the API says needs a human, from database, disk and what is heard."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetertrain.cell import Refusal
from hetertrain.logging import silent_logger
from hetertrain_cloud.control.tables import Node
from hetertrain_cloud.refusals import RefusalLog
from tests.control import JOB, Bench, control_plane


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with control_plane(tmp_path) as made:
        yield made


def asked(bench: Bench) -> dict[str, Any]:
    answer = bench.client("viewer").get("/api/v1/alerts")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def codes(bench: Bench) -> set[str]:
    return set(asked(bench)["by_code"]) - {"disk_low"}  # of this machine


def test_alerts_come_and_go_with_their_causes(bench: Bench) -> None:
    client = bench.client()
    assert codes(bench) == {"no_job"}
    client.post("/api/v1/jobs", json=JOB)
    assert codes(bench) == set()

    bench.claim(client, hours=3)
    bench.enrol(client, "car-0")
    bench.enrol(client, "car-1", needs_approval=True)
    assert codes(bench) == {"nodes_pending"}
    bench.clock.move(hours=2.5)
    assert codes(bench) == {"claim_expiring", "nodes_pending"}
    client.post("/api/v1/nodes/car-1/approve")
    bench.clock.move(hours=25)
    assert codes(bench) == {"nodes_unseen"}
    bench.clock.move(days=23)
    assert codes(bench) == {"nodes_unseen", "certificates_expiring"}
    for name in ("car-0", "car-1"):
        client.post(f"/api/v1/nodes/{name}/decommission")
    assert codes(bench) == set()

    bench.plane.live.broker_error = "connection refused"
    bench.plane.bootstrap_file.write_text("the token")
    assert asked(bench)["items"][0]["code"] == "broker_unreachable"
    assert codes(bench) == {"broker_unreachable", "no_admin"}


def test_what_was_refused_lately_is_an_alert_for_ten_minutes(bench: Bench) -> None:
    bench.client().post("/api/v1/jobs", json=JOB)
    directory = bench.directory / "jobs" / "fleet"
    directory.mkdir(parents=True)
    book = RefusalLog(directory, silent_logger())
    at = bench.clock.now().timestamp()
    book.note(Refusal(node="car-3", reason="lag", detail="lag 90 is over 64"), at - 3600)
    for node in ("car-1", "car-2"):
        book.note(Refusal(node=node, reason="norm", detail="norm 9 is over 3"), at)
    book.close()

    (alert,) = (each for each in asked(bench)["items"] if each["code"] == "updates_refused")
    assert "refused 2 in the last 10 minutes (norm) of car-1, car-2" in alert["text"]
    bench.clock.move(minutes=11)
    assert codes(bench) == set()


def test_ten_thousand_nodes_are_counted_and_a_few_named(bench: Bench) -> None:
    client = bench.client()
    bench.enrol(client, "car-0")
    with bench.plane.database.begin() as transaction:
        one = transaction.get(Node, "car-0")
        assert one is not None
        fields = {
            column.name: getattr(one, column.name)
            for column in Node.__table__.columns
            if column.name != "name"
        }
        fields["expires_at"] = bench.clock.now() + datetime.timedelta(days=1)
        transaction.add_all(Node(name=f"n{number:05}", **fields) for number in range(10_000))

    found = asked(bench)
    (alert,) = (each for each in found["items"] if each["code"] == "certificates_expiring")
    assert "n00000, n00001, n00002, n00003, n00004 and 9995 more" in alert["text"]
    assert found["by_code"]["certificates_expiring"] == 1


def test_alerts_need_the_right_to_see_what_they_are_about(bench: Bench) -> None:
    assert bench.client(None).get("/api/v1/alerts").status_code == 401
