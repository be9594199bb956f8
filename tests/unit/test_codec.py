"""What the codec promises about single payloads: forms, limits, hostile bytes, exact sums."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
from numpy.typing import NDArray

from hetertrain import codec
from hetertrain.errors import PayloadError

HEADER = struct.Struct("<BBHII")
DENSE_FLOAT32, DENSE_INT8, SPARSE_INT8 = range(3)


def random_delta(size: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def sparse_payload(
    size: int, scale: float, levels: bytes, gaps: bytes, count: int | None = None
) -> bytes:
    kept = len(levels) if count is None else count
    return HEADER.pack(1, SPARSE_INT8, 0, size, kept) + struct.pack("<f", scale) + levels + gaps


def kind_of(encoded: codec.Encoded) -> int:
    return encoded.payload[1]


def test_no_budget_is_exact() -> None:
    delta = random_delta(1000)

    encoded = codec.encode(delta, None)

    assert encoded.decoded.tobytes() == delta.tobytes()
    assert codec.decode(encoded.payload, 1000).tobytes() == delta.tobytes()


@pytest.mark.parametrize(
    ("budget_bytes", "kind"),
    [
        (12 + 4000, DENSE_FLOAT32),
        (12 + 3999, DENSE_INT8),
        (12 + 16 + 1000, DENSE_INT8),
        (12 + 16 + 999, SPARSE_INT8),
    ],
)
def test_the_richest_form_that_fits_is_taken(budget_bytes: int, kind: int) -> None:
    assert kind_of(codec.encode(random_delta(1000), budget_bytes)) == kind


def test_a_budget_for_no_value_gives_an_empty_payload() -> None:
    encoded = codec.encode(random_delta(1000), codec.MINIMUM_BUDGET_BYTES)

    assert len(encoded.payload) == codec.MINIMUM_BUDGET_BYTES
    assert not encoded.decoded.any()


def test_a_budget_below_the_minimum_is_refused() -> None:
    with pytest.raises(ValueError, match="budget"):
        codec.encode(random_delta(10), codec.MINIMUM_BUDGET_BYTES - 1)


@pytest.mark.parametrize("wrong", [np.zeros(4), np.zeros((2, 2), np.float32)])
def test_other_than_a_float32_vector_is_refused(wrong: NDArray[np.float32]) -> None:
    with pytest.raises(ValueError, match="float32 vector"):
        codec.encode(wrong, None)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("budget_bytes", [None, 1100, 40])
def test_a_delta_that_is_not_finite_is_never_encoded(bad: float, budget_bytes: int | None) -> None:
    delta = random_delta(1000)
    delta[17] = bad

    with pytest.raises(PayloadError):
        codec.encode(delta, budget_bytes)


@pytest.mark.parametrize("extreme", [3.4028235e38, 1.1754944e-38, 2.5e-43, 1e-44, 1e-45])
@pytest.mark.parametrize("budget_bytes", [400, 40])
def test_extreme_magnitudes_never_decode_further_off_than_zero(
    extreme: float, budget_bytes: int
) -> None:
    delta = np.full(300, extreme, np.float32)
    delta[::2] *= -1

    encoded = codec.encode(delta, budget_bytes)

    wide = delta.astype(np.float64)
    assert np.all(np.abs(encoded.decoded - wide) <= np.abs(wide))


def test_int8_is_off_by_half_a_level_at_most() -> None:
    delta = random_delta(1024)

    encoded = codec.encode(delta, 1100)

    errors = np.abs(encoded.decoded - delta).reshape(4, 256)
    half_levels = np.abs(delta).reshape(4, 256).max(axis=1) / 254
    assert np.all(errors <= half_levels[:, np.newaxis] * 1.0001)


def test_the_largest_values_are_kept_and_ties_go_to_the_lower_index() -> None:
    delta = np.zeros(1000, np.float32)
    delta[[900, 5, 400]] = 1
    delta[700] = -2

    three_values = codec.MINIMUM_BUDGET_BYTES + 4 + 3 + 1 + 2 + 2
    indices = codec.parse(codec.encode(delta, three_values).payload, 1000).indices

    assert indices is not None
    assert indices.tolist() == [5, 400, 700]


def test_of_equal_values_the_first_are_kept() -> None:
    indices = codec.parse(codec.encode(np.ones(1000, np.float32), 116).payload, 1000).indices

    assert indices is not None
    assert indices.tolist() == list(range(50))


def test_zeros_are_never_kept() -> None:
    delta = np.zeros(1000, np.float32)
    delta[[3, 500]] = 1

    assert codec.parse(codec.encode(delta, 900).payload, 1000).values.tolist() == [1, 1]


def test_most_of_the_budget_is_used_where_there_is_enough_to_send() -> None:
    delta = random_delta(100_000)

    used = [len(codec.encode(delta, budget).payload) / budget for budget in (100, 4000, 90_000)]

    assert min(used) > 0.8


def test_error_feedback_delivers_everything_in_the_end() -> None:
    deltas = [random_delta(2000, seed) for seed in range(20)]
    residual = np.zeros(2000, np.float32)
    received = np.zeros(2000, np.float64)

    for delta in deltas:
        wanted = delta + residual
        encoded = codec.encode(wanted, 300)
        residual = wanted - encoded.decoded
        received += encoded.decoded

    np.testing.assert_allclose(received + residual, np.sum(deltas, axis=0, dtype=float), atol=1e-5)


@pytest.mark.parametrize("size", [128, 129, 16_512, 16_513, 2_113_665])
def test_gaps_of_every_length_survive(size: int) -> None:
    delta = np.zeros(size, np.float32)
    delta[[0, size - 1]] = 127

    assert np.array_equal(codec.encode(delta, 40).decoded, delta)


FORMS = ("float32", "int8", "sparse", "sparse with wide gaps")


def every_form() -> list[bytes]:
    wide = np.zeros(40_000, np.float32)
    wide[[3, 250, 30_000]] = 1, -2, 3
    small = random_delta(40)
    budgets = (None, 70, 40)
    return [codec.encode(small, budget).payload for budget in budgets] + [
        codec.encode(wide, 30).payload
    ]


@pytest.mark.parametrize("payload", every_form(), ids=FORMS)
def test_every_truncation_and_every_extension_is_refused(payload: bytes) -> None:
    size = HEADER.unpack_from(payload)[3]

    for length in range(len(payload)):
        with pytest.raises(PayloadError):
            codec.parse(payload[:length], size)
    with pytest.raises(PayloadError):
        codec.parse(payload + b"\0", size)


@pytest.mark.parametrize("payload", every_form(), ids=FORMS)
def test_every_changed_byte_is_refused_or_still_names_valid_places(payload: bytes) -> None:
    size = HEADER.unpack_from(payload)[3]

    for place in range(len(payload)):
        for mask in range(1, 256):
            changed = bytearray(payload)
            changed[place] ^= mask
            assert_refused_or_valid(bytes(changed), size)


def assert_refused_or_valid(payload: bytes, size: int) -> None:
    try:
        decoded = codec.parse(payload, size)
    except PayloadError:
        return
    assert decoded.size == size
    assert np.isfinite(decoded.values).all()
    if decoded.indices is None:
        assert decoded.values.shape == (size,)
    else:
        assert decoded.values.shape == decoded.indices.shape
        assert np.all(np.diff(decoded.indices, prepend=-1, append=size) > 0)


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(sparse_payload(9, np.nan, b"\1", b"\0"), id="NaN scale"),
        pytest.param(sparse_payload(9, np.inf, b"\1", b"\0"), id="infinite scale"),
        pytest.param(sparse_payload(9, -1.0, b"\1", b"\0"), id="negative scale"),
        pytest.param(sparse_payload(9, 3e38, b"\x7f", b"\0"), id="value overflows"),
        pytest.param(sparse_payload(9, 1.0, b"\x80", b"\0"), id="level -128"),
        pytest.param(sparse_payload(9, 1.0, b"\1", b"\x09"), id="index = size"),
        pytest.param(sparse_payload(9, 1.0, b"\1\1", b"\x04\x04"), id="second index = size"),
        pytest.param(sparse_payload(9, 1.0, b"\1", b"\x84\x00"), id="gap not shortest"),
        pytest.param(sparse_payload(9, 1.0, b"\1", b"\x80" * 4 + b"\x7f"), id="gap of 2**34"),
        pytest.param(sparse_payload(9, 1.0, b"\1\1", b"\0\x80"), id="gap cut off"),
        pytest.param(sparse_payload(9, 1.0, b"\1", b"\0\x80"), id="half a gap too many"),
        pytest.param(sparse_payload(9, 1.0, b"\1\1", b"\0\0\0"), id="one gap too many"),
        pytest.param(HEADER.pack(1, SPARSE_INT8, 0, 9, 10) + bytes(24), id="more kept than there"),
        pytest.param(HEADER.pack(1, DENSE_INT8, 0, 9, 8) + bytes(12), id="dense, one missing"),
        pytest.param(HEADER.pack(1, DENSE_FLOAT32, 0, 9, 9) + b"\xff" * 36, id="NaN value"),
        pytest.param(HEADER.pack(2, SPARSE_INT8, 0, 9, 0), id="version unknown"),
        pytest.param(HEADER.pack(1, 3, 0, 9, 0), id="kind unknown"),
        pytest.param(HEADER.pack(1, SPARSE_INT8, 1, 9, 0), id="reserved bits set"),
        pytest.param(HEADER.pack(1, SPARSE_INT8, 0, 8, 0), id="other size"),
    ],
)
def test_a_malformed_payload_is_refused_and_changes_no_sum(payload: bytes) -> None:
    sums = np.zeros(9, np.int64)

    with pytest.raises(PayloadError):
        codec.decode_into(sums, payload, 1.0)

    assert not sums.any()


def test_a_gap_of_six_bytes_is_refused_in_the_longest_vector_too() -> None:
    size = 2**31 - 1

    with pytest.raises(PayloadError, match="a gap takes over"):
        codec.parse(sparse_payload(size, 1.0, b"\1\1", b"\x80" * 5 + b"\1\0"), size)


@pytest.mark.parametrize("kind", [DENSE_FLOAT32, DENSE_INT8, SPARSE_INT8])
def test_a_header_that_claims_a_huge_vector_allocates_nothing(kind: int) -> None:
    size = 2**31 - 1
    payload = HEADER.pack(1, kind, 0, size, size) + bytes(100)

    tracemalloc.start()
    with pytest.raises(PayloadError):
        codec.parse(payload, size)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak_bytes < 100_000


def test_a_value_that_could_overflow_a_sum_is_refused() -> None:
    sums = np.zeros(2, np.int64)
    payload = codec.encode(np.array([1, 1024.5], np.float32), None).payload

    with pytest.raises(PayloadError, match="overflow"):
        codec.decode_into(sums, payload, 1.0)

    assert not sums.any()


def test_terms_round_half_to_even_on_the_grid() -> None:
    sums = np.zeros(4, np.int64)
    halves = np.array([0.5, 1.5, 2.5, -0.5], np.float32) * np.float32(2.0**-32)

    codec.decode_into(sums, codec.encode(halves, None).payload, 1.0)

    assert sums.tolist() == [0, 2, 2, 0]


def test_norm_and_peak_are_those_of_the_dense_vector() -> None:
    delta = random_delta(200_000)

    dense = codec.parse(codec.encode(delta, None).payload, delta.size)
    sparse = codec.parse(codec.encode(delta, 9000).payload, delta.size)

    for decoded in (dense, sparse):
        wide = decoded.dense().astype(np.float64)
        assert decoded.norm() == pytest.approx(np.linalg.norm(wide), rel=1e-12)
        assert decoded.peak() == np.abs(wide).max()


def test_an_empty_vector_has_a_payload_too() -> None:
    payload = codec.encode(np.empty(0, np.float32), None).payload

    decoded = codec.parse(payload, 0)

    assert (decoded.values.size, decoded.norm(), decoded.peak()) == (0, 0.0, 0.0)
