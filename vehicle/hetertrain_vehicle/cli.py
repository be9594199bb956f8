"""Commands of the vehicle."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
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
)
