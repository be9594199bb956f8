"""Alerts: what needs a human now, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hetertrain_cloud.console import words
from hetertrain_cloud.console.client import ApiClient
from hetertrain_cloud.console.elements import (
    Region,
    callout,
    card,
    empty,
    link,
    moment,
    tag,
)
from hetertrain_cloud.console.view import Screen, View, to

SECONDS = 5.0
SEVERITIES = {"critical": "Now", "warning": "Soon", "info": "Good to know"}
ATTENTION = ("critical", "warning")
LISTS = {
    "nodes_pending": "/enrolment",
    "certificates_expiring": "/enrolment",
    "claim_expiring": "/enrolment",
    "no_job": "/new-job",
    "no_admin": "/accounts",
}
"""Where more is said of an alert than on the page of the one thing that it is about."""
THINGS = {"node": "/nodes/", "job": "/jobs/"}
KINDS = {"node": "/fleet", "job": "/jobs", "claim": "/enrolment", "user": "/accounts"}
OTHER = to("/settings")


def place(alert: Mapping[str, Any]) -> tuple[str, str]:
    """Return the address where something can be done about an alert, and what it is called."""
    kind, name, code = alert["kind"], alert["name"], alert["code"]
    if code == "updates_refused" and name:
        return to("/quarantine", job=name), "See what was refused"
    if code in LISTS:
        return to(LISTS[code]), "Create a job" if code == "no_job" else "See to it"
    if kind in THINGS and name:
        return to(THINGS[kind] + name), f"Go to {name}"
    if kind in KINDS:
        return to(KINDS[kind]), "See them"
    return OTHER, "See the settings"


def alert_item(view: View, alert: Mapping[str, Any]) -> None:
    """Show an alert, with what to do and where."""
    tone = words.ALERT_TONES[alert["severity"]]
    picture = words.ALERT_PICTURES[alert["severity"]]
    with callout(alert["text"], alert["advice"], tone, picture), tag("div", "", "callout-foot"):
        href, label = place(alert)
        if href != OTHER or view.may("settings:read"):
            link(label, href)
        if alert["since"]:
            with tag("span", "", "muted"):
                tag("span", "since ")
                moment(alert["since"], "date")


class Alerts:
    """The screen."""

    def __init__(self, view: View) -> None:
        self._view = view

    async def build(self) -> None:
        """Make the screen."""
        self._view.head("Alerts")
        self._list = Region(self._show, "stack")
        await self._view.live(self._refresh, SECONDS)

    async def _refresh(self) -> None:
        self._list.show(await self._view.api.get("/alerts"))

    def _show(self, found: Mapping[str, Any]) -> None:
        items: Sequence[Mapping[str, Any]] = found["items"]
        if not items:
            with card():
                empty(
                    "All is well",
                    "Nothing needs you. What does will stand here, with what to do, and its "
                    "number in the menu.",
                )
            return
        for severity, title in SEVERITIES.items():
            these = [alert for alert in items if alert["severity"] == severity]
            if these:
                with tag("section", "", "stack"):
                    tag("h2", title)
                    with tag("ul", "", "stack"):
                        for alert in these:
                            with tag("li"):
                                alert_item(self._view, alert)
        total = sum(found["by_code"].values())
        if total > len(items):
            tag("p", f"The first {len(items)} of {total:,}.", "muted")


async def count(api: ApiClient) -> int:
    """Return how many things need a human."""
    by_severity = (await api.get("/alerts"))["by_severity"]
    return sum(by_severity.get(severity, 0) for severity in ATTENTION)


async def build(view: View) -> None:
    """Make the screen."""
    await Alerts(view).build()


SCREEN = Screen("/alerts", "Alerts", build, "jobs:read", "Watch", "notifications", count=count)
