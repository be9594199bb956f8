"""A job's history as files of JSON lines beside its state: which update went into which version,
what each version measured, and how the job ended.

The aggregator alone writes; whoever reads takes the whole lines of the moment.
"""

from __future__ import annotations

import json
import os
import re
import threading
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isnan, nan
from pathlib import Path
from typing import Any

from hetertrain.errors import StoreError
from hetertrain.transport.database import store_errors

VERSIONS_FILE = "versions.jsonl"
METRICS_FILE = "metrics.jsonl"
OUTCOME_FILE = "outcome.json"
"""Why a job ended by itself."""
BLOCK_BYTES = 1 << 16
_HEAD = re.compile(rb'\{"version": (\d+), "at": (\d+\.?\d*), ')
"""How a row begins that says when it was made."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job had come when it made a version."""

    elapsed_seconds: float
    """Since the first node."""
    at: float
    """The time of day, in seconds since 1970."""
    uplink_bytes: int
    """Updates that had come by then, since the job began."""


def append_line(path: Path, row: dict[str, Any]) -> None:
    """Add a row to a history.

    Raises:
        StoreError: the disk is full or broken; what was there is untouched.
    """
    with store_errors(f"write {path}"), path.open("ab") as file:
        end = file.tell()
        try:
            file.write(json.dumps(row).encode() + b"\n")
            file.flush()
        except OSError:
            file.truncate(end)
            raise


def lines(path: Path) -> list[str]:
    """Return the whole lines of a history; another process may be writing the last one."""
    return _whole(path).decode(errors="replace").splitlines()


def whole_lines(path: Path) -> list[str]:
    """Return the lines of a history that is ours; a last one that a crash tore is cut off."""
    whole = _whole(path)
    if path.exists():
        os.truncate(path, len(whole))
    return whole.decode(errors="replace").splitlines()


def last_line(path: Path) -> str | None:
    """Return the last line of a history that is ours, without reading all of it; one that a crash
    tore is cut off before.
    """
    if not path.exists():
        return None
    with path.open("r+b") as file:
        start, data = file.seek(0, os.SEEK_END), b""
        while start > 0 and data.count(b"\n") < 2:
            block = min(start, BLOCK_BYTES)
            start -= block
            file.seek(start)
            data = file.read(block) + data
        whole = data[: data.rfind(b"\n") + 1]
        file.truncate(start + len(whole))
    found = whole.splitlines()
    return found[-1].decode(errors="replace") if found else None


def _whole(path: Path) -> bytes:
    data = path.read_bytes() if path.exists() else b""
    return data[: data.rfind(b"\n") + 1]


@dataclass(slots=True)
class _Index:
    """Where the row of each version begins in a file that only grows, and when it was made; by
    rising version, a few bytes each.
    """

    versions: array[int] = field(default_factory=lambda: array("q"))
    offsets: array[int] = field(default_factory=lambda: array("q"))
    times: array[float] = field(default_factory=lambda: array("d"))
    """Seconds since 1970; not a number: unknown."""
    end: int = 0

    def add(self, version: int, at: float, offset: int) -> None:
        """Note a row; after damage a version may come again, and its last row counts."""
        place = bisect_left(self.versions, version)
        if self._is_at(place, version):
            self.offsets[place], self.times[place] = offset, at
            return
        self.versions.insert(place, version)
        self.offsets.insert(place, offset)
        self.times.insert(place, at)

    def offset_of(self, version: int) -> int | None:
        """Return where a version's row begins; None where there is none."""
        place = bisect_left(self.versions, version)
        return self.offsets[place] if self._is_at(place, version) else None

    def _is_at(self, place: int, version: int) -> bool:
        return place < len(self.versions) and self.versions[place] == version


class JobHistory:
    """Reads one job's history by version, however long it is: what was read once is not again.

    Any thread may use it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._indices = {name: _Index() for name in (VERSIONS_FILE, METRICS_FILE)}

    def newest(self) -> int | None:
        """Return the newest version with a row; None where there is none yet."""
        with self._index(VERSIONS_FILE) as index:
            return index.versions[-1] if index.versions else None

    def page(self, before: int | None, limit: int) -> list[dict[str, Any]]:
        """Return rows of versions below ``before``, newest first, with their metrics, and the
        seconds since the version before where both times are known.
        """
        with self._index(VERSIONS_FILE) as index:
            stop = len(index.versions)
            if before is not None:
                stop = bisect_left(index.versions, before)
            places = range(stop - 1, max(stop - 1 - limit, -1), -1)
            offsets = [index.offsets[place] for place in places]
            seconds = {index.versions[p]: _seconds_before(index, p) for p in places}
        metrics = self._metrics_of(list(seconds))
        return [
            row | {"metrics": metrics.get(row["version"]), "seconds": seconds[row["version"]]}
            for row in self._rows(VERSIONS_FILE, offsets)
        ]

    def row(self, version: int) -> dict[str, Any] | None:
        """Return one version's row; None where there is none."""
        found = self.page(version + 1, 1)
        return found[0] if found and found[0]["version"] == version else None

    def times(self, limit: int) -> list[float]:
        """Return when the newest versions were made, in seconds since 1970, oldest first; those of
        which it is not known are left out.
        """
        with self._index(VERSIONS_FILE) as index:
            return [at for at in index.times[-limit:] if not isnan(at)]

    def metrics(self, limit: int) -> list[dict[str, Any]]:
        """Return the newest measurements, oldest first."""
        with self._index(METRICS_FILE) as index:
            offsets = list(index.offsets[-limit:])
        return self._rows(METRICS_FILE, offsets)

    def thinned_metrics(self, points: int) -> list[dict[str, Any]]:
        """Return at most so many (two or more) measurements out of all, evenly, with the first and
        the last.
        """
        with self._index(METRICS_FILE) as index:
            num, all_offsets = len(index.offsets), index.offsets
            if num <= points:
                offsets = list(all_offsets)
            else:
                places = (place * (num - 1) // (points - 1) for place in range(points))
                offsets = [all_offsets[place] for place in places]
        return self._rows(METRICS_FILE, offsets)

    def _metrics_of(self, versions: list[int]) -> dict[int, dict[str, float]]:
        with self._index(METRICS_FILE) as index:
            found = [index.offset_of(version) for version in versions]
        offsets = [offset for offset in found if offset is not None]
        return {row["version"]: row["metrics"] for row in self._rows(METRICS_FILE, offsets)}

    @contextmanager
    def _index(self, name: str) -> Iterator[_Index]:
        """Lend what is known of a file by now; nobody else changes it meanwhile."""
        with self._lock:
            index, path = self._indices[name], self._directory / name
            size = path.stat().st_size if path.exists() else 0
            if size < index.end:  # The folder was moved away and begun anew.
                index = self._indices[name] = _Index()
            if size > index.end:
                _grow(index, path)
            yield index

    def _rows(self, name: str, offsets: list[int]) -> list[dict[str, Any]]:
        if not offsets:
            return []
        rows = []
        with (self._directory / name).open("rb") as file:
            for offset in offsets:
                file.seek(offset)
                rows.append(json.loads(file.readline()))
        return rows


def _grow(index: _Index, path: Path) -> None:
    with path.open("rb") as file:
        file.seek(index.end)
        for line in file:
            if not line.endswith(b"\n"):
                return  # It is being written.
            index.add(*_version_and_time(line), index.end)
            index.end += len(line)


def _version_and_time(line: bytes) -> tuple[int, float]:
    """Read the head of a row; the rest may be long, and stays as it is."""
    head = _HEAD.match(line)
    if head is not None:
        return int(head[1]), float(head[2])
    row = json.loads(line)
    at = row.get("at")
    return int(row["version"]), nan if at is None else float(at)


def _seconds_before(index: _Index, place: int) -> float | None:
    """Return the time since the row before; a clock that was put back tells nothing."""
    if place == 0:
        return None
    seconds = index.times[place] - index.times[place - 1]
    return seconds if seconds >= 0 else None


def write_outcome(directory: Path, state: str, reason: str) -> None:
    """Say for good why a job ended by itself.

    Raises:
        StoreError: the disk is full or broken.
    """
    path = directory / OUTCOME_FILE
    with store_errors(f"write {path}"):
        temporary = path.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            json.dump({"state": state, "reason": reason}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)


def read_outcome(directory: Path) -> tuple[str, str] | None:
    """Return how a job ended by itself, and why; None where it did not."""
    path = directory / OUTCOME_FILE
    try:
        outcome = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot read {path}: {error}") from error
    return str(outcome["state"]), str(outcome["reason"])
