"""Jobs."""

from __future__ import annotations

from datetime import UTC, datetime
from statistics import fmean
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Response
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
    Page,
    Plane,
    check_revision,
    listed,
    once,
    problems,
    set_etag,
    shown_as,
)
from hetertrain_cloud.control.operators import Principal
from hetertrain_cloud.control.plane import ControlPlane
from hetertrain_cloud.control.tables import Job
from hetertrain_cloud.history import JobHistory

router = APIRouter(prefix="/api/v1", tags=["jobs"])
RATE_SECONDS, RATE_SECONDS_MIN = 3600.0, 5.0
RATE_VERSIONS = 50
JobName = Annotated[Name, Path(description="the job's name")]


class JobForm(Body):
    """What a form for jobs needs."""

    specification: dict[str, Any] = Field(
        description="JSON Schema of a specification: each option with description, default and "
        "bounds",
        examples=[{"properties": {"policy": {"default": "sap"}}}],
    )
    presets: dict[str, dict[str, float | int | None]] = Field(
        description="what each scheme has where the specification says nothing (null: never)",
        examples=[{"sap": {"sync_seconds": 20.0, "cut_fraction": 0.25}}],
    )


class WaitingFor(Body):
    """What a job waits for right now."""

    code: str = Field(examples=["updates"])
    text: str = Field(examples=["updates of 2 nodes, 1 present (3 may take part, 2 online)"])


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
        description="over the newest hour, or the newest 50 versions where that is less, since the "
        "job was started or changed; null: it does not run, or nothing can be said yet",
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


@router.get("/job-schema", responses=problems(*ALWAYS))
def show_job_schema(caller: Caller) -> JobForm:
    """Describe what can be chosen for a job, for forms; keys in TOML files are the same."""
    caller.require("jobs:read")
    schema = rules.JobSpecification.model_json_schema()
    return JobForm(specification=schema, presets=rules.presets())


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
            lambda job: job_shown(plane, transaction, job),
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
            lambda: job_shown(
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
        job = rules.require(transaction, name)
        set_etag(response, job.revision)
        return job_shown(plane, transaction, job)


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
        shown = job_shown(plane, transaction, job)
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
        return job_shown(plane, transaction, job)


def job_shown(plane: ControlPlane, transaction: Transaction, job: Job) -> JobShown:
    """Describe a job as it is now."""
    eligible, online = plane.crew(transaction, job)
    code, text = plane.waiting_for(job, eligible, online)
    history = plane.history(job.name)
    newest = history.metrics(1)
    status = plane.live.job(job.name, topics.CLOUD_CELL)
    return shown_as(
        JobShown,
        job,
        version=history.newest(),
        versions_per_hour=_versions_per_hour(job, history, plane.now()),
        waiting_for={"code": code, "text": text},
        nodes_eligible=eligible,
        nodes_online=online,
        newest=measurement(newest[-1]) if newest else None,
        on_nodes=[
            OnNodes(metric=name, mean=fmean(values), least=min(values), nodes=len(values))
            for name, values in sorted(plane.live.metrics(job.name).items())
        ],
        live=None if status is None else shown_as(JobLive, status),
    )


def _versions_per_hour(job: Job, history: JobHistory, now: datetime) -> float | None:
    """Count the versions of the newest hour since the job was started or changed; where they are
    many, go by the newest of them. None: it does not run, or nothing can be said yet.
    """
    times = history.times(RATE_VERSIONS + 1)
    if job.wanted != "running" or not times:
        return None
    since = max(times[0], now.timestamp() - RATE_SECONDS, job.changed_at.timestamp())
    num = len(times) - 1 if since == times[0] else sum(at > since for at in times)
    seconds = now.timestamp() - since
    return round(num * RATE_SECONDS / seconds, 1) if seconds >= RATE_SECONDS_MIN else None


def measurement(row: dict[str, Any]) -> Measurement:
    """Describe a measurement by its row in the history."""
    return Measurement(
        version=row["version"],
        at=moment(row.get("at")),
        elapsed_seconds=row["elapsed_seconds"],
        uplink_bytes=row.get("uplink_bytes"),
        metrics=row["metrics"],
    )


def moment(at: float | None) -> datetime | None:
    """Return a time that a history has in seconds since 1970."""
    return None if at is None else datetime.fromtimestamp(at, UTC)
