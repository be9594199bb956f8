"""Which values to keep when not all fit: the largest, as many as the budget can pay.

Top-k keeps the most energy that any k values can. Where the k-th largest lies is guessed from a
sample and a margin, so that one pass over the vector leaves few candidates; among those the choice
is exact, and unique: equal magnitudes, the lower index first. Global, not per layer: a layer whose
delta is small waits, and error feedback brings it later.

Magnitudes are compared as the integers that their bits spell, which order alike; so NaN and
infinity are above every threshold, and found without a pass of their own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hetertrain.codec import kernels
from hetertrain.codec.kernels import MAGNITUDE_BITS
from hetertrain.codec.quantise import NOT_FINITE
from hetertrain.errors import PayloadError

SAMPLE_RUNS = 1024
SAMPLE_RUN_VALUES = 64
SAMPLE_VALUES = SAMPLE_RUNS * SAMPLE_RUN_VALUES
INFINITY_BITS = np.uint32(0x7F80_0000)
"""A magnitude of so much, as bits, is infinity or NaN."""
SLACK = 1 << 10
"""A search for a count ends when so small a share of the limit is left."""
_GUESSES = 5
"""How often a search follows the proportion before it only halves."""


def sample(delta: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return ``SAMPLE_VALUES`` values in runs spread over the vector; all of a shorter one."""
    if delta.size <= SAMPLE_VALUES:
        return delta
    starts = np.arange(SAMPLE_RUNS) * ((delta.size - SAMPLE_RUN_VALUES) // (SAMPLE_RUNS - 1))
    places = (starts[:, np.newaxis] + np.arange(SAMPLE_RUN_VALUES)).reshape(-1)
    return np.take(delta, places)


def check_finite(values: NDArray[np.float32]) -> None:
    """Raise PayloadError if a value is NaN or infinite."""
    if above(values, INFINITY_BITS).size:
        raise PayloadError(NOT_FINITE)


class Candidates:
    """The largest values of a delta, in order of their place, ready to be counted off by size."""

    def __init__(self, delta: NDArray[np.float32], indices: NDArray[np.int64]) -> None:
        self.indices = indices
        self._bits = _magnitude_bits(delta[indices])
        self._ascending = np.sort(self._bits)
        if self._bits.size and self._ascending[-1] >= INFINITY_BITS:
            raise PayloadError(NOT_FINITE)

    def largest(self, count: int) -> NDArray[np.int64]:
        """Return the increasing indices of the ``count`` largest."""
        if count == 0:
            return self.indices[:0]
        if count == self.indices.size:
            return self.indices
        threshold = self._ascending[-count]
        is_kept = self._bits > threshold
        num_ties = count - int(np.count_nonzero(is_kept))
        is_kept[np.flatnonzero(self._bits == threshold)[:num_ties]] = True
        return np.compress(is_kept, self.indices)


def candidates(
    delta: NDArray[np.float32], sampled: NDArray[np.float32], wanted: int
) -> tuple[Candidates, bool]:
    """Return at least ``wanted`` of the largest values where so many are not zero, and whether
    these are all that are not zero.

    Raises:
        PayloadError: the delta holds NaN or infinity.
    """
    ascending = np.sort(_magnitude_bits(sampled))
    rank = wanted * sampled.size / max(delta.size, 1)
    while True:
        # Four standard deviations of a count in a sample.
        margin = int(rank + 4 * rank**0.5) + 4
        is_all = margin >= ascending.size or ascending[-margin] <= 1
        threshold = np.uint32(1) if is_all else ascending[-margin]
        found = Candidates(delta, above(delta, threshold))
        if is_all or found.indices.size >= wanted:
            return found, is_all
        rank *= 2


def above(delta: NDArray[np.float32], threshold: np.uint32) -> NDArray[np.int64]:
    """Return the indices of the values whose magnitude, as bits, is ``threshold`` or more."""
    return kernels.active.above(delta.view(np.uint32), threshold)


def most_that_fit(most: int, guess: int, limit: int, cost: Callable[[int], int]) -> int:
    """Return the largest count up to ``most`` whose ``cost`` is at most ``limit``, or one that
    leaves less than a ``SLACK``-th of it.

    ``cost(0)`` is within ``limit``, and costs rise with counts, nearly in proportion.
    """
    fits, too_many = 0, most + 1
    guess = min(max(guess, 1), most)
    for tries in range(64):
        if too_many - fits <= 1:
            break
        found = cost(guess)
        near = guess * limit // max(found, 1)
        if found <= limit:
            fits = guess
            if limit - found < limit // SLACK:
                break
        else:
            too_many, near = guess, near - near // (2 * SLACK)
        if tries >= _GUESSES:
            near = (fits + too_many) // 2
        guess = min(max(near, fits + 1), too_many - 1)
    return fits


def _magnitude_bits(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    return np.bitwise_and(values.view(np.uint32), MAGNITUDE_BITS)
