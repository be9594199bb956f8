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
import json
import os
import re
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import httpx2

from hetertrain.errors import HetertrainError
from hetertrain_cloud.console.view import LIVE_SECONDS
from hetertrain_lab.busy_plane import (
    ANSWER_SECONDS_MAX,
    HEARTBEAT_SECONDS,
    NODES,
    Server,
    serving,
)
from hetertrain_lab.control_bench import PASSWORD, REGIONS, USER, node_name
from hetertrain_lab.page import Rows

REPEATS, REPEATS_QUICK = 30, 8
WATCH_SECONDS, WATCH_SECONDS_QUICK = 20.0, 9.0
PAGES, PAGES_QUICK = 20, 8
"""Open at once, when their memory is counted."""
SETTLE_SECONDS = 4.0
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
        watching = watch_all(server, session, seconds, lambda share: on_progress(0.5 + 0.3 * share))
        watched = asyncio.run(watching)
        num_pages = PAGES_QUICK if is_quick else PAGES
        page_mib = asyncio.run(memory_of_pages(server, session, num_pages))
        on_progress(0.9)
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
    server: Server, session: str, seconds: float, on_progress: Callable[[float], None]
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
            on_progress(len(found) / len(SCREENS))
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
