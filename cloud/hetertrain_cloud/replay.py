"""Is each version what its updates make of the one before? Repeats a job's journal from the oldest
checkpoint that is kept, and compares every version with the history.

With ``keep_journal`` that is the whole job; else the last few synchronisations. It reads only, and
one moment's journal, so it may run beside the aggregator.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from hetertrain.core.layout import ParameterLayout
from hetertrain.errors import FrameError, StoreError
from hetertrain.transport.inbox import Inbox
from hetertrain_cloud.checkpoints import CheckpointStore
from hetertrain_cloud.history import VERSIONS_FILE, lines
from hetertrain_cloud.journal import repeat, restored


@dataclass(frozen=True, slots=True)
class Replay:
    """What repeating a journal showed."""

    first_version: int
    """Where it began."""
    last_version: int
    updates: int
    """How many updates went into the versions between."""
    different: tuple[int, ...]
    """Versions whose model is not what the journal gives."""
    repeated: tuple[tuple[str, int], ...]
    """Updates, by node and number, that went into more than one version of the whole history."""
    damaged: int
    """Records of the journal that cannot be read."""

    @property
    def is_clean(self) -> bool:
        """Whether each version is what its updates make of it, each counted once."""
        return not self.different and not self.repeated and not self.damaged


def replay(directory: Path, layout: ParameterLayout) -> Replay:
    """Repeat the journal of the job whose state is in ``directory``.

    Raises:
        StoreError: there is no journal, or no checkpoint to begin from.
    """
    # The journal first: what a checkpoint that is gone by then led on from is still in it.
    inbox = Inbox(directory / "inbox.db", is_read_only=True)
    try:
        stored = CheckpointStore(directory / "checkpoints", layout).load(is_oldest=True)
        if stored is None:
            raise StoreError(f"{directory} has no checkpoint of this task: nothing to begin from")
        history = {row["version"]: row for row in map(json.loads, lines(directory / VERSIONS_FILE))}
        machine = restored(stored, layout)
        first = last = stored.checkpoint.version
        updates, different = 0, []
        damaged: list[FrameError] = []
        for release in repeat(machine, inbox.read(first, 1 << 62), damaged.append):
            last = release.checkpoint.version
            updates += len(release.contributions)
            row = history.get(last)
            if row is not None and row["digest"] != release.checkpoint.digest():
                different.append(last)
    finally:
        inbox.close()
    counts = Counter(
        (item[0], item[1]) for row in history.values() for item in row["contributions"]
    )
    repeated = tuple(sorted(key for key, count in counts.items() if count > 1))
    return Replay(first, last, updates, tuple(different), repeated, len(damaged))
