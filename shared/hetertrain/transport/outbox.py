"""What a node must still deliver: one content at a time, durable before its first publish, gone
after its verdict.

A node encodes no new update while one is under way; its progress gathers in ``local - reference``
meanwhile. So the outbox holds one content however long the node is offline: newer work coalesces
before it is ever encoded.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
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
CREATE TABLE IF NOT EXISTS pending (seq INTEGER PRIMARY KEY, content BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS counter (
    id INTEGER PRIMARY KEY CHECK (id = 0),
    next_seq INTEGER NOT NULL
);
""",
    "CREATE TABLE notes (name TEXT PRIMARY KEY, text TEXT NOT NULL);",
)
"""Files of the first releases have the first schema and no number."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A content that has no verdict yet."""

    seq: int
    content: bytes


class Outbox:
    """The outbox of one node; one thread owns it."""

    def __init__(self, path: Path, first_seq: int) -> None:
        """Open the file at ``path``; a new one counts from ``first_seq``.

        A node that lost its disk must not use a number twice: the driver gives the wall clock in
        milliseconds.

        Raises:
            StoreError: the file cannot be opened, or is a later release's.
        """
        self._database, self.damage = open_database(path, _LADDER)
        """Says what was wrong with the file, where an update may be missing; else empty."""
        with store_errors("write the outbox"):
            self._database.execute("INSERT OR IGNORE INTO counter VALUES (0, ?)", (first_seq,))
        waiting = self.pending()
        self.num_bytes = 0 if waiting is None else len(waiting.content)
        """How many bytes wait for a verdict; 0: nothing does."""

    @property
    def next_seq(self) -> int:
        """The number that the next content gets."""
        with store_errors("read the outbox"):
            return int(self._database.execute("SELECT next_seq FROM counter").fetchone()[0])

    def pending(self) -> Pending | None:
        """Return the content under way, if any."""
        with store_errors("read the outbox"):
            return _pending(self._database)

    def put(self, seq: int, content: bytes) -> None:
        """Make a content durable, and its number used; one before it has its verdict.

        Raises:
            StoreError: the disk is full or broken; nothing was stored.
        """
        with store_errors(f"store update {seq} in the outbox"), self._database:
            self._database.execute("BEGIN")
            self._database.execute("DELETE FROM pending")
            self._database.execute("INSERT INTO pending VALUES (?, ?)", (seq, content))
            self._database.execute("UPDATE counter SET next_seq = ?", (seq + 1,))
        self.num_bytes = len(content)

    def settle(self, seq: int) -> None:
        """Forget a content that has its verdict.

        Raises:
            StoreError: the disk is full or broken. After a restart it would be sent once more, and
                be a duplicate.
        """
        with store_errors(f"settle update {seq} in the outbox"):
            self._database.execute("DELETE FROM pending WHERE seq = ?", (seq,))
        self.num_bytes = 0

    def note(self, name: str, text: str) -> None:
        """Keep a small text under a name, replacing the one before.

        Raises:
            StoreError: the disk is full or broken.
        """
        with store_errors("write the outbox"):
            write_note(self._database, name, text)

    def noted(self, name: str) -> str | None:
        """Return the text kept under a name."""
        with store_errors("read the outbox"):
            return read_note(self._database, name)

    def close(self) -> None:
        """Close the file."""
        self._database.close()


def read_pending(path: Path) -> Pending | None:
    """Return what is under way in an outbox that another process may own, and write nothing.

    Raises:
        StoreError: the file is missing, damaged or not readable, or a later release's.
    """
    database, _ = read_database(path, _LADDER)
    with closing(database), store_errors("read the outbox"):
        return _pending(database)


def _pending(database: sqlite3.Connection) -> Pending | None:
    row = database.execute("SELECT seq, content FROM pending ORDER BY seq").fetchone()
    return None if row is None else Pending(int(row[0]), bytes(row[1]))
