"""The bytes of an encoded delta, and the reader that trusts none of them.

A payload is a header and a body, all little-endian::

    header         version u8 · kind u8 · reserved u16 = 0 · size u32 · count u32
    DENSE_FLOAT32  values (count x float32)                       count = size
    DENSE_INT8     scales (float32) · levels (count x int8)       count = size
    SPARSE_INT8    scales (float32) · levels (count x int8) · gaps (count x LEB128)

``size`` is the length of the vector, ``count`` how many of its values are kept. The length of a
body is checked against both before anything is allocated, so reading takes memory and time in
proportion to the payload's length and to the ``size`` that the reader expects, whatever it says.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from hetertrain.codec.indices import GAP_BYTES_MAX, SIZE_MAX, decode_indices
from hetertrain.codec.quantise import (
    LEVEL_MAX,
    SCALE_BYTES,
    SCALE_MAX,
    dequantise,
    scale_count,
)
from hetertrain.errors import PayloadError

CODEC_VERSION = 1
FLOAT_BYTES = 4
LITTLE_FLOAT = np.dtype("<f4")
SCRATCH_VALUES = 1 << 16
"""Dense work in float64 goes in steps of this many values, to stay in the processor's cache."""

_HEADER = struct.Struct("<BBHII")

MINIMUM_BUDGET_BYTES = _HEADER.size
"""The shortest payload: a header that keeps no value. No budget may be below it."""


class Kind(IntEnum):
    """The forms that a body can have."""

    DENSE_FLOAT32 = 0
    DENSE_INT8 = 1
    SPARSE_INT8 = 2


@dataclass(frozen=True, slots=True)
class Encoded:
    """A payload, and what its reader will get from it."""

    payload: bytes
    decoded: NDArray[np.float32]
    """Shape (size,): bit for bit what ``decode(payload, size)`` returns. The caller owns it."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """The finite values that a payload keeps of a vector of ``size``; all others are zero."""

    indices: NDArray[np.int64] | None
    """Shape (kept,), strictly increasing and below ``size``; None means all, in order."""
    values: NDArray[np.float32]
    """Shape (kept,), or (size,) if dense."""
    size: int

    def norm(self) -> float:
        """Return the Euclidean length, summed in float64."""
        starts = range(0, self.values.size, SCRATCH_VALUES)
        blocks = (self.values[start : start + SCRATCH_VALUES] for start in starts)
        return float(np.sqrt(sum(float(np.square(b, dtype=np.float64).sum()) for b in blocks)))

    def peak(self) -> float:
        """Return the largest magnitude, 0 if no value is kept."""
        return float(np.maximum(self.values.max(initial=0), -self.values.min(initial=0)))

    def dense(self) -> NDArray[np.float32]:
        """Return shape (size,); a dense payload gives its ``values`` without a copy."""
        if self.indices is None:
            return self.values
        vector = np.zeros(self.size, np.float32)
        vector[self.indices] = self.values
        return vector


def pack(kind: Kind, size: int, count: int, *body: bytes) -> bytes:
    """Join a header and the parts of its body."""
    return b"".join((_HEADER.pack(CODEC_VERSION, kind, 0, size, count), *body))


def decode(payload: bytes | memoryview, size: int) -> NDArray[np.float32]:
    """Return the vector of shape ``(size,)`` that ``payload`` stands for; the caller owns it.

    Raises:
        PayloadError: the payload is malformed, or not of a vector of ``size``.
    """
    return parse(payload, size).dense()


def parse(payload: bytes | memoryview, size: int) -> Decoded:
    """Read and check a payload without filling in the values that it leaves out.

    The result owns its memory. Every index is inside the vector and every value finite.

    Raises:
        PayloadError: the payload is malformed, or not of a vector of ``size``.
    """
    code = memoryview(payload).cast("B")
    kind, count = _read_header(code, size)
    _check_length(code.nbytes - _HEADER.size, kind, count)
    body = np.frombuffer(code, np.uint8)[_HEADER.size :]
    if kind is Kind.DENSE_FLOAT32:
        return Decoded(None, _read_floats(body), size)
    levels_start = scale_count(count) * SCALE_BYTES
    gaps_start = levels_start + count
    values = _read_levels(body[:levels_start], body[levels_start:gaps_start])
    if kind is Kind.DENSE_INT8:
        return Decoded(None, values, size)
    return Decoded(decode_indices(body[gaps_start:], count, size), values, size)


def _read_header(code: memoryview, size: int) -> tuple[Kind, int]:
    if not 0 <= size <= SIZE_MAX:
        raise ValueError(f"size must be in 0 … {SIZE_MAX}, got {size}")
    if code.nbytes < _HEADER.size:
        raise PayloadError(f"expected a header of {_HEADER.size} bytes, found {code.nbytes}")
    version, kind_code, reserved, found_size, count = _HEADER.unpack_from(code)
    if version != CODEC_VERSION or reserved:
        raise PayloadError(
            f"codec version {version}, reserved {reserved}: this node reads version "
            f"{CODEC_VERSION} only; run the same release on both ends"
        )
    try:
        kind = Kind(kind_code)
    except ValueError as error:
        raise PayloadError(f"kind {kind_code} is unknown") from error
    if found_size != size:
        raise PayloadError(f"expected a vector of {size} values, found one of {found_size}")
    if count > size or (count < size and kind is not Kind.SPARSE_INT8):
        raise PayloadError(f"{kind.name} cannot keep {count} of {size} values")
    return kind, count


def _check_length(body_bytes: int, kind: Kind, count: int) -> None:
    """Raise PayloadError unless a body of this kind and count can have this length."""
    if kind is Kind.DENSE_FLOAT32:
        least = most = count * FLOAT_BYTES
    else:
        least = most = scale_count(count) * SCALE_BYTES + count
    if kind is Kind.SPARSE_INT8:
        least, most = least + count, most + count * GAP_BYTES_MAX
    if not least <= body_bytes <= most:
        raise PayloadError(f"expected a body of {least} to {most} bytes, found {body_bytes}")


def _read_floats(code: NDArray[np.uint8]) -> NDArray[np.float32]:
    floats = code.view(LITTLE_FLOAT).astype(np.float32)
    if not np.isfinite(floats).all():
        raise PayloadError("a value or scale is not finite")
    return floats


def _read_levels(
    scale_code: NDArray[np.uint8], level_code: NDArray[np.uint8]
) -> NDArray[np.float32]:
    scales = _read_floats(scale_code)
    if np.any((scales < 0) | (scales > SCALE_MAX)):
        raise PayloadError(f"a scale is outside 0 … {SCALE_MAX}")
    levels = level_code.view(np.int8)
    if np.any(levels < -LEVEL_MAX):
        raise PayloadError(f"a level is below -{LEVEL_MAX}")
    return dequantise(scales, levels)
