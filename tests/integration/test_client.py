"""Loops of the user's own as nodes of a fleet: real agents, a real broker, a real aggregator."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import hetertrain
from hetertrain.client import Checkpoint, Session
from hetertrain.errors import AgentError, LayoutError, TrainError
from hetertrain.transport.broker import EmbeddedBroker
from hetertrain.wire.messages import NodeState
from hetertrain_lab.monitor import Monitor
from tests.integration.waiting import wait_until

pytestmark = pytest.mark.broker
ROOT = Path(__file__).resolve().parents[2]
GOOD_LOSS = 0.3
END_SECONDS = 30.0
INITIAL = {"w": np.zeros((2, 3)), "counter": np.zeros((), np.int64), "own": np.full(2, 7.0)}
LOCAL = ("own",)


@dataclass(frozen=True)
class Job:
    """A job without a task, at work."""

    broker: EmbeddedBroker
    directory: Path
    monitor: Monitor

    def join(self, node: str, **settings: object) -> Session:
        return hetertrain.join(
            "fleet",
            INITIAL,
            local=LOCAL,
            timeout_seconds=60.0,
            node=node,
            broker_port=self.broker.port,
            state_directory=self.directory / "state",
            **settings,
        )


@contextmanager
def job_of(directory: Path, save: Callable[[Path], object]) -> Iterator[Job]:
    """Run a broker and an aggregator process that begins with a file."""
    directory.mkdir(parents=True, exist_ok=True)
    initial = directory / "initial.safetensors"
    save(initial)
    with EmbeddedBroker(directory / "broker") as broker:
        monitor = Monitor(broker.host, broker.port, "fleet")
        flags = ["--job", "fleet", "--initial-model", str(initial)]
        flags += ["--broker-port", str(broker.port), "--state-directory", str(directory / "state")]
        with (directory / "aggregator.log").open("wb") as log:
            aggregator = subprocess.Popen(
                [sys.executable, "-m", "hetertrain", "aggregator", *flags], stdout=log, stderr=log
            )
        try:
            yield Job(broker, directory, monitor)
        finally:
            monitor.stop()
            aggregator.terminate()
            code = aggregator.wait(END_SECONDS)
    assert code == 0


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    def save(path: Path) -> None:
        hetertrain.save_initial(INITIAL, path, local=LOCAL)

    with job_of(tmp_path_factory.mktemp("job"), save) as job:
        yield job


def published(session: Session, checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """Publish one step up."""
    arrays = {name: array + 1 for name, array in checkpoint.arrays.items()}
    session.publish(arrays, examples=10, steps=1)
    return arrays


def agent_pid(session: Session) -> int:
    process = session._agent._process
    assert process is not None
    return process.pid


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("example", ["numpy_loop", "torch_loop"])
def test_two_loops_learn_together_and_end_with_ctrl_c(example: str, tmp_path: Path) -> None:
    script = str(ROOT / "examples" / f"{example}.py")

    def save(path: Path) -> None:
        subprocess.run([sys.executable, script, "--save-initial", path], check=True)

    def losses(node: str) -> list[float]:
        return [
            float(x) for x in re.findall(r"loss (\S+)\n", (tmp_path / f"{node}.log").read_text())
        ]

    with job_of(tmp_path, save) as job:
        variables = {"BROKER_PORT": str(job.broker.port), "STATE_DIRECTORY": str(tmp_path)}
        variables = {f"HETERTRAIN_{name}": value for name, value in variables.items()}
        loops = []
        for node in ("car-0", "car-1"):
            with (tmp_path / f"{node}.log").open("wb") as log:
                command = [sys.executable, script, "--node", node]
                loops.append(
                    subprocess.Popen(command, env=os.environ | variables, stdout=log, stderr=log)
                )
        try:
            wait_until(
                lambda: all(min(losses(n), default=9) < GOOD_LOSS for n in ("car-0", "car-1")),
                "a good model on both nodes",
                seconds=90.0,
            )
        finally:
            for loop in loops:
                loop.send_signal(signal.SIGINT)
            codes = [loop.wait(END_SECONDS) for loop in loops]
        assert codes == [0, 0], (tmp_path / "car-0.log").read_text()
        wait_until(
            lambda: not any(state.is_online for state in job.monitor.nodes().values()),
            "the ends of both agents",
        )


def test_each_checkpoint_is_whole_and_goes_on_from_what_was_published(job: Job) -> None:
    with job.join("whole") as session:
        first = next(session)
        assert first.is_new_version
        assert {n: (a.shape, a.dtype) for n, a in first.arrays.items()} == {
            n: (a.shape, a.dtype) for n, a in INITIAL.items()
        }
        assert first.arrays["own"].tolist() == [7.0, 7.0]
        published(session, first)
        second = next(session)
        assert second.arrays["own"].tolist() == [8.0, 8.0]
        assert second.arrays["counter"] == first.arrays["counter"] + 1
        # No publish: no steps, and the same again.
        third = next(session)
        if third.version == second.version:
            np.testing.assert_array_equal(third.arrays["w"], second.arrays["w"])
        wait_until(
            lambda: job.monitor.nodes()["whole"].steps == 1, "the count of steps", seconds=20.0
        )


def test_a_version_that_arrives_makes_the_loop_due(job: Job) -> None:
    with job.join("due") as session:
        version = -1
        for checkpoint in session:
            if version not in (-1, checkpoint.version):
                break
            version = checkpoint.version
            wait_until(lambda: session.is_due, "a version, or the time to publish")
            published(session, checkpoint)


def test_wrong_arrays_are_refused_by_name_and_nothing_of_them_is_sent(job: Job) -> None:
    right = {name: array.copy() for name, array in INITIAL.items()}
    wrong: list[tuple[dict[str, object], type[Exception], str]] = [
        ({name: right[name] for name in ("counter", "own")}, LayoutError, "'w'"),
        (right | {"v": np.zeros(1)}, LayoutError, "'v'"),
        (right | {"w": np.zeros((3, 2))}, LayoutError, "'w'"),
        (right | {"w": np.zeros((2, 3), np.int64)}, LayoutError, "'w'"),
        (right | {"counter": np.zeros(())}, LayoutError, "'counter'"),
        (right | {"w": np.full((2, 3), np.nan)}, TrainError, "'w'"),
        (right | {"w": np.full((2, 3), 1e300)}, TrainError, "'w'"),
    ]
    with job.join("wrong") as session:
        checkpoint = next(session)
        for arrays, error, name in wrong:
            with pytest.raises(error, match=name):
                session.publish(arrays, examples=1, steps=1)  # type: ignore[arg-type]  # wrong
        for examples, steps in ((0, 1), (1, -1)):
            with pytest.raises(TrainError):
                session.publish(right, examples=examples, steps=steps)
        arrays = published(session, checkpoint)
        with pytest.raises(TrainError, match="once"):
            session.publish(right, examples=1, steps=1)
        following = next(session)
        if following.version == checkpoint.version:
            np.testing.assert_array_equal(following.arrays["w"], arrays["w"])


def test_a_killed_agent_ends_the_loop_with_its_exit_code(job: Job) -> None:
    def loop() -> None:
        with job.join("killed") as session:
            for checkpoint in session:
                os.kill(agent_pid(session), signal.SIGKILL)
                wait_until(lambda: session.is_due, "the agent's end")
                published(session, checkpoint)

    with pytest.raises(AgentError) as caught:
        loop()
    assert caught.value.agent_exit_code == -signal.SIGKILL


def test_an_agent_that_cannot_start_says_why(job: Job) -> None:
    with pytest.raises(AgentError, match="tier") as caught, job.join("no", tier="t9") as session:
        next(session)
    assert caught.value.agent_exit_code == 2


def test_a_loop_that_waits_too_long_fails(tmp_path: Path) -> None:
    with (
        pytest.raises(AgentError, match="nothing to do"),
        hetertrain.join(
            "nobody", INITIAL, timeout_seconds=3.0, node="n", state_directory=tmp_path
        ) as session,
    ):
        next(session)


def test_an_exception_in_the_loop_reaches_the_fleet_and_ends_the_agent(job: Job) -> None:
    session = job.join("fails", agent_log=job.directory / "fails.log")

    def loop() -> None:
        with session:
            next(session)
            raise ZeroDivisionError("no batch")

    with pytest.raises(ZeroDivisionError):
        loop()
    assert not is_running(agent_pid(session))
    log = (job.directory / "fails.log").read_text()
    assert "ZeroDivisionError: no batch" in log
    assert not job.monitor.nodes()["fails"].is_online


def test_a_session_that_ends_leaves_no_process(job: Job) -> None:
    with job.join("leaves") as session:
        next(session)
        pid = agent_pid(session)
    assert not is_running(pid)
    wait_until(lambda: not job.monitor.nodes()["leaves"].is_online, "its farewell")


LOOP = """
import os, sys, time
import numpy as np
import hetertrain
initial = {"w": np.zeros((2, 3)), "counter": np.zeros((), np.int64), "own": np.full(2, 7.0)}
with hetertrain.join("fleet", initial, local=("own",)) as session:
    next(session)
    if os.fork() == 0:  # A worker that lives on holds the pipe open.
        time.sleep(60)
        os._exit(0)
    print(session._agent._process.pid, flush=True)
    time.sleep(60)
"""


@contextmanager
def loop_process(job: Job, node: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run a loop that computes for long in a process of its own; yield it and its agent's pid."""
    variables = {
        "HETERTRAIN_BROKER_PORT": str(job.broker.port),
        "HETERTRAIN_VEHICLE_NODE": node,
        "HETERTRAIN_STATE_DIRECTORY": str(job.directory / "state"),
    }
    loop = subprocess.Popen(
        [sys.executable, "-c", LOOP],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert loop.stdout is not None
        yield loop, int(loop.stdout.readline())
    finally:
        os.killpg(loop.pid, signal.SIGKILL)
        loop.wait(END_SECONDS)


def test_the_agent_ends_after_a_loop_that_is_killed(job: Job) -> None:
    with loop_process(job, "orphan") as (loop, pid):
        loop.kill()
        loop.wait(END_SECONDS)
        wait_until(lambda: not is_running(pid), "the agent's end", seconds=END_SECONDS)
        wait_until(lambda: not job.monitor.nodes()["orphan"].is_online, "its farewell")


def test_a_loop_that_does_nothing_for_long_does_not_silence_its_agent(job: Job) -> None:
    with loop_process(job, "busy") as (loop, _):
        loop.send_signal(signal.SIGSTOP)
        seen: list[NodeState] = []

        def has_beaten() -> bool:
            state = job.monitor.nodes()["busy"]
            if not any(state is before for before in seen):
                seen.append(state)
            return len(seen) > 2

        wait_until(has_beaten, "heartbeats of the agent")
        assert seen[-1].is_online


def test_a_secret_is_in_no_argument(job: Job) -> None:
    with job.join("secret", broker_username="me", broker_password="hunter2") as session:
        next(session)
        assert b"hunter2" not in Path(f"/proc/{agent_pid(session)}/cmdline").read_bytes()
        assert b"hunter2" in Path(f"/proc/{agent_pid(session)}/environ").read_bytes()


def test_an_aggregator_takes_either_a_task_or_a_model(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "hetertrain", "aggregator", "--job", "x"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert found.returncode == 2
    assert "--initial-model" in found.stderr
