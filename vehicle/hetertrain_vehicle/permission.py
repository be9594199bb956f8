"""May the vehicle train now, may it use its link, and if not, why not?

The rules are the job's and the owner's (``core.eligibility``), over what the vehicle knows of
itself (``signals``); what may be used up is the owner's alone (``budgets``).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from hetertrain.core.eligibility import NETWORK, Rule, first_unmet, names_in, parse_rules
from hetertrain_vehicle.budgets import Ledger
from hetertrain_vehicle.signals import SignalsHeard, SignalTable, own_signals, with_own

CELL = "cell"
"""A signal that names the cell that the vehicle is in, where something knows that."""


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
    ) -> None:
        """Begin with the owner's rules."""
        self._own = (parse_rules(train_when), parse_rules(send_when))
        self._job: tuple[tuple[Rule, ...], tuple[Rule, ...]] = ((), ())
        self._table = table
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

    def hear(self, heard: SignalsHeard, now: float) -> None:
        """Take what a source says."""
        self._table.take(heard, now)

    def cell(self, now: float) -> str:
        """Return the cell that the vehicle is in, by its signals; empty: they don't say."""
        cell = self._table.known(now).get(CELL, "")
        return cell if isinstance(cell, str) else ""

    def network(self, now: float) -> str:
        """Return the type of the link."""
        known = self._table.known(now)
        return str(known.get(NETWORK) or own_signals((NETWORK,))[NETWORK])

    def judge(self, now: float, wall: datetime) -> Permission:
        """Decide for monotonic time ``now`` and the vehicle's local time ``wall``."""
        signals = with_own(self._table.known(now), self.names)
        train = first_unmet((*self._own[0], *self._job[0]), signals)
        send = first_unmet((*self._own[1], *self._job[1]), signals)
        return Permission(
            train or self.ledger.train_refusal(now, wall),
            send or self.ledger.send_refusal(self.network(now), wall),
        )
