"""The fleet in numbers."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field

from hetertrain_cloud.control import overview
from hetertrain_cloud.control.api.convention import ALWAYS, Body, Caller, Name, Plane, problems

EXPIRING_DAYS = 7
"""Nodes renew their certificates ten days before the end: those with less did not."""
router = APIRouter(prefix="/api/v1", tags=["fleet"])


class Fleet(Body):
    """The fleet, counted. All but ``by_state`` is of active nodes, so that
    ``/nodes?state=active&tier=t1`` lists just those that ``by_tier`` counts.
    """

    by_state: dict[str, int] = Field(description="where nodes' enrolment stands")
    by_role: dict[str, int]
    online: int
    online_not_active: int = Field(
        description="nodes that are heard though they are revoked, or were never enrolled"
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
        description="certificates that are over within `expires_within_days`, or already"
    )
    bytes_up: int = Field(description="by nodes, each since its start")
    bytes_down: int


@router.get("/fleet", responses=problems(*ALWAYS))
def show_fleet(
    caller: Caller,
    plane: Plane,
    job: Annotated[Name | None, Query(description="only nodes that spoke of this job last")] = None,
    expires_within_days: Annotated[int, Query(ge=0, le=3660)] = EXPIRING_DAYS,
) -> Fleet:
    """Count the fleet: how many nodes do what, and where; for overviews and menus of filters."""
    caller.require("nodes:read")
    until = plane.now() + timedelta(days=expires_within_days)
    with plane.database.read() as transaction:
        counts = overview.count(transaction, plane.live, until, job)
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
