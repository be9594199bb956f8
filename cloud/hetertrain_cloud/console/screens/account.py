"""One's own account: what one may do, and the API tokens that do a part of it."""

from __future__ import annotations

from collections.abc import Sequence

from hetertrain_cloud.console import forms
from hetertrain_cloud.console.elements import Field, button, card, tag
from hetertrain_cloud.console.screens.tokens import SECONDS, TokenForm, Tokens
from hetertrain_cloud.console.view import Screen, View

THINGS = {
    "nodes": "nodes",
    "claims": "claims",
    "jobs": "jobs",
    "versions": "versions of the model",
    "metrics": "figures for monitoring",
    "logs": "logs of nodes",
    "audit": "the audit trail",
    "users": "users and tokens",
    "settings": "settings",
}


def divided(rights: Sequence[str]) -> dict[str, list[str]]:
    """Return the things that one may see and change, and those that one may see only."""
    order = list(THINGS)
    things = sorted(
        {right.partition(":")[0] for right in rights},
        key=lambda thing: order.index(thing) if thing in order else len(order),
    )
    changed = [thing for thing in things if f"{thing}:write" in rights]
    seen = [thing for thing in things if thing not in changed]
    return {
        "See and change": [THINGS.get(thing, thing) for thing in changed],
        "See": [THINGS.get(thing, thing) for thing in seen],
    }


def rights_list(rights: Sequence[str]) -> None:
    """Show what one may do."""
    with tag("dl", "", "facts"):
        for may, things in divided(rights).items():
            if things:
                tag("dt", may)
                with tag("dd"):
                    for thing in things:
                        tag("span", thing, "label")


def change_password(view: View) -> None:
    """Ask for the present password and another one."""
    form = forms.Dialog(view, "Your password", "Change the password")
    with form.fields:
        tag("p", "Your other sessions end, and all your API tokens are revoked.", "form-wide")
        fields = {
            "old": Field(
                "Present password",
                kind="password",
                autocomplete="current-password",
                required=True,
            ),
            "new": forms.password_field("New password"),
        }

    async def send() -> None:
        body = {name: field.value for name, field in fields.items()}
        about = {"password_wrong": "old", "account_locked": "old"}
        answer = await forms.send(view, fields, ("PUT", "/me/password"), body, about=about)
        if answer is not None:
            form.close()
            view.say("You have a new password.")

    form.open(send)


async def build(view: View) -> None:
    """Make the screen."""
    me = await view.api.get("/me")
    actions = view.head("Your account")
    with card(f"What {view.name} may do"):
        rights_list(me["rights"])
        tag("p", "An admin can give you another role.", "hint")
    tokens = Tokens(view, "Your API tokens", view.name, may_revoke=True)
    with actions:
        button("Change password", lambda: change_password(view))
        form = TokenForm(view, me["rights"], tokens.refresh)
        button("New API token", form.open, "button-primary", "add")
    await view.live(tokens.refresh, SECONDS)


SCREEN = Screen("/account", "Account", build)
