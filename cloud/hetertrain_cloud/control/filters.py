"""The filters that users keep, each for themselves."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session as Transaction

from hetertrain_cloud.control.problems import conflict, not_found
from hetertrain_cloud.control.tables import SavedFilter, User

FILTERS_MAX = 50
"""A user keeps so many."""


def filters_of(transaction: Transaction, user: str) -> Sequence[SavedFilter]:
    """Return a user's filters, by name."""
    query = select(SavedFilter).where(SavedFilter.user == user).order_by(SavedFilter.name)
    return transaction.scalars(query).all()


def keep(
    transaction: Transaction, user: str, name: str, query: str, now: datetime.datetime
) -> SavedFilter:
    """Keep a filter, in place of one of the same name.

    Raises:
        ProblemError: 409, the user has too many.
    """
    # One at a time for each user, or two requests could pass the limit at one moment.
    transaction.get(User, user, with_for_update=True)
    row = transaction.get(SavedFilter, (user, name))
    if row is None:
        count = select(func.count()).select_from(SavedFilter).where(SavedFilter.user == user)
        if (transaction.scalar(count) or 0) >= FILTERS_MAX:
            raise conflict("filters_too_many", f"at most {FILTERS_MAX} filters: delete one first")
        row = SavedFilter(user=user, name=name)
        transaction.add(row)
    row.query, row.changed_at = query, now
    return row


def forget(transaction: Transaction, user: str, name: str) -> None:
    """Delete a filter.

    Raises:
        ProblemError: 404.
    """
    row = transaction.get(SavedFilter, (user, name))
    if row is None:
        raise not_found("filter", name)
    transaction.execute(
        delete(SavedFilter).where(SavedFilter.user == user, SavedFilter.name == name)
    )
