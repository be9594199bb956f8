"""The bytes of an encoded delta, and the reader that trusts none of them.

A payload is a header and a body, all little-endian, and says all that a reader needs::

    header  version u8 = 2 · form u8 · bits u8 · packing u8 · size u32 · count u32
    DENSE   values (count x float32) if bits = 32, else scales · packed levels     count = size
            packing 1: the levels are one frame of zstd (``entropy``); else it is 0
    SPARSE  scales (float32) · packed levels · Rice-coded gaps (``indices``)

``size`` is the length of the vector, ``count`` how many of its values are kept, ``bits`` those of a
level (``quantise``). The length of a body, and that of a frame, is checked against them
before anything is allocated, so reading takes memory and time in proportion to the payload's length
and to the ``size`` that the reader expects, whatever it says.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from hetertrain.codec.entropy import restore, shorten
from hetertrain.codec.indices import SIZE_MAX, decode_gaps
from hetertrain.codec.kernels import SCALE_MAX, packed_bytes
from hetertrain.codec.quantise import (
    BITS,
    FLOAT_BITS,
    NOT_FINITE,
    SCALE_BYTES,
    Levels,
    scale_count,
)
from hetertrain.codec.sparsify import INFINITY_BITS, above
from hetertrain.codec.version_1 import decode_leb128
from hetertrain.errors import NonFiniteError, PayloadError

CODEC_VERSION = 2
FLOAT_BYTES = 4
LITTLE_FLOAT = np.dtype("<f4")
_MOVED_BYTES = 1 << 20

_HEADER = struct.Struct("<BBBBII")

MINIMUM_BUDGET_BYTES = _HEADER.size
"""The shortest payload: a header that keeps no value. No budget may be below it."""

_VERSION_1_BITS = (FLOAT_BITS, 8, 8)
"""By its kinds: dense float32, dense int8, sparse int8."""


class Form(IntEnum):
    """Whether a payload holds all values or some."""

    DENSE = 0
    SPARSE = 1


class Packing(IntEnum):
    """Whether the levels of a dense form went through the entropy stage."""

    PLAIN = 0
    ZSTD = 1


@dataclass(slots=True)
class Decoded:
    """The finite values that a payload keeps of a vector of ``size``; all others are zero.

    Values stay coded and are decoded a run at a time, so whatever is done with them takes little
    memory but for their indices.
    """

    indices: NDArray[np.int64] | None
    """Shape (kept,), strictly increasing and below ``size``; None means all, in order."""
    levels: Levels
    size: int
    _norm: float | None = None

    @property
    def num_kept(self) -> int:
        """How many values the payload keeps."""
        return self.levels.size

    def norm(self) -> float:
        """Return the Euclidean length, summed in float64."""
        if self._norm is None:
            energy = 0.0
            for _, values in self.levels.runs():
                energy += float(np.square(values, dtype=np.float64).sum())
            self._norm = energy**0.5
        return self._norm

    def peak(self) -> float:
        """Return the largest magnitude that the scales allow, which an encoder's levels reach; of
        float32 values the largest there is; 0 if no value is kept.
        """
        return self.levels.peak()

    def values(self) -> NDArray[np.float32]:
        """Return the values that are kept, shape (kept,)."""
        return self.levels.values()

    def dense(self) -> NDArray[np.float32]:
        """Return shape (size,)."""
        if self.indices is None:
            return self.values()
        vector = np.zeros(self.size, np.float32)
        vector[self.indices] = self.values()
        return vector

    def add_to(self, vector: NDArray[np.float32]) -> None:
        """Add to a vector of shape (size,), in place, touching what is kept only."""
        for place, values in self.levels.runs():
            vector[self.where(place)] += values

    def subtract_from(self, vector: NDArray[np.float32]) -> None:
        """Subtract from a vector of shape (size,), in place: what is left is the residual."""
        for place, values in self.levels.runs():
            vector[self.where(place)] -= values

    def where(self, place: slice) -> slice | NDArray[np.int64]:
        """Return which places of the vector a run of kept values fills."""
        return place if self.indices is None else self.indices[place]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A payload, and what its reader will get from it."""

    payload: bytes
    decoded: Decoded
    """Bit for bit what ``parse(payload, size)`` returns. The caller owns it."""


def pack(decoded: Decoded, gaps: bytes = b"") -> Encoded:
    """Write a payload of these levels, and of their Rice-coded places if it is sparse."""
    levels = decoded.levels
    form, packing, code = Form.SPARSE, Packing.PLAIN, levels.code.data
    if decoded.indices is None:
        form = Form.DENSE
        frame = shorten(levels.code) if levels.bits < FLOAT_BITS else None
        if frame is not None:
            packing, code = Packing.ZSTD, memoryview(frame)
    header = _HEADER.pack(CODEC_VERSION, form, levels.bits, packing, decoded.size, levels.size)
    scales = levels.scales.astype(LITTLE_FLOAT, copy=False)
    return Encoded(b"".join((header, scales.data, code, gaps)), decoded)


def whole(vector: NDArray[np.float32]) -> tuple[bytes, memoryview]:
    """Return the payload that is exactly ``vector``, as its head and a view of its values.

    Raises:
        PayloadError: the vector is not finite.
    """
    if above(vector, INFINITY_BITS).size:
        raise PayloadError(NOT_FINITE)
    values = np.ascontiguousarray(vector, LITTLE_FLOAT).view(np.uint8)
    head = _HEADER.pack(CODEC_VERSION, Form.DENSE, FLOAT_BITS, 0, vector.size, vector.size)
    return head, values.data


def decode_owned(payload: memoryview, size: int) -> NDArray[np.float32]:
    """Return what ``decode`` does, in the memory of a payload that nobody needs any more, if the
    payload is exact: a model's worth less of memory.

    ``payload`` is writable, and something else afterwards.

    Raises:
        PayloadError: the payload is malformed, or not of a vector of ``size``.
    """
    _, _, bits, _, _ = _read_header(payload, size)
    if (
        payload.readonly
        or bits != FLOAT_BITS
        or payload.nbytes != _HEADER.size + FLOAT_BYTES * size
    ):
        return decode(payload, size)
    code = np.frombuffer(payload, np.uint8)
    # Values begin at a multiple of their size: down by a few bytes, into the header.
    shift = (code.ctypes.data + _HEADER.size) % FLOAT_BYTES
    begin = _HEADER.size - shift
    if shift:
        for start in range(_HEADER.size, code.size, _MOVED_BYTES):
            part = code[start : start + _MOVED_BYTES]
            code[start - shift : start - shift + part.size] = part.copy()
    values = code[begin : begin + FLOAT_BYTES * size].view(LITTLE_FLOAT)
    if above(values, INFINITY_BITS).size:
        raise NonFiniteError("a value is not finite")
    return values.astype(np.float32, copy=False)


def decode(payload: bytes | memoryview, size: int) -> NDArray[np.float32]:
    """Return the vector of shape ``(size,)`` that ``payload`` stands for; the caller owns it.

    Raises:
        PayloadError: the payload is malformed, or not of a vector of ``size``.
    """
    return parse(payload, size).dense()


def parse(payload: bytes | memoryview, size: int) -> Decoded:
    """Read and check a payload without filling in the values that it leaves out.

    The result owns its memory. Every index is inside the vector and every value finite. Payloads of
    version 1 are read too.

    Raises:
        PayloadError: the payload is malformed, or not of a vector of ``size``.
    """
    code = memoryview(payload).cast("B")
    version, form, bits, packing, count = _read_header(code, size)
    body = np.frombuffer(code, np.uint8)[_HEADER.size :]
    num_scales = 0 if bits == FLOAT_BITS else scale_count(count)
    levels_start, level_bytes = num_scales * SCALE_BYTES, packed_bytes(count, bits)
    least = most = levels_start + level_bytes
    if packing is Packing.ZSTD:
        least = levels_start
    elif form is Form.SPARSE:
        # A kept value has one bit of its gap at least.
        least, most = least + -(-count // 8), body.size
    if not least <= body.size <= most:
        raise PayloadError(f"expected a body of {least} to {most} bytes, found {body.size}")
    scales = body[:levels_start].view(LITTLE_FLOAT).astype(np.float32)
    # Written so that NaN is refused too.
    if not np.all((scales >= 0) & (scales <= SCALE_MAX)):
        raise PayloadError(f"a scale is outside 0 … {SCALE_MAX}")
    if packing is Packing.ZSTD:
        level_code = restore(body[levels_start:], level_bytes)
    else:
        level_code = body[levels_start : levels_start + level_bytes].copy()
    levels = Levels(count, bits, scales, level_code)
    if bits == FLOAT_BITS and above(levels.code.view(LITTLE_FLOAT), INFINITY_BITS).size:
        raise NonFiniteError("a value is not finite")
    if form is Form.DENSE:
        return Decoded(None, levels, size)
    decode_indices = decode_gaps if version > 1 else decode_leb128
    gaps = body[levels_start + level_bytes :]
    return Decoded(decode_indices(gaps, count, size), levels, size)


def announced_size(payload: bytes | memoryview) -> int:
    """Return the length of the vector that a payload says it is of: for who has no layout to know.

    Raises:
        PayloadError: it has no header, or says more than there can be.
    """
    code = memoryview(payload).cast("B")
    if code.nbytes < _HEADER.size:
        raise PayloadError(f"expected a header of {_HEADER.size} bytes, found {code.nbytes}")
    size = int(_HEADER.unpack_from(code)[4])
    if size > SIZE_MAX:
        raise PayloadError(f"a vector of {size} values: at most {SIZE_MAX} can be")
    return size


def _read_header(code: memoryview, size: int) -> tuple[int, Form, int, Packing, int]:
    """Return version, form, bits of a level, packing, and how many values are kept."""
    if not 0 <= size <= SIZE_MAX:
        raise ValueError(f"size must be in 0 … {SIZE_MAX}, got {size}")
    if code.nbytes < _HEADER.size:
        raise PayloadError(f"expected a header of {_HEADER.size} bytes, found {code.nbytes}")
    version, form_code, bits, packing, found_size, count = _HEADER.unpack_from(code)
    if not 1 <= version <= CODEC_VERSION or packing > Packing.ZSTD:
        raise PayloadError(
            f"codec version {version}, packing {packing}: this node reads versions 1 to "
            f"{CODEC_VERSION}; upgrade it first"
        )
    if version == 1:
        if bits or packing or form_code >= len(_VERSION_1_BITS):
            raise PayloadError(f"version 1 has no kind {form_code}, reserved {bits}, {packing}")
        bits, form_code = _VERSION_1_BITS[form_code], form_code // 2
    if form_code > Form.SPARSE or not _has_form(Form(form_code), bits):
        raise PayloadError(f"form {form_code} with {bits} bits a level is unknown")
    form = Form(form_code)
    if found_size != size:
        raise PayloadError(f"expected a vector of {size} values, found one of {found_size}")
    if count > size or (count < size and form is Form.DENSE):
        raise PayloadError(f"{form.name} cannot keep {count} of {size} values")
    if packing and (form is not Form.DENSE or bits == FLOAT_BITS):
        raise PayloadError(f"{form.name} of {bits} bits has no packing {packing}")
    return version, form, bits, Packing(packing), count


def _has_form(form: Form, bits: int) -> bool:
    return bits in BITS or (form is Form.DENSE and bits == FLOAT_BITS)
