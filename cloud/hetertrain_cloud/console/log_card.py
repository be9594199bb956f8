"""The end of a node's log, on demand."""

from __future__ import annotations

from typing import Any

from hetertrain_cloud.console import words
from hetertrain_cloud.console.client import ProblemAnswer
from hetertrain_cloud.console.elements import Region, button, callout, card, moment, tag
from hetertrain_cloud.console.view import View


class LogCard:
    """A card with a button that asks the node for its last lines, and what it answered."""

    def __init__(self, view: View, node: str) -> None:
        self._view = view
        self._node = node
        with card("Log"):
            self._shown = Region(log_lines, "stack")
            self._shown.show(None)
            with tag("div", "", "actions"):
                button("Show the last lines", self._ask, "button-small", "subject")

    async def _ask(self) -> None:
        self._shown.show("asks the node")
        try:
            found = await self._view.api.get(f"/nodes/{self._node}/log")
        except ProblemAnswer as problem:
            self._shown.show(problem)
        else:
            self._shown.show(found)


def log_lines(found: dict[str, Any] | ProblemAnswer | str | None) -> None:
    """Show what the node answered, why it did not, or what happens meanwhile."""
    match found:
        case None:
            text = "The node is asked for the last lines of its log. That you asked is on record."
            tag("p", text, "muted")
        case ProblemAnswer():
            callout("There is no log to show", words.sentence(found.detail), "warning")
        case str():
            tag("p", words.sentence(found), "muted", role="status")
        case _:
            lines = found["lines"]
            with tag("p", "", "muted", role="status"):
                tag("span", f"{words.many(len(lines), 'line')}, as the node said ")
                moment(found["at"])
            # Whoever has no mouse scrolls in it by keys.
            place = {"role": "region", "aria_label": "Last lines", "tabindex": "0"}
            with tag("div", "", "log-lines", **place):
                tag("pre", "\n".join(lines) or "nothing logged yet")
