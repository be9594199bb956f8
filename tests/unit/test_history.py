"""A job's history: what a version counts, how a long one is read, and what a torn one keeps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hetertrain.core.events import UpdateArrived
from hetertrain.core.members import MemberSeen
from hetertrain.core.policy import SYNC_PRESETS, WeightPolicy
from hetertrain.wire.traffic import Traffic
from hetertrain_cloud.history import (
    METRICS_FILE,
    VERSIONS_FILE,
    JobHistory,
    append_line,
    last_line,
)
from tests.builders import make_aggregator, make_update


def note(directory: Path, version: int, at: float | None, **more: object) -> None:
    append_line(directory / VERSIONS_FILE, {"version": version, "at": at} | more)


def test_what_a_contribution_counts_for_is_what_it_moves_the_model_by() -> None:
    machine = make_aggregator(SYNC_PRESETS["fedavg"], WeightPolicy(server_rate=1.0))
    for node in ("a", "b", "c"):
        machine.handle(MemberSeen(node), 0.0)
    moves = {"a": (0.3, 100), "b": (0.1, 300), "c": (-0.2, 50)}
    release = None
    for node, (delta, examples) in moves.items():
        update = make_update(node, 0, delta, examples=examples)
        release = machine.handle(UpdateArrived(update), 1.0).release
    assert release is not None

    total = sum(release.weights)
    expected = sum(
        weight / total * moves[item.node][0]
        for item, weight in zip(release.contributions, release.weights, strict=True)
    )
    assert release.checkpoint.vector == pytest.approx(np.full(8, expected), abs=1e-6)
    assert release.weights == (100.0, 300.0, 50.0)


def test_rows_of_before_there_were_times_and_weights_stay_readable(tmp_path: Path) -> None:
    append_line(tmp_path / VERSIONS_FILE, {"version": 1, "elapsed_seconds": 1.0})
    note(tmp_path, 2, 100.0)
    note(tmp_path, 3, 102.5)
    note(tmp_path, 4, None)
    note(tmp_path, 5, 90.0)

    rows = JobHistory(tmp_path).page(None, 10)

    assert [row["version"] for row in rows] == [5, 4, 3, 2, 1]
    assert [row["seconds"] for row in rows] == [None, None, 2.5, None, None]
    assert JobHistory(tmp_path).times(10) == [100.0, 102.5, 90.0]


def test_a_history_that_grows_is_followed_and_a_line_being_written_waits(tmp_path: Path) -> None:
    history = JobHistory(tmp_path)
    assert history.newest() is None
    note(tmp_path, 1, 1.0)
    assert history.newest() == 1
    with (tmp_path / VERSIONS_FILE).open("ab") as file:
        file.write(b'{"version": 2, "at": 2.0, ')
    assert history.newest() == 1
    with (tmp_path / VERSIONS_FILE).open("ab") as file:
        file.write(b'"sync": null}\n')
    assert history.newest() == 2
    note(tmp_path, 1, 7.0, digest="again")
    assert history.row(1) == {
        "version": 1,
        "at": 7.0,
        "digest": "again",
        "metrics": None,
        "seconds": None,
    }
    (tmp_path / VERSIONS_FILE).unlink()
    note(tmp_path, 3, 3.0)
    assert [row["version"] for row in history.page(None, 10)] == [3]


def test_measurements_are_thinned_evenly_with_the_first_and_the_last(tmp_path: Path) -> None:
    for version in range(0, 1001, 10):
        append_line(tmp_path / METRICS_FILE, {"version": version, "metrics": {"r2": 0.5}})
    history = JobHistory(tmp_path)

    assert [row["version"] for row in history.thinned_metrics(5)] == [0, 250, 500, 750, 1000]
    assert [row["version"] for row in history.thinned_metrics(2)] == [0, 1000]
    assert len(history.thinned_metrics(500)) == 101
    assert [row["version"] for row in history.metrics(2)] == [990, 1000]


@pytest.mark.parametrize("size", [1, 70_000])
def test_the_last_whole_line_is_found_and_a_torn_one_is_cut_off(tmp_path: Path, size: int) -> None:
    path = tmp_path / VERSIONS_FILE
    assert last_line(path) is None
    path.write_bytes(b'{"version": 1')
    assert last_line(path) is None
    assert path.read_bytes() == b""
    note(tmp_path, 1, None, digest="d" * size)
    note(tmp_path, 2, None, digest="e" * size)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"version": 3, "dig')

    assert json.loads(last_line(path) or "")["version"] == 2
    assert path.read_bytes() == whole


def test_a_partial_counts_as_all_its_updates_and_traffic_goes_on_after_a_restart() -> None:
    traffic = Traffic()
    traffic.came(1000, num_updates=20, num_parameters=500)
    traffic.went(300, content_bytes=600, num_parameters=500)
    again = Traffic()
    again.resume({"uplink_bytes": 1000, "uplink_dense_bytes": 40_000})
    again.came(10, 1, 500)

    assert traffic == Traffic(1000, 40_000, 300, 1000)
    assert again == Traffic(1010, 42_000, 0, 0)
