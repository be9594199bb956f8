"""What a screen is, and the frame around each: the way to the others, and whether it is live.

A screen's builder gets a ``View``: the API in the viewer's name, what stands in the address, and
ways to keep a screen up to date, to change something and to say how that went.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import Request
from nicegui import ui
from nicegui.element import Element

from hetertrain_cloud.console.client import ApiClient, ProblemAnswer
from hetertrain_cloud.console.elements import (
    Field,
    Modal,
    Region,
    ThemeSwitch,
    button,
    icon,
    link,
    tag,
)
from hetertrain_cloud.console.gate import LOGIN, MOUNT

LIVE_SECONDS = 2.0
COUNT_SECONDS = 15.0
THEME_COOKIE = "hetertrain_theme"
BUILD_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Screen:
    """One screen."""

    path: str
    title: str
    build: Callable[[View], Awaitable[None]]
    needs: str = ""
    """The right without which there is nothing to see; empty: whoever is logged in."""
    group: str = ""
    """Where it stands in the menu; empty: it is reached from others."""
    picture: str = ""
    below: str = ""
    """The screen of the menu that it belongs to, by its path."""
    count: Callable[[ApiClient], Awaitable[int]] | None = None
    """How many things of it need a human, which its place in the menu says on every screen."""


class View:
    """One look at one screen by somebody."""

    def __init__(self, screen: Screen, api: ApiClient, request: Request) -> None:
        self.screen = screen
        self.api = api
        self._client = ui.context.client
        self.path: dict[str, str] = {k: str(v) for k, v in request.path_params.items()}
        self.query = dict(request.query_params)
        self._query = request.query_params
        self.origin = f"{request.url.scheme}://{request.url.netloc}"
        """Where the browser found the control plane."""
        self.name = ""
        self._rights: frozenset[str] = frozenset()
        self._is_dark = request.cookies.get(THEME_COOKIE) == "dark"
        self._state: Element | None = None
        self._trouble: Element | None = None
        self._heading: Any = None

    def may(self, right: str) -> bool:
        """Tell whether the viewer has a right."""
        return right in self._rights

    def asked(self, name: str) -> list[str]:
        """Return all that the address asks for by a name, in order."""
        return self._query.getlist(name)

    async def open(self, screens: list[Screen]) -> None:
        """Make the page."""
        self._mode = ui.dark_mode(self._is_dark)
        try:
            me = await self.api.me()
        except ProblemAnswer as problem:
            self._stop(problem)
            return
        self.name, self._rights = me["name"], frozenset(me["rights"])
        self._frame([s for s in screens if s.group and (not s.needs or self.may(s.needs))])
        if self.screen.needs and not self.may(self.screen.needs):
            text = f"{self.name} lacks the right {self.screen.needs}. An admin can give it."
            self._explain("This is not for everybody", text)
            return
        try:
            await self.screen.build(self)
        except ProblemAnswer as problem:
            self._explain("This cannot be shown", problem.detail)

    def head(self, title: str) -> Element:
        """Write the heading, with a place for actions beside it, which is returned."""
        with tag("div", "", "heading"):
            tag("h1", title)
            return tag("div", "", "actions")

    async def live(
        self, refresh: Callable[[], Awaitable[None]], seconds: float = LIVE_SECONDS
    ) -> None:
        """Call ``refresh`` now and every few seconds, for as long as somebody looks."""
        await refresh()

        async def again() -> None:
            try:
                await refresh()
            except ProblemAnswer as problem:
                self._stale(problem)
            else:
                self._fresh()

        ui.timer(seconds, again, immediate=False)

    async def attempt(self, change: Awaitable[Any], done: str) -> Any:
        """Carry something out, and say how it went, if there is something to say of it; None: it
        was refused.
        """
        try:
            answer = await change
        except ProblemAnswer as problem:
            self.say(problem.detail, is_bad=True)
            return None
        if done:
            self.say(done)
        return answer if answer is not None else True

    def say(self, text: str, *, is_bad: bool = False) -> None:
        """Say something in passing."""
        # Whatever was clicked may be gone by now, as the dialog that is closed when it is done.
        with self._client:
            ui.notify(
                text,
                type="negative" if is_bad else "positive",
                position="bottom-right",
                timeout=9000 if is_bad else 4000,
                close_button="Dismiss" if is_bad else False,
            )

    async def confirm(self, title: str, text: str, action: str, *, word: str = "") -> bool:
        """Ask before something that matters; ``word`` must be typed where it cannot be undone."""
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def settle(value: bool) -> None:
            if not answer.done():
                answer.set_result(value)

        with self.dialogs(), Modal(title) as modal:
            tag("h2", title)
            tag("p", text)
            typed = Field(f"Type {word} to go on") if word else None
            with tag("div", "", "actions"):
                button("Cancel", lambda: settle(False))
                button(
                    action,
                    lambda: settle(typed is None or typed.value == word),
                    "button-bad" if word else "button-primary",
                )
        modal.on("dismiss", lambda: settle(False))
        modal.open()
        try:
            return await answer
        finally:
            modal.close()
            modal.delete()

    def dialogs(self) -> Element:
        """Return where dialogs are put: outside of whatever is made anew."""
        return self._client.content

    def go(self, path: str, **query: object) -> None:
        """Go to another screen."""
        ui.navigate.to(to(path, **query).removeprefix(MOUNT))

    def _frame(self, menu: list[Screen]) -> None:
        client = self._client
        with client.layout:
            skip = tag("a", "Skip to the content", "skip", href="#content")
            rail = tag("aside", "", "rail")
            top = tag("header", "", "top")
        for index, part in enumerate((skip, rail, top)):
            part.move(client.layout, target_index=index)
        client.content._props["id"] = "content"
        with rail:
            self._menu(menu)
        with top:
            self._top(rail)
        with client.content:
            self._trouble = tag("div", "", "trouble", role="status")
            self._trouble.set_visibility(False)

    def _menu(self, menu: list[Screen]) -> None:
        with tag("a", "", "brand", href=f"{MOUNT}/"):
            tag("img", src=f"{MOUNT}/static/mark.svg", alt="", width="30", height="30")
            tag("span", "Heter-Train")
        with tag("nav", "", "menu", aria_label="Screens"):
            for group in dict.fromkeys(screen.group for screen in menu):
                tag("h2", group, "menu-group")
                with tag("ul"):
                    for screen in (s for s in menu if s.group == group):
                        self._menu_item(screen)

    def _menu_item(self, screen: Screen) -> None:
        is_here = screen.path in (self.screen.path, self.screen.below)
        current = {"aria_current": "page"} if is_here else {}
        with tag("li"), tag("a", "", "menu-item", href=to(screen.path), **current):
            icon(screen.picture)
            tag("span", screen.title)
            if screen.count is not None:
                self._counted(screen.count, Region(_badge, "", "span"))

    def _counted(self, count: Callable[[ApiClient], Awaitable[int]], badge: Region) -> None:
        async def again() -> None:
            try:
                badge.show(await count(self.api))
            except ProblemAnswer:
                # The screen itself says that the control plane does not answer.
                return

        ui.timer(COUNT_SECONDS, again)

    def _top(self, rail: Element) -> None:
        menu = tag("button", "", "icon-button menu-button", type="button", aria_label="Menu")
        menu._props["aria-expanded"] = "false"
        with menu:
            icon("menu")

        def turn() -> None:
            is_open = menu._props["aria-expanded"] == "false"
            menu._props["aria-expanded"] = "true" if is_open else "false"
            menu.update()
            rail.classes(toggle="rail-open")

        menu.on("click", turn)
        if self.may("nodes:read"):
            find = Field(
                "Find a node", kind="search", quiet=True, placeholder="Find a node by name"
            )
            find.classes("find").on("enter", lambda event: self._find(str(event.args)))
        with tag("div", "", "top-end"):
            self._state = tag("span", "Live", "live", title="This page keeps itself up to date")
            ThemeSwitch(self._mode)
            with link("", to("/account"), "who"):
                icon("account_circle")
                tag("span", self.name)
            button("Log out", self._log_out, "button-small")

    def _find(self, text: str) -> None:
        if text.strip():
            self.go("/fleet", contains=text.strip())

    async def _log_out(self) -> None:
        try:
            await self.api.send("DELETE", "/sessions/current")
        except ProblemAnswer as problem:
            if problem.status != 401:
                self.say(problem.detail, is_bad=True)
                return
        ui.navigate.to(LOGIN.removeprefix(MOUNT))

    def _explain(self, title: str, text: str) -> None:
        with tag("div", "", "empty"):
            tag("h1", title)
            tag("p", text)
            link("To the overview", to("/"), "button button-primary")

    def _stop(self, problem: ProblemAnswer) -> None:
        if problem.status == 401:
            ui.navigate.to(LOGIN.removeprefix(MOUNT))
        else:
            self._explain("The control plane does not answer", problem.detail)

    def _stale(self, problem: ProblemAnswer) -> None:
        """Say that what is seen is old, and why."""
        if problem.status == 401:
            ui.navigate.to(LOGIN.removeprefix(MOUNT))
        if self._state is not None and self._trouble is not None:
            self._state.classes("live-stale")
            self._trouble.clear()
            with self._trouble:
                tag("p", f"Not up to date: {problem.detail} It is tried again.")
            self._trouble.set_visibility(True)

    def _fresh(self) -> None:
        if self._state is not None and self._trouble is not None and self._trouble.visible:
            self._state.classes(remove="live-stale")
            self._trouble.set_visibility(False)


def _badge(num: int) -> None:
    if num:
        with tag("span", "", "count"):
            tag("span", f"{num:,}" if num < 1000 else "999+")
            tag("span", " need attention", "unseen")


def to(path: str, **query: object) -> str:
    """Return the address of a screen; what is None or empty in ``query`` is left out, and a list
    stands there as often as it has items.
    """
    given = {name: value for name, value in query.items() if value not in (None, "")}
    return f"{MOUNT}{quote(path)}" + (f"?{urlencode(given, doseq=True)}" if given else "")


def crumbs(*above: tuple[str, str], here: str) -> None:
    """Show the way down: (text, path) of each screen above, and where this is."""
    with tag("nav", "", "crumbs", aria_label="Where this is"):
        for text, path in above:
            link(text, to(path))
            tag("span", "/", aria_hidden="true")
        tag("span", here)


def register(
    screen: Screen, client_of: Callable[[Request], ApiClient], screens: list[Screen]
) -> None:
    """Make a screen's page known to NiceGUI."""

    async def page(request: Request) -> None:
        ui.add_head_html(f'<link rel="stylesheet" href="{MOUNT}/static/console.css">')
        await View(screen, client_of(request), request).open(screens)

    ui.page(screen.path, title=f"{screen.title} · Heter-Train", response_timeout=BUILD_SECONDS)(
        page
    )
