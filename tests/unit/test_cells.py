"""Cells with a broker of their own: what their gateways tell of them, and what is made of it."""

from __future__ import annotations

from typing import Any

import pytest

from hetertrain.core.tiers import TIERS
from hetertrain.errors import FrameError
from hetertrain.wire import topics
from hetertrain.wire.downlink import Downlink
from hetertrain.wire.events import Outgoing
from hetertrain.wire.frames import pack, unpack
from hetertrain.wire.messages import (
    MEMBER_PARTS_MAX,
    MEMBERS_PART_MAX,
    CellMembers,
    Member,
    NodeState,
)
from hetertrain.wire.uplink import Uplink
from hetertrain_cloud.control.cells import CELL_NODES_MAX, REPORT_SECONDS_MAX
from hetertrain_cloud.control.changes import COALESCE_SECONDS
from hetertrain_cloud.control.live import ONLINE_SECONDS, LiveFleet
from hetertrain_edge.cell_report import CHANGED_SECONDS, REPEAT_SECONDS, CellReport

USUAL: dict[str, Any] = {"job": "fleet", "cell": "rsu-1", "tier": "t2", "role": "vehicle"}
GATEWAY = NodeState(**USUAL | {"node": "rsu-1", "cell": "cloud", "role": "edge"}, is_online=True)
FRAME_BYTES_MAX = 64 << 10


class Gateway:
    """A gateway whose cell has a broker of its own."""

    def __init__(self, tier: str = "t4") -> None:
        self.downlink = Downlink("fleet", "rsu-1")
        self.uplink = Uplink(GATEWAY, TIERS[tier])
        self.uplink.is_connected = True
        self.report = CellReport(self.downlink, first_number=100)

    def hear(self, node: str, now: float, **said: Any) -> None:
        state = NodeState(**USUAL | {"node": node, "is_online": True} | said)
        self.downlink.received(topics.state(node), pack(state), now)

    def told(self, now: float) -> list[CellMembers]:
        return [read(each) for each in self.report.tick(self.uplink, now)]


def read(outgoing: Outgoing) -> CellMembers:
    assert outgoing.topic == topics.members("fleet", "rsu-1")
    assert not outgoing.retain
    message, _ = unpack(outgoing.frame)
    assert isinstance(message, CellMembers)
    return message


# What a gateway tells


def test_a_gateway_tells_who_is_in_its_cell_and_how_long_ago_it_was_heard() -> None:
    gateway = Gateway()
    gateway.hear("car-1", 1.0, doing="training", version=3, updates=7, backlog_bytes=5)
    (report,) = gateway.told(4.0)
    (member,) = report.members
    assert (report.cell, report.part, report.parts) == ("rsu-1", 0, 1)
    assert (member.node, member.doing, member.version, member.updates) == (
        "car-1",
        "training",
        3,
        7,
    )
    assert (member.backlog_bytes, member.seconds_ago) == (5, 3.0)


def test_an_empty_cell_is_told_of_too() -> None:
    (report,) = Gateway().told(0.0)
    assert report.members == ()


def test_a_change_is_told_in_seconds_and_mere_counters_with_the_next_repetition() -> None:
    gateway = Gateway()
    gateway.hear("car-1", 0.0, doing="training")
    assert gateway.told(0.0)
    gateway.hear("car-1", 1.0, doing="training", updates=9, bytes_up=99)
    assert not gateway.told(CHANGED_SECONDS)
    gateway.hear("car-1", 6.0, doing="holding")
    (changed,) = gateway.told(6.0)
    assert not gateway.told(6.0 + REPEAT_SECONDS - 1)
    (again,) = gateway.told(6.0 + REPEAT_SECONDS)
    assert changed.number < again.number


def test_changes_are_told_no_more_often_than_every_few_seconds() -> None:
    gateway = Gateway()
    told = []
    for tenth in range(300):
        gateway.hear("car-1", tenth / 10, doing=f"doing-{tenth}")
        told += gateway.told(tenth / 10)
    assert len(told) == 30 / CHANGED_SECONDS


def test_on_a_thin_link_a_large_cell_is_told_of_seldom() -> None:
    gateway = Gateway(tier="t0")
    told = []
    for second in range(60):
        for number in range(100):
            gateway.hear(f"car-{number}", float(second), doing=f"doing-{second}")
        told += gateway.told(float(second))
    assert len(told) == 60 / REPEAT_SECONDS


def test_whoever_left_is_not_told_of_any_more() -> None:
    gateway = Gateway()
    gateway.hear("car-1", 0.0)
    assert gateway.told(0.0)[0].members
    gateway.hear("car-1", 6.0, is_online=False)
    assert gateway.told(6.0)[0].members == ()


def test_without_a_link_nothing_is_told_and_all_of_it_as_soon_as_it_stands() -> None:
    gateway = Gateway()
    assert gateway.told(0.0)
    gateway.uplink.is_connected = False
    assert not gateway.told(40.0)
    gateway.uplink.is_connected = True
    assert gateway.told(40.1)


def test_a_large_cell_is_told_of_in_parts_of_bounded_size_that_are_whole_together() -> None:
    gateway = Gateway()
    names = {f"car-{number:04}" for number in range(2000)}
    for name in names:
        gateway.hear(name, 0.0, doing="ü" * 500, waiting_for="漢" * 500)
    frames = gateway.report.tick(gateway.uplink, 0.0)
    reports = [read(each) for each in frames]
    assert len(reports) <= MEMBER_PARTS_MAX
    assert all(len(each.frame) < FRAME_BYTES_MAX for each in frames)
    assert len(reports) > 1
    assert [each.part for each in reports] == list(range(reports[0].parts))
    told = [member.node for each in reports for member in each.members]
    assert sorted(told) == sorted(names)


@pytest.mark.parametrize(
    "change",
    [
        {"members": tuple(Member(node=f"n{i}", tier="t1") for i in range(MEMBERS_PART_MAX + 1))},
        {"members": (Member(node="n", tier="t1", doing="x" * 129),)},
        {"members": (Member(node="n", tier="t1", seconds_ago=-1.0),)},
        {"parts": MEMBER_PARTS_MAX + 1},
        {"part": -1},
    ],
)
def test_a_report_out_of_bounds_is_refused(change: dict[str, Any]) -> None:
    usual: dict[str, Any] = {"job": "j", "cell": "c", "number": 1, "part": 0, "parts": 1}
    with pytest.raises(FrameError, match="header"):
        unpack(pack(CellMembers(**usual | change)))


# What the control plane makes of it


class Fleet:
    """A control plane's picture of the fleet, and its clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.live = LiveFleet(lambda: self.now)
        self.live.broker_error = ""
        self.number = 0
        self.now += REPORT_SECONDS_MAX
        self.say(GATEWAY)

    def say(self, state: NodeState) -> None:
        self.live.see(state)

    def report(self, *members: Member, known: set[str] | None = None, **parts: int) -> None:
        self.number += 0 if parts.get("part") else 1
        usual = {"number": self.number, "part": 0, "parts": 1}
        report = CellMembers(job="fleet", cell="rsu-1", members=members, **usual | parts)
        if self.live.expects(report):
            self.live.hear_members(report, known or {member.node for member in members})

    def wait(self, seconds: float, *, gateway_speaks: bool = True) -> None:
        self.now += seconds
        if gateway_speaks:
            self.say(GATEWAY)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def member(node: str = "car-1", **said: Any) -> Member:
    return Member(**{"node": node, "tier": "t1", "doing": "training"} | said)


def direct(**said: Any) -> NodeState:
    return NodeState(**USUAL | {"node": "car-1", "cell": "cloud", "is_online": True} | said)


def test_a_member_is_a_node_that_is_there_and_was_seen_through_its_gateway(fleet: Fleet) -> None:
    fleet.report(member(seconds_ago=3.0, version=4))
    seen = fleet.live.node("car-1")
    assert seen is not None
    assert (seen.via, seen.at, seen.state.cell) == ("rsu-1", fleet.now - 3.0, "rsu-1")
    assert (seen.state.version, seen.state.job, seen.state.role) == (4, "fleet", "vehicle")
    assert fleet.live.is_online("car-1")
    assert fleet.live.has_own_broker("rsu-1")


def test_who_is_not_enrolled_is_not_taken_in(fleet: Fleet) -> None:
    fleet.report(member("car-1"), member("stranger"), known={"car-1"})
    assert fleet.live.node("stranger") is None


def test_a_member_stays_between_two_reports_and_is_away_when_its_gateway_is(fleet: Fleet) -> None:
    fleet.report(member())
    fleet.wait(REPEAT_SECONDS)
    assert fleet.live.is_online("car-1")
    fleet.wait(ONLINE_SECONDS - 0.1, gateway_speaks=False)
    assert fleet.live.is_online("car-1")
    fleet.wait(0.2, gateway_speaks=False)
    assert not fleet.live.is_online("car-1")


def test_a_gateway_that_reports_no_more_has_no_members_though_it_lives(fleet: Fleet) -> None:
    fleet.report(member())
    fleet.wait(REPORT_SECONDS_MAX + 0.1)
    assert not fleet.live.is_online("car-1")
    assert not fleet.live.has_own_broker("rsu-1")


def test_who_is_not_in_the_next_whole_report_has_gone(fleet: Fleet) -> None:
    fleet.report(member("car-1"), member("car-2"))
    fleet.wait(5)
    fleet.report(member("car-2"), part=0, parts=2)
    assert fleet.live.is_online("car-1"), "it may be in the next part"
    fleet.report(member("car-3"), part=1, parts=2)
    assert sorted(fleet.live.online()) == ["car-2", "car-3", "rsu-1"]


def test_a_gateways_word_never_counts_more_than_a_fresh_heartbeat_of_the_node(
    fleet: Fleet,
) -> None:
    fleet.say(direct(doing="holding"))
    fleet.wait(2)
    fleet.report(member(doing="training"))
    seen = fleet.live.node("car-1")
    assert seen is not None
    assert (seen.via, seen.state.doing) == ("", "holding")


@pytest.mark.parametrize("takes_leave", [True, False])
def test_who_goes_over_to_a_gateway_is_seen_there_and_back_again(
    fleet: Fleet, takes_leave: bool
) -> None:
    fleet.say(direct())
    if takes_leave:
        fleet.wait(1)
        fleet.say(direct(is_online=False))
    fleet.wait(10)
    fleet.report(member())
    fleet.wait(1)
    fleet.say(direct(is_online=False))  # The last will of the connection that it left.
    seen = fleet.live.node("car-1")
    assert seen is not None
    assert (seen.via, fleet.live.is_online("car-1")) == ("rsu-1", True)
    fleet.say(direct())
    seen = fleet.live.node("car-1")
    assert seen is not None
    assert seen.via == ""
    fleet.wait(5)
    fleet.report()
    assert fleet.live.is_online("car-1"), "that it left the cell says nothing of where it is now"


def test_a_member_that_was_not_heard_for_long_is_not_there(fleet: Fleet) -> None:
    fleet.report(member(seconds_ago=ONLINE_SECONDS + 1))
    assert fleet.live.node("car-1") is None


def test_a_flood_of_reports_costs_one_a_second_and_a_part_counts_once(fleet: Fleet) -> None:
    taken = 0
    for _ in range(100):
        fleet.now += 0.1
        fleet.number += 1
        for part in (0, 1, 1, 0):
            report = CellMembers(job="fleet", cell="rsu-1", number=fleet.number, part=part, parts=2)
            taken += fleet.live.expects(report)
            fleet.live.hear_members(report, ())
    assert taken <= 2 * 11


def test_a_hostile_gateway_cannot_have_more_kept_than_a_bound(fleet: Fleet) -> None:
    for number in range(100):
        fleet.wait(2)
        members = [member(f"n-{number}-{each}") for each in range(MEMBERS_PART_MAX)]
        fleet.report(*members, part=0, parts=2)  # The last part never comes.
    assert len(fleet.live.online()) <= CELL_NODES_MAX + 1


def test_what_members_do_is_told_as_of_others(fleet: Fleet) -> None:
    fleet.report(member(doing="training"))
    fleet.wait(COALESCE_SECONDS)
    fleet.report(member(doing="resting", waiting_for="the job's start"))
    fleet.wait(COALESCE_SECONDS)
    fleet.report()
    fleet.wait(COALESCE_SECONDS)
    told = [(each.node, each.kind) for each in fleet.live.take_changes()]
    assert ("car-1", "online") in told
    assert ("car-1", "training_stopped") in told
    assert ("car-1", "offline") in told
