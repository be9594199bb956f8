"""Finds nodes by what the database knows of them and what they said last, both at once.

What they said is in memory: the database gives the names, in its order, and those that match are
counted, put into another order where one is asked for, and cut into pages here, so a page costs two
queries whatever the size of the fleet.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from sqlalchemy import ColumnElement, func, select, true
from sqlalchemy.orm import Session as Transaction

from hetertrain.wire.messages import NodeState
from hetertrain.wire.signing import GATEWAY_ROLE
from hetertrain_cloud.control.live import LiveFilter, LiveFleet
from hetertrain_cloud.control.tables import Node

SortKey = Literal["name", "version", "updates", "bytes_up", "seen"]
_NOW = 1 << 62
"""When a node was seen that is there: after all times in milliseconds."""


@dataclass(frozen=True, slots=True)
class Order:
    """In which order nodes are listed; those without a value come last, equals by name."""

    by: SortKey = "name"
    is_descending: bool = False

    def place(self, value: int | None, name: str) -> tuple[bool, int, str]:
        """Return what to sort by."""
        return value is None, (-1 if self.is_descending else 1) * (value or 0), name


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
    transaction: Transaction,
    live: LiveFleet,
    wanted: NodeFilter,
    order: Order,
    cursor: str,
    limit: int,
) -> tuple[Sequence[tuple[Node, str]], int]:
    """Return up to ``limit`` nodes that match and come after ``cursor``, each with the cursor that
    goes on after it; and how many match in all.
    """
    if order.by == "name":
        nodes, total = _by_name(transaction, live, wanted, order, cursor, limit)
        return [(node, node.name) for node in nodes], total
    names = select(Node.name, Node.seen_at).where(*wanted.conditions())
    rows = transaction.connection().execute(names).all()  # Without the cost of objects.
    states = live.states(name for name, _ in rows)
    matching = [
        (_value(order.by, state, is_online, seen_at), name)
        for (name, seen_at), (state, is_online) in zip(rows, states, strict=True)
        if wanted.live.matches(state, is_online)
    ]
    matching.sort(key=lambda each: order.place(*each))
    value, _, name = cursor.rpartition(":")
    start = order.place(int(value) if value else None, name)
    rest = (each for each in matching if not cursor or order.place(*each) > start)
    page = list(islice(rest, limit))
    query = select(Node).where(Node.name.in_([name for _, name in page]))
    found = {node.name: node for node in transaction.scalars(query)}
    return [(found[name], f"{'' if value is None else value}:{name}") for value, name in page], len(
        matching
    )


def _value(
    by: SortKey, state: NodeState | None, is_online: bool, seen_at: datetime.datetime | None
) -> int | None:
    """Return what a node is sorted by; None: it has nothing of the kind."""
    if by == "seen":
        at = None if seen_at is None else int(seen_at.timestamp() * 1000)
        return _NOW if is_online else at
    if state is None:
        return None
    return {
        "version": state.version if state.version >= 0 else None,
        "updates": state.updates,
        "bytes_up": state.bytes_up,
    }[by]


def _by_name(
    transaction: Transaction,
    live: LiveFleet,
    wanted: NodeFilter,
    order: Order,
    cursor: str,
    limit: int,
) -> tuple[Sequence[Node], int]:
    """Find in the order of names, which is the database's to say: it may be a language's."""
    conditions = wanted.conditions()
    is_after: ColumnElement[bool] = true()
    if cursor:
        is_after = Node.name < cursor if order.is_descending else Node.name > cursor
    by_name = Node.name.desc() if order.is_descending else Node.name.asc()
    if wanted.live.asks_nothing:
        total = transaction.scalar(select(func.count()).select_from(Node).where(*conditions))
        query = select(Node).where(*conditions, is_after)
        return transaction.scalars(query.order_by(by_name).limit(limit)).all(), total or 0
    names = select(Node.name, is_after).where(*conditions).order_by(by_name)
    rows = transaction.connection().execute(names).all()  # Without the cost of objects.
    states = live.states(name for name, _ in rows)
    matching = [row for row, said in zip(rows, states, strict=True) if wanted.live.matches(*said)]
    page = [name for name, is_after in matching if is_after][:limit]
    query = select(Node).where(Node.name.in_(page)).order_by(by_name)
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
