"""Which messages are signed, over what bytes, and whose signature counts.

A node acts on versions and notices of its own cell's aggregator only: the cloud's, known as
``CLOUD_SIGNER``, or the gateway whose name the cell has, if its certificate says that it is one;
and on orders of the control plane, ``CONTROL_SIGNER``, which alone may ask for its log. An
aggregator takes from a node what that node has announced with its own signature, and other nodes'
work from gateways only: the announcement has the content's digest. The signature covers the whole
head but itself, and with it the digest of the model that results; the certificate that shows whose
key it is goes along. Keys and certificates are the business of ``security``; here they are
functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from hetertrain.errors import FrameError
from hetertrain.wire import topics
from hetertrain.wire.frames import header_bytes, normal
from hetertrain.wire.messages import Begin, JobOrder, LogRequest, ModelContent, Sync

CLOUD_SIGNER = "aggregator"
CONTROL_SIGNER = "control"
GATEWAY_ROLE = "edge"
"""What a gateway's certificate says of it, and its heartbeat."""
Sign = Callable[[bytes], tuple[bytes, bytes]]
"""Returns the signature of some bytes, and the certificate of the key."""
Check = Callable[[str, str | None, bytes, bytes, bytes], bool]
"""Tells whether a signer, of a role (None: of any), signed bytes, by signature and certificate."""

Signable = ModelContent | Sync | JobOrder | LogRequest | Begin
S = TypeVar("S", ModelContent, Sync, JobOrder, LogRequest, Begin)


def signed(message: S, job: str, cell: str, sign: Sign | None) -> S:
    """Return a message with its signature; where there is no key, as it is."""
    if sign is None:
        return message
    # As its receiver will read it: a whole number may stand for a fraction until then.
    message = normal(message)
    signature, certificate = sign(_covered(message, job, cell))
    return replace(message, signature=signature, certificate=certificate)


def check_signature(message: Signable, job: str, cell: str, check: Check | None) -> None:
    """Insist on the right signature, where signatures are asked for.

    Raises:
        FrameError: there is none, or another's (reason ``signature``).
    """
    if check is None:
        return
    role = None
    match message:
        case JobOrder() | LogRequest():
            signer = CONTROL_SIGNER
        case Begin():
            signer, role = message.node, GATEWAY_ROLE if message.relays else None
        case ModelContent() | Sync() if cell == topics.CLOUD_CELL:
            signer = CLOUD_SIGNER
        case ModelContent() | Sync():
            signer, role = cell, GATEWAY_ROLE
    covered = _covered(message, job, cell)
    if not check(signer, role, covered, message.signature, message.certificate):
        which = f"{type(message).__name__} is not signed by {signer}"
        raise FrameError("signature", which if role is None else f"{which} as {role}")


def _covered(message: Signable, job: str, cell: str) -> bytes:
    bare = replace(message, signature=b"", certificate=b"")
    match message:
        case JobOrder():  # For all cells of a job.
            place = job
        case LogRequest():  # For one node, wherever it is.
            place = message.node
        case _:
            place = f"{job} {cell}"
    return f"hetertrain {type(message).__name__} {place}\n".encode() + header_bytes(bare)
