"""Forms that are sent to the API: what it finds wrong is said at the field that it is about."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from hetertrain_cloud.console import words
from hetertrain_cloud.console.client import ProblemAnswer
from hetertrain_cloud.console.elements import Field, Modal, button, tag
from hetertrain_cloud.console.view import View


class Dialog:
    """A dialog with fields."""

    def __init__(self, view: View, title: str, action: str) -> None:
        self._action = action
        with view.dialogs(), Modal(title, is_once=True) as self._modal:
            tag("h2", title)
            self.fields = tag("div", "", "stack")
        self.close = self._modal.close

    def open(self, send: Callable[[], Awaitable[None]]) -> None:
        """Show it, with the button that sends what stands in the fields."""
        with self._modal, tag("div", "", "actions"):
            button("Cancel", self.close)
            button(self._action, send, "button-primary")
        self._modal.open()


def password_field(label: str = "Password") -> Field:
    """Make the field of a password that is chosen now."""
    return Field(
        label,
        kind="password",
        hint="12 characters or more.",
        autocomplete="new-password",
        required=True,
    )


def complain(
    view: View,
    fields: Mapping[str, Field],
    problem: ProblemAnswer,
    about: Mapping[str, str] | None = None,
) -> None:
    """Say why the API refused: at the fields, which are named as in the request's body.

    ``about`` names the field that a refusal's code is about, where it is about one.
    """
    found: dict[str, str] = {}
    rest = []
    for where, message in problem.errors:
        name = where.removeprefix("body.").partition(".")[0]
        if name in fields:
            found.setdefault(name, words.sentence(words.refusal(message)))
        else:
            rest.append(f"{where}: {message}")
    name = (about or {}).get(problem.code, "")
    if name in fields:
        found[name] = words.sentence(problem.detail)
    elif not problem.errors:
        rest.append(problem.detail)
    for name, field in fields.items():
        field.complain(found.get(name, ""))
    focus_faulty(fields.values())
    if rest:
        view.say("; ".join(rest), is_bad=True)


def focus_faulty(fields: Iterable[Field]) -> None:
    """Bring the first field into view that something is wrong with."""
    faulty = next((field for field in fields if field.is_faulty), None)
    if faulty is not None:
        faulty.focus()


async def send(
    view: View,
    fields: Mapping[str, Field],
    order: tuple[str, str],
    body: object,
    *,
    if_match: int | None = None,
    about: Mapping[str, str] | None = None,
) -> Any:
    """Send what a form asks for (method and path); None: it was refused, and that is said."""
    try:
        answer = await view.api.send(*order, body, if_match=if_match)
    except ProblemAnswer as problem:
        complain(view, fields, problem, about)
        return None
    return answer if answer is not None else True


def number(field: Field) -> int | None:
    """Return the whole number in a field; None: there is none, and that is said."""
    try:
        found = int(str(field.value))
    except ValueError:
        field.complain("Write a whole number.")
        return None
    field.complain("")
    return found
