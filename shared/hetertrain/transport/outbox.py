"""What a node must still deliver: one content at a time, durable before its first publish, gone
after its verdict.

A node encodes no new update while one is under way; its progress gathers in ``local - reference``
meanwhile. So the outbox holds one content however long the node is offline: newer work coalesces
before it is ever encoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hetertrain.transport.database import open_database, store_errors

_SCHEMA = """
CREATE TABLE IF NOT EXISTS pending (seq INTEGER PRIMARY KEY, content BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS counter (
    id INTEGER PRIMARY KEY CHECK (id = 0),
    next_seq INTEGER NOT NULL
);
"""


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
        """
        self._database, self.damage = open_database(path, _SCHEMA)
        """Says what was wrong with the file, where an update may be missing; else empty."""
        with store_errors("write the outbox"):
            self._database.execute("INSERT OR IGNORE INTO counter VALUES (0, ?)", (first_seq,))

    @property
    def next_seq(self) -> int:
        """The number that the next content gets."""
        with store_errors("read the outbox"):
            return int(self._database.execute("SELECT next_seq FROM counter").fetchone()[0])

    def pending(self) -> Pending | None:
        """Return the content under way, if any."""
        with store_errors("read the outbox"):
            query = "SELECT seq, content FROM pending ORDER BY seq"
            row = self._database.execute(query).fetchone()
        return None if row is None else Pending(int(row[0]), bytes(row[1]))

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

    def settle(self, seq: int) -> None:
        """Forget a content that has its verdict.

        Raises:
            StoreError: the disk is full or broken. After a restart it would be sent once more, and
                be a duplicate.
        """
        with store_errors(f"settle update {seq} in the outbox"):
            self._database.execute("DELETE FROM pending WHERE seq = ?", (seq,))

    def close(self) -> None:
        """Close the file."""
        self._database.close()
