"""One's own account: what one may do, and the API tokens that do a part of it."""

from __future__ import annotations

from collections.abc import Sequence

from hetertrain_cloud.console.elements import button, card, tag
from hetertrain_cloud.console.screens.tokens import SECONDS, TokenForm, Tokens
from hetertrain_cloud.console.view import Screen, View

THINGS = {
    "nodes": "nodes",
    "claims": "claims",
    "jobs": "jobs",
    "versions": "versions of the model",
    "metrics": "figures for monitoring",
    "audit": "the audit trail",
    "users": "users and tokens",
    "settings": "settings",
}


def by_thing(rights: Sequence[str]) -> list[tuple[str, str]]:
    """Return what one may do, thing by thing: ``("nodes", "see and change")``."""
    found: dict[str, set[str]] = {}
    for right in rights:
        thing, _, kind = right.partition(":")
        found.setdefault(thing, set()).add(kind)
    order = [*THINGS, *sorted(found.keys() - THINGS.keys())]
    return [
        (THINGS.get(thing, thing), "see and change" if "write" in found[thing] else "see")
        for thing in order
        if thing in found
    ]


def rights_list(rights: Sequence[str]) -> None:
    """Show what one may do."""
    with tag("dl", "", "facts"):
        for thing, may in by_thing(rights):
            tag("dt", thing.capitalize())
            tag("dd", may)


async def build(view: View) -> None:
    """Make the screen."""
    me = await view.api.get("/me")
    actions = view.head(view.name)
    with card("What you may do"):
        rights_list(me["rights"])
        tag("p", "An admin can give you another role.", "hint")
    tokens = Tokens(view, "Your API tokens", view.name, may_revoke=True)
    with actions:
        form = TokenForm(view, me["rights"], tokens.refresh)
        button("New API token", form.open, "button-primary", "add")
    await view.live(tokens.refresh, SECONDS)


SCREEN = Screen("/account", "Account", build)
