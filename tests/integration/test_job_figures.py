"""What the API says of jobs and their versions, for whoever watches a fleet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetertrain.cell import Refusal
from hetertrain.logging import silent_logger
from hetertrain_cloud.history import METRICS_FILE, VERSIONS_FILE, append_line
from hetertrain_cloud.refusals import RefusalLog
from tests.builders import make_status
from tests.control import JOB, Bench, control_plane


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with control_plane(tmp_path) as made:
        made.client().post("/api/v1/jobs", json=JOB)
        (tmp_path / "jobs" / "fleet").mkdir(parents=True)
        yield made


def note(bench: Bench, version: int, seconds_ago: float | None, *contributions: object) -> None:
    at = None if seconds_ago is None else bench.clock.now().timestamp() - seconds_ago
    row = {
        "version": version,
        "at": at,
        "elapsed_seconds": 1.0,
        "sync": None,
        "lineage": "l",
        "digest": "d",
        "rolled_back_to": None,
        "contributions": contributions,
    }
    append_line(bench.directory / "jobs" / "fleet" / VERSIONS_FILE, row)


def test_a_version_shows_who_made_it_by_weight_and_when(bench: Bench) -> None:
    client = bench.client()
    note(bench, 1, 10.0, ["old", 1, 0, 10, 5])
    note(bench, 2, 7.5, ["a", 1, 1, 10, 5, 75.0], ["a", 2, 1, 10, 5, 15.0], ["b", 1, 0, 8, 5, 10.0])

    one, two = (client.get(f"/api/v1/jobs/fleet/versions/{v}").json() for v in (1, 2))

    assert [item["share"] for item in two["contributions"]] == [0.75, 0.15, 0.1]
    assert [item["lag"] for item in two["contributions"]] == [0, 0, 1]
    assert (two["num_updates"], two["num_nodes"], two["seconds"]) == (3, 2, 2.5)
    assert two["at"] == "2025-12-31T23:59:52.500000Z"
    assert (one["contributions"][0]["weight"], one["contributions"][0]["share"]) == (None, None)
    assert one["seconds"] is None


def test_a_job_says_how_many_versions_it_makes_an_hour(bench: Bench) -> None:
    client = bench.client()

    def rate() -> float | None:
        shown = client.get("/api/v1/jobs/fleet").json()["versions_per_hour"]
        return None if shown is None else float(shown)

    client.post("/api/v1/jobs/fleet/start")
    assert rate() is None
    bench.clock.move(seconds=500)
    note(bench, 0, None)
    note(bench, 1, 400.0)
    for version in range(2, 42):
        note(bench, version, 410.0 - 10 * version)
    assert rate() == 360.0
    for version in range(42, 142):
        note(bench, version, 0.0)
    bench.clock.move(seconds=100)
    assert rate() == 1800.0  # the newest 50
    bench.clock.move(hours=2)
    assert rate() == 0.0
    client.post("/api/v1/jobs/fleet/pause")
    assert rate() is None
    client.post("/api/v1/jobs/fleet/start")
    bench.clock.move(seconds=10)
    note(bench, 142, 0.0)
    assert rate() == 360.0  # the hours before, when it rested, do not count


def test_a_job_says_what_it_waits_for_and_what_compression_saves(bench: Bench) -> None:
    client = bench.client()
    bench.plane.live.hear(
        make_status(
            cut_in_seconds=1.5,
            nodes_for_cut=3,
            nodes_in_cut=1,
            num_parameters=1000,
            uplink_bytes=50,
            uplink_dense_bytes=4000,
        )
    )
    live = client.get("/api/v1/jobs/fleet").json()["live"]
    assert (live["cut_in_seconds"], live["nodes_for_cut"], live["nodes_in_cut"]) == (1.5, 3, 1)
    assert (live["uplink_bytes"], live["uplink_dense_bytes"]) == (50, 4000)
    assert live["num_parameters"] == 1000


def test_a_long_job_is_drawn_from_few_points_and_by_bytes(bench: Bench) -> None:
    client = bench.client()
    path = bench.directory / "jobs" / "fleet" / METRICS_FILE
    append_line(path, {"version": 0, "elapsed_seconds": 0.0, "metrics": {"r2": 0.0}})
    for version in range(1, 101):
        measured = {"at": 60.0 * version, "elapsed_seconds": 1.0, "uplink_bytes": 9 * version}
        append_line(path, {"version": version} | measured | {"metrics": {"r2": 0.5}})

    few = client.get("/api/v1/jobs/fleet/metrics?points=3").json()

    assert [row["version"] for row in few] == [0, 50, 100]
    assert [row["uplink_bytes"] for row in few] == [None, 450, 900]
    assert [row["at"] for row in few] == [None, "1970-01-01T00:50:00Z", "1970-01-01T01:40:00Z"]
    assert len(client.get("/api/v1/jobs/fleet/metrics?limit=10").json()) == 10
    assert client.get("/api/v1/jobs/fleet/metrics?points=1").status_code == 422


def test_what_was_refused_is_listed_with_its_reason_and_what_to_do(bench: Bench) -> None:
    client = bench.client()
    book = RefusalLog(bench.directory / "jobs" / "fleet", silent_logger())
    for number in range(5):
        detail = {"node": f"car-{number % 2}", "detail": "norm 9 is over 3", "outcome": "rejected"}
        reason = "norm" if number else "lag"
        book.note(Refusal(**detail, reason=reason, seq=number, measured=9.0, limit=3.0), 60.0)
    book.flush(1.0)
    book.close()

    def ask(query: str) -> Any:
        return client.get(f"/api/v1/jobs/fleet/refusals?{query}").json()

    first = ask("limit=2")
    rest = ask(f"limit=2&cursor={first['next_cursor']}")
    shown = [(row["node"], row["reason"], row["count"]) for row in first["items"] + rest["items"]]
    assert shown == [("car-0", "norm", 2), ("car-1", "norm", 2), ("car-0", "lag", 1)]
    assert rest["next_cursor"] is None
    assert [(each["reason"], each["count"]) for each in first["by_reason"]] == [
        ("norm", 4),
        ("lag", 1),
    ]
    assert "learning rate" in first["by_reason"][0]["advice"]
    assert first["since"] == "1970-01-01T00:01:00Z"
    assert [row["reason"] for row in ask("node=car-0&reason=lag")["items"]] == ["lag"]
    assert ask("node=nobody") == {"items": [], "next_cursor": None, "by_reason": []} | {
        "since": "1970-01-01T00:01:00Z"
    }
    assert client.get("/api/v1/jobs/nothing/refusals").status_code == 404
