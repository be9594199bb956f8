"""The audit trail: every change, by whom, from what to what; a hash chain shows what was altered.

An entry is written in the transaction of its change, so that neither is without the other. The
digest of an entry covers the one before: to alter or drop an entry, all later ones must be made
anew, and the newest digest no longer is the one that an auditor noted down.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session as Transaction

from hetertrain_cloud.control.tables import AuditEntry, AuditHead

FIRST = "0" * 64
"""What the first entry follows."""
BATCH = 1000


@dataclass(frozen=True, slots=True)
class Verification:
    """What a walk along the chain found."""

    entries: int
    head: str
    """Digest of the newest entry: note it down elsewhere, to notice an exchanged chain."""
    broken_at: int | None
    """The first entry that is not what was written; None: the chain is whole."""


def write_entry(
    transaction: Transaction,
    action: str,
    thing: tuple[str, str],
    *,
    actor: str,
    now: datetime.datetime,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
) -> None:
    """Add what an actor did to a thing (its kind and name); what is secret never gets here."""
    head = transaction.scalars(select(AuditHead).with_for_update()).one()
    entry = AuditEntry(
        number=head.number + 1,
        at=now,
        actor=actor,
        action=action,
        kind=thing[0],
        object=thing[1],
        before=before,
        after=after,
        previous=head.digest,
    )
    entry.digest = digest(entry)
    transaction.add(entry)
    head.number, head.digest = entry.number, entry.digest


def digest(entry: AuditEntry) -> str:
    """Return the SHA-256 of an entry and what it follows."""
    fields = [
        entry.number,
        entry.at.astimezone(datetime.UTC).isoformat(),
        entry.actor,
        entry.action,
        entry.kind,
        entry.object,
        entry.before,
        entry.after,
        entry.previous,
    ]
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def verify(transaction: Transaction) -> Verification:
    """Walk along the whole chain."""
    head = transaction.scalars(select(AuditHead)).one()
    previous, number = FIRST, 0
    query = select(AuditEntry).order_by(AuditEntry.number).execution_options(yield_per=BATCH)
    for entry in transaction.scalars(query):
        is_next = entry.number == number + 1 and entry.previous == previous
        if not is_next or entry.digest != digest(entry):
            return Verification(number, previous, number + 1)
        previous, number = entry.digest, entry.number
    is_end = (number, previous) == (head.number, head.digest)
    return Verification(number, previous, None if is_end else number + 1)
