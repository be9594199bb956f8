"""How a node joins by the console: a claim, shown once, and an approval where one is asked for."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser.looking import Looker, go
from tests.integration.production import Production

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]  # with the start of the fleet


def test_a_node_joins_with_a_claim_made_here_and_appears(looker: Looker, fleet: Production) -> None:
    with looker.page("anna") as page, looker.page("viewer") as watcher:
        go(watcher, "fleet?contains=car-new")
        expect(watcher.get_by_text("No node matches")).to_be_visible()
        secret = make_claim(page, "car-new")
        fleet.run(
            *("vehicle", "enroll", "--url", fleet.url, "--claim", secret, "--node", "car-new"),
            *("--directory", str(fleet.directory / "car-new")),
        )
        expect(watcher.get_by_role("link", name="car-new")).to_be_visible()
        expect(watcher.get_by_role("main").get_by_text("site=yard").last).to_be_visible()


def make_claim(page: Page, node: str) -> str:
    """Make a claim; return its secret."""
    go(page, "enrolment")
    page.get_by_role("button", name="New claim").click()
    dialog = page.get_by_role("dialog", name="New claim")
    dialog.get_by_label("Node's name").fill(node)
    dialog.get_by_label("Labels that they get, one a line").fill("site=yard")
    dialog.get_by_role("button", name="Make the claim").click()
    expect(dialog.get_by_role("img", name="The claim as a QR code")).to_be_visible()
    found = re.search(r"htc\.\S+", dialog.inner_text())
    assert found is not None
    secret = found[0]
    dialog.get_by_role("button", name="Done").click()
    expect(dialog).to_have_count(0)
    assert secret not in page.content(), "shown once"
    return secret


def test_who_waits_for_approval_is_let_in(page: Page, fleet: Production) -> None:
    secret = fleet.run("claim", "create", "--approval").strip()
    join = (
        *("vehicle", "enroll", "--url", fleet.url, "--claim", secret, "--node", "waits"),
        *("--directory", str(fleet.directory / "waits"), "--wait-seconds", "0"),
    )
    fleet.run(*join, code=11)
    go(page, "enrolment")
    approve = page.get_by_role("button", name="Approve: waits")
    approve.click()
    expect(approve).to_have_count(0)
    fleet.run(*join)
