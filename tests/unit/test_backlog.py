"""What a gateway has accepted, through kills between any two writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetertrain.core.combiner import REFUSED_SECONDS, Combiner, Forward, PartialSettled
from hetertrain.core.events import BundleArrived, Tick, UpdateArrived
from hetertrain.core.gate import Gate, Outcome, Verdict
from hetertrain.core.policy import SYNC_PRESETS, Statistics, WeightPolicy
from hetertrain.core.update import GROUPS_MAX
from hetertrain.errors import FrameError
from hetertrain.logging import silent_logger
from hetertrain.wire.contents import pack_update, unpack_arrival
from hetertrain_edge.backlog import Backlog
from hetertrain_edge.forwarding import Form, Forwarding
from tests.builders import LAYOUT, SIZE, make_update

SAP = SYNC_PRESETS["sap"]
BUDGET_BYTES = 1000


class Gateway:
    """A backlog and its combiner; ``restart`` is what a kill leaves."""

    def __init__(self, directory: Path, form: Form = Form.BUNDLE) -> None:
        self.directory, self.form = directory, form
        self.lineage = ""
        self.restart()

    def restart(self) -> tuple[int, bytes] | None:
        forwarding = Forwarding(self.form, "gateway", self.directory, silent_logger())
        self.backlog = Backlog(self.directory, 1, forwarding, silent_logger())
        gate = Gate(LAYOUT, SIZE, 0, SAP.max_lag, self.lineage)
        statistics = {version: Statistics() for version in range(100)}
        self.combiner = Combiner(gate, SAP, WeightPolicy(), 99, statistics)
        return self.backlog.recover(self.combiner, 0.0)

    def accept(self, *keys: tuple[str, int], base_version: int = 99) -> Forward | None:
        forward = None
        for key in keys:
            update = make_update(*key, base_version=base_version)
            ready = self.combiner.handle(UpdateArrived(update, pack_update(update)), 1.0)
            if ready.seals:
                self.backlog.commit()
                self.backlog.seal()
            self.backlog.accept([arrived.content for arrived in ready.persist])
            forward = forward or ready.forward
        self.backlog.commit()
        return forward

    def keys(self, content: bytes) -> list[tuple[str, int]]:
        arrived = unpack_arrival(content)
        assert isinstance(arrived, BundleArrived)
        return [(update.node, update.seq) for update in arrived.updates]

    def store(self, forward: Forward | None) -> tuple[int, bytes]:
        assert forward is not None
        return self.backlog.store(forward, self.combiner, BUDGET_BYTES)


@pytest.fixture
def gateway(tmp_path: Path) -> Gateway:
    return Gateway(tmp_path)


def test_a_kill_before_a_partial_is_in_the_outbox_forwards_its_updates_again(
    gateway: Gateway,
) -> None:
    gateway.accept(("n0", 1))
    gateway.backlog.inbox.remark(0, 7)
    assert gateway.restart() is None
    assert gateway.combiner.num_collected == 1
    ready = gateway.combiner.handle(PartialSettled(Verdict("gateway", 0, Outcome.MERGED)), 2.0)
    assert gateway.keys(gateway.store(ready.forward)[1]) == [("n0", 1)]


def test_a_kill_after_a_refusal_was_heard_collects_each_update_once(gateway: Gateway) -> None:
    seq, _ = gateway.store(gateway.accept(("n0", 1)))
    gateway.accept(("n1", 1))
    verdict = Verdict("gateway", seq, Outcome.REJECTED)
    for _ in range(2):
        kept = gateway.backlog.take_back(verdict, gateway.combiner)
        gateway.combiner.recollect(kept, 1.0)
        pending = gateway.restart()
        assert pending is not None
    gateway.backlog.take_back(verdict, gateway.combiner)
    gateway.backlog.settle(seq)
    gateway.combiner.handle(PartialSettled(verdict), 2.0)
    ready = gateway.combiner.handle(Tick(), 2.0 + REFUSED_SECONDS)
    _, content = gateway.store(ready.forward)
    assert sorted(gateway.keys(content)) == [("n0", 1), ("n1", 1)]
    assert gateway.restart() is not None


def test_work_of_a_run_that_ended_is_counted_and_not_kept(gateway: Gateway) -> None:
    seq, _ = gateway.store(gateway.accept(("n0", 1)))
    gateway.lineage = "another"
    assert gateway.restart() is not None
    refused = Verdict("gateway", seq, Outcome.REJECTED)
    kept = gateway.backlog.take_back(refused, gateway.combiner)
    gateway.combiner.recollect(kept, 1.0)
    gateway.backlog.settle(seq)
    assert gateway.combiner.num_orphaned == 1
    assert gateway.backlog.inbox.num_records == 0


def test_a_partial_has_few_base_versions_however_many_a_day_brings(gateway: Gateway) -> None:
    gateway.combiner.is_in_flight = True
    for base in range(50, 99):
        gateway.accept(("n0", base), base_version=base)
    partials = [*gateway.combiner.sealed, gateway.combiner.open]
    assert max(len(partial.groups) for partial in partials) == GROUPS_MAX
    assert gateway.restart() is None
    again = [*gateway.combiner.sealed, gateway.combiner.open]
    assert [p.contributions.keys() for p in again] == [p.contributions.keys() for p in partials]


def test_an_integer_that_no_buffer_holds_is_refused_as_a_frame() -> None:
    update = replace(make_update("n0", 1), integers=(2**64 - 1,))
    with pytest.raises(FrameError, match="integers"):
        unpack_arrival(pack_update(update))
