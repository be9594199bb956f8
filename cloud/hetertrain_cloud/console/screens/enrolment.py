"""Enrolment: who waits to be let in, the claims that nodes join with, and certificates that end."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from hetertrain_cloud.console import words
from hetertrain_cloud.console.bulk import act_on_nodes
from hetertrain_cloud.console.elements import (
    Column,
    DataTable,
    Field,
    Pager,
    Region,
    Tone,
    button,
    card,
    empty,
    tag,
)
from hetertrain_cloud.console.screens.claim_form import ClaimForm
from hetertrain_cloud.console.view import Screen, View, to

PAGE = 50
SECONDS = 5.0
EXPIRING_DAYS = 7
"""Nodes renew their certificates ten days before the end: those with less did not."""
ROLES = {"vehicle": "vehicles", "edge": "edge gateways"}
WAITING_COLUMNS = (
    Column("name", "Node", "link"),
    Column("role", "Role"),
    Column("labels", "Labels", "labels"),
    Column("claim", "By claim", "code"),
    Column("since", "Since", "time"),
)
CLAIM_COLUMNS = (
    Column("for", "For", "link"),
    Column("labels", "Labels", "labels"),
    Column("used", "Used", "bar"),
    Column("approval", "Approval"),
    Column("by", "Made by"),
    Column("expires", "Expires", "date"),
    Column("state", "State", "pill"),
)
EXPIRING_COLUMNS = (
    Column("name", "Node", "link"),
    Column("expires", "Certificate until", "date"),
    Column("seen", "Last seen", "time"),
    Column("advice", "What to do"),
)


def waiting_row(node: Mapping[str, Any]) -> dict[str, Any]:
    """Lay a node out that waits for approval."""
    return {
        "key": node["name"],
        "name": {"text": node["name"], "href": to(f"/nodes/{node['name']}")},
        "role": "edge gateway" if node["role"] == "edge" else node["role"],
        "labels": node["labels"] or None,
        "claim": node["claim"],
        "since": node["enrolled_at"],
    }


def claim_state(claim: Mapping[str, Any], now: datetime) -> tuple[str, Tone]:
    """Return whether a claim can still be used, and if not, why."""
    if claim["revoked_at"] is not None:
        return "revoked", "bad"
    if claim["uses"] >= claim["uses_max"]:
        return "used up", "quiet"
    if datetime.fromisoformat(claim["expires_at"]) <= now:
        return "expired", "quiet"
    return "usable", "good"


def claim_row(claim: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """Lay a claim out: for whom, how far it is used, and whether it can be."""
    state, tone = claim_state(claim, now)
    node = claim["node"]
    return {
        "key": claim["id"],
        "for": {
            "text": node or ROLES[claim["role"]],
            "href": to(f"/nodes/{node}") if node else "",
            "note": claim["id"],
        },
        "labels": claim["labels"] or None,
        "used": {
            "share": claim["uses"] / claim["uses_max"],
            "text": f"{claim['uses']:,} of {claim['uses_max']:,}",
        },
        "approval": "needed" if claim["needs_approval"] else "no",
        "by": claim["created_by"],
        "expires": claim["expires_at"],
        "state": {"text": state, "tone": tone},
        "without": [] if state == "usable" else ["revoke"],
    }


def expiring_row(node: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """Lay a node out whose certificate ends soon, with what is to be done."""
    is_online = bool(node["live"] and node["live"]["is_online"])
    is_over = datetime.fromisoformat(node["expires_at"]) <= now
    if is_over:
        advice = "It is too late to renew: make a claim for this node, and let it enrol again."
    elif is_online:
        advice = "It is online and did not renew: see that it reaches the control plane by HTTPS."
    else:
        advice = "It renews by itself when it is online again. See why it is not."
    return {
        "key": node["name"],
        "name": {"text": node["name"], "href": to(f"/nodes/{node['name']}")},
        "expires": node["expires_at"],
        "seen": "now" if is_online else node["seen_at"],
        "advice": advice,
        "tone": "bad" if is_over else "",
        "without": [] if is_over else ["claim"],
    }


class Enrolment:
    """The screen."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._shows_all = False

    async def build(self) -> None:
        """Make the screen."""
        view = self._view
        with view.head("Enrolment"):
            if view.may("claims:write"):
                button("New claim", self._new_claim, "button-primary", "add")
        if view.may("nodes:read"):
            self._make_waiting()
        if view.may("claims:read"):
            self._make_claims()
        if view.may("nodes:read"):
            self._make_expiring()
            await view.live(self._refresh_nodes, SECONDS)
        if view.may("claims:read"):
            await view.live(self._refresh_claims, SECONDS)
        if view.query.get("role") in ROLES and view.may("claims:write"):
            self._new_claim(role=view.query["role"])

    def _make_waiting(self) -> None:
        may = self._view.may("nodes:write")
        with card("Waits for approval", "card-flush"):
            self._bulk = Region(self._bulk_row, "bar-row bulk")
            self._waiting = DataTable(
                "Nodes that wait for approval",
                WAITING_COLUMNS,
                on_choose=self._chosen if may else None,
                actions=(("approve", "Approve", "quiet"), ("revoke", "Refuse", "bad"))
                if may
                else (),
                on_act=self._act_on_one,
            )
            self._nobody = Region(self._nobody_waits)
            self._waiting_pager = Pager(lambda: self._view.attempt(self._refresh_nodes(), ""))

    def _make_claims(self) -> None:
        with card("", "card-flush"):
            with tag("div", "", "bar-row bar-top"):
                tag("h2", "Claims", "card-title")
                Field("Used, expired and revoked ones too", kind="checkbox", on_value=self._all)
            self._claims = DataTable(
                "Claims",
                CLAIM_COLUMNS,
                actions=(("revoke", "Revoke", "bad"),) if self._view.may("claims:write") else (),
                on_act=self._revoke_claim,
            )
            self._no_claim = Region(self._no_claims)
            self._claim_pager = Pager(lambda: self._view.attempt(self._refresh_claims(), ""))

    def _make_expiring(self) -> None:
        may = self._view.may("claims:write")
        with card("Certificates about to end", "card-flush"):
            tag(
                "p",
                f"Nodes renew by themselves ten days before. These have {EXPIRING_DAYS} days or "
                "less, and did not.",
                "hint card-note",
            )
            self._expiring = DataTable(
                "Nodes whose certificate ends",
                EXPIRING_COLUMNS,
                actions=(("claim", "Claim for it", "quiet"),) if may else (),
                on_act=lambda _, node: self._new_claim(node),
            )
            self._all_renewed = Region(self._none_expires)
            self._expiring_pager = Pager(lambda: self._view.attempt(self._refresh_nodes(), ""))

    async def _refresh_nodes(self) -> None:
        api = self._view.api
        page = await api.get(
            "/nodes", state="pending", limit=PAGE, cursor=self._waiting_pager.cursor
        )
        rows = [waiting_row(node) for node in page["items"]]
        self._waiting.show(rows)
        self._waiting.set_visibility(bool(rows))
        self._nobody.show(bool(rows))
        self._waiting_pager.show(
            words.seen(self._waiting_pager.number, PAGE, len(page["items"])), page["next_cursor"]
        )
        page = await api.get(
            "/nodes",
            state="active",
            expires_within_days=EXPIRING_DAYS,
            limit=PAGE,
            cursor=self._expiring_pager.cursor,
        )
        now = datetime.now(UTC)
        self._expiring.show([expiring_row(node, now) for node in page["items"]])
        self._expiring.set_visibility(bool(page["items"]))
        self._all_renewed.show(bool(page["items"]))
        self._expiring_pager.show(
            words.seen(self._expiring_pager.number, PAGE, len(page["items"])), page["next_cursor"]
        )

    async def _refresh_claims(self) -> None:
        page = await self._view.api.get(
            "/claims",
            limit=PAGE,
            is_usable=None if self._shows_all else True,
            cursor=self._claim_pager.cursor,
        )
        now = datetime.now(UTC)
        self._claims.show([claim_row(claim, now) for claim in page["items"]])
        self._claims.set_visibility(bool(page["items"]))
        self._no_claim.show((bool(page["items"]), self._shows_all))
        self._claim_pager.show(
            words.seen(self._claim_pager.number, PAGE, len(page["items"])), page["next_cursor"]
        )

    async def _all(self, value: bool) -> None:
        self._shows_all = value
        await self._claim_pager.restart()

    def _nobody_waits(self, is_some: bool) -> None:
        if not is_some:
            empty(
                "Nobody waits",
                "Nodes that join with a claim that asks for approval stand here until they are "
                "let in.",
            )

    def _no_claims(self, shown: tuple[bool, bool]) -> None:
        is_some, shows_all = shown
        if not is_some:
            empty(
                "No claim yet" if shows_all else "No claim that can be used",
                "A claim is what a vehicle or gateway is given to join the fleet: make one for "
                "each, or one for many.",
            )

    def _none_expires(self, is_some: bool) -> None:
        if not is_some:
            empty("None", "All certificates are renewed in time.")

    def _chosen(self, keys: list[str]) -> None:
        self._bulk.show(tuple(keys))

    def _bulk_row(self, keys: tuple[str, ...]) -> None:
        if keys:
            tag("strong", f"{words.many(len(keys), 'node')} chosen")
            button("Approve", lambda: self._act("approve", list(keys)), "button-small")
            button("Refuse", lambda: self._act("revoke", list(keys)), "button-small button-bad")

    async def _act_on_one(self, action: str, node: str) -> None:
        await self._act(action, [node])

    async def _act(self, action: str, nodes: list[str]) -> None:
        who = nodes[0] if len(nodes) == 1 else words.many(len(nodes), "node")
        title, text, verb = {
            "approve": (f"Approve {who}?", "Each gets its certificate and may train.", "Approve"),
            "revoke": (
                f"Refuse {who}?",
                "It is revoked: it gets no certificate, and needs another claim to try again.",
                "Refuse",
            ),
        }[action]
        is_asked = len(nodes) > 1 or action == "revoke"
        if is_asked and not await self._view.confirm(title, text, verb):
            return
        done = f"{who} {'may take part now' if action == 'approve' else 'stays out'}."
        if not await act_on_nodes(self._view, action, nodes, done=done):
            return
        self._waiting.choose([])
        self._bulk.show(())
        await self._waiting_pager.restart()

    def _new_claim(self, node: str = "", role: str = "vehicle") -> None:
        ClaimForm(self._view, self._refresh_claims).open(node, role)

    async def _revoke_claim(self, _action: str, claim: str) -> None:
        text = "Nobody can join with it any more. Nodes that did stay."
        if await self._view.confirm("Revoke this claim?", text, "Revoke"):
            order = self._view.api.send("DELETE", f"/claims/{claim}")
            if await self._view.attempt(order, "The claim is revoked."):
                await self._refresh_claims()


async def build(view: View) -> None:
    """Make the screen."""
    await Enrolment(view).build()


SCREEN = Screen("/enrolment", "Enrolment", build, "claims:read", "Manage", "how_to_reg")
