"""Opens the SQLite files of outbox and inbox: write-ahead log, and every commit on disk before it
returns. A directory of state has one owner at a time.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from io import TextIOWrapper
from pathlib import Path

from hetertrain.errors import StoreError

LOCK_FILE = "owner.lock"
PAGE_BYTES = 1 << 16
"""The largest there is: contents are long, and with SQLite's own 4 KiB one of a model's size takes
1.7 times as long."""


def open_database(path: Path, schema: str) -> sqlite3.Connection:
    """Open or create a database that one thread owns.

    Raises:
        StoreError: the file cannot be opened, or is not a database.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(path, isolation_level=None, timeout=5.0)
        database.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.executescript(schema)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(
            f"cannot open {path}: {error}; check the disk, its space and its rights"
        ) from error
    return database


def own_directory(directory: Path) -> TextIOWrapper:
    """Make this process the owner of a directory of state, for as long as it keeps the result.

    The lock is the system's (flock): it ends with its process, however that ends, and one that is
    only paused keeps it. So of two that are started for one job the second is refused, and none can
    write behind the other's back.

    Raises:
        StoreError: another process owns the directory, or it cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / LOCK_FILE).open("a+", encoding="utf-8")
    except OSError as error:
        raise StoreError(
            f"cannot use {directory}: {error}; check the disk and its rights"
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise StoreError(
            f"{directory} belongs to the running process {owner}: end that one first, or give this "
            "one another state directory"
        ) from error
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file
