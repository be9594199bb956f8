"""Why does a node not train? The checks that lie between a node and its training, in the order in
which one thing causes the next, and what to do about the first that fails.

::

    enrolled → certificate → broker → labels of a job → job runs → aggregator speaks → online
        → works on such a job → its rules let it → its trainer works → has a model → takes part

Pure: what is known is given, and the answer is made of it. What lies behind a check that fails
cannot be known, or does not matter yet, and is said to be so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hetertrain.wire import topics
from hetertrain.wire.messages import NOT_ELIGIBLE, NodeState
from hetertrain.wire.signing import GATEWAY_ROLE
from hetertrain_cloud.control.changes import (
    LINK_CLOSED,
    TRAIN_FAILED,
    TRAIN_FAILED_PREFIX,
    doing_of,
)
from hetertrain_cloud.control.node_situation import JobSituation, Situation
from hetertrain_cloud.control.wording import held

CheckState = Literal["ok", "failing", "waiting", "unknown"]
TITLES = {
    "enrolled": "It is enrolled",
    "certificate": "Its certificate is valid",
    "broker": "The control plane reaches the broker",
    "labels": "There is a job whose labels it has",
    "job": "The job is to run",
    "aggregator": "The job's aggregator speaks",
    "online": "It is online",
    "assigned": "It works on a job that it may work on",
    "ordered": "It knows that the job runs",
    "eligible": "Its rules and budgets let it train",
    "trainer": "Its trainer works",
    "model": "It has a model",
    "taking_part": "It takes part",
}
"""The checks, in causal order."""
OWN_WORK = ("eligible", "trainer")
"""Of a gateway these hold only where it has data of its own."""
JOBS_NAMED_MAX = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that must hold for a node to train."""

    code: str
    state: CheckState
    detail: str = ""
    """What was found."""
    advice: str = ""
    """What an operator can do; empty: nothing needs to be done."""
    link: str | None = None
    """Path of the thing in the API, below ``/api/v1``."""

    @property
    def title(self) -> str:
        """What must hold."""
        return TITLES[self.code]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Whether a node trains, and why not."""

    is_training: bool
    summary: str
    checks: tuple[Check, ...]


def explain(situation: Situation) -> Explanation:
    """Say whether a node trains, and why not: the first check that is not ``ok`` is the reason."""
    checks: list[Check] = []
    reason: tuple[Check, str] | None = None
    for code, look in CHECKS.items():
        if code in OWN_WORK and not _has_own_work(situation):
            continue
        if reason is not None:
            detail = f"cannot be told before this holds: {reason[0].title}"
            checks.append(Check(code=code, state="unknown", detail=detail))
            continue
        check, sentence = look(situation)
        checks.append(check)
        if check.state != "ok":
            reason = check, sentence
    is_training = _is_training(situation)
    summary = checks[-1].detail if reason is None else reason[1]
    if is_training and reason is not None:
        summary = f"It trains for now, but: {summary}"
    return Explanation(is_training, summary, tuple(checks))


def _has_own_work(situation: Situation) -> bool:
    said = situation.said
    return situation.role != GATEWAY_ROLE or (said is not None and "; " in said.doing)


def _is_training(situation: Situation) -> bool:
    said = situation.said
    is_well = situation.enrolment == "active" and situation.is_online
    return is_well and said is not None and doing_of(said) in ("training", "collecting")


Looked = tuple[Check, str]
"""A check, and a sentence on it for a summary, where it is not ``ok``."""


def _ok(code: str, detail: str = "") -> Looked:
    return Check(code=code, state="ok", detail=detail), ""


def _not(
    code: str, state: CheckState, text: str, advice: str = "", link: str | None = None
) -> Looked:
    sentence = f"{text.rstrip(' .:')}."  # What others say in it may end as it likes.
    return Check(code=code, state=state, detail=sentence, advice=advice, link=link), sentence


def _enrolled(situation: Situation) -> Looked:
    link = f"/nodes/{situation.node}"
    match situation.enrolment:
        case "active":
            return _ok("enrolled", f"as {situation.role}")
        case "pending":
            text = "It waits to be approved: an operator must let it in."
            return _not("enrolled", "waiting", text, "approve it, if you know the device", link)
        case state:
            advice = "to have it back, make a claim for this very node and enrol it again"
            return _not("enrolled", "failing", f"It was {state}: it has no rights.", advice, link)


def _certificate(situation: Situation) -> Looked:
    ends, now = situation.expires_at, situation.now
    if ends is not None and ends > now:
        return _ok("certificate", f"until {ends:%F %H:%M} UTC")
    text = "Its certificate is over" + (f" since {ends:%F %H:%M} UTC." if ends else ".")
    advice = (
        "see whether it reaches the control plane, where it renews its certificate (its doctor "
        "tells); start it again, or enrol it again"
    )
    return _not("certificate", "failing", text, advice, f"/nodes/{situation.node}")


def _broker(situation: Situation) -> Looked:
    if situation.broker_error:
        text = f"The control plane does not reach the broker: {situation.broker_error}."
        return _not("broker", "failing", text, "see whether the broker runs; /readyz says more")
    if situation.access_error and not situation.is_online:
        text = f"The broker may not know the node's rights: {situation.access_error}."
        return _not("broker", "failing", text, "see the broker's log; /readyz says more")
    return _ok("broker")


def _labels(situation: Situation) -> Looked:
    may, labels = situation.may_work_on, situation.labels
    if may:
        return _ok("labels", _names(may))
    if not situation.jobs:
        return _not("labels", "failing", "There is no job yet.", "create a job", "/jobs")
    nearest = sorted(
        situation.jobs,
        key=lambda job: (len(job.missing(labels)), job.wanted != "running", job.name),
    )
    lacks = [f"job {job.name} asks for {_lack(job, labels)}" for job in nearest[:JOBS_NAMED_MAX]]
    wanted = ", ".join(f"{key}={value}" for key, value in nearest[0].missing(labels).items())
    advice = f"give the node {wanted}, or let job {nearest[0].name} ask for less"
    text = f"No job is for it: {'; '.join(lacks)}."
    return _not("labels", "failing", text, advice, f"/nodes/{situation.node}")


def _names(jobs: Sequence[JobSituation]) -> str:
    more = f" and {len(jobs) - JOBS_NAMED_MAX} more" if len(jobs) > JOBS_NAMED_MAX else ""
    return ", ".join(job.name for job in jobs[:JOBS_NAMED_MAX]) + more


def _lack(job: JobSituation, labels: Mapping[str, str]) -> str:
    def one(key: str, value: str) -> str:
        has = f"it has {key}={labels[key]}" if key in labels else f"it has no {key}"
        return f"{key}={value}, and {has}"

    return "; ".join(one(key, value) for key, value in job.missing(labels).items())


def _of(situation: Situation) -> JobSituation:
    job = situation.job()
    assert job is not None, "the check of labels comes before"
    return job


def _job(situation: Situation) -> Looked:
    job = _of(situation)
    link, name = f"/jobs/{job.name}", job.name
    if job.wanted != "running":
        return _not("job", "failing", f"Job {name} is {job.wanted}.", "start the job", link)
    if job.state == "completed":
        text = f"Job {name} has completed: {job.reason}."
        return _not("job", "failing", text, "start the job again, if there is more to learn", link)
    if job.state not in ("running", "starting"):
        text = f"Job {name} {job.state}: {job.reason}."
        advice = "it is tried again by itself; its aggregator's log says more"
        return _not("job", "failing", text, advice, link)
    return _ok("job", f"job {name}")


def _aggregator(situation: Situation) -> Looked:
    job = _of(situation)
    if job.status is not None:
        return _ok("aggregator", f"version {job.status.version}")
    text = f"The aggregator of job {job.name} has not said anything for 5 seconds."
    state: CheckState = "waiting" if job.state == "starting" else "failing"
    advice = "wait until it has started; if it does not, see the log of `hetertrain cloud`"
    return _not("aggregator", state, text, advice, f"/jobs/{job.name}")


def _online(situation: Situation) -> Looked:
    said, ago = situation.said, _time(situation.seconds_ago)
    part = "edge" if situation.role == GATEWAY_ROLE else "vehicle"
    advice = (
        "see whether it has power and a network; on it, `hetertrain "
        f"{part} doctor` names the layer that fails"
    )
    if situation.is_online:
        through = f", through gateway {situation.via}" if situation.via else ""
        return _ok("online", f"heard {ago} ago{through}")
    if situation.via:
        gateway = situation.via
        text = f"It is offline: gateway {gateway}, through which it is seen, heard it {ago} ago."
        advice = f"see whether gateway {gateway} is well; then {advice}"
        return _not("online", "failing", text, advice, f"/nodes/{gateway}")
    if said is not None and not said.is_online and doing_of(said) == LINK_CLOSED:
        return _link_closed(situation, said)
    if said is not None:
        text = f"It is offline: nothing was heard of it for {ago}."
        if not said.is_online:
            text = f"It is offline: it ended, or its connection broke, {ago} ago."
    elif situation.seen_at is not None:
        text = f"It is offline: it was last heard at {situation.seen_at:%F %H:%M} UTC."
    else:
        text = "It was never heard of: its agent was not started, or does not reach the broker."
    return _not("online", "failing", text, advice)


def _link_closed(situation: Situation, said: NodeState) -> Looked:
    job, refusal = _of(situation), said.waiting_for
    if refusal.startswith("goes over to"):
        return _not("online", "waiting", f"It {refusal}.", "wait a moment")
    by = held(refusal, job.name, job.send_when)
    text = f"It keeps its link closed. {by.sentence} It may train on meanwhile."
    return _not("online", "waiting", text, by.advice, by.link)


def _assigned(situation: Situation) -> Looked:
    said = _said(situation)
    if said.job in (job.name for job in situation.may_work_on):
        return _ok("assigned", f"job {said.job}")
    job = next((job for job in situation.jobs if job.name == said.job), None)
    may = _names(situation.may_work_on)
    if job is None:
        text = f"It works on job {said.job}, which there is not."
        advice = f"start it with `job` set to one of {may}, or create the job"
        return _not("assigned", "failing", text, advice, "/jobs")
    text = f"It works on job {job.name}, which asks for {_lack(job, situation.labels)}."
    advice = f"give it the label, or start it with `job` set to one of {may}"
    return _not("assigned", "failing", text, advice, f"/nodes/{situation.node}")


def _said(situation: Situation) -> NodeState:
    assert situation.said is not None, "the check that it is online comes before"
    return situation.said


def _ordered(situation: Situation) -> Looked:
    said = _said(situation)
    if doing_of(said) != "resting":
        return _ok("ordered")
    text = f"It rests: the order that job {said.job} runs has not reached it."
    advice = "wait a few seconds; if it rests on, see in its log whether it refused the order"
    return _not("ordered", "waiting", text, advice, f"/jobs/{said.job}")


def _eligible(situation: Situation) -> Looked:
    said, job = _said(situation), _of(situation)
    if doing_of(said) != NOT_ELIGIBLE:
        return _ok("eligible", said.budgets)
    by = held(said.waiting_for, job.name, job.train_when)
    return _not("eligible", "failing", by.sentence, by.advice, by.link)


def _trainer(situation: Situation) -> Looked:
    said = _said(situation)
    doing, _, own = said.doing.partition("; ")
    if doing == "loading":
        text = "Its trainer loads the task."
        return _not("trainer", "waiting", text, "wait; its log says so if it takes too long")
    if doing == TRAIN_FAILED:
        why = said.waiting_for.removeprefix(TRAIN_FAILED_PREFIX)
        text = f"Its trainer failed: {why}."
        advice = "mend the task or its data; the trainer is started again by itself"
        return _not("trainer", "failing", text, advice)
    if own.startswith("own work ended"):
        text = f"It collects for its cell, but does not train: {own}."
        return _not("trainer", "failing", text, "see the gateway's log")
    if own == "own work starts":
        return _not("trainer", "waiting", "Its own training starts.", "wait a moment")
    return _ok("trainer", own)


def _model(situation: Situation) -> Looked:
    said, job = _said(situation), _of(situation)
    if doing_of(said) != "joining":
        newest = f" of {job.status.version}" if job.status else ""
        return _ok("model", f"version {said.version}{newest}" if said.version >= 0 else "")
    if said.cell not in (topics.CLOUD_CELL, said.node) and situation.gateway is None:
        text = f"It waits for its first model, and {said.cell}, the gateway of its cell, is silent."
        return _not("model", "failing", text, "start the gateway", f"/nodes/{said.cell}")
    text = "It waits for its first model."
    return _not("model", "waiting", text, "wait: on a slow link a model takes minutes")


def _taking_part(situation: Situation) -> Looked:
    said = _said(situation)
    waits = said.waiting_for
    match doing_of(said):
        case "training":
            return _ok("taking_part", f"It trains on version {said.version}.")
        case "flushing" | "holding" as doing:
            does = "sends what it has" if doing == "flushing" else "pauses"
            text = f"It {does}, for {waits}: for a bounded time."
            return _not("taking_part", "waiting", text, "nothing: it goes on by itself")
        case "collecting" if waits.startswith("the inbox is full"):
            text = f"It takes no more updates: {waits}."
            return _not("taking_part", "failing", text, "see why the cloud does not take its work")
        case "collecting" if waits.startswith("no active node"):
            text = "It is a gateway, and no node of its cell is connected."
            return _not("taking_part", "waiting", text, "see its cell's nodes")
        case "collecting":
            text = f"It is a gateway, and collects its cell's updates; it waits for {waits}."
            return _ok("taking_part", text)
        case "":
            text = "It is there, and has not said yet what it does."
            return _not("taking_part", "unknown", text, "wait for its next heartbeat")
        case doing:
            text = f"It says that it does this: {doing}; and waits for {waits}."
            return _not("taking_part", "unknown", text, "its agent may be newer than this server")


CHECKS: dict[str, Callable[[Situation], Looked]] = {
    "enrolled": _enrolled,
    "certificate": _certificate,
    "broker": _broker,
    "labels": _labels,
    "job": _job,
    "aggregator": _aggregator,
    "online": _online,
    "assigned": _assigned,
    "ordered": _ordered,
    "eligible": _eligible,
    "trainer": _trainer,
    "model": _model,
    "taking_part": _taking_part,
}
"""How each is looked at; each may rely on those before it."""
assert list(CHECKS) == list(TITLES), "one order"


def _time(seconds: float) -> str:
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
