"""The cloud's aggregator of one job: connects its state machine to the broker, the journal and the
checkpoints.

One thread takes events from one mailbox. What is accepted is in the journal before its sender hears
so; each synchronisation, and every ``CHECKPOINT_CUTS`` cuts, the version is made durable and the
journal cut short. After a crash the newest whole checkpoint and the journal give the same open
version with the same sums.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from hetertrain.cell import Cell
from hetertrain.cell import Event as CellEvent
from hetertrain.core.aggregator import (
    Aggregator,
    CutRecord,
    Event,
    MemberSeen,
    PartialArrived,
    Ready,
    Record,
    Release,
    Tick,
    UpdateArrived,
)
from hetertrain.core.gate import Gate
from hetertrain.core.layout import ParameterLayout
from hetertrain.core.policy import SYNC_PRESETS, WEIGHT_PRESETS, SyncPolicy, WeightPolicy
from hetertrain.core.update import Checkpoint
from hetertrain.logging import get_logger
from hetertrain.service import BrokerSettings, Mailbox, Stop
from hetertrain.task import load_task, read_tensors
from hetertrain.transport import mqtt
from hetertrain.transport.inbox import Inbox
from hetertrain.wire import topics
from hetertrain.wire.contents import JobTerms, pack_partial, pack_update, unpack_arrival
from hetertrain.wire.downlink import Downlink
from hetertrain.wire.frames import AggregatorStatus, pack
from hetertrain.wire.uplink import Outgoing
from hetertrain_cloud.checkpoints import CheckpointStore, write_model
from hetertrain_cloud.evaluator import Evaluated, Evaluator

STATUS_SECONDS = 0.5
CHECKPOINT_CUTS = 10
VERSIONS_FILE = "versions.jsonl"
METRICS_FILE = "metrics.jsonl"
_CUT = b""
"""The journal's mark of a cut."""


class AggregatorSettings(BrokerSettings):
    """Settings of a job's aggregator."""

    section: ClassVar[str] = "aggregator"

    task: str = Field(description="the task to train, as module:Class")
    policy: Literal["sap", "fedavg", "fedbuff", "fedasync"] = Field(
        "sap", description="the synchronisation scheme"
    )
    sync_seconds: float | None = Field(None, gt=0, description="time between synchronisations")
    sync_deadline_seconds: float | None = Field(None, gt=0, description="how long a sync may take")
    cut_seconds: float | None = Field(
        None, gt=0, description="a cut at the latest so long after an update"
    )
    cut_fraction: float | None = Field(
        None, gt=0, le=1, description="the share of nodes that makes a cut"
    )
    pace_steps: int | None = Field(
        None, ge=1, description="local steps per update (stepwise schemes)"
    )
    server_rate: float | None = Field(
        None, gt=0, description="how far a cut moves along the weighted mean"
    )
    seed: int = Field(0, ge=0, description="seeds the initial model")

    @property
    def directory(self) -> Path:
        """The folder of this job's state."""
        return self.state_directory / self.job

    @property
    def final_model(self) -> Path:
        """Where the newest model stands after a stop."""
        return self.directory / "final.safetensors"

    def sync_policy(self) -> SyncPolicy:
        """Return the scheme's preset with what was set beside it."""
        names = (
            "sync_seconds",
            "sync_deadline_seconds",
            "cut_seconds",
            "cut_fraction",
            "pace_steps",
        )
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(SYNC_PRESETS[self.policy], **given)

    def weight_policy(self) -> WeightPolicy:
        """Return the scheme's weights with what was set beside it."""
        weights = WEIGHT_PRESETS[self.policy]
        if self.server_rate is None:
            return weights
        return replace(weights, server_rate=self.server_rate)


Input = mqtt.Event | Evaluated


class AggregatorService:
    """One job's aggregator at work."""

    def __init__(self, settings: AggregatorSettings) -> None:
        topics.check_name("job", settings.job)
        self._settings = settings
        self._mailbox: Mailbox[Input] = Mailbox()
        self._log = get_logger(job=settings.job)
        self._directory = settings.directory
        self._directory.mkdir(parents=True, exist_ok=True)
        self._metrics: dict[str, float] = {}
        self._updates_by_lag: Counter[int] = Counter()
        torch.set_num_threads(1)
        torch.manual_seed(settings.seed)
        task = load_task(settings.task)
        model = task.model()
        parameters = {name for name, _ in model.named_parameters()}
        tensors = read_tensors(model)
        self._layout = ParameterLayout.of(tensors, parameters, task.local)
        self._store = CheckpointStore(self._directory / "checkpoints", self._layout)
        self._inbox = Inbox(self._directory / "inbox.db")
        self._aggregator = self._recover(Checkpoint(0, *self._layout.flatten(tensors)))
        self._saved_version = self._aggregator.checkpoint.version
        downlink = Downlink(settings.job, topics.CLOUD_CELL)
        self._evaluator = Evaluator(task, model, self._layout, self._mailbox.put)
        connection = mqtt.Connection(
            settings.endpoint(f"{settings.job}-aggregator"),
            downlink.subscriptions,
            self._mailbox.put,
        )
        self._cell = Cell(downlink, connection, self._take_cell, self._log)
        self._began_at: float | None = None
        self._aggregator_wakes_at = 0.0
        self._status_at = 0.0

    def _recover(self, initial: Checkpoint) -> Aggregator:
        """Build the machine from the newest checkpoint and the journal."""
        stored = self._store.load()
        policy = self._settings.sync_policy()
        aggregator = Aggregator(
            Gate(self._layout.digest, self._layout.size, self._layout.integer_size, policy.max_lag),
            policy,
            self._settings.weight_policy(),
            initial if stored is None else stored.checkpoint,
        )
        if stored is None:
            self._store.save(aggregator.checkpoint, aggregator.snapshot())
        else:
            aggregator.restore(stored.snapshot)
        noted = self._noted_version()
        whole_lines(self._directory / METRICS_FILE)
        for content in self._inbox.read(aggregator.checkpoint.version, 1 << 62):
            release = aggregator.replay(_read_record(content, aggregator.checkpoint.version))
            if release is not None and release.checkpoint.version > noted:
                self._note_version(release, None)
        self._log.info("aggregator_recovered", version=aggregator.checkpoint.version)
        return aggregator

    def run(self) -> int:
        """Work until stopped; return the exit code."""
        self._mailbox.stop_on_signals()
        self._evaluator.start()
        self._cell.connection.start()
        checkpoint = self._aggregator.checkpoint
        self._cell.release(checkpoint, None, self._terms(), time.monotonic())
        try:
            self._serve()
        finally:
            self._end()
        return 0

    def _serve(self) -> None:
        while True:
            until = min(self._aggregator_wakes_at, self._cell.wakes_at, self._status_at)
            event = self._mailbox.take(until)
            now = time.monotonic()
            match event:
                case Stop():
                    return
                case Evaluated():
                    self._note_metrics(event)
                case None:
                    pass
                case _:
                    self._cell.take(event, now)
            if now >= self._aggregator_wakes_at:
                self._step(Tick(), now)
            if now >= self._cell.wakes_at:
                self._cell.tick(now)
            if now >= self._status_at:
                self._status_at = now + STATUS_SECONDS
                self._publish_status(now)

    def _take_cell(self, event: CellEvent, now: float) -> None:
        if self._began_at is None and isinstance(event, MemberSeen) and event.num_active:
            self._begin(now)
        self._step(event, now)

    def _begin(self, now: float) -> None:
        """Start the clock of the job's history with the first node."""
        self._began_at = now
        self._evaluator.offer(self._aggregator.checkpoint, 0.0)

    def _step(self, event: Event, now: float) -> None:
        mark = self._aggregator.checkpoint.version
        self._apply(self._aggregator.handle(event, now), mark, now)

    def _apply(self, ready: Ready, mark: int, now: float) -> None:
        self._inbox.append(mark, [_write_record(record) for record in ready.persist])
        self._aggregator_wakes_at = ready.wake_at if ready.wake_at is not None else now + 1.0
        self._cell.answer(ready.verdicts, now)
        if ready.notice is not None:
            self._log.info("sync_began", sync=ready.notice.sync)
            self._cell.notice(ready.notice, now)
        if ready.release is not None:
            self._release(ready.release, now)

    def _release(self, release: Release, now: float) -> None:
        checkpoint = release.checkpoint
        if release.contributions:
            self._note_version(release, self._elapsed_seconds(now))
            self._evaluator.offer(checkpoint, self._elapsed_seconds(now))
        self._cell.release(checkpoint, release.sync, self._terms(), now)
        is_due = (
            release.sync is not None or checkpoint.version >= self._saved_version + CHECKPOINT_CUTS
        )
        if is_due and checkpoint.version > self._saved_version:
            self._store.save(checkpoint, self._aggregator.snapshot())
            # One generation more is kept, for a newest file that proves to be torn.
            self._inbox.forget(0, self._saved_version - 1)
            self._saved_version = checkpoint.version

    def _terms(self) -> JobTerms:
        machine = self._aggregator
        return JobTerms(
            self._layout.digest, machine.policy, machine.weights, dict(machine.statistics)
        )

    def _elapsed_seconds(self, now: float) -> float:
        return 0.0 if self._began_at is None else now - self._began_at

    def _noted_version(self) -> int:
        """Return the newest version in the history; a crash may have come before its line."""
        lines = whole_lines(self._directory / VERSIONS_FILE)
        return int(json.loads(lines[-1])["version"]) if lines else 0

    def _note_version(self, release: Release, elapsed_seconds: float | None) -> None:
        """Append the version's history: when (None: unknown after a crash), and from whom."""
        version = release.checkpoint.version
        lags = [version - 1 - item.base_version for item in release.contributions]
        self._updates_by_lag.update(lags)
        self._log.info("version_cut", version=version, updates=len(lags), sync=release.sync)
        self._append(
            VERSIONS_FILE,
            {
                "version": version,
                "elapsed_seconds": elapsed_seconds,
                "sync": release.sync,
                "digest": release.checkpoint.digest(),
                "contributions": [
                    [item.node, item.seq, item.base_version, item.examples, item.steps]
                    for item in release.contributions
                ],
            },
        )

    def _note_metrics(self, event: Evaluated) -> None:
        self._metrics = event.metrics
        self._append(
            METRICS_FILE,
            {
                "version": event.version,
                "elapsed_seconds": round(event.elapsed_seconds, 3),
                "metrics": event.metrics,
            },
        )

    def _append(self, name: str, row: dict[str, Any]) -> None:
        with (self._directory / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _publish_status(self, now: float) -> None:
        machine = self._aggregator
        waiting = machine.waiting_for()
        status = AggregatorStatus(
            job=self._settings.job,
            cell=topics.CLOUD_CELL,
            version=machine.checkpoint.version,
            elapsed_seconds=self._elapsed_seconds(now),
            sync=machine.last_sync,
            sync_in_seconds=machine.seconds_to_sync(now),
            is_syncing=machine.members.sync is not None,
            active=machine.members.num_active,
            open_updates=len(machine.open.contributions),
            metrics=self._metrics,
            updates_by_lag=dict(self._updates_by_lag),
            refused=dict(self._cell.refused),
            waiting_code=waiting.code,
            waiting_for=waiting.text[:500],
        )
        topic = topics.status(self._settings.job, topics.CLOUD_CELL)
        self._cell.connection.publish((Outgoing(topic, pack(status)),))

    def _end(self) -> None:
        self._evaluator.stop()
        checkpoint = self._aggregator.checkpoint
        while (event := self._mailbox.take(0.0)) is not None:
            if isinstance(event, Evaluated):
                self._note_metrics(event)
        write_model(self._settings.final_model, self._layout, checkpoint, {})
        self._cell.connection.stop()
        self._inbox.close()
        self._log.info("aggregator_stopped", version=checkpoint.version)


def whole_lines(path: Path) -> list[str]:
    """Return the lines of a history; a last one that a crash tore is cut off."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    return whole.splitlines()


def _write_record(record: Record) -> bytes:
    match record:
        case CutRecord():
            return _CUT
        case UpdateArrived(update):
            return pack_update(update)
        case PartialArrived(node, seq, sync, partial):
            return pack_partial(node, seq, sync, partial)


def _read_record(content: bytes, version: int) -> Record:
    return CutRecord(version + 1) if content == _CUT else unpack_arrival(content)
