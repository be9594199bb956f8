"""Claims, enrolment and renewal: how nodes join."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response
from pydantic import Field, StringConstraints
from sqlalchemy import and_, not_, select

from hetertrain.security import REQUEST_CHARACTERS_MAX
from hetertrain_cloud.control import enrolment
from hetertrain_cloud.control.access import node_rights
from hetertrain_cloud.control.api.convention import (
    ALWAYS,
    Body,
    Caller,
    IdempotencyKey,
    Labels,
    Limit,
    Name,
    NameCursor,
    Page,
    Plane,
    limited,
    listed,
    once,
    problems,
    shown_as,
)
from hetertrain_cloud.control.api.nodes import Role, State
from hetertrain_cloud.control.jobs import jobs_of
from hetertrain_cloud.control.plane import ControlPlane
from hetertrain_cloud.control.problems import not_found
from hetertrain_cloud.control.tables import Claim, Job, Node

ENROLMENTS_PER_MINUTE = 600
RETRY_SECONDS = 5
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
    caller: Caller,
    plane: Plane,
    is_usable: Annotated[
        bool | None,
        Query(description="true: neither revoked nor expired nor used up; false: the others"),
    ] = None,
    limit: Limit = 50,
    cursor: NameCursor = None,
) -> Page[ClaimShown]:
    """List claims."""
    caller.require("claims:read")
    with plane.database.read() as transaction:
        query = select(Claim).order_by(Claim.id).where(Claim.id > (cursor or ""))
        if is_usable is not None:
            usable = and_(
                Claim.revoked_at.is_(None),
                Claim.expires_at > plane.now(),
                Claim.uses < Claim.uses_max,
            )
            query = query.where(usable if is_usable else not_(usable))
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
    node = enrolled.node
    plane.live.note(node.name, "renewed", f"its certificate is valid until {node.expires_at:%F}")
    return _enrolment(plane, node)


def _claim(claim: Claim) -> ClaimShown:
    return shown_as(ClaimShown, claim)


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
