"""Commands of the vehicle."""

from __future__ import annotations

import argparse

from hetertrain.cli import Command, enrol_command
from hetertrain.config import Settings

NEEDS = ("torch",)


def run_vehicle(arguments: argparse.Namespace) -> int:
    """Start the trainer process and be its agent."""
    import multiprocessing

    from hetertrain_vehicle.agent import Agent, VehicleSettings
    from hetertrain_vehicle.trainer_process import start_trainer

    settings: VehicleSettings = arguments.settings
    process, pipe = start_trainer(multiprocessing.get_context("spawn"), settings)
    try:
        return Agent(settings, pipe).run()
    finally:
        pipe.close()
        process.join(5.0)
        if process.is_alive():
            process.kill()


def _settings() -> type[Settings]:
    from hetertrain_vehicle.agent import VehicleSettings

    return VehicleSettings


COMMANDS = (
    enrol_command("vehicle"),
    Command(
        name="vehicle",
        help="train on this vehicle's data until stopped",
        run=run_vehicle,
        settings=_settings,
    ),
)
