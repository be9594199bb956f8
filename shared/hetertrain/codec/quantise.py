"""Numbers as levels of 8, 4, 2 or 1 bits, with one float32 scale per block of 256 values.

======  ===============  =========================================================================
bits    a level is       the scale of a block is
======  ===============  =========================================================================
8       -127 … 127       the largest magnitude / 127
4       -7 … 7           the largest magnitude / 7
2       -3, -1, 1 or 3   0.624 · the mean magnitude, the best spacing for Gaussian values (Max 1960)
1       -1 or 1          the mean magnitude, the best of all scales (Bernstein et al. 2018; as in
                         STC's ternary values, Sattler et al. 2019)
======  ===============  =========================================================================

Rounding is to nearest, half to even, and so deterministic: what it loses, error feedback sends
later, so nothing is gained by rounding at random.

In a block of m values, ``8 / bits`` levels share a byte: with ``stride = ceil(m · bits / 8)``, byte
j holds the values j, j + stride, j + 2 · stride …, the first in the lowest bits. So whole vectors
are packed and unpacked at once, not value by value. 8 and 4 bits are two's complement, 2 and 1 the
number of the level.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetertrain.codec import kernels
from hetertrain.codec.kernels import BLOCK_VALUES, LEVEL_MAX, RUN_VALUES, packed_bytes
from hetertrain.errors import PayloadError

SCALE_BYTES = 4
BITS = (8, 4, 2, 1)
FLOAT_BITS = 32
NOT_FINITE = "the delta holds NaN or infinity; lower the learning rate or skip the step"


def scale_count(num_values: int) -> int:
    """Count the blocks, and so the scales, of ``num_values`` values."""
    return -(-num_values // BLOCK_VALUES)


@dataclass(frozen=True, slots=True)
class Levels:
    """Values as they are coded; decoded a run at a time, never all at once unless asked."""

    size: int
    bits: int
    """8, 4, 2 or 1; or 32: ``code`` is float32 values, and there are no scales."""
    scales: NDArray[np.float32]
    """Shape (scale_count(size),)."""
    code: NDArray[np.uint8]

    def peak(self) -> float:
        """Return the largest magnitude that the scales allow."""
        if self.bits == FLOAT_BITS:
            values = self.code.view("<f4")
            return float(max(values.max(initial=0), -values.min(initial=0)))
        return float(self.scales.max(initial=0) * np.float32(LEVEL_MAX[self.bits]))

    def runs(self) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        """Return the values in order, each run with its place; valid until the next one."""
        scratch = np.empty(min(self.size, RUN_VALUES), np.float32)
        for start in range(0, self.size, RUN_VALUES):
            place = slice(start, min(start + RUN_VALUES, self.size))
            yield place, self._decode(place, scratch[: place.stop - start])

    def values(self) -> NDArray[np.float32]:
        """Return all, shape (size,), the same bits on every machine; the caller owns them."""
        values = np.empty(self.size, np.float32)
        for start in range(0, self.size, RUN_VALUES):
            place = slice(start, min(start + RUN_VALUES, self.size))
            self._decode(place, values[place])
        return values

    def _decode(self, place: slice, out: NDArray[np.float32]) -> NDArray[np.float32]:
        if self.bits == FLOAT_BITS:
            out[:] = self.code.view("<f4")[place]
            return out
        first, begin = place.start // BLOCK_VALUES, place.start * self.bits // 8
        scales = self.scales[first : first + scale_count(out.size)]
        code = self.code[begin : begin + packed_bytes(out.size, self.bits)]
        kernels.active.dequantise(scales, code, self.bits, out)
        return out


def quantise(values: NDArray[np.float32], bits: int) -> Levels:
    """Return the levels of contiguous ``values``.

    Raises:
        PayloadError: a value is NaN or infinite.
    """
    scales = np.empty(scale_count(values.size), np.float32)
    code = np.empty(packed_bytes(values.size, bits), np.uint8)
    for start in range(0, values.size, RUN_VALUES):
        run = values[start : start + RUN_VALUES]
        first, begin = start // BLOCK_VALUES, start * bits // 8
        kernels.active.quantise(
            run,
            bits,
            scales[first : first + scale_count(run.size)],
            code[begin : begin + packed_bytes(run.size, bits)],
        )
    if not np.isfinite(scales).all():
        raise PayloadError(NOT_FINITE)
    return Levels(values.size, bits, scales, code)


def distortion(values: NDArray[np.float32], bits: int) -> float:
    """Return the squared error of ``values`` after ``bits`` a value."""
    lost = 0.0
    for place, decoded in quantise(values, bits).runs():
        wide = values[place].astype(np.float64) - decoded
        lost += float(np.square(wide, out=wide).sum())
    return lost
