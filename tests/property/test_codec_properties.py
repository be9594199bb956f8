"""What the codec promises about any delta, any budget, any bytes and any order."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from hetertrain import codec
from hetertrain.errors import PayloadError

MISJUDGED = 0.03
"""The share of a delta's energy by which the choice among forms may be wrong."""

any_float = st.floats(width=32, allow_nan=False, allow_infinity=False)
gated_float = st.floats(-512, 512, width=32)
"""A level of two bits may decode to nearly twice the largest magnitude; the gate allows 1024."""
normal_float = st.floats(-1024, 1024, width=32, allow_subnormal=False)
budgets = st.integers(codec.MINIMUM_BUDGET_BYTES, 3000)
weights = st.floats(0, 1, exclude_min=True)


def deltas(elements: st.SearchStrategy[float]) -> st.SearchStrategy[NDArray[np.float32]]:
    """Short vectors, sparse ones with wide gaps among them."""
    return arrays(np.float32, st.integers(0, 600), elements=elements, fill=st.just(0.0)) | arrays(
        np.float32, st.integers(1, 40_000), elements=elements, fill=st.just(0.0)
    )


def exact_sums(vectors: list[NDArray[np.float32]], factors: list[float]) -> list[int]:
    """Add in Python's unbounded integers; ``round`` of a float is exact, half to even."""
    sums = [0] * vectors[0].size
    for vector, factor in zip(vectors, factors, strict=True):
        for index in np.flatnonzero(vector):
            sums[index] += round(float(vector[index]) * (factor * 2**32))
    return sums


@given(deltas(any_float), budgets | st.none())
def test_the_receiver_decodes_what_the_sender_believes(
    delta: NDArray[np.float32], budget_bytes: int | None
) -> None:
    encoded = codec.encode(delta, budget_bytes)

    decoded = codec.decode(memoryview(encoded.payload), delta.size)

    assert decoded.tobytes() == encoded.decoded.dense().tobytes()
    assert decoded.shape == delta.shape


@given(deltas(any_float), budgets)
def test_a_payload_is_never_over_its_budget(delta: NDArray[np.float32], budget_bytes: int) -> None:
    assert len(codec.encode(delta, budget_bytes).payload) <= budget_bytes


@given(deltas(any_float), budgets)
def test_the_same_delta_gives_the_same_bytes_wherever_it_lies(
    delta: NDArray[np.float32], budget_bytes: int
) -> None:
    strided = np.repeat(delta, 2)[::2]

    assert codec.encode(strided, budget_bytes).payload == codec.encode(delta, budget_bytes).payload


shaped_deltas = st.builds(
    lambda size, seed, tail: (
        np.random.default_rng(seed).standard_t(tail, size).clip(-1024, 1024).astype(np.float32)
    ),
    st.integers(1, 3000),
    st.integers(0, 2**32),
    st.sampled_from((2, 3, 30)),
)


@given(deltas(normal_float) | shaped_deltas, budgets, budgets)
def test_a_larger_budget_keeps_no_less_energy(
    delta: NDArray[np.float32], one_bytes: int, other_bytes: int
) -> None:
    wide = delta.astype(np.float64)
    small, large = sorted((one_bytes, other_bytes))

    lost_small, lost_large = (
        float(np.square(wide - codec.encode(delta, budget).decoded.dense()).sum())
        for budget in (small, large)
    )

    assert lost_large <= lost_small + MISJUDGED * float(np.square(wide).sum())


@given(st.integers(1, 2000), st.integers(0, 2**32), st.lists(budgets, min_size=1, max_size=20))
def test_what_was_sent_and_the_residual_are_all_that_was_learnt(
    size: int, seed: int, each_budget: list[int]
) -> None:
    rng = np.random.default_rng(seed)
    residual = np.zeros(size, np.float32)
    learnt, received = np.zeros(size), np.zeros(size)

    for budget_bytes in each_budget:
        delta = rng.standard_normal(size, np.float32)
        learnt += delta
        residual += delta
        encoded = codec.encode(residual, budget_bytes)
        received += codec.decode(encoded.payload, size)
        encoded.decoded.subtract_from(residual)

    np.testing.assert_allclose(received + residual, learnt, atol=1e-5 * len(each_budget))


@given(st.binary(max_size=200), st.integers(0, 1000))
def test_no_bytes_raise_anything_but_payload_error(body: bytes, size: int) -> None:
    header = codec.encode(np.zeros(size, np.float32), codec.MINIMUM_BUDGET_BYTES).payload

    for payload in (body, header[:8] + body):
        try:
            decoded = codec.parse(payload, size)
        except PayloadError:
            continue
        assert decoded.dense().shape == (size,)


@given(
    st.integers(1, 600).flatmap(
        lambda size: st.lists(
            st.tuples(arrays(np.float32, size, elements=gated_float), budgets, weights),
            min_size=1,
            max_size=5,
        )
    ),
    st.randoms(use_true_random=False),
)
def test_sums_are_exact_whatever_the_order_and_the_form(
    updates: list[tuple[NDArray[np.float32], int, float]],
    random: Random,
) -> None:
    encoded = [codec.encode(delta, budget_bytes) for delta, budget_bytes, _ in updates]
    factors = [weight for _, _, weight in updates]
    order = list(range(len(updates)))
    random.shuffle(order)
    sums = np.zeros(updates[0][0].size, np.int64)

    for index in order:
        codec.decode_into(sums, encoded[index].payload, factors[index])

    assert sums.tolist() == exact_sums([each.decoded.dense() for each in encoded], factors)


@given(st.integers(0, 2**32), weights)
def test_long_vectors_add_up_across_the_blocks_of_scratch(seed: int, weight: float) -> None:
    delta = np.random.default_rng(seed).standard_normal(140_000).astype(np.float32)
    budgets = (None, 142_500, 140_000, 75_000, 38_000, 20_000, 5_000)
    encoded = [codec.encode(delta, budget) for budget in budgets]
    expected = [np.rint(e.decoded.dense().astype(np.float64) * (weight * 2.0**32)) for e in encoded]
    sums = np.zeros(delta.size, np.int64)

    for each in encoded:
        codec.decode_into(sums, each.payload, weight)

    assert np.array_equal(sums, sum(term.astype(np.int64) for term in expected))
