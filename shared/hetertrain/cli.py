"""The one console script, ``hetertrain``: shows and runs the commands of the parts that are
installed.

Parts announce their commands by entry points (group ``hetertrain.commands``): modules that are
cheap to import, with the modules they need in ``NEEDS`` and their commands in ``COMMANDS``. A part
whose needs are not installed does not show.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from hetertrain import __version__, config
from hetertrain.errors import HetertrainError, SettingsError

GROUP = "hetertrain.commands"
INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One subcommand of a part."""

    name: str
    help: str
    run: Callable[[argparse.Namespace], int]
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None
    settings: Callable[[], type[config.Settings]] | None = None
    """Returns the settings class; it is imported only when the command is used."""
    checks_settings: bool = False
    """It loads its settings itself, and says what is wrong with them."""


def enrol_command(role: str) -> Command:
    """Return the command by which a node of a role joins a fleet."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--url", required=True, help="the control plane, https://HOST:PORT")
        claim = parser.add_mutually_exclusive_group(required=True)
        claim.add_argument("--claim", help="the claim; it is of no use once it is used up")
        claim.add_argument("--claim-file", type=Path, help="read the claim there")
        parser.add_argument("--node", required=True, help="this node's name")
        parser.add_argument("--job", help="the job to work on; needed where there are several")
        parser.add_argument(
            "--directory", type=Path, required=True, help="where key and settings are kept"
        )
        parser.add_argument(
            "--wait-seconds", type=float, default=600.0, help="wait so long for approval (600)"
        )

    return Command(
        name=f"{role} enroll", help=f"join a fleet as {role}", run=run_enrol, add_arguments=add
    )


def run_enrol(arguments: argparse.Namespace) -> int:
    """Join a fleet."""
    from hetertrain.enrolment import enrol

    claim = arguments.claim
    if arguments.claim_file is not None:
        claim = config.read_text(arguments.claim_file, "the claim").strip()
    enrolled = enrol(
        url=arguments.url,
        claim=claim,
        node=arguments.node,
        directory=arguments.directory,
        job=arguments.job,
        wait_seconds=arguments.wait_seconds,
        on_waiting=_say_waiting,
    )
    jobs = ", ".join(enrolled.jobs) or "none yet"
    sys.stderr.write(f"enrolled as {enrolled.node}; jobs: {jobs}\n")
    role = arguments.command.partition(" ")[0]
    sys.stdout.write(f"hetertrain {role} --config {enrolled.settings}\n")
    return 0


def _say_waiting() -> None:
    sys.stderr.write("waits to be approved …\n")


def installed_commands(only: str | None = None) -> dict[str, Command]:
    """Return the commands of the parts, or ``only`` that part, whose needs are installed."""
    commands: dict[str, Command] = {}
    for entry_point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        if only not in (None, entry_point.name):
            continue
        part = entry_point.load()
        if all(importlib.util.find_spec(module) for module in part.NEEDS):
            commands |= {command.name: command for command in part.COMMANDS}
    return commands


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; typed errors become one line and their exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    commands = _commands_for(words)
    arguments = _join(words, commands)
    namespace = argparse.Namespace(log_level="info")
    try:
        namespace = _parse(arguments, commands)
        _load_settings(namespace, commands)
        from hetertrain import logging  # Help and errors do not wait for its library.

        logging.configure(namespace.log_level, json=namespace.log_json)
        return int(namespace.run(namespace))
    except HetertrainError as error:
        if namespace.log_level == "debug":
            traceback.print_exc()
        sys.stderr.write(f"error[{error.code}]: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def _commands_for(words: list[str]) -> dict[str, Command]:
    """Return all commands, or where a part is named like the first word, those of that part: an
    agent does not load, and keep, what is the cloud's.
    """
    own = installed_commands(words[0]) if words else {}
    return own if words and words[0] in own else installed_commands()


def _join(arguments: list[str], commands: dict[str, Command]) -> list[str]:
    """Make the words of a command of two words one."""
    pair = " ".join(arguments[:2])
    return [pair, *arguments[2:]] if pair in commands else arguments


def _parse(arguments: list[str], commands: dict[str, Command]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hetertrain",
        description="Semi-asynchronous training over vehicles, gateways and a cloud, over MQTT.",
        epilog="More parts: pip install 'hetertrain[vehicle]', [edge], [cloud] or [lab].",
    )
    parser.add_argument("--version", action="version", version=f"hetertrain {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    used = next((word for word in arguments if not word.startswith("-")), None)
    if used is not None and used not in (*commands, "config", "completion"):
        known = [name for name in commands if name.startswith(f"{used} ")]
        known = known or [*commands, "config", "completion"]
        raise SettingsError(
            f"unknown command {used}; installed: {', '.join(known)}. Other parts come with "
            "pip install 'hetertrain[vehicle]', [edge], [cloud] or [lab]"
        )
    for name, command in commands.items():
        subparser = subparsers.add_parser(name, help=command.help, description=command.help)
        _add_common(subparser)
        if command.add_arguments is not None:
            command.add_arguments(subparser)
        if command.settings is not None:
            subparser.add_argument(
                "--config", type=Path, metavar="FILE", help="settings file (TOML)"
            )
            if used in (name, "completion"):
                config.add_flags(subparser, command.settings())
        subparser.set_defaults(run=command.run)
    _add_config(subparsers, commands)
    _add_completion(subparsers)
    return parser.parse_args(arguments)


def _load_settings(namespace: argparse.Namespace, commands: dict[str, Command]) -> None:
    chosen = commands.get(namespace.command)
    if chosen is not None and chosen.settings is not None and not chosen.checks_settings:
        settings_class = chosen.settings()
        flags = config.flags_of(namespace, settings_class)
        namespace.settings = config.load(settings_class, flags, namespace.config).settings


def _add_common(parser: argparse.ArgumentParser) -> None:
    levels = ("debug", "info", "warning", "error")
    parser.add_argument("--log-level", choices=levels, default="info", help="least level to log")
    parser.add_argument("--log-json", action="store_true", help="log one JSON object per line")


def _add_config(subparsers: Any, commands: dict[str, Command]) -> None:
    parser = subparsers.add_parser("config", help="show the settings and where each comes from")
    actions = parser.add_subparsers(dest="action", metavar="show", required=True)
    show = actions.add_parser("show", help="show the settings and where each comes from")
    with_settings = {
        name: c.settings
        for name, c in commands.items()
        if c.settings is not None and not _is_of_part(name, c, commands)
    }
    show.add_argument("part", nargs="?", choices=sorted(with_settings), help="one part only")
    show.add_argument("--config", type=Path, metavar="FILE", help="settings file (TOML)")
    show.add_argument("--json", action="store_true", help="print JSON")
    _add_common(show)

    def run(namespace: argparse.Namespace) -> int:
        parts = {n: c() for n, c in with_settings.items() if namespace.part in (None, n)}
        rows = {name: _origins(part, namespace.config) for name, part in parts.items()}
        if namespace.json:
            sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        else:
            _print_origins(rows)
        return 0

    show.set_defaults(run=run)


def _is_of_part(name: str, command: Command, commands: dict[str, Command]) -> bool:
    """Tell whether a command of two words has its part's settings: those are shown once."""
    part = commands.get(name.rpartition(" ")[0])
    return part is not None and part.settings is command.settings


def _add_completion(subparsers: Any) -> None:
    parser = subparsers.add_parser("completion", help="print a script for the shell's completion")
    parser.add_argument("shell", choices=("bash", "zsh"), help="eval its output in your profile")
    _add_common(parser)

    def run(namespace: argparse.Namespace) -> int:
        from hetertrain.completion import bash_completion

        if namespace.shell == "zsh":
            sys.stdout.write("autoload -U +X bashcompinit && bashcompinit\n")
        sys.stdout.write(bash_completion(subparsers.choices))
        return 0

    parser.set_defaults(run=run)


def _origins(settings_class: type[config.Settings], file: Path | None) -> list[dict[str, str]]:
    found = config.given(settings_class, {}, file)
    rows = []
    for name, info in settings_class.model_fields.items():
        value = found.values.get(name, info.default)
        text = "" if value is None else str(value)
        origin = found.origins.get(name, "default")
        if name not in found.values and info.is_required():
            text, origin = "", "missing"
        if config.is_secret(info) and text:
            text = "**********"
        flag = "" if config.is_secret(info) else config.flag_name(name)
        variable = config.variable_name(settings_class, name)
        rows.append(
            {"setting": name, "value": text, "origin": origin, "flag": flag, "variable": variable}
        )
    return rows


def _print_origins(rows: dict[str, list[dict[str, str]]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    for name, settings in rows.items():
        table = Table(title=name, title_justify="left")
        # A flag is the setting's name with dashes, so it needs no column of its own.
        columns = ("setting", "value", "origin", "variable")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in settings:
            table.add_row(*(escape(row[column]) for column in columns))
        console.print(table)
