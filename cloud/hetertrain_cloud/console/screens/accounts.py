"""Users and tokens: who may use the control plane, as what; and every API token."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from hetertrain_cloud.console import forms, words
from hetertrain_cloud.console.elements import (
    Column,
    DataTable,
    Field,
    Pager,
    Tone,
    button,
    card,
    link,
    tag,
)
from hetertrain_cloud.console.screens.tokens import SECONDS, Tokens
from hetertrain_cloud.console.view import Screen, View, to

PAGE = 50
ROLES = (
    ("viewer", "viewer: sees"),
    ("operator", "operator: sees and changes the fleet and its jobs"),
    ("admin", "admin: all that, and users"),
)
ROLE_TONES: dict[str, Tone] = {"viewer": "quiet", "operator": "busy", "admin": "warning"}
COLUMNS = (
    Column("name", "User"),
    Column("role", "Role", "pill"),
    Column("state", "May log in", "pill"),
    Column("created", "Since", "date"),
)
ACTIONS: tuple[tuple[str, str, Tone], ...] = (
    ("role", "Role", "quiet"),
    ("password", "Password", "quiet"),
    ("activate", "Activate", "quiet"),
    ("deactivate", "Deactivate", "bad"),
)


def user_state(user: Mapping[str, Any], now: datetime) -> tuple[str, Tone]:
    """Return whether a user may log in, and if not, why."""
    if not user["is_active"]:
        return "no: deactivated", "bad"
    until = user["locked_until"]
    if until is not None and datetime.fromisoformat(until) > now:
        return "locked: too many wrong passwords", "warning"
    return "yes", "good"


def row(user: Mapping[str, Any], now: datetime, own: str) -> dict[str, Any]:
    """Lay a user out as a row; nobody shuts out ``own``, who looks."""
    state, tone = user_state(user, now)
    without = ["activate"] if user["is_active"] else ["deactivate"]
    return {
        "key": user["name"],
        "name": user["name"] + (" (you)" if user["name"] == own else ""),
        "role": {"text": user["role"], "tone": ROLE_TONES[user["role"]]},
        "state": {"text": state, "tone": tone},
        "created": user["created_at"],
        "without": [*without, "deactivate"] if user["name"] == own else without,
    }


class Accounts:
    """The screen."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._users: dict[str, dict[str, Any]] = {}

    async def build(self) -> None:
        """Make the screen."""
        view = self._view
        may = view.may("users:write")
        with view.head("Users and tokens"):
            link("Your tokens", to("/account"), "button")
            if may:
                button("New user", self._new_user, "button-primary", "person_add")
        with card("Users", "card-flush"):
            self._table = DataTable(
                "Users", COLUMNS, actions=ACTIONS if may else (), on_act=self._act
            )
            self._pager = Pager(lambda: view.attempt(self._refresh(), ""))
        self._tokens = Tokens(view, "API tokens", may_revoke=may)
        await view.live(self._refresh, SECONDS)
        await view.live(self._tokens.refresh, SECONDS)

    async def _refresh(self) -> None:
        page = await self._view.api.get("/users", limit=PAGE, cursor=self._pager.cursor)
        self._users = {user["name"]: user for user in page["items"]}
        now = datetime.now(UTC)
        self._table.show([row(user, now, self._view.name) for user in page["items"]])
        self._pager.show(
            words.seen(self._pager.number, PAGE, len(page["items"])), page["next_cursor"]
        )

    async def _act(self, action: str, name: str) -> None:
        if name not in self._users:
            return
        if action == "role":
            self._change_role(name)
        elif action == "password":
            self._set_password(name)
        else:
            await self._set_active(name, action == "activate")

    async def _set_active(self, name: str, is_active: bool) -> None:
        text = f"{name} is logged out at once, and all tokens of theirs are revoked."
        if is_active or await self._view.confirm(f"Deactivate {name}?", text, "Deactivate"):
            may = "may log in" if is_active else "may not log in any more"
            revision = self._users[name]["revision"]
            change = self._view.api.send(
                "PATCH", f"/users/{name}", {"is_active": is_active}, if_match=revision
            )
            if await self._view.attempt(change, f"{name} {may}."):
                await self._refresh()
                await self._tokens.refresh()

    def _change_role(self, name: str) -> None:
        user = self._users[name]
        form = forms.Dialog(self._view, f"Role of {name}", "Change the role")
        with form.fields:
            role = Field("Role", user["role"], kind="select", options=list(ROLES))

        async def send() -> None:
            if await self._patch(name, {"role": role.value}, {"role": role}):
                form.close()
                self._view.say(f"{name} is {role.value} now.")

        form.open(send)

    def _set_password(self, name: str) -> None:
        form = forms.Dialog(self._view, f"Password of {name}", "Set the password")
        whom = "You are" if name == self._view.name else f"{name} is"
        with form.fields:
            tag("p", f"{whom} logged out everywhere, and all API tokens are revoked.", "form-wide")
            password = forms.password_field()

        async def send() -> None:
            body = {"password": password.value}
            if await self._patch(name, body, {"password": password}):
                form.close()
                self._view.say(f"{name} has a new password.")

        form.open(send)

    async def _patch(self, name: str, body: dict[str, Any], fields: dict[str, Field]) -> bool:
        revision = self._users[name]["revision"]
        about = {"last_admin": "role"}
        order = ("PATCH", f"/users/{name}")
        answer = await forms.send(self._view, fields, order, body, if_match=revision, about=about)
        if answer is None:
            return False
        await self._refresh()
        await self._tokens.refresh()
        return True

    def _new_user(self) -> None:
        form = forms.Dialog(self._view, "New user", "Add the user")
        with form.fields:
            fields = {
                "name": Field("Name", example="anna", required=True),
                "password": forms.password_field(),
                "role": Field("Role", "viewer", kind="select", options=list(ROLES)),
            }

        async def send() -> None:
            body = {name: field.value for name, field in fields.items()}
            about = {"user_exists": "name"}
            answer = await forms.send(self._view, fields, ("POST", "/users"), body, about=about)
            if answer is not None:
                form.close()
                self._view.say(f"{answer['name']} may log in now.")
                await self._refresh()

        form.open(send)


async def build(view: View) -> None:
    """Make the screen."""
    await Accounts(view).build()


SCREEN = Screen("/accounts", "Users and tokens", build, "users:read", "Manage", "manage_accounts")
