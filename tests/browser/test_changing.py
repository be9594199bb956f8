"""What an operator does to nodes and jobs by the console, and sees come true."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.browser.looking import go
from tests.integration.production import Production

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]  # with the start of the fleet


def test_labels_are_changed_and_bad_ones_complained_of_at_the_field(page: Page) -> None:
    go(page, "nodes/car-1")
    page.get_by_role("button", name="Labels").click()
    dialog = page.get_by_role("dialog", name="Labels")
    field = dialog.get_by_label("One a line, KEY=VALUE")
    field.fill("no equals sign")
    dialog.get_by_role("button", name="Save").click()
    expect(dialog.get_by_role("alert")).to_be_visible()
    field.fill("region=north")
    dialog.get_by_role("button", name="Save").click()
    expect(dialog).to_be_hidden()
    expect(page.get_by_role("main").get_by_text("region=north").first).to_be_visible()


def test_escape_closes_a_dialog_and_gives_the_focus_back(page: Page) -> None:
    go(page, "nodes/car-1")
    opener = page.get_by_role("button", name="Labels")
    opener.press("Enter")
    dialog = page.get_by_role("dialog", name="Labels")
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(opener).to_be_focused()


def test_a_revoked_node_is_dropped(page: Page, fleet: Production) -> None:
    fleet.enrol("stolen")
    connection, _ = fleet.connect("stolen")
    try:
        go(page, "nodes/stolen")
        page.get_by_role("button", name="Revoke").click()
        dialog = page.get_by_role("dialog", name="Revoke stolen?")
        dialog.get_by_label("Type stolen to go on").fill("stolen")
        dialog.get_by_role("button", name="Revoke").click()
        expect(page.get_by_role("main").get_by_text("revoked", exact=True)).to_be_visible()
        expect(page.get_by_role("button", name="Revoke")).to_have_count(0)
    finally:
        connection.stop()
