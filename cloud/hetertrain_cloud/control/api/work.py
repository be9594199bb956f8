"""Jobs and their versions."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path as FilePath
from statistics import fmean
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Response
from fastapi.responses import FileResponse
from pydantic import Field
from sqlalchemy import select
from sqlalchemy.orm import Session as Transaction

from hetertrain.wire import topics
from hetertrain_cloud.control import jobs as rules
from hetertrain_cloud.control.api.convention import (
    ALWAYS,
    Body,
    Caller,
    IdempotencyKey,
    IfMatch,
    Limit,
    Name,
    NameCursor,
    NumberCursor,
    Page,
    Plane,
    check_revision,
    listed,
    once,
    page_of,
    problems,
    set_etag,
    shown_as,
)
from hetertrain_cloud.control.models import kept, model_file
from hetertrain_cloud.control.operators import Principal
from hetertrain_cloud.control.plane import ControlPlane
from hetertrain_cloud.control.problems import not_found
from hetertrain_cloud.control.tables import Job
from hetertrain_cloud.history import JobHistory

router = APIRouter(prefix="/api/v1", tags=["jobs"])
METRICS_MAX = 5000
RATE_SECONDS = 3600.0
RATE_VERSIONS = 50
JobName = Annotated[Name, Path(description="the job's name")]
VersionNumber = Annotated[int, Path(ge=0, lt=1 << 62, description="the version")]


class WaitingFor(Body):
    """What a job waits for right now."""

    code: str = Field(examples=["updates"])
    text: str = Field(examples=["2 nodes' updates needed, 1 present (3 eligible nodes, 2 online)"])


class Measurement(Body):
    """What a version measured."""

    version: int
    at: datetime | None = Field(description="when the version was made; null: unknown")
    elapsed_seconds: float = Field(description="since the first node", examples=[81.5])
    uplink_bytes: int | None = Field(
        description="updates that had come by then, since the job began; null: unknown",
        examples=[48_203_118],
    )
    metrics: dict[str, float] = Field(examples=[{"r2": 0.93}])


class JobLive(Body):
    """What a job's aggregator said a moment ago."""

    version: int
    active: int = Field(description="nodes that work on the job, those behind gateways included")
    open_updates: int = Field(description="updates in the version that is being made")
    is_syncing: bool
    sync_in_seconds: float | None = Field(
        description="until the next synchronisation, if one is due"
    )
    cut_in_seconds: float | None = Field(
        description="until the open version is made, however few its updates; null: it has none"
    )
    nodes_for_cut: int = Field(
        description="how many nodes' updates make the open version at once; 0: not said",
        examples=[25],
    )
    nodes_in_cut: int = Field(description="how many have sent theirs", examples=[19])
    refused: dict[str, int] = Field(description="updates and frames refused, by kind")
    updates_by_lag: dict[int, int] = Field(description="how far behind updates were")
    num_parameters: int = Field(description="of the model; 0: not said", examples=[101_770])
    uplink_bytes: int = Field(
        description="updates that came, since the job began", examples=[48_203_118]
    )
    uplink_dense_bytes: int = Field(
        description="the same updates as float32 without compression", examples=[1_628_320_000]
    )
    downlink_bytes: int = Field(
        description="versions that went out, each once for all nodes of a tier",
        examples=[9_640_210],
    )
    downlink_dense_bytes: int = Field(
        description="the same versions as float32 without compression", examples=[81_416_000]
    )


class OnNodes(Body):
    """What nodes measured on their own held-out data."""

    metric: str
    mean: float = Field(description="over nodes, each counted once")
    least: float
    nodes: int = Field(description="how many of those that are online have measured")


class JobShown(Body):
    """A job."""

    name: str
    specification: rules.JobSpecification
    wanted: Literal["running", "paused", "stopped"] = Field(
        description="what an operator asked for"
    )
    state: str = Field(description="what is so", examples=["running"])
    reason: str = Field(description="why it failed or completed")
    restarts: int = Field(description="how often its aggregator failed since the start")
    version: int | None = Field(description="the newest version; null: none yet")
    versions_per_hour: float | None = Field(
        description="over the newest hour, or the newest 50 versions where that is less; null: "
        "unknown",
        examples=[412.5],
    )
    waiting_for: WaitingFor
    nodes_eligible: int
    nodes_online: int
    newest: Measurement | None = Field(description="the newest measurement")
    on_nodes: list[OnNodes] = Field(description="where the job asks for it")
    live: JobLive | None = Field(description="null: its aggregator does not run")
    promoted: list[int]
    rollback_to: int | None = Field(description="a rollback that is not carried out yet")
    created_at: datetime
    changed_at: datetime
    revision: int


class JobCreation(Body):
    """A new job."""

    name: Name
    specification: rules.JobSpecification


class Contribution(Body):
    """An update that went into a version."""

    node: str
    seq: int
    base_version: int
    lag: int
    examples: int
    steps: int
    weight: float | None = Field(
        description="what it counted for: its examples after cap, step factor and discount for "
        "its lag; null: not noted",
        examples=[87.5],
    )
    share: float | None = Field(
        description="its weight as a share of all the version's; null: not noted", examples=[0.04]
    )


class VersionShown(Body):
    """A version of a job's model."""

    version: int
    at: datetime | None = Field(description="when it was made; null: unknown")
    seconds: float | None = Field(
        description="since the version before; null: unknown", examples=[2.1]
    )
    elapsed_seconds: float | None = Field(description="since the first node; null: unknown")
    sync: int | None = Field(description="the synchronisation that ended with it, if any")
    lineage: str
    digest: str
    rolled_back_to: int | None = Field(description="it is the model of this version again")
    metrics: dict[str, float] | None
    num_updates: int
    num_nodes: int = Field(description="whose updates went into it", examples=[23])
    is_kept: bool = Field(description="its model can be had, and rolled back to")
    is_promoted: bool


class VersionWithContributions(VersionShown):
    """A version, and what went into it."""

    contributions: list[Contribution]


@router.get("/jobs", responses=problems(*ALWAYS))
def list_jobs(
    caller: Caller, plane: Plane, limit: Limit = 50, cursor: NameCursor = None
) -> Page[JobShown]:
    """List jobs, by name."""
    caller.require("jobs:read")
    with plane.database.read() as transaction:
        query = select(Job).order_by(Job.name).where(Job.name > (cursor or ""))
        return listed(
            transaction,
            query,
            limit,
            lambda job: job.name,
            lambda job: _job(plane, transaction, job),
        )


@router.post("/jobs", status_code=201, response_model=JobShown, responses=problems(*ALWAYS, 409))
def create_job(
    body: JobCreation, caller: Caller, plane: Plane, idempotency_key: IdempotencyKey = None
) -> Response:
    """Add a job; it waits for its start."""
    caller.require("jobs:write")
    with plane.database.begin() as transaction:
        response = once(
            transaction,
            plane,
            caller,
            idempotency_key,
            ("create_job", body),
            lambda: _job(
                plane,
                transaction,
                rules.create(
                    transaction,
                    name=body.name,
                    specification=body.specification,
                    actor=caller.name,
                    now=plane.now(),
                ),
            ),
        )
    plane.access_changed.set()
    return response


@router.get("/jobs/{name}", responses=problems(*ALWAYS, 404))
def show_job(name: JobName, caller: Caller, plane: Plane, response: Response) -> JobShown:
    """Show a job, and what it waits for."""
    caller.require("jobs:read")
    with plane.database.read() as transaction:
        job = _find(transaction, name)
        set_etag(response, job.revision)
        return _job(plane, transaction, job)


@router.put("/jobs/{name}", responses=problems(*ALWAYS, 404, 409, 412, 428))
def change_job(
    name: JobName,
    body: rules.JobSpecification,
    caller: Caller,
    plane: Plane,
    response: Response,
    if_match: IfMatch = None,
) -> JobShown:
    """Give a job other options; a running one takes them at its next start."""
    caller.require("jobs:write")
    with plane.database.begin() as transaction:
        job = rules.find(transaction, name)
        check_revision(if_match, job.revision)
        rules.change(transaction, job, body, caller.name, plane.now())
        shown = _job(plane, transaction, job)
    plane.access_changed.set()
    set_etag(response, job.revision)
    return shown


@router.post("/jobs/{name}/start", responses=problems(*ALWAYS, 404, 409))
def start_job(name: JobName, caller: Caller, plane: Plane) -> JobShown:
    """Start a job, or go on with one that is paused, stopped or completed; within seconds."""
    return _order(name, "start", caller, plane)


@router.post("/jobs/{name}/pause", responses=problems(*ALWAYS, 404, 409))
def pause_job(name: JobName, caller: Caller, plane: Plane) -> JobShown:
    """Pause a running job, within seconds, whether or not a node is there."""
    return _order(name, "pause", caller, plane)


@router.post("/jobs/{name}/stop", responses=problems(*ALWAYS, 404, 409))
def stop_job(name: JobName, caller: Caller, plane: Plane) -> JobShown:
    """Stop a job, within seconds, whether or not a node is there."""
    return _order(name, "stop", caller, plane)


def _order(name: str, action: str, caller: Principal, plane: ControlPlane) -> JobShown:
    caller.require("jobs:write")
    with plane.database.begin() as transaction:
        job = rules.order(transaction, name, action, caller.name, plane.now())
        return _job(plane, transaction, job)


@router.get("/jobs/{name}/versions", responses=problems(*ALWAYS, 404), tags=["versions"])
def list_versions(
    name: JobName, caller: Caller, plane: Plane, limit: Limit = 50, cursor: NumberCursor = None
) -> Page[VersionShown]:
    """List a job's versions, newest first."""
    caller.require("versions:read")
    with plane.database.read() as transaction:
        job = _find(transaction, name)
    rows = plane.history(name).page(cursor, limit + 1)
    items, next_cursor = page_of(rows, limit, lambda row: int(row["version"]))
    having = kept(plane.jobs_directory / name)
    return Page(
        items=[VersionShown.model_validate(_version(job, row, having)) for row in items],
        next_cursor=next_cursor,
    )


@router.get("/jobs/{name}/metrics", responses=problems(*ALWAYS, 404), tags=["versions"])
def list_metrics(
    name: JobName,
    caller: Caller,
    plane: Plane,
    limit: Annotated[
        int, Query(ge=1, le=METRICS_MAX, description="the newest so many, without points")
    ] = 500,
    points: Annotated[
        int | None,
        Query(
            ge=2,
            le=METRICS_MAX,
            description="all of the job's, thinned evenly to so many at most; limit does not count",
        ),
    ] = None,
) -> list[Measurement]:
    """List a job's measurements, oldest first, to be drawn."""
    caller.require("versions:read")
    with plane.database.read() as transaction:
        _find(transaction, name)
    history = plane.history(name)
    rows = history.metrics(limit) if points is None else history.thinned_metrics(points)
    return [_measurement(row) for row in rows]


@router.get("/jobs/{name}/versions/{version}", responses=problems(*ALWAYS, 404), tags=["versions"])
def show_version(
    name: JobName, version: VersionNumber, caller: Caller, plane: Plane
) -> VersionWithContributions:
    """Show a version and the updates that went into it."""
    caller.require("versions:read")
    with plane.database.read() as transaction:
        job = _find(transaction, name)
    row = plane.history(name).row(version)
    if row is None:
        raise not_found("version", version)
    shown = _version(job, row, kept(plane.jobs_directory / name))
    contributions = _contributions(version, row["contributions"])
    return VersionWithContributions.model_validate(shown | {"contributions": contributions})


@router.get(
    "/jobs/{name}/versions/{version}/model",
    response_class=FileResponse,
    responses=problems(
        *ALWAYS,
        400,
        404,
        416,
        also={
            200: {
                "description": "the model, safetensors; honours Range and If-Range",
                "content": {"application/octet-stream": {}},
            },
            206: {"description": "a part of it", "content": {"application/octet-stream": {}}},
        },
    ),
    tags=["versions"],
)
def download_model(
    name: JobName, version: VersionNumber, caller: Caller, plane: Plane
) -> FileResponse:
    """Download a version's model as safetensors."""
    caller.require("versions:read")
    path = _require_model(plane, name, version)
    return FileResponse(path, media_type="application/octet-stream", filename=f"{name}-{path.name}")


@router.post(
    "/jobs/{name}/versions/{version}/promote",
    responses=problems(*ALWAYS, 404),
    tags=["versions"],
)
def promote_version(
    name: JobName, version: VersionNumber, caller: Caller, plane: Plane
) -> JobShown:
    """Keep a version's model for good."""
    caller.require("versions:write")
    _require_model(plane, name, version, is_promoted=True)
    with plane.database.begin() as transaction:
        job = rules.promote(transaction, name, version, caller.name, plane.now())
        return _job(plane, transaction, job)


@router.post(
    "/jobs/{name}/versions/{version}/rollback",
    responses=problems(*ALWAYS, 404),
    tags=["versions"],
)
def roll_back(name: JobName, version: VersionNumber, caller: Caller, plane: Plane) -> JobShown:
    """Go on from an older version: its model becomes the job's next version, in a new lineage."""
    caller.require("versions:write")
    _require_model(plane, name, version)
    with plane.database.begin() as transaction:
        job = rules.roll_back(transaction, name, version, caller.name, plane.now())
        return _job(plane, transaction, job)


def _require_model(
    plane: ControlPlane, name: str, version: int, *, is_promoted: bool = False
) -> FilePath:
    """Return a version's model; writing it takes a while, so no transaction is open meanwhile."""
    with plane.database.read() as transaction:
        _find(transaction, name)
    return model_file(plane.jobs_directory / name, version, is_promoted=is_promoted)


def _find(transaction: Transaction, name: str) -> Job:
    job = transaction.get(Job, name)
    if job is None:
        raise not_found("job", name)
    return job


def _job(plane: ControlPlane, transaction: Transaction, job: Job) -> JobShown:
    eligible, online = plane.crew(transaction, job)
    code, text = plane.waiting_for(job, eligible, online)
    history = plane.history(job.name)
    newest = history.metrics(1)
    status = plane.live.job(job.name, topics.CLOUD_CELL)
    return shown_as(
        JobShown,
        job,
        version=history.newest(),
        versions_per_hour=_versions_per_hour(history, plane.now()),
        waiting_for={"code": code, "text": text},
        nodes_eligible=eligible,
        nodes_online=online,
        newest=_measurement(newest[-1]) if newest else None,
        on_nodes=[
            OnNodes(metric=name, mean=fmean(values), least=min(values), nodes=len(values))
            for name, values in sorted(plane.live.metrics(job.name).items())
        ],
        live=None if status is None else shown_as(JobLive, status),
    )


def _versions_per_hour(history: JobHistory, now: datetime) -> float | None:
    """Count the versions of the newest hour; where they are many, go by the newest of them."""
    times = history.times(RATE_VERSIONS + 1)
    if len(times) < 2:
        return None
    since = max(times[0], now.timestamp() - RATE_SECONDS)
    num = len(times) - 1 if since == times[0] else sum(at > since for at in times)
    seconds = now.timestamp() - since
    return round(num * RATE_SECONDS / seconds, 1) if seconds > 0 else None


def _measurement(row: dict[str, Any]) -> Measurement:
    return Measurement(
        version=row["version"],
        at=_moment(row.get("at")),
        elapsed_seconds=row["elapsed_seconds"],
        uplink_bytes=row.get("uplink_bytes"),
        metrics=row["metrics"],
    )


def _contributions(version: int, rows: list[list[Any]]) -> list[Contribution]:
    """Describe what a version was made of; older rows have no weights."""
    total = sum(row[5] for row in rows if len(row) > 5)
    return [
        Contribution(
            node=node,
            seq=seq,
            base_version=base,
            lag=version - 1 - base,
            examples=examples,
            steps=steps,
            weight=weight[0] if weight else None,
            share=round(weight[0] / total, 6) if weight and total else None,
        )
        for node, seq, base, examples, steps, *weight in rows
    ]


def _moment(at: float | None) -> datetime | None:
    """Return a time that a history has in seconds since 1970."""
    return None if at is None else datetime.fromtimestamp(at, UTC)


def _version(job: Job, row: dict[str, Any], having: set[int]) -> dict[str, Any]:
    same = (
        *("version", "seconds", "elapsed_seconds", "sync", "lineage", "digest"),
        *("rolled_back_to", "metrics"),
    )
    contributions = row["contributions"]
    return {name: row.get(name) for name in same} | {
        "at": _moment(row.get("at")),
        "num_updates": len(contributions),
        "num_nodes": len({item[0] for item in contributions}),
        "is_kept": row["version"] in having,
        "is_promoted": row["version"] in job.promoted,
    }
