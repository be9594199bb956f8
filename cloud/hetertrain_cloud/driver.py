"""One job's aggregator as a whole, driven by events and time: machine, cell, journal, checkpoints
and history, without thread, clock or socket.

The service drives it with a real connection, the simulator with a virtual clock. What is accepted
is in the journal before its sender hears so; each synchronisation, and every ``CHECKPOINT_CUTS``
cuts, the version is made durable and the journal cut short. After a crash the newest whole
checkpoint and the journal give the same open version with the same sums.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hetertrain.cell import Cell, Link, Refusal
from hetertrain.cell import Event as CellEvent
from hetertrain.core.aggregator import Aggregator, Event, Ready, Release
from hetertrain.core.events import Tick
from hetertrain.core.gate import Gate, Verdict
from hetertrain.core.layout import ParameterLayout
from hetertrain.core.members import MemberSeen
from hetertrain.core.policy import SyncPolicy, WeightPolicy
from hetertrain.core.update import Checkpoint
from hetertrain.errors import FrameError, StoreError
from hetertrain.logging import Logger
from hetertrain.transport import mqtt
from hetertrain.transport.inbox import Inbox
from hetertrain.wire import topics
from hetertrain.wire.contents import JobTerms
from hetertrain.wire.downlink import Downlink
from hetertrain.wire.messages import AggregatorStatus
from hetertrain_cloud.checkpoints import ROLLBACK_FILE, CheckpointStore, read_model
from hetertrain_cloud.history import VERSIONS_FILE, Progress, append_line, last_line
from hetertrain_cloud.journal import repeat, restored, write_record
from hetertrain_cloud.refusals import RefusalLog

CHECKPOINT_CUTS = 10
COMMIT_BYTES_MAX = 4 << 20
"""Accepted updates share a commit of the journal up to so many bytes."""


class JobDriver:
    """One job's aggregator at work, between its stores and its link."""

    def __init__(
        self,
        *,
        downlink: Downlink,
        layout: ParameterLayout,
        initial: Checkpoint,
        policy: SyncPolicy,
        weights: WeightPolicy,
        lineage: str,
        directory: Path,
        keep_journal: bool = False,
        link: Link,
        on_version: Callable[[Release, Progress], None],
        wall_seconds: Callable[[], float],
        log: Logger,
    ) -> None:
        """Take up the job where its state in ``directory`` stands, else with ``initial`` as version
        0 of a new ``lineage``, a name that no run of this job ever had.

        ``on_version`` hears of the first version and each new one, and how far the job had come by
        then. ``wall_seconds`` is the time of day, in seconds since 1970; it is written down, and
        nothing depends on it. ``keep_journal`` keeps every update, so that a replay can repeat the
        whole job.

        Raises:
            StoreError: the directory is not usable.
        """
        self._layout = layout
        self._directory = directory
        before = self._last_row()
        self._keep_journal = keep_journal
        self._on_version = on_version
        self._wall_seconds = wall_seconds
        self._log = log
        self.updates_by_lag: Counter[int] = Counter()
        self._began_at: float | None = None
        self._earlier_seconds = float(before.get("elapsed_seconds") or 0.0)
        """How long the job ran in earlier lives."""
        self._machine_wakes_at = 0.0
        self._records: list[bytes | bytearray] = []
        """Accepted since the last commit; nothing was said of them yet."""
        self._record_bytes = 0
        self._verdicts: list[Verdict] = []
        self._mark = 0
        """The version that they were accepted into: a cut always commits."""
        directory.mkdir(parents=True, exist_ok=True)
        self._store = CheckpointStore(directory / "checkpoints", layout, keep_first=keep_journal)
        self._inbox = Inbox(directory / "inbox.db")
        self._refusals = RefusalLog(directory, log)
        self.cell = Cell(downlink, link, self._take_cell, log, self._note_refusal)
        downlink.traffic.resume(before.get("traffic", {}))
        self.machine = self._recover(initial, policy, weights, lineage)
        self._saved_version = self.machine.checkpoint.version

    def _recover(
        self, initial: Checkpoint, policy: SyncPolicy, weights: WeightPolicy, lineage: str
    ) -> Aggregator:
        """Build the machine from the newest checkpoint and the journal; then go by our terms."""
        stored, layout = self._store.load(), self._layout
        if stored is None:
            gate = Gate(layout.digest, layout.size, layout.integer_size, policy.max_lag, lineage)
            machine = Aggregator(gate, policy, weights, initial, layout.buffers())
            self._store.save(initial, machine.snapshot(), machine.arrays())
        else:
            machine = restored(stored, layout)
        noted = self._noted_version()
        damaged: list[FrameError] = []
        journal = self._inbox.read(machine.checkpoint.version, 1 << 62)
        for release in repeat(machine, journal, damaged.append):
            if release.checkpoint.version > noted:
                self._note_version(release, machine.gate.lineage, None)
        # A write-ahead log that lost its end looks whole; the history knows what there was.
        is_whole = not self._inbox.damage and not damaged and noted <= machine.checkpoint.version
        if not is_whole:
            # Versions of these numbers may have been others: nodes must not take one for the other.
            reasons = [str(error) for error in damaged[:3]]
            self._log.error(
                "journal_damaged",
                damage=self._inbox.damage,
                records=len(damaged),
                reasons=reasons,
                version=machine.checkpoint.version,
                version_before=noted,
            )
        if (self._directory / ROLLBACK_FILE).exists():
            return self._roll_back(machine, policy, weights, lineage)
        terms = machine.adopt(policy, weights, machine.gate.lineage if is_whole else lineage)
        if terms is not None:
            self._inbox.append(machine.checkpoint.version, [write_record(terms)])
        self._log.info("aggregator_recovered", version=machine.checkpoint.version)
        return machine

    def _roll_back(
        self, machine: Aggregator, policy: SyncPolicy, weights: WeightPolicy, lineage: str
    ) -> Aggregator:
        """Go on from an older model, as the next version of another lineage: what nodes made of the
        versions between has no place in it, and is refused.
        """
        layout, path = self._layout, self._directory / ROLLBACK_FILE
        older = read_model(path, layout)
        version = max(machine.checkpoint.version, self._noted_version()) + 1
        checkpoint = Checkpoint(version, older.vector, older.integers)
        gate = Gate(layout.digest, layout.size, layout.integer_size, policy.max_lag, lineage)
        machine = Aggregator(gate, policy, weights, checkpoint, layout.buffers())
        self._store.save(checkpoint, machine.snapshot(), machine.arrays())
        release, progress = Release(checkpoint, None, ()), self._progress(0.0)
        self._note_version(release, lineage, progress, older.version)
        path.unlink()
        self._log.warning("rolled_back", version=version, rolled_back_to=older.version)
        return machine

    @property
    def wakes_at(self) -> float:
        """When to call ``tick``, if nothing happens before."""
        return min(self._machine_wakes_at, self.cell.wakes_at, self._refusals.wakes_at)

    def start(self, now: float) -> None:
        """Announce the version at hand."""
        self.cell.release(self.machine.checkpoint, None, self._terms(), now)

    def take(self, event: mqtt.Event, now: float, *, has_more: bool = False) -> None:
        """Take what happened on the link. Where the caller has more, and calls ``tick`` after it,
        one commit of the journal may serve several updates; their verdicts follow it.

        Raises:
            TransportError: the connection ended for good.
            StoreError: the journal cannot be written; nothing was acknowledged.
        """
        self.cell.take(event, now)
        if not has_more or self._record_bytes >= COMMIT_BYTES_MAX:
            self._commit(now)

    def tick(self, now: float) -> None:
        """Do what is due."""
        self._commit(now)
        if now >= self._machine_wakes_at:
            self._step(Tick(), now)
        if now >= self.cell.wakes_at:
            self.cell.tick(now)
        if now >= self._refusals.wakes_at:
            self._refusals.flush(now)

    def close(self) -> None:
        """Close the journal."""
        self._refusals.close()
        self._inbox.close()

    def _note_refusal(self, refusal: Refusal) -> None:
        self._refusals.note(refusal, self._wall_seconds())

    def _take_cell(self, event: CellEvent, now: float) -> None:
        if self._began_at is None and isinstance(event, MemberSeen) and event.num_active:
            self._begin(now)
        self._step(event, now)

    def _begin(self, now: float) -> None:
        """Start the clock of the job's history with the first node."""
        self._began_at = now
        self._on_version(Release(self.machine.checkpoint, None, ()), self._progress(now))

    def _step(self, event: Event, now: float) -> None:
        self._mark = self.machine.checkpoint.version
        self._apply(self.machine.handle(event, now), now)

    def _apply(self, ready: Ready, now: float) -> None:
        self._machine_wakes_at = ready.wake_at if ready.wake_at is not None else now + 1.0
        written = [write_record(record) for record in ready.persist]
        self._records.extend(written)
        self._record_bytes += sum(len(each) for each in written)
        self._verdicts.extend(ready.verdicts)
        if ready.notice is None and ready.release is None and not ready.pulls:
            return
        self._commit(now)
        if ready.notice is not None:
            self._log.info("sync_began", sync=ready.notice.sync)
            self.cell.notice(ready.notice, now)
        if ready.release is not None:
            self._release(ready.release, now)
        self.cell.pull(ready.pulls, now)

    def _commit(self, now: float) -> None:
        """Make durable what was accepted, then say so."""
        records, self._records, self._record_bytes = self._records, [], 0
        verdicts, self._verdicts = self._verdicts, []
        self._inbox.append(self._mark, records)
        self.cell.answer(verdicts, now)

    def _release(self, release: Release, now: float) -> None:
        checkpoint = release.checkpoint
        if release.contributions:
            progress = self._progress(now)
            self._note_version(release, self.machine.gate.lineage, progress)
            self._on_version(release, progress)
        self.cell.release(checkpoint, release.sync, self._terms(), now)
        is_due = (
            release.sync is not None or checkpoint.version >= self._saved_version + CHECKPOINT_CUTS
        )
        if is_due and checkpoint.version > self._saved_version:
            self._save(checkpoint)

    def _save(self, checkpoint: Checkpoint) -> None:
        try:
            self._store.save(checkpoint, self.machine.snapshot(), self.machine.arrays())
        except StoreError as error:
            # The journal goes on from the checkpoint before; this is tried again at the next cut.
            self._log.error("checkpoint_failed", version=checkpoint.version, error=str(error))
            return
        if not self._keep_journal:
            self._inbox.forget(0, self._store.oldest_version() - 1)
        self._saved_version = checkpoint.version

    def _terms(self) -> JobTerms:
        machine = self.machine
        return JobTerms(
            self._layout.digest,
            machine.policy,
            machine.weights,
            dict(machine.statistics),
            machine.gate.lineage,
            machine.members.slowest,
        )

    def _elapsed_seconds(self, now: float) -> float:
        ours = 0.0 if self._began_at is None else now - self._began_at
        return self._earlier_seconds + ours

    def _progress(self, now: float) -> Progress:
        traffic = self.cell.downlink.traffic
        return Progress(self._elapsed_seconds(now), self._wall_seconds(), traffic.uplink_bytes)

    def _noted_version(self) -> int:
        """Return the newest version in the history; a crash may have come before its line."""
        return int(self._last_row().get("version", 0))

    def _last_row(self) -> dict[str, Any]:
        return dict(json.loads(last_line(self._directory / VERSIONS_FILE) or "{}"))

    def _note_version(
        self,
        release: Release,
        lineage: str,
        progress: Progress | None,
        rolled_back_to: int | None = None,
    ) -> None:
        """Append the version's history: when (None: unknown after a crash), and from whom."""
        version = release.checkpoint.version
        lags = [version - 1 - item.base_version for item in release.contributions]
        self.updates_by_lag.update(lags)
        self._log.info("version_cut", version=version, updates=len(lags), sync=release.sync)
        weights = [round(weight, 3) for weight in release.weights]
        # What a crash interrupted came after what was noted before it.
        elapsed_seconds = self._earlier_seconds if progress is None else progress.elapsed_seconds
        row = {
            "version": version,
            "at": None if progress is None else round(progress.at, 3),
            "elapsed_seconds": round(elapsed_seconds, 3),
            "sync": release.sync,
            "lineage": lineage,
            "digest": release.checkpoint.digest(),
            "rolled_back_to": rolled_back_to,
            "traffic": asdict(self.cell.downlink.traffic),
            "contributions": [
                [item.node, item.seq, item.base_version, item.examples, item.steps, weight]
                for item, weight in zip(release.contributions, weights, strict=True)
            ],
        }
        append_line(self._directory / VERSIONS_FILE, row)

    def status(self, now: float, metrics: dict[str, float]) -> AggregatorStatus:
        """Say what the aggregator does right now."""
        machine = self.machine
        waiting = machine.waiting_for()
        return AggregatorStatus(
            job=self.cell.downlink.job,
            cell=topics.CLOUD_CELL,
            version=machine.checkpoint.version,
            elapsed_seconds=self._elapsed_seconds(now),
            sync=machine.last_sync,
            sync_in_seconds=machine.seconds_to_sync(now),
            is_syncing=machine.members.sync is not None,
            active=machine.members.num_active,
            open_updates=len(machine.open.contributions),
            metrics=metrics,
            updates_by_lag=dict(self.updates_by_lag),
            refused=dict(self.cell.refused),
            waiting_code=waiting.code,
            waiting_for=waiting.text[:500],
            num_parameters=self._layout.size,
            cut_in_seconds=machine.seconds_to_cut(now),
            nodes_for_cut=machine.nodes_for_cut,
            nodes_in_cut=len(machine.open.nodes()),
            **asdict(self.cell.downlink.traffic),
        )
