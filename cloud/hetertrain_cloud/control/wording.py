"""Says in words what holds a vehicle, as: it is not charging, job x asks for IsCharging == true."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetertrain.core.eligibility import NETWORK, TIME, Rule, conditions_of, rule_of

PHRASES = {
    ("IsCharging", "false"): "it is not charging",
    ("IsCharging", "true"): "it is charging",
    ("IsMoving", "true"): "it drives",
    ("IsMoving", "false"): "it stands",
    ("IsIgnitionOn", "true"): "its ignition is on",
    ("IsIgnitionOn", "false"): "its ignition is off",
}
"""By the signal's last word and what is the case."""


@dataclass(frozen=True, slots=True)
class Held:
    """Why a vehicle may not do something, for people."""

    sentence: str
    advice: str
    link: str | None = None


def held(refusal: str, job: str, job_rules: Sequence[str]) -> Held:
    """Say which rule or budget holds a vehicle that works on ``job``, and whose that is: a rule is
    the owner's where the job has no such one.
    """
    rule = rule_of(refusal)
    try:
        signals = [condition.signal for condition in Rule.parse(rule).conditions]
    except ValueError:  # What is used up is said in words.
        return Held(f"A budget of its owner holds it: {refusal}.", "wait, or give it more")
    found = [_found(s, f) for s, (_, f) in zip(signals, conditions_of(refusal), strict=False)]
    is_jobs = rule in {_normal(text) for text in job_rules}
    whose = f"job {job} asks" if is_jobs else "its owner asks"
    sentence = f"{_capital(' and '.join(found))}: {whose} for {rule}."
    if any(known == "not known" for _, known in conditions_of(refusal)):
        return Held(sentence, "see the node's signal source: it does not tell this signal")
    changes = "change the job's rules" if is_jobs else "change the rules in the node's settings"
    advice = f"nothing, if that is meant so: it goes on when the rule holds; else {changes}"
    return Held(sentence, advice, f"/jobs/{job}" if is_jobs else None)


def _normal(rule: str) -> str:
    return " or ".join(condition.text for condition in Rule.parse(rule).conditions)


def _found(signal: str, value: str) -> str:
    """Say what is the case, as one would of a vehicle where the signal is a common one."""
    name = signal.rpartition(".")[2]
    if signal == TIME:
        return "it is not the time for it"
    if value == "not known":
        return f"{name} is not known"
    if signal == NETWORK:
        return f"its link is {value}"
    return PHRASES.get((name, value), "it drives" if _drives(signal, value) else "") or (
        f"{name} is {value}"
    )


def _drives(signal: str, value: str) -> bool:
    return signal == "Vehicle.Speed" and value not in ("0", "-0")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
