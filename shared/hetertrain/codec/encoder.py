"""From a delta and a byte budget to a payload: the form that keeps the most energy and fits.

Dense: every value, as float32 (exact) or in 8, 4, 2 or 1 bits. Sparse: the largest values in 8, 4
or 1 bits, and their places.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetertrain.codec.indices import SIZE_MAX, encode_gaps, plan_gaps
from hetertrain.codec.kernels import packed_bytes
from hetertrain.codec.payload import FLOAT_BYTES, MINIMUM_BUDGET_BYTES, Decoded, Encoded, Form, pack
from hetertrain.codec.planner import Plan, plans
from hetertrain.codec.quantise import BITS, FLOAT_BITS, SCALE_BYTES, Levels, quantise, scale_count
from hetertrain.codec.sparsify import (
    Candidates,
    candidates,
    check_finite,
    most_that_fit,
    sample,
)

TRIED_VALUES = 4096
"""Of vectors up to this long every form is tried; the estimate for longer ones is good enough."""
_FIRST_MARGIN = 1.25
"""Indices that lie close together cost less than their entropy says; so more may fit."""


def encode(
    delta: NDArray[np.float32], budget_bytes: int | None, *, bits: int | None = None
) -> Encoded:
    """Code ``delta``, shape ``(size,)``, in at most ``budget_bytes``; None means exactly.

    ``bits`` (8, 4, 2 or 1) fixes those of a level; else what keeps the most energy is taken. A
    budget too small for any value gives an empty payload, which decodes to zeros. A larger budget
    never keeps less energy (``|delta|² - |delta - decoded|²``), but for how values fall into blocks
    and what the choice among forms misjudges: together under 3 % of ``|delta|²``.

    Raises:
        ValueError: ``delta`` is not a float32 vector, or the budget is under
            ``MINIMUM_BUDGET_BYTES``.
        PayloadError: ``delta`` is not finite (levels would turn NaN into a number).
    """
    if delta.dtype != np.float32 or delta.ndim != 1 or delta.size > SIZE_MAX:
        raise ValueError(
            f"expected a float32 vector of at most {SIZE_MAX}, got {delta.dtype} {delta.shape}"
        )
    if budget_bytes is not None and budget_bytes < MINIMUM_BUDGET_BYTES:
        raise ValueError(f"a budget is at least {MINIMUM_BUDGET_BYTES} bytes, got {budget_bytes}")
    delta = np.ascontiguousarray(delta)
    body_bytes = FLOAT_BYTES * delta.size
    if budget_bytes is not None:
        body_bytes = budget_bytes - MINIMUM_BUDGET_BYTES
    sampled = sample(delta)
    check_finite(sampled)
    ranked = plans(sampled, delta.size, body_bytes, BITS if bits is None else (bits,))
    if delta.size > TRIED_VALUES or len(ranked) == 1:
        return _encode_as(ranked[0], delta, sampled, body_bytes)
    tried = [_encode_as(each, delta, sampled, body_bytes) for each in ranked]
    return min(tried, key=lambda each: _lost(delta, each.decoded))


def _encode_as(
    chosen: Plan, delta: NDArray[np.float32], sampled: NDArray[np.float32], body_bytes: int
) -> Encoded:
    if chosen.form is Form.DENSE:
        return _encode_dense(delta, chosen.bits)
    return _encode_sparse(delta, sampled, chosen, body_bytes)


def _lost(delta: NDArray[np.float32], decoded: Decoded) -> float:
    rest = delta.copy()
    decoded.subtract_from(rest)
    return float(np.square(rest, dtype=np.float64).sum())


def _encode_dense(delta: NDArray[np.float32], bits: int) -> Encoded:
    if bits < FLOAT_BITS:
        return pack(Decoded(None, quantise(delta, bits), delta.size))
    check_finite(delta)
    code = delta.astype("<f4").view(np.uint8)
    return pack(Decoded(None, Levels(delta.size, bits, np.empty(0, np.float32), code), delta.size))


def _encode_sparse(
    delta: NDArray[np.float32], sampled: NDArray[np.float32], chosen: Plan, body_bytes: int
) -> Encoded:
    wanted = int(chosen.count * _FIRST_MARGIN) + 1
    while True:
        largest, is_all = candidates(delta, sampled, wanted)

        def cost(count: int, among: Candidates = largest) -> int:
            value_bytes = scale_count(count) * SCALE_BYTES + packed_bytes(count, chosen.bits)
            return value_bytes + plan_gaps(among.largest(count)).num_bytes

        most = min(largest.indices.size, chosen.most)
        count = most_that_fit(most, chosen.count, body_bytes, cost)
        if is_all or count < most or most == chosen.most:
            break
        wanted = 2 * most
    indices = largest.largest(count)
    levels = quantise(delta[indices], chosen.bits)
    return pack(Decoded(indices, levels, delta.size), encode_gaps(plan_gaps(indices)))
