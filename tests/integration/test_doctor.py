"""The doctor names the layer that does not work, against a real broker with TLS and access rights,
with every layer failing in turn; and it disturbs nobody.
"""

from __future__ import annotations

import datetime
import http.server
import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import NameOID

from hetertrain import config
from hetertrain.doctor import EXIT_CODES, Finding, Status, examine, exit_code
from hetertrain.security import load_or_make_key
from hetertrain_edge.checks import edge_checks
from hetertrain_edge.service import EdgeSettings
from hetertrain_vehicle.checks import vehicle_checks
from hetertrain_vehicle.settings import VehicleSettings
from tests.integration.mosquitto import Mosquitto
from tests.integration.mute_broker import MuteBroker
from tests.integration.production import TASK, Production
from tests.integration.waiting import wait_until
from tests.integration.websocket_proxy import WebSocketProxy

pytestmark = pytest.mark.broker

Settings = VehicleSettings | EdgeSettings
Changes = dict[str, object]
NOW = datetime.datetime.now(datetime.UTC)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Production]:
    production = Production(tmp_path_factory.mktemp("doctor"))
    try:
        production.start()
        production.create_job()
        for node in ("car-1", "car-2", "revoked"):
            production.enrol(node)
        production.enrol("edge-1", "edge")
        production.run("node", "revoke", "revoked")
        yield production
    finally:
        production.stop()


@pytest.fixture
def servers() -> Iterator[ExitStack]:
    """Ends what a test has started."""
    with ExitStack() as ends:
        yield ends


def enrolled(fleet: Production, node: str = "car-1") -> VehicleSettings:
    file = fleet.directory / node / "hetertrain.toml"
    return config.load(VehicleSettings, {"task": TASK}, file).settings


def diagnose(settings: Settings, **changes: object) -> dict[str, Finding]:
    """Examine a node, its task apart, which takes seconds to import."""
    settings = settings.model_copy(update=changes)
    make = vehicle_checks if isinstance(settings, VehicleSettings) else edge_checks
    return examine([check for check in make(settings) if check.name != "task"])


def first_failed(findings: dict[str, Finding]) -> tuple[str, str]:
    """Return the first layer that failed, and what was found."""
    return next(
        (name, f"{finding.found}: {finding.advice}")
        for name, finding in findings.items()
        if finding.status is Status.FAILED
    )


@dataclass
class Scene:
    """What a fault is made of."""

    fleet: Production
    directory: Path
    ends: ExitStack

    def listening(self, backlog: int = 9) -> int:
        """Return a port that takes connections and never says a word."""
        server = socket.create_server(("127.0.0.1", 0), backlog=backlog)
        self.ends.enter_context(server)
        return int(server.getsockname()[1])

    def swallowing(self) -> int:
        """Return a port that answers nothing at all: its queue of connections is full."""
        port = self.listening(backlog=0)
        for _ in range(2):
            client = self.ends.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        return port

    def web(self) -> int:
        """Return the port of a web server that knows no path, and lives in the past."""
        server = http.server.HTTPServer(("127.0.0.1", 0), Past)
        self.ends.callback(server.server_close)
        self.ends.callback(server.shutdown)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return int(server.server_address[1])

    def certificate(
        self, begins: int, ends: int, node: str = "car-1", role: str = "vehicle"
    ) -> Changes:
        """Make a certificate that is valid between two days from now; return settings for it."""
        key = load_or_make_key(self.directory / "own.key")
        subject = {NameOID.COMMON_NAME: node, NameOID.ORGANIZATIONAL_UNIT_NAME: role}
        name = x509.Name([x509.NameAttribute(oid, value) for oid, value in subject.items()])
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(1)
            .not_valid_before(NOW + datetime.timedelta(days=begins))
            .not_valid_after(NOW + datetime.timedelta(days=ends))
            .sign(key, hashes.SHA256())
        )
        file = self.directory / "own.crt"
        file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
        return {
            "tls_certificate_file": str(file),
            "tls_key_file": str(self.directory / "own.key"),
            "authority_file": str(file),
        }

    def of(self, node: str, file: str) -> str:
        """Return a file that an enrolled node has."""
        return str(self.fleet.directory / node / file)


class Past(http.server.BaseHTTPRequestHandler):
    """Says that nothing is there, and that it is 2024."""

    def do_HEAD(self) -> None:
        self.send_error(404)

    def do_GET(self) -> None:
        self.send_error(404)

    def date_time_string(self, timestamp: float | None = None) -> str:
        del timestamp
        return "Mon, 01 Jan 2024 00:00:00 GMT"

    def log_message(self, *_: object) -> None:
        return


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_healthy_vehicle_and_gateway_are_well_in_every_layer(fleet: Production) -> None:
    vehicle = diagnose(enrolled(fleet))
    file = fleet.directory / "edge-1" / "hetertrain.toml"
    edge = diagnose(config.load(EdgeSettings, {}, file).settings)
    for findings in (vehicle, edge):
        # Where nothing is not used, nothing is skipped.
        assert [n for n, f in findings.items() if f.status is not Status.OK] == ["websocket"]
    assert "we may hear 5 topics and publish on 2" in vehicle["acl"].found
    assert "more days" in vehicle["certificate"].found


FAULTS: list[tuple[str, str, Callable[[Scene], Changes]]] = [
    ("disk", "cannot be made", lambda s: {"state_directory": s.directory / "file" / "state"}),
    ("clock", "NTP", lambda s: {"control_url": f"http://127.0.0.1:{s.web()}"}),
    ("clock", "before our certificate's", lambda s: s.certificate(1, 9)),
    ("certificate", "expired", lambda s: s.certificate(-9, -1)),
    ("certificate", "not of car-1", lambda s: s.certificate(-1, 9, "car-7")),
    ("certificate", "role edge", lambda s: s.certificate(-1, 9, role="edge")),
    ("certificate", "not the key", lambda s: {"tls_key_file": s.of("car-2", "node.key")}),
    ("certificate", "no key file", lambda s: {"tls_key_file": s.of("car-1", "nowhere")}),
    ("dns", "name server", lambda _: {"broker_host": "nowhere.invalid"}),
    ("tcp", "refused", lambda _: {"broker_port": closed_port()}),
    ("tcp", "firewall", lambda s: {"broker_port": s.swallowing()}),
    ("tls", "TLS port", lambda s: {"broker_port": s.listening()}),
    # The system takes it for an address, TLS for a name; no certificate is of it.
    ("tls", "not for 127.1", lambda _: {"broker_host": "127.1"}),
    (
        "tls",
        "check tls_ca_file",
        lambda s: {"tls_ca_file": s.certificate(-1, 9)["tls_certificate_file"]},
    ),
    ("tls", "our certificate's authority", lambda s: s.certificate(-1, 9)),
    (
        # The shipped broker lets it connect, and do nothing.
        "acl",
        "revoked",
        lambda s: {
            "node": "revoked",
            "tls_certificate_file": s.of("revoked", "node.crt"),
            "tls_key_file": s.of("revoked", "node.key"),
        },
    ),
    ("acl", "hear ht/1/another/cloud/down", lambda _: {"job": "another"}),
    ("control", "control_url", lambda _: {"control_url": f"https://127.0.0.1:{closed_port()}"}),
]


@pytest.mark.parametrize(
    ("layer", "text", "broken"), FAULTS, ids=[f"{f[0]}, {f[1]}" for f in FAULTS]
)
def test_the_layer_that_fails_is_named_with_what_to_do(
    layer: str,
    text: str,
    broken: Callable[[Scene], Changes],
    fleet: Production,
    tmp_path: Path,
    servers: ExitStack,
) -> None:
    (tmp_path / "file").touch()
    findings = diagnose(enrolled(fleet), **broken(Scene(fleet, tmp_path, servers)))

    name, said = first_failed(findings)
    assert (name, exit_code(findings)) == (layer, EXIT_CODES[layer])
    assert text in said
    # What has nothing to do with it was looked at all the same.
    assert findings["control"].status is not Status.SKIPPED
    assert findings["disk"].status is not Status.SKIPPED


def plain(**changes: object) -> VehicleSettings:
    """Return settings of a vehicle that has no certificate."""
    return VehicleSettings(job="job", node="n0", task=TASK, **changes)


@pytest.fixture
def broker(tmp_path: Path, servers: ExitStack) -> Mosquitto:
    """A broker with a password, and one topic that is forbidden to the user."""
    directory = tmp_path / "broker"
    directory.mkdir()
    (directory / "acl").write_text(
        "user n0\ntopic readwrite #\ntopic deny ht/1/job/cloud/up/t2/n0\n"
    )
    passwords = directory / "passwords"
    program = shutil.which("mosquitto_passwd")
    assert program, "it comes with mosquitto"
    subprocess.run([program, "-b", "-c", passwords, "n0", "right"], check=True)
    made = Mosquitto(directory, "password_file {directory}/passwords\nacl_file {directory}/acl\n")
    made.start()
    servers.callback(made.stop)
    return made


@pytest.mark.parametrize(
    ("password", "layer", "text"),
    [
        ("wrong", "mqtt", "broker_password"),
        ("right", "acl", "publish on ht/1/job/cloud/up/t2/n0"),
    ],
)
def test_a_wrong_password_and_a_forbidden_topic_are_told_apart(
    password: str, layer: str, text: str, broker: Mosquitto, tmp_path: Path
) -> None:
    settings = plain(
        broker_port=broker.port,
        broker_username="n0",
        broker_password=password,
        state_directory=tmp_path,
    )
    name, said = first_failed(diagnose(settings))
    assert name == layer
    assert text in said


def test_a_port_that_is_silent_to_mqtt_and_a_broker_that_acknowledges_nothing_are_told_apart(
    fleet: Production, servers: ExitStack, tmp_path: Path
) -> None:
    mute = MuteBroker(num_mute=1_000)
    mute.start()
    port = Scene(fleet, tmp_path, servers).listening()
    silent = plain(broker_port=port, state_directory=tmp_path)
    assert first_failed(diagnose(silent))[0] == "mqtt"
    name, said = first_failed(diagnose(plain(broker_port=mute.port, state_directory=tmp_path)))
    assert (name, "no PUBACK" in said) == ("acl", True)


def test_mqtt_over_websocket_is_looked_at_too(
    fleet: Production, broker: Mosquitto, servers: ExitStack, tmp_path: Path
) -> None:
    proxy = servers.enter_context(WebSocketProxy(broker.host, broker.port))
    settings = plain(
        broker_port=proxy.port,
        broker_websocket_path="/mqtt",
        broker_username="n0",
        broker_password="right",
        cell="edge-9",
        state_directory=tmp_path,
    )
    findings = diagnose(settings)
    assert exit_code(findings) == 0
    assert "/mqtt" in findings["websocket"].found
    name, said = first_failed(diagnose(settings, broker_port=Scene(fleet, tmp_path, servers).web()))
    assert (name, "404" in said) == ("websocket", True)


def test_the_command_disturbs_no_running_agent_and_says_that_it_is_there(
    fleet: Production,
) -> None:
    fleet.vehicle("car-2", 0, 2)
    wait_until(lambda: "task_loaded" in fleet.logs("car-2"), "the vehicle")
    settings = str(fleet.directory / "car-2" / "hetertrain.toml")
    command = ("vehicle", "doctor", "--config", settings, "--task")

    well = json.loads(fleet.run(*command, TASK, "--json"))
    table = fleet.run(*command, "no.such:Task", code=EXIT_CODES["task"])

    found = {row["layer"]: row["found"] for row in well["findings"]}
    assert well["exit_code"] == 0
    assert f"process {fleet.processes['car-2'].pid} works there" in found["disk"]
    assert "PYTHONPATH" in table
    wait_until(lambda: fleet.version() >= 1, "versions with it")
    assert "disconnected" not in fleet.logs("car-2")
    assert fleet.processes["car-2"].poll() is None
