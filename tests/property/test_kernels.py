"""The codec's inner loops give the same bytes with numpy and as machine code."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hetertrain.codec.kernels import Kernels, NumpyKernels, packed_bytes
from hetertrain.codec.kernels_numba import NumbaKernels

BOTH: tuple[Kernels, Kernels] = (NumpyKernels(), NumbaKernels())


@st.composite
def runs(draw: st.DrawFn) -> NDArray[np.float32]:
    """Values of every magnitude, zeros and subnormals among them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = draw(st.integers(1, 700) | st.sampled_from((1024, 65_535, 65_536)))
    scale = 10.0 ** draw(st.integers(-44, 37))
    values = (rng.standard_normal(size) * scale).astype(np.float32)
    values[rng.random(size) < draw(st.sampled_from((0.0, 0.3, 1.0)))] = 0
    return values


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
@given(values=runs(), factor=st.floats(1.0, 2.0**32))
def test_quantising_decoding_and_adding_are_the_same_to_the_bit(
    bits: int, values: NDArray[np.float32], factor: float
) -> None:
    seen = []
    for kernels in BOTH:
        scales = np.empty(-(-values.size // 256), np.float32)
        code = np.empty(packed_bytes(values.size, bits), np.uint8)
        decoded = np.empty(values.size, np.float32)
        sums, some = np.zeros(values.size, np.int64), np.zeros(2 * values.size, np.int64)
        kernels.quantise(values, bits, scales, code)
        kernels.dequantise(scales, code, bits, decoded)
        kernels.add(decoded.clip(-1024, 1024), factor, sums, None)
        kernels.add(decoded.clip(-1024, 1024), factor, some, np.arange(0, some.size, 2))
        seen.append([each.tobytes() for each in (scales, code, decoded, sums, some)])

    assert seen[0] == seen[1]


@given(runs(), st.integers(1, 0x7F80_0000))
def test_the_same_values_are_above_a_threshold(values: NDArray[np.float32], bits: int) -> None:
    values[::50] = np.nan

    numpy, numba = (
        kernels.above(values.view(np.uint32), np.uint32(bits)).tolist() for kernels in BOTH
    )

    assert numpy == numba


@given(st.binary(max_size=2000))
def test_the_same_bits_are_set(code: bytes) -> None:
    numpy, numba = (kernels.ones(np.frombuffer(code, np.uint8)).tolist() for kernels in BOTH)

    assert numpy == numba
