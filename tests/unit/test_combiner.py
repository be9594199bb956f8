"""The state machine of a gateway."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetertrain.core.aggregator import PartialArrived, SyncNotice, Tick, UpdateArrived
from hetertrain.core.combiner import CELL_SHARE, Combiner, PartialSettled
from hetertrain.core.gate import Gate, Outcome, Verdict
from hetertrain.core.members import FlushSettled, MemberSeen
from hetertrain.core.policy import SYNC_PRESETS, Statistics, WeightPolicy
from tests.builders import LAYOUT, SIZE, make_aggregator, make_update

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


def test_an_update_is_durable_before_its_verdict_and_a_repeat_is_a_duplicate() -> None:
    combiner = make_combiner()
    first = combiner.handle(UpdateArrived(make_update("n0", 1)), 1.0)
    again = combiner.handle(UpdateArrived(make_update("n0", 1)), 1.1)
    assert (len(first.persist), first.verdicts[0].outcome) == (1, Outcome.MERGED)
    assert (len(again.persist), again.verdicts[0].outcome) == (0, Outcome.DUPLICATE)
