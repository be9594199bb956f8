"""The inner loops of the codec, over a run of 64 Ki values at a time, to stay in the cache.

Written twice: here with numpy, and in ``kernels_numba`` as machine code, twice as fast for dense
forms, which ``codec.accelerate`` turns on where numba is installed (``pip install
hetertrain[fast]``). Both give the same bytes, on every machine: each operation is IEEE's, sums are
added up in a fixed order (halves on halves), and nothing is fused.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

BLOCK_VALUES = 256
"""Values that share a scale."""
RUN_VALUES = 1 << 16
"""The most values that a kernel is given, a multiple of ``BLOCK_VALUES``."""

LEVEL_MAX = {8: 127, 4: 7, 2: 3, 1: 1}
SPACING = {2: 0.624, 1: 1.0}
"""Scale over mean magnitude, of the levels that have no zero."""

SCALE_MAX = np.nextafter(np.finfo(np.float32).max / np.float32(128), np.float32(0))
"""The largest scale whose largest level is still a finite float32."""
MAGNITUDE_BITS = np.uint32(0x7FFF_FFFF)


class Kernels(Protocol):
    """What both modules offer."""

    def above(self, bits: NDArray[np.uint32], threshold: np.uint32) -> NDArray[np.int64]:
        """Return where a magnitude, as the bits of a float32, is ``threshold`` or more."""

    def quantise(
        self,
        values: NDArray[np.float32],
        bits: int,
        scales: NDArray[np.float32],
        code: NDArray[np.uint8],
    ) -> None:
        """Write the scales and packed levels; where a value is not finite, nor is its scale."""

    def dequantise(
        self,
        scales: NDArray[np.float32],
        code: NDArray[np.uint8],
        bits: int,
        values: NDArray[np.float32],
    ) -> None:
        """Write ``scale · level`` of each level."""

    def add(
        self,
        values: NDArray[np.float32],
        factor: float,
        sums: NDArray[np.int64],
        indices: NDArray[np.int64] | None,
    ) -> None:
        """Add ``rint(float64(value) · factor)`` to each sum, or to those of distinct indices."""

    def ones(self, code: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Return the places of the bits that are set, the lowest of each byte first."""


def packed_bytes(num_values: int, bits: int) -> int:
    """Count the bytes of the packed levels of ``num_values`` values."""
    whole, rest = divmod(num_values, BLOCK_VALUES)
    return whole * BLOCK_VALUES * bits // 8 + -(-rest * bits // 8)


class NumpyKernels:
    """The loops by numpy: the reference."""

    def above(self, bits: NDArray[np.uint32], threshold: np.uint32) -> NDArray[np.int64]:
        """See ``Kernels``."""
        found = []
        for start in range(0, bits.size, RUN_VALUES):
            run = bits[start : start + RUN_VALUES]
            found.append(np.flatnonzero((run & MAGNITUDE_BITS) >= threshold) + start)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def quantise(
        self,
        values: NDArray[np.float32],
        bits: int,
        scales: NDArray[np.float32],
        code: NDArray[np.uint8],
    ) -> None:
        """See ``Kernels``."""
        blocks = _as_blocks(values)
        scales[:] = _scales(blocks, values.size, bits)
        _pack(_levels(blocks, scales, bits), values.size, bits, code)

    def dequantise(
        self,
        scales: NDArray[np.float32],
        code: NDArray[np.uint8],
        bits: int,
        values: NDArray[np.float32],
    ) -> None:
        """See ``Kernels``."""
        levels = _unpack(code, values.size, bits)
        if values.size == levels.size and values.flags.c_contiguous:
            np.multiply(levels, scales[:, np.newaxis], out=values.reshape(levels.shape))
        else:
            values[:] = (levels * scales[:, np.newaxis]).reshape(-1)[: values.size]

    def add(
        self,
        values: NDArray[np.float32],
        factor: float,
        sums: NDArray[np.int64],
        indices: NDArray[np.int64] | None,
    ) -> None:
        """See ``Kernels``."""
        terms = np.multiply(values, factor, dtype=np.float64)
        np.rint(terms, out=terms)
        sums[... if indices is None else indices] += terms.astype(np.int64)

    def ones(self, code: NDArray[np.uint8]) -> NDArray[np.int64]:
        """See ``Kernels``."""
        return np.flatnonzero(np.unpackbits(code, bitorder="little"))


def _as_blocks(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return rows of one block each, the last one filled up with zeros; a view where it can be."""
    if values.size % BLOCK_VALUES == 0:
        return values.reshape(-1, BLOCK_VALUES)
    blocks = np.zeros((-(-values.size // BLOCK_VALUES), BLOCK_VALUES), np.float32)
    blocks.reshape(-1)[: values.size] = values
    return blocks


def _scales(blocks: NDArray[np.float32], num_values: int, bits: int) -> NDArray[np.float32]:
    if bits >= 4:
        peaks = np.maximum(blocks.max(axis=1), -blocks.min(axis=1))
        # Of zeros either may be the largest.
        scales: NDArray[np.float32] = np.abs(peaks) / np.float32(LEVEL_MAX[bits])
    else:
        sums = np.abs(blocks).astype(np.float64)
        half = BLOCK_VALUES // 2
        while half:
            sums = sums[:, :half] + sums[:, half:]
            half //= 2
        counts = np.full(len(blocks), BLOCK_VALUES, np.float64)
        counts[-1] -= len(blocks) * BLOCK_VALUES - num_values
        scales = (sums[:, 0] / counts * SPACING[bits]).astype(np.float32)
    scales[(scales > SCALE_MAX) & (scales < np.inf)] = SCALE_MAX
    return scales


def _levels(
    blocks: NDArray[np.float32], scales: NDArray[np.float32], bits: int
) -> NDArray[np.uint8]:
    """Return the code of each value in whole bytes: its level, or the number of it."""
    if bits == 1:
        return (blocks > 0).view(np.uint8)
    # A block of zeros, or of numbers too small to have a scale, divides by one and is all zero.
    divisors = scales.copy()
    divisors[divisors <= 0] = 1
    ratios = blocks / divisors[:, np.newaxis]
    if bits == 2:
        lower, upper = (ratios > -2).view(np.uint8), (ratios > 2).view(np.uint8)
        return lower + (ratios > 0).view(np.uint8) + upper
    np.rint(ratios, out=ratios)
    # The scale of a subnormal block is rounded so coarsely that levels would leave their range.
    limit = np.float32(LEVEL_MAX[bits])
    np.clip(ratios, -limit, limit, out=ratios)
    return ratios.astype(np.int8).view(np.uint8)


def _parts(
    levels: NDArray[np.uint8], code: NDArray[np.uint8], num_values: int, bits: int
) -> list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
    """Pair up what lies where: the levels of each place in a byte, and the bytes of all blocks but
    the last one, if that is not whole, and of that one.
    """
    whole, rest = divmod(num_values, BLOCK_VALUES)
    stride = BLOCK_VALUES * bits // 8
    parts = [(levels[:whole], code[: whole * stride].reshape(whole, stride))] if whole else []
    if rest:
        parts.append((levels[whole:, :rest], code[whole * stride :].reshape(1, -1)))
    return parts


def _pack(levels: NDArray[np.uint8], num_values: int, bits: int, code: NDArray[np.uint8]) -> None:
    mask = np.uint8((1 << bits) - 1)
    for rows, out in _parts(levels, code, num_values, bits):
        out[:] = 0
        for place, start in enumerate(range(0, rows.shape[1], out.shape[1])):
            part = rows[:, start : start + out.shape[1]]
            out[:, : part.shape[1]] |= (part & mask) << np.uint8(place * bits)


def _unpack(code: NDArray[np.uint8], num_values: int, bits: int) -> NDArray[np.int8]:
    """Return the levels of whole blocks, shape (blocks, 256), what is past the end zero."""
    if bits == 8 and num_values % BLOCK_VALUES == 0:
        return code.view(np.int8).reshape(-1, BLOCK_VALUES)
    levels = np.zeros((-(-num_values // BLOCK_VALUES), BLOCK_VALUES), np.uint8)
    mask = np.uint8((1 << bits) - 1)
    for rows, packed in _parts(levels, code, num_values, bits):
        for place, start in enumerate(range(0, rows.shape[1], packed.shape[1])):
            part = rows[:, start : start + packed.shape[1]]
            part[:] = (packed[:, : part.shape[1]] >> np.uint8(place * bits)) & mask
    if bits == 4:
        # Two shifts move four bits to the top and back down with their sign.
        np.left_shift(levels, 4, out=levels)
        return levels.view(np.int8) >> 4
    if bits < 4:
        np.multiply(levels, 2, out=levels)
        np.subtract(levels, LEVEL_MAX[bits], out=levels)
    return levels.view(np.int8)


active: Kernels = NumpyKernels()
"""The kernels in use; ``codec.accelerate`` changes them."""
