"""Finds nodes by what the database knows of them and what they said last, both at once.

What they said is in memory: the database gives the names, in its order, and those that match are
counted and cut into pages here, so a page costs two queries whatever the size of the fleet.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session as Transaction

from hetertrain.wire.messages import NodeState
from hetertrain.wire.signing import GATEWAY_ROLE
from hetertrain_cloud.control.live import LiveFilter, LiveFleet
from hetertrain_cloud.control.tables import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFilter:
    """Which nodes are asked for: all that is given must hold."""

    live: LiveFilter = field(default_factory=LiveFilter)
    state: str | None = None
    role: str | None = None
    label: str | None = None
    """``KEY=VALUE``."""
    prefix: str | None = None
    contains: str | None = None
    """A part of the name, in capitals or not."""
    expires_before: datetime.datetime | None = None

    def conditions(self) -> list[ColumnElement[bool]]:
        """Return what the database is asked for."""
        found: list[ColumnElement[bool]] = []
        if self.state is not None:
            found.append(Node.state == self.state)
        if self.role is not None:
            found.append(Node.role == self.role)
        if self.label is not None:
            key, _, value = self.label.partition("=")
            found.append(Node.labels[key].as_string() == value)
        if self.prefix is not None:
            found.append(Node.name.startswith(self.prefix, autoescape=True))
        if self.contains is not None:
            found.append(Node.name.icontains(self.contains, autoescape=True))
        if self.expires_before is not None:
            found.append(Node.expires_at < self.expires_before)
        return found


def find(
    transaction: Transaction, live: LiveFleet, wanted: NodeFilter, cursor: str, limit: int
) -> tuple[Sequence[Node], int]:
    """Return up to ``limit`` nodes that match and whose names come after ``cursor``, by name; and
    how many match in all.
    """
    conditions = wanted.conditions()
    if wanted.live.asks_nothing:
        total = transaction.scalar(select(func.count()).select_from(Node).where(*conditions))
        query = select(Node).where(*conditions, Node.name > cursor)
        return transaction.scalars(query.order_by(Node.name).limit(limit)).all(), total or 0
    # Whether a name comes after another is the database's to say: its order may be a language's.
    names = select(Node.name, Node.name > cursor).where(*conditions).order_by(Node.name)
    rows = transaction.connection().execute(names).all()  # Without the cost of objects.
    states = live.states(name for name, _ in rows)
    matching = [row for row, said in zip(rows, states, strict=True) if wanted.live.matches(*said)]
    page = [name for name, is_after in matching if is_after][:limit]
    query = select(Node).where(Node.name.in_(page)).order_by(Node.name)
    return transaction.scalars(query).all(), len(matching)


def members_known(transaction: Transaction, gateway: str, names: Sequence[str]) -> set[str]:
    """Return which of these are vehicles that take part; none, where ``gateway`` is no gateway
    that does.
    """
    is_member = Node.name.in_(names) & (Node.role == "vehicle")
    is_gateway = (Node.name == gateway) & (Node.role == GATEWAY_ROLE)
    query = select(Node.name).where(Node.state == "active", is_member | is_gateway)
    found = set(transaction.scalars(query))
    return found - {gateway} if gateway in found else set()


def placed(
    transaction: Transaction, live: LiveFleet, wanted: NodeFilter, limit: int
) -> tuple[list[tuple[NodeState, bool]], int]:
    """Return what up to ``limit`` nodes said that match and say where they are, with whether each
    is online; and how many do in all.
    """
    names = select(Node.name).where(*wanted.conditions()).order_by(Node.name)
    found = [
        (state, is_online)
        for state, is_online in live.states(transaction.scalars(names))
        if state is not None
        and state.latitude is not None
        and state.longitude is not None
        and wanted.live.matches(state, is_online)
    ]
    return found[:limit], len(found)
