"""Why a node does not train: every reason there is, by table."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetertrain.core.worker import State
from hetertrain.transport import mqtt
from hetertrain.wire import topics
from hetertrain.wire.frames import pack, unpack
from hetertrain.wire.messages import NOT_ELIGIBLE, JobOrder
from hetertrain_cloud.control.explanation import CHECKS, TITLES, explain
from hetertrain_cloud.control.node_situation import JobSituation, Situation
from tests.builders import make_state, make_status
from tests.unit.test_vehicle_driver import Wire, at_work

NOW = datetime.datetime(2026, 1, 10, 12, tzinfo=datetime.UTC)
CHARGING = "Vehicle.Powertrain.TractionBattery.Charging.IsCharging == true"
STATUS = make_status(version=14, open_updates=0)
JOB = JobSituation(
    name="fleet",
    eligible_labels={"region": "north"},
    train_when=(f"Vehicle.Speed  <  1 or {CHARGING}", CHARGING),
    send_when=("network in wifi, ethernet",),
    wanted="running",
    state="running",
    status=STATUS,
)
SAID = make_state("car-1", version=12, doing="training", waiting_for="trains on version 12")
WELL = Situation(
    node="car-1",
    role="vehicle",
    enrolment="active",
    labels={"region": "north"},
    expires_at=NOW + datetime.timedelta(days=20),
    seen_at=NOW,
    now=NOW,
    jobs=(JOB,),
    said=SAID,
    is_online=True,
    seconds_ago=2.0,
)


def says(doing: str, waiting_for: str = "", **more: Any) -> Situation:
    """Return what is known of a vehicle, else well, that says this."""
    return replace(WELL, said=replace(SAID, doing=doing, waiting_for=waiting_for, **more))


def gateway(doing: str, waiting_for: str) -> Situation:
    said = replace(SAID, node="rsu-1", role="edge", doing=doing, waiting_for=waiting_for)
    return replace(WELL, node="rsu-1", role="edge", said=said)


def leaves(doing: str, waiting_for: str) -> Situation:
    return replace(says(doing, waiting_for, is_online=False), is_online=False, seconds_ago=7300.0)


def with_job(**changes: Any) -> Situation:
    return replace(WELL, jobs=(replace(JOB, **changes),), is_online=False)


OTHER = replace(JOB, name="other", eligible_labels={"region": "south", "model": "x"})
REASONS: dict[str, tuple[Situation, str, str, str]] = {
    "pending": (replace(WELL, enrolment="pending"), "enrolled", "waiting", "to be approved"),
    "revoked": (replace(WELL, enrolment="revoked"), "enrolled", "failing", "It was revoked"),
    "gone": (replace(WELL, enrolment="decommissioned"), "enrolled", "failing", "decommissioned"),
    "expired": (
        replace(WELL, expires_at=NOW - datetime.timedelta(days=1)),
        "certificate",
        "failing",
        "Its certificate is over since 2026-01-09 12:00 UTC.",
    ),
    "no certificate": (replace(WELL, expires_at=None), "certificate", "failing", "is over."),
    "no broker": (replace(WELL, broker_error="refused"), "broker", "failing", "broker: refused."),
    "no rights": (
        replace(WELL, access_error="no plugin", is_online=False),
        "broker",
        "failing",
        "may not know the node's rights: no plugin.",
    ),
    "no job": (replace(WELL, jobs=()), "labels", "failing", "There is no job yet."),
    "another label": (
        replace(WELL, labels={"region": "east"}, jobs=(OTHER, JOB)),
        "labels",
        "failing",
        "No job is for it: job fleet asks for region=north, and it has region=east; job other",
    ),
    "no label": (
        replace(WELL, labels={}),
        "labels",
        "failing",
        "No job is for it: job fleet asks for region=north, and it has no region.",
    ),
    "stopped": (with_job(wanted="stopped"), "job", "failing", "Job fleet is stopped."),
    "paused": (with_job(wanted="paused"), "job", "failing", "Job fleet is paused."),
    "failed": (with_job(state="failed", reason="no disk."), "job", "failing", "failed: no disk."),
    "completed": (
        with_job(state="completed", reason="r2 reached 0.9"),
        "job",
        "failing",
        "Job fleet has completed: r2 reached 0.9.",
    ),
    "starting": (with_job(state="starting", status=None), "aggregator", "waiting", "5 seconds"),
    "mute": (with_job(status=None), "aggregator", "failing", "has not said anything"),
    "never": (
        replace(WELL, said=None, seen_at=None, is_online=False),
        "online",
        "failing",
        "It was never heard of",
    ),
    "long ago": (
        replace(WELL, said=None, is_online=False),
        "online",
        "failing",
        "It is offline: it was last heard at 2026-01-10 12:00 UTC.",
    ),
    "silent": (
        replace(WELL, is_online=False, seconds_ago=45.0),
        "online",
        "failing",
        "It is offline: nothing was heard of it for 45 s.",
    ),
    "silent behind a gateway": (
        replace(WELL, is_online=False, seconds_ago=45.0, via="rsu-7"),
        "online",
        "failing",
        "It is offline: gateway rsu-7, through which it is seen, heard it 45 s ago.",
    ),
    "offline": (
        leaves("offline", "the node, which is not connected"),
        "online",
        "failing",
        "it ended, or its connection broke, 2 h ago.",
    ),
    "link closed by a rule": (
        leaves("link_closed", "network in wifi, ethernet: it is cellular"),
        "online",
        "waiting",
        "It keeps its link closed. Its link is cellular: job fleet asks for network in wifi, "
        "ethernet. It may train on meanwhile.",
    ),
    "link closed by a budget": (
        leaves("link_closed", "this month's 500 MB over cellular are used up"),
        "online",
        "waiting",
        "A budget of its owner holds it: this month's 500 MB over cellular are used up.",
    ),
    "moves": (
        leaves("link_closed", "goes over to cell rsu-7"),
        "online",
        "waiting",
        "It goes over to cell rsu-7.",
    ),
    "unknown job": (says("training", job="gone"), "assigned", "failing", "gone, which there is"),
    "wrong job": (
        replace(says("joining", job="other"), jobs=(JOB, OTHER)),
        "assigned",
        "failing",
        "It works on job other, which asks for model=x, and it has no model; region=south",
    ),
    "not ordered": (says("resting", "the job's start"), "ordered", "waiting", "has not reached it"),
    "not charging": (
        says(NOT_ELIGIBLE, f"{CHARGING}: it is false"),
        "eligible",
        "failing",
        f"It is not charging: job fleet asks for {CHARGING}.",
    ),
    "one of two": (
        says(NOT_ELIGIBLE, f"Vehicle.Speed < 1: it is 52; or {CHARGING}: it is false"),
        "eligible",
        "failing",
        f"It drives and it is not charging: job fleet asks for Vehicle.Speed < 1 or {CHARGING}.",
    ),
    "not known": (
        says(NOT_ELIGIBLE, "Vehicle.Battery.Level > 20: it is not known"),
        "eligible",
        "failing",
        "Level is not known: its owner asks for Vehicle.Battery.Level > 20.",
    ),
    "not the time": (
        says(NOT_ELIGIBLE, "time in 22:00-06:00"),
        "eligible",
        "failing",
        "It is not the time for it: its owner asks for time in 22:00-06:00.",
    ),
    "no budget": (
        says(NOT_ELIGIBLE, "today's 300 s of processor time are used up"),
        "eligible",
        "failing",
        "A budget of its owner holds it: today's 300 s of processor time are used up.",
    ),
    "no disk": (
        says(NOT_ELIGIBLE, "12 MiB of state are over the 10 that it may take"),
        "eligible",
        "failing",
        "A budget of its owner holds it: 12 MiB",
    ),
    "loading": (says("loading", "the trainer"), "trainer", "waiting", "loads the task"),
    "train failed": (
        says("train_failed", "another trainer: train_failed: no such file (peak 90 MiB)"),
        "trainer",
        "failing",
        "Its trainer failed: train_failed: no such file (peak 90 MiB).",
    ),
    "joining": (says("joining", "the first model", version=-1), "model", "waiting", "first model"),
    "joining without a gateway": (
        says("joining", "the first model", version=-1, cell="rsu-7"),
        "model",
        "failing",
        "It waits for its first model, and rsu-7, the gateway of its cell, is silent.",
    ),
    "flushing": (
        says("flushing", "sync 4: the flush of its progress"),
        "taking_part",
        "waiting",
        "It sends what it has, for sync 4: the flush of its progress: for a bounded time.",
    ),
    "holding": (
        says("holding", "sync 4: the synchronisation's model"),
        "taking_part",
        "waiting",
        "It pauses, for sync 4",
    ),
    "nothing said": (says(""), "taking_part", "unknown", "has not said yet"),
    "another agent": (says("dreaming", "sheep"), "taking_part", "unknown", "dreaming"),
    "gateway joins": (gateway("joining", "the first model"), "model", "waiting", "first model"),
    "gateway alone": (
        gateway("collecting", "no active node is connected"),
        "taking_part",
        "waiting",
        "no node of its cell is connected",
    ),
    "gateway full": (
        gateway("collecting", "the inbox is full (64 of 64 MiB), nodes keep their updates"),
        "taking_part",
        "failing",
        "It takes no more updates: the inbox is full",
    ),
    "own work begins": (gateway("collecting; own work starts", ""), "trainer", "waiting", "starts"),
    "own work ended": (
        gateway("collecting; own work ended with code 3, its log says why; again in 2 s", "x"),
        "trainer",
        "failing",
        "It collects for its cell, but does not train: own work ended with code 3",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_the_first_check_that_does_not_hold_is_named_with_what_was_found(name: str) -> None:
    situation, code, state, text = REASONS[name]
    explanation = explain(situation)

    by_code = {check.code: check for check in explanation.checks}
    assert by_code[code].state == state
    assert text in explanation.summary
    assert by_code[code].advice
    looked_at = list(by_code)
    assert looked_at == [each for each in CHECKS if each in by_code]
    place = looked_at.index(code)
    assert {by_code[each].state for each in looked_at[:place]} <= {"ok"}
    assert {by_code[each].state for each in looked_at[place + 1 :]} <= {"unknown"}


@pytest.mark.parametrize(
    "situation",
    [
        WELL,
        gateway("collecting", "updates of 2 nodes, 1 present"),
        gateway("collecting; trains too", "the cloud's verdict on the partial in flight"),
    ],
)
def test_of_a_node_that_is_at_work_every_check_holds(situation: Situation) -> None:
    explanation = explain(situation)
    assert explanation.is_training
    assert {check.state for check in explanation.checks} == {"ok"}
    assert explanation.summary


def test_of_a_gateway_only_what_fits_it_is_checked() -> None:
    own = {"eligible", "trainer"}
    for situation in (
        gateway("collecting", "x"),
        replace(WELL, role="edge", said=None, is_online=False),
    ):
        assert {check.code for check in explain(situation).checks} == CHECKS.keys() - own
    with_own_work = explain(gateway("collecting; trains too", "x"))
    assert {check.code for check in with_own_work.checks} == set(CHECKS)


def test_what_will_stop_a_node_that_still_trains_is_named() -> None:
    paused = replace(WELL, jobs=(replace(JOB, wanted="paused"),))
    explanation = explain(paused)
    assert explanation.is_training
    assert explanation.summary == "It trains for now, but: Job fleet is paused."


def test_a_rule_that_the_job_does_not_have_is_the_owners() -> None:
    held = explain(says(NOT_ELIGIBLE, "Vehicle.Speed < 5: it is 7"))
    by_code = {check.code: check for check in held.checks}
    assert held.summary == "It drives: its owner asks for Vehicle.Speed < 5."
    assert by_code["eligible"].link is None
    job = explain(says(NOT_ELIGIBLE, f"{CHARGING}: it is false"))
    assert {check.link for check in job.checks if check.code == "eligible"} == {"/jobs/fleet"}


def test_nothing_that_a_vehicle_says_is_without_an_explanation(tmp_path: Path) -> None:
    wire = Wire()
    driver, _ = at_work(tmp_path, wire, has_trainer=False)
    driver.permit("Vehicle.Speed < 1: it is 52", 1.0)
    driver.permit("", 2.0)
    driver.trainer_failed("killed", 3.0)
    order = pack(JobOrder(number=1, state="paused"))
    driver.take(mqtt.Received(topics.order("job"), order, is_retained=True), 4.0)
    wire.publish((driver.uplink.will, driver.uplink.farewell("link_closed", "network")))
    said = [unpack(sent.frame)[0] for sent in wire.sent if sent.topic == topics.state("n0")]

    explained = {state.said.doing for state, *_ in REASONS.values() if state.said}
    assert {"loading", NOT_ELIGIBLE, "train_failed", "resting"} <= {each.doing for each in said}
    assert {each.doing for each in said} | {str(state) for state in State} <= explained


@pytest.mark.parametrize(
    "text", ["", ": it is ", "a == 1; or ", "x" * 512, "a == b; or c: it is 4; or d"]
)
def test_whatever_a_node_says_it_is_explained(text: str) -> None:
    for doing in (NOT_ELIGIBLE, "train_failed", text):
        assert explain(says(doing, text)).summary
    assert explain(leaves("link_closed", text)).summary


def test_every_check_has_a_title() -> None:
    assert [check.title for check in explain(WELL).checks] == list(TITLES.values())
