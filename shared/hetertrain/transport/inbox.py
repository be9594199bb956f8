"""What an aggregator has accepted and not yet passed on: its journal.

A record is durable before its sender hears so. The cloud repeats the records since its last durable
checkpoint after a restart; a gateway those that the cloud has not acknowledged.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path

from hetertrain.errors import StoreError
from hetertrain.transport.database import open_database

_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    mark INTEGER NOT NULL,
    content BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS records_mark ON records (mark);
CREATE TABLE IF NOT EXISTS notes (name TEXT PRIMARY KEY, text TEXT NOT NULL);
"""


class Inbox:
    """An append-only journal in marked sections; one thread owns it."""

    def __init__(self, path: Path) -> None:
        self._database = open_database(path, _SCHEMA)

    def append(self, mark: int, contents: Sequence[bytes | bytearray]) -> None:
        """Make contents durable under ``mark``, with one commit for all.

        Raises:
            StoreError: the disk is full or broken; nothing was stored.
        """
        if not contents:
            return
        try:
            with self._database:
                self._database.execute("BEGIN")
                self._database.executemany(
                    "INSERT INTO records (mark, content) VALUES (?, ?)",
                    ((mark, content) for content in contents),
                )
        except sqlite3.Error as error:
            raise StoreError(f"the inbox cannot store {len(contents)} records: {error}") from error

    def read(self, mark_min: int, mark_max: int) -> Iterable[bytes]:
        """Yield the contents of a range of marks, oldest first."""
        query = "SELECT content FROM records WHERE mark BETWEEN ? AND ? ORDER BY id"
        for (content,) in self._database.execute(query, (mark_min, mark_max)):
            yield bytes(content)

    def remark(self, old: int, new: int) -> None:
        """Move all records of one mark to another."""
        self._database.execute("UPDATE records SET mark = ? WHERE mark = ?", (new, old))

    def remark_all_but(self, kept: int, new: int) -> None:
        """Move all records to one mark, except those of ``kept``."""
        self._database.execute("UPDATE records SET mark = ? WHERE mark <> ?", (new, kept))

    def forget(self, mark_min: int, mark_max: int) -> None:
        """Delete a range of marks."""
        query = "DELETE FROM records WHERE mark BETWEEN ? AND ?"
        self._database.execute(query, (mark_min, mark_max))

    def note(self, name: str, text: str) -> None:
        """Keep a small text under a name, replacing the one before."""
        self._database.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (name, text))

    def noted(self, name: str) -> str | None:
        """Return the text kept under a name."""
        row = self._database.execute("SELECT text FROM notes WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def close(self) -> None:
        """Close the file."""
        self._database.close()
