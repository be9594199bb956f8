"""What all parts of the API have in common: who calls, problems, pages, ETags, repeated requests.

A handler opens one transaction, asks ``caller.require`` first, and raises ``ProblemError`` for what
it refuses; the answer is ``application/problem+json`` with a stable ``code`` (RFC 9457).
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from threading import Lock
from typing import Annotated, Any, Generic, TypeVar, cast

from fastapi import Depends, Header, Query, Request, Response
from fastapi.responses import JSONResponse
from fastapi.security import APIKeyCookie, HTTPAuthorizationCredentials, HTTPBearer
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
)
from sqlalchemy import Select, delete
from sqlalchemy.orm import Session as Transaction

from hetertrain_cloud.control.operators import Principal, by_session, by_token
from hetertrain_cloud.control.plane import ControlPlane
from hetertrain_cloud.control.problems import ProblemError
from hetertrain_cloud.control.tables import NAME_PATTERN, Answer

SESSION_COOKIE = "hetertrain_session"
PAGE_DEFAULT, PAGE_MAX = 50, 200
ANSWER_HOURS = 24
ADDRESSES_MAX = 10_000
PROBLEM_TYPE = "application/problem+json"

Name = Annotated[str, StringConstraints(pattern=f"^{NAME_PATTERN}$")]
Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,63}$")]
LabelValue = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]{0,128}$")]
Labels = Annotated[dict[Label, LabelValue], Field(max_length=16)]
Text = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]{1,128}$")]


def _in_utc(at: datetime) -> datetime:
    try:
        return at.astimezone(UTC)
    except OverflowError:
        raise ValueError("it is before the year 1 or after 9999 in UTC") from None


Time = Annotated[AwareDatetime, AfterValidator(_in_utc)]


class Body(BaseModel):
    """Base of what clients send and get: nothing unknown, and no type taken for another."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)


class Invalid(BaseModel):
    """One thing that is wrong in a request."""

    where: str = Field(examples=["body.labels"])
    message: str


class Problem(BaseModel):
    """Why a request was refused (RFC 9457)."""

    type: str = "about:blank"
    title: str = Field(examples=["Conflict"])
    status: int = Field(examples=[409])
    code: str = Field(description="stable, for programs", examples=["job_exists"])
    detail: str = Field(description="what was found, and what to do")
    errors: list[Invalid] = Field(
        [], description="what is wrong where, if the request is malformed"
    )


T = TypeVar("T")
R = TypeVar("R")
B = TypeVar("B", bound=BaseModel)


class Page(BaseModel, Generic[T]):
    """Some of a list; ask for the rest with ``cursor``."""

    items: list[T]
    next_cursor: str | None = Field(description="null: there is no more")


Responses = dict[int | str, dict[str, Any]]


def problems(*statuses: int, also: Responses | None = None) -> Responses:
    """Describe which refusals a handler has, beside ``also``."""
    content = {PROBLEM_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    texts = {
        400: "malformed",
        401: "no valid credential",
        403: "not allowed",
        404: "no such thing",
        409: "its state does not allow it",
        412: "it was changed meanwhile",
        413: "too large",
        416: "no such range",
        422: "malformed",
        428: "If-Match is missing",
        429: "too often",
        503: "not ready",
        504: "no answer in time",
    }
    refusals: Responses = {
        status: {"description": texts[status], "content": content} for status in statuses
    }
    return refusals | (also or {})


ALWAYS = (401, 403, 413, 422)


def plane_of(request: Request) -> ControlPlane:
    """Return the control plane that the application was built for."""
    return cast(ControlPlane, request.app.state.plane)


Plane = Annotated[ControlPlane, Depends(plane_of)]

_bearer = HTTPBearer(auto_error=False, description="an API token", scheme_name="token")
_cookie = APIKeyCookie(name=SESSION_COOKIE, auto_error=False, scheme_name="session")


def caller_of(
    request: Request,
    plane: Plane,
    bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
    cookie: Annotated[str | None, Depends(_cookie)],
    x_csrf_token: Annotated[
        str | None, Header(description="with a cookie: the session's, to change anything")
    ] = None,
) -> Principal:
    """Return who calls.

    Raises:
        ProblemError: 401, no valid credential; 403, a cookie without its CSRF token.
    """
    principal = None
    with plane.database.read() as transaction:
        if bearer is not None:
            principal = by_token(transaction, bearer.credentials, plane.now())
        elif cookie:
            principal = by_session(transaction, cookie, plane.now())
    if principal is None:
        raise ProblemError(
            401,
            "credential_missing" if bearer is None and not cookie else "credential_invalid",
            "log in at /api/v1/sessions, or send an API token that is valid as "
            "'Authorization: Bearer TOKEN'",
        )
    expected = principal.csrf_token
    if expected is not None and request.method not in ("GET", "HEAD"):
        given = (x_csrf_token or "").encode()
        if not hmac.compare_digest(expected.encode(), given):
            raise ProblemError(
                403, "csrf_token_missing", "repeat the session's csrf_token as X-CSRF-Token"
            )
    return principal


Caller = Annotated[Principal, Depends(caller_of)]
Limit = Annotated[int, Query(ge=1, le=PAGE_MAX, description="how many at most")]
_CURSOR = "next_cursor of the page before"
NameCursor = Annotated[str | None, Query(pattern=f"^{NAME_PATTERN}$", description=_CURSOR)]
NumberCursor = Annotated[int | None, Query(ge=0, lt=1 << 62, description=_CURSOR)]


def page_of(
    rows: Sequence[T], limit: int, key: Callable[[T], str | int]
) -> tuple[list[T], str | None]:
    """Cut one row more than ``limit`` into a page and the cursor of the next: its last key."""
    if len(rows) <= limit:
        return list(rows), None
    return list(rows[:limit]), str(key(rows[limit - 1]))


def listed(
    transaction: Transaction,
    query: Select[R],
    limit: int,
    key: Callable[[R], str | int],
    show: Callable[[R], T],
) -> Page[T]:
    """Answer with a page of a query's rows; ``key`` is what the query orders by."""
    rows, next_cursor = page_of(transaction.scalars(query.limit(limit + 1)).all(), limit, key)
    return Page(items=[show(row) for row in rows], next_cursor=next_cursor)


def shown_as(model: type[B], row: object, **more: object) -> B:
    """Fill a model with the attributes of a row, and ``more``."""
    names = model.model_fields.keys() - more.keys()
    return model.model_validate({name: getattr(row, name) for name in names} | more)


def set_etag(response: Response, revision: int) -> None:
    """Say which revision is answered."""
    response.headers["ETag"] = f'"{revision}"'


IfMatch = Annotated[
    str | None, Header(description="ETag of the revision that is to be changed", max_length=64)
]


def check_revision(if_match: str | None, revision: int) -> None:
    """Insist that the client knows what it changes.

    Raises:
        ProblemError: 428, it did not say; 412, it was changed meanwhile.
    """
    if if_match is None:
        raise ProblemError(428, "if_match_missing", "send the ETag of what you read as If-Match")
    if if_match.strip() not in ("*", f'"{revision}"'):
        raise ProblemError(412, "changed_meanwhile", "read it again, then change it")


IdempotencyKey = Annotated[
    str | None,
    Header(
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="the same key: the same answer, and nothing done twice, for a day",
    ),
]


def once(
    transaction: Transaction,
    plane: ControlPlane,
    caller: Principal,
    key: str | None,
    request: tuple[str, BaseModel | None],
    make: Callable[[], BaseModel],
    status: int = 201,
) -> Response:
    """Do what a request asks for, or give the answer that it got before; secrets are not repeated.

    Raises:
        ProblemError: 409, the key was used for another request.
    """
    text = request[0] + ("" if request[1] is None else request[1].model_dump_json())
    digest = hashlib.sha256(text.encode()).hexdigest()
    stored = f"{caller.name} {key}"
    if key is not None:
        transaction.execute(
            delete(Answer).where(Answer.created_at < plane.now() - timedelta(hours=ANSWER_HOURS))
        )
        answer = transaction.get(Answer, stored)
        if answer is not None and answer.request != digest:
            raise ProblemError(
                409, "idempotency_key_used", "this key was used for another request: take another"
            )
        if answer is not None:
            return Response(answer.body, answer.status, media_type="application/json")
    made = make()
    if key is not None:
        public = made.model_copy(update={"secret": None}) if hasattr(made, "secret") else made
        transaction.add(
            Answer(
                key=stored,
                request=digest,
                status=status,
                body=public.model_dump_json(),
                created_at=plane.now(),
            )
        )
    return Response(made.model_dump_json(), status, media_type="application/json")


class Limiter:
    """So many calls a minute from an address, by kind; forgets the addresses that called least."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._buckets: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()

    def check(self, kind: str, address: str, per_minute: int) -> None:
        """Count a call.

        Raises:
            ProblemError: 429.
        """
        now, key = self._clock(), (kind, address)
        with self._lock:
            level, at = self._buckets.pop(key, (0.0, now))
            level = max(0.0, level - (now - at) * per_minute / 60) + 1
            is_over = level > per_minute
            self._buckets[key] = (min(level, per_minute), now)
            if len(self._buckets) > ADDRESSES_MAX:
                self._buckets.popitem(last=False)
        if is_over:
            raise ProblemError(429, "too_often", f"at most {per_minute} a minute: wait", 60)


def limited(kind: str, per_minute: int) -> Callable[[Request], None]:
    """Return a dependency that limits how often an address may call."""

    def check(request: Request) -> None:
        address = request.client.host if request.client else "unknown"
        cast(Limiter, request.app.state.limiter).check(kind, address, per_minute)

    return check


def problem_response(error: ProblemError, errors: list[Invalid] | None = None) -> JSONResponse:
    """Answer with a problem."""
    titles = {401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 409: "Conflict"}
    headers = {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.retry_seconds is not None:
        headers["Retry-After"] = str(error.retry_seconds)
    body = Problem(
        title=titles.get(error.status, error.problem.replace("_", " ").capitalize()),
        status=error.status,
        code=error.problem,
        detail=error.detail,
        errors=errors or [],
    )
    return JSONResponse(body.model_dump(), error.status, headers, media_type=PROBLEM_TYPE)
