"""A job's history as files of JSON lines beside its state: which update went into which version,
what each version measured, and how the job ended.

The aggregator alone writes; whoever reads takes the whole lines of the moment.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetertrain.errors import StoreError
from hetertrain.transport.database import store_errors

VERSIONS_FILE = "versions.jsonl"
METRICS_FILE = "metrics.jsonl"
OUTCOME_FILE = "outcome.json"
"""Why a job ended by itself."""


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


def _whole(path: Path) -> bytes:
    data = path.read_bytes() if path.exists() else b""
    return data[: data.rfind(b"\n") + 1]


@dataclass(slots=True)
class _Index:
    """Where the row of each version begins in a file that only grows."""

    offsets: dict[int, int]
    end: int = 0


class JobHistory:
    """Reads one job's history by version, however long it is: what was read once is not again.

    Any thread may use it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._indices = {name: _Index({}) for name in (VERSIONS_FILE, METRICS_FILE)}

    def newest(self) -> int | None:
        """Return the newest version with a row; None where there is none yet."""
        return max(self._index(VERSIONS_FILE).offsets, default=None)

    def page(self, before: int | None, limit: int) -> list[dict[str, Any]]:
        """Return rows of versions below ``before``, newest first, with their metrics."""
        known = self._index(VERSIONS_FILE).offsets
        wanted = sorted((v for v in known if before is None or v < before), reverse=True)[:limit]
        metrics = self._rows(METRICS_FILE, wanted)
        return [
            row | {"metrics": metrics.get(version, {}).get("metrics")}
            for version, row in self._rows(VERSIONS_FILE, wanted).items()
        ]

    def row(self, version: int) -> dict[str, Any] | None:
        """Return one version's row; None where there is none."""
        found = self.page(version + 1, 1)
        return found[0] if found and found[0]["version"] == version else None

    def metrics(self, limit: int) -> list[dict[str, Any]]:
        """Return the newest measurements, oldest first."""
        known = sorted(self._index(METRICS_FILE).offsets)[-limit:]
        return list(self._rows(METRICS_FILE, known).values())

    def _index(self, name: str) -> _Index:
        with self._lock:
            return self._grown(self._indices[name], self._directory / name)

    @staticmethod
    def _grown(index: _Index, path: Path) -> _Index:
        size = path.stat().st_size if path.exists() else 0
        if size < index.end:  # The folder was moved away and begun anew.
            index.offsets, index.end = {}, 0
        if size > index.end:
            with path.open("rb") as file:
                file.seek(index.end)
                data = file.read()
            for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
                index.offsets[int(json.loads(line)["version"])] = index.end
                index.end += len(line)
        return index

    def _rows(self, name: str, versions: list[int]) -> dict[int, dict[str, Any]]:
        offsets, path = self._index(name).offsets, self._directory / name
        rows: dict[int, dict[str, Any]] = {}
        if not offsets:
            return rows
        with path.open("rb") as file:
            for version in versions:
                if version in offsets:
                    file.seek(offsets[version])
                    rows[version] = json.loads(file.readline())
        return rows


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
