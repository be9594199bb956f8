"""From a delta and a byte budget to a payload: the form that keeps the most energy and fits.

In this order: every value as float32 (exact), every value as int8, the largest values as int8.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetertrain.codec.indices import SIZE_MAX, encode_indices
from hetertrain.codec.payload import (
    FLOAT_BYTES,
    LITTLE_FLOAT,
    MINIMUM_BUDGET_BYTES,
    Decoded,
    Encoded,
    Kind,
    pack,
)
from hetertrain.codec.quantise import SCALE_BYTES, dequantise, quantise, scale_count
from hetertrain.codec.sparsify import affordable_indices
from hetertrain.errors import PayloadError


def encode(delta: NDArray[np.float32], budget_bytes: int | None) -> Encoded:
    """Code ``delta``, shape ``(size,)``, in at most ``budget_bytes``; None means exactly.

    A budget too small for any value gives an empty payload, which decodes to zeros. A larger
    budget never keeps fewer values, nor less energy (``|delta|² - |delta - decoded|²``) but for
    what int8 rounds away, at most 0.4 % of ``|delta|²``.

    Raises:
        ValueError: ``delta`` is not a float32 vector, or the budget is under
            ``MINIMUM_BUDGET_BYTES``.
        PayloadError: ``delta`` is not finite (int8 would turn NaN into a number).
    """
    if delta.dtype != np.float32 or delta.ndim != 1 or delta.size > SIZE_MAX:
        raise ValueError(
            f"expected a float32 vector of at most {SIZE_MAX}, got {delta.dtype} {delta.shape}"
        )
    if budget_bytes is not None and budget_bytes < MINIMUM_BUDGET_BYTES:
        raise ValueError(f"a budget is at least {MINIMUM_BUDGET_BYTES} bytes, got {budget_bytes}")
    if not np.isfinite(delta).all():
        raise PayloadError("the delta holds NaN or infinity; lower the learning rate or skip it")
    if budget_bytes is None:
        return _encode_float32(delta)
    body_bytes_max = budget_bytes - MINIMUM_BUDGET_BYTES
    if delta.size * FLOAT_BYTES <= body_bytes_max:
        return _encode_float32(delta)
    if scale_count(delta.size) * SCALE_BYTES + delta.size <= body_bytes_max:
        return _encode_int8(delta)
    return _encode_sparse(delta, body_bytes_max)


def _encode_float32(delta: NDArray[np.float32]) -> Encoded:
    body = delta.astype(LITTLE_FLOAT, copy=False).tobytes()
    return Encoded(pack(Kind.DENSE_FLOAT32, delta.size, delta.size, body), delta.copy())


def _encode_int8(delta: NDArray[np.float32]) -> Encoded:
    scales, levels = quantise(delta)
    body = _scale_bytes(scales), levels.tobytes()
    payload = pack(Kind.DENSE_INT8, delta.size, delta.size, *body)
    return Encoded(payload, dequantise(scales, levels))


def _encode_sparse(delta: NDArray[np.float32], body_bytes_max: int) -> Encoded:
    indices = affordable_indices(delta, body_bytes_max)
    scales, levels = quantise(delta[indices])
    body = _scale_bytes(scales), levels.tobytes(), encode_indices(indices)
    payload = pack(Kind.SPARSE_INT8, delta.size, indices.size, *body)
    return Encoded(payload, Decoded(indices, dequantise(scales, levels), delta.size).dense())


def _scale_bytes(scales: NDArray[np.float32]) -> bytes:
    return scales.astype(LITTLE_FLOAT, copy=False).tobytes()
