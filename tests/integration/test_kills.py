"""Every part of a running fleet is killed outright at random moments, the broker too, with and
without its memory. What was acknowledged is in the model exactly once, and the model is what a
serial replay gives.

``HETERTRAIN_KILLS`` says how many kills; ``script/soak`` asks for more.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetertrain.core.events import BundleArrived, PartialArrived, UpdateArrived
from hetertrain.task import layout_of, load_task
from hetertrain.transport.inbox import Inbox
from hetertrain.transport.outbox import Outbox
from hetertrain_cloud.history import VERSIONS_FILE
from hetertrain_cloud.journal import read_record
from hetertrain_cloud.replay import replay
from hetertrain_lab.fleet import Fleet, FleetPlan
from tests.integration.mosquitto import Mosquitto
from tests.integration.waiting import wait_until

KILLS = int(os.environ.get("HETERTRAIN_KILLS", "8"))
SECONDS_PER_KILL = 30.0
pytestmark = [pytest.mark.broker, pytest.mark.timeout(120 + KILLS * SECONDS_PER_KILL)]
TASK = "hetertrain_lab.driving:DrivingTask"
PARTS = ("cloud", "edge-1", "vehicle-01", "vehicle-02", "vehicle-03", "broker", "broker, forgetful")


class Job:
    """A fleet over a broker, both of which can be killed part by part."""

    def __init__(self, directory: Path) -> None:
        self.broker = Mosquitto(directory / "broker")
        self.broker.start()
        self.plan = FleetPlan(
            job="test",
            task=TASK,
            policy="sap",
            num_vehicles=3,
            num_edges=1,
            seed=3,
            step_seconds=0.01,
            host=self.broker.host,
            port=self.broker.port,
            directory=directory,
            overrides={"sync_seconds": 4.0, "keep_journal": True},
        )
        self.fleet = Fleet(self.plan)
        self.fleet.start()

    def versions(self) -> list[dict]:
        path = self.plan.aggregator().directory / VERSIONS_FILE
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def kill(self, part: str) -> None:
        if part.startswith("broker"):
            self.broker.kill(loses_database=part.endswith("forgetful"))
        else:
            self.fleet.kill(part)

    def start(self, part: str) -> None:
        if part.startswith("broker"):
            self.broker.start()
        elif part == "cloud":
            self.fleet.start_aggregator()
        elif part.startswith("edge"):
            self.fleet.start_edge(self.plan.edges()[0])
        else:
            self.fleet.start_vehicle(next(v for v in self.plan.vehicles() if v.node == part))

    def unsettled_from(self, node: str) -> int:
        """Return the number from which on a stopped vehicle's updates have no verdict yet."""
        outbox = Outbox(self.plan.directory / node / "outbox.db", 0)
        pending, next_seq = outbox.pending(), outbox.next_seq
        outbox.close()
        return next_seq if pending is None else pending.seq

    def accepted(self) -> set[tuple[str, int]]:
        """Return what is in the journals of a stopped cloud and its gateway, by node and seq."""
        keys: set[tuple[str, int]] = set()
        cloud = self.plan.aggregator().directory
        for directory in (cloud, self.plan.directory / "edge-1"):
            inbox = Inbox(directory / "inbox.db")
            for content in inbox.read(-(1 << 62), 1 << 62):
                match read_record(content, 0):
                    case UpdateArrived(update):
                        keys.add((update.node, update.seq))
                    case PartialArrived(partial=partial):
                        keys |= partial.contributions.keys()
                    case BundleArrived(updates=updates):
                        keys |= {(update.node, update.seq) for update in updates}
            inbox.close()
        return keys

    def refused(self, node: str) -> int:
        """Count the updates that a vehicle heard to be refused."""
        text = (self.plan.directory / "logs" / f"{node}.log").read_text()
        return sum('"update_refused"' in line for line in text.splitlines())

    def end(self) -> None:
        self.fleet.stop()
        self.broker.stop()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.end()


def test_whatever_is_killed_each_acknowledged_update_is_in_the_model_once(job: Job) -> None:
    seed = int(os.environ.get("HETERTRAIN_SEED", "1"))
    print("seed", seed)  # noqa: T201  # shown where the test fails
    moments = random.Random(seed)
    wait_until(lambda: len(job.versions()) >= 3, "the first versions")
    parts = [*PARTS, *(moments.choice(PARTS) for _ in range(KILLS - len(PARTS)))][:KILLS]
    moments.shuffle(parts)
    for part in parts:
        time.sleep(moments.uniform(0.2, 2.0))
        job.kill(part)
        time.sleep(moments.uniform(0.0, 1.0))
        job.start(part)
    at = len(job.versions())
    wait_until(lambda: len(job.versions()) >= at + 5, "versions after the last kill")
    assert job.fleet.dead() == []
    job.fleet.stop()

    task = load_task(TASK)
    found = replay(job.plan.aggregator().directory, layout_of(task, task.model()))
    history = job.versions()
    assert (found.first_version, found.last_version) == (0, history[-1]["version"])
    assert found.updates == sum(len(row["contributions"]) for row in history)
    assert found.is_clean, found
    accepted = job.accepted()
    for vehicle in job.plan.vehicles():
        mine = {seq for node, seq in accepted if node == vehicle.node}
        unsettled = job.unsettled_from(vehicle.node)
        lost = set(range(min(mine, default=unsettled), unsettled)) - mine
        assert len(lost) <= job.refused(vehicle.node), (vehicle.node, sorted(lost))
