"""The control plane as a whole: what its API, its connection to the broker and its upkeep share."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import func, select, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session as Transaction

from hetertrain.errors import TransportError
from hetertrain.wire import topics
from hetertrain_cloud.control import jobs as job_rules
from hetertrain_cloud.control import timeline
from hetertrain_cloud.control.access import (
    AGGREGATOR,
    BrokerAccess,
    Rights,
    aggregator_rights,
    node_rights,
)
from hetertrain_cloud.control.authority import Authority
from hetertrain_cloud.control.database import Database
from hetertrain_cloud.control.live import LiveFleet
from hetertrain_cloud.control.log_desk import LogDesk
from hetertrain_cloud.control.problems import ProblemError
from hetertrain_cloud.control.settings import ShownSetting
from hetertrain_cloud.control.tables import Job, Node
from hetertrain_cloud.history import JobHistory

SEEN_BATCH = 500
CREW_SECONDS = 3.0
"""In a large fleet, who may work on a job is not counted for each look at it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advertised:
    """The broker as nodes reach it, told to each that enrols."""

    host: str
    port: int
    is_tls: bool
    websocket_path: str | None


@dataclass(slots=True, kw_only=True)
class ControlPlane:
    """What the API's handlers work with; any thread may use it."""

    database: Database
    authority: Authority
    live: LiveFleet
    advertised: Advertised
    jobs_directory: Path
    """Each job's state is in a folder of its name."""
    bootstrap_file: Path
    """Holds the one-time token for the first admin, until there is one."""
    now: Callable[[], datetime.datetime]
    access_changed: threading.Event = field(default_factory=threading.Event)
    """Set: rights at the broker must be brought up to date."""
    access: BrokerAccess | None = None
    """How the broker is told its rules; None: it knows none."""
    access_error: str = ""
    """Why the broker's rules may not be up to date; empty: they are."""
    access_failed_at: datetime.datetime | None = None
    """Since when; None: they are up to date."""
    broker_lost_at: datetime.datetime | None = None
    """Since when the broker is not reached; None: it is."""
    certificates: Mapping[str, Path] = field(default_factory=dict)
    """The cloud's own certificates, by what they are for."""
    settings: tuple[ShownSetting, ...] = ()
    """Those in force that are not secret."""
    logs: LogDesk | None = None
    """Asks nodes for their logs; None: there is no broker to ask over."""
    _eligible: dict[tuple[str, int], tuple[int, float]] = field(default_factory=dict)
    """How many nodes may work on a job, and when they were counted."""
    _histories: dict[str, JobHistory] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def history(self, job: str) -> JobHistory:
        """Return a job's history."""
        with self._lock:
            if job not in self._histories:
                self._histories[job] = JobHistory(self.jobs_directory / job)
            return self._histories[job]

    def bootstrap_token(self) -> str | None:
        """Return the one-time token for the first admin; None where there is none any more."""
        try:
            return self.bootstrap_file.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            return None

    def update_access(self, node: Node) -> None:
        """Tell the broker what a node may do now, before anybody is told that it is done.

        Raises:
            ProblemError: 503, the broker cannot be told; it is told as soon as it can be.
        """
        if self.access is None:
            return
        try:
            if self.live.broker_error:
                raise TransportError(self.live.broker_error)
            self.access.apply(node.name, lambda: self._rights_now(node.name))
        except TransportError as error:
            self.access_changed.set()
            raise ProblemError(
                503, "broker_unreachable", f"ask again: the broker cannot be told: {error}", 5
            ) from error

    def _rights_now(self, name: str) -> Rights | None:
        """Return what a node may do as the database has it by now; None: nothing."""
        with self.database.read() as transaction:
            node = transaction.get(Node, name)
            if node is None or node.state != "active":
                return None
            jobs = job_rules.jobs_of(node, list(transaction.scalars(select(Job))))
        return node_rights(node.name, node.role, jobs)

    def rights(self) -> dict[str, Rights]:
        """Return what everybody may do at the broker."""
        with self.database.read() as transaction:
            jobs = list(transaction.scalars(select(Job)))
            nodes = transaction.scalars(select(Node).where(Node.state == "active"))
            wanted = {
                node.name: node_rights(node.name, node.role, job_rules.jobs_of(node, jobs))
                for node in nodes
            }
        wanted[AGGREGATOR] = aggregator_rights()
        return wanted

    def save_seen(self) -> None:
        """Write down who was seen lately."""
        names = sorted(self.live.take_unsaved())
        for start in range(0, len(names), SEEN_BATCH):
            batch = names[start : start + SEEN_BATCH]
            with self.database.begin() as transaction:
                query = update(Node).where(Node.name.in_(batch))
                transaction.execute(query.values(seen_at=self.now()))

    def save_changes(self) -> None:
        """Write down what happened to nodes; what cannot be written now is kept for the next
        time.
        """
        changes = self.live.take_changes()
        start = 0
        try:
            for start in range(0, len(changes), SEEN_BATCH):
                with self.database.begin() as transaction:
                    began = self.now() - datetime.timedelta(seconds=self.live.clock())
                    timeline.save(transaction, changes[start : start + SEEN_BATCH], began)
        except OperationalError:
            self.live.give_back(changes[start:])
            raise

    def waiting_for(self, job: Job, eligible: int, online: int) -> tuple[str, str]:
        """Say, as a code and in words, why a job with this crew does not go on right now."""
        if job.wanted != "running":
            return f"job_{job.wanted}", f"the job is {job.wanted}: start it"
        if job.state not in ("running", "starting"):
            return f"job_{job.state}", f"the job {job.state}: {job.reason}"
        if self.live.broker_error:
            return "broker_unreachable", f"the broker cannot be reached: {self.live.broker_error}"
        status = self.live.job(job.name, topics.CLOUD_CELL)
        if status is None:
            return "aggregator_starting", "the aggregator has not said anything for 5 seconds"
        crew = f"{eligible} may take part, {online} online{self._held(job)}"
        if not eligible:
            return "no_eligible_nodes", "no enrolled node has the labels that the job asks for"
        if not status.active:
            text = f"no node works on the job: {crew}"
            elsewhere = self.live.online_by_job()
            if online or not elsewhere:
                return "no_active_nodes", text
            (other, num), *_ = elsewhere.most_common(1)
            why = "since a node works on the job that its settings name"
            return "nodes_elsewhere", f"{text}; {num} are online for {other}, {why}"
        return status.waiting_code, f"{status.waiting_for} ({crew})"

    def _held(self, job: Job) -> str:
        """Say how many vehicles may not train by their rules, and which one holds most of them."""
        reasons = self.live.not_eligible(job.name)
        if not reasons:
            return ""
        (rule, num), *_ = reasons.most_common(1)
        total = reasons.total()
        most = rule if num == total else f"{num} of them by {rule}"
        return f", {total} held by a rule: {most}"

    def crew(self, transaction: Transaction, job: Job) -> tuple[int, int]:
        """Return how many nodes may work on a job, a moment ago, and how many say they do."""
        moment, key = self.live.clock(), (job.name, job.revision)
        eligible, at = self._eligible.get(key, (0, -CREW_SECONDS))
        if moment - at >= CREW_SECONDS:
            query = select(func.count()).select_from(Node).where(Node.state == "active")
            for name, value in job.specification["eligible_labels"].items():
                query = query.where(Node.labels[name].as_string() == value)
            eligible = transaction.scalar(query) or 0
            self._eligible[key] = (eligible, moment)
        return eligible, self.live.num_online(job.name)
