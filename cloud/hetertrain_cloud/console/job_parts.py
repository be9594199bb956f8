"""What several screens show of a job: its state, its figures, what it waits for; and its orders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nicegui.element import Element

from hetertrain_cloud.console import words
from hetertrain_cloud.console.curves import leading
from hetertrain_cloud.console.elements import icon, pill, stat, tag
from hetertrain_cloud.console.view import View, to

ORDERS = {
    "start": ("Start", "play_arrow", "is started within seconds."),
    "pause": ("Pause", "pause", "is paused within seconds."),
    "stop": ("Stop", "stop", "is stopped within seconds."),
}
"""Each order with its name, its picture, and what is said once it is given."""

METRICS_SHOWN = 2


def state_pill(state: str) -> Element:
    """Show a job's state in a word."""
    return pill(state, words.JOB_TONES.get(state, "quiet"))


def orders_of(job: Mapping[str, Any]) -> tuple[str, ...]:
    """Return which orders make sense for a job as it is."""
    if job["state"] == "completed":
        return ("start",)
    if job["wanted"] == "running":
        # One that failed is tried again by itself, later and later: a start does so at once.
        again = ("start",) if job["state"] == "failed" else ()
        return (*again, "pause", "stop")
    return ("start", "stop") if job["wanted"] == "paused" else ("start",)


async def give_order(view: View, name: str, action: str) -> bool:
    """Start, pause or stop a job, and say how that went; a stop is asked about first."""
    label, _, done = ORDERS[action]
    if action == "stop":
        text = "Nodes train for it no more. Its versions stay, and it can be started again."
        if not await view.confirm(f"Stop {name}?", text, label):
            return False
    path = f"/jobs/{name}/{action}"
    return await view.attempt(view.api.send("POST", path), f"{name} {done}") is not None


def measured(metrics: Mapping[str, float] | None) -> str:
    """Write metrics in a line: the one that tells most first, and how many there are beside."""
    found = sorted((metrics or {}).items(), key=lambda item: (item[0] != _first(metrics), item[0]))
    # A name stays with its value where the line is broken.
    texts = [
        f"{words.plain(name)} {value:.4g}".replace(" ", "\xa0")
        for name, value in found[:METRICS_SHOWN]
    ]
    more = len(found) - len(texts)
    return ", ".join(texts) + (f", {more}\xa0more" if more else "")


def _first(metrics: Mapping[str, float] | None) -> str:
    return leading(sorted(metrics or {}))


def crew(job: Mapping[str, Any]) -> str:
    """Say how many nodes are there, of how many that may work on it."""
    return f"{job['nodes_online']:,} of {job['nodes_eligible']:,}"


def waits(job: Mapping[str, Any]) -> None:
    """Say what a job waits for; of one that is not to run, how it stands."""
    is_well = job["state"] == "running" and bool(job["live"])
    tone = "" if is_well else f" callout-{words.JOB_TONES.get(job['state'], 'quiet')}"
    with tag("div", "", f"callout{tone}"):
        icon("hourglass_top" if is_well else "info")
        with tag("div"):
            if job["state"] in ("running", "starting"):
                tag("strong", "Waits for: ")
                tag("span", job["waiting_for"]["text"])
            else:
                tag("span", words.sentence(job["waiting_for"]["text"]))
            if job.get("restarts"):
                times = words.many(job["restarts"], "time")
                tag("span", f"Its aggregator has failed {times} since it was started.", "note")


def rolling_back(version: int | None) -> None:
    """Say that a rollback is under way."""
    if version is not None:
        with tag("div", "", "callout callout-busy"):
            icon("history")
            tag("span", f"It goes on from version {version:,} within seconds.")


def saved(num_bytes: int | None, dense: int | None) -> str:
    """Say what compression saved."""
    if not num_bytes or not dense or dense < 1.1 * num_bytes:
        return ""
    times = dense / num_bytes
    return f"{times:,.{0 if times >= 10 else 1}f} times less than uncompressed"


def countdown(live: Mapping[str, Any]) -> str:
    """Say when the next synchronisation is due."""
    if live.get("is_syncing"):
        return "now"
    seconds = live.get("sync_in_seconds")
    return "–" if seconds is None else words.duration(max(0.0, seconds))


def figures(job: Mapping[str, Any]) -> None:
    """Show a job's figures."""
    live = job["live"] or {}
    metrics = (job["newest"] or {}).get("metrics") or {}
    name = leading(sorted(metrics))
    per_hour = job["versions_per_hour"]
    with tag("div", "", "stats"):
        stat(
            "Version",
            f"{job['version']:,}" if job["version"] is not None else "none yet",
            f"{per_hour:,.0f} an hour" if per_hour else "",
        )
        if name:
            stat(
                words.plain(name).capitalize(),
                f"{metrics[name]:.4g}",
                f"of version {job['newest']['version']:,}",
            )
        stat(
            "Nodes at work",
            f"{live.get('active', 0):,}",
            f"of {job['nodes_eligible']:,} that may, {job['nodes_online']:,} online",
        )
        if live:
            stat("Next synchronisation", countdown(live), "all start equal again")
        if live and live["uplink_bytes"]:
            stat(
                "Received",
                words.size(live["uplink_bytes"]),
                saved(live["uplink_bytes"], live["uplink_dense_bytes"]),
            )
            stat(
                "Broadcast",
                words.size(live["downlink_bytes"]),
                saved(live["downlink_bytes"], live["downlink_dense_bytes"]),
            )


def tabs(label: str, parts: Sequence[tuple[str, str]], here: str) -> None:
    """Show the screens of one thing side by side; ``parts`` are (text, path)."""
    with tag("nav", "", "tabs", aria_label=label):
        for text, path in parts:
            current = {"aria_current": "page"} if path == here else {}
            tag("a", text, "tab", href=to(path), **current)


def job_tabs(name: str, here: str) -> None:
    """Show the screens of one job side by side."""
    job = f"/jobs/{name}"
    tabs(f"screens of {name}", (("Now", job), ("Versions", f"{job}/versions")), here)
