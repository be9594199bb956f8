"""The fleet in numbers."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import Field

from hetertrain_cloud.control import overview
from hetertrain_cloud.control.api.convention import ALWAYS, Body, Caller, Plane, problems
from hetertrain_cloud.control.api.nodes import asked_for
from hetertrain_cloud.control.changes import doing_of
from hetertrain_cloud.control.live import OFFLINE
from hetertrain_cloud.control.search import NodeFilter, placed

POSITIONS_MAX = 10_000
EXPIRING_DAYS = 7
"""Nodes renew their certificates ten days before the end: those with less did not."""
router = APIRouter(prefix="/api/v1", tags=["fleet"])


class Fleet(Body):
    """The nodes that match, counted. All but ``by_state`` is of active nodes, so that
    ``/nodes?state=active&tier=t1`` lists just those that ``by_tier`` counts.
    """

    by_state: dict[str, int] = Field(description="where nodes' enrolment stands")
    by_role: dict[str, int]
    online: int
    online_not_active: int = Field(
        description="nodes that are heard though they are revoked, or, where nothing is asked for, "
        "were never enrolled"
    )
    by_doing: dict[str, int] = Field(
        description="what nodes do; `offline`: those that are not online, or never were",
        examples=[{"training": 120, "not_eligible": 31, "offline": 4}],
    )
    by_tier: dict[str, int] = Field(description="the tier that nodes said last, offline ones too")
    by_cell: dict[str, int] = Field(description="the cell that nodes said last, offline ones too")
    not_eligible_by_rule: dict[str, int] = Field(
        description="nodes that may not train now, by the rule that does not hold; the first "
        f"{overview.RULES_SHOWN}",
        examples=[{"Vehicle.Speed < 1": 25}],
    )
    labels: dict[str, dict[str, int]] = Field(
        description=f"labels in use, {overview.KEYS_SHOWN} keys and {overview.VALUES_SHOWN} values "
        "of each at most",
        examples=[{"region": {"north": 80, "south": 40}}],
    )
    certificates_expiring: int = Field(
        description=f"certificates that are over within {EXPIRING_DAYS} days, or already"
    )
    bytes_up: int = Field(description="by nodes, each since its start")
    bytes_down: int


class Position(Body):
    """Where a node is."""

    node: str
    latitude: float
    longitude: float
    doing: str = Field(description="as in filters; `offline`: where it was when it spoke last")


class Positions(Body):
    """Where nodes are that say so."""

    items: list[Position] = Field(description=f"at most {POSITIONS_MAX}")
    total: int = Field(description="how many nodes match and say where they are")


@router.get("/fleet", responses=problems(*ALWAYS))
def show_fleet(
    caller: Caller, plane: Plane, wanted: Annotated[NodeFilter, Depends(asked_for)]
) -> Fleet:
    """Count the fleet, or those for which all that is asked for holds: how many nodes do what, and
    where; for overviews and menus of filters.
    """
    caller.require("nodes:read")
    until = plane.now() + timedelta(days=EXPIRING_DAYS)
    with plane.database.read() as transaction:
        counts = overview.count(transaction, plane.live, until, wanted)
    keys = sorted(counts.labels, key=lambda key: (-counts.labels[key].total(), key))
    most = overview.most
    return Fleet(
        by_state=most(counts.by_state),
        by_role=most(counts.by_role),
        online=counts.online,
        online_not_active=counts.online_not_active,
        by_doing=most(counts.by_doing),
        by_tier=most(counts.by_tier),
        by_cell=most(counts.by_cell),
        not_eligible_by_rule=most(counts.not_eligible_by_rule, overview.RULES_SHOWN),
        labels={
            key: most(counts.labels[key], overview.VALUES_SHOWN)
            for key in keys[: overview.KEYS_SHOWN]
        },
        certificates_expiring=counts.certificates_expiring,
        bytes_up=counts.bytes_up,
        bytes_down=counts.bytes_down,
    )


@router.get("/fleet/positions", responses=problems(*ALWAYS))
def list_positions(
    caller: Caller, plane: Plane, wanted: Annotated[NodeFilter, Depends(asked_for)]
) -> Positions:
    """Say where nodes are, of those for which all that is asked for holds; to draw a map."""
    caller.require("nodes:read")
    with plane.database.read() as transaction:
        found, total = placed(transaction, plane.live, wanted, POSITIONS_MAX)
    items = [
        Position(
            node=state.node,
            latitude=state.latitude,
            longitude=state.longitude,
            doing=doing_of(state) if is_online else OFFLINE,
        )
        for state, is_online in found
        if state.latitude is not None and state.longitude is not None
    ]
    return Positions(items=items, total=total)
