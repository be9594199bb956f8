"""Opens the control plane's database, and brings its schema up to date.

One transaction a request. SQLite takes its write lock at the transaction's begin, so that two
writers wait for each other instead of failing; PostgreSQL locks the rows that are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, OperationalError
from sqlalchemy.orm import Session as Transaction
from sqlalchemy.orm import sessionmaker

from hetertrain.errors import StoreError

LOCK_SECONDS = 10
POOL_CONNECTIONS = 8
READ_ONLY = "is_read_only"


class Database:
    """The database of the control plane; any thread may use it."""

    def __init__(self, url: str, password: str | None = None) -> None:
        """Take an address, and the password where it has none. Connects when it is used first.

        Raises:
            StoreError: the address is wrong.
        """
        try:
            parsed = make_url(url)
        except ArgumentError as error:
            raise StoreError(
                "the database's address is wrong: use sqlite:///FILE or "
                "postgresql+psycopg://USER@HOST/NAME"
            ) from error
        self.url = parsed if password is None else parsed.set(password=password)
        is_file = parsed.get_backend_name() == "sqlite"
        self.engine = _sqlite(self.url) if is_file else _server(self.url)
        self._transactions = sessionmaker(self.engine, expire_on_commit=False)

    @contextmanager
    def begin(self) -> Iterator[Transaction]:
        """Work in one transaction: committed at the end, rolled back where an error leaves it."""
        with self._transactions.begin() as transaction:
            yield transaction

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """Read one moment of the database; waits for no writer."""
        bind = self.engine.execution_options(**{READ_ONLY: True})
        with self._transactions(bind=bind) as transaction:
            yield transaction

    def migrate(self, revision: str = "head") -> None:
        """Bring the schema to a revision.

        Raises:
            StoreError: the database cannot be reached.
        """
        configuration = Config()
        configuration.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
        try:
            with self.engine.begin() as connection:
                configuration.attributes["connection"] = connection
                command.upgrade(configuration, revision)
        except OperationalError as error:
            raise StoreError(
                f"the database {self.url.render_as_string()} cannot be used: {error.orig}"
            ) from error

    def close(self) -> None:
        """Give all connections back."""
        self.engine.dispose()


def _server(url: URL) -> Engine:
    # A server that was set up without an encoding would send bytes.
    arguments = {"client_encoding": "utf8", "connect_timeout": LOCK_SECONDS}
    return create_engine(
        url,
        pool_size=POOL_CONNECTIONS,
        pool_pre_ping=True,
        pool_timeout=LOCK_SECONDS,
        connect_args=arguments,
        hide_parameters=True,  # Errors are logged; what was to be stored may be secret.
    )


def _sqlite(url: URL) -> Engine:
    arguments = {"timeout": LOCK_SECONDS, "check_same_thread": False}
    engine = create_engine(url, connect_args=arguments, hide_parameters=True)

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # Else the driver begins transactions of its own.
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        is_read = connection.get_execution_options().get(READ_ONLY, False)
        connection.exec_driver_sql("BEGIN" if is_read else "BEGIN IMMEDIATE")

    return engine
