"""Filters of the fleet that users keep for themselves.

They are a person's, kept at a login. A token reads its user's, where it may read nodes, and changes
none: it is given to a program for something else.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import Field, StringConstraints

from hetertrain_cloud.control import filters
from hetertrain_cloud.control.api.convention import (
    ALWAYS,
    Body,
    Caller,
    Plane,
    problems,
    shown_as,
)
from hetertrain_cloud.control.operators import Principal
from hetertrain_cloud.control.problems import ProblemError
from hetertrain_cloud.control.tables import SavedFilter

router = APIRouter(prefix="/api/v1/me", tags=["accounts"])
FilterName = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,63}$"),
    Path(description="the filter's name"),
]
FilterQuery = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9._~!$'()*+,;:@/?%=&-]{0,1000}$"),
    Field(description="as in an address, after the question mark", examples=["state=active"]),
]


class FilterChange(Body):
    """What a filter is to be."""

    query: FilterQuery


class FilterShown(Body):
    """A filter of one's own."""

    name: str
    query: str
    changed_at: datetime


class Filters(Body):
    """One's own filters, by name."""

    items: list[FilterShown] = Field(description=f"at most {filters.FILTERS_MAX}")


@router.get("/filters", responses=problems(*ALWAYS))
def list_filters(caller: Caller, plane: Plane) -> Filters:
    """List one's own filters."""
    caller.require("nodes:read")
    with plane.database.read() as transaction:
        rows = filters.filters_of(transaction, caller.name)
    return Filters(items=[_shown(row) for row in rows])


@router.put("/filters/{name}", responses=problems(*ALWAYS, 409))
def keep_filter(name: FilterName, body: FilterChange, caller: Caller, plane: Plane) -> FilterShown:
    """Keep a filter, in place of one's own of the same name; with a login, not with a token."""
    _require_login(caller)
    with plane.database.begin() as transaction:
        return _shown(filters.keep(transaction, caller.name, name, body.query, plane.now()))


@router.delete("/filters/{name}", status_code=204, responses=problems(*ALWAYS, 404))
def forget_filter(name: FilterName, caller: Caller, plane: Plane) -> None:
    """Delete one of one's own filters; with a login, not with a token."""
    _require_login(caller)
    with plane.database.begin() as transaction:
        filters.forget(transaction, caller.name, name)


def _require_login(caller: Principal) -> None:
    caller.require("nodes:read")
    if caller.token is not None:
        raise ProblemError(
            403, "login_needed", "a token changes nobody's filters: log in at /api/v1/sessions"
        )


def _shown(row: SavedFilter) -> FilterShown:
    return shown_as(FilterShown, row)
