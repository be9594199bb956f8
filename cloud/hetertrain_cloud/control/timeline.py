"""What happened to a node: what people did to it, from the audit trail, and what its heartbeats
told, from a table that keeps the newest of each node.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import merge

from sqlalchemy import BigInteger, String, bindparam, delete, func, insert, select
from sqlalchemy.orm import Session as Transaction

from hetertrain_cloud.control.changes import Change
from hetertrain_cloud.control.tables import AuditEntry, Node, NodeEvent

KEPT_MAX = 200
"""So many heartbeats' events are kept of each node; the audit trail keeps all of its own."""
NUMBER_MAX = 10**18 - 1


@dataclass(frozen=True, slots=True)
class Happening:
    """One line of a node's timeline."""

    at: datetime.datetime
    kind: str
    text: str
    count: int
    """How often in a few seconds; ``at`` is the last time then."""
    actor: str | None
    """Who did it, where somebody did."""


@dataclass(frozen=True, slots=True)
class Place:
    """How far down a timeline somebody has read: the lowest number of either kind."""

    audit: int = NUMBER_MAX
    event: int = NUMBER_MAX

    @classmethod
    def parse(cls, text: str) -> Place:
        """Read ``AUDIT.EVENT``."""
        audit, _, event = text.partition(".")
        return cls(int(audit), int(event))

    def __str__(self) -> str:
        return f"{self.audit}.{self.event}"


def save(transaction: Transaction, changes: Sequence[Change], began: datetime.datetime) -> None:
    """Write down what happened to enrolled nodes; ``began`` is the time of monotonic second 0."""
    names = {change.node for change in changes}
    known = set(transaction.scalars(select(Node.name).where(Node.name.in_(names))))
    newest = select(NodeEvent.node, func.max(NodeEvent.number)).group_by(NodeEvent.node)
    found = transaction.execute(newest.where(NodeEvent.node.in_(known)))
    numbers = {row[0]: row[1] for row in found}
    rows = []
    for change in changes:
        if change.node not in known:
            continue  # Brokers without access rights let anybody say anything.
        numbers[change.node] = numbers.get(change.node, 0) + 1
        rows.append(
            {
                "node": change.node,
                "number": numbers[change.node],
                "at": began + datetime.timedelta(seconds=change.at),
                "kind": change.kind,
                "text": change.text,
                "count": change.count,
            }
        )
    if not rows:
        return
    transaction.execute(insert(NodeEvent), rows)
    old = [
        {"of": node, "kept": number - KEPT_MAX}
        for node, number in numbers.items()
        if number > KEPT_MAX
    ]
    if old:
        # Of the table, not the class: many at once.
        table = NodeEvent.__table__
        which = (table.c.node == bindparam("of", String)) & (
            table.c.number <= bindparam("kept", BigInteger)
        )
        transaction.connection().execute(delete(NodeEvent).where(which), old)


def read(
    transaction: Transaction, node: str, place: Place, limit: int
) -> tuple[list[Happening], Place | None]:
    """Return up to ``limit`` lines below ``place``, the newest first, and where to go on; None:
    there is no more.
    """
    entries = transaction.scalars(
        select(AuditEntry)
        .where(AuditEntry.kind == "node", AuditEntry.object == node)
        .where(AuditEntry.number < place.audit)
        .order_by(AuditEntry.number.desc())
        .limit(limit + 1)
    )
    events = transaction.scalars(
        select(NodeEvent)
        .where(NodeEvent.node == node, NodeEvent.number < place.event)
        .order_by(NodeEvent.number.desc())
        .limit(limit + 1)
    )
    rows: Iterable[AuditEntry | NodeEvent]
    rows = merge(entries, events, key=lambda row: row.at, reverse=True)
    found: list[Happening] = []
    for row in rows:
        if len(found) == limit:
            return found, place
        if isinstance(row, AuditEntry):
            place = Place(row.number, place.event)
            found.append(_of_entry(row))
        else:
            place = Place(place.audit, row.number)
            found.append(Happening(row.at, row.kind, row.text, row.count, None))
    return found, None


def _of_entry(entry: AuditEntry) -> Happening:
    kind = entry.action.removeprefix("node_")
    return Happening(entry.at, kind, _text_of(kind, entry), 1, entry.actor)


def _text_of(kind: str, entry: AuditEntry) -> str:
    before, after = entry.before or {}, entry.after or {}
    if kind == "enrolled":
        labels = ", ".join(f"{key}={value}" for key, value in after["labels"].items())
        again = "again, " if before else ""
        return f"{again}as {after['role']}, labels: {labels or 'none'}"
    if kind == "relabelled":
        old, new = before["labels"], after["labels"]
        gone = [f"without {key}" for key in old if key not in new]
        came = [f"{key}={value}" for key, value in new.items() if old.get(key) != value]
        return ", ".join(came + gone) or "the same labels"
    return f"was {before['state']}" if before.get("state") else ""
