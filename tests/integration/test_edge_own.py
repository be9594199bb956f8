"""A gateway with a broker and with data of its own: real processes, real kills."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hetertrain.errors import SettingsError
from hetertrain.transport import mqtt
from hetertrain.transport.broker import EmbeddedBroker
from hetertrain.wire import topics
from hetertrain.wire.events import Outgoing
from hetertrain.wire.frames import pack, unpack
from hetertrain.wire.messages import JobOrder, NodeState
from hetertrain_edge.service import EdgeService, EdgeSettings
from tests.integration.waiting import wait_until

pytestmark = pytest.mark.broker

HETERTRAIN = Path(sys.executable).with_name("hetertrain")
TASK = "hetertrain_lab.driving:DrivingTask"


class Site:
    """A cloud, and one gateway that brings its own broker and trains."""

    def __init__(self, directory: Path, north: EmbeddedBroker) -> None:
        self.directory, self.north = directory, north
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.messages: dict[str, bytes] = {}
        self.environment = os.environ | {
            "HETERTRAIN_BROKER_HOST": north.host,
            "HETERTRAIN_BROKER_PORT": str(north.port),
            "HETERTRAIN_STATE_DIRECTORY": str(directory / "state"),
            "HETERTRAIN_VEHICLE_LABELS": "index=0,of=2",
        }
        self.spawn("cloud", "aggregator", "--task", TASK)
        self.spawn_edge()

    def spawn_edge(self) -> None:
        own = ("--south-embedded", "--task", TASK, "--local-versions", "--local-after-seconds", "1")
        self.spawn("edge-1", "edge", "--node", "edge-1", *own)

    def spawn(self, name: str, *command: str) -> None:
        log = (self.directory / f"{name}.log").open("ab")
        self.processes[name] = subprocess.Popen(
            [HETERTRAIN, *command, "--job", "fleet", "--log-json"],
            env=self.environment,
            stdout=log,
            stderr=log,
        )

    def logged(self, event: str) -> list[dict]:
        text = (self.directory / "edge-1.log").read_text()
        rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        return [row for row in rows if row["event"] == event]

    def num_updates(self) -> int:
        """Count the updates of the gateway's own node in the cloud's versions."""
        path = self.directory / "state" / "fleet" / "versions.jsonl"
        rows = path.read_text().splitlines() if path.exists() else []
        nodes = [item[0] for row in rows for item in json.loads(row)["contributions"]]
        assert set(nodes) <= {"edge-1.own"}
        return len(nodes)

    def watch(self, port: int, *subscriptions: str) -> mqtt.Connection:
        def take(event: mqtt.Event) -> None:
            if isinstance(event, mqtt.Received):
                self.messages[event.topic] = bytes(event.frame)

        connection = mqtt.Connection(
            mqtt.Endpoint(host="127.0.0.1", port=port, client_id="watch"), subscriptions, take
        )
        connection.start()
        return connection

    def stop(self) -> dict[str, int]:
        codes = {}
        for name in sorted(self.processes):
            self.processes[name].terminate()
            codes[name] = self.processes[name].wait(30)
        return codes


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with EmbeddedBroker(tmp_path / "broker") as north:
        made = Site(tmp_path, north)
        try:
            yield made
        finally:
            codes = made.stop()
    assert set(codes.values()) <= {0}, (tmp_path / "edge-1.log").read_text()[-3000:]


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return False


def test_a_gateway_is_broker_and_node_of_its_cell_and_both_come_back_and_end_with_it(
    site: Site,
) -> None:
    wait_until(lambda: site.num_updates() >= 3, "updates of the gateway's own node")
    (broker,) = site.logged("south_broker_started")
    connection = site.watch(broker["port"], topics.order("fleet"), topics.state("edge-1.own"))
    orders = site.watch(site.north.port, topics.state("edge-1"))
    try:
        # An operator's order passes from the cloud's broker to the cell's.
        order = pack(JobOrder(number=1, state="running"))
        orders.publish((Outgoing(topics.order("fleet"), order, retain=True),))
        wait_until(lambda: topics.order("fleet") in site.messages, "the relayed order")
        wait_until(lambda: topics.state("edge-1.own") in site.messages, "the node in the cell")

        def own_doing() -> str:
            state, _ = unpack(site.messages.get(topics.state("edge-1"), order))
            return state.doing if isinstance(state, NodeState) else ""

        wait_until(lambda: "trains too" in own_doing(), "what the gateway says of it")
        os.kill(site.logged("own_work_started")[-1]["pid"], signal.SIGKILL)
        wait_until(lambda: "ended with code -9" in own_doing(), "what the gateway says of the end")
    finally:
        connection.stop()
        orders.stop()
    before = site.num_updates()
    wait_until(lambda: site.num_updates() >= before + 3, "updates of the next one")

    agent = site.logged("own_work_started")[-1]["pid"]
    site.processes["edge-1"].kill()
    site.processes["edge-1"].wait(10)
    wait_until(lambda: not is_alive(agent), "the end of the orphan")
    site.spawn_edge()
    before = site.num_updates()
    wait_until(lambda: site.num_updates() >= before + 3, "updates after the gateway's crash")


def test_a_gateway_whose_cloud_is_away_makes_versions_and_brings_its_work_when_it_is_back(
    site: Site, tmp_path: Path
) -> None:
    wait_until(lambda: site.num_updates() >= 1, "updates of the gateway's own node")
    site.north.__exit__()
    wait_until(lambda: len(site.logged("local_version_made")) >= 3, "local versions")
    site.processes["edge-1"].terminate()
    assert site.processes["edge-1"].wait(30) == 0
    made = len(site.logged("local_version_made"))
    site.spawn_edge()
    wait_until(lambda: len(site.logged("local_version_made")) >= made + 3, "more after a restart")
    before = site.num_updates()
    site.north.start()
    wait_until(lambda: site.num_updates() >= before + 5, "all of it in the cloud's versions")
    rows = (tmp_path / "state" / "fleet" / "versions.jsonl").read_text().splitlines()
    keys = [tuple(item[:2]) for row in rows for item in json.loads(row)["contributions"]]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"south_embedded": True, "south_host": "10.0.0.1"}, "south_host"),
        ({"south_port": 0}, "free port"),
        ({"task": TASK, "broker_username": "edge-1"}, "own_work_config"),
        ({"south_embedded": True, "south_bind": "nowhere"}, "IPv4"),
        ({"task": TASK, "node": "e" * 62}, "bytes"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_with_what_to_do(
    given: dict, said: str, tmp_path: Path
) -> None:
    plain = {"node": "edge-1", "job": "fleet", "state_directory": tmp_path} | given
    with pytest.raises(SettingsError, match=re.escape(said)):
        EdgeService(EdgeSettings(**plain))


def test_an_agent_with_its_own_credential_is_given_its_cell_and_no_name(tmp_path: Path) -> None:
    settings = EdgeSettings(
        node="edge-1", job="fleet", tls_ca_file="ca", own_work_config=tmp_path / "own.toml"
    )
    settings.check()
    south = mqtt.Endpoint(host="edge-1.local", port=8883, client_id="edge-1-south")
    expected = f"--config {tmp_path}/own.toml --cell edge-1"
    expected += " --broker-host edge-1.local --broker-port 8883"
    assert " ".join(settings.own_work(south)) == expected
