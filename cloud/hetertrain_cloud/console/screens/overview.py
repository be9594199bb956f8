"""Overview: what each job is doing, and why not more."""

from __future__ import annotations

from typing import Any

from hetertrain_cloud.console.elements import Region, card, empty, tag
from hetertrain_cloud.console.view import Screen, View, to


async def build(view: View) -> None:
    """Make the screen."""
    view.head("Overview")

    def jobs(found: list[dict[str, Any]]) -> None:
        if not found:
            with card():
                empty(
                    "No job yet",
                    "A job is a model that the fleet trains.",
                    to("/jobs/new"),
                    "Create a job",
                )
        for job in found:
            with card(job["name"]):
                tag("p", job["waiting_for"]["text"])

    region = Region(jobs, "grid")

    async def refresh() -> None:
        region.show((await view.api.get("/jobs", limit=50))["items"])

    await view.live(refresh)


SCREEN = Screen("/", "Overview", build, "jobs:read", "Watch", "dashboard")
