"""Gateways: each with its cell, its way to the cloud, and what it has not delivered yet."""

from __future__ import annotations

from datetime import datetime

from fastapi import APIRouter
from pydantic import Field
from sqlalchemy import select

from hetertrain.wire.signing import GATEWAY_ROLE
from hetertrain_cloud.control import overview
from hetertrain_cloud.control.api.convention import (
    ALWAYS,
    Body,
    Caller,
    Limit,
    NameCursor,
    Page,
    Plane,
    page_of,
    problems,
)
from hetertrain_cloud.control.api.nodes import State
from hetertrain_cloud.control.plane import ControlPlane
from hetertrain_cloud.control.tables import Node

router = APIRouter(prefix="/api/v1", tags=["fleet"])


class GatewayShown(Body):
    """A gateway, and its cell in numbers. What it has not said since the server's start is null."""

    name: str
    state: State = Field(description="where its enrolment stands")
    seen_at: datetime | None
    is_online: bool
    job: str | None
    doing: str | None
    waiting_for: str | None
    has_own_broker: bool = Field(
        description="its cell has a broker of its own, so that members are seen through it"
    )
    members: dict[str, int] = Field(
        description="active nodes of its cell by what they do, as `/nodes?state=active&cell=NAME` "
        "lists them",
        examples=[{"training": 5, "offline": 1}],
    )
    tier: str | None
    goodput_bits_per_second: int | None
    version: int | None = Field(description="the cloud's newest that it has; -1: none")
    local: int | None = Field(
        description="models that it has made on that version without the cloud; 0: it serves the "
        "cloud's; null: it did not say lately"
    )
    backlog_updates: int | None = Field(description="updates that the cloud has not settled")
    backlog_bytes: int | None
    cell_bytes_up: int | None = Field(
        description="updates that its cell has sent it since it started; `bytes_up` is what it "
        "sent to the cloud meanwhile; null: it did not say lately"
    )
    bytes_up: int | None
    bytes_down: int | None
    month_bytes: int | None = Field(description="sent and received this month")


@router.get("/gateways", responses=problems(*ALWAYS))
def list_gateways(
    caller: Caller, plane: Plane, limit: Limit = 50, cursor: NameCursor = None
) -> Page[GatewayShown]:
    """List gateways, by name; who is in a cell, `/nodes?cell=NAME` lists."""
    caller.require("nodes:read")
    query = select(Node).where(Node.role == GATEWAY_ROLE, Node.name > (cursor or ""))
    with plane.database.read() as transaction:
        rows = transaction.scalars(query.order_by(Node.name).limit(limit + 1)).all()
        gateways, next_cursor = page_of(rows, limit, lambda node: node.name)
        names = {node.name for node in gateways}
        cells = overview.count_cells(transaction, plane.live, names)
    items = [_gateway(plane, node, overview.most(cells[node.name])) for node in gateways]
    return Page(items=items, next_cursor=next_cursor)


def _gateway(plane: ControlPlane, node: Node, members: dict[str, int]) -> GatewayShown:
    seen, live = plane.live.node(node.name), plane.live
    said = None if seen is None else seen.state
    status = None if said is None else live.job(said.job, node.name)
    return GatewayShown.model_validate(
        {name: getattr(said, name, None) for name in GatewayShown.model_fields}
        | {name: getattr(node, name) for name in ("name", "state", "seen_at")}
        | {
            "is_online": live.is_online(node.name),
            "has_own_broker": live.has_own_broker(node.name),
            "members": members,
            "local": None if status is None else status.local,
            "cell_bytes_up": None if status is None else status.uplink_bytes,
        }
    )
