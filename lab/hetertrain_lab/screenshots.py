"""Pictures of the console for its documentation: ``script/screenshots``.

The demo's fleet trains for a while; then Chromium looks at each screen as an admin would. Pictures
have few colours, so that the repository stays small.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from hetertrain.errors import HetertrainError
from hetertrain_cloud.console.view import THEME_COOKIE
from hetertrain_lab.console_demo import ConsoleDemo, ConsoleDemoSettings

TRAINING_SECONDS = 90.0
SETTLE_MS = 2500
"""Charts are drawn and figures have come by then."""
DESKTOP, PHONE = (1360, 900), (390, 844)
COLOURS = 256
JOB = "driving"


def make_claim(page: Page) -> None:
    """Make a claim, whose secret is worth nothing once the demo is over."""
    page.get_by_role("button", name="New claim").click()
    dialog = page.get_by_role("dialog", name="New claim")
    dialog.get_by_label("Labels that they get").fill("region=north")
    dialog.get_by_role("button", name="Make the claim").click()
    dialog.get_by_role("img").wait_for()


def go_to_newest_version(page: Page) -> None:
    """Open the newest version that is kept."""
    page.get_by_role("row").filter(has_text="Download").first.get_by_role("link").first.click()
    page.get_by_role("heading", name="Who contributed").wait_for()


@dataclass(frozen=True, slots=True)
class Shot:
    """One screen, as it is to be seen."""

    name: str
    path: str
    before: Callable[[Page], None] | None = None


SHOTS = (
    Shot("overview", "/"),
    Shot("jobs", "/jobs"),
    Shot("new-job", "/new-job"),
    Shot("job", f"/jobs/{JOB}"),
    Shot("versions", f"/jobs/{JOB}/versions"),
    Shot("version", f"/jobs/{JOB}/versions", go_to_newest_version),
    Shot("fleet", "/fleet"),
    Shot("node", "/nodes/vehicle-02"),
    Shot("gateways", "/gateways"),
    Shot("alerts", "/alerts"),
    Shot("enrolment", "/enrolment"),
    Shot("claim", "/enrolment", make_claim),
    Shot("quarantine", "/quarantine"),
    Shot("audit", "/audit"),
    Shot("accounts", "/accounts"),
    Shot("account", "/account"),
    Shot("settings", "/settings"),
)
DARK = ("overview", "job", "fleet", "node")
ON_PHONE = ("overview", "job", "fleet", "node", "alerts")


class Photographer:
    """Takes pictures of one console."""

    def __init__(self, browser: Browser, demo: ConsoleDemo, directory: Path) -> None:
        self._browser = browser
        self._demo = demo
        self._directory = directory

    def take(self, shots: list[Shot], size: tuple[int, int], theme: str, ending: str) -> None:
        """Take some pictures at a size, in a theme."""
        context = self._browser.new_context(
            viewport={"width": size[0], "height": size[1]}, ignore_https_errors=True
        )
        context.add_cookies(
            [{"name": THEME_COOKIE, "value": theme, "domain": "localhost", "path": "/console"}]
        )
        page = context.new_page()
        page.goto(f"{self._demo.url}/console/login")
        if not ending:
            self._keep(page, "login")
        form = page.get_by_role("form", name="Log in")
        form.get_by_label("Name").fill(self._demo.name)
        form.get_by_label("Password").fill(self._demo.password)
        form.get_by_role("button").click()
        page.get_by_role("heading", level=1, name="Overview").wait_for()
        for shot in shots:
            page.goto(f"{self._demo.url}/console{shot.path}")
            page.get_by_role("heading", level=1).wait_for()
            if shot.before is not None:
                shot.before(page)
            page.wait_for_timeout(SETTLE_MS)
            self._keep(page, f"{shot.name}{ending}")
        context.close()

    def _keep(self, page: Page, name: str) -> None:
        picture = Image.open(io.BytesIO(page.screenshot(animations="disabled")))
        few = picture.convert("RGB").quantize(COLOURS, kmeans=2, dither=Image.Dither.NONE)
        few.save(self._directory / f"{name}.png", optimize=True)


def take_all(directory: Path) -> None:
    """Take all pictures into a folder.

    Raises:
        HetertrainError: there is no Chromium, or a part of the demo died.
    """
    program = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if program is None:
        raise HetertrainError("pictures need Chromium: install it, or set CHROMIUM")
    directory.mkdir(parents=True, exist_ok=True)
    with ConsoleDemo(ConsoleDemoSettings()) as demo, sync_playwright() as playwright:
        threading.Event().wait(TRAINING_SECONDS)
        if dead := demo.dead():
            raise HetertrainError(f"{', '.join(dead)} ended unexpectedly: see {demo.logs}")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        photographer = Photographer(browser, demo, directory)
        photographer.take(list(SHOTS), DESKTOP, "light", "")
        photographer.take([s for s in SHOTS if s.name in DARK], DESKTOP, "dark", "-dark")
        photographer.take([s for s in SHOTS if s.name in ON_PHONE], PHONE, "light", "-phone")
        browser.close()


if __name__ == "__main__":
    take_all(Path(sys.argv[1]))
