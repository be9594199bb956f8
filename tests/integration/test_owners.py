"""One aggregator for a job and one process for a node, wherever the second one is started."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hetertrain_lab.monitor import Monitor
from tests.integration.mosquitto import Mosquitto
from tests.integration.waiting import wait_until

pytestmark = pytest.mark.broker
HETERTRAIN = Path(sys.executable).with_name("hetertrain")
TASK = ["--task", "hetertrain_lab.driving:DrivingTask"]
AGGREGATOR = ["aggregator", *TASK]
VEHICLE = ["vehicle", "--node", "car-1", "--cell", "cloud", *TASK, "--labels", "index=0"]
TRANSPORT_FAILED = 7

Start = Callable[[list[str]], subprocess.Popen[str]]


@pytest.fixture
def start(broker: Mosquitto, tmp_path: Path) -> Iterator[Start]:
    """Start a part as on a machine of its own: each has another state directory."""
    with ExitStack() as ends:
        started: list[subprocess.Popen[str]] = []

        def start(part: list[str]) -> subprocess.Popen[str]:
            directory = tmp_path / f"machine-{len(started)}"
            command = [HETERTRAIN, *part, "--job", "job", "--broker-port", str(broker.port)]
            process = subprocess.Popen(
                [*command, "--state-directory", directory],
                stderr=(tmp_path / f"log-{len(started)}").open("w"),
                text=True,
            )
            started.append(process)
            ends.callback(process.wait, 20)
            ends.callback(process.terminate)
            return process

        yield start


def is_running(monitor: Monitor) -> bool:
    return "cloud" in monitor.statuses()


def test_a_second_aggregator_is_refused_and_the_first_undisturbed(
    start: Start, monitor: Monitor, tmp_path: Path
) -> None:
    first = start(AGGREGATOR)
    wait_until(lambda: is_running(monitor), "the first aggregator")

    second = start(AGGREGATOR)

    assert second.wait(60) == TRANSPORT_FAILED
    assert "another process is connected as job-aggregator" in (tmp_path / "log-1").read_text()
    assert first.poll() is None
    assert "disconnected" not in (tmp_path / "log-0").read_text()


def test_an_aggregator_that_was_paused_and_replaced_ends_when_it_goes_on(
    start: Start, monitor: Monitor, tmp_path: Path
) -> None:
    first = start(AGGREGATOR)
    wait_until(lambda: is_running(monitor), "the first aggregator")
    first.send_signal(signal.SIGSTOP)
    second = start(AGGREGATOR)
    wait_until(lambda: "connected" in (tmp_path / "log-1").read_text(), "the second aggregator")

    first.send_signal(signal.SIGCONT)

    assert first.wait(60) == TRANSPORT_FAILED
    assert second.poll() is None
    assert "disconnected" not in (tmp_path / "log-1").read_text()


def test_a_second_node_of_a_name_is_refused_and_the_first_undisturbed(
    start: Start, monitor: Monitor, tmp_path: Path
) -> None:
    start(AGGREGATOR)
    first = start([*VEHICLE, "--labels", "of=2"])
    wait_until(lambda: "car-1" in monitor.nodes(), "the first vehicle")

    second = start([*VEHICLE, "--labels", "of=2"])

    assert second.wait(60) == TRANSPORT_FAILED
    assert "another process is connected as car-1" in (tmp_path / "log-2").read_text()
    assert first.poll() is None
    assert "disconnected" not in (tmp_path / "log-1").read_text()
