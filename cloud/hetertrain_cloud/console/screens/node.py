"""One node: why it does not train, or that it does; what it is, what happened to it, and what can
be done about it.
"""

from __future__ import annotations

from typing import Any

from hetertrain.wire.signing import GATEWAY_ROLE
from hetertrain_cloud.console import words
from hetertrain_cloud.console.client import ProblemAnswer
from hetertrain_cloud.console.elements import (
    Field,
    Modal,
    Pager,
    Region,
    Tone,
    button,
    callout,
    card,
    empty,
    facts,
    icon,
    link,
    moment,
    pill,
    tag,
)
from hetertrain_cloud.console.log_card import LogCard
from hetertrain_cloud.console.node_parts import cell_address, gateway
from hetertrain_cloud.console.view import Screen, View, crumbs, to

EVENTS = 30
REFUSALS = 5
CHECK_PICTURES = {
    "ok": "check_circle",
    "failing": "cancel",
    "waiting": "schedule",
    "unknown": "radio_button_unchecked",
}
CHECK_WORDS = {"ok": "holds", "failing": "fails", "waiting": "waits", "unknown": "not known"}
EVENT_TONES: dict[str, Tone] = {
    "online": "good",
    "approved": "good",
    "training_began": "good",
    "offline": "quiet",
    "training_stopped": "warning",
    "not_eligible": "warning",
    "train_failed": "bad",
    "revoked": "bad",
    "decommissioned": "bad",
}


def check_item(check: dict[str, Any]) -> None:
    """Show one check: whether it holds, what was found, what to do."""
    state = check["state"]
    with tag("li", "", f"check check-{state}"):
        icon(CHECK_PICTURES[state])
        with tag("div", "", "check-title"):
            tag("span", check["title"])
            tag("span", f" ({CHECK_WORDS[state]})", "unseen")
        if check["detail"] and state != "unknown":
            tag("div", check["detail"], "check-detail")
        if check["advice"] and state in ("failing", "waiting"):
            with tag("div", "", "check-advice"):
                tag("strong", "What to do: ")
                tag("span", words.sentence(check["advice"]))
                if check.get("link"):
                    tag("span", " ")
                    link("Show it", to(check["link"]))


def settled(check: dict[str, Any]) -> dict[str, Any]:
    """Leave out of a check what is another each second: how long ago it was heard."""
    is_heard = check["code"] == "online" and check["state"] == "ok"
    return check | {"detail": ""} if is_heard else check


def explanation(found: dict[str, Any]) -> None:
    """Show why the node does not train: in a sentence, then check by check."""
    first = next((c for c in found["checks"] if c["state"] in ("failing", "waiting")), None)
    tone: Tone = "good" if found["is_training"] else "bad"
    if not found["is_training"] and first is not None and first["state"] == "waiting":
        tone = "busy"
    callout(found["summary"], tone=tone, picture="" if found["is_training"] else "help")
    with tag("ol", "", "checks", aria_label="What must hold for it to train"):
        for check in found["checks"]:
            check_item(check)


def about(node: dict[str, Any]) -> None:
    """Show what the control plane knows of the node."""
    is_vehicle = node["role"] == "vehicle"
    rows: list[tuple[str, Any]] = [
        ("Role", "vehicle" if is_vehicle else "edge gateway"),
        ("Labels", lambda: labels_list(node["labels"])),
        ("Enrolled", lambda: moment(node["enrolled_at"], "date")),
        ("By claim", node["claim"]),
        ("Certificate until", lambda: moment(node["expires_at"], "date")),
        ("Last seen", "now" if node["is_online"] else lambda: moment(node["seen_at"])),
    ]
    facts(rows)


def labels_list(labels: dict[str, str]) -> None:
    """Show labels."""
    for key, value in labels.items():
        tag("span", f"{key}={value}", "label")
    if not labels:
        tag("span", "none", "muted")


def work(live: dict[str, Any] | None) -> None:
    """Show what the node said of itself a moment ago."""
    if live is None:
        empty("Nothing heard yet", "Since the control plane started, it has said nothing.")
        return
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in live["metrics"].items())
    if live["via"]:
        seen_through(live)
        return
    rows: list[tuple[str, Any]] = [
        *places(live),
        ("Tier", f"{live['tier']}, {rate(live['goodput_bits_per_second'])}"),
        *progress(live),
        ("Steps", f"{live['steps']:,}, {words.duration(live['step_seconds'])} each"),
        sent_and_received(live),
        ("On its own data", metrics or "not measured"),
        ("This month", f"{words.size(live['month_bytes'])} sent and received"),
        ("Budgets", live["budgets"] or "none set by its owner"),
        still_to_deliver(live),
        ("Training failed", words.many(live["train_failures"], "time") + _last(live["failure"])),
        ("Software", f"{live['agent'] or 'not said'}, {live['rss_mib'] or '–'} MiB of memory"),
    ]
    facts(rows)


def rate(bits_per_second: int) -> str:
    """Say what it measured of its link."""
    return words.rate(bits_per_second) + (" measured" if bits_per_second else "")


Fact = tuple[str, Any]


def places(live: dict[str, Any]) -> list[Fact]:
    """Say what it works on, and where."""
    return [
        ("Job", lambda: link(live["job"], to(f"/jobs/{live['job']}"))),
        ("Cell", lambda: cell(live["cell"])),
    ]


def progress(live: dict[str, Any]) -> list[Fact]:
    """Say how far it is."""
    version = f"{live['version']:,}" if live["version"] >= 0 else "none yet"
    return [("Version", version), ("Updates sent", f"{live['updates']:,}")]


def sent_and_received(live: dict[str, Any]) -> Fact:
    """Say what it has sent and received."""
    text = f"{words.size(live['bytes_up'])}, {words.size(live['bytes_down'])}"
    return "Sent and received", text


def still_to_deliver(live: dict[str, Any]) -> Fact:
    """Say what waits for a verdict."""
    updates = words.many(live["backlog_updates"], "update")
    return "Still to deliver", f"{updates}, {words.size(live['backlog_bytes'])}"


def seen_through(live: dict[str, Any]) -> None:
    """Show what its gateway tells of a node that nobody else hears."""
    text = "Its cell has a broker of its own, so what is known is what its gateway tells."
    does = ": ".join(part for part in (words.plain(live["doing"]), live["waiting_for"]) if part)
    with tag("div", "", "stack"):
        callout(f"Seen through gateway {live['via']}", text, "quiet", "cell_tower")
        facts(
            [
                *places(live),
                ("Does", does),
                ("Tier", live["tier"]),
                *progress(live),
                sent_and_received(live),
                still_to_deliver(live),
            ]
        )


def _last(failure: str) -> str:
    return f", last: {failure}" if failure else ""


def cell(name: str) -> None:
    """Show a cell, which a gateway may be."""
    href = gateway(name)
    if href:
        link(name, href)
    else:
        tag("span", "the cloud's own")


def event_item(event: dict[str, Any]) -> None:
    """Show something that happened."""
    with tag("li", "", "event"):
        tag("span", "", f"dot tone-{EVENT_TONES.get(event['kind'], 'busy')}")
        with tag("div"):
            tag("strong", words.plain(event["kind"]).capitalize())
            if event["count"] > 1:
                tag("span", f" {event['count']} times")
            if event["text"]:
                tag("span", f" {event['text']}")
            if event["actor"]:
                tag("span", f" by {event['actor']}", "muted")
        moment(event["at"])


def events_list(events: list[dict[str, Any]]) -> None:
    """Show what happened, newest first."""
    if not events:
        empty("Nothing yet", "What happens to the node from now on is listed here.")
        return
    with tag("ol", "", "events"):
        for event in events:
            event_item(event)


def refusals(found: dict[str, Any]) -> None:
    """Show what was refused of it, and what that means."""
    if not found["items"]:
        return
    with card("What was refused"):
        for reason in found["by_reason"]:
            text = f"{reason['explanation']} {reason['advice']}"
            callout(words.many(reason["count"], "time"), text, "warning", "block")
        with tag("ul", "", "events"):
            for each in found["items"]:
                with tag("li", "", "event"):
                    tag("span", "", "dot tone-bad")
                    tag("span", each["detail"])
                    moment(each["at"])


class Node:
    """The screen."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._name = view.path["name"]
        self._node: dict[str, Any] = {}

    async def build(self) -> None:
        """Make the screen."""
        view = self._view
        self._node = await view.api.get(f"/nodes/{self._name}")
        is_gateway = self._node["role"] == GATEWAY_ROLE
        crumbs(("Gateways", "/gateways") if is_gateway else ("Fleet", "/fleet"), here=self._name)
        with view.head(self._name):
            if is_gateway:
                link("Members of its cell", cell_address(self._name), "button")
            self._actions = Region(self._buttons, "actions")
        with tag("div", "", "grid-wide"):
            with tag("div", "", "stack"):
                with card(f"Why it {'works' if is_gateway else 'trains'}, or not"):
                    self._why = Region(explanation, "stack")
                self._refused = Region(refusals)
                with card("What happened"):
                    self._events = Region(events_list)
                    self._pager = Pager(lambda: view.attempt(self._read_events(), ""))
                if view.may("logs:read"):
                    LogCard(view, self._name)
            with tag("div", "", "stack"):
                with card("What it does"):
                    self._work = Region(work)
                with card("What it is"):
                    self._about = Region(about)
        await view.live(self._refresh)

    async def _refresh(self) -> None:
        api, path = self._view.api, f"/nodes/{self._name}"
        self._node = await api.get(path)
        live = self._node["live"]
        is_online = bool(live and live["is_online"])
        self._actions.show((self._node["state"], is_online))
        why = await api.get(f"{path}/explanation")
        self._why.show(why | {"checks": [settled(check) for check in why["checks"]]})
        self._work.show(live and {k: v for k, v in live.items() if k != "seconds_ago"})
        known = {k: v for k, v in self._node.items() if k not in ("live", "seen_at")}
        # When one that is online was last heard is another each second.
        seen_at = None if is_online else self._node["seen_at"]
        self._about.show(known | {"is_online": is_online, "seen_at": seen_at})
        if live and self._view.may("jobs:read"):
            await self._look_for_refusals(live["job"])
        if not self._pager.number:  # Who looks at older ones does not want them to move.
            await self._read_events()

    async def _read_events(self) -> None:
        path = f"/nodes/{self._name}/events"
        page = await self._view.api.get(path, limit=EVENTS, cursor=self._pager.cursor)
        self._events.show(page["items"])
        text = words.seen(self._pager.number, EVENTS, len(page["items"]))
        self._pager.show(text, page["next_cursor"])

    async def _look_for_refusals(self, job: str) -> None:
        asked = {"node": self._name, "limit": REFUSALS}
        try:
            found = await self._view.api.get(f"/jobs/{job}/refusals", **asked)
        except ProblemAnswer as problem:
            if problem.status != 404:  # A node may speak of a job that nobody made here.
                raise
        else:
            self._refused.show({key: found[key] for key in ("items", "by_reason")})

    def _buttons(self, shown: tuple[str, bool]) -> None:
        state, is_online = shown
        pill("online" if is_online else "offline", "good" if is_online else "quiet")
        pill(state, words.NODE_TONES[state])
        if not self._view.may("nodes:write"):
            return
        if state == "pending":
            button("Approve", self._approve, "button-primary")
        button("Labels", self._edit_labels, picture="sell")
        if state in ("pending", "active"):
            button("Revoke", self._revoke, "button-bad")
        if state != "decommissioned":
            button("Decommission", self._decommission, "button-bad")

    async def _order(self, action: str, done: str) -> None:
        path = f"/nodes/{self._name}/{action}"
        if await self._view.attempt(self._view.api.send("POST", path), done):
            await self._refresh()

    async def _approve(self) -> None:
        await self._order("approve", f"{self._name} may take part now.")

    async def _revoke(self) -> None:
        text = "It loses all rights at once, as if it were stolen; its session at the broker ends."
        title = f"Revoke {self._name}?"
        if await self._view.confirm(title, text, "Revoke", word=self._name):
            await self._order("revoke", f"{self._name} is revoked.")

    async def _decommission(self) -> None:
        text = "It leaves the fleet for good. What it contributed stays in the model."
        title = f"Decommission {self._name}?"
        if await self._view.confirm(title, text, "Decommission", word=self._name):
            await self._order("decommission", f"{self._name} is out of the fleet.")

    def _edit_labels(self) -> None:
        with self._view.dialogs(), Modal("Labels") as modal:
            tag("h2", f"Labels of {self._name}")
            field = Field(
                "One a line, KEY=VALUE",
                words.labels_text(self._node["labels"]),
                kind="textarea",
                hint="Jobs choose their nodes by labels.",
            )

            async def save() -> None:
                try:
                    body = {"labels": words.read_labels(field.value)}
                except ValueError as error:
                    field.complain(words.sentence(str(error)))
                    return
                revision, path = self._node["revision"], f"/nodes/{self._name}"
                change = self._view.api.send("PATCH", path, body, if_match=revision)
                if await self._view.attempt(change, "Labels are saved."):
                    modal.close()
                    await self._refresh()

            with tag("div", "", "actions"):
                button("Cancel", modal.close)
                button("Save", save, "button-primary")
        modal.open()


async def build(view: View) -> None:
    """Make the screen."""
    await Node(view).build()


SCREEN = Screen("/nodes/{name}", "Node", build, "nodes:read", below="/fleet")
