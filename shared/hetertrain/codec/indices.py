"""Strictly increasing indices near their entropy: Golomb-Rice codes of the gaps between them.

A gap is how many places are skipped since the index before (the first counts from the start), so
indices that decode are strictly increasing by construction. Rice's code of a gap with parameter b:
``gap >> b`` in unary (so many zeros, then a one), and the low b bits as they are (Golomb 1966; Rice
and Plaunt 1971). Every group of 1024 gaps has its own b, the best of three, because density varies
by layer. At 1 % density this takes 1.014 bytes an index, where the entropy is 1.010.

Laid out so that whole groups are coded at once, not bit by bit::

    parameters (one byte a group) · low bits, group by group, b planes of one bit a gap · unary bits

All bits go into bytes from the lowest up. Planes and the unary bits each end at a whole byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetertrain.codec import kernels
from hetertrain.errors import PayloadError

SIZE_MAX = (1 << 31) - 1
"""Vectors are at most this long: a gap fits 31 bits, and sums of gaps cannot wrap in int64."""

GROUP_GAPS = 1024
PARAMETER_MAX = 30
_HALF_LIFE = 0.6931
"""ln 2: gaps at random have their best parameter near log2(ln 2 · mean)."""


@dataclass(frozen=True, slots=True)
class GapCode:
    """Gaps, and the parameters by which they take the fewest bits."""

    gaps: NDArray[np.int32]
    """Shape (groups, GROUP_GAPS), zeros behind the last."""
    count: int
    parameters: NDArray[np.uint8]
    """Shape (groups,)."""
    unary_bits: int

    @property
    def num_bytes(self) -> int:
        """How many bytes ``encode_gaps`` takes."""
        low_bytes = int(_plane_bytes(self.count) @ self.parameters.astype(np.int64))
        return self.parameters.size + low_bytes + -(-self.unary_bits // 8)


def plan_gaps(indices: NDArray[np.int64]) -> GapCode:
    """Choose the parameters for strictly increasing ``indices`` in 0 … ``SIZE_MAX`` - 1."""
    num_groups = -(-indices.size // GROUP_GAPS)
    gaps = np.zeros((num_groups, GROUP_GAPS), np.int32)
    flat = gaps.reshape(-1)[: indices.size]
    if indices.size:
        flat[0] = indices[0]
        np.subtract(indices[1:], indices[:-1] + 1, out=flat[1:], casting="same_kind")
    counts = np.full(num_groups, GROUP_GAPS, np.int64)
    counts[-1:] -= num_groups * GROUP_GAPS - indices.size
    means = gaps.sum(axis=1, dtype=np.int64) / counts
    near = np.log2(np.maximum(means * _HALF_LIFE, 1.0)).astype(np.int64)
    best_bits = np.full(num_groups, np.iinfo(np.int64).max)
    best = np.zeros(num_groups, np.int64)
    for shift in (-1, 0, 1):
        parameters = np.clip(near + shift, 0, PARAMETER_MAX)
        quotients = gaps >> parameters.astype(np.int32)[:, np.newaxis]
        bits = quotients.sum(axis=1, dtype=np.int64) + counts * (1 + parameters)
        is_better = bits < best_bits
        best_bits[is_better] = bits[is_better]
        best[is_better] = parameters[is_better]
    unary_bits = int((best_bits - counts * best).sum())
    return GapCode(gaps, indices.size, best.astype(np.uint8), unary_bits)


def encode_gaps(code: GapCode) -> bytes:
    """Write ``code`` in ``code.num_bytes`` bytes."""
    shifts = code.parameters.astype(np.int32)[:, np.newaxis]
    quotients = (code.gaps >> shifts).reshape(-1)[: code.count]
    unary = np.zeros(code.unary_bits, np.uint8)
    unary[np.cumsum(quotients + np.int64(1)) - 1] = 1
    sizes = _plane_bytes(code.count) * code.parameters
    low = np.empty(int(sizes.sum()), np.uint8)
    starts = np.cumsum(sizes) - sizes
    for groups, parameter, num_gaps in _alike(code.parameters, code.count):
        width = -(-num_gaps // 8)
        rows = code.gaps[groups, :num_gaps]
        packed = np.empty((len(groups), parameter, width), np.uint8)
        for first in range(0, parameter, 8):
            octets = (rows >> first).astype(np.uint8)
            for place in range(first, min(first + 8, parameter)):
                plane = octets & np.uint8(1 << (place - first))
                packed[:, place] = np.packbits(plane, axis=1, bitorder="little")
        places = starts[groups, np.newaxis] + np.arange(parameter * width)
        low[places] = packed.reshape(len(groups), -1)
    unary_code = np.packbits(unary, bitorder="little")
    return code.parameters.tobytes() + low.tobytes() + unary_code.tobytes()


def decode_gaps(code: NDArray[np.uint8], count: int, size: int) -> NDArray[np.int64]:
    """Return the ``count`` indices of ``code``, strictly increasing and below ``size``.

    Time and memory are in proportion to the length of ``code``.

    Raises:
        PayloadError: ``code`` is shorter or longer than ``count`` gaps, a parameter is too large,
            or an index is outside the vector.
    """
    num_groups = -(-count // GROUP_GAPS)
    parameters = code[:num_groups]
    if parameters.size < num_groups or parameters.max(initial=0) > PARAMETER_MAX:
        raise PayloadError(f"expected {num_groups} parameters of at most {PARAMETER_MAX}")
    sizes = _plane_bytes(count) * parameters
    unary_start = num_groups + int(sizes.sum())
    if unary_start > code.size:
        raise PayloadError(f"the low bits of {count} gaps are cut off")
    quotients = _read_unary(code[unary_start:], count)
    gaps = np.zeros((num_groups, GROUP_GAPS), np.int64)
    gaps.reshape(-1)[:count] = quotients
    # Each gap alone, so that neither a shift nor their sum can wrap round to a valid index.
    if np.any(gaps.max(axis=1, initial=0) > size >> parameters.astype(np.int64)):
        raise PayloadError(f"a gap reaches outside the vector of {size}")
    gaps <<= parameters.astype(np.int64)[:, np.newaxis]
    starts = num_groups + np.cumsum(sizes) - sizes
    for groups, parameter, num_gaps in _alike(parameters, count):
        width = -(-num_gaps // 8)
        places = starts[groups, np.newaxis] + np.arange(parameter * width)
        packed = code[places].reshape(len(groups), parameter, width)
        planes = np.unpackbits(packed, axis=2, count=num_gaps, bitorder="little")
        low = np.zeros((len(groups), num_gaps), np.int64)
        for first in range(0, parameter, 8):
            octets = planes[:, first].copy()
            for place in range(first + 1, min(first + 8, parameter)):
                octets |= planes[:, place] << np.uint8(place - first)
            low |= octets.astype(np.int64) << first
        gaps[groups, :num_gaps] |= low
    gaps += 1
    indices = np.cumsum(gaps.reshape(-1)[:count])
    indices -= 1
    if count and indices[-1] >= size:
        raise PayloadError(f"index {indices[-1]} is outside the vector of {size}")
    return indices


def _read_unary(code: NDArray[np.uint8], count: int) -> NDArray[np.int64]:
    """Return how many zeros stand before each of ``count`` ones."""
    ends = kernels.active.ones(code)
    if ends.size != count or (ends[-1] // 8 + 1 if count else 0) != code.size:
        raise PayloadError(f"expected {count} whole gaps, found {ends.size} in {code.size} bytes")
    return np.diff(ends, prepend=-1) - 1


def _plane_bytes(count: int) -> NDArray[np.int64]:
    """Return the bytes of one plane of each group."""
    num_groups = -(-count // GROUP_GAPS)
    widths = np.full(num_groups, GROUP_GAPS // 8, np.int64)
    widths[-1:] = -(-(count - (num_groups - 1) * GROUP_GAPS) // 8)
    return widths


def _alike(parameters: NDArray[np.uint8], count: int) -> list[tuple[NDArray[np.int64], int, int]]:
    """Return the groups that can be coded together: their numbers, parameter, and gaps in each."""
    last = parameters.size - 1
    num_last = count - last * GROUP_GAPS
    whole = last if num_last < GROUP_GAPS else last + 1
    alike = [
        (np.flatnonzero(parameters[:whole] == parameter), int(parameter), GROUP_GAPS)
        for parameter in np.unique(parameters[:whole])
    ]
    if whole == last and count:
        alike.append((np.array([last]), int(parameters[last]), num_last))
    return [group for group in alike if group[1]]
