"""The versions of a job's model: what each was made of, what it measured, and its model."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path as FilePath
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from fastapi.responses import FileResponse
from pydantic import Field

from hetertrain_cloud.control import jobs as rules
from hetertrain_cloud.control.api.convention import (
    ALWAYS,
    Body,
    Caller,
    Limit,
    NumberCursor,
    Page,
    Plane,
    page_of,
    problems,
)
from hetertrain_cloud.control.api.work import (
    JobName,
    JobShown,
    Measurement,
    job_shown,
    measurement,
    moment,
)
from hetertrain_cloud.control.models import kept, model_file
from hetertrain_cloud.control.plane import ControlPlane
from hetertrain_cloud.control.problems import not_found
from hetertrain_cloud.control.tables import Job

router = APIRouter(prefix="/api/v1")
METRICS_MAX = 5000
VersionNumber = Annotated[int, Path(ge=0, lt=1 << 62, description="the version")]


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


@router.get("/jobs/{name}/versions", responses=problems(*ALWAYS, 404))
def list_versions(
    name: JobName, caller: Caller, plane: Plane, limit: Limit = 50, cursor: NumberCursor = None
) -> Page[VersionShown]:
    """List a job's versions, newest first."""
    caller.require("versions:read")
    with plane.database.read() as transaction:
        job = rules.require(transaction, name)
    rows = plane.history(name).page(cursor, limit + 1)
    items, next_cursor = page_of(rows, limit, lambda row: int(row["version"]))
    having = kept(plane.jobs_directory / name)
    return Page(
        items=[VersionShown.model_validate(_version(job, row, having)) for row in items],
        next_cursor=next_cursor,
    )


@router.get("/jobs/{name}/metrics", responses=problems(*ALWAYS, 404))
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
        rules.require(transaction, name)
    history = plane.history(name)
    rows = history.metrics(limit) if points is None else history.thinned_metrics(points)
    return [measurement(row) for row in rows]


@router.get("/jobs/{name}/versions/{version}", responses=problems(*ALWAYS, 404))
def show_version(
    name: JobName, version: VersionNumber, caller: Caller, plane: Plane
) -> VersionWithContributions:
    """Show a version and the updates that went into it."""
    caller.require("versions:read")
    with plane.database.read() as transaction:
        job = rules.require(transaction, name)
    row = plane.history(name).row(version)
    if row is None:
        raise not_found("version", version)
    shown = _version(job, row, kept(plane.jobs_directory / name))
    contributions = _contributions(version, row["contributions"])
    return VersionWithContributions.model_validate(shown | {"contributions": contributions})


@router.head(
    "/jobs/{name}/versions/{version}/model",
    response_class=FileResponse,
    responses=problems(*ALWAYS, 404),
)
def ready_model(
    name: JobName, version: VersionNumber, caller: Caller, plane: Plane
) -> FileResponse:
    """Make a version's model ready to be downloaded or rolled back to; it stays while eight others
    are asked for.
    """
    return download_model(name, version, caller, plane)


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
)
def promote_version(
    name: JobName, version: VersionNumber, caller: Caller, plane: Plane
) -> JobShown:
    """Keep a version's model for good."""
    caller.require("versions:write")
    _require_model(plane, name, version, is_promoted=True)
    with plane.database.begin() as transaction:
        job = rules.promote(transaction, name, version, caller.name, plane.now())
        return job_shown(plane, transaction, job)


@router.post(
    "/jobs/{name}/versions/{version}/rollback",
    responses=problems(*ALWAYS, 404),
)
def roll_back(name: JobName, version: VersionNumber, caller: Caller, plane: Plane) -> JobShown:
    """Go on from an older version: its model becomes the job's next version, in a new lineage."""
    caller.require("versions:write")
    _require_model(plane, name, version)
    with plane.database.begin() as transaction:
        job = rules.roll_back(transaction, name, version, caller.name, plane.now())
        return job_shown(plane, transaction, job)


def _require_model(
    plane: ControlPlane, name: str, version: int, *, is_promoted: bool = False
) -> FilePath:
    """Return a version's model; writing it takes a while, so no transaction is open meanwhile."""
    with plane.database.read() as transaction:
        rules.require(transaction, name)
    return model_file(plane.jobs_directory / name, version, is_promoted=is_promoted)


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


def _version(job: Job, row: dict[str, Any], having: set[int]) -> dict[str, Any]:
    same = (
        *("version", "seconds", "elapsed_seconds", "sync", "lineage", "digest"),
        *("rolled_back_to", "metrics"),
    )
    contributions = row["contributions"]
    return {name: row.get(name) for name in same} | {
        "at": moment(row.get("at")),
        "num_updates": len(contributions),
        "num_nodes": len({item[0] for item in contributions}),
        "is_kept": row["version"] in having,
        "is_promoted": row["version"] in job.promoted,
    }
