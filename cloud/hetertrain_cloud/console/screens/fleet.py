"""Fleet: every node, by whatever tells them apart; and what is done to many at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlencode

from nicegui.events import GenericEventArguments

from hetertrain_cloud.console import words
from hetertrain_cloud.console.bulk import act_on_nodes
from hetertrain_cloud.console.curves import places
from hetertrain_cloud.console.elements import (
    Address,
    Chart,
    Column,
    DataTable,
    Field,
    Modal,
    Pager,
    Region,
    button,
    card,
    empty,
    link,
    tag,
)
from hetertrain_cloud.console.node_parts import gateway, work_shares
from hetertrain_cloud.console.view import Screen, View, to

PAGE = 50
JOBS = 200
COUNT_SECONDS = 5.0
COLUMNS = (
    Column("name", "Node", "link", sort=True),
    Column("doing", "Does", "pill"),
    Column("tier", "Tier"),
    Column("cell", "Cell", "link"),
    Column("labels", "Labels", "labels"),
    Column("version", "Version", "number", sort=True),
    Column("updates", "Updates", "number", sort=True),
    Column("bytes_up", "Sent", "bytes", sort=True),
    Column("seen", "Last seen", "time", sort=True),
)
BY_NAME = ("name", False)
Place = tuple[float, float, str]
STATES = ("active", "pending", "revoked", "decommissioned")
MENUS = (
    ("state", "Enrolment"),
    ("role", "Role"),
    ("doing", "Does"),
    ("held_by", "Held by"),
    ("tier", "Tier"),
    ("cell", "Cell"),
    ("job", "Job"),
    ("label", "Label"),
)
FILTERS = ("contains", *(name for name, _ in MENUS))


def row(node: dict[str, Any]) -> dict[str, Any]:
    """Lay a node out as a row: where it does not take part, with the reason in place of work."""
    live = node["live"] or {}
    doing = str(live.get("doing", "")).partition(";")[0] if live.get("is_online") else "offline"
    shown, tone = doing, words.doing_tone(doing)
    if node["state"] != "active":
        shown, tone = node["state"], words.NODE_TONES[node["state"]]
    return {
        "key": node["name"],
        "name": {"text": node["name"], "href": to(f"/nodes/{node['name']}")},
        "doing": {
            "text": words.plain(shown),
            "tone": tone,
            "note": live.get("waiting_for") if live.get("is_online") and tone != "good" else "",
        },
        "tier": live.get("tier"),
        "cell": None if not live else {"text": live["cell"], "href": gateway(live["cell"])},
        "labels": node["labels"] or None,
        "version": live["version"] if live.get("version", -1) >= 0 else None,
        "updates": live.get("updates"),
        "bytes_up": live.get("bytes_up"),
        "seen": "now" if live.get("is_online") else node["seen_at"],
    }


def groups(found: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, list[Place]]]:
    """Divide places by what nodes do, each with its colour."""
    divided: dict[str, tuple[str, list[Place]]] = {}
    for each in found:
        doing = each["doing"]
        colour = f"var(--fill-{words.doing_tone(doing)})"
        _, places_of = divided.setdefault(words.plain(doing), (colour, []))
        places_of.append((each["longitude"], each["latitude"], each["node"]))
    return divided


def menus(counts: dict[str, Any], jobs: list[str]) -> dict[str, list[tuple[str, str]]]:
    """Return what each menu offers, with how many nodes there are of each."""

    def counted(of: Mapping[str, int]) -> list[tuple[str, str]]:
        return [(key, f"{words.plain(key)} ({num:,})") for key, num in of.items()]

    labels = {
        f"{key}={value}": num
        for key, values in counts["labels"].items()
        for value, num in values.items()
    }
    return {
        "state": counted({s: counts["by_state"].get(s, 0) for s in STATES}),
        "role": [("vehicle", "vehicles"), ("edge", "gateways")],
        "doing": counted(counts["by_doing"]),
        "held_by": [
            (rule, f"{rule} ({num:,})") for rule, num in counts["not_eligible_by_rule"].items()
        ],
        "tier": counted(dict(sorted(counts["by_tier"].items()))),
        "cell": counted(counts["by_cell"]),
        "job": [(name, name) for name in jobs],
        "label": [(label, f"{label} ({num:,})") for label, num in labels.items()],
    }


def order_in(query: Mapping[str, str]) -> tuple[str, bool]:
    """Return the column that an address asks to sort by, and whether the greatest comes first."""
    name = query.get("sort", "")
    if name not in [column.name for column in COLUMNS if column.sort]:
        return BY_NAME
    return name, query.get("descending") == "true"


def _way_to_all(is_filtered: bool) -> None:
    if is_filtered:
        link("Clear filters", to("/fleet"))


class Fleet:
    """The screen: filters, a page of nodes, what is chosen of them."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._asked = {name: view.query.get(name, "") for name in FILTERS}
        self._order = order_in(view.query)
        self._fields: dict[str, Field] = {}
        self._saved: dict[str, str] = {}
        self._jobs: list[str] = []
        self._has_map = False

    async def build(self) -> None:
        """Make the screen."""
        view = self._view
        self._address = Address()
        with view.head("Fleet"):
            self._saved_menu = Field(
                "Saved filters",
                kind="select",
                options=[("", "Saved filters")],
                quiet=True,
                on_value=self._use_saved,
            )
            button("Save filter", self._save, picture="bookmark_add")
        with card():
            self._work = Region(work_shares)
            self._filter_row()
        with tag("details", "", "card") as self._map_card:
            tag("summary", "Map", "card-title")
            self._map = Region(self._make_map)
            tag("p", "Only nodes that say where they are: a vehicle's owner lets it.", "hint")
        self._map_card.on("toggle", self._fold, args=["newState"])
        with card("", "card-flush"):
            self._bulk = Region(self._bulk_row, "bar-row bulk")
            self._table = DataTable(
                "Nodes",
                COLUMNS,
                on_choose=self._chosen if view.may("nodes:write") else None,
                on_sort=self._sort,
            )
            self._none = Region(self._nothing)
            self._pager = Pager(self._turn)
        page = await view.api.get("/jobs", limit=JOBS)
        self._jobs = [job["name"] for job in page["items"]]
        await self._read_saved()
        await view.live(self._count, COUNT_SECONDS)
        await view.live(self._refresh)
        await view.live(self._locate, COUNT_SECONDS)

    def _filter_row(self) -> None:
        with tag("div", "", "form filters", role="search", aria_label="Filter the fleet"):
            self._fields["contains"] = Field(
                "Name has",
                self._asked["contains"],
                kind="search",
                on_value=lambda value: self._ask("contains", value),
            )
            for name, label in MENUS:
                asked = self._asked[name]
                options = [("", "any"), *([(asked, asked)] if asked else [])]
                self._fields[name] = Field(
                    label,
                    asked,
                    kind="select",
                    options=options,
                    on_value=lambda value, name=name: self._ask(name, value),
                )
        self._clear = Region(_way_to_all, "clear")

    async def _count(self) -> None:
        counts = await self._view.api.get("/fleet")
        is_filtered = bool(self._given())
        shown = await self._view.api.get("/fleet", **self._asked) if is_filtered else counts
        self._work.show(shown["by_doing"])
        for name, options in menus(counts, self._jobs).items():
            asked = self._asked[name]
            if asked and asked not in [value for value, _ in options]:
                options.append((asked, asked))
            self._fields[name].offer([("", "any"), *options])

    async def _refresh(self) -> None:
        sort, descending = self._order
        page = await self._view.api.get(
            "/nodes",
            limit=PAGE,
            cursor=self._pager.cursor,
            sort=sort,
            descending=descending,
            **self._asked,
        )
        self._table.show([row(node) for node in page["items"]], self._order)
        self._none.show("" if page["items"] else urlencode(self._given()) or "all")
        first, total = PAGE * self._pager.number, page["total"]
        text = f"{first + 1:,} to {first + len(page['items']):,} of {total:,}"
        self._pager.show(text, page["next_cursor"])
        self._address.show(self._query())
        self._clear.show(bool(self._given()))

    async def _fold(self, event: GenericEventArguments) -> None:
        self._has_map = event.args["newState"] == "open"
        await self._view.attempt(self._locate(), "")

    async def _locate(self) -> None:
        if not self._has_map:  # Where many nodes are is not asked for unless somebody looks.
            return
        found = (await self._view.api.get("/fleet/positions", **self._asked))["items"]
        self._map.show(bool(found))
        if found:
            self._drawn.draw(places(groups(found)))

    def _make_map(self, has_places: bool) -> None:
        if not has_places:
            empty("No node says where it is", "A vehicle does where its settings share_position.")
            return
        self._drawn = Chart("map of the nodes that say where they are", places({}), "degrees")
        self._drawn.classes("chart-tall")

    def _given(self) -> dict[str, str]:
        return {name: value for name, value in self._asked.items() if value}

    def _query(self) -> str:
        """Return what the address and a saved filter keep."""
        sort, descending = self._order
        order = {"sort": sort, "descending": str(descending).lower()}
        return urlencode(self._given() | (order if self._order != BY_NAME else {}))

    async def _ask(self, name: str, value: str) -> None:
        self._asked[name] = str(value).strip()
        await self._pager.restart()
        await self._view.attempt(self._count(), "")

    async def _sort(self, name: str) -> None:
        """Turn the order around; of another column of figures, the greatest come first."""
        by, descending = self._order
        self._order = order_in(
            {
                "sort": name,
                "descending": str(not descending if by == name else name != "name").lower(),
            }
        )
        await self._pager.restart()

    async def _turn(self) -> None:
        self._table.choose([])
        self._bulk.show(())
        await self._view.attempt(self._refresh(), "")

    def _nothing(self, asked: str) -> None:
        if asked == "all":
            empty(
                "No node yet",
                "A vehicle or gateway joins the fleet with a claim.",
                to("/enrolment"),
                "Make a claim",
            )
        elif asked:
            empty("No node matches", "Loosen a filter, or show them all.", to("/fleet"), "Show all")

    def _chosen(self, keys: list[str]) -> None:
        self._bulk.show(tuple(keys))

    def _bulk_row(self, keys: tuple[str, ...]) -> None:
        if not keys:
            return
        tag("strong", f"{words.many(len(keys), 'node')} chosen")
        bad = "button-small button-bad"
        button("Approve", lambda: self._act("approve", list(keys)), "button-small")
        button("Set a label", lambda: self._label(list(keys)), "button-small")
        button("Revoke", lambda: self._act("revoke", list(keys)), bad)
        button("Decommission", lambda: self._act("decommission", list(keys)), bad)

    async def _act(self, action: str, nodes: list[str]) -> None:
        texts = {
            "approve": ("Approve", "They may take part from now on."),
            "revoke": ("Revoke", "They lose all rights at once, as if they were stolen."),
            "decommission": ("Decommission", "They leave the fleet for good."),
        }
        title, text = texts[action]
        many = words.many(len(nodes), "node")
        word = "" if action == "approve" else action
        if await self._view.confirm(f"{title} {many}?", text, title, word=word):
            await self._carry_out(action, nodes)

    async def _label(self, nodes: list[str]) -> None:
        with self._view.dialogs(), Modal("Set a label") as modal:
            tag("h2", f"Set a label of {words.many(len(nodes), 'node')}")
            key = Field("Label", example="region")
            value = Field("Value", hint="Empty: the label is taken away.", example="north")

            async def done() -> None:
                modal.close()
                labels = {key.value: value.value or None}
                await self._carry_out("label", nodes, labels)

            with tag("div", "", "actions"):
                button("Cancel", modal.close)
                button("Set", done, "button-primary")
        modal.open()

    async def _carry_out(
        self, action: str, nodes: list[str], labels: dict[str, str | None] | None = None
    ) -> None:
        if await act_on_nodes(self._view, action, nodes, labels):
            await self._pager.restart()

    async def _read_saved(self) -> None:
        items = (await self._view.api.get("/me/filters"))["items"]
        self._saved = {item["name"]: item["query"] for item in items}
        self._saved_menu.offer([("", "Saved filters"), *((name, name) for name in self._saved)])

    async def _use_saved(self, name: str) -> None:
        if name in self._saved:
            asked = dict(parse_qsl(self._saved[name]))
            self._asked = {key: asked.get(key, "") for key in FILTERS}
            self._order = order_in(asked)
            for key, field in self._fields.items():
                field.set(self._asked[key])
            await self._pager.restart()
            await self._view.attempt(self._count(), "")

    def _save(self) -> None:
        with self._view.dialogs(), Modal("Save this filter") as modal:
            tag("h2", "Save this filter")
            name = Field("Name", example="charging in the north")

            async def keep() -> None:
                body = {"query": self._query()}
                path = f"/me/filters/{name.value}"
                if await self._view.attempt(self._view.api.send("PUT", path, body), "Saved."):
                    modal.close()
                    await self._read_saved()

            async def forget() -> None:
                path = f"/me/filters/{name.value}"
                if await self._view.attempt(self._view.api.send("DELETE", path), "Deleted."):
                    modal.close()
                    await self._read_saved()

            with tag("div", "", "actions"):
                button("Delete the one of this name", forget)
                button("Cancel", modal.close)
                button("Save", keep, "button-primary")
        modal.open()


async def build(view: View) -> None:
    """Make the screen."""
    await Fleet(view).build()


SCREEN = Screen("/fleet", "Fleet", build, "nodes:read", "Watch", "directions_car")
