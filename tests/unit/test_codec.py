"""What the codec promises about single payloads: forms, limits, hostile bytes, exact sums."""

from __future__ import annotations

import hashlib
import json
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import zstandard
from numpy.typing import NDArray

from hetertrain import codec
from hetertrain.codec.indices import decode_gaps, encode_gaps, plan_gaps
from hetertrain.errors import PayloadError

HEADER = struct.Struct("<BBBBII")
DENSE, SPARSE = range(2)
GOLDEN = Path(__file__).parent.parent / "golden"
EVERY_BITS = (8, 4, 2, 1)


def random_delta(size: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def sparse_payload(
    size: int, scale: float, levels: bytes, gaps: bytes, *, bits: int = 8, count: int | None = None
) -> bytes:
    kept = len(levels) if count is None else count
    return HEADER.pack(2, SPARSE, bits, 0, size, kept) + struct.pack("<f", scale) + levels + gaps


def shortened_payload(frame: bytes) -> bytes:
    return HEADER.pack(2, DENSE, 8, 1, 9, 9) + struct.pack("<f", 1.0) + frame


def few_large_delta(size: int = 256) -> NDArray[np.float32]:
    """Most values are small in their block, so their levels take few bits."""
    delta = random_delta(size)
    delta[::97] *= 40
    return delta


def form_of(encoded: codec.Encoded) -> tuple[int, int]:
    return encoded.payload[1], encoded.payload[2]


def test_no_budget_is_exact() -> None:
    delta = random_delta(1000)

    encoded = codec.encode(delta, None)

    assert encoded.decoded.dense().tobytes() == delta.tobytes()
    assert codec.decode(encoded.payload, 1000).tobytes() == delta.tobytes()


@pytest.mark.parametrize(
    ("budget_bytes", "form"),
    [
        (12 + 4000, (DENSE, 32)),
        (12 + 3999, (DENSE, 8)),
        (12 + 16 + 1000, (DENSE, 8)),
        (12 + 16 + 999, (SPARSE, 8)),
        (12 + 16 + 520, (DENSE, 4)),
        (12 + 16 + 300, (DENSE, 2)),
        (12 + 16 + 30, (SPARSE, 1)),
    ],
)
def test_the_form_that_keeps_most_is_taken(budget_bytes: int, form: tuple[int, int]) -> None:
    assert form_of(codec.encode(random_delta(1000), budget_bytes)) == form


def test_few_values_that_are_not_zero_travel_in_full_precision() -> None:
    delta = np.zeros(1000, np.float32)
    delta[[3, 500, 501]] = 1, -100, 3

    encoded = codec.encode(delta, 300)

    assert form_of(encoded) == (SPARSE, 8)
    assert encoded.decoded.indices is not None
    assert encoded.decoded.indices.tolist() == [3, 500, 501]


def test_a_budget_for_no_value_gives_an_empty_payload() -> None:
    encoded = codec.encode(random_delta(1000), codec.MINIMUM_BUDGET_BYTES)

    assert len(encoded.payload) == codec.MINIMUM_BUDGET_BYTES
    assert not encoded.decoded.values().size


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
    assert np.all(np.abs(encoded.decoded.dense() - wide) <= np.abs(wide))


@pytest.mark.parametrize(("bits", "top"), [(8, 127), (4, 7)])
def test_levels_are_off_by_half_a_step_at_most(bits: int, top: int) -> None:
    delta = random_delta(1024)

    encoded = codec.encode(delta, 1100, bits=bits)

    errors = np.abs(encoded.decoded.dense() - delta).reshape(4, 256)
    half_steps = np.abs(delta).reshape(4, 256).max(axis=1) / (2 * top)
    assert form_of(encoded) == (DENSE, bits)
    assert np.all(errors <= half_steps[:, np.newaxis] * 1.0001)


@pytest.mark.parametrize(("bits", "share"), [(2, 0.1188), (1, 0.3634)])
def test_few_bits_lose_what_the_best_quantiser_of_gaussian_values_loses(
    bits: int, share: float
) -> None:
    delta = random_delta(100_000)

    decoded = codec.encode(delta, 100_000, bits=bits).decoded.dense()

    lost = np.square(delta - decoded, dtype=np.float64).sum() / np.square(delta).sum()
    assert lost == pytest.approx(share, rel=0.02)


@pytest.mark.parametrize("bits", EVERY_BITS)
@pytest.mark.parametrize("size", [255, 256, 257, 263, 511, 512, 70_001])
def test_levels_of_every_length_survive_packing(bits: int, size: int) -> None:
    delta = random_delta(size)

    encoded = codec.encode(delta, 2 * size, bits=bits)

    assert form_of(encoded) == (DENSE, bits)
    assert codec.decode(encoded.payload, size).tobytes() == encoded.decoded.values().tobytes()
    assert np.array_equal(np.sign(encoded.decoded.values()), np.sign(delta)) or bits >= 4


@pytest.mark.parametrize(("bits", "saved"), [(8, 0.15), (4, 0.3)])
def test_levels_that_are_mostly_small_are_shortened(bits: int, saved: float) -> None:
    delta = few_large_delta(50_000)
    plain_bytes = codec.MINIMUM_BUDGET_BYTES + 4 * 196 + delta.size * bits // 8

    encoded = codec.encode(delta, plain_bytes, bits=bits)

    assert len(encoded.payload) < (1 - saved) * plain_bytes
    decoded = codec.decode(encoded.payload, delta.size)
    assert decoded.tobytes() == encoded.decoded.dense().tobytes()


def test_the_largest_values_are_kept_and_ties_go_to_the_lower_index() -> None:
    delta = np.zeros(1000, np.float32)
    delta[[900, 5, 400]] = 1
    delta[700] = -2

    for budget_bytes in range(codec.MINIMUM_BUDGET_BYTES, 40):
        indices = codec.encode(delta, budget_bytes, bits=8).decoded.indices
        assert indices is not None
        assert indices.tolist() == sorted([700, 5, 400, 900][: indices.size])
    assert indices.size == 4


def test_of_equal_values_the_first_are_kept() -> None:
    indices = codec.encode(np.ones(1000, np.float32), 60, bits=8).decoded.indices

    assert indices is not None
    assert indices.size > 20
    assert indices.tolist() == list(range(indices.size))


def test_the_largest_are_found_in_a_vector_that_is_only_sampled() -> None:
    delta = random_delta(300_000)
    delta[::7] *= 100
    delta[200_000:] = 0

    indices = codec.encode(delta, 4000, bits=4).decoded.indices

    assert indices is not None
    by_size = np.argsort(-np.abs(delta), kind="stable")
    assert np.array_equal(indices, np.sort(by_size[: indices.size]))


def test_zeros_are_never_kept() -> None:
    delta = np.zeros(1000, np.float32)
    delta[[3, 500]] = 1

    assert codec.encode(delta, 900).decoded.values().tolist() == [1, 1]


def test_most_of_the_budget_is_used_where_there_is_enough_to_send() -> None:
    delta = random_delta(100_000)

    used = [len(codec.encode(delta, budget).payload) / budget for budget in (100, 4000, 90_000)]

    assert min(used[:2]) > 0.98


@pytest.mark.parametrize("size", [128, 16_513, 2_113_665])
def test_gaps_of_every_length_survive(size: int) -> None:
    delta = np.zeros(size, np.float32)
    delta[[0, size - 1]] = 127

    assert np.array_equal(codec.encode(delta, 40).decoded.dense(), delta)


@pytest.mark.parametrize(
    ("share", "within"), [(0.0001, 1.02), (0.01, 1.0075), (0.1, 1.02), (0.4, 1.04)]
)
def test_indices_take_little_more_than_their_entropy(share: float, within: float) -> None:
    size = 2_000_000
    indices = np.flatnonzero(np.random.default_rng(1).random(size) < share)

    code = encode_gaps(plan_gaps(indices))

    p = indices.size / size
    entropy_bytes = -size * (p * np.log2(p) + (1 - p) * np.log2(1 - p)) / 8
    assert len(code) <= entropy_bytes * within
    assert np.array_equal(decode_gaps(np.frombuffer(code, np.uint8), indices.size, size), indices)


def test_indices_cost_less_where_density_varies() -> None:
    rng = np.random.default_rng(1)
    density = np.repeat([0.0005, 0.05, 0.001, 0.02], 500_000)
    indices = np.flatnonzero(rng.random(density.size) < density)
    one_for_all = np.flatnonzero(rng.random(density.size) < density.mean())

    assert plan_gaps(indices).num_bytes < 0.9 * plan_gaps(one_for_all).num_bytes


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("codec_*.bin")), ids=lambda path: path.stem)
def test_payloads_of_this_and_the_version_before_are_read(path: Path) -> None:
    expected = json.loads((GOLDEN / "codec.json").read_text())[path.stem]

    decoded = codec.decode(path.read_bytes(), expected["size"])

    digest = hashlib.blake2b(decoded.astype("<f4").tobytes(), digest_size=16).hexdigest()
    assert digest == expected["decoded_blake2b"]


def every_form() -> dict[str, bytes]:
    wide = np.zeros(40_000, np.float32)
    wide[[3, 250, 30_000]] = 1, -2, 3
    small = random_delta(40)
    forms = {"float32": codec.encode(small, None).payload}
    for bits in EVERY_BITS:
        forms[f"dense {bits}"] = codec.encode(small, 70, bits=bits).payload
        forms[f"sparse {bits}"] = codec.encode(small, 23, bits=bits).payload
    forms["wide gaps"] = codec.encode(wide, 30).payload
    forms["shortened"] = codec.encode(few_large_delta(), 300, bits=8).payload
    return forms | {
        path.stem: path.read_bytes() for path in GOLDEN.glob("codec_1_sparse_*wide.bin")
    }


FORMS = every_form()


@pytest.mark.parametrize("payload", FORMS.values(), ids=FORMS)
def test_every_truncation_and_every_extension_is_refused(payload: bytes) -> None:
    size = HEADER.unpack_from(payload)[3]

    for length in range(len(payload)):
        with pytest.raises(PayloadError):
            codec.parse(payload[:length], size)
    with pytest.raises(PayloadError):
        codec.parse(payload + b"\0", size)


@pytest.mark.parametrize("payload", FORMS.values(), ids=FORMS)
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
        assert decoded.values().shape == (size,)
    else:
        assert decoded.values().shape == decoded.indices.shape
        assert np.all(np.diff(decoded.indices, prepend=-1, append=size) > 0)


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(sparse_payload(9, np.nan, b"\1", b"\0\1"), id="NaN scale"),
        pytest.param(sparse_payload(9, np.inf, b"\1", b"\0\1"), id="infinite scale"),
        pytest.param(sparse_payload(9, -1.0, b"\1", b"\0\1"), id="negative scale"),
        pytest.param(sparse_payload(9, 3e38, b"\x7f", b"\0\1"), id="value overflows"),
        pytest.param(sparse_payload(9, 1.0, b"\1", b"\0\0\2"), id="index = size"),
        pytest.param(sparse_payload(9, 1.0, b"\1\1", b"\0\x10\2"), id="second index = size"),
        pytest.param(sparse_payload(9, 1.0, b"\1", b"\x1f" + bytes(31) + b"\1"), id="parameter 31"),
        pytest.param(sparse_payload(9, 1.0, b"\1", b"\x1e" + bytes(4) + b"\2"), id="gap of 2**30"),
        pytest.param(sparse_payload(9, 1.0, b"\1\1", b"\0\1"), id="one gap too few"),
        pytest.param(sparse_payload(9, 1.0, b"\1", b"\0\3"), id="one gap too many"),
        pytest.param(sparse_payload(9, 1.0, b"\1", b"\0\1\0"), id="bytes behind the last gap"),
        pytest.param(sparse_payload(9, 1.0, b"\1", b"\x09\1"), id="low bits cut off"),
        pytest.param(sparse_payload(9, 1.0, b"\1", b""), id="no gaps"),
        pytest.param(HEADER.pack(2, SPARSE, 8, 0, 9, 10) + bytes(24), id="more kept than there"),
        pytest.param(HEADER.pack(2, DENSE, 8, 0, 9, 8) + bytes(12), id="dense, one missing"),
        pytest.param(HEADER.pack(2, DENSE, 32, 0, 9, 9) + b"\xff" * 36, id="NaN value"),
        pytest.param(HEADER.pack(2, SPARSE, 32, 0, 9, 0), id="sparse float32"),
        pytest.param(HEADER.pack(2, DENSE, 3, 0, 9, 9) + bytes(8), id="3 bits"),
        pytest.param(HEADER.pack(3, SPARSE, 8, 0, 9, 0), id="version unknown"),
        pytest.param(HEADER.pack(0, SPARSE, 8, 0, 9, 0), id="version 0"),
        pytest.param(HEADER.pack(2, 2, 8, 0, 9, 0), id="form unknown"),
        pytest.param(HEADER.pack(2, SPARSE, 8, 1, 9, 0), id="sparse, shortened"),
        pytest.param(shortened_payload(b"no frame"), id="no frame of zstd"),
        pytest.param(shortened_payload(zstandard.compress(bytes(8))), id="a level too few"),
        pytest.param(shortened_payload(zstandard.compress(bytes(1 << 30))), id="bomb"),
        pytest.param(
            shortened_payload(zstandard.compress(bytes(9)) + b"\0"), id="behind the frame"
        ),
        pytest.param(HEADER.pack(2, DENSE, 32, 1, 9, 9) + bytes(36), id="float32, shortened"),
        pytest.param(HEADER.pack(2, DENSE, 8, 2, 9, 9) + bytes(13), id="packing unknown"),
        pytest.param(HEADER.pack(2, SPARSE, 8, 0, 8, 0), id="other size"),
        pytest.param(HEADER.pack(1, 3, 0, 0, 9, 0), id="kind of version 1 unknown"),
        pytest.param(HEADER.pack(1, 2, 8, 0, 9, 0), id="reserved bits of version 1 set"),
    ],
)
def test_a_malformed_payload_is_refused_and_changes_no_sum(payload: bytes) -> None:
    sums = np.zeros(9, np.int64)

    with pytest.raises(PayloadError):
        codec.decode_into(sums, payload, 1.0)

    assert not sums.any()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("second", range(3))
@pytest.mark.parametrize("bits", [0, 1, 8, 32])
def test_a_header_that_claims_a_huge_vector_allocates_nothing(
    version: int, second: int, bits: int
) -> None:
    size = 2**31 - 1
    payload = HEADER.pack(version, second, bits, 0, size, size) + bytes(100)

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


@pytest.mark.parametrize("offset", range(8))
@pytest.mark.parametrize("budget_bytes", [None, 300_000, 9_000])
def test_a_payload_that_is_taken_over_decodes_to_the_same(
    offset: int, budget_bytes: int | None
) -> None:
    delta = random_delta(300_000)
    payload = codec.encode(delta, budget_bytes).payload
    content = memoryview(bytearray(offset) + payload)[offset:]

    owned = codec.decode_owned(content, delta.size)

    assert owned.tobytes() == codec.decode(payload, delta.size).tobytes()
    assert owned.flags.writeable
    assert (owned.base is None) == (budget_bytes is not None)


def test_a_whole_model_is_the_payload_that_encodes_it_exactly() -> None:
    head, values = codec.whole(delta := random_delta(1000))

    assert head + bytes(values) == codec.encode(delta, None).payload


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

    assert (decoded.values().size, decoded.norm(), decoded.peak()) == (0, 0.0, 0.0)
