"""The fleet in numbers: what an overview shows and what menus of filters offer."""

from __future__ import annotations

import datetime
import json
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

from sqlalchemy import Text, cast, select
from sqlalchemy.orm import Session as Transaction

from hetertrain.wire.messages import NOT_ELIGIBLE, NodeState
from hetertrain_cloud.control.changes import doing_of, held_by
from hetertrain_cloud.control.live import OFFLINE, LiveFleet
from hetertrain_cloud.control.search import NodeFilter
from hetertrain_cloud.control.tables import Node

RULES_SHOWN, VALUES_SHOWN = 20, 50
KEYS_SHOWN = 32
CHOICES_SHOWN = 200
"""Of tiers, cells and the like; the most frequent."""


@dataclass(slots=True)
class Counts:
    """The fleet, counted; all but ``by_state`` is of active nodes, as they said last."""

    by_state: Counter[str] = field(default_factory=Counter)
    by_role: Counter[str] = field(default_factory=Counter)
    by_doing: Counter[str] = field(default_factory=Counter)
    by_tier: Counter[str] = field(default_factory=Counter)
    by_cell: Counter[str] = field(default_factory=Counter)
    not_eligible_by_rule: Counter[str] = field(default_factory=Counter)
    labels: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    online: int = 0
    online_not_active: int = 0
    """Nodes that are heard and should not be: revoked, unknown."""
    certificates_expiring: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    def add_live(self, state: NodeState | None, is_online: bool) -> None:
        """Count what a node said last."""
        self.online += is_online
        self.by_doing[doing_of(state) if state and is_online else OFFLINE] += 1
        if state is None:
            return
        self.by_tier[state.tier] += 1
        self.by_cell[state.cell] += 1
        self.bytes_up += state.bytes_up
        self.bytes_down += state.bytes_down
        if is_online and state.doing == NOT_ELIGIBLE:
            self.not_eligible_by_rule[held_by(state.waiting_for)] += 1

    def add_labels(self, texts: Counter[str]) -> None:
        """Count labels, given as JSON: many nodes have the same."""
        for text, count in texts.items():
            for key, value in json.loads(text).items():
                self.labels[key][value] += count


def count(
    transaction: Transaction,
    live: LiveFleet,
    expires_before: datetime.datetime,
    wanted: NodeFilter,
) -> Counts:
    """Count the nodes that match."""
    is_expiring = Node.expires_at < expires_before
    query = select(Node.name, Node.state, Node.role, is_expiring, cast(Node.labels, Text))
    query = query.where(*wanted.conditions())
    rows = transaction.connection().execute(query).all()  # Without the cost of objects.
    counts, texts = Counts(), Counter[str]()
    states = live.states(row[0] for row in rows)
    known = 0
    for (_, state, role, expires, labels), (said, is_online) in zip(rows, states, strict=True):
        if not wanted.live.matches(said, is_online):
            continue
        counts.by_state[state] += 1
        known += is_online
        if state != "active":
            continue
        counts.by_role[role] += 1
        texts[labels] += 1
        counts.add_live(said, is_online)
        counts.certificates_expiring += bool(expires)
    counts.online_not_active = known - counts.online
    if wanted == NodeFilter():
        counts.online_not_active += max(0, len(live.online()) - known)
    counts.add_labels(texts)
    return counts


def count_cells(
    transaction: Transaction, live: LiveFleet, cells: Collection[str]
) -> dict[str, Counter[str]]:
    """Count the active nodes of each of these cells by what they do."""
    found: dict[str, Counter[str]] = {cell: Counter() for cell in cells}
    if not found:
        return found
    names = transaction.scalars(select(Node.name).where(Node.state == "active"))
    for said, is_online in live.states(names):
        if said is not None and said.cell in found:
            found[said.cell][doing_of(said) if is_online else OFFLINE] += 1
    return found


def most(counter: Counter[str], num: int = CHOICES_SHOWN) -> dict[str, int]:
    """Return the most frequent, the first first; of equals, by name."""
    return dict(sorted(counter.items(), key=lambda item: (-item[1], item[0]))[:num])
