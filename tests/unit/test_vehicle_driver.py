"""A vehicle at work in virtual time, with a real outbox on disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hetertrain import codec
from hetertrain.core.gate import Outcome, Verdict
from hetertrain.core.policy import SYNC_PRESETS, WEIGHT_PRESETS
from hetertrain.core.tiers import TIERS
from hetertrain.core.update import Update, model_digest
from hetertrain.core.worker import Trained, TrainOrder, Worker
from hetertrain.errors import LayoutError
from hetertrain.logging import silent_logger
from hetertrain.transport import mqtt
from hetertrain.transport.outbox import Outbox
from hetertrain.wire import topics
from hetertrain.wire.contents import JobTerms, model_head, unpack_update, verdict_message
from hetertrain.wire.events import ModelReceived, Outgoing
from hetertrain.wire.frames import pack, unpack
from hetertrain.wire.messages import Begin, JobOrder, NodeState, TrainerReady
from hetertrain.wire.transfer import Sender
from hetertrain.wire.uplink import Uplink
from hetertrain_vehicle.driver import VehicleDriver
from tests.builders import LAYOUT

SIZE = 20_000
OFFLINE_SECONDS = 3600.0
REPORT_SECONDS = 0.5
NONE = np.empty(0, np.int64)
TERMS = JobTerms(LAYOUT, SYNC_PRESETS["sap"], WEIGHT_PRESETS["sap"], {}, "run")


class Wire:
    """A link that remembers what was published, and a trainer that is told what to do."""

    bytes_up = bytes_down = 0

    def __init__(self) -> None:
        self.sent: list[Outgoing] = []
        self.orders: list[TrainOrder] = []
        self.interrupts = 0
        self.rests = 0

    def publish(self, outgoing: tuple[Outgoing, ...]) -> None:
        self.sent.extend(outgoing)

    def resubscribe(self, subscriptions: tuple[str, ...]) -> None:
        del subscriptions

    def order(self, order: TrainOrder) -> None:
        self.orders.append(order)

    def interrupt(self) -> None:
        self.interrupts += 1

    def rest(self) -> None:
        self.rests += 1

    def resume(self) -> None:
        self.rests -= 1


def at_work(
    directory: Path, wire: Wire, *, has_trainer: bool = True
) -> tuple[VehicleDriver, Outbox]:
    """Return a vehicle that holds the first version and trains."""
    outbox, tier = Outbox(directory / "outbox.db", first_seq=1), TIERS["t3"]
    state = NodeState(node="n0", job="job", cell="cloud", tier="t3", role="vehicle", is_online=True)
    worker = Worker("n0", TERMS.policy, tier, examples=100, layout=LAYOUT, next_seq=1)
    driver = VehicleDriver(worker, Uplink(state, tier), outbox, wire, wire, silent_logger())
    if not has_trainer:
        driver.await_trainer()
        driver.report()
    driver.take(mqtt.Connected(), 0.0)
    driver.hold(ModelReceived(0, np.zeros(SIZE, np.float32), NONE, None, TERMS), 0.0)
    return driver, outbox


def test_a_vehicle_rests_and_goes_on_from_there_as_an_operator_orders(tmp_path: Path) -> None:
    wire = Wire()
    driver, _ = at_work(tmp_path, wire)

    def order(number: int, state: str) -> None:
        frame = pack(JobOrder(number=number, state=state))
        driver.take(mqtt.Received(topics.order("job"), frame, is_retained=True), 1.0)

    order(1, "running")
    assert (len(wire.orders), wire.rests) == (1, 0)
    order(2, "paused")
    order(1, "running")  # Sent again, and older: the newest order stands.
    local = np.full(SIZE, 1e-4, np.float32)
    driver.trained(Trained(local, NONE, 2, 0.1), 1.1)
    assert (len(wire.orders), wire.rests) == (1, 1)
    beats = [unpack(sent.frame)[0] for sent in wire.sent if sent.topic == topics.state("n0")]
    assert beats[-1].doing == "resting"
    order(3, "running")
    assert (len(wire.orders), wire.rests) == (2, 0)
    start = wire.orders[-1].start
    assert start is not None
    np.testing.assert_array_equal(start[0], local)


def test_a_vehicle_is_there_before_its_trainer_and_trains_when_that_is_ready(
    tmp_path: Path,
) -> None:
    wire = Wire()
    driver, _ = at_work(tmp_path, wire, has_trainer=False)
    assert wire.orders == []
    beats = [unpack(sent.frame)[0] for sent in wire.sent if sent.topic == topics.state("n0")]
    assert (beats[-1].doing, beats[-1].active) == ("loading", 0)

    ready = TrainerReady(examples=7, layout=LAYOUT, size=SIZE, label="bus")
    with pytest.raises(LayoutError):
        driver.introduce(replace(ready, layout="another task's"))
    driver.introduce(ready)
    driver.trainer_replaced(1.0)
    assert len(wire.orders) == 1
    beats = [unpack(sent.frame)[0] for sent in wire.sent if sent.topic == topics.state("n0")]
    assert (beats[-1].doing, beats[-1].active, beats[-1].label) == ("training", 1, "bus")


def test_a_vehicle_that_may_train_again_before_its_trainer_is_ready_waits_for_that(
    tmp_path: Path,
) -> None:
    wire = Wire()
    driver, _ = at_work(tmp_path, wire, has_trainer=False)
    driver.permit("Vehicle.Speed < 1: it is 52", 1.0)
    driver.permit("", 2.0)
    assert wire.orders == []
    driver.trainer_replaced(3.0)
    assert len(wire.orders) == 1


def test_a_failed_trainer_is_told_of_at_once_and_the_next_goes_on_from_there(
    tmp_path: Path,
) -> None:
    wire = Wire()
    driver, _ = at_work(tmp_path, wire)
    local = np.full(SIZE, 1e-4, np.float32)
    driver.trained(Trained(local, NONE, 2, 0.1), 1.0)
    num_orders = len(wire.orders)

    driver.trainer_failed("MemoryError: none left (peak 900 MiB)", 2.0)
    beats = [unpack(sent.frame)[0] for sent in wire.sent if sent.topic == topics.state("n0")]
    assert beats[-1].doing == "train_failed"
    assert "peak 900 MiB" in beats[-1].waiting_for
    driver.hold(ModelReceived(1, np.ones(SIZE, np.float32), NONE, None, TERMS), 3.0)
    assert len(wire.orders) == num_orders  # There is nobody to train it.

    driver.trainer_replaced(4.0)
    start = wire.orders[-1].start
    assert len(wire.orders) == num_orders + 1
    assert start is not None
    assert start[0].mean() > 0.9  # It is on the version that came meanwhile.


def test_an_hour_offline_costs_one_update_of_disk_and_all_of_it_arrives_as_one(
    tmp_path: Path,
) -> None:
    wire = Wire()
    driver, outbox = at_work(tmp_path, wire)
    worker, now, local = driver.worker, 0.0, np.zeros(SIZE, np.float32)

    def train() -> None:
        nonlocal now
        now += REPORT_SECONDS
        local[:] += np.float32(1e-4)
        driver.trained(Trained(local.copy(), NONE, 5, 0.1), now)
        driver.tick(now)

    def settle() -> Update:
        pending = outbox.pending()
        assert pending is not None
        verdict = verdict_message(Verdict("n0", pending.seq, Outcome.MERGED))
        driver.take(mqtt.Received(topics.inbox("n0"), pack(verdict)), now)
        return unpack_update(pending.content)

    while outbox.pending() is None:
        train()
    driver.take(mqtt.Disconnected("a tunnel"), now)
    num_sent, num_bytes = len(wire.sent), []
    while now < OFFLINE_SECONDS:
        train()
        num_bytes.append(sum(file.stat().st_size for file in tmp_path.glob("outbox.db*")))
    assert len(wire.sent) == num_sent
    assert num_bytes[-1] == num_bytes[0]

    driver.take(mqtt.Connected(), now)
    first = settle()
    while outbox.pending() is None:
        train()
    second = settle()

    begun = [unpack(each.frame)[0] for each in wire.sent[num_sent:]]
    assert {message.seq for message in begun if isinstance(message, Begin)} == {1, 2}
    assert (first.seq, second.seq) == (1, 2)
    assert first.steps + second.steps == worker.num_steps
    decoded = [codec.decode(update.payload, SIZE) for update in (first, second)]
    left = local - decoded[0] - decoded[1]
    assert np.abs(left).max() < 0.02 * np.abs(local).max()


def test_a_vehicle_that_may_not_train_rests_says_why_and_takes_no_versions(tmp_path: Path) -> None:
    wire = Wire()
    driver, _ = at_work(tmp_path, wire)
    driver.permit("Vehicle.Speed < 1: it is 52", 1.0)
    beats = [unpack(sent.frame)[0] for sent in wire.sent if sent.topic == topics.state("n0")]
    assert (beats[-1].doing, beats[-1].active, beats[-1].follows) == ("not_eligible", 0, False)
    assert wire.rests == 1
    assert set(driver.uplink.subscriptions) == {topics.inbox("n0"), topics.order("job")}
    driver.permit("Vehicle.Speed < 1: it is 53", 2.0)
    assert wire.rests == 1
    driver.permit("", 3.0)
    assert wire.rests == 0
    assert topics.down("job", "cloud", "t3") in driver.uplink.subscriptions


@pytest.mark.parametrize(("moves", "returns"), [(False, True), (True, False)])
def test_what_another_cell_may_have_counted_does_not_return_to_the_progress(
    tmp_path: Path, *, moves: bool, returns: bool
) -> None:
    wire = Wire()
    driver, outbox = at_work(tmp_path, wire)
    now, local = 0.0, np.zeros(SIZE, np.float32)
    while outbox.pending() is None:
        now += REPORT_SECONDS
        local[:] += np.float32(1e-4)
        driver.trained(Trained(local.copy(), NONE, 5, 0.1), now)
        driver.tick(now)
    if moves:
        driver.move("edge-2", now)
        sent = [unpack(each.frame)[0] for each in wire.sent if "/edge-2/" in each.topic]
        assert [message.seq for message in sent if isinstance(message, Begin)] == [1]
    late = verdict_message(Verdict("n0", 1, Outcome.REJECTED, "base version 9 is ahead of 7"))
    driver.take(mqtt.Received(topics.inbox("n0"), pack(late)), now)
    assert outbox.pending() is None
    assert (driver.worker._steps_unsent > 0) is returns


def test_a_restarted_vehicle_takes_no_older_run_or_version_that_is_sent_again(
    tmp_path: Path,
) -> None:
    def start(directory: Path, job: str = "job") -> tuple[VehicleDriver, Outbox]:
        outbox = Outbox(directory / "outbox.db", first_seq=1)
        state = NodeState(
            node="n0", job=job, cell="cloud", tier="t3", role="vehicle", is_online=True
        )
        uplink = Uplink(state, TIERS["t3"], check=lambda *_: True)
        worker = Worker("n0", TERMS.policy, TIERS["t3"], examples=1, layout=LAYOUT, next_seq=1)
        return VehicleDriver(worker, uplink, outbox, Wire(), Wire(), silent_logger()), outbox

    def received(version: int, lineage: str) -> list[mqtt.Event]:
        terms = replace(TERMS, lineage=lineage)
        vector = np.full(SIZE, version, np.float32)
        head = model_head(
            version=version,
            sync=None,
            base="",
            model=model_digest(vector, NONE, lineage),
            size=SIZE,
            integers=NONE,
            terms=terms,
        )
        content = pack(head, codec.encode(vector, None).payload)
        talk = Sender("cloud", version, content, len(content), window=4, airtime_seconds=1.0)
        return [
            mqtt.Received(topics.down("job", "cloud", "t3"), pack(message, payload))
            for message, payload in talk.due(0.0)
        ]

    def give(driver: VehicleDriver, version: int, lineage: str, now: float) -> None:
        for event in received(version, lineage):
            driver.take(event, now)
        driver.tick(now)

    driver, outbox = start(tmp_path)
    give(driver, 500, "run-2", 0.0)
    give(driver, 501, "run-2", 1.0)
    assert '"version": 500' in outbox.noted("newest job")  # The next write is not due yet.
    give(driver, 502, "run-2", 11.0)
    assert '"version": 502' in outbox.noted("newest job")
    give(driver, 503, "run-2", 12.0)
    driver.close()

    driver, _ = start(tmp_path)
    for version, lineage in ((900, "run-1"), (300, "run-2")):
        give(driver, version, lineage, 0.0)
    assert driver.refused == {"age": 2}
    assert driver.worker.version == -1
    give(driver, 503, "run-2", 1.0)
    assert driver.worker.version == 503
    driver.close()

    driver, _ = start(tmp_path, job="another")
    assert driver.uplink.newest is None
