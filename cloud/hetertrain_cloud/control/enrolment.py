"""How nodes join, renew, and leave: claims, certificates, and the states of a node.

::

    (claim) --request--> pending --approve--> active --revoke------> revoked
                    \\--no approval needed---> active --decommission> decommissioned
    revoked, decommissioned --request with a claim for this very node--> pending or active

A request is a certificate request, signed by the node's key: to repeat it is harmless, since its
certificate is of use to the key's owner only. So a repeated one gets the same answer, and a renewal
needs no other credential.
"""

from __future__ import annotations

import datetime
import hmac
import re
import secrets
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric import ec
from sqlalchemy import select, update
from sqlalchemy.orm import Session as Transaction

from hetertrain.enrolment import CLAIM_PREFIX
from hetertrain.errors import CredentialError
from hetertrain.security import public_digest, read_request
from hetertrain_cloud.control.authority import Authority
from hetertrain_cloud.control.operators import digest_of
from hetertrain_cloud.control.problems import ProblemError, conflict, not_found
from hetertrain_cloud.control.tables import NAME_PATTERN, Certificate, Claim, Node
from hetertrain_cloud.control.trail import write_entry

CERTIFICATE_DAYS = 30
RESERVED = frozenset({"aggregator", "control", "cloud"})
"""Names that the broker's access rights give to the cloud's own parts."""
ENROLLED = ("pending", "active")


@dataclass(frozen=True, slots=True)
class Enrolled:
    """Where a node's enrolment stands."""

    node: Node
    is_changed: bool
    """Its rights at the broker must be brought up to date."""


def create_claim(
    transaction: Transaction,
    *,
    role: str,
    node: str | None,
    labels: dict[str, str],
    uses: int,
    needs_approval: bool,
    lifetime: datetime.timedelta,
    authority: str,
    actor: str,
    now: datetime.datetime,
) -> tuple[Claim, str]:
    """Make a claim; return it and its text, which is shown this once.

    The text ends with the fingerprint of our authority, so that a node that has nothing but the
    claim knows whom it talks to.
    """
    secret = secrets.token_urlsafe(24)
    claim = Claim(
        id=secrets.token_hex(8),
        digest=digest_of(secret),
        role=role,
        node=node,
        labels=labels,
        uses_max=uses,
        uses=0,
        needs_approval=needs_approval,
        created_by=actor,
        created_at=now,
        expires_at=now + lifetime,
    )
    transaction.add(claim)
    transaction.flush()
    write_entry(
        transaction,
        "claim_created",
        ("claim", claim.id),
        actor=actor,
        now=now,
        after={"role": role, "node": node, "labels": labels, "uses_max": uses},
    )
    return claim, f"{CLAIM_PREFIX}.{claim.id}.{secret}.{authority}"


def revoke_claim(
    transaction: Transaction, identifier: str, actor: str, now: datetime.datetime
) -> None:
    """Let nobody use a claim any more.

    Raises:
        ProblemError: 404.
    """
    claim = transaction.get(Claim, identifier)
    if claim is None:
        raise not_found("claim", identifier)
    if claim.revoked_at is None:
        claim.revoked_at = now
        write_entry(transaction, "claim_revoked", ("claim", identifier), actor=actor, now=now)


def request(
    transaction: Transaction,
    authority: Authority,
    claim_text: str,
    request_pem: str,
    now: datetime.datetime,
) -> Enrolled:
    """Enrol the node that a certificate request names, with a claim; a repeat changes nothing.

    Raises:
        ProblemError: 403, the claim is wrong, over, used up or for another node; 409, the name is
            another node's; 422, the request is malformed.
    """
    name, public_key = _read(request_pem)
    claim = _claim(transaction, claim_text)
    node = transaction.get(Node, name, with_for_update=True)
    digest = public_digest(public_key)
    is_repeat = node is not None and node.claim == claim.id and node.public_key == digest
    if node is not None and is_repeat and node.state in ENROLLED:
        return Enrolled(node, False)
    _check_claim(claim, name, now)
    if node is not None and claim.node != name:
        raise conflict(
            "node_exists",
            f"there is a node {name} already: choose another name, or have a claim made for it",
        )
    if node is not None:
        _check_old_certificates(transaction, node, digest, now)
    claim.uses += 1
    before = None if node is None else shown(node)
    if node is not None:
        _revoke_certificates(transaction, node, now)
    else:
        node = Node(name=name, enrolled_at=now)
        transaction.add(node)
    node.role, node.labels, node.claim = claim.role, dict(claim.labels), claim.id
    node.public_key, node.request = digest, request_pem
    node.certificate, node.expires_at = None, None
    node.state, node.revision = "pending", (node.revision or 0) + 1
    transaction.flush()
    write_entry(
        transaction,
        "node_enrolled",
        ("node", node.name),
        actor=f"claim {claim.id}",
        now=now,
        before=before,
        after=shown(node),
    )
    if not claim.needs_approval:
        _certify(transaction, authority, node, now)
    return Enrolled(node, True)


def renew(
    transaction: Transaction, authority: Authority, request_pem: str, now: datetime.datetime
) -> Enrolled:
    """Give an active node that asks with its enrolled key a new certificate.

    Raises:
        ProblemError: 403, the node is unknown, not active, or its key another one; 422, the
            request is malformed.
    """
    name, public_key = _read(request_pem)
    node = transaction.get(Node, name, with_for_update=True)
    is_known = node is not None and hmac.compare_digest(node.public_key, public_digest(public_key))
    if node is None or not is_known or node.state != "active":
        raise ProblemError(
            403, "node_refused", f"{name} is not an active node with this key: enrol it again"
        )
    _certify(transaction, authority, node, now)
    return Enrolled(node, False)


def approve(
    transaction: Transaction, authority: Authority, name: str, actor: str, now: datetime.datetime
) -> Node:
    """Let a pending node in.

    Raises:
        ProblemError: 404; 409, it is not pending.
    """
    node = find(transaction, name)
    if node.state != "pending":
        raise conflict("node_not_pending", f"{name} is {node.state}, not pending")
    before = shown(node)
    _certify(transaction, authority, node, now)
    node.revision += 1
    write_entry(
        transaction,
        "node_approved",
        ("node", node.name),
        actor=actor,
        now=now,
        before=before,
        after=shown(node),
    )
    return node


def expel(
    transaction: Transaction, name: str, state: str, actor: str, now: datetime.datetime
) -> Node:
    """Take all rights from a node: ``state`` is ``revoked`` or ``decommissioned``.

    Raises:
        ProblemError: 404.
    """
    node = find(transaction, name)
    if node.state == state:
        return node
    before = shown(node)
    node.state, node.certificate, node.expires_at = state, None, None
    node.revision += 1
    _revoke_certificates(transaction, node, now)
    write_entry(
        transaction,
        f"node_{state}",
        ("node", node.name),
        actor=actor,
        now=now,
        before=before,
        after=shown(node),
    )
    return node


def relabel(
    transaction: Transaction, node: Node, labels: dict[str, str], actor: str, now: datetime.datetime
) -> None:
    """Give a node other labels."""
    before = shown(node)
    node.labels = labels
    node.revision += 1
    write_entry(
        transaction,
        "node_relabelled",
        ("node", node.name),
        actor=actor,
        now=now,
        before=before,
        after=shown(node),
    )


def find(transaction: Transaction, name: str) -> Node:
    """Return a node, to be changed.

    Raises:
        ProblemError: 404.
    """
    node = transaction.get(Node, name, with_for_update=True)
    if node is None:
        raise not_found("node", name)
    return node


def revoked_certificates(
    transaction: Transaction, now: datetime.datetime
) -> list[tuple[str, datetime.datetime]]:
    """Return serial numbers and times of what is revoked and would still be valid."""
    query = select(Certificate).where(Certificate.revoked_at.is_not(None))
    rows = transaction.scalars(query.where(Certificate.expires_at > now))
    return [(row.serial, row.revoked_at) for row in rows if row.revoked_at is not None]


def shown(node: Node) -> dict[str, object]:
    """Return what the audit trail says of a node."""
    return {"state": node.state, "role": node.role, "labels": node.labels, "key": node.public_key}


def _read(request_pem: str) -> tuple[str, ec.EllipticCurvePublicKey]:
    try:
        name, public_key = read_request(request_pem)
    except CredentialError as error:
        raise ProblemError(422, "request_invalid", str(error)) from error
    if not re.fullmatch(NAME_PATTERN, name) or name in RESERVED:
        raise ProblemError(
            422, "name_invalid", f"a node's name is 1 to 64 of A-Z a-z 0-9 . _ -, not {name!r}"
        )
    return name, public_key


def _claim(transaction: Transaction, text: str) -> Claim:
    parts = text.split(".")
    claim = None
    if len(parts) == 4 and parts[0] == CLAIM_PREFIX:
        claim = transaction.get(Claim, parts[1], with_for_update=True)
    if claim is None or not hmac.compare_digest(claim.digest, digest_of(parts[2])):
        raise ProblemError(403, "claim_refused", "there is no such claim: have one made")
    return claim


def _check_claim(claim: Claim, name: str, now: datetime.datetime) -> None:
    reasons = {
        "claim_revoked": claim.revoked_at is not None,
        "claim_expired": now >= claim.expires_at,
        "claim_used_up": claim.uses >= claim.uses_max,
        "claim_for_another": claim.node not in (None, name),
    }
    for code, applies in reasons.items():
        if applies:
            text = code.removeprefix("claim_").replace("_", " ")
            raise ProblemError(403, code, f"the claim is {text}: have another one made")


def _check_old_certificates(
    transaction: Transaction, node: Node, public_key: str, now: datetime.datetime
) -> None:
    """A broker knows a node by its name: while a stolen key has a certificate that is valid, the
    name must not be given rights again, unless it is the same key.
    """
    if node.state != "revoked" or node.public_key == public_key:
        return
    query = select(Certificate.expires_at).where(Certificate.node == node.name)
    expires_at = max(transaction.scalars(query), default=now)
    if expires_at > now:
        raise conflict(
            "old_certificate_valid",
            f"{node.name} was revoked, and its old certificate is valid until {expires_at:%F}: "
            "enrol the new device by another name, or wait",
        )


def _certify(
    transaction: Transaction, authority: Authority, node: Node, now: datetime.datetime
) -> None:
    _, public_key = read_request(node.request)
    lifetime = datetime.timedelta(days=CERTIFICATE_DAYS)
    issued = authority.issue_node(node.name, node.role, public_key, now, lifetime)
    node.state, node.certificate, node.expires_at = "active", issued.pem, issued.expires_at
    transaction.add(Certificate(serial=issued.serial, node=node.name, expires_at=issued.expires_at))
    transaction.flush()


def _revoke_certificates(transaction: Transaction, node: Node, now: datetime.datetime) -> None:
    query = update(Certificate).where(Certificate.node == node.name)
    transaction.execute(query.where(Certificate.revoked_at.is_(None)).values(revoked_at=now))
