"""A console over a fleet that trains, and browsers that look at it, each as somebody."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from playwright.sync_api import Browser, Page, Playwright, sync_playwright

from hetertrain.transport import mqtt
from hetertrain.wire import topics
from hetertrain.wire.events import Outgoing
from hetertrain.wire.frames import pack, unpack
from hetertrain.wire.messages import LogLines, LogRequest
from tests.browser.looking import Looker, chromium
from tests.builders import make_state
from tests.control import PASSWORD
from tests.integration.production import Production
from tests.integration.waiting import wait_until

MARKUP = "<img src=x onerror=document.title='taken'>"
HEARTBEAT_SECONDS = 5.0


@pytest.fixture(scope="package")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Production]:
    """Two vehicles at work, one node that calls itself by markup, and an operator of each role."""
    made = Production(tmp_path_factory.mktemp("console"))
    hostile: Hostile | None = None
    try:
        made.start()
        made.create_job(sync_seconds=4.0)
        for index in range(2):
            made.enrol(f"car-{index}")
            made.vehicle(f"car-{index}", index, 2, "--step-seconds-min", "0.05")
        made.enrol("hostile", "vehicle", "--label", f"owner={MARKUP}")
        hostile = Hostile(made)
        hostile.start()
        password = made.directory / "password"
        for role in ("operator", "viewer"):
            made.run("user", "create", role, "--role", role, "--password-file", str(password))
        wait_until(lambda: made.contributors() >= {"car-0", "car-1"}, "updates of both vehicles")
        yield made
    finally:
        if hostile is not None:
            hostile.stop()
        made.stop()


class Hostile(threading.Thread):
    """A node that is enrolled, and whose every text is markup; it repeats itself until stopped."""

    def __init__(self, fleet: Production) -> None:
        super().__init__(daemon=True)
        self._stopping = threading.Event()
        inbox = topics.inbox("hostile")
        self._connection, self._events = fleet.connect("hostile", inbox)
        assert isinstance(self._events.get(timeout=10), mqtt.Connected)

    def run(self) -> None:
        state = make_state(
            "hostile", doing=MARKUP, waiting_for=MARKUP, label=MARKUP, budgets=MARKUP
        )
        heartbeat = Outgoing(topics.state("hostile"), pack(state), retain=True)
        while not self._stopping.is_set():
            self._connection.publish((heartbeat,))
            with suppress(queue.Empty):
                self._hear(self._events.get(timeout=HEARTBEAT_SECONDS))

    def _hear(self, event: mqtt.Event) -> None:
        asked = unpack(event.frame)[0] if isinstance(event, mqtt.Received) else None
        if isinstance(asked, LogRequest):
            lines = (f"first {MARKUP}", f"last {MARKUP}")
            said = LogLines(node="hostile", number=asked.number, is_shared=True, lines=lines)
            self._connection.publish((Outgoing(topics.log("hostile"), pack(said)),))

    def stop(self) -> None:
        self._stopping.set()
        self.join(10)
        self._connection.stop()


@pytest.fixture(scope="package")
def playwright() -> Iterator[Playwright]:
    """Playwright; it runs a loop of its own, so it ends with this folder's tests."""
    with sync_playwright() as made:
        yield made


@pytest.fixture(scope="package")
def browser(playwright: Playwright) -> Iterator[Browser]:
    """Debian's Chromium."""
    made = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
    yield made
    made.close()


@pytest.fixture(scope="package")
def looker(browser: Browser, fleet: Production) -> Iterator[Looker]:
    """Whoever opens pages of the console."""
    made = Looker(browser, fleet.url, PASSWORD)
    yield made
    made.close()


@pytest.fixture
def page(looker: Looker) -> Iterator[Page]:
    """A page of an admin; at its end nothing has gone wrong in it."""
    with looker.page("anna") as made:
        yield made
