"""Opens the SQLite files of outbox and inbox: write-ahead log, and every commit on disk before it
returns. A directory of state has one owner at a time.

A damaged file is set aside, and what can still be read of it goes into a new one: a part starts
without hands, and says what it may have lost.

A file says which schema it has (SQLite's ``user_version``). A store's *ladder* holds the statements
of each schema after the one before: a new file takes all of them, one of an earlier release those
that it lacks, and a later release's file is refused as it is.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path

from hetertrain.errors import StoreError

LOCK_FILE = "owner.lock"
PAGE_BYTES = 1 << 16
"""The largest there is: contents are long, and with SQLite's own 4 KiB one of a model's size takes
1.7 times as long."""
LOG_BYTES = 4 << 20
"""What the write-ahead log takes before it goes into the file, and keeps of the disk after."""
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@contextmanager
def store_errors(doing: str) -> Iterator[None]:
    """Turn the database's errors into StoreError."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise StoreError(
            f"cannot {doing}: {error}; check the disk, its space and its rights"
        ) from error


def open_database(path: Path, ladder: tuple[str, ...]) -> tuple[sqlite3.Connection, str]:
    """Open or create a database that one thread owns, and bring it up to the ladder's last schema;
    say too what was damaged, if anything was.

    Raises:
        StoreError: the file cannot be opened, or is a later release's.
    """
    with store_errors(f"open {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if path.exists():
                _snapshot(path, ladder).close()
            return _open(path, ladder), ""
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode & 0xFF not in _DAMAGED:
                raise
            aside = _set_aside(path)
            database = _open(path, ladder)
            num_rows = _copy(aside, database)
            return database, f"{error}: {num_rows} rows were saved from it; it is now {aside}"


def read_database(path: Path, ladder: tuple[str, ...]) -> tuple[sqlite3.Connection, str]:
    """Open what is committed in a database at this moment, to read only; its owner writes on.

    Raises:
        StoreError: the file is missing, damaged or not readable, or a later release's.
    """
    with store_errors(f"read {path}"):
        return _snapshot(path, ladder), ""


def write_note(database: sqlite3.Connection, name: str, text: str) -> None:
    """Keep a small text under a name in the table ``notes``, replacing the one before."""
    database.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (name, text))


def read_note(database: sqlite3.Connection, name: str) -> str | None:
    """Return the text kept under a name."""
    row = database.execute("SELECT text FROM notes WHERE name = ?", (name,)).fetchone()
    return None if row is None else str(row[0])


def _snapshot(path: Path, ladder: tuple[str, ...]) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode=ro"
    database = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=5.0)
    try:
        database.execute("BEGIN")
        # A transaction begins with what it reads first.
        (schema,) = database.execute("PRAGMA user_version").fetchone()
        if schema > len(ladder):
            raise StoreError(
                f"{path} has schema {schema} of a later release, this one knows {len(ladder)}: "
                "upgrade hetertrain, or give it another state directory"
            )
        database.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except (sqlite3.Error, StoreError):
        database.close()
        raise
    return database


def _open(path: Path, ladder: tuple[str, ...]) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None, timeout=5.0)
    try:
        database.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.execute(f"PRAGMA wal_autocheckpoint = {LOG_BYTES // PAGE_BYTES}")
        database.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")
        (schema,) = database.execute("PRAGMA user_version").fetchone()
        for number, statements in enumerate(ladder[schema:], schema + 1):
            # All of a step or nothing, whenever the power goes.
            step = f"BEGIN; {statements} PRAGMA user_version = {number}; COMMIT"
            database.executescript(step)
        (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            damaged = sqlite3.DatabaseError(verdict)
            damaged.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise damaged
    except sqlite3.Error:
        database.close()
        raise
    return database


def _set_aside(path: Path) -> Path:
    aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    for end in ("", "-wal", "-shm"):
        with suppress(FileNotFoundError):
            path.with_name(path.name + end).rename(aside.with_name(aside.name + end))
    return aside


def _copy(aside: Path, database: sqlite3.Connection) -> int:
    """Copy all rows that can be read; return how many."""
    num_rows = 0
    tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    with closing(sqlite3.connect(aside)) as damaged, database:
        database.execute("BEGIN")
        for (table,) in tables:
            with suppress(sqlite3.DatabaseError):
                for row in damaged.execute(f"SELECT * FROM {table}"):  # noqa: S608  # our own names
                    marks = ", ".join("?" * len(row))
                    database.execute(f"INSERT OR IGNORE INTO {table} VALUES ({marks})", row)  # noqa: S608
                    num_rows += 1
    return num_rows


def owner_of(directory: Path) -> int | None:
    """Return the process that owns a directory of state; None: none, or it cannot be known.

    It only reads what the system says of its locks: to try the lock would disturb one that starts.
    """
    try:
        file = directory / LOCK_FILE
        inode, owner = file.stat().st_ino, int(file.read_text(encoding="utf-8"))
        locks = Path("/proc/locks").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    for lock in locks.splitlines():
        words = lock.split()
        if words[1] == "FLOCK" and words[4] == str(owner) and words[5].endswith(f":{inode}"):
            return owner
    return None


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
