"""Who gets in, and where to."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser.looking import Looker, go
from tests.control import PASSWORD

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]  # with the start of the fleet


def log_in(page: Page, password: str) -> None:
    form = page.get_by_role("form", name="Log in")
    form.get_by_label("Name").fill("anna")
    form.get_by_label("Password").fill(password)
    form.get_by_role("button", name="Log in").click()


def test_who_has_no_session_logs_in_and_gets_the_page_that_was_wanted(looker: Looker) -> None:
    with looker.page(None) as page:
        page.goto("nodes/car-0?from=afar")
        expect(page).to_have_url(re.compile("/console/login"))
        log_in(page, PASSWORD)
        expect(page).to_have_url(re.compile(r"/console/nodes/car-0\?from=afar$"))
        expect(page.get_by_role("heading", name="car-0", level=1)).to_be_visible()


def test_a_wrong_password_lets_nobody_in_and_says_so(looker: Looker) -> None:
    with looker.page(None) as page:
        page.goto("login")
        expect(page.get_by_text("first admin")).to_have_count(0)
        log_in(page, "wrong horse battery")
        expect(page.get_by_role("alert")).to_be_visible()
        page.goto("fleet")
        expect(page).to_have_url(re.compile("/console/login"))


def test_the_login_leads_to_no_other_site(looker: Looker) -> None:
    with looker.page(None) as page:
        page.goto("login?next=//elsewhere.example/console/")
        log_in(page, PASSWORD)
        expect(page.get_by_role("heading", name="Overview", level=1)).to_be_visible()
        assert page.url.startswith(f"{looker.url}/console/")


def test_a_wrong_present_password_changes_nothing_and_is_said_at_its_field(looker: Looker) -> None:
    with looker.page("viewer") as page:
        go(page, "account")
        page.get_by_role("button", name="Change password").click()
        dialog = page.get_by_role("dialog", name="Your password")
        dialog.get_by_label("Present password").fill("a guess of somebody")
        dialog.get_by_label("New password").fill("another horse battery")
        dialog.get_by_role("button", name="Change the password").click()
        expect(dialog.get_by_text("That is not your present password")).to_be_visible()


def test_who_logs_out_is_out(looker: Looker) -> None:
    with looker.page(None) as page:
        page.goto("login")
        log_in(page, PASSWORD)
        expect(page.get_by_role("heading", name="Overview", level=1)).to_be_visible()
        page.wait_for_load_state("networkidle")
        page.get_by_role("button", name="Log out").click()
        expect(page).to_have_url(re.compile("/console/login"))
        page.goto("fleet")
        expect(page).to_have_url(re.compile("/console/login"))
