"""Audit: every change, by whom, from what to what; and whether the trail is whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlencode

from hetertrain_cloud.console import words
from hetertrain_cloud.console.client import ProblemAnswer
from hetertrain_cloud.console.elements import (
    Address,
    Column,
    Copy,
    DataTable,
    Field,
    Modal,
    Pager,
    Region,
    button,
    callout,
    card,
    empty,
    facts,
    moment,
    tag,
)
from hetertrain_cloud.console.view import Screen, View, to

PAGE = 50
SECONDS = 5.0
KINDS = ("node", "claim", "job", "user", "token")
FILTERS = ("kind", "object", "actor", "since", "until")
PLACES = {"node": "/nodes/", "job": "/jobs/"}
COLUMNS = (
    Column("what", "What"),
    Column("object", "Of", "link"),
    Column("actor", "By"),
    Column("at", "When", "date"),
    Column("number", "Number", "number"),
)
ABSENT = "–"
Change = tuple[str, str, str]
"""A field's name, and its value before and after; absent: a dash."""


def row(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Lay an entry out as a row."""
    name, kind = entry["object"], entry["kind"]
    href = to(PLACES[kind] + name) if kind in PLACES else ""
    return {
        "key": str(entry["number"]),
        "number": entry["number"],
        "what": words.plain(entry["action"]),
        "object": {"text": name, "href": href},
        "actor": entry["actor"],
        "at": entry["at"],
    }


def difference(
    before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> tuple[list[Change], int]:
    """Return the fields that differ, and how many are as they were.

    What was not there before, or is no more, differs in all that it has.
    """
    old, new = dict(_fields(before or {})), dict(_fields(after or {}))
    names = list(dict.fromkeys([*old, *new]))
    changes = [
        (name, old.get(name, ABSENT), new.get(name, ABSENT))
        for name in names
        if old.get(name) != new.get(name)
    ]
    return changes, len(names) - len(changes)


def _fields(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    for name, each in value.items():
        if isinstance(each, Mapping) and each:
            yield from _fields(each, f"{path}{name}.")
        else:
            yield f"{path}{name}", each if isinstance(each, str) else json.dumps(each)


def changes_table(entry: Mapping[str, Any]) -> None:
    """Show what an entry changed."""
    changes, num_equal = difference(entry["before"], entry["after"])
    if not changes:
        tag("p", "Nothing of the thing itself was changed.", "muted")
    else:
        table = DataTable(
            "What was changed",
            (
                Column("name", "Field"),
                Column("before", "Before", "code"),
                Column("after", "After", "code"),
            ),
        )
        table.classes("changes")
        table.show(
            [{"key": name, "name": name, "before": old, "after": new} for name, old, new in changes]
        )
    if num_equal:
        tag("p", f"{words.many(num_equal, 'other field')} as before.", "hint")


def verified(found: Mapping[str, Any]) -> None:
    """Show whether the trail is whole."""
    if not found:
        return
    if found["broken_at"] is not None:
        callout(
            f"Entry {found['broken_at']:,} was altered or removed.",
            f"The {words.many(found['entries'], 'entry', 'entries')} before it are as they were "
            "written. Somebody has written to the database past the control plane: compare it with "
            "a backup.",
            "bad",
        )
        return
    with callout(
        f"The trail is whole: {words.many(found['entries'], 'entry', 'entries')}.",
        "To notice even a trail that is exchanged altogether, note the newest digest down "
        "elsewhere.",
        "good",
    ):
        Copy("Digest of the newest entry", found["head"])


class Audit:
    """The screen."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._asked = {name: view.query.get(name, "") for name in FILTERS}
        self._entries: dict[str, dict[str, Any]] = {}

    async def build(self) -> None:
        """Make the screen."""
        view = self._view
        self._address = Address()
        with view.head("Audit"):
            button("Verify the trail", self._verify, picture="verified_user")
        self._verified = Region(verified)
        with card(), tag("div", "", "form filters", role="search", aria_label="Filter the trail"):
            Field(
                "Kind of thing",
                self._asked["kind"],
                kind="select",
                options=[("", "any"), *((kind, kind) for kind in KINDS)],
                on_value=lambda value: self._ask("kind", value),
            )
            Field(
                "Name of the thing",
                self._asked["object"],
                kind="search",
                placeholder="whole name",
                on_value=lambda value: self._ask("object", value),
            )
            Field(
                "By whom",
                self._asked["actor"],
                kind="search",
                placeholder="whole name",
                on_value=lambda value: self._ask("actor", value),
            )
            for name, label in (("since", "From"), ("until", "Until")):
                Field(
                    label,
                    self._asked[name],
                    kind="datetime-local",
                    on_value=lambda value, name=name: self._ask(name, value),
                )
        with card("", "card-flush"):
            self._table = DataTable(
                "Changes, newest first",
                COLUMNS,
                actions=(("show", "Show", "quiet"),),
                on_act=lambda _, key: self._show(key),
            )
            self._none = Region(self._nothing)
            self._pager = Pager(lambda: view.attempt(self._read(), ""))
        await view.live(self._refresh, SECONDS)

    async def _refresh(self) -> None:
        # Who looks at older ones does not want them to move.
        if not self._pager.number:
            await self._read()

    async def _read(self) -> None:
        page = await self._view.api.get(
            "/audit", limit=PAGE, cursor=self._pager.cursor, **self._asked
        )
        self._entries = {str(entry["number"]): entry for entry in page["items"]}
        self._table.show([row(entry) for entry in page["items"]])
        self._none.show(bool(page["items"]))
        self._pager.show(
            words.seen(self._pager.number, PAGE, len(page["items"])), page["next_cursor"]
        )
        self._address.show(urlencode({name: v for name, v in self._asked.items() if v}))

    async def _ask(self, name: str, value: str) -> None:
        self._asked[name] = value.strip()
        await self._pager.restart()

    def _nothing(self, is_some: bool) -> None:
        if not is_some:
            empty("No change matches", "Loosen a filter, or show all.", to("/audit"), "Show all")

    def _show(self, key: str) -> None:
        entry = self._entries.get(key)
        if entry is None:
            return
        with self._view.dialogs(), Modal("A change", is_wide=True, is_once=True) as modal:
            tag("h2", f"{words.plain(entry['action']).capitalize()}: {entry['object']}")
            facts(
                [
                    ("By", entry["actor"]),
                    ("When", lambda: moment(entry["at"], "date")),
                    ("Entry", f"{entry['number']:,}"),
                    ("Digest", lambda: tag("code", entry["digest"])),
                ]
            )
            changes_table(entry)
            with tag("div", "", "actions"):
                button("Close", modal.close, "button-primary")
        modal.open()

    async def _verify(self) -> None:
        try:
            self._verified.show(await self._view.api.get("/audit/verification"))
        except ProblemAnswer as problem:
            self._view.say(problem.detail, is_bad=True)


async def build(view: View) -> None:
    """Make the screen."""
    await Audit(view).build()


SCREEN = Screen("/audit", "Audit", build, "audit:read", "Manage", "history")
