"""What an aggregator has accepted and not yet passed on: its journal.

A record is durable before its sender hears so. The cloud repeats the records since its last durable
checkpoint after a restart; a gateway those that the cloud has not acknowledged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from hetertrain.transport.database import (
    open_database,
    read_database,
    read_note,
    store_errors,
    write_note,
)

_LADDER = (
    """
CREATE TABLE IF NOT EXISTS records (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    mark INTEGER NOT NULL,
    content BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS records_mark ON records (mark);
CREATE TABLE IF NOT EXISTS notes (name TEXT PRIMARY KEY, text TEXT NOT NULL);
""",
)
"""Files of the first releases have this schema and no number."""
_MARK_MAX = 1 << 62


class Inbox:
    """An append-only journal in marked sections; one thread owns it."""

    def __init__(self, path: Path, *, is_read_only: bool = False) -> None:
        """Open or create the file; or, to read only, look at one moment of another process's.

        Raises:
            StoreError: the file cannot be opened.
        """
        self._database, self.damage = (
            read_database(path, _LADDER) if is_read_only else open_database(path, _LADDER)
        )
        """Says what was wrong with the file, where records may be missing; else empty."""
        self._held: tuple[int, int] | None = None
        """Records and bytes: counted once somebody asks, and kept up to date from then on."""

    @property
    def num_records(self) -> int:
        """How many contents there are."""
        return self._count()[0]

    @property
    def num_bytes(self) -> int:
        """How many bytes of contents there are."""
        return self._count()[1]

    def bytes_of(self, mark: int) -> int:
        """Return how many bytes of contents one mark has."""
        return self._held_in(mark, mark)[1]

    def _count(self) -> tuple[int, int]:
        if self._held is None:
            self._held = self._held_in(-_MARK_MAX, _MARK_MAX)
        return self._held

    def marks(self) -> list[int]:
        """Return the marks that there are records of, the least first."""
        with store_errors("read the inbox"):
            query = "SELECT DISTINCT mark FROM records ORDER BY mark"
            return [int(mark) for (mark,) in self._database.execute(query)]

    def append(self, mark: int, contents: Sequence[bytes | bytearray]) -> None:
        """Make contents durable under ``mark``, with one commit for all.

        Raises:
            StoreError: the disk is full or broken; nothing was stored.
        """
        if not contents:
            return
        with store_errors(f"store {len(contents)} records in the inbox"), self._database:
            self._database.execute("BEGIN")
            self._database.executemany(
                "INSERT INTO records (mark, content) VALUES (?, ?)",
                ((mark, content) for content in contents),
            )
        if self._held is not None:
            records, num_bytes = self._held
            added = sum(len(content) for content in contents)
            self._held = records + len(contents), num_bytes + added

    def read(self, mark_min: int, mark_max: int) -> Iterable[bytes]:
        """Yield the contents of a range of marks, oldest first.

        Raises:
            StoreError: the disk is broken.
        """
        query = "SELECT content FROM records WHERE mark BETWEEN ? AND ? ORDER BY id"
        with store_errors("read the inbox"):
            for (content,) in self._database.execute(query, (mark_min, mark_max)):
                yield bytes(content)

    def remark(self, old: int, new: int) -> None:
        """Move all records of one mark to another.

        Raises:
            StoreError: the disk is full or broken; so for all that follow.
        """
        self._write("UPDATE records SET mark = ? WHERE mark = ?", (new, old))

    def forget(self, mark_min: int, mark_max: int) -> None:
        """Delete a range of marks."""
        gone = (0, 0) if self._held is None else self._held_in(mark_min, mark_max)
        self._write("DELETE FROM records WHERE mark BETWEEN ? AND ?", (mark_min, mark_max))
        if self._held is not None:
            self._held = self._held[0] - gone[0], self._held[1] - gone[1]

    def note(self, name: str, text: str) -> None:
        """Keep a small text under a name, replacing the one before."""
        with store_errors("write the inbox"):
            write_note(self._database, name, text)

    def noted(self, name: str) -> str | None:
        """Return the text kept under a name."""
        with store_errors("read the inbox"):
            return read_note(self._database, name)

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def _held_in(self, mark_min: int, mark_max: int) -> tuple[int, int]:
        query = "SELECT count(*), total(length(content)) FROM records WHERE mark BETWEEN ? AND ?"
        with store_errors("read the inbox"):
            records, num_bytes = self._database.execute(query, (mark_min, mark_max)).fetchone()
        return int(records), int(num_bytes)

    def _write(self, statement: str, values: tuple[int | str, ...]) -> None:
        with store_errors("write the inbox"):
            self._database.execute(statement, values)
