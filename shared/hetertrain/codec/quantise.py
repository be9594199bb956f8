"""Numbers as int8 levels with one float32 scale per block of 256 values.

Within a block, ``value ≈ scale · level`` with ``scale = max |value| / 127`` and the level rounded
to nearest: symmetric and deterministic. The squared error of a block is at most
``BLOCK_VALUES / (4 · 127²)`` = 0.4 % of its energy; error feedback sends even that later.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK_VALUES = 256
LEVEL_MAX = 127
SCALE_BYTES = 4

_LEVELS = np.float32(LEVEL_MAX)
SCALE_MAX = np.nextafter(np.finfo(np.float32).max / _LEVELS, np.float32(0))
"""The largest scale whose largest level is still a finite float32."""


def scale_count(num_values: int) -> int:
    """Count the blocks, and so the scales, of ``num_values`` values."""
    return -(-num_values // BLOCK_VALUES)


def quantise(values: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    """Return the scales, one per block, and the levels, one per value, of finite ``values``."""
    blocks = _as_blocks(values)
    peaks = np.maximum(blocks.max(axis=1), -blocks.min(axis=1))
    scales = np.minimum(peaks / _LEVELS, SCALE_MAX)
    # A block of zeros, or of numbers too small to have a scale, divides by one and is all zero.
    blocks /= np.where(scales > 0, scales, np.float32(1))[:, np.newaxis]
    np.rint(blocks, out=blocks)
    # The scale of a subnormal block is rounded so coarsely that levels would leave int8.
    np.clip(blocks, -_LEVELS, _LEVELS, out=blocks)
    return scales, blocks.astype(np.int8).reshape(-1)[: values.size]


def dequantise(scales: NDArray[np.float32], levels: NDArray[np.int8]) -> NDArray[np.float32]:
    """Return ``scale · level`` of each level, as float32: the same bits on every machine."""
    blocks = _as_blocks(levels)
    blocks *= scales[:, np.newaxis]
    return blocks.reshape(-1)[: levels.size]


def _as_blocks(values: NDArray[np.float32] | NDArray[np.int8]) -> NDArray[np.float32]:
    """Copy ``values`` into rows of one block each, the last one filled up with zeros."""
    blocks = np.empty((scale_count(values.size), BLOCK_VALUES), np.float32)
    flat = blocks.reshape(-1)
    flat[: values.size] = values
    flat[values.size :] = 0
    return blocks
