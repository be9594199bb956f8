"""Which values to keep when not all fit: the largest, as many as the budget can pay.

Top-k keeps the most energy that any k values can. What it costs is known only once the gaps
between them are, so the count is searched. The cost never falls as values are added: one more
index splits a gap in two, and the halves take no fewer bytes than the whole. So a bisection finds
the best count exactly, and a larger budget never keeps fewer values.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from hetertrain.codec.indices import gap_bytes
from hetertrain.codec.quantise import BLOCK_VALUES, SCALE_BYTES, scale_count


def affordable_indices(delta: NDArray[np.float32], body_bytes_max: int) -> NDArray[np.int64]:
    """Return the increasing indices of the largest values whose body fits ``body_bytes_max``.

    Zeros are never kept. Equal magnitudes: the lower index first, so the choice is unique. Cost:
    O(size), and at most log2(size) passes over the kept values.
    """
    magnitudes = np.abs(delta)
    fewest, most = _count_bounds(delta.size, body_bytes_max)
    most = min(most, int(np.count_nonzero(magnitudes)))
    fewest = min(fewest, most)
    candidates = _largest(magnitudes, most)
    ranks = _ranks(magnitudes[candidates], fewest)

    def body_bytes(count: int) -> int:
        return scale_count(count) * SCALE_BYTES + count + gap_bytes(candidates[ranks < count])

    more = bisect_right(range(fewest + 1, most + 1), body_bytes_max, key=body_bytes)
    return candidates[ranks < fewest + more]


def _count_bounds(size: int, body_bytes_max: int) -> tuple[int, int]:
    """Return how many values fit at least, and at most, wherever they are.

    A value takes a level, its share of a scale, and a gap of one byte, or more: at most size / 128
    gaps can reach 128 and take a second byte, size / 128² a third …, together size / 127.
    """
    block_bytes = 2 * BLOCK_VALUES + SCALE_BYTES
    most = body_bytes_max * BLOCK_VALUES // block_bytes
    worst_bytes = body_bytes_max - size // 127 - SCALE_BYTES
    return max(0, worst_bytes * BLOCK_VALUES // block_bytes), most


def _largest(magnitudes: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Return the increasing indices of the ``count`` largest; ties go to the lower index."""
    if count == 0:
        return np.empty(0, np.int64)
    # Which of equal elements a partition puts first depends on the processor; its values do not.
    threshold = np.partition(magnitudes, magnitudes.size - count)[magnitudes.size - count]
    is_kept = magnitudes > threshold
    num_ties = count - np.count_nonzero(is_kept)
    is_kept[np.flatnonzero(magnitudes == threshold)[:num_ties]] = True
    return np.flatnonzero(is_kept)


def _ranks(magnitudes: NDArray[np.float32], num_certain: int) -> NDArray[np.int64]:
    """Return each value's place by size, but 0 for all of the ``num_certain`` largest."""
    is_open = np.ones(magnitudes.size, np.bool_)
    is_open[_largest(magnitudes, num_certain)] = False
    places = np.flatnonzero(is_open)
    ranks = np.zeros(magnitudes.size, np.int64)
    by_size = np.argsort(-magnitudes[places], kind="stable")
    ranks[places[by_size]] = np.arange(num_certain, magnitudes.size)
    return ranks
