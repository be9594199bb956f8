"""What can be watched: the audit trail, live events, health and metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from pydantic import Field
from sqlalchemy import func, select, text

from hetertrain.wire import topics
from hetertrain_cloud.control import trail
from hetertrain_cloud.control.api.convention import (
    ALWAYS,
    Body,
    Caller,
    Limit,
    Name,
    NumberCursor,
    Page,
    Plane,
    Time,
    listed,
    problems,
    shown_as,
)
from hetertrain_cloud.control.plane import ControlPlane
from hetertrain_cloud.control.problems import ProblemError
from hetertrain_cloud.control.tables import AuditEntry, Job, Node

EVENT_SECONDS = 1.0
"""Changes are gathered for so long, whatever the size of the fleet."""
SILENCE_SECONDS = 15.0
"""A comment is sent at least so often, so that proxies keep the stream open."""
router = APIRouter()


class Entry(Body):
    """One change, by whom, from what to what."""

    number: int
    at: datetime
    actor: str
    action: str
    kind: str
    object: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    digest: str


class Verification(Body):
    """Whether the audit trail is whole."""

    entries: int
    head: str = Field(description="digest of the newest entry; note it down elsewhere")
    broken_at: int | None = Field(description="the first entry that was altered; null: none")


class Health(Body):
    """That the service is there."""

    status: str = Field(examples=["ok"])


class Readiness(Body):
    """Whether the service can do its work, and if not, why."""

    is_ready: bool
    database: str = Field(description="empty: well")
    broker: str = Field(description="empty: well")
    access: str = Field(description="empty: the broker's rules are up to date")


@router.get("/api/v1/audit", responses=problems(*ALWAYS), tags=["audit"])
def list_entries(
    caller: Caller,
    plane: Plane,
    kind: Annotated[Name | None, Query(description="only of things of this kind")] = None,
    object: Annotated[Name | None, Query(description="only of the thing of this name")] = None,  # noqa: A002  # the column's name
    actor: Annotated[
        str | None,
        Query(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,79}$", description="only what this one did"),
    ] = None,
    since: Annotated[Time | None, Query(description="only from then on")] = None,
    until: Annotated[Time | None, Query(description="only before then")] = None,
    limit: Limit = 50,
    cursor: NumberCursor = None,
) -> Page[Entry]:
    """List changes, newest first."""
    caller.require("audit:read")
    query = select(AuditEntry).order_by(AuditEntry.number.desc())
    if cursor is not None:
        query = query.where(AuditEntry.number < cursor)
    if kind is not None:
        query = query.where(AuditEntry.kind == kind)
    if object is not None:
        query = query.where(AuditEntry.object == object)
    if actor is not None:
        query = query.where(AuditEntry.actor == actor)
    if since is not None:
        query = query.where(AuditEntry.at >= since)
    if until is not None:
        query = query.where(AuditEntry.at < until)
    with plane.database.read() as transaction:
        return listed(
            transaction, query, limit, lambda row: row.number, lambda row: shown_as(Entry, row)
        )


@router.get("/api/v1/audit/verification", responses=problems(*ALWAYS), tags=["audit"])
def verify_entries(caller: Caller, plane: Plane) -> Verification:
    """Walk along the whole chain of changes, and say whether one was altered or removed."""
    caller.require("audit:read")
    with plane.database.read() as transaction:
        return Verification.model_validate(asdict(trail.verify(transaction)))


@router.get(
    "/api/v1/events",
    response_class=StreamingResponse,
    responses=problems(
        *ALWAYS,
        also={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
    ),
    tags=["live"],
)
async def stream_events(
    request: Request,
    caller: Caller,
    plane: Plane,
    seconds: Annotated[
        float, Query(gt=0, le=86400, description="end the stream after so long")
    ] = 3600.0,
) -> StreamingResponse:
    """Stream what changes: events ``node`` and ``job``, each with the newest state, once a second
    at most.
    """
    caller.require("nodes:read")
    caller.require("jobs:read")
    return StreamingResponse(_events(request, plane, seconds), media_type="text/event-stream")


async def _events(request: Request, plane: ControlPlane, seconds: float) -> AsyncIterator[str]:
    change, silent = 0, 0.0
    ends_at = plane.live.clock() + seconds
    yield ": the fleet, live\n\n"
    while plane.live.clock() < ends_at and not await request.is_disconnected():
        change, nodes, jobs = plane.live.since(change)
        silent = 0.0 if nodes or jobs else silent + EVENT_SECONDS
        for kind, states in (("node", nodes), ("job", jobs)):
            for state in states:
                yield f"event: {kind}\ndata: {json.dumps(asdict(state))}\n\n"
        if silent >= SILENCE_SECONDS:
            silent = 0.0
            yield ": still here\n\n"
        await asyncio.sleep(min(EVENT_SECONDS, max(0.0, ends_at - plane.live.clock())))


@router.get("/healthz", tags=["health"])
def show_health() -> Health:
    """Say that the process lives."""
    return Health(status="ok")


@router.get(
    "/readyz",
    responses={503: {"model": Readiness, "description": "not ready"}},
    tags=["health"],
)
def show_readiness(plane: Plane, response: Response) -> Readiness:
    """Say whether database and broker can be used."""
    database = ""
    try:
        with plane.database.read() as transaction:
            transaction.execute(text("SELECT 1"))
    except Exception as error:  # whatever a database's driver raises, the answer is no
        database = type(error).__name__
    broker, access = plane.live.broker_error, plane.access_error
    is_ready = not (database or broker or access)
    if not is_ready:
        response.status_code = 503
    return Readiness(is_ready=is_ready, database=database, broker=broker, access=access)


@router.get(
    "/metrics",
    response_class=Response,
    responses=problems(
        401,
        403,
        also={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    ),
    tags=["health"],
)
def show_metrics(caller: Caller, plane: Plane) -> Response:
    """Give figures to Prometheus; it needs a token with the scope ``metrics:read``."""
    if "metrics:read" not in caller.rights:
        raise ProblemError(403, "right_missing", f"{caller.name} lacks the right metrics:read")
    registry = CollectorRegistry()
    _gauge_nodes(registry, plane)
    _gauge_jobs(registry, plane)
    return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")


def _gauge_nodes(registry: CollectorRegistry, plane: ControlPlane) -> None:
    nodes = Gauge("hetertrain_nodes", "Enrolled nodes", ["role", "state"], registry=registry)
    with plane.database.read() as transaction:
        counts = select(Node.role, Node.state, func.count()).group_by(Node.role, Node.state)
        for role, state, count in transaction.execute(counts):
            nodes.labels(role, state).set(count)
    online = Gauge("hetertrain_nodes_online", "Nodes that are online", registry=registry)
    online.set(plane.live.num_online())
    broker = Gauge("hetertrain_broker_connected", "1: the broker is reached", registry=registry)
    broker.set(0 if plane.live.broker_error else 1)
    lost = Gauge(
        "hetertrain_node_events_lost",
        "Events of nodes that found no room since the start",
        registry=registry,
    )
    lost.set(plane.live.num_changes_lost)


def _gauge_jobs(registry: CollectorRegistry, plane: ControlPlane) -> None:
    def gauge(name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"hetertrain_job_{name}", text, ["job", *labels], registry=registry)

    state = gauge("state", "1: the job is in this state", "state")
    version = gauge("version", "Newest version")
    active = gauge("active_nodes", "Nodes that work on the job")
    opened = gauge("open_updates", "Updates in the open version")
    refused = gauge("refused", "Refused updates and frames since the start", "reason")
    metric = gauge("metric", "Newest measurement", "metric")
    restarts = gauge("restarts", "Failures of the aggregator since the job's start")
    with plane.database.read() as transaction:
        jobs = list(transaction.scalars(select(Job)))
    for job in jobs:
        state.labels(job.name, job.state).set(1)
        restarts.labels(job.name).set(job.restarts)
        status = plane.live.job(job.name, topics.CLOUD_CELL)
        if status is None:
            continue
        version.labels(job.name).set(status.version)
        active.labels(job.name).set(status.active)
        opened.labels(job.name).set(status.open_updates)
        for reason, count in status.refused.items():
            refused.labels(job.name, reason).set(count)
        for name, value in status.metrics.items():
            metric.labels(job.name, name).set(value)
