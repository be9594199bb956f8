"""A cell whose cloud is out of reach for long, in virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetertrain.task import write_tensors
from hetertrain.transport import mqtt
from hetertrain.wire import topics
from hetertrain.wire.frames import pack
from hetertrain.wire.messages import AggregatorStatus, JobOrder, NodeState
from hetertrain_edge.forwarding import Form
from hetertrain_lab.processes import JOB
from hetertrain_lab.scenario import parse_scenario
from hetertrain_lab.simulator import SimulatedFleet, simulate

LOST_AT, RESTARTED_AT, BACK_AT, ENDS_AT = 6.0, 45.0, 90.0, 110.0
CELL = {
    "name": "cell",
    "seconds": ENDS_AT,
    "vehicles": [{"count": 4, "step_seconds": (0.2, 0.3)}],
    "gateways": {"count": 1},
    "learning": {
        "task": "hetertrain_lab.digits:SmallDigitsTask",
        "labels": {"alpha": "0.3"},
        "learning_rate": 0.3,
    },
}


class LongOutage:
    """A fleet of one cell that loses its cloud, and its gateway for a moment in the middle."""

    def __init__(self, directory: Path, local_after_seconds: float | None, **limits: int) -> None:
        gateways = {"count": 1, "local_after_seconds": local_after_seconds} | limits
        self.fleet = SimulatedFleet(parse_scenario(CELL | {"gateways": gateways}), 1, directory)
        self.gateway = self.fleet.gateways[0]
        self.accuracies: list[float] = []
        self.versions: list[int] = []
        self.waiting: list[str] = []
        self.inbox_bytes: list[int] = []
        at = self.fleet.clock.at
        at(LOST_AT, lambda: self.gateway.lose_uplink(BACK_AT - LOST_AT))
        at(RESTARTED_AT, self.gateway.crash)
        for moment in (LOST_AT + 1, RESTARTED_AT - 1, BACK_AT - 1):
            at(moment, self.look)
        self.result = self.fleet.run()

    def look(self) -> None:
        """Measure the model that the cell's nodes are served."""
        fleet, driver = self.fleet, self.gateway.driver
        checkpoint = driver.cell.downlink.broadcaster.checkpoint
        assert checkpoint is not None
        assert fleet._task is not None
        tensors = fleet.layout.unflatten(checkpoint.vector, checkpoint.integers)
        write_tensors(fleet._model, tensors)
        self.accuracies.append(fleet._task.evaluate(fleet._model, None)["accuracy"])
        self.versions.append(checkpoint.version)
        status = driver.status(fleet.clock.now)
        assert status is not None
        self.waiting.append(status.waiting_for)
        self.inbox_bytes.append(driver._backlog.inbox.num_bytes)

    def lost(self) -> list[tuple[str, int]]:
        """Return what was acknowledged and is nowhere in the cloud a minute later."""
        still_open = self.fleet.cloud.driver.machine.open.contributions
        return self.fleet.ledger.lost(set(still_open), ENDS_AT)


def test_a_cell_learns_on_without_its_cloud_and_each_of_its_updates_is_counted_once(
    tmp_path: Path,
) -> None:
    """The ledger refuses what is counted twice, and repeats each version bit for bit."""
    alone = LongOutage(tmp_path / "without", None)
    local = LongOutage(tmp_path / "with", 1.0)

    assert alone.accuracies[0] == alone.accuracies[1] == alone.accuracies[2]
    start, before_restart, end = local.accuracies
    assert end > start + 0.15
    assert end > before_restart - 0.05
    assert end > alone.accuracies[2] + 0.15
    # The number stays the cloud's, so that all of it means something to the cloud.
    assert len(set(local.versions)) == 1
    assert "local version" in local.waiting[2]
    assert "out of reach" in alone.waiting[2]
    for run in (alone, local):
        assert len(run.fleet.ledger.acknowledged) > 200
        assert run.lost() == []
        assert run.result.refused == {}
        assert run.result.evaluations[-1].metrics["accuracy"] > 0.5


def test_a_full_inbox_holds_back_the_cell_and_loses_nothing(tmp_path: Path) -> None:
    limit = 60_000
    run = LongOutage(tmp_path, None, inbox_bytes_max=limit)
    worker = run.fleet.vehicles[0].driver.worker
    assert max(run.inbox_bytes) <= limit
    assert "the inbox is full" in run.waiting[2]
    assert run.lost() == []
    assert worker.num_updates < run.result.steps / 4
    assert run.result.evaluations[-1].metrics["accuracy"] > 0.5


def test_a_cell_that_starts_anew_without_its_cloud_is_served_the_version_it_had(
    tmp_path: Path,
) -> None:
    class Late(LongOutage):
        def look(self) -> None:
            super().look()
            # All vehicles lose their models: they join late, and find one.
            if len(self.versions) == 2:
                for vehicle in self.fleet.vehicles:
                    vehicle.crash()

    run = Late(tmp_path, None)
    held = [vehicle.driver.worker for vehicle in run.fleet.vehicles]
    assert run.versions[1] == run.versions[2] > 0
    assert all(worker.num_steps > 100 for worker in held)
    assert run.lost() == []


def test_a_paused_jobs_gateway_rests_though_nobody_takes_its_backlog(tmp_path: Path) -> None:
    plain = CELL | {"seconds": 40.0, "learning": {"parameters": 50}}
    fleet = SimulatedFleet(parse_scenario(plain), 1, tmp_path)
    (gateway,), at = fleet.gateways, fleet.clock.at
    beats: list[NodeState] = []
    statuses: list[AggregatorStatus | None] = []
    order = pack(JobOrder(number=1, state="paused"))
    event = mqtt.Received(topics.order(JOB), order, is_retained=True)
    at(6.0, lambda: gateway.lose_uplink(20.0))
    at(7.0, lambda: gateway.act(lambda: gateway.driver.take("north", event, 7.0)))
    for moment in (25.0, 39.0):
        at(moment, lambda: beats.append(gateway.driver.uplink.state))
        at(moment, lambda: statuses.append(gateway.driver.status(fleet.clock.now)))
    fleet.run()
    away, back = beats
    assert {away.doing, back.doing} == {"resting"}
    assert away.backlog_updates > 0
    # Its heartbeat and its status say the same.
    assert "out of reach" in away.waiting_for
    assert back.waiting_for == "the job's start"
    said = [(each.waiting_code, each.waiting_for) for each in statuses if each]
    assert [code for code, _ in said] == ["cloud", "order"]
    assert "out of reach" in said[0][1]
    assert said[1][1] == back.waiting_for


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("forward", list(Form))
def test_a_day_of_many_partials_is_counted_once_through_crashes(
    forward: Form, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partial takes four updates here, so that each outage leaves a row of them behind."""
    monkeypatch.setattr("hetertrain.core.combiner.SEALED_AT", 4)
    gateways = {
        "count": 2,
        "forward": forward,
        "uplink_outage_share": 0.5,
        "uplink_outage_seconds": (5.0, 10.0),
        "local_after_seconds": 1.0,
        "crash_seconds": 10.0,
        "restart_seconds": (0.5, 2.0),
    }
    plain = {
        "name": "many partials",
        "seconds": 40.0,
        "vehicles": [{"count": 4, "step_seconds": (0.05, 0.1), "crash_seconds": 15.0}],
        "gateways": gateways,
        "sync": {"max_lag": 4},
        "learning": {"parameters": 50},
    }
    result = simulate(parse_scenario(plain), seed)
    assert result.crashes > 3
    assert result.updates > 30
