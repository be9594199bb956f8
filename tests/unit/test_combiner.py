"""The state machine of a gateway."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hetertrain.core.combiner import (
    CELL_SHARE,
    REFUSED_SECONDS,
    SEALED_AT,
    Combiner,
    PartialSettled,
    VersionAnnounced,
)
from hetertrain.core.events import PartialArrived, SyncNotice, Tick, UpdateArrived
from hetertrain.core.gate import Gate, Outcome, Verdict
from hetertrain.core.members import FlushSettled, MemberSeen
from hetertrain.core.policy import SYNC_PRESETS, Statistics, WeightPolicy
from hetertrain.core.update import Contribution, Group, Partial, cut
from hetertrain.wire.contents import pack_partial, pack_update
from tests.builders import LAYOUT, SIZE, make_aggregator, make_checkpoint, make_update

SAP = replace(SYNC_PRESETS["sap"], sync_quorum=1.0, sync_deadline_seconds=3.0)


def make_combiner(members: int = 4) -> Combiner:
    gate = Gate(LAYOUT, SIZE, 0, SAP.max_lag)
    combiner = Combiner(gate, SAP, WeightPolicy(), 0, {0: Statistics()})
    for number in range(members):
        combiner.members.seen(f"n{number}", 1)
    return combiner


def test_one_partial_is_in_flight_and_updates_gather_meanwhile() -> None:
    combiner = make_combiner()
    assert combiner.handle(UpdateArrived(make_update("n0", 1)), 1.0).forward is not None
    assert combiner.handle(UpdateArrived(make_update("n1", 1)), 1.1).forward is None
    assert combiner.handle(UpdateArrived(make_update("n2", 1)), 9.0).forward is None
    ready = combiner.handle(PartialSettled(Verdict("gateway", 1, Outcome.MERGED)), 9.1)
    assert ready.forward is not None
    assert ready.forward.partial.nodes() == {"n1", "n2"}


def test_a_gateway_weighs_exactly_as_the_cloud_would() -> None:
    combiner, direct, through = make_combiner(), make_aggregator(), make_aggregator()
    updates = [make_update(f"n{n}", 1, 0.1 + n, examples=50 + n, steps=3 + n) for n in range(3)]
    for machine in (direct, through):
        machine.handle(MemberSeen("gateway", 99), 0.0)
    combiner.is_in_flight = True
    for update in updates:
        combiner.handle(UpdateArrived(update), 1.0)
        direct.handle(UpdateArrived(update), 1.0)
    forward = combiner.handle(PartialSettled(Verdict("g", 0, Outcome.MERGED)), 1.1).forward
    through.handle(PartialArrived("gateway", 1, None, forward.partial), 1.2)
    assert through.open.digest() == direct.open.digest()


def test_a_sync_is_relayed_with_time_left_for_the_way_to_the_cloud() -> None:
    combiner = make_combiner(2)
    notice = combiner.handle(SyncNotice(4, 10.0), 1.0).notice
    assert notice == SyncNotice(4, pytest.approx(10.0 * CELL_SHARE))
    combiner.handle(UpdateArrived(make_update("n0", 1, sync=4)), 1.1)
    ready = combiner.handle(FlushSettled("n1", 4), 1.2)
    assert ready.forward is not None
    assert ready.forward.sync == 4


def test_a_silent_vehicle_delays_a_sync_to_the_cells_deadline_at_most() -> None:
    combiner = make_combiner(2)
    combiner.handle(SyncNotice(4, 10.0), 1.0)
    assert combiner.handle(Tick(), 7.9).flushed is None
    assert combiner.handle(Tick(), 8.0).flushed == 4


def test_a_refused_partial_is_rebuilt_without_what_the_cloud_has() -> None:
    combiner = make_combiner()
    kept = make_update("n1", 1)
    combiner.handle(UpdateArrived(make_update("n0", 1)), 1.0)
    verdict = Verdict("gateway", 1, Outcome.REJECTED, known=(("n0", 1),))
    assert combiner.handle(PartialSettled(verdict), 1.1).settled == verdict
    combiner.recollect([kept], 1.2)
    forward = combiner.handle(Tick(), 1.3).forward
    assert forward is not None
    assert forward.partial.contributions.keys() == {("n1", 1)}


@pytest.mark.parametrize("is_sealed", [False, True])
def test_after_a_refusal_nothing_goes_up_until_a_version_came_or_a_while_has_passed(
    is_sealed: bool,
) -> None:
    combiner = make_combiner()
    update = make_update("n0", 1)
    combiner.handle(UpdateArrived(update), 1.0)
    for refused_at in (1.1, 40.0):
        combiner.handle(PartialSettled(Verdict("gateway", 1, Outcome.REJECTED)), refused_at)
        combiner.recollect([update], refused_at)
        if is_sealed:
            combiner.seal()
        held = combiner.handle(Tick(), refused_at + REFUSED_SECONDS - 0.1)
        assert (held.forward, held.wake_at) == (None, refused_at + REFUSED_SECONDS)
        assert combiner.waiting_for().code == "version"
        if refused_at == 1.1:
            ready = combiner.handle(Tick(), refused_at + REFUSED_SECONDS)
        else:
            ready = combiner.handle(VersionAnnounced(1, {}, None), refused_at + 29.95)
        assert ready.forward is not None
        assert ready.forward.partial.contributions.keys() == {("n0", 1)}


def test_an_update_is_durable_before_its_verdict_and_a_repeat_is_a_duplicate() -> None:
    combiner = make_combiner()
    first = combiner.handle(UpdateArrived(make_update("n0", 1)), 1.0)
    again = combiner.handle(UpdateArrived(make_update("n0", 1)), 1.1)
    assert (len(first.persist), first.verdicts[0].outcome) == (1, Outcome.MERGED)
    assert (len(again.persist), again.verdicts[0].outcome) == (0, Outcome.DUPLICATE)


def without_the_cloud(members: int = 2) -> Combiner:
    combiner = make_combiner(members)
    combiner.makes_local = True
    return combiner


def test_a_local_version_is_what_the_cloud_would_cut_of_all_that_is_collected() -> None:
    combiner, cloud = without_the_cloud(), make_aggregator(replace(SAP, cut_fraction=1.0))
    cloud.handle(MemberSeen("elsewhere", 99), 0.0)
    for number, seq in ((0, 1), (1, 1), (0, 2), (1, 2), (0, 3)):
        update = make_update(f"n{number}", seq, 0.1 * seq + number, examples=40 + number)
        combiner.handle(UpdateArrived(update), 1.0 + seq)
        cloud.handle(UpdateArrived(update), 1.0)
    assert combiner.is_in_flight
    local = combiner.local_cut(make_checkpoint())
    expected = cut(
        make_checkpoint(), cloud.open, WeightPolicy(), mean_discount=1.0, max_lag=SAP.max_lag
    )
    np.testing.assert_array_equal(local.vector, expected.vector)
    assert local.version == 0
    # Made anew each time from the checkpoint: nothing adds up twice.
    assert combiner.local_cut(make_checkpoint()).digest() == local.digest()


def test_a_local_version_is_the_sum_of_the_rounds_means() -> None:
    combiner = without_the_cloud()
    combiner.handle(UpdateArrived(make_update("n0", 1)), 1.0)
    for seq in range(2, 11):
        combiner.handle(UpdateArrived(make_update("n0", seq)), float(seq))
    for seq in range(1, 11):
        combiner.handle(UpdateArrived(make_update("n1", seq, 0.3)), float(seq))
    moved = combiner.local_cut(make_checkpoint()).vector
    rate = WeightPolicy().server_rate
    np.testing.assert_allclose(moved, 10 * rate * 0.2, rtol=1e-5)


def test_what_the_cloud_has_is_not_in_a_local_version() -> None:
    combiner = without_the_cloud()
    combiner.handle(UpdateArrived(make_update("n0", 1)), 1.0)
    assert combiner.has_work
    combiner.handle(PartialSettled(Verdict("gateway", 1, Outcome.MERGED)), 1.1)
    assert not combiner.has_work


def test_a_days_updates_become_partials_that_fit_a_frame_and_none_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hetertrain.core.combiner.SEALED_AT", 10)
    combiner = without_the_cloud()
    readies = [
        combiner.handle(UpdateArrived(make_update(f"n{seq % 2}", seq)), float(seq))
        for seq in range(36)
    ]
    forwards = [ready.forward for ready in readies if ready.forward]
    assert sum(ready.seals for ready in readies) == 3
    assert combiner.num_collected == 35
    while combiner.is_in_flight:
        settled = combiner.handle(PartialSettled(Verdict("gateway", 1, Outcome.MERGED)), 99.0)
        forwards += [settled.forward] if settled.forward else []
    assert [len(each.partial.contributions) for each in forwards] == [1, 10, 10, 10, 5]
    assert [each.is_sealed for each in forwards] == [False, True, True, True, False]
    assert set().union(*(f.partial.contributions for f in forwards)) == {
        (f"n{seq % 2}", seq) for seq in range(36)
    }


def test_a_sealed_partial_fits_a_frame_whatever_its_nodes_are_called() -> None:
    partial = Partial()
    worst = (1 << 61, 1 << 61, 1 << 40, 1 << 40, 1 << 32, 1e300)
    for number in range(SEALED_AT):
        key = (f"{number:064d}", worst[0])
        partial.contributions[key] = Contribution(key[0], *worst)
    partial.groups[0] = Group(1.0, np.zeros(SIZE, np.int64))
    assert pack_partial("gateway", 1, None, partial)


def test_statistics_of_a_sealed_partials_bases_outlive_the_gates_need_of_them() -> None:
    combiner = without_the_cloud()
    combiner.is_in_flight = True
    combiner.handle(UpdateArrived(make_update("n0", 1)), 1.0)
    combiner.seal()
    combiner.handle(VersionAnnounced(500, {500: Statistics()}, None), 2.0)
    assert combiner.statistics.keys() == {0, 500}


def test_only_a_run_that_ended_makes_orphans() -> None:
    combiner = without_the_cloud()
    for seq in range(3):
        combiner.handle(UpdateArrived(make_update("n0", seq)), 1.0)
    combiner.handle(VersionAnnounced(9000, {9000: Statistics()}, None), 2.0)
    assert combiner.num_orphaned == 0
    combiner.handle(VersionAnnounced(1, {1: Statistics()}, None, "another"), 3.0)
    assert combiner.num_orphaned == 2
    assert not combiner.has_work


def test_a_cell_that_is_served_an_older_version_after_a_power_cut_is_not_refused() -> None:
    combiner = make_combiner()
    combiner.handle(VersionAnnounced(200, {200: Statistics()}, None), 1.0)
    combiner.serve(7, {7: Statistics()})
    for seq, base in ((1, 7), (2, 200)):
        update = make_update("n0", seq, base_version=base)
        assert combiner.handle(UpdateArrived(update), 2.0).verdicts[0].outcome is Outcome.MERGED
    combiner.handle(VersionAnnounced(201, {201: Statistics()}, None), 3.0)
    late = combiner.handle(UpdateArrived(make_update("n0", 3, base_version=7)), 4.0)
    assert late.verdicts[0].outcome is Outcome.REJECTED


def test_updates_that_go_up_one_by_one_are_sealed_before_the_cloud_takes_no_more() -> None:
    combiner = make_combiner()
    combiner.is_in_flight, combiner.bytes_max = True, 3000
    for seq in range(1, 12):
        combiner.handle(UpdateArrived(make_update("n0", seq)), 1.0)
    sealed = [[*each.contributions] for each in (*combiner.sealed, combiner.open)]
    assert len(sealed) > 2
    assert [key for keys in sealed for key in keys] == [("n0", seq) for seq in range(1, 12)]
    long = replace(make_update("n" * 64, 1), layout="l" * 64, lineage="r" * 64)
    for keys in sealed:
        assert len(keys) * len(pack_update(long)) <= combiner.bytes_max
