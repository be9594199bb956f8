"""May the vehicle train now, may it use its link, and if not, why not?

The rules are the job's and the owner's (``core.eligibility``), over what the vehicle knows of
itself (``signals``); what may be used up is the owner's alone (``budgets``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from hetertrain.core.eligibility import (
    CELL,
    NETWORK,
    TIME,
    Rule,
    Value,
    first_unmet,
    names_in,
    parse_rules,
)
from hetertrain_vehicle.budgets import Ledger
from hetertrain_vehicle.signals import SignalsHeard, SignalTable, network_type


@dataclass(frozen=True, slots=True)
class Permission:
    """Why the vehicle may not train, and not use its link; empty: it may."""

    train: str
    send: str


class Permissions:
    """Judges, whenever something has changed; the agent's thread owns it."""

    def __init__(
        self,
        train_when: tuple[str, ...],
        send_when: tuple[str, ...],
        table: SignalTable,
        ledger: Ledger,
        link_type: Callable[[], str] = network_type,
    ) -> None:
        """Begin with the owner's rules; ``link_type`` looks at the link itself."""
        self._own = (parse_rules(train_when), parse_rules(send_when))
        self._job: tuple[tuple[Rule, ...], tuple[Rule, ...]] = ((), ())
        self._table = table
        self._link_type = link_type
        self.ledger = ledger

    def take_job_rules(self, train_when: tuple[str, ...], send_when: tuple[str, ...]) -> None:
        """Go by these rules of the job from now on.

        Raises:
            ValueError: one cannot be read; the ones before stand.
        """
        self._job = (parse_rules(train_when), parse_rules(send_when))

    @property
    def names(self) -> frozenset[str]:
        """The signals that matter."""
        return names_in([rule for rules in (*self._own, *self._job) for rule in rules])

    def hear(self, heard: SignalsHeard, now: float) -> bool:
        """Take what a source says; tell whether anything that matters is otherwise now."""
        before = self._that_matter(now)
        self._table.take(heard, now)
        return self._that_matter(now) != before

    def _that_matter(self, now: float) -> dict[str, Value]:
        names = self.names | {CELL, NETWORK}
        return {name: value for name, value in self._table.known(now).items() if name in names}

    def cell(self, now: float) -> str:
        """Return the cell that the vehicle is in, by its signals; empty: they don't say."""
        cell = self._table.known(now).get(CELL, "")
        return cell if isinstance(cell, str) else ""

    def network(self, now: float) -> str:
        """Return the type of the link. A source's word counts more than what the agent sees."""
        return str(self._table.known(now).get(NETWORK) or self._link_type())

    def judge(self, network: str, now: float, wall: datetime) -> Permission:
        """Decide for a type of link, monotonic time ``now`` and the vehicle's local time ``wall``.
        The time of day is the agent's word alone.
        """
        signals = self._table.known(now)
        signals |= {NETWORK: network, TIME: 60.0 * wall.hour + wall.minute}
        train = first_unmet((*self._own[0], *self._job[0]), signals)
        send = first_unmet((*self._own[1], *self._job[1]), signals)
        return Permission(
            train or self.ledger.train_refusal(now, wall),
            send or self.ledger.send_refusal(network, wall),
        )
