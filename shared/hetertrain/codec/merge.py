"""Adding payloads into fixed-point sums: exact, and so free of order.

Each term ``weight · value`` is rounded once, to a multiple of 2**-32; from there on integers add.
Integer addition is associative and commutative, so the sums are the same bits whatever the order
in which payloads arrive, and however gateways between have grouped them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetertrain.codec import kernels
from hetertrain.codec.payload import Decoded, parse
from hetertrain.errors import PayloadError

FRACTION_BITS = 32
"""Sums are in units of 2**-FRACTION_BITS."""

VALUE_MAX = 2.0**10
"""The largest magnitude that may enter a sum."""


def add_into(sums: NDArray[np.int64], decoded: Decoded, weight: float) -> None:
    """Add ``weight · decoded`` to fixed-point ``sums``, in place.

    ``sums`` has shape ``(decoded.size,)``; ``weight`` is in (0, 1]. A term is
    ``rint(float64(value) · (weight · 2**32))``, IEEE operations that round alike on every machine.

    No overflow: with |value| <= ``VALUE_MAX`` = 2**10, which the caller has checked (``peak``), a
    term is at most 2**42, so 2**20 terms keep |sum| <= 2**62.

    Cost: O(kept values), with scratch memory for a run of them.
    """
    assert sums.dtype == np.int64, "sums are int64"
    assert sums.shape == (decoded.size,), "sums and payload are of one layout"
    assert 0 < weight <= 1, "weights are normalised"
    factor = weight * 2.0**FRACTION_BITS
    for place, values in decoded.levels.runs():
        if decoded.indices is None:
            kernels.active.add(values, factor, sums[place], None)
        else:
            kernels.active.add(values, factor, sums, decoded.indices[place])


def decode_into(sums: NDArray[np.int64], payload: bytes | memoryview, weight: float) -> None:
    """Add ``weight · decode(payload)`` to fixed-point ``sums``, sparse ones without a dense copy.

    Raises:
        PayloadError: the payload is malformed, not of ``sums``' size, or holds a value over
            ``VALUE_MAX``; ``sums`` is unchanged.
    """
    decoded = parse(payload, sums.size)
    peak = decoded.peak()
    if peak > VALUE_MAX:
        raise PayloadError(f"a value of {peak:g} is over {VALUE_MAX:g} and could overflow a sum")
    add_into(sums, decoded, weight)
