"""What an operator does to nodes and jobs by the console, and sees come true."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser.looking import go, until
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


def test_a_job_is_paused_and_goes_on(page: Page, fleet: Production) -> None:
    go(page, "jobs/fleet")
    heading = page.get_by_role("main")
    page.get_by_role("button", name="Pause").click()
    expect(heading.get_by_text("paused", exact=True).first).to_be_visible()
    expect(heading.get_by_text("resting").first).to_be_visible()
    paused_at = fleet.version()
    page.get_by_role("button", name="Start").click()
    expect(heading.get_by_text("running", exact=True).first).to_be_visible()
    until(page, lambda: fleet.version() > paused_at, "a version after the pause")


def test_a_job_goes_on_from_an_older_version(page: Page) -> None:
    go(page, "jobs/fleet/versions")
    page.get_by_role("button", name=re.compile("^Roll back: ")).first.click()
    dialog = page.get_by_role("dialog", name=re.compile("^Roll fleet back"))
    word = dialog.get_by_label(re.compile("^Type "))
    expect(word).to_be_visible()
    found = re.search(r"Type (\d+) to go on", dialog.inner_text())
    assert found is not None
    word.fill(found[1])
    dialog.get_by_role("button", name="Roll back").click()
    rolled_back = f"rolled back to {int(found[1]):,}"
    expect(page.get_by_role("table").get_by_text(rolled_back).first).to_be_visible()


def test_a_job_is_made_by_a_form_that_says_what_is_wrong_where(page: Page) -> None:
    go(page, "new-job")
    page.get_by_role("textbox", name="Name of the job").fill("second")
    task = page.get_by_role("textbox", name="Task", exact=True)
    task.fill("no task")
    page.get_by_role("button", name="Create", exact=True).click()
    expect(page.get_by_role("main").get_by_role("alert").first).to_be_visible()
    task.fill("hetertrain_lab.driving:DrivingTask")
    page.get_by_role("button", name="Create", exact=True).click()
    expect(page.get_by_role("heading", name="second", level=1)).to_be_visible()
    expect(page.get_by_role("main").get_by_text("stopped", exact=True).first).to_be_visible()


def test_all_that_is_wrong_with_a_job_is_said_at_once_and_the_first_of_it_shown(page: Page) -> None:
    go(page, "new-job")
    name = page.get_by_role("textbox", name="Name of the job")
    expect(name).to_have_attribute("placeholder", "for example driving")
    page.get_by_role("textbox", name="Train when").fill("no rule")
    page.get_by_role("button", name="Create", exact=True).click()
    expect(page.get_by_role("main").get_by_role("alert")).to_have_count(3)
    expect(name).to_be_focused()
    name.fill("third")
    page.get_by_role("button", name="Create", exact=True).click()
    expect(page.get_by_role("textbox", name="Task", exact=True)).to_be_focused()
    expect(page.get_by_role("textbox", name="Task", exact=True)).to_be_in_viewport()


def test_a_password_that_is_too_short_is_said_to_be_at_its_field(page: Page) -> None:
    go(page, "accounts")
    expect(page.get_by_role("link", name="Your tokens")).to_have_attribute(
        "href", "/console/account"
    )
    page.get_by_role("button", name="New user").click()
    dialog = page.get_by_role("dialog", name="New user")
    dialog.get_by_label("Name").fill("berta")
    dialog.get_by_label("Password").fill("short")
    dialog.get_by_role("button", name="Add the user").click()
    expect(dialog.get_by_role("alert")).to_have_text("At least 12 characters.")
    expect(dialog.get_by_label("Password")).to_be_focused()


def test_the_way_from_the_gateways_leads_to_a_claim_for_one(page: Page) -> None:
    go(page, "gateways")
    page.get_by_role("link", name="Enrol a gateway").click()
    dialog = page.get_by_role("dialog", name="New claim")
    expect(dialog.get_by_label("For", exact=True)).to_have_value("edge")
