"""The control plane's database, as SQLAlchemy sees it: SQLite by default, PostgreSQL in production.

The schema itself is made by the Alembic migrations beside this file; a test holds that the two
agree. A row that people change has a ``revision``, which is its ETag.
"""

from __future__ import annotations

import datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, DateTime, Dialect, ForeignKey, Index, Integer, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

NAME_CHARACTERS_MAX = 64
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""Of what stands in topics, paths and file names."""
Json = dict[str, Any]


class Moment(TypeDecorator[datetime.datetime]):
    """A time in UTC; SQLite forgets the zone, so it is put back."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(
        self, value: datetime.datetime | None, dialect: Dialect
    ) -> datetime.datetime | None:
        """Write UTC."""
        del dialect
        assert value is None or value.tzinfo is not None, "moments have a zone"
        return None if value is None else value.astimezone(datetime.UTC)

    def process_result_value(
        self, value: datetime.datetime | None, dialect: Dialect
    ) -> datetime.datetime | None:
        """Read UTC."""
        del dialect
        if value is None or value.tzinfo is not None:
            return value
        return value.replace(tzinfo=datetime.UTC)


class Table(DeclarativeBase):
    """Base of all tables."""


_NAME = String(NAME_CHARACTERS_MAX)
_DIGEST = String(64)


class User(Table):
    """Somebody who may log in."""

    __tablename__ = "user_account"

    name: Mapped[str] = mapped_column(_NAME, primary_key=True)
    password_hash: Mapped[str] = mapped_column(String(255))
    role: Mapped[str] = mapped_column(String(16))
    is_active: Mapped[bool] = mapped_column(default=True)
    failed_logins: Mapped[int] = mapped_column(default=0)
    locked_until: Mapped[datetime.datetime | None] = mapped_column(Moment)
    created_at: Mapped[datetime.datetime] = mapped_column(Moment)
    revision: Mapped[int] = mapped_column(default=1)


class Session(Table):
    """A login; the cookie holds the secret, this its digest."""

    __tablename__ = "login_session"

    digest: Mapped[str] = mapped_column(_DIGEST, primary_key=True)
    user: Mapped[str] = mapped_column(ForeignKey("user_account.name"), index=True)
    csrf_token: Mapped[str] = mapped_column(String(64))
    expires_at: Mapped[datetime.datetime] = mapped_column(Moment, index=True)


class SavedFilter(Table):
    """A filter of the fleet that a user keeps."""

    __tablename__ = "saved_filter"

    user: Mapped[str] = mapped_column(ForeignKey("user_account.name"), primary_key=True)
    name: Mapped[str] = mapped_column(_NAME, primary_key=True)
    query: Mapped[str] = mapped_column(Text)
    """As in an address, after the question mark."""
    changed_at: Mapped[datetime.datetime] = mapped_column(Moment)


class Token(Table):
    """An API token of a user, with some of the user's rights."""

    __tablename__ = "api_token"

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    parent: Mapped[str | None] = mapped_column(String(16), index=True)
    """The token that it was made with."""
    digest: Mapped[str] = mapped_column(_DIGEST)
    user: Mapped[str] = mapped_column(ForeignKey("user_account.name"), index=True)
    label: Mapped[str] = mapped_column(String(128))
    scopes: Mapped[list[str]] = mapped_column(JSON)
    created_at: Mapped[datetime.datetime] = mapped_column(Moment)
    expires_at: Mapped[datetime.datetime] = mapped_column(Moment)
    revoked_at: Mapped[datetime.datetime | None] = mapped_column(Moment)


class Claim(Table):
    """The right to enrol nodes of a role, with labels, for a time and a number of nodes."""

    __tablename__ = "claim"

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    digest: Mapped[str] = mapped_column(_DIGEST)
    role: Mapped[str] = mapped_column(String(16))
    node: Mapped[str | None] = mapped_column(_NAME)
    """Set: for this node only, which may have been enrolled before."""
    labels: Mapped[dict[str, str]] = mapped_column(JSON)
    uses_max: Mapped[int] = mapped_column()
    uses: Mapped[int] = mapped_column(default=0)
    needs_approval: Mapped[bool] = mapped_column()
    created_by: Mapped[str] = mapped_column(_NAME)
    created_at: Mapped[datetime.datetime] = mapped_column(Moment)
    expires_at: Mapped[datetime.datetime] = mapped_column(Moment)
    revoked_at: Mapped[datetime.datetime | None] = mapped_column(Moment)


class Node(Table):
    """A vehicle or gateway that has enrolled."""

    __tablename__ = "node"

    name: Mapped[str] = mapped_column(_NAME, primary_key=True)
    role: Mapped[str] = mapped_column(String(16))
    state: Mapped[str] = mapped_column(String(16))
    labels: Mapped[dict[str, str]] = mapped_column(JSON)
    claim: Mapped[str] = mapped_column(ForeignKey("claim.id"))
    public_key: Mapped[str] = mapped_column(_DIGEST)
    """SHA-256 of the key's DER form."""
    request: Mapped[str] = mapped_column(Text)
    """The node's newest certificate request, PEM."""
    certificate: Mapped[str | None] = mapped_column(Text)
    expires_at: Mapped[datetime.datetime | None] = mapped_column(Moment)
    """When its certificate does."""
    enrolled_at: Mapped[datetime.datetime] = mapped_column(Moment)
    seen_at: Mapped[datetime.datetime | None] = mapped_column(Moment)
    revision: Mapped[int] = mapped_column(default=1)

    __table_args__ = (Index("ix_node_state_name", "state", "name"),)


class NodeEvent(Table):
    """Something that happened to a node, as its heartbeats told; the newest of each are kept."""

    __tablename__ = "node_event"

    node: Mapped[str] = mapped_column(ForeignKey("node.name"), primary_key=True)
    number: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    """Counts the node's events."""
    at: Mapped[datetime.datetime] = mapped_column(Moment)
    """Of several that were told together, the last."""
    kind: Mapped[str] = mapped_column(String(32))
    text: Mapped[str] = mapped_column(Text)
    count: Mapped[int] = mapped_column()


class Certificate(Table):
    """A certificate that we issued."""

    __tablename__ = "certificate"

    serial: Mapped[str] = mapped_column(String(40), primary_key=True)
    node: Mapped[str] = mapped_column(_NAME, index=True)
    expires_at: Mapped[datetime.datetime] = mapped_column(Moment)
    revoked_at: Mapped[datetime.datetime | None] = mapped_column(Moment, index=True)


class Job(Table):
    """A job: what an operator wants of it, and what its supervisor sees."""

    __tablename__ = "job"

    name: Mapped[str] = mapped_column(_NAME, primary_key=True)
    specification: Mapped[Json] = mapped_column(JSON)
    wanted: Mapped[str] = mapped_column(String(16))
    rollback_to: Mapped[int | None] = mapped_column(BigInteger)
    """An order to the supervisor: go on from this version."""
    promoted: Mapped[list[int]] = mapped_column(JSON)
    state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(Text, default="")
    restarts: Mapped[int] = mapped_column(default=0)
    created_at: Mapped[datetime.datetime] = mapped_column(Moment)
    changed_at: Mapped[datetime.datetime] = mapped_column(Moment)
    revision: Mapped[int] = mapped_column(default=1)


class AuditEntry(Table):
    """One change, by whom, and the chain that shows whether entries were altered or removed.

    The database refuses to change or delete a row.
    """

    __tablename__ = "audit_entry"

    number: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=False
    )
    at: Mapped[datetime.datetime] = mapped_column(Moment)
    actor: Mapped[str] = mapped_column(String(80))
    action: Mapped[str] = mapped_column(String(64))
    kind: Mapped[str] = mapped_column(String(16))
    object: Mapped[str] = mapped_column(_NAME)
    before: Mapped[Json | None] = mapped_column(JSON)
    after: Mapped[Json | None] = mapped_column(JSON)
    previous: Mapped[str] = mapped_column(_DIGEST)
    digest: Mapped[str] = mapped_column(_DIGEST)

    __table_args__ = (Index("ix_audit_entry_kind_object", "kind", "object"),)


class AuditHead(Table):
    """The end of the chain, and the lock that makes writers take turns; one row."""

    __tablename__ = "audit_head"

    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(BigInteger)
    digest: Mapped[str] = mapped_column(_DIGEST)


class Answer(Table):
    """What was answered to a request with an idempotency key, for whoever repeats it."""

    __tablename__ = "idempotent_answer"

    key: Mapped[str] = mapped_column(String(160), primary_key=True)
    """The caller's name and key."""
    request: Mapped[str] = mapped_column(_DIGEST)
    status: Mapped[int] = mapped_column()
    body: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime.datetime] = mapped_column(Moment, index=True)
