"""The quarantine's book: what an aggregator refused, of whom and why, in a file of bounded size.

A refusal is written within ``FLUSH_SECONDS``. What the same node is refused for the same reason
after that shares a row every ``GATHER_SECONDS``, with its count, so that a flood costs little. Two
files of JSON lines beside the job's history take turns; what is older than both is gone. The
aggregator alone writes.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from hetertrain.cell import Refusal
from hetertrain.errors import StoreError
from hetertrain.logging import Logger
from hetertrain_cloud.history import append_lines, last_line, lines

REFUSALS_FILE = "refusals.jsonl"
OLDER_FILE = "refusals.older.jsonl"
FILE_BYTES_MAX = 1 << 20
FLUSH_SECONDS = 1.0
GATHER_SECONDS = 60.0
GROUPS_MAX = 256
"""So many nodes and reasons are told apart between two writes; the rest share a row a reason."""
WRITTEN_MAX = 4096
"""Of so many it is known when they were written last."""
DETAIL_CHARACTERS_MAX = 300
Key = tuple[str, str]
"""Node and reason."""


@dataclass(slots=True)
class _Group:
    """Refusals that share a row."""

    refusal: Refusal
    """The newest."""
    count: int
    first_at: float
    at: float


class RefusalLog:
    """Writes one job's refusals; the aggregator's thread owns it."""

    def __init__(self, directory: Path, log: Logger) -> None:
        self._path, self._older = directory / REFUSALS_FILE, directory / OLDER_FILE
        self._log = log
        self._pending: dict[Key, _Group] = {}
        self._written: OrderedDict[Key, float] = OrderedDict()
        """When each was written last, the longest ago first."""
        self._flushed_at = -FLUSH_SECONDS  # Clocks begin at 0 or later.
        self.wakes_at = float("inf")
        """When to call ``flush``."""
        self._number = self._take_up(directory)

    def _take_up(self, directory: Path) -> int:
        """Return the newest number; a book that cannot be read keeps no job from its work."""
        try:
            last_line(self._path)  # A torn end is cut off.
            return next((int(row["number"]) for row in newest_first(directory)), 0)
        except OSError as error:
            self._log.error("refusals_unreadable", error=str(error))
            return 0

    def note(self, refusal: Refusal, at: float) -> None:
        """Take a refusal of the time of day ``at``, in seconds since 1970."""
        key = (refusal.node, refusal.reason)
        if key not in self._pending and len(self._pending) >= GROUPS_MAX:
            refusal = replace(refusal, node="", seq=None, base_version=None)
            key = ("", refusal.reason)
        group = self._pending.get(key)
        if group is None:
            self._pending[key] = _Group(refusal, 1, at, at)
            self.wakes_at = min(self.wakes_at, self._due_at(key))
        else:
            group.refusal, group.count, group.at = refusal, group.count + 1, at

    def flush(self, now: float) -> None:
        """Write what is due; where the disk takes nothing, it is let go, and logged."""
        due = [key for key in self._pending if now >= self._due_at(key)]
        self._flushed_at = now
        self._write(due, now)
        self.wakes_at = min(map(self._due_at, self._pending), default=float("inf"))

    def close(self) -> None:
        """Write what is left."""
        self._write(list(self._pending), self._flushed_at)

    def _due_at(self, key: Key) -> float:
        gathered_at = self._written.get(key, float("-inf")) + GATHER_SECONDS
        return max(gathered_at, self._flushed_at + FLUSH_SECONDS)

    def _write(self, keys: list[Key], now: float) -> None:
        if not keys:
            return
        data = b"".join(self._line(self._pending.pop(key)) for key in keys)
        for key in keys:
            self._written[key] = now
            self._written.move_to_end(key)
        while len(self._written) > WRITTEN_MAX:
            self._written.popitem(last=False)
        try:
            if self._path.exists() and self._path.stat().st_size + len(data) > FILE_BYTES_MAX:
                self._path.replace(self._older)
            append_lines(self._path, data)
        except (OSError, StoreError) as error:
            self._log.error("refusals_lost", num=len(keys), error=str(error))

    def _line(self, group: _Group) -> bytes:
        self._number += 1
        plain = asdict(group.refusal)
        plain["detail"] = group.refusal.detail[:DETAIL_CHARACTERS_MAX]
        if group.refusal.measured is not None and not isfinite(group.refusal.measured):
            plain["measured"] = None
        times = {"at": round(group.at, 3), "first_at": round(group.first_at, 3)}
        row = {"number": self._number} | times | {"count": group.count} | plain
        return json.dumps(row).encode() + b"\n"


def newest_first(directory: Path) -> Iterator[dict[str, Any]]:
    """Read a job's refusals, the newest first; the aggregator may be writing meanwhile."""
    before = float("inf")
    for name in (REFUSALS_FILE, OLDER_FILE):
        for line in reversed(lines(directory / name)):
            try:
                row = json.loads(line)
            except ValueError:
                continue  # A power cut may leave anything where it was written last.
            # The files may have taken turns between two reads.
            if row["number"] < before:
                before = row["number"]
                yield row
