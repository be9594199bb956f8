"""The cloud's aggregator of one job as a process: drives the job with the broker's connection, and
evaluates its versions.

One thread takes events from one mailbox.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from hetertrain import codec
from hetertrain.core.update import Checkpoint
from hetertrain.errors import SettingsError, StoreError, TransportError
from hetertrain.logging import get_logger
from hetertrain.service import BrokerSettings, Mailbox, Stop
from hetertrain.transport import mqtt
from hetertrain.transport.claim import Claim
from hetertrain.transport.database import own_directory
from hetertrain.wire import topics
from hetertrain.wire.downlink import Downlink
from hetertrain.wire.events import Outgoing
from hetertrain.wire.frames import pack
from hetertrain_cloud.beginning import Beginning, from_file, from_task
from hetertrain_cloud.checkpoints import write_model
from hetertrain_cloud.driver import JobDriver
from hetertrain_cloud.evaluator import Evaluated
from hetertrain_cloud.history import (
    METRICS_FILE,
    OUTCOME_FILE,
    append_line,
    whole_lines,
    write_outcome,
)
from hetertrain_cloud.options import JobOptions, StopRule, TaskReference

STATUS_SECONDS = 0.5
STORE_RETRY_SECONDS = 2.0
STORE_PROBE_BYTES = 1 << 20
CLAIM_STATUSES = 3
"""A new aggregator waits for so many of another one's statuses before it takes the job's place."""


class AggregatorSettings(JobOptions, BrokerSettings):
    """Settings of a job's aggregator."""

    section: ClassVar[str] = "aggregator"

    task: TaskReference | None = Field(
        None, description="the task to train, as module:Class; this or initial_model"
    )
    initial_model: Path | None = Field(
        None,
        description="a safetensors file to begin with, where nodes train in loops of their own",
    )

    @property
    def directory(self) -> Path:
        """The folder of this job's state."""
        return self.state_directory / self.job

    @property
    def final_model(self) -> Path:
        """Where the newest model stands after a stop."""
        return self.directory / "final.safetensors"

    def beginning(self, on_result: Callable[[Evaluated], None]) -> Beginning:
        """Return what the job begins with.

        Raises:
            HetertrainError: neither task nor model is given, or both; or it cannot be loaded.
        """
        match self.task, self.initial_model:
            case str(task), None:
                return from_task(task, self.seed, on_result)
            case None, Path() as path:
                if self.stop_when is not None:
                    raise SettingsError("stop_when needs a task: there are no metrics without one")
                return from_file(path)
            case _:
                raise SettingsError(
                    "aggregator needs either task or initial_model: give --task module:Class, or "
                    "--initial-model FILE where nodes train in loops of their own"
                )


Input = mqtt.Event | Evaluated


class AggregatorService:
    """One job's aggregator at work."""

    def __init__(self, settings: AggregatorSettings) -> None:
        topics.check_name("job", settings.job)
        self._owner = own_directory(settings.directory)
        (settings.directory / OUTCOME_FILE).unlink(missing_ok=True)  # It goes on.
        self._settings = settings
        self._mailbox: Mailbox[Input] = Mailbox()
        self._log = get_logger(job=settings.job)
        self._metrics: dict[str, float] = {}
        self._stop_rule = None if settings.stop_when is None else StopRule.parse(settings.stop_when)
        self._times_held = 0
        """For how many evaluations in a row the rule has held."""
        beginning = settings.beginning(self._mailbox.put)
        self._layout, self._evaluation = beginning.layout, beginning.evaluation
        endpoint = settings.endpoint(f"{settings.job}-aggregator")
        self._connection = mqtt.Connection(
            endpoint,
            Downlink(settings.job, topics.CLOUD_CELL).subscriptions,
            self._mailbox.put,
            claim=Claim(
                endpoint=endpoint,
                topic=topics.status(settings.job, topics.CLOUD_CELL),
                seconds=CLAIM_STATUSES * STATUS_SECONDS,
                is_repeated=True,
            ),
        )
        self._driver = self._build_driver(beginning.initial)
        whole_lines(settings.directory / METRICS_FILE)
        self._status_at = 0.0

    def _build_driver(self, initial: Checkpoint) -> JobDriver:
        settings = self._settings
        sign, check = settings.signer(), settings.verifier()
        downlink = Downlink(settings.job, topics.CLOUD_CELL, sign=sign, check=check)
        downlink.connected(self._connection.packet_bytes_max)
        return JobDriver(
            downlink=downlink,
            layout=self._layout,
            initial=initial,
            policy=settings.sync_policy(),
            weights=settings.weight_policy(),
            lineage=new_lineage(),
            directory=settings.directory,
            keep_journal=settings.keep_journal,
            link=self._connection,
            on_version=lambda release, progress: self._evaluation.offer(
                release.checkpoint, progress
            ),
            wall_seconds=time.time,
            log=self._log,
        )

    @property
    def version(self) -> int:
        """The newest version."""
        return self._driver.machine.checkpoint.version

    def run(self) -> int:
        """Work until stopped; return the exit code."""
        self._mailbox.stop_on_signals()
        codec.accelerate()
        self._evaluation.start()
        self._connection.start()
        self._driver.start(time.monotonic())
        try:
            self._serve()
        finally:
            self._end()
        return 0

    def _serve(self) -> None:
        """Work until stopped. Where something cannot be made durable, take the job up again from
        the disk when that is well: nothing of it was acknowledged, so the nodes keep it, train on,
        and send it again.
        """
        has_failed = False
        while True:
            try:
                if has_failed:
                    self._driver.close()
                    self._driver = self._build_driver(self._driver.machine.checkpoint)
                    self._driver.start(time.monotonic())
                    has_failed = False
                while self._work():
                    pass
            except StoreError as error:
                has_failed = True
                self._log.error("store_failed", error=str(error))
                if self._await_store(str(error)):
                    return
            else:
                return

    def _await_store(self, error: str) -> bool:
        """Show what is wrong until the disk takes something again; return whether stopped."""
        try_at = time.monotonic() + STORE_RETRY_SECONDS
        while True:
            event = self._mailbox.take(min(try_at, self._status_at))
            now = time.monotonic()
            match event:
                case Stop():
                    return True
                case mqtt.Disconnected(reason, is_final=True):
                    raise TransportError(reason)
                case Evaluated():
                    self._note_metrics(event)
            if now >= self._status_at:
                self._publish_status(now, store_error=error)
            if now >= try_at:
                try_at = now + STORE_RETRY_SECONDS
                if _takes_writes(self._settings.directory):
                    return False

    def _work(self) -> bool:
        """Take one event and do what is due; return false when stopped."""
        event = self._mailbox.take(min(self._driver.wakes_at, self._status_at))
        now = time.monotonic()
        match event:
            case Stop():
                return False
            case Evaluated():
                self._note_metrics(event)
            case None:
                pass
            case _:
                self._driver.take(event, now, has_more=not self._mailbox.is_empty)
        if self._mailbox.is_empty or now >= self._driver.wakes_at:
            self._driver.tick(now)
        if now >= self._status_at:
            self._publish_status(now)
        return not self._is_complete()

    def _is_complete(self) -> bool:
        """Whether the job is to end by itself; then it is written down why."""
        settings, rule, reason = self._settings, self._stop_rule, ""
        if settings.max_versions is not None and self.version >= settings.max_versions:
            reason = f"version {settings.max_versions} is there"
        if rule is not None and self._times_held >= rule.times:
            reason = f"{settings.stop_when} is so: {self._metrics[rule.metric]:g}"
        if reason:
            self._log.info("job_completed", reason=reason)
            write_outcome(settings.directory, "completed", reason)
        return bool(reason)

    def _note_metrics(self, event: Evaluated) -> None:
        self._metrics = event.metrics
        if self._stop_rule is not None:
            self._times_held = self._times_held + 1 if self._stop_rule.holds(event.metrics) else 0
        row = {
            "version": event.version,
            "at": round(event.progress.at, 3),
            "elapsed_seconds": round(event.progress.elapsed_seconds, 3),
            "uplink_bytes": event.progress.uplink_bytes,
            "metrics": event.metrics,
        }
        try:
            append_line(self._settings.directory / METRICS_FILE, row)
        except StoreError as error:
            self._log.error("metrics_lost", version=event.version, error=str(error))

    def _publish_status(self, now: float, store_error: str = "") -> None:
        self._status_at = now + STATUS_SECONDS
        topic = topics.status(self._settings.job, topics.CLOUD_CELL)
        status = self._driver.status(now, self._metrics)
        if store_error:
            status = replace(status, waiting_code="store", waiting_for=store_error[:500])
        self._connection.publish((Outgoing(topic, pack(status)),))

    def _end(self) -> None:
        self._mailbox.close()
        self._evaluation.stop()
        checkpoint = self._driver.machine.checkpoint
        while (event := self._mailbox.take(0.0)) is not None:
            if isinstance(event, Evaluated):
                self._note_metrics(event)
        write_model(self._settings.final_model, self._layout, checkpoint, {})
        self._connection.stop()
        self._driver.close()
        self._log.info("aggregator_stopped", version=checkpoint.version)


def new_lineage() -> str:
    """Return a name for a new run of a job. Names of later runs are greater: that is how a node
    tells a rollback from an old run's versions that somebody sends again.
    """
    return f"{int(time.time()):08x}{secrets.token_hex(2)}"


def _takes_writes(directory: Path) -> bool:
    """Return whether there is room for a megabyte."""
    probe = directory / "probe.tmp"
    try:
        probe.write_bytes(bytes(STORE_PROBE_BYTES))
    except OSError:
        return False
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    return True
