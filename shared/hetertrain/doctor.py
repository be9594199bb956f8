"""``hetertrain vehicle doctor`` and ``edge doctor``: say which layer between a node and its fleet
does not work, and what to do.

A *check* looks at one layer. It runs as soon as those that it needs are well, at the same time as
all that have nothing to do with it, and until its own deadline; so the whole ends before long
whatever hangs. The checks are those of ``checks_node`` and ``checks_link``; a part adds its own.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hetertrain import config
from hetertrain.cli import Command
from hetertrain.errors import HetertrainError

EXIT_CODES = {
    "settings": 20,
    "task": 21,
    "disk": 22,
    "clock": 23,
    "certificate": 24,
    "dns": 25,
    "tcp": 26,
    "tls": 27,
    "websocket": 28,
    "mqtt": 29,
    "acl": 30,
    "control": 31,
}
"""By layer: the first that failed gives the command's exit code. Part of the interface."""


class Status(StrEnum):
    """What came out of a check."""

    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found in one layer."""

    status: Status
    found: str
    advice: str = ""
    """What to do, where it failed."""
    is_unknown: bool = False
    """It was not looked at, because something that it needs failed."""

    @property
    def blocks(self) -> bool:
        """Whether what needs this layer cannot be looked at."""
        return self.status is Status.FAILED or self.is_unknown


def ok(found: str) -> Finding:
    """Return that a layer is well."""
    return Finding(Status.OK, found)


def failed(found: str, advice: str) -> Finding:
    """Return that a layer is not well, and what to do."""
    return Finding(Status.FAILED, found, advice)


def skipped(reason: str) -> Finding:
    """Return that a layer is not used here."""
    return Finding(Status.SKIPPED, reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One layer, and how to look at it."""

    name: str
    """The layer, after the link that it is of where there are several: ``south tls``."""
    run: Callable[[], Finding]
    seconds: float
    """How long it may take."""
    silence: str
    """What to do where it takes longer."""
    needs: tuple[str, ...] = ()
    """Names of checks before this one in the list."""

    @property
    def layer(self) -> str:
        """The layer alone."""
        return self.name.rpartition(" ")[2]


def seconds_max(checks: Sequence[Check]) -> float:
    """Return how long all checks take at most."""
    ends: dict[str, float] = {}
    for check in checks:
        begins = max((ends[name] for name in check.needs), default=0.0)
        ends[check.name] = begins + check.seconds
    return max(ends.values(), default=0.0)


def examine(checks: Sequence[Check]) -> dict[str, Finding]:
    """Run all checks, and return what each found by its name, in the order of the list."""
    findings: dict[str, Finding] = {}
    waiting = list(checks)
    running: dict[str, tuple[Check, float]] = {}
    done: queue.SimpleQueue[tuple[str, Finding]] = queue.SimpleQueue()
    while waiting or running:
        for check in list(waiting):
            blocker = next((n for n in check.needs if n in findings and findings[n].blocks), None)
            if blocker is not None:
                before = findings[blocker]
                reason = before.found if before.is_unknown else f"{blocker} comes first"
                findings[check.name] = Finding(Status.SKIPPED, reason, is_unknown=True)
                waiting.remove(check)
            elif all(name in findings for name in check.needs):
                running[check.name] = (check, time.monotonic() + check.seconds)
                threading.Thread(target=_run, args=(check, done), daemon=True).start()
                waiting.remove(check)
        _collect(running, done, findings)
    return {check.name: findings[check.name] for check in checks}


def _run(check: Check, done: queue.SimpleQueue[tuple[str, Finding]]) -> None:
    try:
        finding = check.run()
    except Exception as error:  # a check that fails is a finding, and the others go on
        finding = failed(f"{type(error).__name__}: {error}", "see the message; else report it")
    done.put((check.name, finding))


def _collect(
    running: dict[str, tuple[Check, float]],
    done: queue.SimpleQueue[tuple[str, Finding]],
    findings: dict[str, Finding],
) -> None:
    """Wait for the next finding, or for the next deadline."""
    if not running:
        return
    check, ends_at = min(running.values(), key=lambda item: item[1])
    try:
        name, finding = done.get(timeout=max(0.0, ends_at - time.monotonic()))
    except queue.Empty:
        name, finding = check.name, failed(f"no answer in {check.seconds:g} s", check.silence)
    if running.pop(name, None) is not None:
        findings[name] = finding


def exit_code(findings: dict[str, Finding]) -> int:
    """Return 0, or the code of the first layer that failed."""
    for name, finding in findings.items():
        if finding.status is Status.FAILED:
            return EXIT_CODES[name.rpartition(" ")[2]]
    return 0


def doctor_command(
    role: str,
    settings: Callable[[], type[config.Settings]],
    checks: Callable[[Any], Sequence[Check]],
) -> Command:
    """Return the command that examines a node of a role; ``checks`` makes them of its settings, and
    raises a ``HetertrainError`` where settings do not go together.
    """

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print JSON")

    def run(arguments: argparse.Namespace) -> int:
        findings = _examine_part(arguments, settings(), checks)
        code = exit_code(findings)
        if arguments.json:
            rows = [
                {"layer": name, "status": f.status, "found": f.found, "advice": f.advice}
                for name, f in findings.items()
            ]
            sys.stdout.write(json.dumps({"exit_code": code, "findings": rows}, indent=2) + "\n")
        else:
            _print(role, findings)
        return code

    return Command(
        name=f"{role} doctor",
        help=f"find out what keeps this {role} from its fleet; disturbs no running one",
        run=run,
        add_arguments=add,
        settings=settings,
        checks_settings=True,
    )


def _examine_part(
    arguments: argparse.Namespace,
    settings_class: type[config.Settings],
    make_checks: Callable[[Any], Sequence[Check]],
) -> dict[str, Finding]:
    try:
        flags = config.flags_of(arguments, settings_class)
        settings = config.load(settings_class, flags, arguments.config).settings
        checks = make_checks(settings)
    except HetertrainError as error:
        advice = f"mend it; hetertrain config show {settings_class.section} shows them all"
        needs = Finding(Status.SKIPPED, "settings come first", is_unknown=True)
        return dict.fromkeys(EXIT_CODES, needs) | {"settings": failed(str(error), advice)}
    return {"settings": ok("complete")} | examine(checks)


def _print(role: str, findings: dict[str, Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    colours = {Status.OK: "green", Status.FAILED: "red", Status.SKIPPED: "dim"}
    table = Table(title=f"{role} doctor", title_justify="left")
    for column in ("layer", "status", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for name, finding in findings.items():
        colour = colours[finding.status]
        status = f"[{colour}]{finding.status}[/{colour}]"
        table.add_row(name, status, escape(finding.found), escape(finding.advice))
    Console().print(table)
