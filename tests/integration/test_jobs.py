"""A job and its versions, through the API: why it does not go on, and what it made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from hetertrain.core.layout import ParameterLayout
from hetertrain.core.update import Checkpoint
from hetertrain.wire.messages import NodeState
from hetertrain_cloud.checkpoints import OLDER, CheckpointStore, kept_versions
from hetertrain_cloud.history import append_line
from tests.builders import make_status
from tests.control import JOB, TASK, Bench, code


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
    heard = make_status()
    bench.plane.live.hear(heard)
    text = client.get("/api/v1/jobs/fleet").json()["waiting_for"]["text"]
    assert text.startswith("2 needed, 1 present (1 may take part, 3 online, 2 held by a rule")
    assert text.endswith(": Vehicle.Speed < 1)")
    client.post("/api/v1/jobs", json=JOB | {"name": "second"})
    client.post("/api/v1/jobs/second/start")
    bench.plane.live.hear(replace(heard, job="second", active=0))
    second = client.get("/api/v1/jobs/second").json()["waiting_for"]
    assert second["code"] == "nodes_elsewhere"
    assert "3 are online for fleet" in second["text"]
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
    assert client.head(url).headers["content-length"] == str(len(whole.content))
    promoted = client.post("/api/v1/jobs/fleet/versions/3/promote").json()
    assert promoted["promoted"] == [3]


def test_a_version_that_was_asked_for_can_be_rolled_back_to_though_others_overtake_it(
    bench: Bench, tmp_path: Path
) -> None:
    client = bench.client()
    client.post("/api/v1/jobs", json=JOB)
    layout = ParameterLayout.of({"w": np.zeros(8, np.float32)}, {"w"}, ())
    store = CheckpointStore(tmp_path / "jobs" / "fleet" / "checkpoints", layout)

    def make(versions: range) -> None:
        for version in versions:
            checkpoint = Checkpoint(version, np.zeros(8, np.float32), np.empty(0, np.int64))
            store.save(checkpoint, {}, {})

    def of(version: int) -> str:
        return f"/api/v1/jobs/fleet/versions/{version}"

    make(range(9))
    passed_by, asked_for = kept_versions(store.directory)[:2]
    assert client.head(f"{of(asked_for)}/model").status_code == 200
    make(range(9, 40))
    (first, *_) = kept_versions(store.directory / OLDER)
    assert client.head(f"{of(first)}/model").status_code == 200
    assert client.head(f"{of(passed_by)}/model").status_code == 404
    assert client.post(f"{of(asked_for)}/rollback").json()["rollback_to"] == asked_for
