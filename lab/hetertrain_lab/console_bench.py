"""How fast is the console on a large fleet? With 10,000 nodes in the database, each of which says
something every eight seconds.

The control plane is a process of its own. Each screen is asked for many times, and the time until
its page has come is the server's. A page that is open keeps itself up to date: how long the server
needs for that, and what it sends, is counted at sockets of our own, which are as a browser's. Where
Chromium is installed, it says how soon after the start of a navigation a table's row, or a job, can
be clicked.
"""

from __future__ import annotations

import ast
import asyncio
import itertools
import json
import os
import re
import shutil
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import httpx2
import uvicorn

from hetertrain.errors import HetertrainError
from hetertrain.service import end_with_parent
from hetertrain.wire.frames import AggregatorStatus, NodeState, pack, unpack
from hetertrain_cloud.console import mount_console
from hetertrain_cloud.console.view import LIVE_SECONDS, View
from hetertrain_cloud.control import jobs
from hetertrain_cloud.control.api.app import build_app
from hetertrain_cloud.control.authority import Authority
from hetertrain_cloud.control.database import Database
from hetertrain_cloud.control.live import LiveFleet
from hetertrain_cloud.control.plane import Advertised, ControlPlane
from hetertrain_cloud.history import METRICS_FILE, append_lines
from hetertrain_lab.control_bench import PASSWORD, REGIONS, USER, fill, node_name
from hetertrain_lab.page import Rows

NODES = 10_000
REPEATS, REPEATS_QUICK = 30, 8
WATCH_SECONDS, WATCH_SECONDS_QUICK = 20.0, 9.0
PAGES, PAGES_QUICK = 20, 8
"""Open at once, when their memory is counted."""
HEARTBEAT_SECONDS = 8.0
BEATS = 100
"""Heartbeats are said so many at a time."""
VERSIONS = 500
START_SECONDS_MAX = 180.0
SETTLE_SECONDS = 4.0
ANSWER_SECONDS_MAX = 30.0
CLOSE_SECONDS_MAX = 10.0
SCREENS = {
    "overview": "/",
    "jobs": "/jobs",
    "job": f"/jobs/{REGIONS[0]}",
    "versions": f"/jobs/{REGIONS[0]}/versions",
    "fleet": "/fleet",
    "node": f"/nodes/{node_name(1)}",
    "gateways": "/gateways",
    "alerts": "/alerts",
    "enrolment": "/enrolment",
    "quarantine": "/quarantine",
    "audit": "/audit",
    "accounts": "/accounts",
    "settings": "/settings",
}
CLICKED = {"overview": ("link", REGIONS[0]), "fleet": ("link", node_name(0))}
"""What can be clicked once a screen is of use, by role and name."""
_QUERY = re.compile(r"^ *query: (\{.*\}),$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ScreenMeasure:
    """One screen: its page, and how it is kept up to date."""

    name: str
    page_ms: float
    """Until its HTML has come."""
    page_bytes: int
    refresh_ms: float | None = None
    """Of the server, for one of its parts; None: it does not refresh."""
    refresh_bytes: int | None = None
    """Sent in two seconds, before the socket's compression."""
    interactive_ms: float | None = None
    """Navigation start until it can be clicked; None: not asked, or no Chromium."""


@dataclass(frozen=True, slots=True)
class ConsoleMeasure:
    """What was measured."""

    nodes: int
    screens: tuple[ScreenMeasure, ...]
    page_mib: float
    """Of the server's memory, for each page of the fleet that is open."""
    interactive_ms: float | None
    """Of the slower of overview and fleet; None: no Chromium."""
    refresh_ms: float
    """Of the slowest screen."""
    refresh_bytes: int
    """Of the screen that sends most."""


def run_console(
    output: Path, *, is_quick: bool, on_progress: Callable[[float], None]
) -> ConsoleMeasure:
    """Start a control plane with many nodes, and measure its console.

    Raises:
        HetertrainError: it did not start.
    """
    output.mkdir(parents=True, exist_ok=True)
    repeats = REPEATS_QUICK if is_quick else REPEATS
    with serving(output) as server:
        on_progress(0.3)
        session = log_in(server.url)
        screens = [measure_page(server.url, session, name, repeats) for name in SCREENS]
        on_progress(0.5)
        seconds = WATCH_SECONDS_QUICK if is_quick else WATCH_SECONDS
        watched = asyncio.run(watch_all(server, session, seconds))
        on_progress(0.7)
        num_pages = PAGES_QUICK if is_quick else PAGES
        page_mib = asyncio.run(memory_of_pages(server, session, num_pages))
        on_progress(0.8)
        clicked = measure_clicks(server.url, session, repeats)
    measured = tuple(
        replace(
            screen,
            refresh_ms=watched[screen.name][0],
            refresh_bytes=watched[screen.name][1],
            interactive_ms=clicked.get(screen.name),
        )
        for screen in screens
    )
    return ConsoleMeasure(
        nodes=NODES,
        screens=measured,
        page_mib=round(page_mib, 2),
        interactive_ms=max(clicked.values(), default=None),
        refresh_ms=max(s.refresh_ms or 0.0 for s in measured),
        refresh_bytes=max(s.refresh_bytes or 0 for s in measured),
    )


def console_rows(measure: ConsoleMeasure) -> Rows:
    """Lay the measures out as a table."""
    title = (
        f"{measure.nodes:,} nodes, each heard every {HEARTBEAT_SECONDS:g} s; "
        f"{measure.page_mib} MiB for each open page of the fleet"
    )
    columns = ("screen", "page, ms", "page, kB", "refresh, ms", "sent in 2 s, kB", "usable, ms")
    rows: list[tuple[str, ...]] = [
        (
            screen.name,
            f"{screen.page_ms:.0f}",
            f"{screen.page_bytes / 1000:.0f}",
            _or_dash(screen.refresh_ms, "{:.1f}"),
            _or_dash(screen.refresh_bytes and screen.refresh_bytes / 1000, "{:.1f}"),
            _or_dash(screen.interactive_ms, "{:.0f}"),
        )
        for screen in measure.screens
    ]
    return title, columns, rows


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


# The server's process.


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
        cell="cloud",
        tier=f"t{number % 4}",
        role="vehicle",
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
        waiting_for=f"625 nodes' updates needed, {place // BEATS} present",
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


def log_in(url: str) -> str:
    """Return the cookie of a session."""
    with httpx2.Client(base_url=url) as client:
        body = {"name": USER, "password": PASSWORD}
        client.post("/api/v1/sessions", json=body).raise_for_status()
        return "; ".join(f"{cookie.name}={cookie.value}" for cookie in client.cookies.jar)


def measure_page(url: str, session: str, name: str, repeats: int) -> ScreenMeasure:
    """Ask for a screen's page."""
    times, size = [], 0
    headers = {"Cookie": session, "Accept": "text/html"}
    with httpx2.Client(base_url=url, headers=headers, timeout=ANSWER_SECONDS_MAX) as client:
        for _ in range(repeats + 1):
            began = time.perf_counter()
            response = client.get(f"/console{SCREENS[name]}")
            times.append(1000 * (time.perf_counter() - began))
            response.raise_for_status()
            size = len(response.content)
    # The first compiles templates.
    return ScreenMeasure(name, round(statistics.median(times[1:]), 1), size)


@dataclass
class OpenPage:
    """A page that is open: its socket, and what came by it."""

    num_bytes: int = 0

    async def open(self, http: aiohttp.ClientSession, url: str, path: str) -> None:
        """Load the page, and connect as its script would."""
        async with http.get(f"{url}/console{path}") as response:
            found = _QUERY.search(await response.text())
        if found is None:
            raise HetertrainError(f"{path} is no page of NiceGUI's: the benchmark must be mended")
        query: dict[str, Any] = ast.literal_eval(found[1])
        query |= {"document_id": os.urandom(8).hex(), "tab_id": os.urandom(8).hex()}
        asked = {name: _text(value) for name, value in query.items() if value is not None}
        self._socket = await http.ws_connect(
            f"{url}/console/_nicegui_ws/socket.io/",
            params=asked | {"EIO": "4", "transport": "websocket"},
            headers={"Origin": url},
        )
        await self._socket.receive_str(timeout=ANSWER_SECONDS_MAX)
        await self._socket.send_str("40")
        connected = await self._socket.receive_str(timeout=ANSWER_SECONDS_MAX)
        if not connected.startswith("40"):
            raise HetertrainError(f"the console let no socket in: {connected[:200]}")
        if not query.get("implicit_handshake"):
            await self._socket.send_str("420" + json.dumps(["handshake", query]))
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        """Take what comes; answer pings (Engine.IO 4)."""
        async for message in self._socket:
            if message.type is not aiohttp.WSMsgType.TEXT:
                self.num_bytes += len(message.data)
            elif message.data == "2":
                await self._socket.send_str("3")
            else:
                self.num_bytes += len(message.data.encode())

    async def close(self) -> None:
        """Leave."""
        await self._socket.close()
        await self._reader


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _client(session: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(headers={"Cookie": session, "Accept": "text/html"})


async def watch_all(
    server: Server, session: str, seconds: float
) -> dict[str, tuple[float | None, int | None]]:
    """Keep each screen open for a while; return a refresh's median time in milliseconds, and the
    bytes that came in two seconds.
    """
    found: dict[str, tuple[float | None, int | None]] = {}
    async with _client(session) as http:
        for name, path in SCREENS.items():
            page = OpenPage()
            await page.open(http, server.url, path)
            await asyncio.sleep(SETTLE_SECONDS)
            server.refreshes()
            page.num_bytes = 0
            await asyncio.sleep(seconds)
            times = [each for every in server.refreshes().values() for each in every]
            num_bytes = round(page.num_bytes / seconds * LIVE_SECONDS)
            await page.close()
            is_live = bool(times)
            found[name] = (
                round(statistics.median(times), 1) if is_live else None,
                num_bytes if is_live else None,
            )
    return found


async def memory_of_pages(server: Server, session: str, num_pages: int) -> float:
    """Return what one more open page of the fleet takes in the server's memory, in MiB."""
    async with _client(session) as http:
        before = server.memory_mib()
        pages = [OpenPage() for _ in range(num_pages)]
        for page in pages:
            await page.open(http, server.url, SCREENS["fleet"])
        await asyncio.sleep(SETTLE_SECONDS)
        after = server.memory_mib()
        for page in pages:
            await page.close()
    return (after - before) / num_pages


def measure_clicks(url: str, session: str, repeats: int) -> dict[str, float]:
    """Return how long after a navigation's start overview and fleet can be clicked, in
    milliseconds; empty where there is no Chromium, or no Playwright to drive it.
    """
    program = os.environ.get("CHROMIUM") or shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return {}
    if program is None:
        return {}
    name, _, value = session.partition("=")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": 1360, "height": 900})
        context.add_cookies([{"name": name, "value": value, "url": url}])
        page = context.new_page()
        found = {}
        for screen, (role, text) in CLICKED.items():
            times = []
            for _ in range(repeats + 1):
                page.goto(f"{url}/console{SCREENS[screen]}", wait_until="commit")
                target: Any = page.get_by_role("main").get_by_role(role, name=text, exact=True)  # type: ignore[arg-type]  # one of CLICKED's
                target.first.click(trial=True)
                times.append(float(page.evaluate("performance.now()")))
            # The first loads the console's files; they are kept from then on.
            found[screen] = round(statistics.median(times[1:]), 1)
        browser.close()
    return found
