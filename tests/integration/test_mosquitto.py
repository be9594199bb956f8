"""A fleet over Mosquitto with the shipped configuration: TLS, passwords, least privilege."""

from __future__ import annotations

import datetime
import os
import queue
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from hetertrain.transport import mqtt
from hetertrain.wire import topics
from hetertrain.wire.uplink import Outgoing
from tests.integration.mosquitto import Mosquitto
from tests.integration.waiting import wait_until

pytestmark = pytest.mark.broker
CONFIGURATION = Path(__file__).resolve().parents[2] / "broker_cfg"
NODES = ("aggregator", "edge-1", "car-1", "hostile")


@dataclass(frozen=True)
class Broker:
    port: int
    directory: Path

    def endpoint(self, node: str) -> mqtt.Endpoint:
        return mqtt.Endpoint(
            host="localhost",
            port=self.port,
            client_id=node,
            username=node,
            password=f"password of {node}",
            ca_file=str(self.directory / "ca.crt"),
        )

    def environment(self, node: str) -> dict[str, str]:
        return os.environ | {
            "HETERTRAIN_BROKER_HOST": "localhost",
            "HETERTRAIN_BROKER_PORT": str(self.port),
            "HETERTRAIN_BROKER_USERNAME": node,
            "HETERTRAIN_BROKER_PASSWORD": f"password of {node}",
            "HETERTRAIN_TLS_CA_FILE": str(self.directory / "ca.crt"),
        }


def write_certificates(directory: Path) -> None:
    """Make one self-signed certificate that is CA and broker in one."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    (directory / "ca.crt").write_bytes(pem)
    (directory / "broker.crt").write_bytes(pem)
    (directory / "broker.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    directory = tmp_path / "broker"
    directory.mkdir()
    write_certificates(directory)
    (directory / "acl").write_text((CONFIGURATION / "acl").read_text())
    passwords = directory / "passwords"
    passwords.touch()
    for node in NODES:
        arguments = ["mosquitto_passwd", "-b", str(passwords), node, f"password of {node}"]
        subprocess.run(arguments, check=True)
    text = (CONFIGURATION / "mosquitto.conf").read_text()
    text = text.replace("/etc/mosquitto/hetertrain", str(directory)).replace("listener 8883\n", "")
    mosquitto = Mosquitto(directory, text)
    mosquitto.start()
    yield Broker(mosquitto.port, directory)
    mosquitto.stop()


def test_a_fleet_trains_over_tls_with_the_shipped_access_rights(
    broker: Broker, tmp_path: Path
) -> None:
    task = ["--task", "hetertrain_lab.driving:DrivingTask"]
    labels = ["--labels", "index=0", "--labels", "of=2"]
    parts = {
        "aggregator": ["aggregator", *task],
        "edge-1": ["edge", "--node", "edge-1"],
        "car-1": ["vehicle", "--node", "car-1", "--cell", "edge-1", *task, *labels],
    }
    hetertrain = Path(sys.executable).with_name("hetertrain")
    processes = [
        subprocess.Popen(
            [hetertrain, *part, "--job", "fleet", "--state-directory", tmp_path],
            env=broker.environment(node),
        )
        for node, part in parts.items()
    ]
    history = tmp_path / "fleet" / "versions.jsonl"
    try:
        wait_until(
            lambda: history.exists() and len(history.read_text().splitlines()) >= 3, "versions"
        )
    finally:
        for process in processes:
            process.terminate()
        codes = [process.wait(15) for process in processes]
    assert codes == [0, 0, 0]


@pytest.mark.parametrize(
    "topic",
    [
        topics.up("fleet", "edge-1", "t1", "car-1"),
        topics.down("fleet", "edge-1", "t1"),
        topics.sync("fleet", "cloud"),
        topics.inbox("car-1"),
        topics.state("car-1"),
    ],
)
def test_a_hostile_node_is_refused_what_is_not_its_own_and_hears_so(
    broker: Broker, topic: str
) -> None:
    events: queue.Queue[mqtt.Event] = queue.Queue()
    connection = mqtt.Connection(broker.endpoint("hostile"), (), events.put)
    connection.start()
    try:
        assert isinstance(events.get(timeout=10), mqtt.Connected)
        connection.publish((Outgoing(topic, b"forged", token=1),))
        assert isinstance(events.get(timeout=10), mqtt.Denied)
    finally:
        connection.stop()


def test_a_wrong_password_is_reported_and_does_not_end_the_node(broker: Broker) -> None:
    events: queue.Queue[mqtt.Event] = queue.Queue()
    wrong = replace(broker.endpoint("car-1"), password="wrong")
    connection = mqtt.Connection(wrong, (), events.put)
    connection.start()
    try:
        event = events.get(timeout=10)
        assert isinstance(event, mqtt.Disconnected)
        assert not event.is_final
    finally:
        connection.stop()
