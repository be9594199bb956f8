"""Commands of the vehicle."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetertrain.cli import Command, enrol_command
from hetertrain.config import Settings
from hetertrain.doctor import Check, doctor_command
from hetertrain.errors import SettingsError

if TYPE_CHECKING:
    from hetertrain_vehicle.agent import TrainerSource

NEEDS = ()
"""Whoever trains in a loop of their own may do without torch."""


def add_vehicle_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flag by which ``hetertrain.join`` hands over its end of the pipe."""
    parser.add_argument("--trainer-fd", type=int, help=argparse.SUPPRESS)


def run_vehicle(arguments: argparse.Namespace) -> int:
    """Be a vehicle's agent; it starts the trainer, or was started by it."""
    from hetertrain.config import forget_secrets
    from hetertrain_vehicle.agent import Agent

    settings = arguments.settings
    forget_secrets(type(settings))
    return Agent(settings, _trainers(arguments)).run()


def _trainers(arguments: argparse.Namespace) -> TrainerSource:
    import multiprocessing

    from hetertrain_vehicle.trainer_process import GivenTrainer, TrainerProcess

    settings = arguments.settings
    if arguments.trainer_fd is not None:
        return GivenTrainer.at(arguments.trainer_fd)
    if settings.task is None:
        raise SettingsError(
            "vehicle needs task: give --task, HETERTRAIN_VEHICLE_TASK, or task in [vehicle] of "
            "hetertrain.toml; or train in a loop of your own with hetertrain.join"
        )
    if importlib.util.find_spec("torch") is None:
        raise SettingsError("a task needs torch: pip install 'hetertrain[vehicle]'")
    return TrainerProcess(multiprocessing.get_context("spawn"), settings)


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``vehicle inspect``."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--values", type=int, default=0, metavar="N", help="print the first N values that are sent"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="train anew, though an update waits in the outbox"
    )
    parser.add_argument(
        "--steps", type=int, default=10, metavar="N", help="steps of a dry run (default: 10)"
    )
    parser.add_argument(
        "--content", type=Path, metavar="FILE", help="write the update there, as it is sent"
    )


def run_inspect(arguments: argparse.Namespace) -> int:
    """Show what would leave the vehicle; send nothing."""
    from hetertrain_vehicle import inspection

    if arguments.steps < 1 or arguments.values < 0:
        raise SettingsError("--steps must be 1 or more, and --values 0 or more")
    leaving = inspection.inspect(
        arguments.settings, steps=arguments.steps, is_dry_run=arguments.dry_run
    )
    if arguments.content is not None:
        arguments.content.write_bytes(leaving.content)
    report = inspection.describe(leaving, num_values=arguments.values)
    if arguments.json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        inspection.show(report)
    return 0


def _settings() -> type[Settings]:
    from hetertrain_vehicle.settings import VehicleSettings

    return VehicleSettings


def _checks(settings: Any) -> Sequence[Check]:
    from hetertrain_vehicle.checks import vehicle_checks

    return vehicle_checks(settings)


COMMANDS = (
    enrol_command("vehicle"),
    Command(
        name="vehicle",
        help="train on this vehicle's data until stopped",
        run=run_vehicle,
        add_arguments=add_vehicle_arguments,
        settings=_settings,
    ),
    doctor_command("vehicle", _settings, _checks),
    Command(
        name="vehicle inspect",
        help="show all that would leave this vehicle; send nothing",
        run=run_inspect,
        add_arguments=add_inspect_arguments,
        settings=_settings,
    ),
)
