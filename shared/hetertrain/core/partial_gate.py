"""The admission gate for a gateway's partial: nobody sees its updates any more, so it is held to
what sums of admissible ones can be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from hetertrain.codec import FRACTION_BITS
from hetertrain.core.gate import EXAMPLES_MAX, STEPS_MAX, Gate, Reason
from hetertrain.core.policy import Statistics, WeightPolicy
from hetertrain.core.update import DELTA_MAX, Contribution, Group, Partial

UNIT_MAX = 16.0 * EXAMPLES_MAX
"""Four times the most examples, times the largest factor of steps."""

Refusal = tuple[Reason, str]
"""Why a partial cannot be merged, as a code and in words."""


def refuse_partial(
    partial: Partial,
    gate: Gate,
    weights: WeightPolicy,
    version: int,
    statistics: Mapping[int, Statistics],
    into: Partial,
) -> Refusal | None:
    """Return why a partial cannot be merged ``into`` the open version; None where it can.

    ``version`` is the current one; ``statistics`` are those of the versions that are remembered.
    """
    bases = Counter(item.base_version for item in partial.contributions.values())
    if not bases or bases.keys() != partial.groups.keys():
        return Reason.PARTIAL, "groups and contributions do not match"
    if max(bases) > version:
        return Reason.BASE_AHEAD, f"base version {max(bases)} is ahead of {version}"
    if partial.integers is None or partial.integers.size != gate.integer_size:
        return Reason.LAYOUT, "its integer buffers do not fit the layout"
    norm_max = 1.01 * DELTA_MAX * gate.size**0.5
    for item in partial.contributions.values():
        refusal = _refuse_contribution(item, norm_max)
        if refusal is not None:
            return refusal
    for base, group in partial.groups.items():
        refusal = _refuse_unit(base, group, weights, statistics.get(base), into.groups.get(base))
        refusal = refusal or _refuse_sums(base, group, gate.size, bases[base])
        if refusal is not None:
            return refusal
    return None


def _refuse_contribution(item: Contribution, norm_max: float) -> Refusal | None:
    if item.examples > EXAMPLES_MAX or item.steps > STEPS_MAX:
        return Reason.COUNTS, f"{item.examples} examples, {item.steps} steps of {item.node}"
    if not 0 <= item.norm <= norm_max:
        return Reason.NORM, f"norm {item.norm:g} of {item.node} is outside 0 to {norm_max:g}"
    return None


def _refuse_unit(
    base: int,
    group: Group,
    weights: WeightPolicy,
    known: Statistics | None,
    merged: Group | None,
) -> Refusal | None:
    """Insist on the unit that the statistics of the base give; one that is forgotten must be
    possible, and the same for all.
    """
    is_known = known is None or group.unit == weights.unit(known)
    is_same = merged is None or group.unit == merged.unit
    if is_known and is_same and 0 < group.unit <= UNIT_MAX:
        return None
    return Reason.PARTIAL, f"a unit of {group.unit:g} is not that of base version {base}"


def _refuse_sums(base: int, group: Group, size: int, num_updates: int) -> Refusal | None:
    if group.sums.shape != (size,):
        return Reason.PARTIAL, f"sums of {group.sums.shape} do not fit the layout"
    limit = num_updates * int(DELTA_MAX) << FRACTION_BITS
    if max(int(group.sums.max()), -int(group.sums.min())) > limit:
        return Reason.TOO_LARGE, f"a sum of base {base} is over {num_updates} times {DELTA_MAX:g}"
    return None
