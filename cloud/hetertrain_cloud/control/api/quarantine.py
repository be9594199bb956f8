"""What a job's aggregator refused, of whom and why."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field

from hetertrain_cloud.control import jobs as rules
from hetertrain_cloud.control.api.convention import (
    ALWAYS,
    Body,
    Caller,
    Limit,
    Name,
    NumberCursor,
    Plane,
    page_of,
    problems,
)
from hetertrain_cloud.control.api.work import JobName
from hetertrain_cloud.reasons import explanation
from hetertrain_cloud.refusals import newest_first

router = APIRouter(prefix="/api/v1", tags=["jobs"])
ReasonCode = Annotated[str, Query(pattern=r"^[a-z_]{1,64}$", description="only of this reason")]


class RefusalShown(Body):
    """Refusals of one node for one reason: one, or as many as came within a minute."""

    number: int
    at: datetime = Field(description="of the newest")
    first_at: datetime = Field(description="of the oldest")
    count: int = Field(description="how many", examples=[1])
    node: str = Field(description="empty: not known, or of more nodes than were told apart")
    seq: int | None = Field(description="number of the newest update; null: it was none")
    base_version: int | None = Field(description="that it started from; null: not known")
    reason: str = Field(examples=["norm"])
    outcome: str = Field(
        description="rejected: the node may send its work again; quarantined: it is not to be "
        "trusted; frame: a message that could not be used",
        examples=["quarantined"],
    )
    detail: str = Field(examples=["norm 812.4 is over 61.5, 30 times the usual"])
    measured: float | None = Field(description="what was over a limit", examples=[812.4])
    limit: float | None = Field(examples=[61.5])


class ReasonShown(Body):
    """How much was refused for one reason, and what it means."""

    reason: str = Field(examples=["norm"])
    count: int
    explanation: str
    advice: str


class RefusalPage(Body):
    """Some of what was refused; ask for the rest with ``cursor``."""

    items: list[RefusalShown]
    next_cursor: str | None = Field(description="null: there is no more")
    by_reason: list[ReasonShown] = Field(
        description="of all that is kept and matches, the most frequent first"
    )
    since: datetime | None = Field(description="the oldest that is kept; null: there is none")


@router.get("/jobs/{name}/refusals", responses=problems(*ALWAYS, 404))
def list_refusals(
    name: JobName,
    caller: Caller,
    plane: Plane,
    node: Annotated[Name | None, Query(description="only of this node")] = None,
    reason: ReasonCode | None = None,
    limit: Limit = 50,
    cursor: NumberCursor = None,
) -> RefusalPage:
    """List what the job's aggregator refused, newest first; what gateways refused is with them."""
    caller.require("jobs:read")
    with plane.database.read() as transaction:
        rules.require(transaction, name)
    counts: Counter[str] = Counter()
    rows: list[dict[str, Any]] = []
    since: float | None = None
    for row in newest_first(plane.jobs_directory / name):
        since = row["first_at"]
        if node not in (None, row["node"]) or reason not in (None, row["reason"]):
            continue
        counts[row["reason"]] += row["count"]
        if len(rows) <= limit and (cursor is None or row["number"] < cursor):
            rows.append(row)
    items, next_cursor = page_of(rows, limit, lambda row: int(row["number"]))
    return RefusalPage(
        items=[_refusal(row) for row in items],
        next_cursor=next_cursor,
        by_reason=[_reason(code, count) for code, count in counts.most_common()],
        since=None if since is None else datetime.fromtimestamp(since, UTC),
    )


def _refusal(row: dict[str, Any]) -> RefusalShown:
    times = {name: datetime.fromtimestamp(row[name], UTC) for name in ("at", "first_at")}
    return RefusalShown.model_validate(row | times)


def _reason(code: str, count: int) -> ReasonShown:
    means = explanation(code)
    return ReasonShown(reason=code, count=count, explanation=means.text, advice=means.advice)
