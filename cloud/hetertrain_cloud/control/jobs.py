"""Jobs: what an operator wants of each, and the orders that its supervisor carries out.

``wanted`` is the operator's word, ``state`` what the supervisor sees:

::

    wanted   running --pause--> paused --start--> running     any --stop--> stopped
    state    starting, running, paused, stopped, completed (by its own rule),
             failed (and tried again)
"""

from __future__ import annotations

import datetime
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field
from sqlalchemy.orm import Session as Transaction

from hetertrain.core.eligibility import RULE_CHARACTERS_MAX, RULES_MAX, check_rules
from hetertrain.core.policy import SYNC_PRESETS, WEIGHT_PRESETS
from hetertrain_cloud.control.problems import conflict, not_found
from hetertrain_cloud.control.tables import Job, Node
from hetertrain_cloud.control.trail import write_entry
from hetertrain_cloud.options import JobOptions, TaskReference

Rules = Annotated[
    tuple[Annotated[str, Field(max_length=RULE_CHARACTERS_MAX)], ...],
    Field(max_length=RULES_MAX, strict=False),
    AfterValidator(check_rules),
]
WANTED_BY_ACTION = {"start": "running", "pause": "paused", "stop": "stopped"}
ENDED = ("stopped", "completed")


class JobSpecification(JobOptions):
    """A job's task and options, and which nodes may work on it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    task: TaskReference
    eligible_labels: dict[str, str] = Field(
        {},
        max_length=16,
        description="only nodes with all of these labels; none: every node",
        examples=[{"region": "north"}],
    )
    train_when: Rules = Field(
        (),
        description="a vehicle trains only while all of these hold",
        examples=[["Vehicle.Powertrain.TractionBattery.Charging.IsCharging == true"]],
    )
    send_when: Rules = Field(
        (),
        description="a vehicle uses its link only while all of these hold",
        examples=[["network in wifi, ethernet"]],
    )


def presets() -> dict[str, dict[str, float | int | None]]:
    """Return what each scheme has where a specification says nothing."""
    names = ("sync_seconds", "sync_deadline_seconds", "cut_seconds", "cut_fraction", "pace_steps")
    return {
        scheme: {name: getattr(policy, name) for name in names}
        | {"server_rate": WEIGHT_PRESETS[scheme].server_rate}
        for scheme, policy in SYNC_PRESETS.items()
    }


def create(
    transaction: Transaction,
    *,
    name: str,
    specification: JobSpecification,
    actor: str,
    now: datetime.datetime,
) -> Job:
    """Add a job; it waits for its start.

    Raises:
        ProblemError: 409, the name is taken.
    """
    if transaction.get(Job, name) is not None:
        raise conflict("job_exists", f"there is a job {name} already: choose another name")
    job = Job(
        name=name,
        specification=specification.model_dump(),
        wanted="stopped",
        promoted=[],
        state="stopped",
        created_at=now,
        changed_at=now,
    )
    transaction.add(job)
    transaction.flush()
    write_entry(
        transaction, "job_created", ("job", job.name), actor=actor, now=now, after=shown(job)
    )
    return job


def change(
    transaction: Transaction,
    job: Job,
    specification: JobSpecification,
    actor: str,
    now: datetime.datetime,
) -> None:
    """Give a job other options; a running one takes them at its next start.

    Raises:
        ProblemError: 409, the task cannot change.
    """
    if specification.task != job.specification["task"]:
        raise conflict("task_fixed", "a job keeps its task: create another job for another task")
    before = shown(job)
    job.specification = specification.model_dump()
    _changed(transaction, job, "job_changed", actor, before, now)


def order(
    transaction: Transaction, name: str, action: str, actor: str, now: datetime.datetime
) -> Job:
    """Take a ``start``, ``pause`` or ``stop``.

    Raises:
        ProblemError: 404; 409, a job that is not running cannot be paused.
    """
    job = find(transaction, name)
    if action == "pause" and job.wanted != "running":
        raise conflict("job_not_running", f"{name} is {job.wanted}, so it cannot be paused")
    before = shown(job)
    job.wanted = WANTED_BY_ACTION[action]
    if action == "start":
        job.state, job.reason, job.restarts = "starting", "", 0
    _changed(transaction, job, f"job_{action}", actor, before, now)
    return job


def roll_back(
    transaction: Transaction, name: str, version: int, actor: str, now: datetime.datetime
) -> Job:
    """Order that the job goes on from an older version, as its next one.

    Raises:
        ProblemError: 404.
    """
    job = find(transaction, name)
    before = shown(job)
    job.rollback_to = version
    _changed(transaction, job, "version_rolled_back", actor, before, now)
    return job


def promote(
    transaction: Transaction, name: str, version: int, actor: str, now: datetime.datetime
) -> Job:
    """Note that a version is one to keep.

    Raises:
        ProblemError: 404.
    """
    job = find(transaction, name)
    if version not in job.promoted:
        before = shown(job)
        job.promoted = sorted([*job.promoted, version])
        _changed(transaction, job, "version_promoted", actor, before, now)
    return job


def find(transaction: Transaction, name: str) -> Job:
    """Return a job, to be changed.

    Raises:
        ProblemError: 404.
    """
    job = transaction.get(Job, name, with_for_update=True)
    if job is None:
        raise not_found("job", name)
    return job


def require(transaction: Transaction, name: str) -> Job:
    """Return a job, to be read.

    Raises:
        ProblemError: 404.
    """
    job = transaction.get(Job, name)
    if job is None:
        raise not_found("job", name)
    return job


def is_eligible(labels: dict[str, str], specification: dict[str, Any]) -> bool:
    """Tell whether a node with these labels may work on a job."""
    wanted: dict[str, str] = specification["eligible_labels"]
    return wanted.items() <= labels.items()


def jobs_of(node: Node, jobs: list[Job]) -> list[str]:
    """Return the jobs whose topics a node may use, in order."""
    return sorted(job.name for job in jobs if is_eligible(node.labels, job.specification))


def shown(job: Job) -> dict[str, Any]:
    """Return what the audit trail says of a job."""
    return {
        "wanted": job.wanted,
        "specification": job.specification,
        "rollback_to": job.rollback_to,
        "promoted": list(job.promoted),
    }


def _changed(
    transaction: Transaction,
    job: Job,
    action: str,
    actor: str,
    before: dict[str, Any],
    now: datetime.datetime,
) -> None:
    job.changed_at = now
    job.revision += 1
    thing = ("job", job.name)
    write_entry(transaction, action, thing, actor=actor, now=now, before=before, after=shown(job))
