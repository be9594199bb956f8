"""What holds on each screen of the console, whatever it shows."""

from __future__ import annotations

import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

from tests.browser.looking import ALL, PHONE, Looker, go, until

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]  # with the start of the fleet
SEVERE = ("serious", "critical")
TABS_MAX = 400
IS_DARK = "document.body.classList.contains('body--dark')"
ADDRESSES = pytest.mark.parametrize("path", [path for _, path in ALL])

# Texts without numbers, not elements: what is live may be made anew meanwhile, and lists move on.
NAME = """(element) => {
  const label = element.labels?.length ? element.labels[0].innerText : "";
  const text = element.ariaLabel || label || element.innerText;
  return `${element.tagName} ${text}`.replace(/[0-9]+/g, "#").trim();
}"""
REACHABLE = f"""() => {{
  const name = {NAME};
  const all = [...document.querySelectorAll("a[href], button, input, select, textarea, summary")];
  const open = all.filter((one) => !one.disabled && one.tabIndex >= 0 && one.checkVisibility({{
    visibilityProperty: true }}));
  return open.map(name);
}}"""
FOCUSED = f"() => ({NAME})(document.activeElement)"


def tabs_through(page: Page, num_max: int) -> list[str]:
    """Return what Tab reaches, in order."""
    reached = []
    for _ in range(num_max):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(FOCUSED))
    return reached


def severe_violations(page: Page) -> list[tuple[str, list[str]]]:
    """Return what axe finds that keeps somebody from using a page: its rules, and where."""
    return [
        (each["id"], [node["html"][:200] for node in each["nodes"]][:3])
        for each in Axe().run(page).response["violations"]
        if each["impact"] in SEVERE
    ]


@ADDRESSES
def test_a_screen_can_be_used_by_whoever_sees_or_hears_it(looker: Looker, path: str) -> None:
    with looker.page("anna") as page:
        go(page, path)
        assert not severe_violations(page)
        # The other colours; the next page begins with them.
        was_dark = page.evaluate(IS_DARK)
        page.get_by_role("button", name=re.compile("colours")).click()
        until(page, lambda: page.evaluate(IS_DARK) != was_dark, "the other colours")
        assert not severe_violations(page)


@ADDRESSES
def test_a_screen_fits_a_phone(looker: Looker, path: str) -> None:
    with looker.page("anna", size=PHONE) as page:
        go(page, path)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]


@ADDRESSES
def test_a_screen_is_worked_by_the_keyboard_alone(page: Page, path: str) -> None:
    go(page, path)
    wanted = page.evaluate(REACHABLE)
    assert len(wanted) < TABS_MAX, "a page is bounded"
    reached = tabs_through(page, len(wanted) + 5)
    assert reached[0].endswith("Skip to the content")
    assert not set(wanted) - set(reached)


def test_who_skips_is_past_the_menu(page: Page) -> None:
    go(page, "fleet")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    is_inside = "document.querySelector('main').contains(document.activeElement)"
    assert page.evaluate(is_inside)


def test_the_menu_of_a_phone_opens_and_closes(looker: Looker) -> None:
    with looker.page("anna", size=PHONE) as page:
        go(page, "")
        menu = page.get_by_role("navigation", name="Screens")
        page.get_by_role("button", name="Menu").click()
        menu.get_by_role("link", name="Fleet").click()
        page.get_by_role("heading", name="Fleet", level=1).wait_for()


def test_dark_colours_are_kept_while_a_page_changes_and_from_page_to_page(looker: Looker) -> None:
    with looker.page("operator") as page:
        go(page, "jobs/fleet")
        page.get_by_role("button", name="Dark colours").click()
        page.get_by_role("button", name="Light colours").wait_for()
        # What changes on the page meanwhile does not undo it.
        main = page.get_by_role("main")
        shown = main.inner_text()
        until(page, lambda: main.inner_text() != shown, "a change on the page")
        assert page.evaluate(IS_DARK)
        go(page, "fleet")
        page.get_by_role("button", name="Light colours").wait_for()
