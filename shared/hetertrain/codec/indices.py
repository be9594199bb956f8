"""Strictly increasing indices as gaps in LEB128: seven bits a byte, the top bit says "go on".

A gap is how many places are skipped since the index before (the first counts from the start), so
indices that decode are strictly increasing by construction. Gaps under 128, the rule above 1 %
density, cost one byte. LEB128: DWARF 5, section 7.6. All loops run over the at most five bytes of
a gap, never over the gaps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetertrain.errors import PayloadError

SIZE_MAX = (1 << 31) - 1
"""Vectors are at most this long: a gap fits five bytes, and sums of gaps cannot wrap in int64."""

GAP_BYTES_MAX = 5


def gap_bytes(indices: NDArray[np.int64]) -> int:
    """Return how many bytes ``encode_indices`` takes."""
    num_bytes, gaps = 0, _gaps(indices)
    while gaps.size:
        num_bytes += gaps.size
        gaps = gaps[gaps > 0x7F] >> 7
    return num_bytes


def encode_indices(indices: NDArray[np.int64]) -> bytes:
    """Code strictly increasing ``indices`` in 0 … ``SIZE_MAX`` - 1."""
    gaps = _gaps(indices)
    lengths = np.ones(gaps.size, np.int64)
    for place in range(1, GAP_BYTES_MAX):
        lengths += (gaps >> (7 * place)) > 0
    ends = np.cumsum(lengths)
    code = np.empty(int(ends[-1]) if ends.size else 0, np.uint8)
    positions = ends - lengths
    while gaps.size:
        rest = gaps >> 7
        has_more = rest > 0
        code[positions] = (gaps & 0x7F) | (has_more << 7)
        gaps, positions = rest[has_more], positions[has_more] + 1
    return code.tobytes()


def decode_indices(code: NDArray[np.uint8], count: int, size: int) -> NDArray[np.int64]:
    """Return the ``count`` indices of ``code``, strictly increasing and below ``size``.

    Raises:
        PayloadError: there are more or fewer gaps, one is cut off, too long or not in its shortest
            form, or an index is outside the vector.
    """
    ends = np.flatnonzero(code < 0x80)
    if ends.size != count or (code.size and code[-1] >= 0x80):
        raise PayloadError(f"expected {count} whole gaps, found {ends.size} in {code.size} bytes")
    if not count:
        return np.empty(0, np.int64)
    lengths = np.diff(ends, prepend=-1)
    if lengths.max() > GAP_BYTES_MAX:
        raise PayloadError(f"a gap takes over {GAP_BYTES_MAX} bytes")
    if np.any((code[ends] == 0) & (lengths > 1)):
        raise PayloadError("a gap is not in its shortest form")
    gaps = _read_gaps(code, ends, lengths)
    # Each gap alone, so that their sum cannot wrap round to a valid index.
    if gaps.max() >= size:
        raise PayloadError(f"a gap reaches outside the vector of {size}")
    indices = np.cumsum(gaps + 1) - 1
    if indices[-1] >= size:
        raise PayloadError(f"index {indices[-1]} is outside the vector of {size}")
    return indices


def _read_gaps(
    code: NDArray[np.uint8], ends: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.int64]:
    gaps = code[ends].astype(np.int64)
    longer = np.flatnonzero(lengths > 1)
    for back in range(1, GAP_BYTES_MAX):
        gaps[longer] = (gaps[longer] << 7) | (code[ends[longer] - back] & 0x7F)
        longer = longer[lengths[longer] > back + 1]
    return gaps


def _gaps(indices: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.diff(indices, prepend=-1) - 1
