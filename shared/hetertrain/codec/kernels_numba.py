"""The loops of ``kernels`` as machine code, by numba: the same bytes, faster.

Only with the extra ``fast``: numba takes 200 MB of disk, and seconds to compile once. What makes
these fast: magnitudes compared as signed integers, which processors do many at a time, and no
branch in an inner loop. ``fastmath`` stays off, so that no operation is reordered or fused.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from hetertrain.codec.kernels import (
    BLOCK_VALUES,
    LEVEL_MAX,
    MAGNITUDE_BITS,
    RUN_VALUES,
    SCALE_MAX,
    SPACING,
)

_compiled = numba.njit(cache=True, nogil=True)
_SIGNED_MAGNITUDE_BITS = np.int32(MAGNITUDE_BITS)


class NumbaKernels:
    """The loops as machine code, compiled at their first use."""

    def above(self, bits: NDArray[np.uint32], threshold: np.uint32) -> NDArray[np.int64]:
        """See ``Kernels``."""
        # Room for all; the system gives memory to what is written only.
        places = np.empty(bits.size + 8, np.int64)
        return places[: _above(bits, threshold, places)].copy()

    def quantise(
        self,
        values: NDArray[np.float32],
        bits: int,
        scales: NDArray[np.float32],
        code: NDArray[np.uint8],
    ) -> None:
        """See ``Kernels``."""
        if bits >= 4:
            _scales_of_peaks(values.view(np.int32), np.float32(LEVEL_MAX[bits]), scales)
        else:
            _scales_of_means(values, SPACING[bits], scales)
        _quantise(values, bits, LEVEL_MAX[bits], scales, code)

    def dequantise(
        self,
        scales: NDArray[np.float32],
        code: NDArray[np.uint8],
        bits: int,
        values: NDArray[np.float32],
    ) -> None:
        """See ``Kernels``."""
        _dequantise(scales, code, bits, values)

    def add(
        self,
        values: NDArray[np.float32],
        factor: float,
        sums: NDArray[np.int64],
        indices: NDArray[np.int64] | None,
    ) -> None:
        """See ``Kernels``."""
        if indices is None:
            _add(values, factor, sums)
        else:
            _add_at(values, factor, sums, indices)

    def ones(self, code: NDArray[np.uint8]) -> NDArray[np.int64]:
        """See ``Kernels``."""
        places = np.empty(8 * code.size + 1, np.int64)
        return places[: _ones(code, places)].copy()


@_compiled
def _above(bits: NDArray[np.uint32], threshold: np.uint32, places: NDArray[np.int64]) -> int:
    """Write where magnitudes are large, and return how many are; look at eight together first."""
    found = 0
    flags = np.empty(RUN_VALUES, np.uint8)
    words = flags.view(np.uint64)
    for start in range(0, bits.size, RUN_VALUES):
        run = bits[start : start + RUN_VALUES]
        num_words = (run.size + 7) // 8
        flags[run.size : 8 * num_words] = 0
        for i in range(run.size):
            flags[i] = (run[i] & MAGNITUDE_BITS) >= threshold
        for word in range(num_words):
            if words[word]:
                for i in range(8 * word, 8 * word + 8):
                    places[found] = start + i
                    found += flags[i]
    return found


@_compiled
def _scales_of_peaks(
    bits: NDArray[np.int32], level_max: np.float32, scales: NDArray[np.float32]
) -> None:
    peaks = scales.view(np.int32)
    for block in range(scales.size):
        peak = np.int32(0)
        rows = bits[block * BLOCK_VALUES : (block + 1) * BLOCK_VALUES]
        for i in range(rows.size):
            peak = max(peak, np.int32(rows[i] & _SIGNED_MAGNITUDE_BITS))
        peaks[block] = peak
    for block in range(scales.size):
        scale = scales[block] / level_max
        scales[block] = SCALE_MAX if SCALE_MAX < scale < np.inf else scale


@_compiled
def _scales_of_means(
    values: NDArray[np.float32], spacing: float, scales: NDArray[np.float32]
) -> None:
    sums = np.empty(BLOCK_VALUES, np.float64)
    for block in range(scales.size):
        rows = values[block * BLOCK_VALUES : (block + 1) * BLOCK_VALUES]
        sums[rows.size :] = 0.0
        for i in range(rows.size):
            sums[i] = abs(np.float64(rows[i]))
        half = BLOCK_VALUES // 2
        while half:
            for i in range(half):
                sums[i] += sums[i + half]
            half //= 2
        scales[block] = min(np.float32(sums[0] / rows.size * spacing), SCALE_MAX)


@_compiled
def _quantise(
    values: NDArray[np.float32],
    bits: int,
    level_max: int,
    scales: NDArray[np.float32],
    code: NDArray[np.uint8],
) -> None:
    limit = np.float32(level_max)
    mask = (1 << bits) - 1
    levels = np.empty(BLOCK_VALUES, np.uint8)
    for block in range(scales.size):
        rows = values[block * BLOCK_VALUES : (block + 1) * BLOCK_VALUES]
        start = block * BLOCK_VALUES * bits // 8
        width = (rows.size * bits + 7) // 8
        packed = code[start : start + width]
        scale = scales[block]
        divisor = scale if scale > 0 else np.float32(1)
        if bits == 1:
            for i in range(rows.size):
                levels[i] = rows[i] > 0
        elif bits == 2:
            for i in range(rows.size):
                ratio = rows[i] / divisor
                levels[i] = np.uint8(ratio > -2) + np.uint8(ratio > 0) + np.uint8(ratio > 2)
        else:
            for i in range(rows.size):
                ratio = np.rint(rows[i] / divisor)
                ratio = max(min(ratio, limit), -limit)
                levels[i] = np.int8(ratio) & mask
        for j in range(width):
            packed[j] = levels[j]
        for place in range(1, 8 // bits):
            begin = place * width
            for j in range(min(width, rows.size - begin)):
                packed[j] |= levels[begin + j] << (place * bits)


@_compiled
def _dequantise(
    scales: NDArray[np.float32],
    code: NDArray[np.uint8],
    bits: int,
    values: NDArray[np.float32],
) -> None:
    mask = (1 << bits) - 1
    for block in range(scales.size):
        rows = values[block * BLOCK_VALUES : (block + 1) * BLOCK_VALUES]
        start = block * BLOCK_VALUES * bits // 8
        width = (rows.size * bits + 7) // 8
        packed = code[start : start + width]
        scale = scales[block]
        if bits == 8:
            for j in range(width):
                rows[j] = np.float32(np.int8(packed[j])) * scale
            continue
        for place in range(8 // bits):
            begin = place * width
            shift = place * bits
            for j in range(min(width, rows.size - begin)):
                level = np.int32((packed[j] >> shift) & mask)
                level = (level ^ 8) - 8 if bits == 4 else 2 * level - mask
                rows[begin + j] = np.float32(level) * scale


@_compiled
def _add(values: NDArray[np.float32], factor: float, sums: NDArray[np.int64]) -> None:
    for i in range(values.size):
        sums[i] += np.int64(np.rint(np.float64(values[i]) * factor))


@_compiled
def _add_at(
    values: NDArray[np.float32], factor: float, sums: NDArray[np.int64], indices: NDArray[np.int64]
) -> None:
    for i in range(values.size):
        sums[indices[i]] += np.int64(np.rint(np.float64(values[i]) * factor))


@_compiled
def _ones(code: NDArray[np.uint8], places: NDArray[np.int64]) -> int:
    """Write each place, and overwrite it where the bit was not set: no branch to guess wrong."""
    found = 0
    for i in range(code.size):
        for bit in range(8):
            places[found] = 8 * i + bit
            found += (code[i] >> bit) & 1
    return found
