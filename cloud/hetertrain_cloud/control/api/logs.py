"""The end of a node's log, on demand: the node is asked for it, and its owner may refuse."""

from __future__ import annotations

import re
from datetime import datetime

from fastapi import APIRouter
from pydantic import Field
from sqlalchemy.orm import Session as Transaction

from hetertrain_cloud.control.api.convention import ALWAYS, Body, Caller, Plane, problems
from hetertrain_cloud.control.api.nodes import NodeName
from hetertrain_cloud.control.log_desk import LogDesk
from hetertrain_cloud.control.plane import ControlPlane
from hetertrain_cloud.control.problems import ProblemError, conflict, not_found
from hetertrain_cloud.control.tables import Node
from hetertrain_cloud.control.trail import write_entry

router = APIRouter(prefix="/api/v1", tags=["fleet"])
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""A terminal takes such characters for commands."""


class LogTail(Body):
    """The end of a node's log."""

    node: str
    at: datetime = Field(description="when it answered")
    lines: list[str] = Field(description="100 at most, of 500 characters at most; the newest last")


@router.get("/nodes/{name}/log", responses=problems(*ALWAYS, 404, 409, 429, 503, 504))
def read_node_log(name: NodeName, caller: Caller, plane: Plane) -> LogTail:
    """Ask a node for the last lines of its log. That they were asked for is in the audit trail."""
    caller.require("logs:read")
    with plane.database.begin() as transaction:
        desk = _find(transaction, plane, name)
        write_entry(
            transaction, "node_log_read", ("node", name), actor=caller.name, now=plane.now()
        )
    answer = desk.read(name)
    if not answer.is_shared:
        text = f"the owner of {name} does not share its log: share_log, in the node's settings"
        raise conflict("log_not_shared", text)
    return LogTail(node=name, at=plane.now(), lines=[_CONTROL.sub(" ", s) for s in answer.lines])


def _find(transaction: Transaction, plane: ControlPlane, name: str) -> LogDesk:
    """Return who asks a node that can be asked.

    Raises:
        ProblemError: 404, 409 or 503: it cannot.
    """
    if transaction.get(Node, name) is None:
        raise not_found("node", name)
    seen = plane.live.node(name)
    if seen is not None and seen.via:
        text = f"{name} is behind the broker of gateway {seen.via}, where nobody here can ask it"
        raise conflict("node_behind_gateway", text)
    if plane.logs is None or plane.live.broker_error:
        text = f"the broker cannot be reached: {plane.live.broker_error or 'there is none'}"
        raise ProblemError(503, "broker_unreachable", text, 5)
    if not plane.live.is_online(name):
        raise conflict("node_offline", f"{name} is not online: its log is on its own machine")
    return plane.logs
