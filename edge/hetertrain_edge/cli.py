"""Commands of the edge gateway."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from hetertrain.cli import Command, enrol_command
from hetertrain.config import Settings
from hetertrain.doctor import Check, doctor_command

NEEDS = ("iotcore",)


def run_edge(arguments: argparse.Namespace) -> int:
    """Be the gateway of one cell until stopped."""
    from hetertrain_edge.service import EdgeService

    log_flags = ["--log-level", arguments.log_level, *(["--log-json"] * arguments.log_json)]
    return EdgeService(arguments.settings, log_flags).run()


def _settings() -> type[Settings]:
    from hetertrain_edge.service import EdgeSettings

    return EdgeSettings


def _checks(settings: Any) -> Sequence[Check]:
    from hetertrain_edge.checks import edge_checks

    return edge_checks(settings)


COMMANDS = (
    enrol_command("edge"),
    Command(
        name="edge",
        help="be the gateway of one cell until stopped",
        run=run_edge,
        settings=_settings,
    ),
    doctor_command("edge", _settings, _checks),
)
