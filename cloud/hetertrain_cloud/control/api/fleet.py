"""Claims, enrolment and nodes."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Path, Query, Response
from pydantic import Field, StringConstraints
from sqlalchemy import select

from hetertrain.security import REQUEST_CHARACTERS_MAX
from hetertrain_cloud.control import enrolment
from hetertrain_cloud.control.access import node_rights
from hetertrain_cloud.control.api.convention import (
    ALWAYS,
    Body,
    Caller,
    IdempotencyKey,
    IfMatch,
    Labels,
    Limit,
    Name,
    NameCursor,
    Page,
    Plane,
    check_revision,
    limited,
    listed,
    once,
    problems,
    set_etag,
    shown_as,
)
from hetertrain_cloud.control.jobs import jobs_of
from hetertrain_cloud.control.operators import Principal
from hetertrain_cloud.control.plane import ControlPlane
from hetertrain_cloud.control.problems import ProblemError, not_found
from hetertrain_cloud.control.tables import Claim, Job, Node

ENROLMENTS_PER_MINUTE = 600
RETRY_SECONDS = 5
Role = Literal["vehicle", "edge"]
State = Literal["pending", "active", "revoked", "decommissioned"]
router = APIRouter(prefix="/api/v1", tags=["fleet"])


class ClaimShown(Body):
    """The right to enrol nodes."""

    id: str
    role: Role
    node: str | None
    labels: dict[str, str]
    uses_max: int
    uses: int
    needs_approval: bool
    created_by: str
    created_at: datetime
    expires_at: datetime
    revoked_at: datetime | None


class ClaimCreation(Body):
    """A new claim."""

    role: Role
    node: Name | None = Field(
        None, description="for this node only; it may have been enrolled before"
    )
    labels: Labels = Field({}, examples=[{"region": "north"}])
    uses: int = Field(1, ge=1, le=100_000, description="for so many nodes")
    needs_approval: bool = Field(False, description="each waits until an operator lets it in")
    hours: int = Field(24, ge=1, le=8784, description="valid for so long")


class ClaimMade(Body):
    """A new claim."""

    claim: ClaimShown
    secret: str | None = Field(description="what a node is given to enrol with; shown this once")


class EnrolmentRequest(Body):
    """A node's request to join."""

    claim: Annotated[str, StringConstraints(max_length=256)]
    request: Annotated[str, StringConstraints(max_length=REQUEST_CHARACTERS_MAX)] = Field(
        description="PKCS #10 certificate request, PEM; its common name is the node's name"
    )


class RenewalRequest(Body):
    """A node's request for a new certificate, signed with its enrolled key."""

    request: Annotated[str, StringConstraints(max_length=REQUEST_CHARACTERS_MAX)]


class BrokerShown(Body):
    """Where the broker is."""

    host: str
    port: int
    is_tls: bool
    websocket_path: str | None


class Enrolment(Body):
    """Where a node's enrolment stands, and all that it needs to take part."""

    node: str
    role: Role
    state: State
    certificate: str | None = Field(description="PEM; null: wait to be approved, and ask again")
    expires_at: datetime | None
    authority: str = Field(description="PEM certificate of the fleet's authority")
    broker: BrokerShown
    jobs: list[str] = Field(description="the jobs whose topics the node may use")
    publish: list[str] = Field(description="topics that it may publish on")
    subscribe: list[str] = Field(description="topics that it may subscribe to")


class Authority(Body):
    """The fleet's certificate authority."""

    certificate: str = Field(description="PEM")
    fingerprint: str = Field(description="SHA-256 of the certificate, hexadecimal")


class LiveState(Body):
    """What a node said of itself a moment ago."""

    is_online: bool
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


@router.get("/authority", tags=["fleet"])
def show_authority(plane: Plane) -> Authority:
    """Return the authority's certificate; who has a claim compares it with the fingerprint."""
    authority = plane.authority
    return Authority(certificate=authority.pem, fingerprint=authority.fingerprint())


@router.get(
    "/authority/revocations",
    response_class=Response,
    responses={200: {"content": {"application/x-pem-file": {"schema": {"type": "string"}}}}},
)
def show_revocations(plane: Plane) -> Response:
    """Return the signed list of revoked certificates (RFC 5280)."""
    with plane.database.read() as transaction:
        revoked = enrolment.revoked_certificates(transaction, plane.now())
    text = plane.authority.revocations(revoked, plane.now())
    return Response(text, media_type="application/x-pem-file")


@router.get("/claims", responses=problems(*ALWAYS))
def list_claims(
    caller: Caller, plane: Plane, limit: Limit = 50, cursor: NameCursor = None
) -> Page[ClaimShown]:
    """List claims."""
    caller.require("claims:read")
    with plane.database.read() as transaction:
        query = select(Claim).order_by(Claim.id).where(Claim.id > (cursor or ""))
        return listed(transaction, query, limit, lambda claim: claim.id, _claim)


@router.post("/claims", status_code=201, response_model=ClaimMade, responses=problems(*ALWAYS, 409))
def create_claim(
    body: ClaimCreation, caller: Caller, plane: Plane, idempotency_key: IdempotencyKey = None
) -> Response:
    """Make a claim."""
    caller.require("claims:write")

    def make() -> ClaimMade:
        claim, secret = enrolment.create_claim(
            transaction,
            role=body.role,
            node=body.node,
            labels=body.labels,
            uses=body.uses,
            needs_approval=body.needs_approval,
            lifetime=timedelta(hours=body.hours),
            authority=plane.authority.fingerprint(),
            actor=caller.name,
            now=plane.now(),
        )
        return ClaimMade(claim=_claim(claim), secret=secret)

    with plane.database.begin() as transaction:
        request = ("create_claim", body)
        return once(transaction, plane, caller, idempotency_key, request, make)


@router.get("/claims/{identifier}", responses=problems(*ALWAYS, 404))
def show_claim(identifier: Name, caller: Caller, plane: Plane) -> ClaimShown:
    """Show a claim."""
    caller.require("claims:read")
    with plane.database.read() as transaction:
        claim = transaction.get(Claim, identifier)
        if claim is None:
            raise not_found("claim", identifier)
        return _claim(claim)


@router.delete("/claims/{identifier}", status_code=204, responses=problems(*ALWAYS, 404))
def revoke_claim(identifier: Name, caller: Caller, plane: Plane) -> None:
    """Let nobody enrol with a claim any more; nodes that did stay."""
    caller.require("claims:write")
    with plane.database.begin() as transaction:
        enrolment.revoke_claim(transaction, identifier, caller.name, plane.now())


@router.post(
    "/enrolments",
    responses=problems(
        403,
        409,
        413,
        422,
        429,
        503,
        also={202: {"model": Enrolment, "description": "waits for approval"}},
    ),
    dependencies=[Depends(limited("enrolment", ENROLMENTS_PER_MINUTE))],
)
def enrol(body: EnrolmentRequest, plane: Plane, response: Response) -> Enrolment:
    """Join the fleet, with a claim; to ask again with the same key is harmless."""
    with plane.database.begin() as transaction:
        enrolled = enrolment.request(
            transaction, plane.authority, body.claim, body.request, plane.now()
        )
    node = enrolled.node
    if enrolled.is_changed:
        plane.update_access(node)
    if node.state == "pending":
        response.status_code = 202
        response.headers["Retry-After"] = str(RETRY_SECONDS)
    return _enrolment(plane, node)


@router.post(
    "/renewals",
    responses=problems(403, 413, 422, 429),
    dependencies=[Depends(limited("enrolment", ENROLMENTS_PER_MINUTE))],
)
def renew(body: RenewalRequest, plane: Plane) -> Enrolment:
    """Get a new certificate; the request is signed with the enrolled key, and needs no more."""
    with plane.database.begin() as transaction:
        enrolled = enrolment.renew(transaction, plane.authority, body.request, plane.now())
    return _enrolment(plane, enrolled.node)


NodeName = Annotated[Name, Path(description="the node's name")]


@router.get("/nodes", responses=problems(*ALWAYS))
def list_nodes(
    caller: Caller,
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
    limit: Limit = 50,
    cursor: NameCursor = None,
) -> Page[NodeShown]:
    """List nodes, by name."""
    caller.require("nodes:read")
    query = select(Node).order_by(Node.name).where(Node.name > (cursor or ""))
    if state is not None:
        query = query.where(Node.state == state)
    if role is not None:
        query = query.where(Node.role == role)
    if label is not None:
        key, _, value = label.partition("=")
        query = query.where(Node.labels[key].as_string() == value)
    if prefix is not None:
        query = query.where(Node.name.startswith(prefix, autoescape=True))
    with plane.database.read() as transaction:
        return listed(
            transaction, query, limit, lambda node: node.name, lambda node: _node(plane, node)
        )


@router.get("/nodes/{name}", responses=problems(*ALWAYS, 404))
def show_node(name: NodeName, caller: Caller, plane: Plane, response: Response) -> NodeShown:
    """Show a node."""
    caller.require("nodes:read")
    with plane.database.read() as transaction:
        node = transaction.get(Node, name)
        if node is None:
            raise not_found("node", name)
    set_etag(response, node.revision)
    return _node(plane, node)


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


def _claim(claim: Claim) -> ClaimShown:
    return shown_as(ClaimShown, claim)


def _node(plane: ControlPlane, node: Node) -> NodeShown:
    seen, live = plane.live.node(node.name), None
    if seen is not None:
        is_online = plane.live.is_online(node.name)
        seconds_ago = round(plane.live.clock() - seen.at, 1)
        live = shown_as(LiveState, seen.state, is_online=is_online, seconds_ago=seconds_ago)
    return shown_as(NodeShown, node, live=live)


def _enrolment(plane: ControlPlane, node: Node) -> Enrolment:
    with plane.database.read() as transaction:
        jobs = jobs_of(node, list(transaction.scalars(select(Job))))
    rights = node_rights(node.name, node.role, jobs)
    return shown_as(
        Enrolment,
        node,
        node=node.name,
        authority=plane.authority.pem,
        broker=shown_as(BrokerShown, plane.advertised),
        jobs=jobs,
        publish=sorted(rights.publish),
        subscribe=sorted(rights.subscribe),
    )
