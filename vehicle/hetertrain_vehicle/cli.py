"""Commands of the vehicle."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from hetertrain.cli import Command, enrol_command
from hetertrain.config import Settings
from hetertrain.doctor import Check, doctor_command

NEEDS = ("torch",)


def run_vehicle(arguments: argparse.Namespace) -> int:
    """Be a vehicle's agent; it starts the trainer."""
    import multiprocessing

    from hetertrain_vehicle.agent import Agent
    from hetertrain_vehicle.trainer_process import TrainerProcess

    settings = arguments.settings
    return Agent(settings, TrainerProcess(multiprocessing.get_context("spawn"), settings)).run()


def _settings() -> type[Settings]:
    from hetertrain_vehicle.agent import VehicleSettings

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
        settings=_settings,
    ),
    doctor_command("vehicle", _settings, _checks),
)
