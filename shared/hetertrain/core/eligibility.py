"""Rules that say when a vehicle may train, over signals that it knows of itself.

A rule is one or more conditions, ``SIGNAL SIGN VALUE``, of which one must hold: ``A == true or B <
1``. Of a list of rules all must hold. Signals are named as in the COVESA Vehicle Signal
Specification (``Vehicle.Speed``, ``Vehicle.Powertrain.TractionBattery.Charging.IsCharging``);
beside them stand ``network``, the type of the link, and ``time``, the vehicle's own time of day. A
signal whose value is not known satisfies no condition.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Value = bool | float | str
Signals = Mapping[str, Value]
"""What a vehicle knows, by name; ``time`` is in minutes since midnight."""

RULES_MAX = 8
RULE_CHARACTERS_MAX = 256
"""Two lists of so many and so long ASCII rules fit a retained message of 8 KiB."""
DAY_MINUTES = 24 * 60
TIME = "time"
NETWORK = "network"
CELL = "cell"
"""A signal that names the cell that the vehicle is in, where something knows that."""

_SIGNS = {
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
}
_CONDITION = re.compile(
    r"(?P<signal>[A-Za-z][\w.]{0,127})\s*(?P<sign>==|!=|>=|<=|>|<|\sin\s)\s*(?P<value>\S[^<>=!]*)"
)
_WINDOW = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")
_OR, _IS = "; or ", ": it is "
"""What stands between conditions, and between one and what is the case, where they are shown."""
_HELP = (
    "write SIGNAL SIGN VALUE with ==, !=, <, <=, >, >= or in, as 'Vehicle.Speed < 1', "
    "'network in wifi, ethernet' or 'time in 22:00-06:00'"
)


@dataclass(frozen=True, slots=True)
class Condition:
    """One comparison of one signal."""

    text: str
    signal: str
    sign: str
    values: tuple[Value, ...]
    """What it is compared with; of a time window, both ends in minutes since midnight."""

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read ``SIGNAL SIGN VALUE``.

        Raises:
            ValueError: it is not of this form.
        """
        text = " ".join(text.split())
        found = _CONDITION.fullmatch(text)
        if found is None:
            raise ValueError(f"condition {text!r} is malformed: {_HELP}")
        signal, sign = found["signal"], found["sign"].strip()
        values = tuple(_value(part.strip()) for part in found["value"].split(","))
        if signal == TIME:
            window = _WINDOW.fullmatch(found["value"].strip())
            if window is None or sign != "in":
                raise ValueError(f"condition {text!r}: write time in HH:MM-HH:MM")
            hour, minute, to_hour, to_minute = map(int, window.groups())
            values = (hour * 60.0 + minute, to_hour * 60.0 + to_minute)
        elif sign != "in" and len(values) > 1:
            raise ValueError(f"condition {text!r}: only 'in' takes several values")
        elif sign in (">=", ">", "<=", "<") and not _is_number(values[0]):
            raise ValueError(f"condition {text!r}: {sign} compares numbers")
        return cls(text, signal, sign, values)

    def holds(self, signals: Signals) -> bool:
        """Tell whether it is satisfied."""
        value = signals.get(self.signal)
        if value is None:
            return False
        if self.signal == TIME:
            start, end = self.values
            # A window may go over midnight; one that ends where it starts is the whole day.
            length = (float(end) - float(start)) % DAY_MINUTES or DAY_MINUTES
            return (float(value) - float(start)) % DAY_MINUTES < length
        if self.sign == "in":
            return any(_is_same_kind(value, other) and value == other for other in self.values)
        if not _is_same_kind(value, self.values[0]):
            return False
        return bool(_SIGNS[self.sign](value, self.values[0]))

    def shown(self, signals: Signals) -> str:
        """Say what it asks for, and what is the case."""
        if self.signal == TIME:
            return self.text
        value = signals.get(self.signal)
        if value is None:
            return f"{self.text}{_IS}not known"
        return f"{self.text}{_IS}{_shown(value)}"


@dataclass(frozen=True, slots=True)
class Rule:
    """Conditions of which one must hold."""

    conditions: tuple[Condition, ...]

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Read conditions joined by ``or``.

        Raises:
            ValueError: one is malformed, or the rule is too long.
        """
        if len(text) > RULE_CHARACTERS_MAX:
            raise ValueError(f"a rule has at most {RULE_CHARACTERS_MAX} characters")
        if not text.isascii():
            raise ValueError(f"rule {text!r} has characters that are not ASCII")
        return cls(tuple(Condition.parse(part) for part in re.split(r"\s+or\s+", text.strip())))

    def holds(self, signals: Signals) -> bool:
        """Tell whether it is satisfied."""
        return any(condition.holds(signals) for condition in self.conditions)

    def shown(self, signals: Signals) -> str:
        """Say what it asks for, and what is the case."""
        return _OR.join(condition.shown(signals) for condition in self.conditions)


def parse_rules(texts: Sequence[str]) -> tuple[Rule, ...]:
    """Read rules that must all hold.

    Raises:
        ValueError: one is malformed, or there are too many.
    """
    if len(texts) > RULES_MAX:
        raise ValueError(f"{len(texts)} rules: there may be {RULES_MAX}")
    return tuple(Rule.parse(text) for text in texts)


def check_rules(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return rules that can be read, as they are; for validated settings.

    Raises:
        ValueError: one is malformed, or there are too many.
    """
    parse_rules(texts)
    return texts


def first_unmet(rules: Sequence[Rule], signals: Signals) -> str:
    """Say of the first rule that does not hold what it asks for and what is the case; empty where
    all hold.
    """
    return next((rule.shown(signals) for rule in rules if not rule.holds(signals)), "")


def rule_of(shown: str) -> str:
    """Return what a rule asks for, of the text that ``first_unmet`` gave, without what is the case:
    the same for all vehicles that it holds.
    """
    return " or ".join(asked for asked, _ in conditions_of(shown))


def conditions_of(shown: str) -> list[tuple[str, str]]:
    """Return each condition of a rule that ``first_unmet`` gave, and what is the case; empty where
    that is not said.
    """
    parts = [part.partition(_IS) for part in shown.split(_OR)]
    return [(asked, found) for asked, _, found in parts]


def names_in(rules: Sequence[Rule]) -> frozenset[str]:
    """Return the signals that rules look at."""
    return frozenset(c.signal for rule in rules for c in rule.conditions)


def _value(text: str) -> Value:
    if text in ("true", "false"):
        return text == "true"
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text


def _shown(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float | int) else str(value)[:64]


def _is_number(value: Value) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool)


def _is_same_kind(value: Value, other: Value) -> bool:
    """A truth is not 1, and text is no number: what is of another kind satisfies nothing."""
    return _is_number(value) == _is_number(other) and isinstance(value, bool) == isinstance(
        other, bool
    )
