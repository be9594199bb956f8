"""API tokens: how they are listed, made and revoked; for the screens of one's own and of all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from hetertrain_cloud.console import forms, words
from hetertrain_cloud.console.elements import (
    Column,
    Copy,
    DataTable,
    Field,
    Modal,
    Pager,
    Region,
    Tone,
    button,
    callout,
    card,
    empty,
    tag,
)
from hetertrain_cloud.console.view import View

PAGE = 50
SECONDS = 10.0
DURATIONS = (
    ("1", "1 day"),
    ("7", "7 days"),
    ("30", "30 days"),
    ("90", "90 days"),
    ("365", "1 year"),
)
COLUMNS = (
    Column("label", "What for"),
    Column("user", "User"),
    Column("scopes", "May", "list"),
    Column("created", "Made", "date"),
    Column("expires", "Expires", "date"),
    Column("state", "State", "pill"),
)


def token_state(token: Mapping[str, Any], now: datetime) -> tuple[str, Tone]:
    """Return whether a token can be used, and if not, why."""
    if token["revoked_at"] is not None:
        return "revoked", "bad"
    if datetime.fromisoformat(token["expires_at"]) <= now:
        return "expired", "quiet"
    return "valid", "good"


def row(token: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """Lay a token out as a row."""
    state, tone = token_state(token, now)
    return {
        "key": token["id"],
        "label": token["label"],
        "user": token["user"],
        "scopes": token["scopes"],
        "created": token["created_at"],
        "expires": token["expires_at"],
        "state": {"text": state, "tone": tone},
        "without": [] if state == "valid" else ["revoke"],
    }


class Tokens:
    """A card with tokens: of one user, or of all."""

    def __init__(self, view: View, title: str, user: str = "", *, may_revoke: bool) -> None:
        self._view = view
        self._user = user
        with card(title, "card-flush"):
            self._table = DataTable(
                title,
                [column for column in COLUMNS if column.name != "user" or not user],
                actions=(("revoke", "Revoke", "bad"),) if may_revoke else (),
                on_act=self._revoke,
            )
            self._none = Region(self._nothing)
            self._pager = Pager(lambda: view.attempt(self.refresh(), ""))

    async def refresh(self) -> None:
        """Read them anew."""
        page = await self._view.api.get(
            "/tokens", limit=PAGE, user=self._user, cursor=self._pager.cursor
        )
        now = datetime.now(UTC)
        self._table.show([row(token, now) for token in page["items"]])
        self._table.set_visibility(bool(page["items"]))
        self._none.show(bool(page["items"]))
        self._pager.show(
            words.seen(self._pager.number, PAGE, len(page["items"])), page["next_cursor"]
        )

    def _nothing(self, is_some: bool) -> None:
        if not is_some:
            empty(
                "No token yet",
                "A program that calls the API needs one: it may do a part of what its user may, "
                "for a time.",
            )

    async def _revoke(self, _action: str, token: str) -> None:
        text = "What uses it stops working at once; tokens that were made with it go with it."
        if await self._view.confirm("Revoke this token?", text, "Revoke"):
            order = self._view.api.send("DELETE", f"/tokens/{token}")
            if await self._view.attempt(order, "The token is revoked."):
                await self.refresh()


class TokenForm:
    """The dialog that makes a token of one's own; the secret is gone when it is closed."""

    def __init__(self, view: View, rights: list[str], made: Callable[[], Awaitable[None]]) -> None:
        """``made`` is called when there is one token more."""
        self._view = view
        self._rights = rights
        self._made = made
        self._fields: dict[str, Field] = {}
        self._scopes: dict[str, Field] = {}

    def open(self) -> None:
        """Ask what the token is for."""
        with (
            self._view.dialogs(),
            Modal("New API token", is_wide=True, is_once=True) as self._modal,
        ):
            self._ask()
        self._modal.open()

    def _ask(self) -> None:
        tag("h2", "New API token")
        with tag("div", "", "form"):
            self._fields = {
                "label": Field("What is it for?", example="nightly report", required=True),
                "days": Field("Valid for", "90", kind="select", options=list(DURATIONS)),
            }
        with tag("fieldset", "", "choices"):
            tag("legend", "What it may do")
            self._scopes = {right: Field(right, False, kind="checkbox") for right in self._rights}
        self._error = Region(lambda text: tag("p", text, "error", role="alert") if text else None)
        with tag("div", "", "actions"):
            button("Cancel", self._modal.close)
            button("Make the token", self._send, "button-primary")

    async def _send(self) -> None:
        scopes = [right for right, field in self._scopes.items() if field.value]
        self._error.show("" if scopes else "Choose at least one.")
        if not scopes:
            return
        body = {
            "label": str(self._fields["label"].value).strip(),
            "scopes": scopes,
            "days": int(self._fields["days"].value),
        }
        answer = await forms.send(self._view, self._fields, ("POST", "/tokens"), body)
        if answer is not None:
            self._modal.clear()
            with self._modal:
                tag("h2", "The token is made")
                callout(
                    "This is shown once.", "Keep it where only its program reads it.", "warning"
                )
                Copy("Token", answer["secret"])
                Copy(
                    "To try it",
                    f'curl -H "Authorization: Bearer $TOKEN" {self._view.origin}/api/v1/me',
                )
                with tag("div", "", "actions"):
                    button("Done", self._modal.close, "button-primary")
            await self._made()
