"""A control plane with ten thousand nodes that go on speaking, as a process of its own: what is
looked at when the console is measured.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvicorn

from hetertrain.errors import HetertrainError
from hetertrain.service import end_with_parent
from hetertrain.wire.frames import pack, unpack
from hetertrain.wire.messages import AggregatorStatus, NodeState
from hetertrain_cloud.console import mount_console
from hetertrain_cloud.console.view import LIVE_SECONDS, View
from hetertrain_cloud.control import jobs
from hetertrain_cloud.control.api.app import build_app
from hetertrain_cloud.control.authority import Authority
from hetertrain_cloud.control.database import Database
from hetertrain_cloud.control.live import LiveFleet
from hetertrain_cloud.control.plane import Advertised, ControlPlane
from hetertrain_cloud.history import METRICS_FILE, append_lines
from hetertrain_lab.control_bench import REGIONS, USER, cell_of, fill, node_name, role_of

NODES = 10_000
HEARTBEAT_SECONDS = 8.0
BEATS = 100
"""Heartbeats are said so many at a time."""
VERSIONS = 500
START_SECONDS_MAX = 180.0
ANSWER_SECONDS_MAX = 30.0
CLOSE_SECONDS_MAX = 10.0


@dataclass(frozen=True, slots=True)
class Server:
    """A control plane at work, as its parent sees it."""

    url: str
    pid: int
    pipe: Connection

    def refreshes(self) -> dict[str, list[float]]:
        """Return how long refreshes took since the last call, in milliseconds, by screen's path."""
        self.pipe.send("refreshes")
        if not self.pipe.poll(ANSWER_SECONDS_MAX):
            raise HetertrainError("the control plane does not answer")
        answer: dict[str, list[float]] = self.pipe.recv()
        return answer

    def memory_mib(self) -> float:
        """Return what it holds in memory now."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


@contextmanager
def serving(output: Path) -> Iterator[Server]:
    """Run a control plane with a full database."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(output, there), daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(START_SECONDS_MAX):
            raise HetertrainError("the control plane did not start")
        assert process.pid is not None, "it was started"
        yield Server(f"http://localhost:{here.recv()}", process.pid, here)
    finally:
        process.terminate()
        process.join(CLOSE_SECONDS_MAX)
        if process.is_alive():
            process.kill()


def serve(output: Path, pipe: Connection) -> None:
    """Be the control plane."""
    end_with_parent()
    for part in output.glob("control.db*"):
        part.unlink()
    now = datetime.now(UTC)
    database = Database(f"sqlite:///{output / 'control.db'}")
    database.migrate()
    live = LiveFleet()
    live.broker_error = ""
    plane = ControlPlane(
        database=database,
        authority=Authority(output / "authority", now),
        live=live,
        advertised=Advertised(host="localhost", port=8883, is_tls=True, websocket_path=None),
        jobs_directory=output / "jobs",
        bootstrap_file=output / "bootstrap-token",
        now=lambda: datetime.now(UTC),
    )
    fill(plane, NODES, now, lambda _: None)
    begin_jobs(plane, now)
    times = time_refreshes()
    app = build_app(plane)
    mount_console(app)
    configuration = uvicorn.Config(
        app, host="127.0.0.1", port=0, log_level="error", access_log=False
    )
    server = uvicorn.Server(configuration)
    for target in (lambda: beat(live), lambda: answer(server, pipe, times)):
        threading.Thread(target=target, daemon=True).start()
    server.run()


def begin_jobs(plane: ControlPlane, now: datetime) -> None:
    """Let each job run, with a curve to draw."""
    for job in REGIONS:
        directory = plane.jobs_directory / job
        directory.mkdir(parents=True, exist_ok=True)
        rows = [
            {
                "version": version,
                "elapsed_seconds": 2.0 * version,
                "metrics": {"r2": 1 - 1 / (2 + version / 50)},
            }
            for version in range(VERSIONS)
        ]
        (directory / METRICS_FILE).unlink(missing_ok=True)
        append_lines(directory / METRICS_FILE, "".join(map(_line, rows)).encode())
    with plane.database.begin() as transaction:
        for job in REGIONS:
            row = jobs.order(transaction, job, "start", USER, now)
            row.state = "running"


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row) + "\n"


def time_refreshes() -> dict[str, list[float]]:
    """Note from now on how long each refresh of each screen takes, in milliseconds."""
    times: dict[str, list[float]] = defaultdict(list)
    keep_up = View.live

    async def live(
        self: View, refresh: Callable[[], Awaitable[None]], seconds: float = LIVE_SECONDS
    ) -> None:
        async def timed() -> None:
            began = time.perf_counter()
            await refresh()
            times[self.screen.path].append(1000 * (time.perf_counter() - began))

        await keep_up(self, timed, seconds)

    View.live = live  # type: ignore[method-assign]  # the benchmark alone looks inside
    return times


def beat(live: LiveFleet) -> None:
    """Let every node say something new, one after the other, and aggregators twice a second."""
    pause = HEARTBEAT_SECONDS * BEATS / NODES
    for turn in itertools.count(1):
        for place in range(0, NODES, BEATS):
            began = time.monotonic()
            for number in range(place, place + BEATS):
                message, _ = unpack(pack(_state(number, turn)))
                assert isinstance(message, NodeState), "it was packed so"
                live.see(message)
            if place % (5 * BEATS) == 0:
                for job in REGIONS:
                    live.hear(_status(job, turn, place))
            time.sleep(max(0.0, pause - (time.monotonic() - began)))


def _state(number: int, turn: int) -> NodeState:
    return NodeState(
        node=node_name(number),
        job=REGIONS[number % len(REGIONS)],
        cell=cell_of(number),
        tier=f"t{number % 4}",
        role=role_of(number),
        is_online=number % 20 != 0,
        version=VERSIONS + turn,
        doing="not_eligible" if (number + turn) % 10 == 0 else "training",
        waiting_for="Vehicle.Speed < 1: it is 50" if (number + turn) % 10 == 0 else "",
        label="bench 1",
        steps=100 * turn,
        updates=turn,
        bytes_up=20_000 * turn,
        bytes_down=40_000 * turn,
    )


def _status(job: str, turn: int, place: int) -> AggregatorStatus:
    seconds = HEARTBEAT_SECONDS * (turn + place / NODES)
    return AggregatorStatus(
        job=job,
        cell="cloud",
        version=VERSIONS + turn,
        elapsed_seconds=seconds,
        sync=turn,
        sync_in_seconds=20 - seconds % 20,
        is_syncing=False,
        active=NODES // len(REGIONS),
        open_updates=place // BEATS,
        metrics={"r2": 0.9},
        updates_by_lag={0: 100 * turn, 1: 50 * turn, 2: turn},
        refused={},
        waiting_code="updates",
        waiting_for=f"updates of 625 nodes, {place // BEATS} present",
    )


def answer(server: uvicorn.Server, pipe: Connection, times: dict[str, list[float]]) -> None:
    """Say where the server is once it is, and how long refreshes took whenever that is asked."""
    while not server.started:
        time.sleep(0.05)
    pipe.send(server.servers[0].sockets[0].getsockname()[1])
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        pipe.send({path: list(found) for path, found in times.items()})
        times.clear()


# Who asks.
