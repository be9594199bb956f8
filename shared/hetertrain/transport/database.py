"""Opens the SQLite files of outbox and inbox: write-ahead log, and every commit on disk before it
returns.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from hetertrain.errors import StoreError


def open_database(path: Path, schema: str) -> sqlite3.Connection:
    """Open or create a database that one thread owns.

    Raises:
        StoreError: the file cannot be opened, or is not a database.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(path, isolation_level=None, timeout=5.0)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.executescript(schema)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(
            f"cannot open {path}: {error}; check the disk, its space and its rights"
        ) from error
    return database
