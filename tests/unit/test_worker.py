"""The state machine of a training node."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hetertrain import codec
from hetertrain.core.events import Pulled, SyncNotice, Tick
from hetertrain.core.gate import Outcome, Verdict
from hetertrain.core.policy import SYNC_PRESETS, SyncPolicy
from hetertrain.core.tiers import TIERS
from hetertrain.core.worker import (
    ModelArrived,
    State,
    Trained,
    TrainerReplaced,
    UpdateSettled,
    Worker,
)
from tests.builders import LAYOUT

SAP = SYNC_PRESETS["sap"]
SIZE = 20_000
NONE = np.empty(0, np.int64)


def make_worker(policy: SyncPolicy = SAP, tier: str = "t3") -> Worker:
    return Worker("n0", policy, TIERS[tier], examples=100, layout=LAYOUT, next_seq=1)


def model(version: int, value: float = 0.0, sync: int | None = None) -> ModelArrived:
    return ModelArrived(version, np.full(SIZE, value, np.float32), NONE, sync)


def trained(value: float, steps: int = 5) -> Trained:
    noise = np.random.default_rng(0).normal(0, 0.1, SIZE).astype(np.float32)
    return Trained(noise + np.float32(value), NONE, steps, 0.1)


def settled(worker: Worker, payload: bytes, outcome: Outcome = Outcome.MERGED) -> UpdateSettled:
    return UpdateSettled(Verdict("n0", worker.next_seq - 1, outcome), payload)


def test_it_trains_as_soon_as_it_has_a_model_and_never_waits_for_the_network() -> None:
    worker = make_worker()
    assert worker.handle(Tick(), 0.0).train is None
    order = worker.handle(model(0), 10.0).train
    assert order is not None
    assert order.start is not None
    after = worker.handle(trained(1.0), 12.0)
    assert after.publish is not None
    assert after.train is not None
    while_in_flight = worker.handle(trained(2.0), 20.0)
    assert while_in_flight.publish is None
    assert while_in_flight.train is not None


def test_what_the_codec_left_out_goes_with_the_next_delta() -> None:
    """Error feedback: all that was decoded plus the rest is all that was learnt."""
    worker = make_worker(tier="t0")
    worker.handle(model(0), 10.0)
    decoded = np.zeros(SIZE, np.float64)
    learnt = np.zeros(SIZE, np.float64)
    for round_number in range(1, 6):
        progress = trained(1.0).local
        learnt += progress
        local = Trained(worker._local + progress, NONE, 5, 0.1)
        ready = worker.handle(local, 10.0 + 2 * round_number)
        assert ready.publish is not None
        assert len(ready.publish.payload) < 2 * SIZE
        decoded += codec.decode(ready.publish.payload, SIZE)
        worker.handle(settled(worker, ready.publish.payload), 10.5 + 2 * round_number)
    np.testing.assert_allclose(decoded + worker._residual, learnt, atol=1e-4)


def test_unsent_progress_survives_a_rebase() -> None:
    worker = make_worker(replace(SAP, pace_seconds=99.0))
    worker.handle(model(0), 10.0)
    worker.handle(model(1, 5.0), 10.1)
    ready = worker.handle(trained(1.0), 10.2)
    assert ready.train is not None
    assert ready.train.start is not None
    np.testing.assert_allclose(ready.train.start[0], trained(1.0).local + 5.0, rtol=1e-5)
    assert worker.version == 1


def test_a_new_version_interrupts_the_trainer_once() -> None:
    worker = make_worker()
    worker.handle(model(0), 10.0)
    assert worker.handle(model(1), 10.1).interrupt
    assert not worker.handle(model(2), 10.2).interrupt


def test_a_synchronous_node_holds_after_its_update_until_the_next_version() -> None:
    worker = make_worker(SYNC_PRESETS["fedavg"])
    worker.handle(model(0), 10.0)
    ready = worker.handle(trained(1.0, steps=20), 11.0)
    assert ready.publish is not None
    assert ready.train is None
    assert worker.state is State.HOLDING
    worker.handle(settled(worker, ready.publish.payload), 11.5)
    assert worker.handle(model(1), 12.0).train is not None


@pytest.mark.parametrize("outcome", [Outcome.REJECTED, Outcome.QUARANTINED])
def test_a_synchronous_node_whose_update_was_refused_makes_another(outcome: Outcome) -> None:
    """Else the version that waits for it would wait until its deadline."""
    worker = make_worker(SYNC_PRESETS["fedavg"])
    worker.handle(model(0), 10.0)
    ready = worker.handle(trained(1.0, steps=20), 11.0)
    assert ready.publish is not None

    again = worker.handle(settled(worker, ready.publish.payload, outcome), 11.5)

    assert again.train is not None
    assert worker.handle(trained(1.0, steps=20), 12.5).publish is not None


def test_a_sync_makes_it_flush_hold_and_start_fresh_from_the_syncs_model() -> None:
    worker = make_worker()
    worker.handle(model(0), 10.0)
    assert worker.handle(SyncNotice(7, 3.0), 10.2).interrupt
    flush = worker.handle(trained(1.0), 10.3)
    assert flush.publish is not None
    assert flush.publish.sync == 7
    assert flush.train is None
    worker.handle(settled(worker, flush.publish.payload), 10.4)
    assert worker.handle(model(1), 10.5).train is None
    order = worker.handle(model(2, sync=7), 10.6).train
    assert order is not None
    assert order.is_fresh


def test_another_trainer_goes_on_from_what_the_last_one_reported() -> None:
    worker = make_worker()
    worker.handle(model(0), 10.0)
    report = trained(1.0)
    worker.handle(report, 10.1)
    order = worker.handle(TrainerReplaced(), 12.0).train
    assert order is not None
    assert order.start is not None
    np.testing.assert_array_equal(order.start[0], report.local)


@pytest.mark.parametrize("asks", [True, False])
def test_a_syncs_model_is_measured_on_the_node_where_the_job_asks_for_it(asks: bool) -> None:
    worker = make_worker(replace(SYNC_PRESETS["sap"], evaluate_on_nodes=asks))
    first = worker.handle(model(0), 10.0).train
    worker.handle(SyncNotice(7, 3.0), 10.2)
    worker.handle(trained(1.0), 10.3)
    order = worker.handle(model(1, sync=7), 10.6).train
    assert first is not None
    assert order is not None
    assert (first.measures, order.measures) == (False, asks)


def test_a_hold_ends_at_its_deadline_though_nothing_arrives() -> None:
    worker = make_worker()
    worker.handle(model(0), 10.0)
    worker.handle(SyncNotice(7, 3.0), 10.2)
    held = worker.handle(trained(1.0), 10.3)
    assert held.wake_at == pytest.approx(13.2)
    assert worker.handle(Tick(), 13.2).train is not None


def test_with_nothing_to_flush_it_says_so() -> None:
    worker = make_worker()
    worker.handle(model(0), 10.0)
    worker.handle(SyncNotice(7, 3.0), 10.1)
    ready = worker.handle(trained(0.0, steps=0), 10.2)
    assert ready.publish is None
    assert ready.flushed == 7


def test_a_rejected_update_returns_damped_to_the_unsent_progress() -> None:
    worker = make_worker(replace(SAP, is_dense=True))
    worker.handle(model(0), 10.0)
    payload = worker.handle(trained(1.0), 12.0).publish.payload
    worker.handle(settled(worker, payload, Outcome.REJECTED), 12.1)
    again = worker.handle(trained(1.0), 14.0)
    assert again.publish is not None
    expected = SAP.late_damping * trained(1.0).local
    np.testing.assert_allclose(codec.decode(again.publish.payload, SIZE), expected, atol=1e-5)


@pytest.mark.parametrize("tier", ["t0", "t1", "t2"])
def test_an_update_never_exceeds_what_its_link_carries(tier: str) -> None:
    worker = make_worker(tier=tier)
    worker.handle(model(0), 10.0)
    payload = worker.handle(trained(1.0), 11.5).publish.payload
    assert len(payload) <= TIERS[tier].budget_bytes(4 * SAP.pace_seconds, SAP.budget_share)


def test_it_trains_on_through_a_sync_where_the_policy_says_so() -> None:
    worker = make_worker(replace(SAP, hold_at_sync=False))
    worker.handle(model(0), 10.0)
    worker.handle(SyncNotice(7, 3.0), 10.2)
    flush = worker.handle(trained(1.0), 10.3)
    assert flush.publish is not None
    assert flush.publish.sync == 7
    assert flush.train is not None


def test_a_flush_waits_for_the_update_in_flight_and_training_need_not() -> None:
    worker = make_worker(replace(SAP, hold_at_sync=False))
    worker.handle(model(0), 10.0)
    first = worker.handle(trained(1.0), 12.0).publish
    worker.handle(SyncNotice(7, 3.0), 12.1)
    waiting = worker.handle(trained(2.0), 12.2)
    assert waiting.publish is None
    assert waiting.train is not None
    assert worker.handle(settled(worker, first.payload), 12.3).interrupt
    assert worker.handle(trained(2.5), 12.4).publish.sync == 7


def test_a_pull_brings_what_there_is_before_its_time() -> None:
    worker = make_worker(replace(SAP, pace_seconds=99.0))
    worker.handle(model(0), 10.0)
    assert worker.handle(Pulled(), 10.1).interrupt
    ready = worker.handle(trained(1.0, steps=1), 10.2)
    assert ready.publish is not None
    assert ready.publish.steps == 1


def test_one_too_far_ahead_holds_until_the_slowest_has_come_along() -> None:
    worker = make_worker(SYNC_PRESETS["ssp"])
    worker.handle(model(0), 10.0)
    sent = worker.handle(trained(1.0), 10.1).publish
    verdict = Verdict("n0", sent.seq, Outcome.MERGED, hold_until_clock=2)
    worker.handle(UpdateSettled(verdict, sent.payload), 10.2)
    held = worker.handle(trained(2.0), 10.3)
    assert held.train is None
    assert worker.waiting_for().code == "slowest"
    assert worker.handle(replace(model(1), slowest=1), 10.4).train is None
    assert worker.handle(replace(model(2), slowest=2), 10.5).train is not None


def test_no_hold_is_without_a_deadline() -> None:
    worker = make_worker(SYNC_PRESETS["fedavg"])
    worker.handle(model(0), 10.0)
    ready = worker.handle(trained(1.0, steps=20), 11.0)
    assert ready.wake_at == pytest.approx(11.0 + SYNC_PRESETS["fedavg"].hold_seconds)
    assert worker.handle(Tick(), ready.wake_at).train is not None


def test_a_thin_link_paces_itself_to_what_it_can_carry() -> None:
    policy = replace(SAP, pace_density=0.01)
    size = 1_000_000
    assert policy.period_seconds(5e8, size) == SAP.pace_seconds
    thin = policy.period_seconds(64_000, size)
    assert thin * 64_000 / 8 * SAP.budget_share == pytest.approx(0.01 * size * 2.0)


def test_a_policy_without_any_pace_is_refused() -> None:
    with pytest.raises(ValueError, match="pace"):
        replace(SAP, pace_seconds=None, pace_steps=None)


def test_a_sync_never_holds_a_node_whose_update_is_not_taken_past_its_deadline() -> None:
    """As where its gateway's inbox is full: the update has no verdict for a day."""
    worker = make_worker()
    worker.handle(model(0), 10.0)
    assert worker.handle(trained(1.0), 12.0).publish is not None
    assert worker.handle(SyncNotice(1, 2.0), 12.1).interrupt
    held = worker.handle(trained(1.5), 12.2)
    assert (held.train, held.publish, worker.state) == (None, None, State.FLUSHING)
    assert worker.handle(Tick(), 14.2).train is not None
    assert worker.state is State.TRAINING


def test_a_gateways_own_version_keeps_the_number_and_the_unsent_progress() -> None:
    worker = make_worker(replace(SAP, pace_seconds=99.0))
    worker.handle(model(7), 0.0)
    worker.handle(model(7, 10.0), 1.0)
    order = worker.handle(trained(0.5), 2.0).train
    assert order is not None
    np.testing.assert_allclose(order.start[0], trained(10.5).local, atol=1e-5)
    assert worker.version == 7
