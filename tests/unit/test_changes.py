"""What is told of nodes: what their heartbeats say that is new, and no more often than useful."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hetertrain.core.eligibility import first_unmet, parse_rules, rule_of
from hetertrain.wire.messages import NOT_ELIGIBLE, NodeState
from hetertrain_cloud.control import changes
from hetertrain_cloud.control.changes import COALESCE_SECONDS, Change, PendingChanges, held_by
from hetertrain_cloud.control.live import ONLINE_SECONDS, TALLY_NODES_MIN, LiveFilter, LiveFleet


class Fleet:
    """A fleet that is listened to, and its clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.live = LiveFleet(lambda: self.now)
        self.live.broker_error = ""

    def settle(self) -> None:
        self.now += ONLINE_SECONDS

    def say(self, node: str = "car-1", **said: Any) -> None:
        usual = {"job": "fleet", "cell": "cloud", "tier": "t2", "role": "vehicle"}
        self.live.see(NodeState(**usual | {"node": node, "is_online": True} | said))

    def told(self) -> list[tuple[str, str]]:
        self.now += COALESCE_SECONDS + 0.1
        return [(change.kind, change.text) for change in self.live.take_changes()]


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_who_was_there_when_we_came_is_no_news_and_who_comes_later_is(fleet: Fleet) -> None:
    fleet.say("car-1", doing="training")
    fleet.settle()
    fleet.say("car-1", doing="training")
    fleet.say("car-2", doing="loading", waiting_for="the trainer")
    assert fleet.told() == [
        ("online", "job fleet, cell cloud, tier t2; loading: the trainer"),
    ]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"is_online": False, "doing": "offline"}, ("offline", "it ended, or its connection")),
        (
            {"is_online": False, "doing": "link_closed", "waiting_for": "network in wifi"},
            ("offline", "it closed its link: network in wifi"),
        ),
        ({"doing": NOT_ELIGIBLE, "waiting_for": "a == 1: it is 2"}, (NOT_ELIGIBLE, "a == 1: it")),
        ({"doing": "train_failed", "waiting_for": "another trainer: x"}, ("train_failed", "x")),
        ({"doing": "resting", "waiting_for": "the job's start"}, ("training_stopped", "resting")),
        ({"doing": "training", "tier": "t0"}, ("tier_changed", "from t2 to t0")),
        ({"doing": "training", "cell": "rsu-1"}, ("cell_changed", "from cloud to rsu-1")),
        ({"doing": "training", "job": "next"}, ("job_changed", "from fleet to next")),
        ({"doing": "training", "label": "tram"}, ("agent_changed", "from bus to tram")),
    ],
)
def test_what_a_node_says_that_is_new_is_told_once(
    fleet: Fleet, said: dict[str, Any], told: tuple[str, str]
) -> None:
    fleet.say(doing="training", label="bus")
    fleet.say(**said)
    fleet.say(**said)
    ((kind, text),) = fleet.told()
    assert kind == told[0]
    assert text.startswith(told[1])


def test_a_sync_a_tunnel_and_a_loading_trainer_are_no_change_of_work(fleet: Fleet) -> None:
    fleet.say(doing="training", label="bus")
    for doing in ("flushing", "holding", "training"):
        fleet.say(doing=doing, label="bus")
    assert fleet.told() == []
    fleet.say(doing="offline", is_online=False, label="bus")
    fleet.say(doing="training", label="")
    fleet.say(doing="training", label="bus")
    assert [kind for kind, _ in fleet.told()] == ["offline", "online"]


def test_the_value_of_a_signal_that_holds_a_vehicle_is_no_news_and_another_rule_is(
    fleet: Fleet,
) -> None:
    fleet.say(doing=NOT_ELIGIBLE, waiting_for="Vehicle.Speed < 1: it is 50")
    fleet.say(doing=NOT_ELIGIBLE, waiting_for="Vehicle.Speed < 1: it is 30")
    assert fleet.told() == []
    fleet.say(doing=NOT_ELIGIBLE, waiting_for="time in 22:00-06:00")
    fleet.say(doing="training")
    assert [kind for kind, _ in fleet.told()] == [NOT_ELIGIBLE, "training_began"]


def test_who_falls_silent_is_told_of_and_not_while_we_hear_nobody(fleet: Fleet) -> None:
    fleet.say(doing="training")
    fleet.live.broker_error = "connection lost"
    fleet.now += 10 * ONLINE_SECONDS
    assert fleet.told() == []
    fleet.live.broker_error = ""
    fleet.now += ONLINE_SECONDS / 2
    assert fleet.live.take_changes() == []
    fleet.settle()
    assert [kind for kind, _ in fleet.told()] == ["offline"]
    fleet.say(doing="training")
    assert [kind for kind, _ in fleet.told()] == ["online"]


def test_a_node_that_flaps_is_told_of_once_in_a_while_with_a_count(fleet: Fleet) -> None:
    for number in range(10):
        fleet.say(doing="training", tier=f"t{number % 2}")
        if number == 1:
            assert [change.count for change in fleet.live.take_changes()] == [1]
    assert fleet.live.take_changes() == []
    fleet.now += COALESCE_SECONDS
    (rest,) = fleet.live.take_changes()
    assert (rest.kind, rest.text, rest.count) == ("tier_changed", "from t0 to t1", 8)


def test_what_cannot_be_written_is_kept_and_what_is_too_much_is_counted(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.live.note("car-1", "renewed", "a\x00b")
    taken = fleet.live.take_changes()
    fleet.live.give_back(taken)
    assert fleet.live.take_changes() == taken
    assert taken[0].text == "a b"
    monkeypatch.setattr(changes, "PENDING_MAX", 2)
    for number in range(5):
        fleet.live.note(f"car-{number}", "renewed", "")
    assert fleet.live.num_changes_lost == 3


def test_changes_are_taken_the_oldest_first() -> None:
    pending = PendingChanges()
    for at in (3.0, 1.0, 2.0):
        pending.add(Change(f"car-{at}", "online", "", at))
    assert [change.at for change in pending.take(5.0)] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "rule", ["Vehicle.Speed < 1", "time in 22:00-06:00", "a == x or network in wifi, ethernet"]
)
def test_what_a_rule_asks_for_is_read_from_what_it_said(rule: str) -> None:
    for signals in ({}, {"Vehicle.Speed": 52.0, "a": "y", "time": 700.0}):
        assert rule_of(first_unmet(parse_rules([rule]), signals)) == rule


def test_a_budget_is_the_same_for_all_vehicles_that_it_holds() -> None:
    texts = [f"{mib} MiB of state are over the 10 that it may take" for mib in (11, 12)]
    assert {held_by(text) for text in texts} == {"at most 10 MiB of state"}


@pytest.mark.parametrize(
    ("wanted", "online", "offline", "gone", "unheard"),
    [
        (LiveFilter(), True, True, True, True),
        (LiveFilter(doing="training"), True, False, False, False),
        (LiveFilter(doing="offline"), False, True, True, True),
        (LiveFilter(doing="link_closed"), False, False, True, False),
        (LiveFilter(is_online=False), False, True, True, True),
        (LiveFilter(is_online=True, tier="t2"), True, False, False, False),
        (LiveFilter(tier="t2"), True, True, True, False),
        (LiveFilter(cell="rsu-1"), False, False, False, False),
        (LiveFilter(job="fleet", doing="offline"), False, True, True, False),
    ],
)
def test_a_filter_means_what_a_node_does_now(
    fleet: Fleet,
    wanted: LiveFilter,
    online: bool,
    offline: bool,
    gone: bool,
    unheard: bool,
) -> None:
    fleet.say("offline", doing="training")
    fleet.say("gone", doing="link_closed", is_online=False)
    fleet.settle()
    fleet.say("online", doing="training; trains too")
    states = fleet.live.states(["online", "offline", "gone", "unheard"])
    assert [wanted.matches(*state) for state in states] == [online, offline, gone, unheard]


@pytest.mark.parametrize(("num_nodes", "is_remembered"), [(5, False), (TALLY_NODES_MIN, True)])
def test_a_large_fleet_is_counted_for_many_looks_at_once_and_a_small_one_for_each(
    num_nodes: int, is_remembered: bool
) -> None:
    times = iter(range(10_000))
    clock: Callable[[], float] = lambda: 0.001 * next(times)  # noqa: E731  # a clock that runs
    live = LiveFleet(clock)
    usual = {"job": "j", "cell": "c", "tier": "t2", "role": "vehicle", "is_online": True}
    for number in range(num_nodes):
        live.see(NodeState(node=f"a-{number}", **usual))
    assert live.num_online() == num_nodes
    live.see(NodeState(node="b", **usual))
    assert live.num_online() == num_nodes + (0 if is_remembered else 1)
    for _ in range(1000):
        clock()
    assert live.num_online() == num_nodes + 1
