"""What needs a human now, and what to do about it: rules over what is so right now.

Nothing is stored: an alert is there while its cause is. The rules are pure; ``survey`` gathers
what they look at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from statistics import median
from typing import Literal

from hetertrain.wire.signing import GATEWAY_ROLE
from hetertrain_cloud.reasons import explanation

Severity = Literal["critical", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")
NAMES_SHOWN = 5
STALL_FACTOR = 5.0
"""A job stalls when no version came for so many of its usual intervals, ..."""
STALL_SECONDS_MIN = 60.0
"""... and for at least so long, ..."""
FIRST_VERSION_SECONDS = 600.0
"""... or before its first one for so long."""
RESTARTED_SECONDS = 600.0
SILENT_SECONDS = 60.0
REFUSED_SECONDS = 600.0
NODE_EXPIRY = timedelta(days=7)
"""Nodes renew by themselves when a third of 30 days is left: then something was wrong for days."""
SERVER_EXPIRY = timedelta(days=14)
"""Ours are made anew when 30 days are left."""
AUTHORITY_EXPIRY = timedelta(days=90)
UNSEEN = timedelta(hours=24)
CLAIM_EXPIRY = timedelta(hours=24)
CLAIM_LEFT = 0.25
"""Whoever made a claim knows how short it is: it is time when no more than this share is left."""
DISK_WARNING, DISK_CRITICAL = 0.10, 0.03


_NONE_ONLINE = "A node's own page says why it is not online, or does not train."
WITHOUT_NODES = {
    "no_eligible_nodes": "Enrol nodes, or give them the labels that the job asks for.",
    "nodes_elsewhere": "Set `job` to this one in the settings of nodes that are to work on it, and "
    "start them again; or enrol others.",
    "no_active_nodes": _NONE_ONLINE,
    "members": _NONE_ONLINE,
}
"""What to do about a job that no node works on, by what it waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One thing that needs a human."""

    code: str
    severity: Severity
    kind: str
    """Of what it is: ``job``, ``node``, ``broker``, ``authority``, ``claim``, ``server``, ``user``.
    """
    name: str = ""
    """Of the one thing, where it is one."""
    text: str
    advice: str
    since: datetime | None = None
    """None: not known."""


@dataclass(frozen=True, slots=True)
class Names:
    """How many things there are of a kind, and the first of their names."""

    count: int = 0
    first: tuple[str, ...] = ()

    def __str__(self) -> str:
        more = self.count - len(self.first)
        return ", ".join(self.first) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSurvey:
    """One job."""

    name: str
    wanted: str
    state: str
    reason: str = ""
    restarts: int = 0
    changed_at: datetime
    times: tuple[float, ...] = ()
    """When its newest versions were made, in seconds since 1970, oldest first."""
    waiting_code: str = ""
    waiting_text: str = ""
    refused: tuple[tuple[str, int, Names], ...] = ()
    """In the last ``REFUSED_SECONDS``: reason, how many, and whose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimSurvey:
    """One claim that nobody has used."""

    id: str
    role: str
    node: str | None
    labels: Mapping[str, str]
    created_at: datetime
    expires_at: datetime

    def is_ending(self, now: datetime) -> bool:
        """Tell whether little is left of its life."""
        left = self.expires_at - now
        return left <= min(CLAIM_EXPIRY, CLAIM_LEFT * (self.expires_at - self.created_at))

    def __str__(self) -> str:
        whom = self.node or ("gateways" if self.role == GATEWAY_ROLE else "vehicles")
        labels = ", ".join(f"{key}={value}" for key, value in self.labels.items())
        return f"{self.id} for {whom}" + (f" with {labels}" if labels else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """All that the rules look at."""

    now: datetime
    broker_error: str = ""
    broker_lost_at: datetime | None = None
    access_error: str = ""
    access_failed_at: datetime | None = None
    jobs: tuple[JobSurvey, ...] = ()
    pending: Names = Names()
    expiring: Names = Names()
    """Active nodes whose certificates expire within ``NODE_EXPIRY``, or have expired."""
    unseen: Names = Names()
    claims: tuple[ClaimSurvey, ...] = ()
    """Unused ones of whose life little is left."""
    authority_expires_at: datetime
    certificates: tuple[tuple[str, datetime], ...] = ()
    """The cloud's own, by what they are for."""
    disk_free_share: float | None = None
    disk_free_bytes: int = 0
    has_admin: bool = True


def alerts(survey: Survey) -> list[Alert]:
    """Return what needs a human, the most severe first."""
    found = [
        *_broker(survey),
        *_jobs(survey),
        *_nodes(survey),
        *_certificates(survey),
        *_server(survey),
    ]
    order = {severity: place for place, severity in enumerate(SEVERITIES)}
    return sorted(found, key=lambda alert: (order[alert.severity], alert.code, alert.name))


def _broker(now: Survey) -> Iterator[Alert]:
    if now.broker_error:
        yield Alert(
            code="broker_unreachable",
            severity="critical",
            kind="broker",
            text=f"The broker cannot be reached: {now.broker_error}.",
            advice="Look whether it runs, and whether its host name, port and certificates are "
            "right. Nodes train on meanwhile, and nothing is lost.",
            since=now.broker_lost_at,
        )
    if now.access_error:
        yield Alert(
            code="access_outdated",
            severity="critical",
            kind="broker",
            text=f"The broker's rules are not up to date: {now.access_error}.",
            advice="Until they are, a revoked node may still have its rights. Look whether the "
            "broker has the dynamic security plugin, and see its log.",
            since=now.access_failed_at,
        )


def _jobs(now: Survey) -> Iterator[Alert]:
    if not now.jobs:
        yield Alert(
            code="no_job",
            severity="info",
            kind="job",
            text="There is no job yet.",
            advice="Create one: hetertrain job create NAME FILE --start.",
        )
    for job in now.jobs:
        if job.wanted == "running":
            # Without the broker nothing else can be said of a running job.
            yield from _failure(now, job)
            if not now.broker_error and job.state in ("running", "starting"):
                yield from _progress(now, job)
        yield from _refusals(job)


def _failure(now: Survey, job: JobSurvey) -> Iterator[Alert]:
    age = (now.now - job.changed_at).total_seconds()
    if job.state == "failed":
        yield Alert(
            code="job_failed",
            severity="critical",
            kind="job",
            name=job.name,
            text=f"{job.name} failed: {job.reason}.",
            advice="It is started again by itself, ever less often. Mend what the reason says, or "
            "give the job other options; then start it.",
            since=job.changed_at,
        )
    elif job.restarts and age < RESTARTED_SECONDS:
        yield Alert(
            code="job_restarted",
            severity="warning",
            kind="job",
            name=job.name,
            text=f"The aggregator of {job.name} failed and runs again: "
            f"{'once' if job.restarts == 1 else f'{job.restarts} times'} since the job's start.",
            advice="See the log of the cloud for the reason. Nothing that was acknowledged is "
            "lost.",
            since=job.changed_at,
        )
    if job.waiting_code == "store":
        yield Alert(
            code="store_failed",
            severity="critical",
            kind="job",
            name=job.name,
            text=f"{job.name} cannot write to its disk: {job.waiting_text}.",
            advice="Make room on the disk of the state directory, or mend it: the job goes on by "
            "itself. Nodes keep their work meanwhile.",
        )


def _progress(now: Survey, job: JobSurvey) -> Iterator[Alert]:
    age = (now.now - job.changed_at).total_seconds()
    if job.waiting_code == "aggregator_starting":
        if age > SILENT_SECONDS:
            yield Alert(
                code="aggregator_silent",
                severity="critical",
                kind="job",
                name=job.name,
                text=f"The aggregator of {job.name} runs, and says nothing.",
                advice="See the log of the cloud; pause the job and start it again.",
                since=job.changed_at,
            )
        return
    if job.waiting_code in WITHOUT_NODES:
        yield Alert(
            code="job_without_nodes",
            severity="warning",
            kind="job",
            name=job.name,
            text=f"{job.name} waits for nodes: {job.waiting_text}.",
            advice=WITHOUT_NODES[job.waiting_code],
            since=_newest(job),
        )
        return
    usual = _usual_seconds(job)
    limit = FIRST_VERSION_SECONDS
    if usual is not None:
        limit = max(STALL_FACTOR * usual, STALL_SECONDS_MIN)
    since = max(_newest(job) or job.changed_at, job.changed_at)
    if (now.now - since).total_seconds() > limit:
        rate = "" if usual is None else f"; usual is one every {usual:.3g} s"
        yield Alert(
            code="job_stalled",
            severity="warning",
            kind="job",
            name=job.name,
            text=f"{job.name} has made no version since {since:%Y-%m-%d %H:%M} UTC{rate}. "
            f"It waits: {job.waiting_text}.",
            advice="See whether enough nodes are online and may train now, and whether updates "
            "are refused.",
            since=since,
        )


def _refusals(job: JobSurvey) -> Iterator[Alert]:
    for reason, count, names in job.refused:
        means = explanation(reason)
        if means.is_usual:
            continue
        of = f" of {names}" if names.count else ""
        yield Alert(
            code="updates_refused",
            severity="warning",
            kind="job",
            name=job.name,
            text=f"{job.name} refused {count} in the last 10 minutes ({reason}){of}. {means.text}",
            advice=means.advice,
        )


def _nodes(now: Survey) -> Iterator[Alert]:
    if now.pending.count:
        yield Alert(
            code="nodes_pending",
            severity="warning",
            kind="node",
            name=_only(now.pending),
            text=f"{_nodes_wait(now.pending.count)} for approval: {now.pending}.",
            advice="Approve those that you know, and revoke the others.",
        )
    if now.expiring.count:
        yield Alert(
            code="certificates_expiring",
            severity="warning",
            kind="node",
            name=_only(now.expiring),
            text=f"Certificates of {now.expiring.count} active nodes expire within "
            f"{NODE_EXPIRY.days} days, or have expired: {now.expiring}.",
            advice="Nodes renew them by themselves while they reach the control plane: see that "
            "these do. One whose certificate has expired enrols again with a claim for it.",
        )
    if now.unseen.count:
        yield Alert(
            code="nodes_unseen",
            severity="warning",
            kind="node",
            name=_only(now.unseen),
            text=f"{now.unseen.count} active nodes were not seen for 24 hours: {now.unseen}.",
            advice="They may be switched off. Decommission those that are gone for good.",
        )
    for claim in now.claims:
        yield Alert(
            code="claim_expiring",
            severity="info",
            kind="claim",
            name=claim.id,
            text=f"The claim {claim} expires at {claim.expires_at:%Y-%m-%d %H:%M} UTC, and nobody "
            "has used it.",
            advice="Enrol the node, make another claim, or revoke this one.",
        )


def _nodes_wait(count: int) -> str:
    return "1 node waits" if count == 1 else f"{count} nodes wait"


def _certificates(now: Survey) -> Iterator[Alert]:
    if now.authority_expires_at < now.now + AUTHORITY_EXPIRY:
        is_soon = now.authority_expires_at < now.now + SERVER_EXPIRY
        yield Alert(
            code="authority_expiring",
            severity="critical" if is_soon else "warning",
            kind="authority",
            text=f"The fleet's authority expires at {now.authority_expires_at:%Y-%m-%d} UTC.",
            advice="No certificate outlives it. Put a new authority in its place, and let all "
            "nodes enrol again.",
        )
    for what, expires_at in now.certificates:
        if expires_at < now.now + SERVER_EXPIRY:
            yield Alert(
                code="server_certificate_expiring",
                severity="critical" if expires_at < now.now + NODE_EXPIRY else "warning",
                kind="server",
                name=what,
                text=f"The certificate of {what} expires at {expires_at:%Y-%m-%d %H:%M} UTC.",
                advice="Put a new one into tls_directory and start the cloud again; one that our "
                "authority signed is made anew by itself: then see the log.",
            )


def _server(now: Survey) -> Iterator[Alert]:
    free = now.disk_free_share
    if free is not None and free < DISK_WARNING:
        yield Alert(
            code="disk_low",
            severity="critical" if free < DISK_CRITICAL else "warning",
            kind="server",
            text=f"The disk of the state directory has {free:.1%} free, "
            f"{now.disk_free_bytes / 1e9:.3g} GB.",
            advice="Make room: where there is none, jobs wait, and take no updates.",
        )
    if not now.has_admin:
        yield Alert(
            code="no_admin",
            severity="warning",
            kind="user",
            text="There is no admin yet: whoever has the one-time token can become it.",
            advice="Make the first admin with it: hetertrain login.",
        )


def _only(names: Names) -> str:
    return names.first[0] if names.count == 1 else ""


def _newest(job: JobSurvey) -> datetime | None:
    return datetime.fromtimestamp(job.times[-1], UTC) if job.times else None


def _usual_seconds(job: JobSurvey) -> float | None:
    if len(job.times) < 2:
        return None
    return median(later - earlier for earlier, later in pairwise(job.times))
