"""``hetertrain cloud``: starts the control plane and an aggregator for each job that is to run, and
starts again what fails.

What is to run stands in the database: the control plane writes what operators want, the supervisor
makes it so and writes what is so. Neither needs the other to live. All children end when the
supervisor does, however it ends.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from hetertrain.errors import HetertrainError, SettingsError
from hetertrain.logging import configure, get_logger
from hetertrain.service import Mailbox, Stop, end_with_parent
from hetertrain.transport.broker import EmbeddedBroker
from hetertrain.transport.database import own_directory
from hetertrain_cloud.control.access import AGGREGATOR
from hetertrain_cloud.control.authority import CERTIFICATE_FILE, Authority
from hetertrain_cloud.control.credentials import write_own
from hetertrain_cloud.control.jobs import JobSpecification
from hetertrain_cloud.control.models import order_rollback
from hetertrain_cloud.control.service import now, run_control
from hetertrain_cloud.control.settings import CloudSettings
from hetertrain_cloud.control.tables import Job
from hetertrain_cloud.control.trail import write_entry
from hetertrain_cloud.history import read_outcome

LOOK_SECONDS = 0.5
RESTART_SECONDS_MIN, RESTART_SECONDS_MAX = 1.0, 60.0
SETTLED_SECONDS = 60.0
"""Who lived so long fails for the first time."""
STOP_SECONDS = 15.0
CONTROL_PLANE = "control-plane"


@dataclass(slots=True)
class Child:
    """One process, and how it went."""

    process: BaseProcess
    report: Connection
    """Says why it failed, where it knows."""
    started_at: float

    def failure(self) -> str:
        """Return why it ended."""
        if self.report.poll():
            try:
                return str(self.report.recv_bytes(4096).decode(errors="replace"))
            except (OSError, EOFError):
                pass  # It was killed before it could say.
        return f"the process ended with code {self.process.exitcode}"


class Supervisor:
    """The cloud side's processes."""

    def __init__(self, settings: CloudSettings) -> None:
        self._owner = own_directory(settings.directory)
        self._settings = settings
        self._log = get_logger(part="supervisor")
        self._context = multiprocessing.get_context("spawn")
        self._mailbox: Mailbox[None] = Mailbox()
        self._database = settings.open_database()
        self._children: dict[str, Child] = {}
        self._retry_at: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        """In a row, by process."""

    def run(self) -> int:
        """Supervise until stopped; return the exit code."""
        self._mailbox.stop_on_signals()
        self._database.migrate()
        authority = Authority(
            self._settings.authority, now(), self._settings.authority_passphrase_file
        )
        write_own(authority, self._settings.directory / "credentials", now())
        if self._settings.broker == "embedded":
            directory = self._settings.state_directory / "broker"
            with EmbeddedBroker(directory, self._settings.broker_port):
                self._supervise()
        else:
            self._supervise()
        return 0

    def _supervise(self) -> None:
        try:
            while not isinstance(self._mailbox.take(time.monotonic() + LOOK_SECONDS), Stop):
                self._look(time.monotonic())
        finally:
            for name in list(self._children):
                self._end(name)
            self._database.close()

    def _look(self, moment: float) -> None:
        """Make what runs be what is wanted."""
        self._keep(CONTROL_PLANE, moment, run_control, self._settings)
        try:
            with self._database.read() as transaction:
                jobs = list(transaction.scalars(select(Job)))
        except SQLAlchemyError as error:
            self._log.error("database_unavailable", error=type(error).__name__)
            return
        for job in jobs:
            try:
                self._look_at(job, moment)
            except Exception as error:  # one job must not end the others
                self._log.error("job_not_supervised", job=job.name, error=repr(error))

    def _look_at(self, job: Job, moment: float) -> None:
        name = _child(job.name)
        if job.rollback_to is not None:
            self._end(name)
            self._roll_back(job)
        if job.wanted != "running":
            self._end(name)
            self._note(job, job.wanted, "")
            return
        if job.state == "completed":
            return
        child = self._children.get(name)
        if child is not None and not child.process.is_alive():
            outcome = read_outcome(self._settings.jobs_directory / job.name)
            if outcome is not None:
                self._end(name)
                self._note(job, *outcome)
                return
        self._keep_job(job, name, moment)

    def _keep_job(self, job: Job, name: str, moment: float) -> None:
        try:
            settings = self._aggregator_settings(job)
        except (SettingsError, ValidationError) as error:
            self._note(job, "failed", f"its options cannot be used: {error}")
            return
        failure = self._keep(name, moment, run_aggregator, settings)
        if failure is not None:
            self._note(job, "failed", failure, restarts=job.restarts + 1)
        elif name in self._children:
            self._note(job, "running", "")

    def _aggregator_settings(self, job: Job) -> dict[str, Any]:
        specification = JobSpecification.model_validate(job.specification)
        settings = self._settings
        authority = str(settings.authority / CERTIFICATE_FILE)
        options = specification.model_dump(exclude={"eligible_labels", "train_when", "send_when"})
        same = ("broker_host", "broker_port", "broker_websocket_path")
        # Nodes that log in with certificates sign what they send.
        trusted = {} if settings.broker == "embedded" else {"authority_file": authority}
        return (
            options
            | {name: getattr(settings, name) for name in same}
            | settings.credential(AGGREGATOR)
            | trusted
            | {"job": job.name, "state_directory": settings.jobs_directory}
        )

    def _keep(
        self, name: str, moment: float, target: Callable[[Any], None], argument: object
    ) -> str | None:
        """Start a process that does not run; return why it ended, when it just did."""
        child = self._children.get(name)
        if child is not None and child.process.is_alive():
            return None
        failure = None
        if child is not None:
            failure = child.failure()
            self._log.error("process_failed", process=name, reason=failure)
            has_settled = moment - child.started_at > SETTLED_SECONDS
            failures = 1 if has_settled else self._failures.get(name, 0) + 1
            wait = min(RESTART_SECONDS_MAX, RESTART_SECONDS_MIN * 2.0 ** min(failures - 1, 16))
            self._retry_at[name], self._failures[name] = moment + wait, failures
            self._forget(name)
        if moment >= self._retry_at.get(name, 0.0):
            self._start(name, moment, target, argument)
        return failure

    def _start(
        self, name: str, moment: float, target: Callable[[Any], None], argument: object
    ) -> None:
        here, there = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=_be, args=(target, argument, there), name=name, daemon=True
        )
        process.start()
        there.close()
        self._children[name] = Child(process, here, moment)
        self._log.info("process_started", process=name, pid=process.pid)

    def _end(self, name: str) -> None:
        """Ask a process to end; kill it where it does not."""
        child = self._children.get(name)
        if child is not None:
            child.process.terminate()
            child.process.join(STOP_SECONDS)
            if child.process.is_alive():
                self._log.error("process_killed", process=name)
                child.process.kill()
                child.process.join(STOP_SECONDS)
            self._forget(name)
        self._retry_at.pop(name, None)
        self._failures.pop(name, None)

    def _forget(self, name: str) -> None:
        child = self._children.pop(name)
        child.report.close()
        child.process.close()

    def _roll_back(self, job: Job) -> None:
        assert job.rollback_to is not None, "it was ordered"
        failure = None
        try:
            order_rollback(self._settings.jobs_directory / job.name, job.rollback_to)
        except HetertrainError as error:
            failure = {"rollback_to": job.rollback_to, "reason": str(error)}
            self._log.error("rollback_failed", job=job.name, error=str(error))
        with self._database.begin() as transaction:
            row = transaction.get(Job, job.name, with_for_update=True)
            # Another order may have come meanwhile: it stands.
            if row is not None and row.rollback_to == job.rollback_to:
                row.rollback_to = None
            if failure is not None:
                thing = ("job", job.name)
                action = "version_rollback_failed"
                write_entry(
                    transaction, action, thing, actor="supervisor", now=now(), after=failure
                )

    def _note(self, job: Job, state: str, reason: str, restarts: int | None = None) -> None:
        """Write down what is so, where it is news."""
        if (job.state, job.reason) == (state, reason) and restarts is None:
            return
        with self._database.begin() as transaction:
            row = transaction.get(Job, job.name, with_for_update=True)
            # An operator's order may have come meanwhile; it is looked at next.
            if row is not None and row.wanted == job.wanted:
                row.state, row.reason = state, reason
                row.restarts = row.restarts if restarts is None else restarts
                row.changed_at = now()


def _child(job: str) -> str:
    return f"job {job}"


def run_aggregator(settings: dict[str, Any]) -> None:
    """Be a job's aggregator."""
    from hetertrain_cloud.service import AggregatorService, AggregatorSettings

    AggregatorService(AggregatorSettings(**settings)).run()


def _be(target: Callable[[Any], None], argument: object, report: Connection) -> None:
    """Be one child: say why, where it fails."""
    configure("info", json=True)
    end_with_parent()
    try:
        target(argument)
    except HetertrainError as error:
        report.send_bytes(f"{error.code}: {error}".encode()[:4096])
        raise SystemExit(error.exit_code) from error
