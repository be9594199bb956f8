"""Which updates may be merged: the admission gate, and the memory of what was merged already.

The same gate stands wherever updates are merged, at a gateway and in the cloud. It returns a
verdict with a reason for each update, good or bad; nothing that a node sends can raise past it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from hetertrain import codec
from hetertrain.core.policy import Statistics
from hetertrain.core.update import DELTA_MAX, Update
from hetertrain.errors import NonFiniteError, PayloadError

NORM_LIMIT_MEDIANS = 30.0
"""A delta's norm may be this many times the running median (speeds differ by 10 and more, so do
honest norms).
"""
EXAMPLES_MAX = 1 << 40
STEPS_MAX = 1 << 32
RUNS_PER_NODE = 256


class Outcome(StrEnum):
    """What became of an update or partial."""

    MERGED = "merged"
    DUPLICATE = "duplicate"
    REJECTED = "rejected"
    """Not merged, through no fault in it: too old, or of another model. The node may try again with
    new work.
    """
    QUARANTINED = "quarantined"
    """Not merged, because it is malformed or implausible."""


class Reason(StrEnum):
    """Why an update or partial was not merged; stable, for programs."""

    LAYOUT = "layout"
    LINEAGE = "lineage"
    COUNTS = "counts"
    BASE_AHEAD = "base_ahead"
    LAG = "lag"
    PAYLOAD = "payload"
    NON_FINITE = "non_finite"
    TOO_LARGE = "too_large"
    NORM = "norm"
    FULL = "full"
    KNOWN = "known"
    PARTIAL = "partial"
    CONTENT = "content"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a refusal rests on."""

    code: Reason
    base_version: int | None = None
    measured: float | None = None
    """What was over a limit; None: nothing was, or it is not a number."""
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The application's acknowledgement of (node, seq)."""

    node: str
    seq: int
    outcome: Outcome
    reason: str = ""
    known: tuple[tuple[str, int], ...] = ()
    """For a refused partial: the contributions that were merged before."""
    hold_until_clock: int = 0
    """The node is too far ahead: it waits for a version whose slowest clock is at least this."""
    finding: Finding | None = None
    """Of a refusal, for those who watch the aggregator; it does not travel."""
    refused: tuple[Verdict, ...] = ()
    """Of a bundle that was merged: its updates that were not, for those who watch."""


@dataclass(slots=True)
class Seen:
    """The (node, seq) pairs that were merged: per node a floor below which all count as seen, and
    the runs of numbers above it.

    A node counts without gaps, so what it sent one gateway in a day without the cloud is one run,
    and another's work of it between leaves just two: late work is told from repeated work.
    """

    floors: dict[str, int] = field(default_factory=dict)
    above: dict[str, list[list[int]]] = field(default_factory=dict)
    """By node: [first, last] of each run, in order, with a gap between any two."""

    def __contains__(self, key: tuple[str, int]) -> bool:
        node, seq = key
        if seq <= self.floors.get(node, -1):
            return True
        runs = self.above.get(node, ())
        place = bisect_right(runs, seq, key=_first)
        return place > 0 and seq <= runs[place - 1][1]

    def add(self, key: tuple[str, int]) -> None:
        """Remember one pair; the oldest runs beyond ``RUNS_PER_NODE`` sink below the floor."""
        if key in self:
            return
        node, seq = key
        runs = self.above.setdefault(node, [])
        place = bisect_right(runs, seq, key=_first)
        continues = place > 0 and runs[place - 1][1] == seq - 1
        leads_on = place < len(runs) and runs[place][0] == seq + 1
        if continues and leads_on:
            runs[place - 1][1] = runs.pop(place)[1]
        elif continues:
            runs[place - 1][1] = seq
        elif leads_on:
            runs[place][0] = seq
        else:
            runs.insert(place, [seq, seq])
        if len(runs) > RUNS_PER_NODE:
            self.floors[node] = runs.pop(0)[1]

    def to_plain(self) -> dict[str, list[int | list[int]]]:
        """Return as plain data: per node the floor, then the runs above it."""
        return {
            node: [self.floors.get(node, -1), *([*run] for run in runs)]
            for node, runs in self.above.items()
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, list[int | list[int]]]) -> Seen:
        """Rebuild from ``to_plain``; a release before wrote single numbers in place of runs."""
        seen = cls()
        for node, (floor, *runs) in plain.items():
            assert isinstance(floor, int), "the floor is a number"
            seen.floors[node], seen.above[node] = floor, []
            for run in runs:
                if isinstance(run, int):
                    seen.add((node, run))
                else:
                    seen.above[node].append([*run])
        return seen


def _first(run: list[int]) -> int:
    return run[0]


@dataclass(frozen=True, slots=True)
class Gate:
    """Admits updates of one layout and one lineage."""

    layout: str
    size: int
    integer_size: int
    max_lag: int
    lineage: str = ""
    """Names the run of versions: a job that starts anew, or from an older version, begins another
    one, in which the same numbers mean other models."""

    def examine(
        self,
        update: Update,
        version: int,
        statistics: Mapping[int, Statistics],
        seen: Seen,
    ) -> codec.Decoded | Verdict:
        """Return the decoded delta of an admissible update, or the verdict that refuses it.

        ``version`` is the current one; ``statistics`` are those of the versions that an update may
        start from.
        """
        refusal = self._refuse_header(update, version, statistics, seen)
        if refusal is not None:
            return refusal
        try:
            delta = codec.parse(update.payload, self.size)
        except NonFiniteError as error:
            return _quarantine(update, f"payload: {error}", Reason.NON_FINITE)
        except PayloadError as error:
            return _quarantine(update, f"payload: {error}", Reason.PAYLOAD)
        return _implausible(update, delta, statistics[update.base_version]) or delta

    def _refuse_header(
        self, update: Update, version: int, statistics: Mapping[int, Statistics], seen: Seen
    ) -> Verdict | None:
        base, lag = update.base_version, version - update.base_version
        if (update.node, update.seq) in seen:
            return Verdict(update.node, update.seq, Outcome.DUPLICATE)
        if update.layout != self.layout or len(update.integers) != self.integer_size:
            reason = f"layout {update.layout} is not the job's {self.layout}"
            return _reject(update, reason, Reason.LAYOUT)
        if update.lineage != self.lineage:
            reason = f"base {update.lineage} is not of this run, {self.lineage}"
            return _reject(update, reason, Reason.LINEAGE)
        if not 0 < update.examples <= EXAMPLES_MAX or not 0 < update.steps <= STEPS_MAX:
            reason = "examples and steps must be positive and plausible"
            return _quarantine(update, reason, Reason.COUNTS)
        if lag < 0:
            return _reject(update, f"base version {base} is ahead of {version}", Reason.BASE_AHEAD)
        if lag > self.max_lag or base not in statistics:
            reason = f"lag {lag} is over {self.max_lag}"
            return _reject(update, reason, Reason.LAG, lag, self.max_lag)
        return None


def _refuse(
    outcome: Outcome,
    update: Update,
    reason: str,
    code: Reason,
    measured: float | None = None,
    limit: float | None = None,
) -> Verdict:
    finding = Finding(code, update.base_version, measured, limit)
    return Verdict(update.node, update.seq, outcome, reason, finding=finding)


_reject = partial(_refuse, Outcome.REJECTED)
_quarantine = partial(_refuse, Outcome.QUARANTINED)


def _implausible(update: Update, delta: codec.Decoded, statistics: Statistics) -> Verdict | None:
    peak = delta.peak()
    if not peak <= DELTA_MAX:
        reason = f"a delta of {peak:g} is over {DELTA_MAX:g}, or not finite"
        return _quarantine(update, reason, Reason.TOO_LARGE, peak, DELTA_MAX)
    limit = NORM_LIMIT_MEDIANS * statistics.norm_median
    norm = delta.norm()
    if limit > 0 and not norm <= limit:
        reason = f"norm {norm:g} is over {limit:g}, {NORM_LIMIT_MEDIANS:g} times the usual"
        return _quarantine(update, reason, Reason.NORM, norm, limit)
    return None
