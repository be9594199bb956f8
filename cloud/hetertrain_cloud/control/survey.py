"""Gathers what the rules of ``alerts`` look at, from database, broker, histories and disk.

Bounded in each part, and a few milliseconds with ten thousand nodes: counts and first names are the
database's.
"""

from __future__ import annotations

import datetime
import shutil
from collections import Counter
from itertools import islice
from pathlib import Path

from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.orm import Session as Transaction

from hetertrain_cloud.control.alerts import (
    CLAIM_EXPIRY,
    NAMES_SHOWN,
    NODE_EXPIRY,
    REFUSED_SECONDS,
    UNSEEN,
    ClaimSurvey,
    JobSurvey,
    Names,
    Survey,
)
from hetertrain_cloud.control.credentials import expires_at
from hetertrain_cloud.control.plane import ControlPlane
from hetertrain_cloud.control.tables import Claim, Job, Node
from hetertrain_cloud.refusals import GATHER_SECONDS, newest_first

JOBS_MAX = 500
CLAIMS_LOOKED_AT_MAX = 500
CLAIMS_MAX = 50
REFUSALS_MAX = 1000
TIMES = 21
"""Of so many versions the usual interval is taken."""


def gather(plane: ControlPlane, transaction: Transaction) -> Survey:
    """Look at everything once."""
    now = plane.now()
    jobs = transaction.scalars(select(Job).order_by(Job.name).limit(JOBS_MAX))
    is_active = Node.state == "active"
    unseen = or_(
        Node.seen_at < now - UNSEEN, Node.seen_at.is_(None) & (Node.enrolled_at < now - UNSEEN)
    )
    free_share, free_bytes = disk_free(plane.jobs_directory)
    certificates = ((what, expires_at(path)) for what, path in plane.certificates.items())
    return Survey(
        now=now,
        broker_error=plane.live.broker_error,
        broker_lost_at=plane.broker_lost_at,
        access_error=plane.access_error,
        access_failed_at=plane.access_failed_at,
        jobs=tuple(_job(plane, transaction, job, now) for job in jobs),
        pending=_names(transaction, Node.state == "pending"),
        expiring=_names(transaction, is_active & (Node.expires_at < now + NODE_EXPIRY)),
        unseen=_names(transaction, is_active & unseen),
        claims=_claims(transaction, now),
        authority_expires_at=plane.authority.expires_at,
        certificates=tuple((what, at) for what, at in certificates if at is not None),
        disk_free_share=free_share,
        disk_free_bytes=free_bytes,
        has_admin=plane.bootstrap_token() is None,
    )


def _names(transaction: Transaction, condition: ColumnElement[bool]) -> Names:
    count = transaction.scalar(select(func.count()).select_from(Node).where(condition)) or 0
    if not count:
        return Names()
    first = select(Node.name).where(condition).order_by(Node.name).limit(NAMES_SHOWN)
    return Names(count, tuple(transaction.scalars(first)))


def _claims(transaction: Transaction, now: datetime.datetime) -> tuple[ClaimSurvey, ...]:
    query = (
        select(Claim)
        .where(Claim.uses == 0, Claim.revoked_at.is_(None))
        .where(Claim.expires_at > now, Claim.expires_at < now + CLAIM_EXPIRY)
        .order_by(Claim.expires_at)
        .limit(CLAIMS_LOOKED_AT_MAX)
    )
    claims = (
        ClaimSurvey(
            id=claim.id,
            role=claim.role,
            node=claim.node,
            labels=claim.labels,
            created_at=claim.created_at,
            expires_at=claim.expires_at,
        )
        for claim in transaction.scalars(query)
    )
    # A time that depends on two columns is not one that every database can reckon with.
    return tuple(islice((claim for claim in claims if claim.is_ending(now)), CLAIMS_MAX))


def _job(
    plane: ControlPlane, transaction: Transaction, job: Job, now: datetime.datetime
) -> JobSurvey:
    code, text = plane.waiting_for(job, *plane.crew(transaction, job))
    return JobSurvey(
        name=job.name,
        wanted=job.wanted,
        state=job.state,
        reason=job.reason,
        restarts=job.restarts,
        changed_at=job.changed_at,
        times=tuple(plane.history(job.name).times(TIMES)),
        waiting_code=code,
        waiting_text=text,
        refused=_refused(plane.jobs_directory / job.name, now.timestamp() - REFUSED_SECONDS),
    )


def _refused(directory: Path, since: float) -> tuple[tuple[str, int, Names], ...]:
    """Count what a job refused lately; in a flood, what the newest rows say of it."""
    counts: Counter[str] = Counter()
    nodes: dict[str, set[str]] = {}
    for row in islice(newest_first(directory), REFUSALS_MAX):
        if row["at"] < since - GATHER_SECONDS:
            break  # A row may have waited so long to be written.
        if row["at"] < since:
            continue
        counts[row["reason"]] += row["count"]
        nodes.setdefault(row["reason"], set()).add(row["node"])
    found = []
    for reason, count in counts.most_common():
        names = sorted(nodes[reason] - {""})
        found.append((reason, count, Names(len(names), tuple(names[:NAMES_SHOWN]))))
    return tuple(found)


def disk_free(directory: Path) -> tuple[float | None, int]:
    """Return the share of the disk that is free, and how many bytes; None: not known."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    try:
        usage = shutil.disk_usage(directory)
    except OSError:
        return None, 0
    return usage.free / usage.total if usage.total else None, usage.free
