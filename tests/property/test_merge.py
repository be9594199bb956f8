"""The algebra of merging: any order, any tree, any crash point give the same model, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hetertrain import codec
from hetertrain.core.events import UpdateArrived
from hetertrain.core.members import MemberSeen
from hetertrain.core.policy import SYNC_PRESETS, WEIGHT_PRESETS, Statistics, WeightPolicy
from hetertrain.core.update import Partial, Update, cut
from hetertrain.wire.contents import pack_partial, pack_update, unpack_partial, unpack_update
from tests.builders import SIZE, make_aggregator, make_checkpoint, make_update

WEIGHTS = WeightPolicy()
STATISTICS = {v: Statistics(examples_cap=300 + v, reference_steps=7.0 + v) for v in range(4)}

values = st.floats(-100, 100, width=32)
deltas = st.lists(values, min_size=SIZE, max_size=SIZE).map(lambda v: np.array(v, np.float32))


@st.composite
def update_sets(draw: st.DrawFn) -> list[Update]:
    keys = draw(
        st.lists(
            st.tuples(st.sampled_from("abcde"), st.integers(0, 9)),
            min_size=1,
            max_size=12,
            unique=True,
        )
    )
    return [
        make_update(
            node,
            seq,
            draw(deltas),
            base_version=draw(st.integers(0, 3)),
            examples=draw(st.integers(1, 10_000)),
            steps=draw(st.integers(1, 1000)),
            integers=(draw(st.integers(0, 99)),),
        )
        for node, seq in keys
    ]


def fold(updates: list[Update]) -> Partial:
    partial = Partial()
    for update in updates:
        delta = codec.parse(update.payload, SIZE)
        partial.add(update, delta, WEIGHTS, STATISTICS[update.base_version])
    return partial


def model_of(partial: Partial) -> str:
    checkpoint = make_checkpoint(version=3, value=1.5)
    return cut(checkpoint, partial, WEIGHTS, mean_discount=0.8, max_lag=9).digest()


@given(update_sets(), st.data())
def test_any_order_and_any_tree_of_partials_give_the_same_digest(
    updates: list[Update], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(updates))
    leaves = [fold([update]) for update in shuffled]
    while len(leaves) > 1:
        first = leaves.pop(data.draw(st.integers(0, len(leaves) - 1)))
        second = leaves.pop(data.draw(st.integers(0, len(leaves) - 1)))
        first.absorb(second)
        leaves.append(first)
    assert leaves[0].digest() == fold(updates).digest()
    assert model_of(leaves[0]) == model_of(fold(updates))


@given(update_sets())
def test_what_travels_is_bit_for_bit_what_was_sent(updates: list[Update]) -> None:
    partial = fold(updates)
    head, arrived = unpack_partial(pack_partial("gateway", 7, None, partial))
    assert (head.node, head.seq, head.sync) == ("gateway", 7, None)
    assert arrived.digest() == partial.digest()
    assert [unpack_update(pack_update(update)) for update in updates] == updates


@given(st.lists(st.tuples(deltas, st.integers(1, 1000)), min_size=1, max_size=6))
def test_with_all_nodes_and_no_lag_a_cut_is_fedavg(
    work: list[tuple[np.ndarray, int]],
) -> None:
    aggregator = make_aggregator(SYNC_PRESETS["fedavg"], WEIGHT_PRESETS["fedavg"])
    for number in range(len(work)):
        aggregator.handle(MemberSeen(f"n{number}"), 0.0)
    cap = aggregator.statistics[0].examples_cap
    for number, (delta, examples) in enumerate(work):
        update = make_update(f"n{number}", 1, delta, examples=examples)
        ready = aggregator.handle(UpdateArrived(update), 1.0)
    assert ready.release is not None
    # The exact mean of what was rounded to the grid once: no other rounding stands between.
    unit = WEIGHT_PRESETS["fedavg"].unit(Statistics())
    total = sum(examples for _, examples in work)
    for index in range(SIZE):
        terms = [
            Fraction(round(float(d[index]) * (examples / cap / 4.0 * 2**32)))
            for d, examples in work
        ]
        exact = float(sum(terms)) * (unit * 2.0**-32 / total)
        assert ready.release.checkpoint.vector[index] == np.float32(exact)


@given(st.lists(deltas, min_size=1, max_size=6))
def test_with_equal_factors_a_cut_at_k_is_fedbuff(work: list[np.ndarray]) -> None:
    """FedBuff (Nguyen et al. 2022): the model moves by η times the mean of K buffered deltas."""
    num_buffered = len(work)
    policy = replace(SYNC_PRESETS["fedbuff"], cut_fraction=0.5)
    aggregator = make_aggregator(policy, replace(WEIGHT_PRESETS["fedbuff"], server_rate=0.5))
    for number in range(2 * num_buffered):
        aggregator.handle(MemberSeen(f"n{number}"), 0.0)
    # A hundred examples out of a cap of 2**16, a quarter of it at most: the same for all.
    scaled = 100 / aggregator.statistics[0].examples_cap / 4.0 * 2**32
    for number, delta in enumerate(work):
        update = make_update(f"n{number}", 1, delta, examples=100)
        ready = aggregator.handle(UpdateArrived(update), 1.0)
    assert ready.release is not None
    unit = WEIGHT_PRESETS["fedbuff"].unit(Statistics())
    for index in range(SIZE):
        terms = [Fraction(round(float(delta[index]) * scaled)) for delta in work]
        mean = float(sum(terms)) * (unit * 2.0**-32 / (100 * num_buffered))
        assert ready.release.checkpoint.vector[index] == np.float32(0.5 * mean)


@given(update_sets(), st.integers(0, 12))
def test_a_crash_and_replay_at_any_point_changes_no_bit(updates: list[Update], crash: int) -> None:
    fresh = [make_update(u.node, u.seq, codec.decode(u.payload, SIZE)) for u in updates]
    aggregator, journal = make_aggregator(), []
    for number in range(8):
        aggregator.handle(MemberSeen(f"m{number}"), 0.0)
    for position, update in enumerate(fresh):
        if position == crash:
            aggregator = make_aggregator()
            for record in journal:
                aggregator.replay(record)
            for number in range(8):
                journal.extend(aggregator.handle(MemberSeen(f"m{number}"), 0.0).persist)
        journal.extend(aggregator.handle(UpdateArrived(update), 1.0).persist)
    replayed = make_aggregator()
    for record in journal:
        replayed.replay(record)
    assert replayed.checkpoint.digest() == aggregator.checkpoint.digest()
    assert replayed.open.digest() == aggregator.open.digest()
