"""From nothing to a training fleet and back, as an operator does it: over TLS, with certificates of
the fleet's own authority, on PostgreSQL.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from hetertrain.enrolment import is_renewal_due, renew
from hetertrain.transport import mqtt
from hetertrain.wire import topics
from hetertrain.wire.events import Outgoing
from hetertrain.wire.frames import pack
from hetertrain.wire.messages import LogLines
from hetertrain_cloud.control import timeline
from hetertrain_cloud.control.database import Database
from hetertrain_cloud.control.dynsec import initial_configuration
from hetertrain_cloud.control.service import now
from tests.integration.postgres import Postgres
from tests.integration.production import Production
from tests.integration.waiting import wait_until

pytestmark = pytest.mark.broker


@pytest.fixture(scope="module")
def production(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Production]:
    directory = tmp_path_factory.mktemp("production")
    server = Postgres(directory / "postgres")
    made = Production(directory, server.database("production"))
    try:
        made.start()
        yield made
    finally:
        codes = made.stop()
        server.stop()
    assert set(codes.values()) <= {0}, {name: made.logs(name)[-2000:] for name in codes}


@pytest.fixture(scope="module")
def fleet(production: Production) -> Production:
    """Two vehicles at work, one behind a gateway; and one node that is hostile."""
    production.create_job(sync_seconds=4.0, evaluate_on_nodes=True)
    production.spawn("edge-1", "edge", "--config", str(production.enrol("edge-1", "edge")))
    for index, cell in enumerate(("cloud", "edge-1")):
        production.enrol(f"car-{index}")
        shares = ("--share-log",) if index == 0 else ()
        production.vehicle(f"car-{index}", index, 2, "--cell", cell, *shares)
    production.enrol("hostile")
    wait_until(lambda: "car-1" in production.contributors(), "updates through the gateway")
    assert not any("access_denied" in production.logs(name) for name in production.processes)
    return production


def doings(fleet: Production) -> set[str]:
    """Return what the nodes at work say they do."""
    nodes = fleet.json("node", "list")
    return {node["live"]["doing"] for node in nodes if node["live"]}


def kept_versions(fleet: Production) -> list[int]:
    """Return the job's versions that can be gone back to, newest first."""
    return [row["version"] for row in fleet.json("version", "list", "fleet") if row["is_kept"]]


def test_nodes_measure_each_syncs_model_on_their_own_data(fleet: Production) -> None:
    wait_until(lambda: fleet.json("job", "status", "fleet")["on_nodes"], "measurements of nodes")
    (measured,) = fleet.json("job", "status", "fleet")["on_nodes"]
    assert measured["metric"] == "r2"
    assert measured["nodes"] in (1, 2)
    assert measured["least"] <= measured["mean"] <= 1


def test_a_job_is_paused_rolled_back_and_goes_on(fleet: Production) -> None:
    wait_until(lambda: kept_versions(fleet), "a version that is kept")
    fleet.run("job", "pause", "fleet")
    wait_until(lambda: fleet.json("job", "status", "fleet")["state"] == "paused", "the pause")
    # Nodes hear of it too, the gateway and the vehicle behind it included.
    wait_until(lambda: doings(fleet) == {"resting"}, "the nodes' rest")
    paused_at = fleet.version()
    kept = kept_versions(fleet)

    fleet.run("version", "promote", "fleet", str(kept[0]))
    fleet.run("version", "rollback", "fleet", str(kept[0]))
    fleet.run("job", "start", "fleet")
    wait_until(lambda: fleet.version() >= paused_at + 2, "versions after the rollback")
    again = fleet.json("version", "show", "fleet", str(paused_at + 1))
    old, new = fleet.directory / "old", fleet.directory / "new"
    fleet.run("version", "download", "fleet", str(kept[0]), str(old))

    assert again["rolled_back_to"] == kept[0]
    assert fleet.json("version", "show", "fleet", str(kept[0]))["is_promoted"]
    assert fleet.json("version", "show", "fleet", str(paused_at))["lineage"] != again["lineage"]
    # Its time goes on, over pauses and rollbacks.
    times = [row["elapsed_seconds"] for row in fleet.history()]
    assert times == sorted(times)
    assert times[-1] > times[0]
    # A model alone, by its tensors' names, and nothing of who contributed.
    assert all("aggregator-state" not in name for name in load_file(old))
    assert fleet.run("version", "download", "fleet", "999999", str(new), code=11) == ""


def test_what_was_done_to_a_node_and_what_it_did_is_in_its_timeline(fleet: Production) -> None:
    assert fleet.database_url is not None
    database = Database(fleet.database_url)

    def kinds() -> set[str]:
        with database.read() as transaction:
            lines, _ = timeline.read(transaction, "car-1", timeline.Place(), 50)
        return {line.kind for line in lines}

    wanted = {"enrolled", "training_stopped", "training_began"}
    wait_until(lambda: wanted <= kinds(), "the job's pause in the timeline")
    database.close()
    assert "upkeep_failed" not in fleet.logs("cloud")


@pytest.mark.parametrize("node", ["car-0", "edge-1"])
def test_an_operator_reads_the_end_of_a_nodes_log(fleet: Production, node: str) -> None:
    lines = fleet.node_log(node)
    assert len(lines) <= 100
    logged = fleet.logs(node)
    assert all(line in logged for line in lines)


def test_a_vehicles_log_is_its_owners_unless_shared(fleet: Production) -> None:
    assert fleet.run("node", "log", "car-1", code=11) == ""
    entries = fleet.json("audit", "list", "--kind", "node", "--object", "car-1")
    assert entries[0]["action"] == "node_log_read"


def test_a_forged_answer_is_not_taken_for_a_nodes_log(fleet: Production) -> None:
    connection, events = fleet.connect("hostile")
    forged = LogLines(node="car-0", number=1, is_shared=True, lines=("forged",))
    unasked = LogLines(node="hostile", number=1, is_shared=True, lines=("forged",))
    try:
        assert isinstance(events.get(timeout=10), mqtt.Connected)
        refused = fleet.logs("cloud").count("unasked")
        frames = (pack(unasked), pack(forged))
        connection.publish(tuple(Outgoing(topics.log("hostile"), frame) for frame in frames))
        wait_until(lambda: fleet.logs("cloud").count("unasked") > refused, "its refusal")
        assert "misplaced" in fleet.logs("cloud")
    finally:
        connection.stop()


@pytest.mark.parametrize(
    "topic",
    [
        topics.up("fleet", "cloud", "t1", "car-0"),
        topics.up("another", "cloud", "t1", "hostile"),
        topics.down("fleet", "cloud", "t1"),
        topics.sync("fleet", "cloud"),
        topics.status("fleet", "cloud"),
        topics.members("fleet", "edge-1"),
        topics.inbox("car-0"),
        topics.log("car-0"),
        topics.state("car-0"),
        "$CONTROL/dynamic-security/v1",
    ],
)
def test_a_hostile_node_may_not_publish_what_is_not_its_own_and_hears_so(
    fleet: Production, topic: str
) -> None:
    connection, events = fleet.connect("hostile")
    try:
        assert isinstance(events.get(timeout=10), mqtt.Connected)
        connection.publish((Outgoing(topic, b"forged", token=1),))
        assert isinstance(events.get(timeout=10), mqtt.Denied)
    finally:
        connection.stop()


@pytest.mark.parametrize(
    "topic",
    [
        "#",
        "ht/1/#",
        topics.down("another", "cloud", "t1"),
        topics.inbox("car-0"),
        topics.log("+"),
        topics.log("hostile"),
        topics.members("fleet", "edge-1"),
        "$share/g/#",
    ],
)
def test_a_hostile_node_may_not_hear_what_is_not_meant_for_it(
    fleet: Production, topic: str
) -> None:
    connection, events = fleet.connect("hostile", topics.inbox("hostile"), topic)
    try:
        denied = events.get(timeout=10)
        assert isinstance(denied, mqtt.Denied)
        assert denied.what == topic
        assert isinstance(events.get(timeout=10), mqtt.Connected)
    finally:
        connection.stop()


def test_a_revoked_node_is_dropped_and_asks_less_and_less(fleet: Production) -> None:
    connection, events = fleet.connect("hostile", topics.inbox("hostile"))
    try:
        assert isinstance(events.get(timeout=10), mqtt.Connected)
        fleet.run("node", "revoke", "hostile")
        seen = [events.get(timeout=5)]
        while not getattr(seen[-1], "is_refusal", False):
            seen.append(events.get(timeout=20))
        assert isinstance(seen[0], mqtt.Disconnected)
        assert mqtt.backoff_seconds_max(9, 1) == mqtt.REFUSED_SECONDS_MIN
        assert mqtt.backoff_seconds_max(9, 9) == mqtt.REFUSED_SECONDS_MAX >= 3600
    finally:
        connection.stop()


def test_a_killed_trainer_is_replaced_and_its_vehicle_trains_on(fleet: Production) -> None:
    agent = fleet.processes["car-0"].pid
    for trainer in trainers_of(agent):
        os.kill(trainer, signal.SIGKILL)
    wait_until(lambda: "train_failed" in fleet.logs("car-0"), "the report of the failure")
    before = num_updates(fleet, "car-0")
    wait_until(lambda: num_updates(fleet, "car-0") > before, "updates after it")
    assert fleet.processes["car-0"].poll() is None


def trainers_of(agent: int) -> list[int]:
    """Return the processes that an agent's trainer runs in."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            is_trainer = b"spawn_main" in (stat.parent / "cmdline").read_bytes()
            if parent == agent and is_trainer:
                found.append(int(stat.parent.name))
    return found


def num_updates(fleet: Production, node: str) -> int:
    """Return how many of a node's updates are in the job's model."""
    history = fleet.directory / "cloud" / "jobs" / "fleet" / "versions.jsonl"
    rows = (json.loads(row) for row in history.read_text().splitlines())
    return sum(item[0] == node for row in rows for item in row["contributions"])


def test_a_certificate_is_renewed_without_hands(fleet: Production) -> None:
    directory = fleet.directory / "car-0"
    before = (directory / "node.crt").read_bytes()
    assert not is_renewal_due(directory / "node.crt", now())
    renew(
        url=fleet.url,
        key_file=directory / "node.key",
        certificate_file=directory / "node.crt",
        authority_file=directory / "authority.crt",
    )
    assert (directory / "node.crt").read_bytes() != before
    connection, events = fleet.connect("car-0", topics.inbox("car-0"))
    try:
        assert isinstance(events.get(timeout=10), mqtt.Connected)
    finally:
        connection.stop()


def test_a_broker_that_forgot_its_rules_is_given_them_again(fleet: Production) -> None:
    version = fleet.version()
    rules = fleet.mosquitto.directory / "dynamic-security.json"
    fleet.mosquitto.kill()
    # As if an earlier release had set it up, whose control plane did not ask for logs.
    configuration = json.loads(initial_configuration())
    (own,) = configuration["roles"]
    own["acls"] = [acl for acl in own["acls"] if not acl["topic"].endswith(("/log", "/in"))]
    rules.write_text(json.dumps(configuration))
    fleet.mosquitto.start()
    wait_until(lambda: "node-car-0" in rules.read_text(), "the rules")
    wait_until(lambda: fleet.version() >= version + 2, "versions after it")
    assert "node-hostile" not in rules.read_text()
    assert fleet.node_log("car-0")


def test_a_killed_control_plane_comes_back_and_training_does_not_notice(
    fleet: Production,
) -> None:
    started = [json.loads(row) for row in fleet.logs("cloud").splitlines() if '"pid"' in row]
    pids = [row["pid"] for row in started if row["process"] == "control-plane"]
    os.kill(pids[-1], signal.SIGKILL)
    history = fleet.directory / "cloud" / "jobs" / "fleet" / "versions.jsonl"
    before = len(history.read_text().splitlines())
    wait_until(lambda: len(history.read_text().splitlines()) > before, "versions without it")
    wait_until(fleet._answers, "the API")
    assert fleet.json("job", "status", "fleet")["restarts"] == 0


def test_a_job_ends_by_its_own_rule_and_says_why(fleet: Production) -> None:
    fleet.run("job", "stop", "fleet")
    wait_until(lambda: fleet.json("job", "status", "fleet")["state"] == "stopped", "the stop")
    limit = fleet.version() + 2
    with_rule = fleet.json("job", "status", "fleet")["specification"] | {"max_versions": limit}
    file = fleet.directory / "changed.json"
    file.write_text(json.dumps(with_rule))
    fleet.run("job", "change", "fleet", str(file))
    fleet.run("job", "start", "fleet")
    wait_until(lambda: fleet.json("job", "status", "fleet")["state"] == "completed", "the end")
    status = fleet.json("job", "status", "fleet")
    assert status["reason"] == f"version {limit} is there"
    assert status["version"] >= limit


def test_all_of_it_is_in_an_audit_trail_that_is_whole(fleet: Production) -> None:
    actions = {row["action"] for row in fleet.json("audit", "list")}
    assert {"node_enrolled", "node_revoked", "job_pause", "version_rolled_back"} <= actions
    assert fleet.json("audit", "verify")["broken_at"] is None


def test_a_wrong_authority_is_noticed_before_anything_is_said(
    production: Production, tmp_path: Path
) -> None:
    claim = "htc.0.0." + "0" * 64
    production.run(
        *("vehicle", "enroll", "--url", production.url, "--claim", claim),
        *("--node", "car-9", "--directory", str(tmp_path)),
        code=10,
    )
    assert not (tmp_path / "node.key").exists()
