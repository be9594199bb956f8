"""The broker of a cell as we ship its configuration: the fleet's nodes, each in its own name."""

from __future__ import annotations

import signal
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator

import pytest

from hetertrain.transport import mqtt
from hetertrain.wire import topics
from hetertrain.wire.events import Outgoing
from tests.integration.mosquitto import Mosquitto
from tests.integration.production import CONFIGURATION, TASK, Production
from tests.integration.waiting import wait_until

pytestmark = pytest.mark.broker

SHIPPED = "/etc/mosquitto/hetertrain"


class Cell(Production):
    """A cloud side, and a gateway with a broker of its own, data of its own and one vehicle."""

    def start(self) -> None:
        super().start()
        self.create_job()
        files = self.directory / "south"
        self.run("broker", "files", "--to", str(files), "--broker-hosts", "localhost")
        for name in ("edge-mosquitto.conf", "edge-acl"):
            text = CONFIGURATION.with_name(name).read_text().replace(SHIPPED, str(files))
            (files / name).write_text(text)
        text = (files / "edge-mosquitto.conf").read_text().replace("listener 8883\n", "")
        text = text.replace("#crlfile", "crlfile")
        self.fetch_revocations()
        self.south = Mosquitto(files, text)
        self.south.start()

    def fetch_revocations(self) -> None:
        """Bring the cell's broker the list of who is revoked."""
        trust = ssl.create_default_context(
            cafile=str(self.directory / "cloud" / "control" / "authority" / "authority.crt")
        )
        url = f"{self.url}/api/v1/authority/revocations"
        with urllib.request.urlopen(url, context=trust, timeout=20) as answer:
            (self.directory / "south" / "revocations.pem").write_bytes(answer.read())

    def fill(self) -> None:
        south = ("--south-host", "localhost", "--south-port", str(self.south.port))
        own = self.enrol("edge-1-own")
        with own.open("a") as settings:
            settings.write('labels = {index = "0", of = "2"}\n')
        config = str(self.enrol("edge-1", "edge"))
        work = ("--own-work-config", str(own), "--task", TASK)
        self.spawn("edge-1", "edge", "--config", config, *south, *work)
        self.enrol("car-1")
        self.vehicle("car-1", 1, 2, "--cell", "edge-1", "--broker-port", str(self.south.port))
        self.enrol("hostile")


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    made = Cell(tmp_path_factory.mktemp("cell"))
    try:
        made.start()
        made.fill()
        yield made
    finally:
        codes = made.stop()
        if hasattr(made, "south"):
            made.south.stop()
    assert set(codes.values()) <= {0}, {name: made.logs(name)[-2000:] for name in codes}


def test_a_vehicle_and_the_gateways_own_node_train_over_the_cells_broker(cell: Cell) -> None:
    both = {"car-1", "edge-1-own"}
    wait_until(lambda: cell.contributors() >= both, "updates of both", seconds=120)
    assert not any("access_denied" in cell.logs(name) for name in cell.processes)


def test_the_gateway_tells_the_control_plane_who_is_in_its_cell(cell: Cell) -> None:
    def members() -> dict[str, str]:
        nodes = cell.json("node", "list", "--cell", "edge-1")
        return {n["name"]: n["live"]["via"] for n in nodes if n["live"]["is_online"]}

    both = {"car-1": "edge-1", "edge-1-own": "edge-1"}
    wait_until(lambda: members() == both, "both nodes, as the gateway tells of them")
    (gateway,) = cell.json("gateway", "list")
    assert (gateway["name"], gateway["has_own_broker"]) == ("edge-1", True)
    assert sum(gateway["members"].values()) == 2
    assert cell.json("node", "show", "edge-1")["live"]["via"] == ""
    assert cell.run("node", "log", "car-1", code=11) == "", "nobody here can ask it"
    assert not any("agent_started" in line for line in cell.node_log("edge-1"))
    assert "access_denied" not in cell.logs("edge-1") + cell.logs("cloud")


@pytest.mark.parametrize("teller", ["hostile", "edge-1"])
def test_nobody_tells_of_a_cell_that_is_not_its_own(cell: Cell, teller: str) -> None:
    connection, events = cell.connect(teller)
    forged = Outgoing(topics.members("fleet", "another"), b"forged", token=1)
    try:
        assert isinstance(events.get(timeout=20), mqtt.Connected)
        connection.publish((forged,))
        assert isinstance(events.get(timeout=20), mqtt.Denied)
    finally:
        connection.stop()


@pytest.mark.parametrize(
    "topic",
    [
        topics.up("fleet", "edge-1", "t1", "car-1"),
        topics.up("fleet", "another", "t1", "hostile"),
        topics.down("fleet", "edge-1", "t1"),
        topics.sync("fleet", "edge-1"),
        topics.order("fleet"),
        topics.inbox("car-1"),
        topics.state("car-1"),
    ],
)
def test_at_the_cells_broker_a_node_writes_in_its_own_name_only_and_hears_so(
    cell: Cell, topic: str
) -> None:
    connection, events = cell.connect("hostile", broker=cell.south)
    try:
        assert isinstance(events.get(timeout=20), mqtt.Connected)
        connection.publish((Outgoing(topic, b"forged", token=1),))
        assert isinstance(events.get(timeout=20), mqtt.Denied)
    finally:
        connection.stop()


def test_at_the_cells_broker_a_node_hears_nothing_that_is_not_meant_for_it(cell: Cell) -> None:
    own, others = topics.state("hostile"), (topics.up("fleet", "edge-1", "+", "+"), "ht/1/node/#")
    connection, events = cell.connect("hostile", own, *others, broker=cell.south)
    heard = set()

    def listen() -> bool:
        while not events.empty():
            event = events.get()
            if isinstance(event, mqtt.Received):
                heard.add(event.topic)
        return own in heard

    try:
        before = len(cell.contributors())
        assert before
        connection.publish((Outgoing(own, b"mine"),))
        wait_until(listen, "its own state")
        version = cell.version()
        wait_until(lambda: cell.version() > version + 1, "the others' traffic")
        listen()
        assert heard == {own}
    finally:
        connection.stop()


def test_without_a_certificate_of_the_fleet_nobody_gets_in(cell: Cell) -> None:
    openssl = ("openssl", "s_client", "-connect", f"localhost:{cell.south.port}", "-tls1_2")
    trusted = ("-CAfile", str(cell.directory / "car-1" / "authority.crt"))
    done = subprocess.run(
        [*openssl, *trusted], input=b"", capture_output=True, timeout=20, check=False
    )
    assert b"handshake failure" in done.stderr or b"certificate required" in done.stderr


def test_a_revoked_node_gets_in_no_more_once_the_list_is_there(cell: Cell) -> None:
    cell.run("node", "revoke", "hostile")
    cell.fetch_revocations()
    assert cell.south._process is not None
    cell.south._process.send_signal(signal.SIGHUP)
    outcomes = {}
    for node in ("hostile", "car-1"):
        connection, events = cell.connect(node, broker=cell.south)
        try:
            outcomes[node] = type(events.get(timeout=30))
        finally:
            connection.stop()
    assert outcomes == {"hostile": mqtt.Disconnected, "car-1": mqtt.Connected}
