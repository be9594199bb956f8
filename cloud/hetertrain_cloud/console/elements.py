"""The parts that screens are made of. Text always arrives as text, whatever people named things.

What the browser writes itself (times in its zone, numbers and sizes in its language) is sent as
values; ``static`` holds the browser's side of each part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import nicegui
from nicegui.element import Element
from nicegui.elements.dark_mode import DarkMode
from nicegui.elements.mixins.text_element import TextElement
from nicegui.events import GenericEventArguments

Tone = Literal["good", "busy", "warning", "bad", "quiet"]
Handler = Callable[..., Any]
_PICTURES: dict[Tone, str] = {
    "good": "check_circle",
    "busy": "schedule",
    "warning": "warning",
    "bad": "error",
    "quiet": "info",
}
_LONG_DOTTED = re.compile(r"(?=\S{24})\S*\w\.[^\W\d_]")
"""A name that may be too long for its place, and can be broken behind a dot."""
_CHARTS = Path(nicegui.__file__).parent / "elements" / "echart" / "dist"


def tag(name: str, text: str = "", classes: str = "", **attributes: object) -> Element:
    """Return an HTML element, with text where given; ``aria_label`` and such become attributes."""
    if _LONG_DOTTED.search(text):
        with Element(name) as element:
            Prose(text)
    else:
        element = TextElement(tag=name, text=text) if text else Element(name)
    if classes:
        element.classes(classes)
    for attribute, value in attributes.items():
        element._props[attribute.rstrip("_").replace("_", "-")] = value
    return element


def icon(name: str) -> Element:
    """Return a picture that says nothing the text beside it does not."""
    return tag("i", name, "material-icons", aria_hidden="true")


def link(text: str, href: str, classes: str = "") -> Element:
    """Return a link within the console."""
    return tag("a", text, classes, href=href)


def button(text: str, handler: Handler, classes: str = "", picture: str = "") -> Element:
    """Return a button: of a form, of a bar of actions."""
    with tag("button", "", f"button {classes}", type="button").on("click", handler) as made:
        if picture:
            icon(picture)
        tag("span", text)
    return made


def pill(text: str, tone: Tone = "quiet") -> Element:
    """Return a state in a word."""
    return tag("span", text, f"pill pill-{tone}")


def moment(at: str | None, form: Literal["ago", "date"] = "ago") -> Element:
    """Return a time in the viewer's zone; ``at`` is ISO 8601."""
    made = Moment()
    made._props.update(at=at, form=form)
    return made


def card(title: str = "", classes: str = "") -> Element:
    """Return a card, to be filled."""
    made = tag("section", "", f"card {classes}")
    if title:
        with made:
            tag("h2", title, "card-title")
    return made


def facts(rows: Sequence[tuple[str, str | Callable[[], object]]]) -> Element:
    """Return names and values; a value that is no text makes itself."""
    with tag("dl", "", "facts") as made:
        for name, value in rows:
            tag("dt", name)
            if callable(value):
                with tag("dd"):
                    value()
            else:
                tag("dd", value or "–")
    return made


def stat(name: str, value: str, note: str = "", tone: str = "") -> Element:
    """Return one figure that matters, with what it is."""
    with tag("div", "", f"stat {tone}") as made:
        tag("div", name, "stat-name")
        tag("div", value, "stat-value")
        if note:
            tag("div", note, "stat-note")
    return made


def callout(title: str, text: str = "", tone: Tone = "quiet", picture: str = "") -> Element:
    """Return something that is to be noticed; more can be put into it."""
    with tag("div", "", f"callout callout-{tone}"):
        icon(picture or _PICTURES[tone])
        with tag("div", "", "callout-text") as made:
            tag("strong", title)
            if text:
                tag("p", text)
    return made


def empty(title: str, advice: str, href: str = "", action: str = "") -> Element:
    """Return what stands where nothing is yet: why, and what to do next."""
    with tag("div", "", "empty") as made:
        tag("strong", title)  # No heading: it may stand in a card, or right below the page's.
        tag("p", advice)
        if href:
            link(action, href, "button button-primary")
    return made


def shares(parts: Sequence[tuple[str, int, Tone]], label: str) -> Element:
    """Return a bar that is divided by counts, with a legend."""
    total = sum(count for _, count, _ in parts) or 1
    with tag("div", "", "shares") as made:
        text = ", ".join(f"{count} {name}" for name, count, _ in parts if count)
        with tag("div", "", "shares-bar", role="img", aria_label=f"{label}: {text or 'none'}"):
            for _, count, tone in parts:
                if count:
                    tag("span", "", f"shares-part tone-{tone}").style(
                        f"width: {100 * count / total:.3f}%"
                    )
        with tag("ul", "", "legend"):
            for name, count, tone in parts:
                if count:
                    with tag("li"):
                        tag("span", "", f"dot tone-{tone}")
                        tag("strong", f"{count:,}")
                        tag("span", name)
    return made


class Prose(Element, component="static/prose.js"):
    """Text with long names, which may be broken behind their dots."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._props["text"] = text


class Moment(Element, component="static/moment.js"):
    """A time that says how long ago it is."""


class Copy(Element, component="static/copy.js"):
    """Text to be taken elsewhere, with a button that copies it."""

    def __init__(self, label: str, text: str) -> None:
        super().__init__()
        self._props.update(label=label, text=text)


class ThemeSwitch(Element, component="static/theme_switch.js"):
    """Turns dark colours on and off."""

    def __init__(self, mode: DarkMode) -> None:
        super().__init__()
        self._mode = mode
        self._props["dark"] = bool(mode.value)
        self.on("turn", self._turn)

    def _turn(self, event: GenericEventArguments) -> None:
        self._mode.value = self._props["dark"] = bool(event.args)
        self.update()


class Address(Element, component="static/address.js"):
    """Keeps the page's address in step with what it shows."""

    def show(self, query: str) -> None:
        """Write what stands after the question mark."""
        if self._props.get("query") != query:
            self._props["query"] = query
            self.update()


class Field(Element, component="static/field.js"):
    """A form's field; ``value`` is what stands in it by now."""

    def __init__(
        self,
        label: str,
        value: str | float | bool = "",
        *,
        kind: str = "text",
        example: str = "",
        on_value: Handler | None = None,
        **props: Any,
    ) -> None:
        """``kind`` is a type of HTML's input (of a ``datetime-local``, the value is ISO 8601 in
        UTC, and the viewer's zone is what is seen), ``select`` (with ``options``) or ``textarea``;
        ``example`` is shown as one where nothing stands in it.

        ``props``: hint, error, placeholder, required, options (value, text), rows, least, most,
        inputmode.
        """
        super().__init__()
        self.value: Any = value
        self._on_value = on_value
        self._props.update(label=label, kind=kind, value=value, **props)
        if example:
            self._props["placeholder"] = f"for example {example}"
        self.on("value", self._take, throttle=0.15, leading_events=False)
        # Who types and clicks at once is not to lose the last letters.
        self.on("settle", self._take)

    def _take(self, event: GenericEventArguments) -> Any:
        if event.args == self.value:
            return None
        self.value = event.args
        return self._on_value(event.args) if self._on_value else None

    def set(self, value: Any) -> None:
        """Write another value into it."""
        self.value = value
        self._props["value"] = value
        self.update()

    def suggest(self, placeholder: str) -> None:
        """Show another text where nothing stands in it."""
        if self._props.get("placeholder", "") != placeholder:
            self._props.update(placeholder=placeholder, value=self.value)
            self.update()

    def offer(self, options: Sequence[tuple[str, str]]) -> None:
        """Offer other options (value, text), where they are others."""
        if self._props.get("options") != options:
            self._props.update(options=options, value=self.value)
            self.update()

    @property
    def is_faulty(self) -> bool:
        """Whether something is said to be wrong with it."""
        return bool(self._props.get("error"))

    def complain(self, error: str) -> None:
        """Say what is wrong with it; empty: nothing is."""
        if self._props.get("error", "") != error:
            self._props.update(error=error, value=self.value)
            self.update()

    def focus(self) -> None:
        """Bring it into view, and the keyboard to it."""
        self._props.update(focused=self._props.get("focused", 0) + 1, value=self.value)
        self.update()


class Modal(Element, component="static/modal.js"):
    """A dialog; ``open`` and ``close`` it."""

    def __init__(self, label: str, *, is_wide: bool = False, is_once: bool = False) -> None:
        """``is_once``: when it is closed, it is gone, and what stood in it."""
        super().__init__()
        self._is_once = is_once
        self._props.update(open=False, label=label, wide=is_wide)
        self.on("dismiss", self.close)

    def open(self) -> None:
        """Show it."""
        self._props["open"] = True
        self.update()

    def close(self) -> None:
        """Hide it."""
        if self._is_once:
            self.delete()
            return
        self._props["open"] = False
        self.update()


class Chart(Element, component="static/chart.js", esm={"nicegui-echart": str(_CHARTS)}):
    """A chart; colours in its options are names of the style sheet, as ``var(--accent)``."""

    def __init__(
        self, label: str, options: dict[str, Any], unit: str = "", *, along: str = ""
    ) -> None:
        """``unit`` is of the values, ``along`` of what they are drawn over: bytes, seconds or, if
        empty, a mere number.
        """
        super().__init__()
        self._props.update(label=label, options=options, unit=unit, along=along)

    def draw(self, options: dict[str, Any], *, along: str | None = None) -> None:
        """Draw other options, where they are others."""
        if along is None:
            along = self._props["along"]
        if (options, along) != (self._props["options"], self._props["along"]):
            self._props.update(options=options, along=along)
            self.update()


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; its kind says how the browser writes a value.

    text, number, bytes, seconds, time (how long ago), date, code, link (text, href, note),
    pill (text, tone, note), labels (a mapping), list (of texts), bar (share, text).
    """

    name: str
    label: str
    kind: str = "text"
    sort: bool = False


Row = Mapping[str, Any]
"""A row has a ``key``, a value for each column's name, and perhaps ``without``: the actions that
it has not."""


class DataTable(Element, component="static/data_table.js"):
    """A table of rows, which may be chosen, sorted and acted on."""

    def __init__(
        self,
        caption: str,
        columns: Sequence[Column],
        *,
        on_choose: Handler | None = None,
        on_sort: Handler | None = None,
        actions: Sequence[tuple[str, str, Tone]] = (),
        on_act: Handler | None = None,
    ) -> None:
        """``actions`` are (name, label, tone) of buttons of each row; ``on_act`` is called with an
        action's name and a row's key, ``on_choose`` with keys, ``on_sort`` with a column's name.
        """
        super().__init__()
        self.chosen: list[str] = []
        self._on_choose = on_choose
        self._props.update(
            caption=caption,
            columns=[
                {"name": c.name, "label": c.label, "kind": c.kind, "sort": c.sort} for c in columns
            ],
            rows=[],
            chosen=[],
            selectable=on_choose is not None,
            actions=[{"name": n, "label": text, "tone": tone} for n, text, tone in actions],
        )
        self.on("choose", self._choose)
        if on_sort is not None:
            self.on("sort", lambda event: on_sort(event.args))
        if on_act is not None:
            self.on("act", lambda event: on_act(event.args["action"], event.args["key"]))

    def _choose(self, event: GenericEventArguments) -> Any:
        self.choose([str(key) for key in event.args])
        return self._on_choose(self.chosen) if self._on_choose else None

    def choose(self, keys: list[str]) -> None:
        """Choose these rows."""
        self.chosen = keys
        self._props["chosen"] = keys
        self.update()

    def show(self, rows: Sequence[Row], sorted_by: tuple[str, bool] | None = None) -> None:
        """Show these rows, where they are others; ``sorted_by``: a column, and whether down."""
        order = None if sorted_by is None else {"name": sorted_by[0], "down": sorted_by[1]}
        shown = [dict(row) for row in rows]
        if (shown, order) != (self._props["rows"], self._props.get("sorted")):
            self._props.update(rows=shown, sorted=order)
            self.update()


class Pager(Element):
    """The way through a list whose pages follow each other by cursors."""

    def __init__(self, on_turn: Handler) -> None:
        """``on_turn`` is called when another page is to be shown."""
        super().__init__("div")
        self.classes("pager")
        self._on_turn = on_turn
        self._starts = [""]
        self._next: str | None = None
        with self:
            self._said = Region(lambda text: tag("span", text), name="span")
            with tag("div", "", "actions"):
                self._before = button("Before", self._turn_back, "button-small", "chevron_left")
                self._after = button("Next", self._turn_on, "button-small", "chevron_right")
        self.show("", None)

    @property
    def cursor(self) -> str:
        """Where the page begins that is seen."""
        return self._starts[-1]

    @property
    def number(self) -> int:
        """Which page it is; 0 is the first."""
        return len(self._starts) - 1

    def restart(self) -> Any:
        """Go to the first page."""
        self._starts = [""]
        return self._on_turn()

    def show(self, text: str, next_cursor: str | None) -> None:
        """Say what the page shows, and where the next begins."""
        self._next = next_cursor
        self._said.show(text)
        self._allow(self._before, is_allowed=self.number > 0)
        self._allow(self._after, is_allowed=next_cursor is not None)
        self.set_visibility(self.number > 0 or next_cursor is not None)

    @staticmethod
    def _allow(turn: Element, *, is_allowed: bool) -> None:
        if turn._props.get("disabled") is not (not is_allowed):
            turn._props["disabled"] = not is_allowed
            turn.update()

    def _turn_back(self) -> Any:
        if self.number:
            self._starts.pop()
        return self._on_turn()

    def _turn_on(self) -> Any:
        if self._next is not None:
            self._starts.append(self._next)
        return self._on_turn()


class Region(Element):
    """A part of a screen that is made anew when what it shows has changed."""

    def __init__(
        self, build: Callable[[Any], object], classes: str = "", name: str = "div"
    ) -> None:
        """``build`` makes the content for a value."""
        super().__init__(name)
        self._build = build
        self._shown: Any = Region
        if classes:
            self.classes(classes)

    def show(self, value: Any) -> None:
        """Show a value."""
        if value == self._shown:
            return
        self._shown = value
        self.clear()
        with self:
            self._build(value)
