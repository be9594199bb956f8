"""The reader of payloads of version 1, which nodes of the release before still send.

After the same twelve bytes of header (version u8 · kind u8 · reserved u16 · size u32 · count u32)::

    0  values (count x float32)                                         count = size
    1  scales (float32) · levels (count x int8)                         count = size
    2  scales (float32) · levels (count x int8) · gaps (count x LEB128)

LEB128: seven bits a byte, the top bit says "go on" (DWARF 5, section 7.6). All loops run over the
at most five bytes of a gap, never over the gaps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetertrain.errors import PayloadError

GAP_BYTES_MAX = 5


def decode_leb128(code: NDArray[np.uint8], count: int, size: int) -> NDArray[np.int64]:
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
    gaps = code[ends].astype(np.int64)
    longer = np.flatnonzero(lengths > 1)
    for back in range(1, GAP_BYTES_MAX):
        gaps[longer] = (gaps[longer] << 7) | (code[ends[longer] - back] & 0x7F)
        longer = longer[lengths[longer] > back + 1]
    # Each gap alone, so that their sum cannot wrap round to a valid index.
    if gaps.max() >= size:
        raise PayloadError(f"a gap reaches outside the vector of {size}")
    indices = np.cumsum(gaps + 1) - 1
    if indices[-1] >= size:
        raise PayloadError(f"index {indices[-1]} is outside the vector of {size}")
    return indices
