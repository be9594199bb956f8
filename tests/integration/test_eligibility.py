"""A real agent with a real trainer process rests and works as its vehicle's signals say."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from hetertrain.core.eligibility import Value
from hetertrain.transport import mqtt
from hetertrain.wire.events import Outgoing
from hetertrain.wire.frames import pack
from hetertrain.wire.messages import JobOrder, NodeState
from hetertrain.wire.topics import order
from hetertrain_lab.monitor import Monitor
from tests.integration.mosquitto import Mosquitto
from tests.integration.waiting import wait_until

pytestmark = pytest.mark.broker
HETERTRAIN = Path(sys.executable).with_name("hetertrain")
TASK = ["--task", "hetertrain_lab.driving:DrivingTask"]
STEP_SECONDS = 30.0
"""Longer than any wait of the test: what stops meanwhile has stopped in the middle of a step."""
PARKED: dict[str, Value] = {"Vehicle.Speed": 0.0}
DRIVING: dict[str, Value] = {"Vehicle.Speed": 52.0}

Say = Callable[[dict[str, Value]], None]


@contextmanager
def file_source(directory: Path, _broker: Mosquitto) -> Iterator[tuple[str, Say]]:
    path = directory / "signals.json"

    def say(values: dict[str, Value]) -> None:
        path.with_suffix(".new").write_text(json.dumps(values))
        path.with_suffix(".new").replace(path)

    yield f"file:{path}", say


@contextmanager
def mqtt_source(_directory: Path, broker: Mosquitto) -> Iterator[tuple[str, Say]]:
    endpoint = mqtt.Endpoint(host=broker.host, port=broker.port, client_id="bus", session_seconds=0)
    connection = mqtt.Connection(endpoint, (), lambda _: None)
    connection.start()

    def say(values: dict[str, Value]) -> None:
        for name, value in values.items():
            topic = f"vss/{name.replace('.', '/')}"
            connection.publish((Outgoing(topic, json.dumps(value).encode(), retain=True),))

    yield f"mqtt://{broker.host}:{broker.port}/vss", say
    connection.stop()


@contextmanager
def kuksa_source(_directory: Path, _broker: Mosquitto) -> Iterator[tuple[str, Say]]:
    """A databroker's side of the protocol: the databroker itself is in no package index."""
    import grpc
    from kuksa.val.v2 import types_pb2, val_pb2, val_pb2_grpc

    waiting: queue.SimpleQueue[dict[str, Value] | None] = queue.SimpleQueue()

    class Databroker(val_pb2_grpc.VALServicer):  # type: ignore[misc]  # it has no types
        def Subscribe(self, request: Any, _context: Any) -> Iterator[Any]:  # noqa: N802
            while (values := waiting.get()) is not None:
                points = {
                    name: types_pb2.Datapoint(value=types_pb2.Value(double=value))
                    for name, value in values.items()
                    if name in request.signal_paths
                }
                yield val_pb2.SubscribeResponse(entries=points)

    server = grpc.server(futures.ThreadPoolExecutor(4))
    val_pb2_grpc.add_VALServicer_to_server(Databroker(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"kuksa://127.0.0.1:{port}", waiting.put
    waiting.put(None)
    server.stop(None)


@contextmanager
def running(directory: Path, broker: Mosquitto, part: list[str]) -> Iterator[subprocess.Popen[str]]:
    common = ["--job", "job", "--broker-port", str(broker.port)]
    with (directory / f"{part[0]}.log").open("w") as log, ExitStack() as ends:
        process = subprocess.Popen(
            [HETERTRAIN, *part, *common, "--state-directory", directory / part[0]],
            stderr=log,
            text=True,
        )
        ends.callback(process.wait, 20)
        ends.callback(process.terminate)
        yield process


def trainer_of(agent: int) -> int | None:
    """Return the trainer process of an agent."""
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            text = status.read_text()
            command = (status.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if f"PPid:\t{agent}\n" in text and b"spawn_main" in command:
            return int(status.parent.name)
    return None


def is_paused(process: int | None) -> bool:
    if process is None:
        return False
    return "State:\tT" in Path(f"/proc/{process}/status").read_text()


@pytest.mark.parametrize("source", [file_source, mqtt_source, kuksa_source])
def test_losing_eligibility_stops_a_running_step_and_later_it_goes_on_where_it_was(
    source: Any, tmp_path: Path, broker: Mosquitto, monitor: Monitor
) -> None:
    def state() -> NodeState | None:
        return monitor.nodes().get("car-1")

    def does(doing: str) -> bool:
        now = state()
        return now is not None and now.doing == doing

    vehicle = ["vehicle", "--node", "car-1", *TASK, "--labels", "index=0", "--labels", "of=4"]
    vehicle += ["--train-when", "Vehicle.Speed < 1", "--step-seconds-min", str(STEP_SECONDS)]
    with ExitStack() as stack:
        url, say = stack.enter_context(source(tmp_path, broker))
        stack.enter_context(running(tmp_path, broker, ["aggregator", *TASK]))
        agent = stack.enter_context(running(tmp_path, broker, [*vehicle, "--signals", url]))

        wait_until(lambda: does("not_eligible"), "a vehicle of which nothing is known")
        assert trainer_of(agent.pid) is None, "nothing is loaded before it may train"
        say(PARKED)
        wait_until(lambda: does("training"), "the first step")
        trainer = trainer_of(agent.pid)
        assert trainer is not None

        say(DRIVING)
        drove_at = time.monotonic()
        wait_until(lambda: is_paused(trainer), "the trainer's pause", meanwhile=lambda: None)
        assert time.monotonic() - drove_at < STEP_SECONDS / 2, "in the middle of the step"
        wait_until(lambda: does("not_eligible"), "the heartbeat that says why")
        resting = state()
        assert resting is not None
        assert (resting.waiting_for, resting.active) == ("Vehicle.Speed < 1: it is 52", 0)

        say(PARKED)
        wait_until(lambda: not is_paused(trainer) and does("training"), "it goes on")
        assert trainer_of(agent.pid) == trainer


def test_a_paused_trainer_ends_with_its_agent_however_that_ends(
    tmp_path: Path, broker: Mosquitto, monitor: Monitor
) -> None:
    path = tmp_path / "signals.json"
    path.write_text(json.dumps(PARKED))
    vehicle = ["vehicle", "--node", "car-1", *TASK, "--labels", "index=0", "--labels", "of=4"]
    vehicle += ["--signals", f"file:{path}", "--train-when", "Vehicle.Speed < 1"]
    with running(tmp_path, broker, vehicle) as agent:
        wait_until(lambda: "car-1" in monitor.nodes(), "the agent")
        wait_until(lambda: monitor.nodes()["car-1"].doing == "joining", "its trainer")
        trainer = trainer_of(agent.pid)
        path.write_text(json.dumps(DRIVING))
        wait_until(lambda: is_paused(trainer), "the trainer's pause")
        agent.kill()
        wait_until(lambda: not Path(f"/proc/{trainer}").exists(), "the trainer's end")


def test_a_link_that_may_not_be_used_is_closed_with_the_reason_and_opened_again(
    tmp_path: Path, broker: Mosquitto, monitor: Monitor
) -> None:
    path = tmp_path / "signals.json"
    path.write_text('{"network": "wifi"}')
    vehicle = ["vehicle", "--node", "car-1", *TASK, "--labels", "index=0", "--labels", "of=4"]
    vehicle += ["--signals", f"file:{path}", "--send-when", "network in wifi, ethernet"]
    vehicle += ["--megabytes-per-month", "cellular=500"]
    with running(tmp_path, broker, vehicle):
        wait_until(lambda: "car-1" in monitor.nodes(), "the agent")
        wait_until(lambda: monitor.nodes()["car-1"].is_online, "the link")
        assert "of 500 MB over cellular" in monitor.nodes()["car-1"].budgets
        path.write_text('{"network": "cellular"}')
        wait_until(lambda: not monitor.nodes()["car-1"].is_online, "the link's end")
        said = monitor.nodes()["car-1"]
        assert (said.doing, said.waiting_for) == (
            "link_closed",
            "network in wifi, ethernet: it is cellular",
        )
        path.write_text('{"network": "wifi"}')
        wait_until(lambda: monitor.nodes()["car-1"].is_online, "the link again")


def test_the_jobs_rules_count_unless_the_owner_says_otherwise(
    tmp_path: Path, broker: Mosquitto, monitor: Monitor
) -> None:
    endpoint = mqtt.Endpoint(host=broker.host, port=broker.port, client_id="control")
    connection = mqtt.Connection(endpoint, (), lambda _: None)
    connection.start()
    rules = JobOrder(number=1, state="running", train_when=("Vehicle.Speed < 1",))
    connection.publish((Outgoing(order("job"), pack(rules), retain=True),))
    with ExitStack() as stack:
        for node, flags in (("obeys", []), ("own-way", ["--no-follow-job-rules"])):
            (tmp_path / node).mkdir()
            part = [
                "vehicle",
                "--node",
                node,
                *TASK,
                "--labels",
                "index=0",
                "--labels",
                "of=4",
                *flags,
            ]
            stack.enter_context(running(tmp_path / node, broker, part))

        def doing(node: str) -> str:
            state = monitor.nodes().get(node)
            return "" if state is None else state.doing

        wait_until(lambda: doing("obeys") == "not_eligible", "the job's rule")
        wait_until(lambda: doing("own-way") == "joining", "the owner's word")
    connection.stop()


@pytest.mark.parametrize(
    ("budget", "doing", "reason"),
    [
        (["--processor-seconds-per-day", "0.01"], "not_eligible", "0.01 s of processor time"),
        (["--megabytes-per-month", "any=0.0001"], "link_closed", "0.0001 MB over all links"),
    ],
)
def test_what_is_used_up_is_used_no_more_and_the_fleet_is_told(
    budget: list[str], doing: str, reason: str, tmp_path: Path, broker: Mosquitto, monitor: Monitor
) -> None:
    vehicle = ["vehicle", "--node", "car-1", *TASK, "--labels", "index=0", "--labels", "of=4"]
    with ExitStack() as stack:
        stack.enter_context(running(tmp_path, broker, ["aggregator", *TASK]))
        stack.enter_context(running(tmp_path, broker, [*vehicle, *budget]))

        def does(doing: str) -> bool:
            state = monitor.nodes().get("car-1")
            return state is not None and state.doing == doing

        wait_until(lambda: does(doing), "the budget's end")
        state = monitor.nodes()["car-1"]
        assert reason in state.waiting_for
        assert "of 0.0" in state.budgets


def test_a_vehicle_goes_to_the_next_cell_where_it_has_no_link_and_to_the_one_that_signals_name(
    tmp_path: Path, broker: Mosquitto
) -> None:
    path, other = tmp_path / "signals.json", Mosquitto(tmp_path / "other")
    other.start()
    cells = {"rsu-1": broker, "rsu-2": other}
    part = ["vehicle", "--node", "car-1", *TASK, "--labels", "index=0", "--labels", "of=4"]
    part += ["--cell", "rsu-1", "--cell-patience-seconds", "1", "--signals", f"file:{path}"]
    for name, each in cells.items():
        part += ["--cells", f"{name}={each.host}:{each.port}"]
    with ExitStack() as stack:
        stack.callback(other.stop)
        monitors = {name: Monitor(b.host, b.port, "job") for name, b in cells.items()}
        for monitor in monitors.values():
            stack.callback(monitor.stop)
        stack.enter_context(running(tmp_path, broker, part))

        def is_in(cell: str) -> bool:
            state = monitors[cell].nodes().get("car-1")
            return state is not None and state.is_online and state.cell == cell

        wait_until(lambda: is_in("rsu-1"), "the first cell")
        path.write_text('{"cell": "nowhere, and no name"}')
        broker.stop()
        wait_until(lambda: is_in("rsu-2"), "the next cell")
        broker.start()
        path.write_text('{"cell": "rsu-1"}')
        wait_until(lambda: is_in("rsu-1"), "the cell that the signals name")
        wait_until(lambda: not is_in("rsu-2"), "its farewell in the other")
