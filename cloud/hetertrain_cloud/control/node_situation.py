"""What is known of a node, gathered: from the database, of its jobs, and what it said."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetertrain.wire import topics
from hetertrain.wire.messages import AggregatorStatus, NodeState
from hetertrain_cloud.control.live import LiveFleet
from hetertrain_cloud.control.tables import Job, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSituation:
    """What matters of a job."""

    name: str
    eligible_labels: Mapping[str, str]
    train_when: Sequence[str] = ()
    send_when: Sequence[str] = ()
    wanted: str
    state: str
    reason: str = ""
    status: AggregatorStatus | None = None
    """What its aggregator in the cloud said a moment ago."""

    def missing(self, labels: Mapping[str, str]) -> dict[str, str]:
        """Return the labels that the job asks for and a node does not have."""
        wanted = self.eligible_labels
        return {key: wanted[key] for key in sorted(wanted) if labels.get(key) != wanted[key]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All that is known of a node."""

    node: str
    role: str
    enrolment: str
    """``pending``, ``active``, ``revoked`` or ``decommissioned``."""
    labels: Mapping[str, str]
    expires_at: datetime.datetime | None
    seen_at: datetime.datetime | None
    now: datetime.datetime
    jobs: Sequence[JobSituation]
    said: NodeState | None
    """Its newest heartbeat; None: none since the control plane's start."""
    is_online: bool
    seconds_ago: float = 0.0
    """How old that heartbeat is."""
    via: str = ""
    """The gateway that tells of it; empty: the node itself does."""
    gateway: AggregatorStatus | None = None
    """What the gateway of its cell said a moment ago."""
    broker_error: str = ""
    access_error: str = ""

    @property
    def may_work_on(self) -> list[JobSituation]:
        """The jobs whose labels it has."""
        return [job for job in self.jobs if not job.missing(self.labels)]

    def job(self) -> JobSituation | None:
        """Return the job that it is about: the one that it works on, else one that it may work on
        and that runs, as far as there is one.
        """
        may = self.may_work_on
        said = self.said.job if self.said else None
        return min(
            may,
            key=lambda job: (job.name != said, job.wanted != "running", not job.status, job.name),
            default=None,
        )


def gather(
    node: Node,
    jobs: Sequence[Job],
    live: LiveFleet,
    now: datetime.datetime,
    access_error: str = "",
) -> Situation:
    """Gather what is known of a node."""
    seen = live.node(node.name)
    said = None if seen is None else seen.state
    return Situation(
        node=node.name,
        role=node.role,
        enrolment=node.state,
        labels=node.labels,
        expires_at=node.expires_at,
        seen_at=node.seen_at,
        now=now,
        jobs=[_job(job, live) for job in jobs],
        said=said,
        is_online=live.is_online(node.name),
        seconds_ago=0.0 if seen is None else live.clock() - seen.at,
        via="" if seen is None else seen.via,
        gateway=None if said is None else live.job(said.job, said.cell),
        broker_error=live.broker_error,
        access_error=access_error,
    )


def _job(job: Job, live: LiveFleet) -> JobSituation:
    specification = job.specification
    return JobSituation(
        name=job.name,
        eligible_labels=specification["eligible_labels"],
        train_when=specification.get("train_when", ()),
        send_when=specification.get("send_when", ()),
        wanted=job.wanted,
        state=job.state,
        reason=job.reason,
        status=live.job(job.name, topics.CLOUD_CELL),
    )
