"""Users, logins and API tokens; and the first admin."""

from __future__ import annotations

import hmac
from datetime import datetime, timedelta
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import Field, StringConstraints
from sqlalchemy import select

from hetertrain_cloud.control import operators
from hetertrain_cloud.control.api.convention import (
    ALWAYS,
    SESSION_COOKIE,
    Body,
    Caller,
    IdempotencyKey,
    IfMatch,
    Limit,
    Name,
    NameCursor,
    Page,
    Plane,
    Text,
    check_revision,
    limited,
    listed,
    once,
    problems,
    set_etag,
    shown_as,
)
from hetertrain_cloud.control.problems import ProblemError, conflict, not_found
from hetertrain_cloud.control.tables import Token, User

LOGINS_PER_MINUTE = 20
Role = Literal["viewer", "operator", "admin"]
Password = Annotated[
    str,
    StringConstraints(
        min_length=operators.PASSWORD_CHARACTERS_MIN,
        max_length=128,
        pattern=r"^[^\x00-\x1f\x7f]+$",
    ),
    Field(examples=["correct horse battery"]),
]
router = APIRouter(prefix="/api/v1", tags=["accounts"])


class UserShown(Body):
    """A user."""

    name: str
    role: Role
    is_active: bool
    created_at: datetime
    locked_until: datetime | None
    revision: int


class UserCreation(Body):
    """A new user."""

    name: Name
    password: Password
    role: Role


class UserChange(Body):
    """What is to be changed; what is absent stays."""

    role: Role | None = None
    is_active: bool | None = None
    password: Password | None = None


class Bootstrap(Body):
    """The first admin, by whoever can read the one-time token on the server."""

    token: Annotated[str, StringConstraints(max_length=128)]
    name: Name
    password: Password


class Credentials(Body):
    """A name and a password."""

    name: Name
    password: Annotated[str, StringConstraints(max_length=128)]


class PasswordChange(Body):
    """Another password of one's own."""

    old: Annotated[str, StringConstraints(max_length=128)] = Field(description="the present one")
    new: Password


class SessionShown(Body):
    """A login; its secret is in the cookie."""

    csrf_token: str = Field(description="to be sent as X-CSRF-Token with every change")
    expires_at: datetime


class Me(Body):
    """Who calls."""

    name: str
    rights: list[str]
    csrf_token: str | None


class TokenShown(Body):
    """An API token."""

    id: str
    user: str
    label: str
    scopes: list[str]
    created_at: datetime
    expires_at: datetime
    revoked_at: datetime | None


class TokenCreation(Body):
    """A new API token of one's own."""

    label: Text = Field(examples=["nightly job"])
    scopes: list[Annotated[str, StringConstraints(max_length=32)]] = Field(
        min_length=1, max_length=16, examples=[["nodes:read", "jobs:write"]]
    )
    days: int = Field(90, ge=1, le=366, description="valid for so long")


class TokenMade(Body):
    """A new API token."""

    token: TokenShown
    secret: str | None = Field(description="shown this once")


@router.post(
    "/bootstrap",
    status_code=201,
    responses=problems(403, 409, 413, 422, 429),
    dependencies=[Depends(limited("bootstrap", LOGINS_PER_MINUTE))],
)
def create_first_admin(body: Bootstrap, plane: Plane) -> UserShown:
    """Make the first admin, with the one-time token that the server wrote at its first start."""
    expected = plane.bootstrap_token()
    with plane.database.begin() as transaction:
        if transaction.scalars(select(User.name).limit(1)).first() is not None:
            raise conflict("bootstrap_done", "there is an admin already: ask them for an account")
        if expected is None or not hmac.compare_digest(expected.encode(), body.token.encode()):
            raise ProblemError(403, "bootstrap_refused", f"read the token from {BOOTSTRAP_HINT}")
        user = operators.create_user(
            transaction,
            name=body.name,
            password=body.password,
            role="admin",
            actor="bootstrap",
            now=plane.now(),
        )
    plane.bootstrap_file.unlink(missing_ok=True)
    return _shown(user)


BOOTSTRAP_HINT = "the file bootstrap-token in the control plane's state directory"


@router.post(
    "/sessions",
    status_code=201,
    responses=problems(401, 413, 422, 429),
    dependencies=[Depends(limited("login", LOGINS_PER_MINUTE))],
)
def log_in(body: Credentials, plane: Plane, response: Response) -> SessionShown:
    """Log in; the answer sets a cookie."""
    with plane.database.begin() as transaction:
        login = operators.log_in(transaction, body.name, body.password, plane.now())
    if login is None:
        raise ProblemError(401, "credential_invalid", "the name or the password is wrong")
    response.set_cookie(
        SESSION_COOKIE, login.secret, secure=True, httponly=True, samesite="strict", path="/"
    )
    return SessionShown(csrf_token=login.csrf_token, expires_at=login.expires_at)


@router.delete("/sessions/current", status_code=204, responses=problems(*ALWAYS))
def log_out(caller: Caller, plane: Plane, request: Request, response: Response) -> None:
    """Log out."""
    secret = request.cookies.get(SESSION_COOKIE)
    if secret is not None and caller.csrf_token is not None:
        with plane.database.begin() as transaction:
            operators.log_out(transaction, secret)
        response.delete_cookie(SESSION_COOKIE, path="/")


@router.get("/me", responses=problems(*ALWAYS))
def who_am_i(caller: Caller) -> Me:
    """Say who calls, and what they may do."""
    return Me(name=caller.name, rights=sorted(caller.rights), csrf_token=caller.csrf_token)


@router.put("/me/password", status_code=204, responses=problems(*ALWAYS, 409, 429))
def change_own_password(
    body: PasswordChange, caller: Caller, plane: Plane, request: Request
) -> None:
    """Change one's own password, in a session. All other sessions of one's own end, and all API
    tokens are revoked.
    """
    session = request.cookies.get(SESSION_COOKIE)
    if session is None or caller.csrf_token is None:
        raise conflict("session_needed", "log in to change your password: a token cannot")
    with plane.database.begin() as transaction:
        is_changed = operators.change_own_password(
            transaction, caller.name, body.old, body.new, session=session, now=plane.now()
        )
    if not is_changed:
        raise conflict("password_wrong", "that is not your present password")


@router.get("/users", responses=problems(*ALWAYS))
def list_users(
    caller: Caller, plane: Plane, limit: Limit = 50, cursor: NameCursor = None
) -> Page[UserShown]:
    """List users, by name."""
    caller.require("users:read")
    with plane.database.read() as transaction:
        query = select(User).order_by(User.name).where(User.name > (cursor or ""))
        return listed(transaction, query, limit, lambda user: user.name, _shown)


@router.post("/users", status_code=201, response_model=UserShown, responses=problems(*ALWAYS, 409))
def create_user(
    body: UserCreation, caller: Caller, plane: Plane, idempotency_key: IdempotencyKey = None
) -> Response:
    """Add a user."""
    caller.require("users:write")
    with plane.database.begin() as transaction:
        return once(
            transaction,
            plane,
            caller,
            idempotency_key,
            ("create_user", UserCreation(name=body.name, password="*" * 12, role=body.role)),
            lambda: _shown(
                operators.create_user(
                    transaction,
                    name=body.name,
                    password=body.password,
                    role=body.role,
                    actor=caller.name,
                    now=plane.now(),
                )
            ),
        )


UserName = Annotated[Name, Path(description="the user's name")]


@router.get("/users/{name}", responses=problems(*ALWAYS, 404))
def show_user(name: UserName, caller: Caller, plane: Plane, response: Response) -> UserShown:
    """Show a user."""
    caller.require("users:read")
    with plane.database.read() as transaction:
        user = transaction.get(User, name)
        if user is None:
            raise not_found("user", name)
    set_etag(response, user.revision)
    return _shown(user)


@router.patch("/users/{name}", responses=problems(*ALWAYS, 404, 409, 412, 428))
def change_user(
    name: UserName,
    body: UserChange,
    caller: Caller,
    plane: Plane,
    response: Response,
    if_match: IfMatch = None,
) -> UserShown:
    """Change a user's role or password, or whether they may log in."""
    caller.require("users:write")
    with plane.database.begin() as transaction:
        user = transaction.get(User, name, with_for_update=True)
        if user is None:
            raise not_found("user", name)
        check_revision(if_match, user.revision)
        operators.change_user(
            transaction,
            user,
            role=body.role,
            is_active=body.is_active,
            password=body.password,
            actor=caller.name,
            now=plane.now(),
        )
    set_etag(response, user.revision)
    return _shown(user)


@router.get("/tokens", responses=problems(*ALWAYS))
def list_tokens(
    caller: Caller,
    plane: Plane,
    user: Annotated[Name | None, Query(description="only of this user")] = None,
    limit: Limit = 50,
    cursor: NameCursor = None,
) -> Page[TokenShown]:
    """List one's own API tokens; an admin sees all."""
    with plane.database.read() as transaction:
        query = select(Token).order_by(Token.id).where(Token.id > (cursor or ""))
        if "users:read" not in caller.rights:
            query = query.where(Token.user == caller.name)
        if user is not None:
            query = query.where(Token.user == user)
        return listed(transaction, query, limit, lambda token: token.id, _token)


@router.post("/tokens", status_code=201, response_model=TokenMade, responses=problems(*ALWAYS, 409))
def create_token(
    body: TokenCreation, caller: Caller, plane: Plane, idempotency_key: IdempotencyKey = None
) -> Response:
    """Make an API token with some of one's own rights."""
    now = plane.now()

    def make() -> TokenMade:
        token, secret = operators.create_token(
            transaction,
            caller,
            label=body.label,
            scopes=frozenset(body.scopes),
            expires_at=now + timedelta(days=body.days),
            now=now,
        )
        return TokenMade(token=_token(token), secret=secret)

    with plane.database.begin() as transaction:
        request = ("create_token", body)
        return once(transaction, plane, caller, idempotency_key, request, make)


@router.delete("/tokens/{identifier}", status_code=204, responses=problems(*ALWAYS, 404))
def revoke_token(identifier: Name, caller: Caller, plane: Plane) -> None:
    """Revoke an API token."""
    with plane.database.begin() as transaction:
        operators.revoke_token(transaction, caller, identifier, plane.now())


def _shown(user: User) -> UserShown:
    return shown_as(UserShown, user)


def _token(token: Token) -> TokenShown:
    return shown_as(TokenShown, token)
