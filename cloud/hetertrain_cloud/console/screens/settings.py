"""Settings: what the control plane runs on, and the settings that are in force."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hetertrain_cloud.console import words
from hetertrain_cloud.console.elements import (
    Column,
    Copy,
    DataTable,
    Field,
    Region,
    callout,
    card,
    empty,
    facts,
    moment,
    tag,
)
from hetertrain_cloud.console.view import Screen, View

SECONDS = 15.0
DATABASES = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}
BROKERS = {"mosquitto": "Mosquitto", "embedded": "embedded, which knows no rights"}
COLUMNS = (
    Column("name", "Setting", "code"),
    Column("value", "Value", "code"),
    Column("origin", "From", "pill"),
    Column("description", "What it does"),
)
SHARE_LOW = 0.1
Rows = list[tuple[str, Any]]


def row(setting: Mapping[str, Any]) -> dict[str, Any]:
    """Lay a setting out as a row."""
    is_given = setting["is_given"]
    return {
        "key": setting["name"],
        "name": setting["name"],
        "value": setting["value"],
        "origin": {
            "text": "given" if is_given else "default",
            "tone": "busy" if is_given else "quiet",
        },
        "description": setting["description"],
    }


def matching(settings: Sequence[Mapping[str, Any]], text: str) -> list[Mapping[str, Any]]:
    """Return the settings that have all of a text's words somewhere in them."""
    wanted = text.lower().split()
    return [
        each
        for each in settings
        if all(
            word
            in f"{each['name']} {each['description']} {each['value']} {each['variable']}".lower()
            for word in wanted
        )
    ]


def product(found: Mapping[str, Any]) -> None:
    """Show what the control plane runs on."""
    free = found["disk_free_share"]
    rows: Rows = [
        ("Heter-Train", found["version"]),
        ("Python", found["python"]),
        ("Machine", found["machine"]),
        ("Database", DATABASES.get(found["database"], found["database"])),
    ]
    if free is not None:
        rows.append(("Disk", f"{words.size(found['disk_free_bytes'])} free, {free:.0%}"))
    facts(rows)
    if free is not None and free < SHARE_LOW:
        callout("The disk is almost full.", "Make room, or keep fewer versions.", "warning")


def broker(found: Mapping[str, Any]) -> None:
    """Show where nodes find the broker, and whether all is well with it."""
    way = "MQTT 5 over TLS" if found["is_tls"] else "MQTT 5, not encrypted"
    rows: Rows = [
        ("Kind", BROKERS.get(found["kind"], found["kind"])),
        ("For nodes at", f"{found['host']}:{found['port']}"),
        ("By", way),
        ("WebSocket path", found["websocket_path"] or "none"),
    ]
    facts(rows)
    if found["error"]:
        callout("The control plane does not reach it.", words.sentence(found["error"]), "bad")
    if found["access_error"]:
        callout("Its rules are not up to date.", words.sentence(found["access_error"]), "bad")


def authority(found: Mapping[str, Any]) -> None:
    """Show the fleet's certificate authority, and the cloud's own certificates."""
    own = found["authority"]
    rows: Rows = [
        ("From", lambda: moment(own["begins_at"], "date")),
        ("Until", lambda: moment(own["expires_at"], "date")),
    ]
    rows += [
        (f"Of {each['name']} until", lambda each=each: moment(each["expires_at"], "date"))
        for each in found["certificates"]
    ]
    facts(rows)
    Copy("Fingerprint (SHA-256)", own["fingerprint"])


class Settings:
    """The screen."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._settings: list[dict[str, Any]] = []
        self._text = ""

    async def build(self) -> None:
        """Make the screen."""
        view = self._view
        view.head("Settings")
        with tag("div", "", "grid"):
            with card("Control plane"):
                self._product = Region(product, "stack")
            with card("Broker"):
                self._broker = Region(broker, "stack")
            with card("Certificate authority"):
                self._authority = Region(authority, "stack")
        with card("", "card-flush"):
            with tag("div", "", "bar-row bar-top"):
                tag("h2", "Settings in force", "card-title")
                Field(
                    "Find a setting",
                    kind="search",
                    quiet=True,
                    placeholder="Find a setting",
                    on_value=self._find,
                ).classes("bar-end")
            tag(
                "p",
                "Each is given at the start, by flag, environment variable (as "
                "HETERTRAIN_CLOUD_LISTEN_PORT) or file. What is secret is not shown.",
                "hint card-note",
            )
            self._table = DataTable("Settings in force", COLUMNS)
            self._none = Region(self._nothing)
        await view.live(self._refresh, SECONDS)

    async def _refresh(self) -> None:
        found = await self._view.api.get("/settings")
        self._product.show({k: v for k, v in found.items() if k != "settings"})
        self._broker.show(found["broker"])
        self._authority.show({k: found[k] for k in ("authority", "certificates")})
        self._settings = found["settings"]
        self._show()

    def _find(self, text: str) -> None:
        self._text = text
        self._show()

    def _show(self) -> None:
        rows = [row(setting) for setting in matching(self._settings, self._text)]
        self._table.show(rows)
        self._table.set_visibility(bool(rows))
        self._none.show(bool(rows))

    def _nothing(self, is_some: bool) -> None:
        if not is_some:
            empty("No setting matches", "Try another word.")


async def build(view: View) -> None:
    """Make the screen."""
    await Settings(view).build()


SCREEN = Screen("/settings", "Settings", build, "settings:read", "Manage", "settings")
