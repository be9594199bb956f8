"""What one sees: a fleet at work, and whatever nodes call themselves as text."""

from __future__ import annotations

import re
from typing import Literal

import pytest
from playwright.sync_api import Page, expect

from hetertrain.transport import mqtt
from hetertrain.wire import topics
from hetertrain.wire.events import Outgoing
from hetertrain.wire.frames import pack
from hetertrain.wire.messages import NOT_ELIGIBLE
from tests.browser.conftest import MARKUP
from tests.browser.looking import ALL, PHONE, Looker, go, reads, until
from tests.builders import make_state
from tests.integration.production import Production

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]  # with the start of the fleet
SIGNAL = "Vehicle.Powertrain.TractionBattery.Charging.IsCharging == true"
BEYOND = """() => {
  const range = document.createRange();
  range.selectNodeContents(document.querySelector("main"));
  return Math.max(...[...range.getClientRects()].map((rect) => rect.right));
}"""
"""How far to the right anything reaches, also where it is cut off."""
IN_AN_HOUR = """() => {
  const at = new Date(Date.now() + 3600e3);
  return new Date(at - at.getTimezoneOffset() * 60e3).toISOString().slice(0, 16);
}"""
"""As a field for times has it, which is that of the viewer's clock."""
VERSION = r"Version\s+([\d,]+)"
CHANGING = (
    "Approve|Revoke|Decommission|Labels|Set a label|Start|Pause|Stop|Resume|Roll back|Promote|Edit|"
    "New job|New claim|Create.*|Delete|Add user|Deactivate|Activate|Change role|Set password|"
    "Show the last lines"
)


def test_a_version_rises_before_ones_eyes(page: Page) -> None:
    go(page, "")
    page.evaluate("window.isTheSame = true")
    until(page, lambda: reads(page, VERSION) is not None, "a version")
    seen = reads(page, VERSION)
    until(page, lambda: reads(page, VERSION) != seen, "the next version")
    assert page.evaluate("window.isTheSame"), "without loading the page again"


def test_the_fleet_is_found_by_name_and_by_what_it_does(page: Page) -> None:
    go(page, "fleet")
    rows = page.get_by_role("table", name="Nodes").get_by_role("row")
    expect(rows.get_by_role("link", name="car-0")).to_be_visible()
    page.get_by_label("Name has").fill("car-1")
    expect(rows.get_by_role("link", name="car-0")).to_have_count(0)
    expect(rows.get_by_role("link", name="car-1")).to_be_visible()
    page.reload()
    expect(page.get_by_label("Name has")).to_have_value("car-1")
    expect(rows.get_by_role("link", name="car-0")).to_have_count(0)


def test_the_fleet_is_sorted_by_a_column_and_back(page: Page) -> None:
    go(page, "fleet?role=vehicle")
    table = page.get_by_role("table", name="Nodes")
    sent = table.get_by_role("columnheader", name="Sent")

    def is_first(node: str, other: str) -> bool:
        names = table.locator("td.is-first a").all_inner_texts()
        return names.index(node) < names.index(other)

    sent.get_by_role("button").click()
    until(page, lambda: is_first("car-0", "hostile"), "who has sent most first")
    expect(sent).to_have_attribute("aria-sort", "descending")
    sent.get_by_role("button").click()
    until(page, lambda: is_first("hostile", "car-0"), "who has sent least first")
    page.reload()
    expect(sent).to_have_attribute("aria-sort", "ascending")
    assert is_first("hostile", "car-0")
    table.get_by_role("columnheader", name="Node").get_by_role("button").click()
    until(page, lambda: is_first("car-0", "hostile"), "the order of names")
    assert page.url.endswith("fleet?role=vehicle")


def test_what_nodes_do_is_counted_of_those_that_are_asked_for(page: Page) -> None:
    go(page, "fleet?contains=car-0")
    bar = page.get_by_role("img", name="what nodes do")
    expect(bar).to_have_attribute("aria-label", re.compile(r"^what nodes do: 1 [a-z ]+$"))


def test_changes_are_found_by_time_in_the_viewers_zone(page: Page) -> None:
    go(page, "audit")
    rows = page.get_by_role("table", name="Changes, newest first").get_by_role("row")
    expect(rows.nth(1)).to_be_visible()
    soon = page.evaluate(IN_AN_HOUR)
    page.get_by_label("From").fill(soon)
    expect(page.get_by_text("No change matches")).to_be_visible()
    page.get_by_label("From").fill("")
    page.get_by_label("Until").fill(soon)
    expect(rows.nth(1)).to_be_visible()
    page.reload()
    expect(page.get_by_label("Until")).to_have_value(soon)


def test_filters_are_cleared_all_at_once(page: Page) -> None:
    go(page, "fleet?contains=car-1&role=vehicle")
    rows = page.get_by_role("table", name="Nodes").get_by_role("row")
    expect(rows.get_by_role("link", name="car-0")).to_have_count(0)
    page.get_by_role("link", name="Clear filters").click()
    expect(rows.get_by_role("link", name="car-0")).to_be_visible()
    expect(page.get_by_role("link", name="Clear filters")).to_have_count(0)


def test_a_node_that_is_online_is_seen_now(page: Page) -> None:
    go(page, "nodes/car-0")
    assert reads(page, r"Last seen\s+(\w+)") == "now"


def test_a_long_name_of_a_signal_stays_on_the_page_of_a_phone(
    looker: Looker, fleet: Production
) -> None:
    fleet.enrol("wordy")
    connection, events = fleet.connect("wordy")
    try:
        assert isinstance(events.get(timeout=10), mqtt.Connected)
        for doing, waits in (("training", ""), (NOT_ELIGIBLE, f"{SIGNAL}: it is false")):
            state = make_state("wordy", doing=doing, waiting_for=waits)
            connection.publish((Outgoing(topics.state("wordy"), pack(state), retain=True),))
        with looker.page("anna", size=PHONE) as page:
            go(page, "nodes/wordy")
            expect(page.locator(".event wbr").first).to_be_attached()
            assert page.evaluate(BEYOND) <= PHONE[0]
    finally:
        connection.stop()


def test_two_jobs_are_compared_best_first(page: Page, fleet: Production) -> None:
    fleet.enrol("spare")
    fleet.create_job("beginner")
    fleet.vehicle("spare", 0, 1, "--job", "beginner", "--step-seconds-min", "1")
    until(page, lambda: bool(fleet.history("metrics.jsonl", "beginner")), "a measured version")
    go(page, "compare?jobs=beginner")
    page.get_by_label("Add a job").select_option("fleet")
    rows = page.get_by_role("table", name="The best of each job").get_by_role("row")
    of_metric = rows.filter(has_text="R2, highest")
    expect(of_metric).to_have_count(2)
    expect(of_metric.first.get_by_role("link")).to_have_text("fleet")
    page.get_by_role("link", name="Take beginner out").click()
    expect(of_metric).to_have_count(1)
    fleet.run("job", "stop", "beginner")
    fleet.processes.pop("spare").terminate()


@pytest.mark.parametrize(("path", "part"), [("fleet", "table"), ("nodes/hostile", "main")])
def test_markup_in_names_is_shown_as_text_and_makes_no_element(
    page: Page, path: str, part: Literal["table", "main"]
) -> None:
    go(page, path)
    shown = page.get_by_role(part)
    expect(shown.get_by_text(MARKUP, exact=True).first).to_be_visible()
    expect(shown.get_by_text(f"owner={MARKUP}").first).to_be_visible()
    assert page.evaluate("document.querySelectorAll('main img[src=x]').length") == 0
    assert page.title() != "taken"


def test_the_last_lines_of_a_nodes_log_are_shown_as_text_whatever_they_hold(page: Page) -> None:
    go(page, "nodes/hostile")
    page.get_by_role("button", name="Show the last lines").click()
    lines = page.get_by_role("region", name="Last lines")
    expect(lines).to_have_text(f"first {MARKUP}\nlast {MARKUP}")
    assert page.evaluate("document.querySelectorAll('main img[src=x]').length") == 0
    assert page.title() != "taken"


def test_that_an_owner_does_not_share_the_log_is_said_in_the_card(page: Page) -> None:
    go(page, "nodes/car-0")
    page.get_by_role("button", name="Show the last lines").click()
    expect(page.get_by_text("The owner of car-0 does not share its log")).to_be_visible()
    expect(page.get_by_role("region", name="Last lines")).to_have_count(0)


@pytest.mark.parametrize("path", [path for _, path in ALL])
def test_a_viewer_is_shown_nothing_that_changes_the_fleet(looker: Looker, path: str) -> None:
    with looker.page("viewer") as page:
        go(page, path)
        changing = re.compile(f"^({CHANGING})(:.*)?$")
        expect(page.get_by_role("button", name=changing)).to_have_count(0)
        expect(page.get_by_role("link", name=changing)).to_have_count(0)


def test_a_viewer_who_asks_all_the_same_is_refused(looker: Looker) -> None:
    with looker.page("viewer") as page:
        me = page.request.get(f"{looker.url}/api/v1/me").json()
        headers = {"X-CSRF-Token": me["csrf_token"], "Origin": looker.url}
        for path in ("nodes/car-0/revoke", "jobs/fleet/pause", "claims"):
            body = {"role": "vehicle"} if path == "claims" else None
            refused = page.request.post(f"{looker.url}/api/v1/{path}", headers=headers, data=body)
            assert refused.status == 403, path
