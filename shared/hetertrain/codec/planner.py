"""Which form keeps the most energy within a budget: estimated from a sample of the delta.

All forms are tried on the sample as they would be on the whole: the values that a budget of this
share could keep are quantised, and what is lost is added up. Indices are counted at their entropy.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import log2

import numpy as np
from numpy.typing import NDArray

from hetertrain.codec.kernels import packed_bytes
from hetertrain.codec.payload import FLOAT_BYTES, Form
from hetertrain.codec.quantise import BITS, FLOAT_BITS, SCALE_BYTES, distortion, scale_count

_SPARSE_BITS = (1, 4, 8)
"""Two bits are left out: where only large values are kept, they gain nothing over their sign."""
_RICE_OVERHEAD = 1.005
_SIGNS_SHARE_MAX = 0.5
"""Signs of more values than this lose more than they add: the rest is nearer to zero than to the
mean magnitude (ternary values, whose best threshold leaves 54 % of Gaussian ones)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A form, and the bits of a level."""

    form: Form
    bits: int
    count: int
    """How many values of a sparse form about fit."""
    most: int
    """How many it keeps at most."""


def plans(
    sampled: NDArray[np.float32], size: int, body_bytes: int, choice: tuple[int, ...]
) -> list[Plan]:
    """Say how a vector of ``size``, of which ``sampled`` is a part, can be coded in ``body_bytes``
    with one ``choice`` of bits: the best first, at least one.
    """
    if size * FLOAT_BYTES <= body_bytes:
        return [Plan(Form.DENSE, FLOAT_BITS, size, size)]
    dense = next((bits for bits in choice if dense_bytes(size, bits) <= body_bytes), None)
    if dense is not None and (dense == BITS[0] or len(choice) == 1):
        return [Plan(Form.DENSE, dense, size, size)]
    magnitudes = np.abs(sampled)
    ascending = np.sort(magnitudes)
    energies = np.concatenate(([0.0], np.cumsum(np.square(ascending, dtype=np.float64))))
    num_zeros = int(np.searchsorted(ascending, 0, side="right"))
    found: list[tuple[float, Plan]] = []
    for bits in choice if len(choice) == 1 else _SPARSE_BITS:
        most = min(_most(bits, sampled.size), sampled.size - num_zeros)
        # Where it would not be shorter, dense is as good, if its levels have a zero.
        limit = body_bytes if bits == 1 else min(body_bytes, dense_bytes(size, bits) - 1)
        num_kept = _affordable(sampled.size, most, size, bits, limit)
        kept = sampled[magnitudes >= ascending[-num_kept]] if num_kept else sampled[:0]
        lost = energies[sampled.size - num_kept] + distortion(kept, bits)
        count = max(1, num_kept * size // max(sampled.size, 1))
        found.append((lost, Plan(Form.SPARSE, bits, count, _most(bits, size))))
    if dense is not None and num_zeros < sampled.size:
        found.append((distortion(sampled, dense), Plan(Form.DENSE, dense, size, size)))
    # Of equals the one with fewer bits, and sparse before dense: zeros need no level.
    return [plan for _, plan in sorted(found, key=lambda each: each[0])]


def dense_bytes(size: int, bits: int) -> int:
    """Return the length of the body of a dense form."""
    return scale_count(size) * SCALE_BYTES + packed_bytes(size, bits)


def _most(bits: int, size: int) -> int:
    return size if bits > 1 else max(1, int(_SIGNS_SHARE_MAX * size))


def _affordable(sample_size: int, most: int, size: int, bits: int, body_bytes: int) -> int:
    """Return how many of the sample, up to ``most``, a budget for the whole vector could keep."""

    def cost(num_kept: int) -> int:
        share = num_kept / sample_size
        count = share * size
        entropy = -log2(share) * share - log2(1 - share) * (1 - share) if share < 1 else 0.0
        scales = scale_count(round(count)) * SCALE_BYTES
        return int(size * entropy * _RICE_OVERHEAD / 8 + count * bits / 8) + scales

    return bisect_right(range(1, most + 1), body_bytes, key=cost)
