"""A fleet of real processes over a real broker, with real kills."""

from __future__ import annotations

import json
import random
import resource
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from hetertrain.cli import main
from hetertrain.transport import mqtt
from hetertrain.transport.broker import EmbeddedBroker
from hetertrain.wire.events import Outgoing
from hetertrain_cloud.history import VERSIONS_FILE
from hetertrain_lab.fleet import Fleet, FleetPlan
from hetertrain_lab.monitor import Monitor
from tests.integration.waiting import wait_until

pytestmark = pytest.mark.broker


class Watched:
    """A running fleet and a watcher of it."""

    def __init__(self, fleet: Fleet, monitor: Monitor) -> None:
        self.fleet = fleet
        self.monitor = monitor

    def version(self) -> int:
        status = self.monitor.statuses().get("cloud")
        return -1 if status is None else status.version

    def history(self) -> list[dict]:
        path = self.fleet.plan.aggregator().directory / VERSIONS_FILE
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    with EmbeddedBroker(tmp_path / "broker") as broker:
        plan = FleetPlan(
            job="test",
            task="hetertrain_lab.driving:DrivingTask",
            policy="sap",
            num_vehicles=5,
            num_edges=2,
            seed=3,
            step_seconds=0.01,
            host=broker.host,
            port=broker.port,
            directory=tmp_path,
            overrides={"sync_seconds": 4.0},
        )
        fleet = Fleet(plan)
        monitor = Monitor(broker.host, broker.port, plan.job)
        fleet.start()
        try:
            yield Watched(fleet, monitor)
        finally:
            fleet.stop()
            monitor.stop()


def test_versions_go_on_when_a_vehicle_and_a_gateway_are_killed(watched: Watched) -> None:
    wait_until(lambda: watched.version() >= 5, "the first versions")
    watched.fleet.kill("vehicle-01")
    watched.fleet.kill("edge-2")
    at = watched.version()
    wait_until(lambda: watched.version() >= at + 5, "versions after the kills")
    edge = next(e for e in watched.fleet.plan.edges() if e.node == "edge-2")
    watched.fleet.start_edge(edge)
    cell = {v.node for v in watched.fleet.plan.vehicles() if v.cell == "edge-2"}
    at = watched.version()

    def heard_again() -> bool:
        rows = [row for row in watched.history() if row["version"] > at]
        return cell <= {item[0] for row in rows for item in row["contributions"]}

    wait_until(heard_again, "updates of the restarted gateway's cell")
    assert_each_update_counted_once(watched.history())


def test_a_killed_aggregator_resumes_where_it_was_and_loses_nothing(watched: Watched) -> None:
    wait_until(lambda: watched.version() >= 8, "the first versions")
    watched.fleet.kill("cloud")
    before = watched.history()
    watched.fleet.start_aggregator()
    wait_until(lambda: len(watched.history()) >= len(before) + 5, "versions after the restart")
    history = watched.history()
    versions = [row["version"] for row in history]
    assert versions == list(range(1, len(versions) + 1))
    assert history[: len(before)] == before
    assert_each_update_counted_once(history)


def test_a_full_disk_is_shown_and_training_goes_on_when_there_is_room(watched: Watched) -> None:
    """A limit on the size of its files makes every write fail, as a full disk does."""
    wait_until(lambda: watched.version() >= 3, "the first versions")
    cloud = watched.fleet.processes["cloud"].pid
    before = resource.prlimit(cloud, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    waiting = lambda: watched.monitor.statuses()["cloud"]  # noqa: E731
    wait_until(lambda: waiting().waiting_code == "store", "the state that shows it")
    assert "space" in waiting().waiting_for
    at = watched.version()

    resource.prlimit(cloud, resource.RLIMIT_FSIZE, before)

    wait_until(lambda: watched.version() >= at + 5, "versions when there is room")
    assert watched.fleet.dead() == []
    versions = [row["version"] for row in watched.history()]
    assert versions == list(range(1, len(versions) + 1))
    assert_each_update_counted_once(watched.history())


def test_a_damaged_journal_is_said_and_the_job_goes_on_as_another_run(watched: Watched) -> None:
    wait_until(lambda: watched.version() >= 5, "the first versions")
    watched.fleet.kill("cloud")
    directory = watched.fleet.plan.aggregator().directory
    for newer in sorted((directory / "checkpoints").glob("version-*"))[1:]:
        newer.unlink()
    with closing(sqlite3.connect(directory / "inbox.db", isolation_level=None)) as journal:
        # As if the disk had lost its end: it still looks whole.
        journal.execute("DELETE FROM records WHERE id > (SELECT max(id) / 2 FROM records)")
    before = watched.history()

    watched.fleet.start_aggregator()

    wait_until(lambda: len(watched.history()) >= len(before) + 3, "versions after it")
    assert '"journal_damaged"' in (watched.fleet.plan.directory / "logs" / "cloud.log").read_text()
    assert watched.history()[-1]["lineage"] != before[-1]["lineage"]


def test_garbage_and_replays_on_every_topic_are_counted_and_change_nothing(
    watched: Watched, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, chance = watched.fleet.plan, random.Random(7)
    heard: list[mqtt.Received] = []
    connection = mqtt.Connection(
        mqtt.Endpoint(host=plan.host, port=plan.port, client_id="stranger"),
        ("ht/1/#",),
        lambda event: heard.append(event) if isinstance(event, mqtt.Received) else None,
    )
    connection.start()
    try:
        wait_until(lambda: watched.version() >= 5, "the first versions")
        known = list(heard)
        assert len({event.topic.split("/")[-1] for event in known}) > 5
        for _ in range(600):
            event = chance.choice(known)
            topic, frame = event.topic, event.frame
            place = chance.randrange(len(frame))
            frame = chance.choice(
                (
                    chance.randbytes(chance.randrange(300)),
                    frame,
                    frame[:place],
                    frame + b"\0" * chance.choice((1, 900_000)),
                    frame[:place] + bytes([frame[place] ^ 1]) + frame[place + 1 :],
                    chance.choice(known).frame,
                )
            )
            connection.publish((Outgoing(topic, frame),))
        at = watched.version()
        wait_until(lambda: watched.version() >= at + 10, "versions after the garbage")
        refused = watched.monitor.statuses()["cloud"].refused
    finally:
        connection.stop()
    assert watched.fleet.dead() == []
    assert {"frame_foreign", "frame_length", "frame_digest", "frame_identity"} <= refused.keys()
    watched.fleet.stop()
    arguments = ["--job", plan.job, "--task", plan.task, "--state-directory", str(plan.directory)]
    assert main(["replay", *arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_clean"]


def test_a_stopped_fleet_leaves_no_process_and_a_final_model(watched: Watched) -> None:
    wait_until(lambda: watched.version() >= 2, "the first versions")
    processes = [*watched.fleet.processes.values()]
    watched.fleet.stop()
    assert not any(process.is_alive() for process in processes)
    model = load_file(watched.fleet.plan.aggregator().final_model)
    assert sum(tensor.size for tensor in model.values()) == 5889


def assert_each_update_counted_once(history: list[dict]) -> None:
    keys = [(item[0], item[1]) for row in history for item in row["contributions"]]
    assert len(keys) == len(set(keys))
