"""A new claim: what it lets in; then its secret, shown this once, as text, command and QR code."""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable
from typing import Any

import segno

from hetertrain_cloud.console import forms, words
from hetertrain_cloud.console.elements import Copy, Field, Modal, button, callout, tag
from hetertrain_cloud.console.view import View

DURATIONS = (
    ("1", "1 hour"),
    ("24", "1 day"),
    ("168", "7 days"),
    ("720", "30 days"),
    ("8760", "1 year"),
)
MODULE_PIXELS = 4
ROLES = (("vehicle", "vehicles"), ("edge", "edge gateways"))


def command(role: str, origin: str, secret: str, node: str) -> str:
    """Return what a node of a role runs to join.

    The claim goes by a file: what stands in a command line can be read by every user of a machine.
    """
    name = shlex.quote(node) if node else "NAME"
    return (
        f"(umask 077 && printf %s {shlex.quote(secret)} > claim)\n"
        f"hetertrain {role} enroll --url {shlex.quote(origin)} --claim-file claim "
        f"--node {name} --directory /var/lib/hetertrain-{role}"
    )


def picture(secret: str) -> str:
    """Return a claim as a QR code, as the address of an image."""
    # Scanners want dark on light, whatever the page's colours are.
    made = segno.make(secret, error="m", micro=False)
    return made.svg_data_uri(scale=MODULE_PIXELS, border=4, dark="#000", light="#fff")


class ClaimForm:
    """The dialog; it is gone, and the secret with it, when it is closed."""

    def __init__(self, view: View, made: Callable[[], Awaitable[None]]) -> None:
        """``made`` is called when there is one claim more."""
        self._view = view
        self._made = made
        self._fields: dict[str, Field] = {}

    def open(self, node: str = "", role: str = "vehicle") -> None:
        """Ask what the claim is to let in; ``node``: for this node."""
        with self._view.dialogs(), Modal("New claim", is_wide=True, is_once=True) as self._modal:
            self._ask(node, role)
        self._modal.open()

    def _ask(self, node: str, role: str) -> None:
        tag("h2", "New claim")
        tag("p", "What a vehicle or an edge gateway is given to join the fleet.", "muted")
        with tag("div", "", "form"):
            self._fields = {
                "role": Field("For", role, kind="select", options=list(ROLES)),
                "hours": Field("Valid for", "24", kind="select", options=list(DURATIONS)),
                "node": Field(
                    "Node's name",
                    node,
                    hint="Only this node may join. Empty: it names itself.",
                    placeholder="any",
                ),
                "uses": Field(
                    "Number of nodes", "1", kind="number", least=1, most=100_000, required=True
                ),
            }
            with tag("div", "", "form-wide"):
                self._fields["labels"] = Field(
                    "Labels that they get, one a line",
                    kind="textarea",
                    rows=3,
                    example="region=north",
                    hint="KEY=VALUE. Jobs choose their nodes by labels.",
                )
            with tag("div", "", "form-wide"):
                self._fields["needs_approval"] = Field(
                    "Each waits until an operator lets it in", False, kind="checkbox"
                )
        with tag("div", "", "actions"):
            button("Cancel", self._modal.close)
            button("Make the claim", self._send, "button-primary")

    def _body(self) -> dict[str, Any] | None:
        fields = self._fields
        uses = forms.number(fields["uses"])
        try:
            labels = words.read_labels(str(fields["labels"].value))
        except ValueError as error:
            fields["labels"].complain(words.sentence(str(error)))
            return None
        if uses is None:
            return None
        return {
            "role": fields["role"].value,
            "node": str(fields["node"].value).strip() or None,
            "labels": labels,
            "uses": uses,
            "needs_approval": bool(fields["needs_approval"].value),
            "hours": int(fields["hours"].value),
        }

    async def _send(self) -> None:
        body = self._body()
        if body is None:
            return
        answer = await forms.send(self._view, self._fields, ("POST", "/claims"), body)
        if answer is not None:
            self._modal.clear()
            with self._modal:
                self._show(body, answer["secret"])
            await self._made()

    def _show(self, body: dict[str, Any], secret: str) -> None:
        tag("h2", "The claim is made")
        callout(
            "This is shown once.",
            "Who has it can join your fleet: give it only to those who install nodes.",
            "warning",
        )
        with tag("div", "", "claim-made"):
            with tag("div", "", "stack"):
                Copy("Claim", secret)
                text = command(body["role"], self._view.origin, secret, body["node"] or "")
                Copy("On the node", text)
                if not body["node"]:
                    tag("p", "Write the node's own name in place of NAME.", "hint")
            tag("img", "", "qr-code", src=picture(secret), alt="The claim as a QR code")
        with tag("div", "", "actions"):
            button("Done", self._modal.close, "button-primary")
