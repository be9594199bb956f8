"""Nodes: which there are, what each does and why not more, and what is done to them."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Path, Query, Response
from pydantic import Field, StringConstraints
from sqlalchemy import select
from sqlalchemy.orm import Session as Transaction

from hetertrain_cloud.control import enrolment, timeline
from hetertrain_cloud.control.api.convention import (
    ALWAYS,
    Body,
    Caller,
    IfMatch,
    Labels,
    Limit,
    Name,
    Page,
    Plane,
    check_revision,
    page_of,
    problems,
    set_etag,
    shown_as,
)
from hetertrain_cloud.control.explanation import CheckState, explain
from hetertrain_cloud.control.live import LiveFilter
from hetertrain_cloud.control.node_situation import gather
from hetertrain_cloud.control.operators import Principal
from hetertrain_cloud.control.plane import ControlPlane
from hetertrain_cloud.control.problems import ProblemError, not_found
from hetertrain_cloud.control.search import NodeFilter, Order, SortKey, find
from hetertrain_cloud.control.tables import NAME_PATTERN, Job, Node

Role = Literal["vehicle", "edge"]
State = Literal["pending", "active", "revoked", "decommissioned"]
router = APIRouter(prefix="/api/v1", tags=["fleet"])


class LiveState(Body):
    """What a node said of itself a moment ago."""

    is_online: bool
    via: str = Field(
        description="the gateway that tells of it, since its cell has a broker of its own; empty: "
        "the node itself does. Then what it does is known, and the figures that the gateway has"
    )
    job: str
    cell: str
    tier: str
    doing: str
    waiting_for: str
    version: int
    steps: int
    step_seconds: float
    updates: int
    bytes_up: int
    bytes_down: int
    goodput_bits_per_second: int
    metrics: dict[str, float] = Field(description="on its own held-out data")
    measured: int = Field(description="the version that was measured; -1: none")
    budgets: str = Field(description="what it has used of what its owner lets it use")
    month_bytes: int = Field(description="sent and received this month, over all networks")
    backlog_updates: int = Field(description="updates that it still has to deliver")
    backlog_bytes: int
    train_failures: int = Field(description="how often training failed since its start")
    failure: str = Field(description="how it failed last; empty: it has not")
    agent: str = Field(description="version of its software", examples=["0.1.0"])
    rss_mib: int = Field(description="memory without the trainer's; 0: not known")
    latitude: float | None = Field(description="null: it does not say where it is")
    longitude: float | None
    seconds_ago: float


class NodeShown(Body):
    """A node of the fleet."""

    name: str
    role: Role
    state: State
    labels: dict[str, str]
    claim: str
    enrolled_at: datetime
    expires_at: datetime | None = Field(description="when its certificate does")
    seen_at: datetime | None
    revision: int
    live: LiveState | None = Field(description="null: nothing heard since the server's start")


class NodeChange(Body):
    """What is to be changed."""

    labels: Labels


NodeName = Annotated[Name, Path(description="the node's name")]


class Check(Body):
    """One thing that must hold for a node to train."""

    code: str = Field(description="stable, for programs", examples=["eligible"])
    title: str = Field(description="what must hold")
    state: CheckState = Field(
        description="`waiting`: it comes by itself, or needs a word of an operator; `unknown`: one "
        "before it does not hold"
    )
    detail: str = Field(description="what was found")
    advice: str = Field(description="what to do; empty: nothing")
    link: str | None = Field(
        description="path of the thing to look at, below /api/v1", examples=["/jobs/fleet"]
    )


class Explanation(Body):
    """Why a node does not train."""

    is_training: bool = Field(description="of a gateway: whether it collects")
    summary: str = Field(
        examples=["It is not charging: job fleet asks for IsCharging == true."],
    )
    checks: list[Check] = Field(description="what must hold; the cause before what it causes")


class Happening(Body):
    """One line of a node's timeline."""

    at: datetime
    kind: str = Field(
        description="`enrolled`, `approved`, `relabelled`, `revoked`, `decommissioned`, `renewed`, "
        "`log_read`; "
        "`online`, `offline`, `training_began`, `training_stopped`, `not_eligible`, "
        "`train_failed`, `job_changed`, `tier_changed`, `cell_changed`, `agent_changed`"
    )
    text: str
    count: int = Field(description="how often within seconds; `at` is the last time")
    actor: str | None = Field(description="who did it; null: nobody, or you may not read that")


class NodePage(Page[NodeShown]):
    """Some of the nodes that match; ask for the rest with ``cursor``."""

    total: int = Field(description="how many match")


Said = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]{1,64}$")]


def asked_for(
    plane: Plane,
    state: Annotated[State | None, Query()] = None,
    role: Annotated[Role | None, Query()] = None,
    label: Annotated[
        str | None,
        Query(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,63}=[^\x00-\x1f\x7f]{0,128}$",
            description="only nodes with this label: KEY=VALUE",
        ),
    ] = None,
    prefix: Annotated[Name | None, Query(description="only names that begin with this")] = None,
    contains: Annotated[
        str | None,
        Query(
            pattern=r"^[A-Za-z0-9._-]{1,64}$",
            description="only names with this in them, in capitals or not",
        ),
    ] = None,
    expires_within_days: Annotated[
        int | None,
        Query(ge=0, le=3660, description="only nodes whose certificate is over by then"),
    ] = None,
    doing: Annotated[
        Said | None,
        Query(
            description="what it does: `live.doing` up to a semicolon; `offline`: all that are "
            "not online",
            examples=["training"],
        ),
    ] = None,
    tier: Annotated[Said | None, Query(description="the tier that it said last")] = None,
    cell: Annotated[Said | None, Query(description="the cell that it said last")] = None,
    job: Annotated[Said | None, Query(description="the job that it said last")] = None,
    is_online: Annotated[bool | None, Query()] = None,
    held_by: Annotated[
        str | None,
        Query(
            pattern=r"^[^\x00-\x1f\x7f]{1,512}$",
            description="only nodes that this rule or budget keeps from training, as "
            "`not_eligible_by_rule` of /fleet names it",
            examples=["Vehicle.Speed < 1"],
        ),
    ] = None,
) -> NodeFilter:
    """Return which nodes are asked for; all that is given must hold."""
    until = None
    if expires_within_days is not None:
        until = plane.now() + timedelta(days=expires_within_days)
    return NodeFilter(
        live=LiveFilter(
            doing=doing, tier=tier, cell=cell, job=job, is_online=is_online, held_by=held_by
        ),
        state=state,
        role=role,
        label=label,
        prefix=prefix,
        contains=contains,
        expires_before=until,
    )


@router.get("/nodes", responses=problems(*ALWAYS))
def list_nodes(
    caller: Caller,
    plane: Plane,
    wanted: Annotated[NodeFilter, Depends(asked_for)],
    sort: Annotated[
        SortKey,
        Query(
            description="by this, as a node said it last; `seen`: who is there is seen now. Nodes "
            "of which it is not known come last, equals by name"
        ),
    ] = "name",
    descending: Annotated[bool, Query(description="the greatest first, or the latest")] = False,
    limit: Limit = 50,
    cursor: Annotated[
        str | None,
        Query(
            pattern=rf"^((-?[0-9]{{1,19}})?:)?{NAME_PATTERN}$",
            description="next_cursor of the page before, in the same order",
        ),
    ] = None,
) -> NodePage:
    """List nodes: those for which all that is asked for holds."""
    caller.require("nodes:read")
    order = Order(sort, descending)
    with plane.database.read() as transaction:
        rows, total = find(transaction, plane.live, wanted, order, cursor or "", limit + 1)
    found, next_cursor = page_of(rows, limit, lambda row: row[1])
    return NodePage(
        items=[_node(plane, node) for node, _ in found], next_cursor=next_cursor, total=total
    )


@router.get("/nodes/{name}", responses=problems(*ALWAYS, 404))
def show_node(name: NodeName, caller: Caller, plane: Plane, response: Response) -> NodeShown:
    """Show a node."""
    caller.require("nodes:read")
    with plane.database.read() as transaction:
        node = _find(transaction, name)
    set_etag(response, node.revision)
    return _node(plane, node)


@router.get("/nodes/{name}/explanation", responses=problems(*ALWAYS, 404))
def explain_node(name: NodeName, caller: Caller, plane: Plane) -> Explanation:
    """Say why a node does not train: what must hold, in order, and what to do about the first that
    does not.
    """
    caller.require("nodes:read")
    caller.require("jobs:read")
    with plane.database.read() as transaction:
        node = _find(transaction, name)
        jobs = transaction.scalars(select(Job).order_by(Job.name)).all()
    explanation = explain(gather(node, jobs, plane.live, plane.now(), plane.access_error))
    return shown_as(
        Explanation, explanation, checks=[shown_as(Check, check) for check in explanation.checks]
    )


@router.get("/nodes/{name}/events", responses=problems(*ALWAYS, 404))
def list_node_events(
    name: NodeName,
    caller: Caller,
    plane: Plane,
    limit: Limit = 50,
    cursor: Annotated[
        str | None,
        Query(pattern=r"^[0-9]{1,18}\.[0-9]{1,18}$", description="next_cursor of the page before"),
    ] = None,
) -> Page[Happening]:
    """List what happened to a node, newest first: what was done to it, and what it said of itself,
    of which the newest 200 are kept.
    """
    caller.require("nodes:read")
    place = timeline.Place() if cursor is None else timeline.Place.parse(cursor)
    with plane.database.read() as transaction:
        _find(transaction, name)
        rows, following = timeline.read(transaction, name, place, limit)
    # Who did what is in the audit trail, which not everybody may read.
    actor = {} if "audit:read" in caller.rights else {"actor": None}
    return Page(
        items=[shown_as(Happening, row, **actor) for row in rows],
        next_cursor=None if following is None else str(following),
    )


@router.patch("/nodes/{name}", responses=problems(*ALWAYS, 404, 412, 428))
def change_node(
    name: NodeName,
    body: NodeChange,
    caller: Caller,
    plane: Plane,
    response: Response,
    if_match: IfMatch = None,
) -> NodeShown:
    """Give a node other labels, and with them the jobs that ask for these."""
    caller.require("nodes:write")
    with plane.database.begin() as transaction:
        node = enrolment.find(transaction, name)
        check_revision(if_match, node.revision)
        enrolment.relabel(transaction, node, body.labels, caller.name, plane.now())
    plane.access_changed.set()
    set_etag(response, node.revision)
    return _node(plane, node)


@router.post("/nodes/{name}/approve", responses=problems(*ALWAYS, 404, 409, 503))
def approve_node(name: NodeName, caller: Caller, plane: Plane) -> NodeShown:
    """Let a node in that waits for approval."""
    caller.require("nodes:write")
    with plane.database.begin() as transaction:
        node = enrolment.approve(transaction, plane.authority, name, caller.name, plane.now())
    plane.update_access(node)
    return _node(plane, node)


@router.post("/nodes/{name}/revoke", responses=problems(*ALWAYS, 404))
def revoke_node(name: NodeName, caller: Caller, plane: Plane) -> NodeShown:
    """Take all rights from a node at once, as from a stolen one; its session at the broker ends."""
    return _expel(name, "revoked", caller, plane)


@router.post("/nodes/{name}/decommission", responses=problems(*ALWAYS, 404))
def decommission_node(name: NodeName, caller: Caller, plane: Plane) -> NodeShown:
    """Take a node out of the fleet for good."""
    return _expel(name, "decommissioned", caller, plane)


def _expel(name: str, state: str, caller: Principal, plane: ControlPlane) -> NodeShown:
    caller.require("nodes:write")
    with plane.database.begin() as transaction:
        node = enrolment.expel(transaction, name, state, caller.name, plane.now())
    try:
        plane.update_access(node)
    except ProblemError:
        # It is revoked all the same: the broker hears of it when it is reached again.
        plane.access_changed.set()
    return _node(plane, node)


def _find(transaction: Transaction, name: str) -> Node:
    node = transaction.get(Node, name)
    if node is None:
        raise not_found("node", name)
    return node


def _node(plane: ControlPlane, node: Node) -> NodeShown:
    seen, live = plane.live.node(node.name), None
    if seen is not None:
        is_online = plane.live.is_online(node.name)
        seconds_ago = round(plane.live.clock() - seen.at, 1)
        more = {"is_online": is_online, "seconds_ago": seconds_ago, "via": seen.via}
        live = shown_as(LiveState, seen.state, **more)
    return shown_as(NodeShown, node, live=live)
