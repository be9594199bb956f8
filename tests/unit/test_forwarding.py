"""The forms in which a gateway's partials go up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hetertrain import codec
from hetertrain.core.events import BundleArrived, PartialArrived, UpdateArrived
from hetertrain.core.gate import Outcome, Reason
from hetertrain.core.members import MemberSeen
from hetertrain.core.policy import Statistics, WeightPolicy
from hetertrain.core.update import GROUPS_MAX, Partial, Update
from hetertrain.errors import FrameError
from hetertrain.logging import silent_logger
from hetertrain.wire.contents import (
    pack_bundle,
    pack_partial,
    pack_update,
    unpack_arrival,
    unpack_partial,
)
from hetertrain_edge.forwarding import Form, Forwarding, Passage
from tests.builders import SIZE, make_aggregator, make_update

WEIGHTS = WeightPolicy()
LARGE = 5000
BUDGET_BYTES = 600


def partial_of(updates: list[Update], size: int = SIZE, cap: int = 100) -> Partial:
    partial = Partial()
    for update in updates:
        delta = codec.parse(update.payload, size)
        partial.add(update, delta, WEIGHTS, Statistics(cap * (1 + update.base_version)))
    return partial


class Gateway:
    """Writes partials of a large model; what is on its disk survives ``restart``."""

    def __init__(self, directory: Path, form: Form = Form.ENCODED) -> None:
        self.directory, self.form = directory, form
        self.restart()
        self.rng = np.random.default_rng(1)
        self.seq = 0
        self.updates_bytes = 1 << 40

    def restart(self) -> None:
        self.forwarding = Forwarding(self.form, "gateway", self.directory, silent_logger())

    def some_work(self, bases: tuple[int, ...] = (0, 1)) -> Partial:
        self.seq += 1
        deltas = [self.rng.standard_normal(LARGE).astype(np.float32) for _ in bases]
        updates = [
            make_update(f"n{i}", self.seq, delta, base_version=base)
            for i, (base, delta) in enumerate(zip(bases, deltas, strict=True))
        ]
        return partial_of(updates, LARGE)

    def write(self, partial: Partial, budget_bytes: int = BUDGET_BYTES, lineage: str = "") -> bytes:
        passage = Passage(self.seq, None, partial, lineage, {}, budget_bytes, self.updates_bytes)
        return self.forwarding.write(passage, [pack_update(make_update("n0", 1))])

    def settled(self, outcome: Outcome = Outcome.MERGED) -> None:
        self.forwarding.settled(self.seq, outcome)


@pytest.fixture
def gateway(tmp_path: Path) -> Gateway:
    return Gateway(tmp_path)


def work_in(partial: Partial) -> np.ndarray:
    """In examples times delta."""
    groups = partial.groups.values()
    return sum(group.sums * 2.0**-codec.FRACTION_BITS * group.unit for group in groups)


def carried(content: bytes) -> np.ndarray:
    return work_in(unpack_partial(content)[1])


def test_what_a_thin_uplink_leaves_out_goes_with_the_next_partials(gateway: Gateway) -> None:
    done, sent = np.zeros(LARGE), np.zeros(LARGE)
    for _ in range(5):
        partial = gateway.some_work()
        content = gateway.write(partial)
        assert len(content) < BUDGET_BYTES + 400  # its head
        done, sent = done + work_in(partial), sent + carried(content)
        gateway.settled()
    left = np.linalg.norm(done - sent) / np.linalg.norm(done)
    assert 0.1 < left < 1
    for _ in range(10):
        nothing = gateway.some_work(bases=(3,))
        for group in nothing.groups.values():
            group.sums[:] = 0
        sent += carried(gateway.write(nothing, budget_bytes=LARGE))
        gateway.settled()
    np.testing.assert_allclose(sent, done, rtol=1e-4, atol=0.05)


@pytest.mark.parametrize("crash", ["before its verdict", "after its verdict", "both"])
def test_a_crash_at_any_point_leaves_the_same_residual(gateway: Gateway, crash: str) -> None:
    whole = Gateway(gateway.directory / "whole")
    whole.directory.mkdir()
    contents: dict[str, list[bytes]] = {"whole": [], "crashing": []}
    for _ in range(3):
        for name, one in (("whole", whole), ("crashing", gateway)):
            partial = one.some_work()
            content = one.write(partial)
            contents[name].append(content)
            if name == "crashing" and crash != "after its verdict":
                one.restart()
                one.forwarding.take_up(one.seq, content, partial)
            one.settled()
            if name == "crashing" and crash != "before its verdict":
                # The outbox had not forgotten it yet.
                one.restart()
                one.forwarding.take_up(one.seq, content, partial)
                one.settled(Outcome.DUPLICATE)
    assert contents["crashing"] == contents["whole"]


def test_a_refused_partial_takes_its_residual_back(gateway: Gateway) -> None:
    gateway.write(gateway.some_work())
    gateway.settled()
    partial = gateway.some_work()
    first = gateway.write(partial)
    gateway.settled(Outcome.REJECTED)
    assert gateway.write(partial) == first


def test_what_cannot_be_used_or_is_of_another_run_is_not_carried_on(gateway: Gateway) -> None:
    gateway.write(gateway.some_work())
    gateway.settled(Outcome.QUARANTINED)
    partial = gateway.some_work()
    fresh = Gateway(gateway.directory / "fresh")
    fresh.seq = gateway.seq
    fresh.directory.mkdir()
    assert gateway.write(partial) == fresh.write(partial)
    gateway.settled()
    for _ in range(2):  # Refused once, and put together again.
        assert gateway.write(partial, lineage="another") == fresh.write(partial, lineage="another")
        gateway.settled(Outcome.REJECTED)


def test_another_form_leaves_the_residual_for_later_and_counts_it_once(gateway: Gateway) -> None:
    done, sent = np.zeros(LARGE), np.zeros(LARGE)
    for form in (Form.ENCODED, Form.EXACT, Form.ENCODED):
        partial = gateway.some_work()
        content = gateway.write(partial, budget_bytes=LARGE)
        gateway.form = {Form.ENCODED: Form.EXACT, Form.EXACT: Form.ENCODED}[form]
        gateway.restart()
        gateway.forwarding.take_up(gateway.seq, content, partial)
        gateway.settled()
        done, sent = done + work_in(partial), sent + carried(content)
    residual = gateway.forwarding._residual
    assert residual is not None
    np.testing.assert_allclose(sent + residual, done, rtol=1e-4, atol=0.5)


def test_exact_partials_go_up_in_whichever_form_is_less(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, Form.EXACT)
    partial = gateway.some_work(bases=(0, 1))
    sums_bytes = 2 * 8 * LARGE
    for gateway.updates_bytes, kind in (
        (sums_bytes - 1, BundleArrived),
        (sums_bytes, PartialArrived),
    ):
        assert isinstance(unpack_arrival(gateway.write(partial), "gateway", LARGE), kind)


@pytest.mark.parametrize("form", [Form.BUNDLE, Form.ENCODED])
def test_what_was_collected_within_other_limits_goes_as_sums_that_the_cloud_takes(
    tmp_path: Path, form: Form
) -> None:
    """The gateway was started again with another form, or is of a later release."""
    gateway = Gateway(tmp_path, form)
    partial = gateway.some_work(bases=tuple(range(GROUPS_MAX + 1)))
    arrived = unpack_arrival(gateway.write(partial), "gateway", LARGE)
    assert isinstance(arrived, PartialArrived)
    assert arrived.partial.digest() == partial.digest()


def test_a_residual_that_went_up_is_not_sent_again_though_the_inbox_lost_updates(
    gateway: Gateway,
) -> None:
    gateway.write(gateway.some_work())
    gateway.settled()
    partial = gateway.some_work()
    content = gateway.write(partial)
    gateway.restart()
    del partial.contributions["n1", gateway.seq]
    gateway.forwarding.take_up(gateway.seq, content, partial)
    gateway.settled()
    fresh = Gateway(gateway.directory / "fresh")
    fresh.directory.mkdir()
    following = gateway.some_work()
    fresh.seq = gateway.seq
    assert gateway.write(following) == fresh.write(following)


def bundle_of(updates: list[Update], statistics: dict[int, Statistics]) -> BundleArrived:
    frames = [pack_update(update) for update in updates]
    arrived = unpack_arrival(pack_bundle("gateway", 1, None, frames, "", statistics), "gateway")
    assert isinstance(arrived, BundleArrived)
    return arrived


def test_a_bundle_gives_the_same_sums_as_its_updates_and_as_their_partial() -> None:
    updates = [make_update(f"n{n}", 1, 0.1 + n, examples=50 + n) for n in range(5)]
    machines = [make_aggregator() for _ in range(3)]
    for machine in machines:
        machine.handle(MemberSeen("elsewhere", 99), 0.0)
    for update in updates:
        machines[0].handle(UpdateArrived(update), 1.0)
    partial = Partial()
    for update in updates:
        partial.add(update, codec.parse(update.payload, SIZE), WEIGHTS, Statistics())
    machines[1].handle(PartialArrived("gateway", 1, None, partial), 1.0)
    ready = machines[2].handle(bundle_of(updates, {}), 1.0)
    assert ready.verdicts[0].outcome is Outcome.MERGED
    assert len(ready.persist) == 1
    assert len({machine.open.digest() for machine in machines}) == 1
    again = machines[2].handle(bundle_of(updates, {}), 1.1)
    assert again.verdicts[0].outcome is Outcome.DUPLICATE


def test_each_update_of_a_bundle_is_examined_and_a_bad_one_is_named() -> None:
    machine = make_aggregator()
    machine.handle(MemberSeen("elsewhere", 99), 0.0)
    machine.handle(UpdateArrived(make_update("n1", 1)), 0.5)
    bad = replace(make_update("n2", 1), payload=b"broken")
    updates = [make_update("n0", 1), make_update("n1", 1), bad, make_update("n3", 1)]
    (verdict,) = machine.handle(bundle_of(updates, {}), 1.0).verdicts
    assert verdict.outcome is Outcome.MERGED
    assert [(each.node, each.outcome) for each in verdict.refused] == [("n2", Outcome.QUARANTINED)]
    assert machine.open.contributions.keys() == {("n0", 1), ("n1", 1), ("n3", 1)}


def test_what_a_gateway_admitted_in_time_is_weighed_as_then_however_late_it_comes() -> None:
    machine = make_aggregator()
    machine.handle(MemberSeen("elsewhere", 99), 0.0)
    machine.checkpoint = replace(machine.checkpoint, version=1000)
    machine.statistics = {1000: Statistics(7)}
    late = make_update("n0", 1, base_version=3)
    (refused,) = machine.handle(UpdateArrived(late), 1.0).verdicts
    assert refused.outcome is Outcome.REJECTED
    (verdict,) = machine.handle(bundle_of([late], {3: Statistics(40)}), 1.0).verdicts
    assert verdict.refused == ()
    assert machine.open.groups[3].unit == WEIGHTS.unit(Statistics(40))


def encoded(payloads: list[bytes], *, num_groups: int = 1) -> bytes:
    updates = [make_update(f"n{base}", 1, base_version=base) for base in range(num_groups)]
    return pack_partial("gateway", 1, None, partial_of(updates), "", payloads)


def sums(value: float, size: int = SIZE) -> bytes:
    return codec.encode(np.full(size, value, np.float32), None).payload


@pytest.mark.parametrize(
    "frame",
    [
        encoded([sums(1.0, SIZE + 1)]),
        encoded([sums(1025.0)]),
        encoded([sums(1.0), sums(1.0)]),
        encoded([sums(1.0)], num_groups=2),
        encoded([b"broken"]),
        encoded([sums(1.0)] * (GROUPS_MAX + 1), num_groups=GROUPS_MAX + 1),
        pack_bundle("gateway", 1, None, [], "", {}),
        pack_bundle("gateway", 1, None, [pack_update(make_update("n0", 1))] * 2, "", {}),
        pack_bundle("gateway", 1, None, [b"broken"], "", {}),
    ],
)
def test_malformed_sums_and_bundles_are_refused_as_frames(frame: bytes) -> None:
    with pytest.raises(FrameError):
        unpack_arrival(frame, "gateway", SIZE)


def with_norm(partial: Partial, norm: float) -> None:
    for key, item in partial.contributions.items():
        partial.contributions[key] = replace(item, norm=norm)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda p: p.groups[0].sums.fill(2**42 + 1), Reason.TOO_LARGE),
        (lambda p: p.groups[0].sums.fill(-(2**43)), Reason.TOO_LARGE),
        (lambda p: setattr(p.groups[0], "unit", 1e308), Reason.PARTIAL),
        (lambda p: setattr(p.groups[0], "unit", -1.0), Reason.PARTIAL),
        (lambda p: with_norm(p, 1e308), Reason.NORM),
        (lambda p: with_norm(p, -5.0), Reason.NORM),
        (lambda p: setattr(p, "integers", np.zeros(3, np.int64)), Reason.LAYOUT),
        (lambda p: setattr(p, "integers", None), Reason.LAYOUT),
    ],
)
def test_sums_that_could_overflow_or_do_not_fit_are_quarantined(change, code: Reason) -> None:
    machine, partial = make_aggregator(), partial_of([make_update("n0", 1)], cap=1 << 16)
    change(partial)
    (verdict,) = machine.handle(PartialArrived("gateway", 1, None, partial), 1.0).verdicts
    assert (verdict.outcome, verdict.finding.code) == (Outcome.QUARANTINED, code)
    assert not machine.open.contributions
