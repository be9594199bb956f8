"""What happens to nodes, read off their heartbeats: the difference between two is what is worth
telling. What repeats itself is told once, with a count.

Pure: whoever uses it brings the time, and a lock where several threads do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hetertrain.core.eligibility import rule_of
from hetertrain.wire.messages import NOT_ELIGIBLE, NodeState

COALESCE_SECONDS = 10.0
"""Of one node one event of a kind is told in so long."""
PENDING_MAX = 100_000
TEXT_CHARACTERS_MAX = 512
AT_WORK = frozenset({"training", "flushing", "holding", "collecting"})
"""What a node does that takes part; a sync's short hold included."""
LINK_CLOSED = "link_closed"
TRAIN_FAILED = "train_failed"
TRAIN_FAILED_PREFIX = "another trainer: "
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
"""What a node says may hold anything; a database takes no null."""
_DISK = re.compile(r"\d+ MiB of state are over the (\S+) that it may take")


@dataclass(frozen=True, slots=True)
class Change:
    """Something that happened to a node."""

    node: str
    kind: str
    text: str
    """For people."""
    at: float
    """Monotonic seconds; of several, the last."""
    count: int = 1


def doing_of(state: NodeState) -> str:
    """Return what a node does, in one word; a gateway says more after it."""
    return state.doing.partition(";")[0]


def held_by(refusal: str) -> str:
    """Return the rule or budget that holds a vehicle, without what differs from one to the next."""
    disk = _DISK.fullmatch(refusal)
    return f"at most {disk[1]} MiB of state" if disk else rule_of(refusal)


def changes(
    before: NodeState | None, after: NodeState, *, was_up: bool, label: str
) -> Iterator[tuple[str, str]]:
    """Yield kind and text of what happened between two heartbeats; ``before`` is None for the
    first, ``was_up`` says whether we took the node to be online, ``label`` what its agent called
    itself when it last did.
    """
    if before is not None:
        yield from _moves(before, after, label)
    if not after.is_online:
        if was_up:
            yield "offline", _farewell(after)
        return
    does = ": ".join(part for part in (after.doing, after.waiting_for) if part)
    if not was_up:
        yield "online", f"job {after.job}, cell {after.cell}, tier {after.tier}; {does}"
    is_new = not was_up or before is None or not before.is_online
    yield from _work(None if is_new else before, after, does)


def _farewell(state: NodeState) -> str:
    if state.doing == LINK_CLOSED:
        return f"it closed its link: {state.waiting_for}"
    return "it ended, or its connection broke"


def _moves(before: NodeState, after: NodeState, label: str) -> Iterator[tuple[str, str]]:
    for kind in ("job", "cell", "tier"):
        old, new = getattr(before, kind), getattr(after, kind)
        if old != new:
            yield f"{kind}_changed", f"from {old} to {new}"
    if after.label and label and after.label != label:
        yield "agent_changed", f"from {label} to {after.label}"


def _work(before: NodeState | None, after: NodeState, does: str) -> Iterator[tuple[str, str]]:
    """``before`` is None where it is not known: a vehicle trains on through a tunnel."""
    was, now = "" if before is None else doing_of(before), doing_of(after)
    if now == NOT_ELIGIBLE:
        rule = "" if before is None or was != NOT_ELIGIBLE else held_by(before.waiting_for)
        if held_by(after.waiting_for) != rule:
            yield NOT_ELIGIBLE, after.waiting_for
    elif now == TRAIN_FAILED:
        if was != TRAIN_FAILED or (before and before.waiting_for != after.waiting_for):
            yield TRAIN_FAILED, after.waiting_for.removeprefix(TRAIN_FAILED_PREFIX)
    elif before is None:
        return
    elif now in AT_WORK and was not in AT_WORK:
        yield "training_began", does
    elif now not in AT_WORK and was in AT_WORK:
        yield "training_stopped", does


class PendingChanges:
    """Changes until they are written down: of a node one of a kind, so that one that flaps costs
    no more than another.
    """

    def __init__(self) -> None:
        self.num_lost = 0
        """How many were dropped because too many waited."""
        self._waiting: dict[tuple[str, str], Change] = {}
        self._taken_at: dict[tuple[str, str], float] = {}

    def add(self, change: Change) -> None:
        """Take one, together with what waits of its kind."""
        key = (change.node, change.kind)
        before = self._waiting.pop(key, None)
        if before is None and len(self._waiting) >= PENDING_MAX:
            self.num_lost += 1
            return
        count = change.count + (before.count if before else 0)
        text = _CONTROL.sub(" ", change.text[:TEXT_CHARACTERS_MAX])
        self._waiting[key] = replace(change, text=text, count=count)

    def take(self, now: float) -> list[Change]:
        """Return what is due, the oldest first; of a kind that was taken a moment ago the rest
        waits, to be told together.
        """
        since = now - COALESCE_SECONDS
        self._taken_at = {key: at for key, at in self._taken_at.items() if at > since}
        due = [key for key in self._waiting if key not in self._taken_at]
        self._taken_at.update(dict.fromkeys(due, now))
        return sorted((self._waiting.pop(key) for key in due), key=lambda change: change.at)

    def put_back(self, change: Change) -> None:
        """Take one again that was taken and could not be written; it is due at once."""
        key = (change.node, change.kind)
        self._taken_at.pop(key, None)
        newer = self._waiting.get(key)
        if newer is None:
            self.add(change)
        else:
            self._waiting[key] = replace(newer, count=newer.count + change.count)
