"""What leaves a vehicle is what ``vehicle inspect`` shows, and nothing of its data is in it."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetertrain import codec
from hetertrain.codec import announced_size
from hetertrain.core.gate import Outcome
from hetertrain.errors import PayloadError
from hetertrain.transport import mqtt
from hetertrain.transport.outbox import read_pending
from hetertrain.wire import topics
from hetertrain.wire.contents import unpack_as
from hetertrain.wire.frames import unpack
from hetertrain.wire.messages import (
    Begin,
    Chunk,
    Flushed,
    Missing,
    NodeState,
    UpdateContent,
    VerdictMessage,
)
from tests.integration.canary_task import CANARY, FILE, PERSONAL
from tests.integration.mosquitto import Mosquitto
from tests.integration.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
HETERTRAIN = Path(sys.executable).with_name("hetertrain")
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
TASK = "tests.integration.canary_task:CanaryTask"
NODE = ["--node", "car-1", "--job", "job", "--task", TASK]
UP = topics.up("job", "cloud", "t2", "car-1")
STATE = topics.state("car-1")
# To wait for an aggregator that is stopped would look like a slow link.
CAR = ["vehicle", *NODE, "--no-follow-link"]
ALL_VALUES = "100000"


def run(*arguments: str) -> Any:
    """Run a command of the vehicle to its end; return what it printed."""
    done = subprocess.run(
        [HETERTRAIN, *arguments], env=ENVIRONMENT, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def write_data(state: Path) -> None:
    data = state / "car-1" / "data"
    data.mkdir(parents=True)
    (data / FILE).write_bytes(CANARY * 100)


class Fleet:
    """A broker, an aggregator and a vehicle with marked data; all that is published is kept."""

    def __init__(self, directory: Path) -> None:
        self.state = directory / "vehicle"
        write_data(self.state)
        self.broker = Mosquitto(directory / "broker")
        self.broker.start()
        self._events: queue.SimpleQueue[mqtt.Event] = queue.SimpleQueue()
        self._published: list[mqtt.Received] = []
        endpoint = mqtt.Endpoint(host="127.0.0.1", port=self.broker.port, client_id="recorder")
        self._recorder = mqtt.Connection(endpoint, ("#",), self._events.put)
        self._recorder.start()
        assert isinstance(self._events.get(timeout=20), mqtt.Connected)
        port = ["--broker-port", str(self.broker.port), "--state-directory"]
        cloud = ["aggregator", "--job", "job", "--task", TASK, *port, str(directory / "cloud")]
        self.aggregator = self._spawn(directory, "cloud", [*cloud, "--sync-seconds", "3"])
        self.vehicle = self._spawn(directory, "car", [*CAR, *port, str(self.state)])

    def _spawn(self, directory: Path, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with (directory / f"{name}.log").open("wb") as log:
            return subprocess.Popen([HETERTRAIN, *command], env=ENVIRONMENT, stdout=log, stderr=log)

    def published(self) -> list[mqtt.Received]:
        """Return all that was published until now."""
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, mqtt.Received):
                self._published.append(event)
        return self._published

    def verdicts(self) -> dict[int, str]:
        """Return the outcomes that the vehicle was told first, by number."""
        inbox = (p.frame for p in reversed(self.published()) if p.topic == topics.inbox("car-1"))
        messages = (unpack(frame)[0] for frame in inbox)
        return {m.seq: m.outcome for m in messages if isinstance(m, VerdictMessage)}

    def waiting(self) -> int | None:
        """Return the number of the update that has no verdict, where it is on its way."""
        pending = read_pending(self.state / "car-1" / "outbox.db")
        begun = {
            message.seq
            for message in (unpack(p.frame)[0] for p in self.published() if p.topic == UP)
            if isinstance(message, Begin)
        }
        is_open = pending is not None and pending.seq in begun - self.verdicts().keys()
        return pending.seq if is_open else None

    def content(self, seq: int) -> bytes:
        """Put a content together as it was published, chunk by chunk."""
        chunks: dict[int, bytes] = {}
        for published in self.published():
            message, payload = unpack(published.frame)
            if published.topic == UP and isinstance(message, Chunk) and message.seq == seq:
                chunks[message.index] = bytes(payload)
        return b"".join(chunks[index] for index in range(len(chunks)))

    def stop(self) -> None:
        """End everything."""
        for process in (self.vehicle, self.aggregator):
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.wait(30)
        self._recorder.stop()
        self.broker.stop()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("inspect"))
    yield fleet
    fleet.stop()


@pytest.mark.broker
def test_what_inspect_shows_of_the_pending_update_is_what_the_aggregator_receives(
    fleet: Fleet, tmp_path: Path
) -> None:
    wait_until(lambda: Outcome.MERGED in fleet.verdicts().values(), "an update that is merged")
    fleet.aggregator.send_signal(signal.SIGSTOP)
    wait_until(lambda: fleet.waiting() is not None, "an update that waits for its verdict")
    seq = fleet.waiting()
    file = tmp_path / "content"

    # The agent runs on, and owns the outbox.
    more = ("--values", ALL_VALUES, "--json", "--content", str(file))
    shown = run("vehicle", "inspect", *NODE, "--state-directory", str(fleet.state), *more)
    fleet.aggregator.send_signal(signal.SIGCONT)
    wait_until(lambda: seq in fleet.verdicts(), "the verdict")

    received = fleet.content(seq)
    head, payload = unpack_as(UpdateContent, received)
    decoded = codec.parse(payload, announced_size(payload))
    assert fleet.verdicts()[seq] == Outcome.MERGED
    assert file.read_bytes() == received
    assert shown["content"]["sha256"] == hashlib.sha256(received).hexdigest()
    assert shown["update"] == json.loads(json.dumps(asdict(head)))
    assert (shown["update"]["seq"], shown["update"]["integers"]) == (seq, [head.integers[0]])
    values = np.array([row["value"] for row in shown["values"]], np.float32)
    assert values.tobytes() == decoded.values().tobytes()
    assert shown["payload"]["values_kept"] == values.size > 0
    assert shown["payload"]["norm"] == pytest.approx(decoded.norm())
    assert {row["tensor"] for row in shown["values"]} <= {
        *("shared.weight", "shared.bias", "norm.weight", "norm.bias"),
        *("norm.running_mean", "norm.running_var"),
    }
    assert shown["stays"]["local_tensors"] == ["personal.weight", "personal.bias"]
    assert shown["stays"]["data_directory"] == str(fleet.state / "car-1" / "data")
    assert fleet.vehicle.poll() is None


@pytest.mark.broker
def test_nothing_of_a_vehicles_data_and_only_five_kinds_of_messages_leave_it(fleet: Fleet) -> None:
    wait_until(lambda: len(fleet.verdicts()) >= 4, "four updates, and a sync among them")
    published = fleet.published()
    from_vehicle = [each for each in published if each.topic in (UP, STATE)]
    kinds = {type(unpack(each.frame)[0]) for each in from_vehicle}
    # All else on the broker is the aggregator's; the vehicle said nothing on another topic.
    others = {each.topic for each in published} - {UP, STATE}
    job = "ht/1/job/cloud"
    assert others <= {f"{job}/down/t2", f"{job}/sync", f"{job}/status", topics.inbox("car-1")}
    assert {NodeState, Begin, Chunk} <= kinds <= {NodeState, Begin, Chunk, Flushed, Missing}

    fleet_seqs = [seq for seq in fleet.verdicts() if fleet.content(seq)]
    haystack = b"".join(
        [*(each.frame + each.topic.encode() for each in published), *map(fleet.content, fleet_seqs)]
    )
    decoded = b"".join(
        codec.decode(payload, announced_size(payload)).tobytes()
        for _, payload in (unpack_as(UpdateContent, fleet.content(seq)) for seq in fleet_seqs)
    )
    features = np.frombuffer(CANARY, np.uint8).astype(np.float32)
    marks = [CANARY[:8], CANARY[-8:], FILE.encode(), np.float32(PERSONAL).tobytes()]
    marks += [row[:16].tobytes() for row in (features, features / 255)]
    assert fleet_seqs
    assert not [mark for mark in marks if mark in haystack or mark in decoded]


def test_a_dry_run_shows_what_would_leave_and_leaves_no_trace(tmp_path: Path) -> None:
    write_data(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    command = ("vehicle", "inspect", *NODE, "--state-directory", str(tmp_path), "--json")

    shown = run(*command, "--steps", "3", "--values", "2")

    assert shown["source"] == "a dry run of 3 steps"
    assert (shown["update"]["steps"], shown["update"]["examples"]) == (3, 100 * len(CANARY))
    assert (shown["heartbeat"]["steps"], shown["heartbeat"]["label"]) == (3, "marked")
    assert set(shown["heartbeat"]) == set(NodeState.__dataclass_fields__)
    assert [row["tensor"] for row in shown["values"]] == ["shared.weight"] * 2
    assert {row["kind"] for row in shown["frames"]} == {"NodeState", "Begin", "Chunk"}
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("shares", "shown_as"), [(True, [48.137, 11.576]), (False, [None, None])])
def test_a_position_is_shown_as_it_would_leave_and_only_where_it_would(
    shares: bool, shown_as: list[float | None], tmp_path: Path
) -> None:
    write_data(tmp_path)
    place = {"Vehicle": {"CurrentLocation": {"Latitude": 48.13715, "Longitude": 11.57612}}}
    file = tmp_path / "signals.json"
    file.write_text(json.dumps(place))
    more = ("--signals", f"file:{file}", "--steps", "1", *(["--share-position"] * shares))
    command = ("vehicle", "inspect", *NODE, "--state-directory", str(tmp_path), "--json")
    heartbeat = run(*command, *more)["heartbeat"]
    assert [heartbeat["latitude"], heartbeat["longitude"]] == shown_as


def test_a_payload_says_how_long_its_vector_is_and_cannot_say_too_much() -> None:
    payload = codec.encode(np.ones(300, np.float32), 100).payload
    assert announced_size(payload) == 300
    for bad in (payload[:5], payload[:4] + b"\xff" * 8):
        with pytest.raises(PayloadError):
            announced_size(bad)
