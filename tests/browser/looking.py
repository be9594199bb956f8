"""How tests look at the console: as somebody, at a size, in a theme; and what must not happen on
any page is noticed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from playwright.sync_api import Browser, BrowserContext, Page, expect

from hetertrain_cloud.console import screens
from hetertrain_cloud.console.view import Screen
from tests.integration.waiting import wait_until

DESKTOP = (1360, 900)
PHONE = (390, 844)
WAIT_MS = 30_000
_WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation",
  (event) => window.violations.push(`${event.violatedDirective} ${event.blockedURI}`));
"""
expect.set_options(timeout=WAIT_MS)


def chromium() -> str:
    """Return the browser's program."""
    program = os.environ.get("CHROMIUM") or shutil.which("chromium")
    assert program, "these tests need chromium: script/test installs it, or set CHROMIUM"
    return program


@dataclass
class Looker:
    """Opens pages of one console."""

    browser: Browser
    url: str
    password: str
    contexts: dict[tuple[str, tuple[int, int]], BrowserContext] = field(default_factory=dict)
    """Of each user who logged in, at a size: so files are loaded once."""

    @contextmanager
    def page(self, user: str | None, *, size: tuple[int, int] = DESKTOP) -> Iterator[Page]:
        """Open a page as a user; None: as nobody yet. It fails where anything goes wrong in it."""
        context = self._context(user, size)
        page = context.new_page()
        wrong: list[str] = []
        page.on("console", lambda said: note(wrong, said.type, said.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        try:
            yield page
            wrong += page.evaluate("window.violations")
            assert not wrong, f"{page.url}: {wrong}"
        finally:
            page.close()

    def close(self) -> None:
        """Close all pages."""
        for context in self.contexts.values():
            context.close()

    def _context(self, user: str | None, size: tuple[int, int]) -> BrowserContext:
        known = (user or "", size)
        if user is not None and known in self.contexts:
            return self.contexts[known]
        context = self.browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            ignore_https_errors=True,
            timezone_id="Asia/Kolkata",  # Another than the server's, and not by whole hours.
            base_url=f"{self.url}/console/",
        )
        self.contexts[known] = context
        context.set_default_timeout(WAIT_MS)
        context.add_init_script(_WATCH)
        if user is not None:
            credentials = {"name": user, "password": self.password}
            answer = context.request.post(f"{self.url}/api/v1/sessions", data=credentials)
            assert answer.ok, answer.text()
        return context


def note(wrong: list[str], kind: str, text: str) -> None:
    """Note what a page complains of; a refusal of the API is one of the things it may show."""
    if kind in ("error", "warning") and "responded with a status of 4" not in text:
        wrong.append(f"{kind}: {text}")


def address(screen: Screen) -> str:
    """Return where a screen is seen in this fleet, from the console's own address on."""
    name = "car-0" if screen.path.startswith(("/nodes", "/gateways")) else "fleet"
    query = "?jobs=fleet&jobs=fleet" if screen.path.startswith("/compare") else ""
    return screen.path.lstrip("/").replace("{name}", name).replace("{version}", "1") + query


ALL = [(screen.title, address(screen)) for screen in screens.ALL]


def go(page: Page, path: str) -> None:
    """Open a page, and wait until it is there and connected."""
    page.goto(path)
    heading = page.get_by_role("heading", level=1)
    expect(heading).to_be_visible()
    expect(heading).not_to_have_text("This cannot be shown")
    page.wait_for_load_state("networkidle")


def until(page: Page, condition: Callable[[], bool], what: str) -> None:
    """Wait for something that the page will show."""
    wait_until(condition, what, meanwhile=lambda: page.wait_for_timeout(100))


def reads(page: Page, pattern: str) -> str | None:
    """Return what the content's text has in the first group of a pattern; None: it has it not."""
    found = re.search(pattern, page.get_by_role("main").inner_text())
    return found[1] if found else None
