"""The state machine of a version."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hetertrain import codec
from hetertrain.core.aggregator import Aggregator
from hetertrain.core.events import PartialArrived, SyncOrdered, Tick, UpdateArrived
from hetertrain.core.gate import RUNS_PER_NODE, Gate, Outcome, Seen
from hetertrain.core.members import FlushSettled, MemberGone, MemberSeen
from hetertrain.core.policy import SYNC_PRESETS, Statistics, WeightPolicy
from hetertrain.core.update import Partial
from tests.builders import LAYOUT, SIZE, make_aggregator, make_checkpoint, make_update

SAP = replace(SYNC_PRESETS["sap"], sync_quorum=1.0, sync_deadline_seconds=3.0)


def with_members(count: int, policy=SAP, weights: WeightPolicy | None = None):
    aggregator = make_aggregator(policy, weights)
    for number in range(count):
        aggregator.handle(MemberSeen(f"n{number}"), 0.0)
    return aggregator


def test_a_cut_comes_with_enough_nodes_and_versions_rise_by_one() -> None:
    aggregator = with_members(8)
    first = aggregator.handle(UpdateArrived(make_update("n0", 1)), 1.0)
    second = aggregator.handle(UpdateArrived(make_update("n1", 1)), 1.1)
    assert first.release is None
    assert second.release is not None
    assert second.release.checkpoint.version == 1


def test_a_cut_never_waits_for_a_silent_node() -> None:
    aggregator = with_members(8)
    ready = aggregator.handle(UpdateArrived(make_update("n0", 1)), 1.0)
    assert ready.wake_at == pytest.approx(1.0 + SAP.cut_seconds)
    assert aggregator.handle(Tick(), 1.0 + SAP.cut_seconds).release is not None


def test_a_verdict_comes_with_the_record_that_must_be_durable_before_it() -> None:
    ready = with_members(8).handle(UpdateArrived(make_update("n0", 1)), 1.0)
    assert [verdict.outcome for verdict in ready.verdicts] == [Outcome.MERGED]
    assert len(ready.persist) == 1


def test_a_repeated_update_gets_the_verdict_duplicate_and_changes_nothing() -> None:
    aggregator = with_members(8)
    aggregator.handle(UpdateArrived(make_update("n0", 1)), 1.0)
    before = aggregator.open.digest()
    ready = aggregator.handle(UpdateArrived(make_update("n0", 1, 0.7)), 1.1)
    assert [verdict.outcome for verdict in ready.verdicts] == [Outcome.DUPLICATE]
    assert ready.persist == ()
    assert aggregator.open.digest() == before


def test_a_lone_stale_update_is_discounted() -> None:
    """Dividing by the sum of weights would cancel the discount of an update that is alone."""
    policy = replace(SAP, sync_seconds=None, cut_fraction=1e-9)
    moves = {}
    for base_version in (0, 3):
        aggregator = with_members(1, policy, WeightPolicy(lag_exponent=0.5))
        for seq in range(3):
            aggregator.handle(UpdateArrived(make_update("n0", seq, 0.0, base_version=seq)), 1.0)
        before = aggregator.checkpoint.vector
        aggregator.handle(UpdateArrived(make_update("n0", 9, 0.5, base_version=base_version)), 2.0)
        moves[base_version] = float((aggregator.checkpoint.vector - before)[0])
    assert moves[3] == pytest.approx(2 * moves[0], rel=1e-5)


def test_bounded_staleness_an_update_over_max_lag_is_rejected_with_a_reason() -> None:
    policy = replace(SAP, max_lag=2, cut_fraction=1e-9)
    aggregator = with_members(1, policy)
    for version in range(4):
        aggregator.handle(UpdateArrived(make_update("n0", version, base_version=version)), 1.0)
    late = aggregator.handle(UpdateArrived(make_update("n0", 9, base_version=1)), 2.0).verdicts[0]
    timely = aggregator.handle(UpdateArrived(make_update("n0", 8, base_version=2)), 2.0).verdicts[0]
    assert (late.outcome, timely.outcome) == (Outcome.REJECTED, Outcome.MERGED)
    assert "lag 3 is over 2" in late.reason


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"layout": "another"}, Outcome.REJECTED),
        ({"base_version": 7}, Outcome.REJECTED),
        ({"examples": 0}, Outcome.QUARANTINED),
        ({"steps": 0}, Outcome.QUARANTINED),
        ({"payload": b"rubbish"}, Outcome.QUARANTINED),
        ({"payload": make_update("n0", 1, 2000.0).payload}, Outcome.QUARANTINED),
    ],
)
def test_a_bad_update_is_refused_and_the_model_stays_finite(change, outcome) -> None:
    aggregator = with_members(4)
    ready = aggregator.handle(UpdateArrived(replace(make_update("n0", 1), **change)), 1.0)
    assert ready.verdicts[0].outcome is outcome
    assert ready.verdicts[0].reason
    assert ready.persist == ()


def test_an_update_far_above_the_usual_norm_is_quarantined() -> None:
    aggregator = with_members(1, replace(SAP, cut_fraction=1e-9))
    aggregator.handle(UpdateArrived(make_update("n0", 1, 0.01)), 1.0)
    ready = aggregator.handle(UpdateArrived(make_update("n0", 2, 900.0, base_version=1)), 2.0)
    assert ready.verdicts[0].outcome is Outcome.QUARANTINED
    assert "norm" in ready.verdicts[0].reason


def test_a_sync_closes_when_all_have_flushed_and_releases_a_key_frame() -> None:
    aggregator = with_members(2)
    notice = aggregator.handle(SyncOrdered(), 5.0).notice
    assert notice is not None
    aggregator.handle(UpdateArrived(make_update("n0", 1, sync=notice.sync)), 5.1)
    ready = aggregator.handle(FlushSettled("n1", notice.sync), 5.2)
    assert ready.release is not None
    assert ready.release.sync == notice.sync
    assert ready.release.checkpoint.version == 1


def test_a_sync_never_waits_past_its_deadline() -> None:
    aggregator = with_members(2)
    ready = aggregator.handle(SyncOrdered(), 5.0)
    assert ready.wake_at == pytest.approx(5.0 + SAP.sync_deadline_seconds)
    assert "n0, n1" in aggregator.waiting_for().text
    ready = aggregator.handle(Tick(), 5.0 + SAP.sync_deadline_seconds)
    assert ready.release is not None
    assert ready.release.checkpoint.version == 0


def test_a_sync_does_not_wait_for_a_node_that_is_gone() -> None:
    aggregator = with_members(2)
    notice = aggregator.handle(SyncOrdered(), 5.0).notice
    aggregator.handle(FlushSettled("n0", notice.sync), 5.1)
    assert aggregator.handle(MemberGone("n1"), 5.2).release is not None


def test_syncs_come_at_their_period() -> None:
    aggregator = with_members(2)
    assert aggregator.handle(Tick(), SAP.sync_seconds - 0.1).notice is None
    assert aggregator.handle(Tick(), SAP.sync_seconds).notice is not None


def test_a_partial_with_a_known_contribution_is_refused_and_names_it() -> None:
    aggregator, other = with_members(8), with_members(8)
    aggregator.handle(UpdateArrived(make_update("n0", 1)), 1.0)
    other.handle(UpdateArrived(make_update("n0", 1)), 1.0)
    verdict = aggregator.handle(PartialArrived("gateway", 1, None, other.open), 1.1).verdicts[0]
    assert verdict.outcome is Outcome.REJECTED
    assert verdict.known == (("n0", 1),)


def test_a_malformed_partial_is_quarantined() -> None:
    verdict = with_members(2).handle(PartialArrived("gateway", 1, None, Partial()), 1.0).verdicts[0]
    assert verdict.outcome is Outcome.QUARANTINED


def test_a_node_counts_once_in_the_mass_of_a_cut_however_often_it_sends() -> None:
    aggregator = with_members(16)
    for seq in range(3):
        aggregator.handle(UpdateArrived(make_update("n0", seq, examples=100)), 1.0)
    aggregator.handle(UpdateArrived(make_update("n1", 0, examples=50)), 1.0)
    assert aggregator.open.mass() == 150


def test_integer_buffers_merge_by_maximum() -> None:
    partial = Partial()
    for value in (4, 9, 7):
        partial.absorb(Partial({}, np.array([value]), {}))
    assert partial.integers.tolist() == [9]


def test_the_memory_of_seen_updates_is_bounded_and_never_forgets_upwards() -> None:
    seen = Seen()
    for seq in range(0, 6 * RUNS_PER_NODE, 2):
        seen.add(("n0", seq))
    assert len(seen.above["n0"]) == RUNS_PER_NODE
    assert all(("n0", seq) in seen for seq in range(0, 6 * RUNS_PER_NODE, 2))
    assert ("n0", 6 * RUNS_PER_NODE) not in Seen.from_plain(seen.to_plain())


def test_a_days_work_that_comes_late_is_told_from_work_that_comes_again() -> None:
    """A node sent 1 to 5,000 to a gateway without its cloud, and then 5,000 more to the cloud."""
    seen = Seen()
    for seq in (*range(5001, 10_001), *range(1, 5000)):
        assert ("n0", seq) not in seen
        seen.add(("n0", seq))
    assert seen.to_plain() == {"n0": [-1, [1, 4999], [5001, 10_000]]}
    assert ("n0", 5000) not in seen
    seen.add(("n0", 5000))
    assert Seen.from_plain(seen.to_plain()).above == {"n0": [[1, 10_000]]}


def test_what_a_release_before_wrote_of_seen_updates_is_read() -> None:
    seen = Seen.from_plain({"n0": [3, 5, 6, 9]})
    assert [seq for seq in range(12) if ("n0", seq) in seen] == [0, 1, 2, 3, 5, 6, 9]


def test_a_days_delay_makes_nobody_count_more() -> None:
    """What comes after ``max_lag`` counts with its discount, and is nobody's usual lag."""
    aggregator = with_members(1, replace(SAP, cut_fraction=1e-9, max_lag=4))
    for seq in range(30):
        update = make_update("n0", seq, base_version=aggregator.checkpoint.version)
        aggregator.handle(UpdateArrived(update), float(seq))
    before = aggregator.checkpoint.vector[0]
    for seq in range(100, 140):
        late = Partial()
        update = make_update("n1", seq, 0.1)
        late.add(update, codec.parse(update.payload, SIZE), WeightPolicy(), Statistics())
        aggregator.handle(PartialArrived("gateway", seq, None, late), 50.0 + seq)
    moved = aggregator.checkpoint.vector[0] - before
    weights = aggregator.weights
    assert aggregator.mean_discount == 1.0
    assert moved == pytest.approx(40 * 0.1 * weights.server_rate * weights.discount(4), rel=1e-3)


def test_a_snapshot_restores_the_machine_beside_its_checkpoint() -> None:
    aggregator = with_members(1, replace(SAP, cut_fraction=1e-9))
    aggregator.handle(UpdateArrived(make_update("n0", 1)), 1.0)
    restored = make_aggregator()
    restored.checkpoint = aggregator.checkpoint
    restored.restore(aggregator.snapshot(), aggregator.arrays())
    assert restored.statistics == aggregator.statistics
    assert restored.mean_discount == aggregator.mean_discount
    assert ("n0", 1) in restored.seen


def test_a_node_too_far_ahead_of_the_slowest_is_told_what_to_wait_for() -> None:
    aggregator = with_members(2, SYNC_PRESETS["ssp"])
    holds = []
    for seq in range(5):
        update = make_update("n0", seq, base_version=aggregator.checkpoint.version)
        (verdict,) = aggregator.handle(UpdateArrived(update), float(seq)).verdicts
        holds.append(verdict.hold_until_clock)
    assert SYNC_PRESETS["ssp"].clock_bound == 3
    assert holds == [0, 0, 0, 1, 2]
    assert aggregator.members.slowest == 0


def test_one_who_joins_late_counts_from_where_the_slowest_is() -> None:
    aggregator = with_members(1, SYNC_PRESETS["ssp"])
    for seq in range(6):
        update = make_update("n0", seq, base_version=aggregator.checkpoint.version)
        aggregator.handle(UpdateArrived(update), float(seq))
    aggregator.handle(MemberSeen("late"), 9.0)
    assert aggregator.members.slowest == 6


def test_a_laggard_is_asked_once_for_what_it_has() -> None:
    policy = replace(SAP, cut_fraction=1e-9, sync_seconds=None, pull_lag=2)
    aggregator = with_members(2, policy)
    aggregator.handle(UpdateArrived(make_update("n1", 0)), 0.0)
    pulls = []
    for seq in range(1, 5):
        update = make_update("n0", seq, base_version=aggregator.checkpoint.version)
        pulls.append(aggregator.handle(UpdateArrived(update), float(seq)).pulls)
    assert pulls == [(), ("n1",), (), ()]


def test_an_update_of_another_run_of_the_job_is_refused() -> None:
    """After a job starts anew, the same numbers mean other models."""
    aggregator = with_members(1)
    update = replace(make_update("n0", 1), lineage="the run before")
    (verdict,) = aggregator.handle(UpdateArrived(update), 1.0).verdicts
    assert verdict.outcome is Outcome.REJECTED
    partial = PartialArrived("gateway", 1, None, Partial(), "the run before")
    assert aggregator.handle(partial, 1.0).verdicts[0].outcome is Outcome.REJECTED


def test_the_outer_optimiser_acts_at_a_sync_only_and_leaves_buffers_alone() -> None:
    policy = replace(SAP, cut_fraction=1e-9)
    weights = WeightPolicy(server_rate=1.0, outer="momentum", outer_rate=1.0, outer_momentum=0.5)
    gate = Gate(LAYOUT, SIZE, 0, policy.max_lag)
    is_buffer = np.arange(SIZE) == 0
    aggregator = Aggregator(gate, policy, weights, make_checkpoint(), is_buffer)
    aggregator.handle(MemberSeen("n0"), 0.0)

    def learn(seq: int, now: float, sync: int | None = None) -> float:
        update = make_update("n0", seq, 0.5, base_version=seq, sync=sync)
        aggregator.handle(UpdateArrived(update), now)
        return float(aggregator.checkpoint.vector[1])

    assert learn(0, 1.0) == pytest.approx(0.5)  # a cut
    aggregator.handle(SyncOrdered(), 1.5)
    assert learn(1, 2.0, sync=1) == pytest.approx(1.0)  # the first sync: its drift as it is
    aggregator.handle(SyncOrdered(), 3.0)
    # The second: its drift of 0.5, and half of the drift before.
    assert learn(2, 4.0, sync=2) == pytest.approx(2.0)
    assert aggregator.checkpoint.vector[0] == pytest.approx(1.5)
