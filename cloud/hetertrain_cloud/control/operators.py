"""Who may use the control plane, and what each may do: users, logins, API tokens, rights.

A role is a set of rights; a token has some of its user's, for as long as the user has them. Only
digests of secrets are stored: passwords by argon2id, the random ones by SHA-256.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import secrets
from dataclasses import dataclass

from argon2 import PasswordHasher
from argon2.exceptions import VerificationError
from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session as Transaction

from hetertrain_cloud.control.problems import ProblemError, conflict, not_found
from hetertrain_cloud.control.tables import AuditHead, Session, Token, User
from hetertrain_cloud.control.trail import write_entry

_READ = frozenset(f"{kind}:read" for kind in ("nodes", "claims", "jobs", "versions", "metrics"))
_OPERATE = frozenset(f"{kind}:write" for kind in ("nodes", "claims", "jobs", "versions"))
_LOOK_CLOSER = frozenset(f"{kind}:read" for kind in ("audit", "settings", "logs"))
ROLES: dict[str, frozenset[str]] = {
    "viewer": _READ,
    "operator": _READ | _OPERATE | _LOOK_CLOSER,
    "admin": _READ | _OPERATE | _LOOK_CLOSER | {"users:read", "users:write"},
}
"""The rights of each role."""
SESSION_HOURS = 8
FAILED_LOGINS_MAX = 5
LOCK_MINUTES = 15
TOKEN_PREFIX = "htt"  # noqa: S105  # says what it is, and is no secret
PASSWORD_CHARACTERS_MIN = 12

_hasher = PasswordHasher()
_STRANGERS_HASH = _hasher.hash(secrets.token_urlsafe())
"""Compared with where there is no such user, so that a name cannot be found out by timing."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Who makes a request, and what they may do."""

    name: str
    rights: frozenset[str]
    token: str | None = None
    """Set: the API token that the request is made with."""
    expires_at: datetime.datetime | None = None
    """When that token does."""
    csrf_token: str | None = None
    """What a request by cookie must repeat in its head, to change anything."""

    def require(self, right: str) -> None:
        """Insist on a right.

        Raises:
            ProblemError: 403, naming the right.
        """
        if right not in self.rights:
            raise ProblemError(
                403,
                "right_missing",
                f"{self.name} lacks the right {right}: an admin can give the role or token that "
                "has it",
            )


@dataclass(frozen=True, slots=True)
class Login:
    """A new session; the secrets are shown this once."""

    secret: str
    csrf_token: str
    expires_at: datetime.datetime


def digest_of(secret: str) -> str:
    """Return what is stored of a random secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


def shown(user: User) -> dict[str, object]:
    """Return what the audit trail says of a user."""
    return {"role": user.role, "is_active": user.is_active}


def create_user(
    transaction: Transaction,
    *,
    name: str,
    password: str,
    role: str,
    actor: str,
    now: datetime.datetime,
) -> User:
    """Add a user.

    Raises:
        ProblemError: 409, the name is taken.
    """
    if transaction.get(User, name) is not None:
        raise conflict("user_exists", f"there is a user {name} already")
    user = User(name=name, password_hash=_hasher.hash(password), role=role, created_at=now)
    transaction.add(user)
    transaction.flush()
    write_entry(
        transaction, "user_created", ("user", name), actor=actor, now=now, after=shown(user)
    )
    return user


def change_user(
    transaction: Transaction,
    user: User,
    *,
    role: str | None,
    is_active: bool | None,
    password: str | None,
    actor: str,
    now: datetime.datetime,
) -> None:
    """Change what is given; whoever loses the account or gets a new password is logged out, and
    all tokens of theirs are revoked.

    Raises:
        ProblemError: 409, it is the last active admin.
    """
    # One at a time, or two admins could take each other's role away at one moment.
    transaction.scalars(select(AuditHead).with_for_update()).one()
    before = shown(user)
    if role is not None:
        user.role = role
    if is_active is not None:
        user.is_active = is_active
    if password is not None:
        user.password_hash = _hasher.hash(password)
        user.failed_logins, user.locked_until = 0, None
    user.revision += 1
    transaction.flush()
    admins = select(User.name).where(User.role == "admin", User.is_active)
    if transaction.scalars(admins.limit(1)).first() is None:
        raise conflict("last_admin", "make another user an admin first: this is the last one")
    if password is not None or not user.is_active:
        transaction.execute(delete(Session).where(Session.user == user.name))
        own = select(Token.id).where(Token.user == user.name)
        _revoke_all(transaction, list(transaction.scalars(own)), now)
    write_entry(
        transaction,
        "user_changed",
        ("user", user.name),
        actor=actor,
        now=now,
        before=before,
        after=shown(user) | ({"password": "changed"} if password is not None else {}),
    )


def _known_by(
    transaction: Transaction, name: str, password: str, now: datetime.datetime
) -> User | None:
    """Return the user whose password it is; None where it is wrong, and that is counted.

    Raises:
        ProblemError: 429, too many were wrong: the account is locked for a while.
    """
    user = transaction.get(User, name, with_for_update=True)
    if user is not None and user.locked_until is not None and now < user.locked_until:
        seconds = int((user.locked_until - now).total_seconds()) + 1
        raise ProblemError(
            429, "account_locked", "too many wrong passwords: try again later", seconds
        )
    if not _is_password(user.password_hash if user else _STRANGERS_HASH, password) or user is None:
        if user is not None:
            _count_failure(transaction, user, now)
        return None
    if not user.is_active:
        return None
    user.failed_logins, user.locked_until = 0, None
    return user


def log_in(
    transaction: Transaction, name: str, password: str, now: datetime.datetime
) -> Login | None:
    """Check a password and begin a session; None where it is wrong, and that is counted.

    Raises:
        ProblemError: 429, too many were wrong: the account is locked for a while.
    """
    user = _known_by(transaction, name, password, now)
    if user is None:
        return None
    transaction.execute(delete(Session).where(Session.expires_at < now))
    login = Login(
        secrets.token_urlsafe(32),
        secrets.token_urlsafe(32),
        now + datetime.timedelta(hours=SESSION_HOURS),
    )
    transaction.add(
        Session(
            digest=digest_of(login.secret),
            user=user.name,
            csrf_token=login.csrf_token,
            expires_at=login.expires_at,
        )
    )
    _note(transaction, user, "logged_in", now)
    return login


def change_own_password(
    transaction: Transaction,
    name: str,
    old: str,
    new: str,
    *,
    session: str,
    now: datetime.datetime,
) -> bool:
    """Give a user another password, for the present one; False where that is wrong, and counted.

    All of the user's sessions but this one (its secret) end, and all tokens are revoked: who knew
    the old password may have made them.

    Raises:
        ProblemError: 429, too many were wrong: the account is locked for a while.
    """
    user = _known_by(transaction, name, old, now)
    if user is None:
        return False
    user.password_hash = _hasher.hash(new)
    user.revision += 1
    others = (Session.user == name) & (Session.digest != digest_of(session))
    transaction.execute(delete(Session).where(others))
    own = select(Token.id).where(Token.user == name)
    _revoke_all(transaction, list(transaction.scalars(own)), now)
    _note(transaction, user, "password_changed", now)
    return True


def _count_failure(transaction: Transaction, user: User, now: datetime.datetime) -> None:
    user.failed_logins += 1
    if user.failed_logins % FAILED_LOGINS_MAX == 0:
        user.locked_until = now + datetime.timedelta(minutes=LOCK_MINUTES)
        _note(transaction, user, "account_locked", now)


def _note(transaction: Transaction, user: User, action: str, now: datetime.datetime) -> None:
    write_entry(transaction, action, ("user", user.name), actor=user.name, now=now)


def log_out(transaction: Transaction, secret: str) -> None:
    """End a session."""
    transaction.execute(delete(Session).where(Session.digest == digest_of(secret)))


def by_session(transaction: Transaction, secret: str, now: datetime.datetime) -> Principal | None:
    """Return whose session it is; None where it is unknown or over."""
    session = transaction.get(Session, digest_of(secret))
    if session is None or now >= session.expires_at:
        return None
    user = transaction.get(User, session.user)
    if user is None or not user.is_active:
        return None
    return Principal(user.name, ROLES[user.role], csrf_token=session.csrf_token)


def by_token(transaction: Transaction, text: str, now: datetime.datetime) -> Principal | None:
    """Return whose API token it is; None where it is unknown, revoked or over."""
    prefix, _, rest = text.partition("_")
    identifier, _, secret = rest.partition("_")
    token = transaction.get(Token, identifier) if prefix == TOKEN_PREFIX else None
    if token is None or not hmac.compare_digest(token.digest, digest_of(secret)):
        return None
    user = transaction.get(User, token.user)
    if user is None or not user.is_active or token.revoked_at is not None:
        return None
    if now >= token.expires_at:
        return None
    rights = ROLES[user.role] & frozenset(token.scopes)
    return Principal(user.name, rights, token.id, token.expires_at)


def create_token(
    transaction: Transaction,
    owner: Principal,
    *,
    label: str,
    scopes: frozenset[str],
    expires_at: datetime.datetime,
    now: datetime.datetime,
) -> tuple[Token, str]:
    """Make an API token; return it and its text, which is shown this once. One that is made with
    another outlives it in no way: it expires with it, and is revoked with it.

    Raises:
        ProblemError: 403, it would have rights that its owner has not.
    """
    for scope in sorted(scopes):
        owner.require(scope)
    if owner.expires_at is not None:
        expires_at = min(expires_at, owner.expires_at)
    secret = secrets.token_urlsafe(32)
    token = Token(
        parent=owner.token,
        id=secrets.token_hex(8),
        digest=digest_of(secret),
        user=owner.name,
        label=label,
        scopes=sorted(scopes),
        created_at=now,
        expires_at=expires_at,
    )
    transaction.add(token)
    write_entry(
        transaction,
        "token_created",
        ("token", token.id),
        actor=owner.name,
        now=now,
        after={"label": label, "scopes": token.scopes, "expires_at": expires_at.isoformat()},
    )
    return token, f"{TOKEN_PREFIX}_{token.id}_{secret}"


def revoke_token(
    transaction: Transaction, owner: Principal, identifier: str, now: datetime.datetime
) -> None:
    """Revoke a token, and all that were made with it: one's own, an admin anybody's. A token may
    revoke itself, and what was made with it.

    Raises:
        ProblemError: 404.
    """
    token = transaction.get(Token, identifier)
    is_own = token is not None and token.user == owner.name
    if owner.token is not None:
        is_own = is_own and token is not None and owner.token in (token.id, token.parent)
    if token is None or not (is_own or "users:write" in owner.rights):
        raise not_found("token", identifier)
    if token.revoked_at is not None:
        return
    _revoke_all(transaction, [token.id], now)
    write_entry(
        transaction,
        "token_revoked",
        ("token", identifier),
        actor=owner.name,
        now=now,
        before={"label": token.label},
    )


def _revoke_all(transaction: Transaction, identifiers: list[str], now: datetime.datetime) -> None:
    """Revoke tokens, what was made with them, and so on."""
    while identifiers:
        chosen = Token.id.in_(identifiers) & Token.revoked_at.is_(None)
        transaction.execute(update(Token).where(chosen).values(revoked_at=now))
        made = select(Token.id).where(Token.parent.in_(identifiers), Token.revoked_at.is_(None))
        identifiers = list(transaction.scalars(made))


def _is_password(password_hash: str, password: str) -> bool:
    try:
        return _hasher.verify(password_hash, password)
    except VerificationError:
        return False
