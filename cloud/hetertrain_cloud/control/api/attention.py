"""What needs a human now."""

from __future__ import annotations

from collections import Counter
from datetime import datetime

from fastapi import APIRouter
from pydantic import Field

from hetertrain_cloud.control.alerts import Severity, alerts
from hetertrain_cloud.control.api.convention import (
    ALWAYS,
    Body,
    Caller,
    Plane,
    problems,
    shown_as,
)
from hetertrain_cloud.control.survey import gather

ALERTS_MAX = 200
router = APIRouter(prefix="/api/v1", tags=["live"])


class AlertShown(Body):
    """One thing that needs a human; it is there while its cause is."""

    code: str = Field(description="stable, for programs", examples=["job_stalled"])
    severity: Severity
    kind: str = Field(
        description="of what it is: job, node, broker, authority, claim, server or user",
        examples=["job"],
    )
    name: str = Field(description="of the one thing, where it is one", examples=["driving"])
    text: str = Field(
        examples=["driving has made no version since 2026-01-01 12:00 UTC; usual is one every 2 s."]
    )
    advice: str = Field(description="what to do")
    since: datetime | None = Field(description="null: not known")


class Alerts(Body):
    """What needs a human, the most severe first."""

    items: list[AlertShown] = Field(description=f"at most {ALERTS_MAX}")
    by_code: dict[str, int] = Field(
        description="how many there are in all", examples=[{"job_stalled": 1}]
    )
    by_severity: dict[str, int] = Field(examples=[{"warning": 1}])


@router.get("/alerts", responses=problems(*ALWAYS))
def list_alerts(caller: Caller, plane: Plane) -> Alerts:
    """List what needs a human now, with what to do: the present state, nothing of the past."""
    for kind in ("nodes", "jobs", "claims"):
        caller.require(f"{kind}:read")
    with plane.database.read() as transaction:
        found = alerts(gather(plane, transaction))
    return Alerts(
        items=[shown_as(AlertShown, alert) for alert in found[:ALERTS_MAX]],
        by_code=dict(Counter(alert.code for alert in found)),
        by_severity=dict(Counter(alert.severity for alert in found)),
    )
