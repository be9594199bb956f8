"""Commands of the cloud."""

from __future__ import annotations

import argparse

from hetertrain.cli import Command
from hetertrain.config import Settings

NEEDS = ("safetensors", "torch")


def run_aggregator(arguments: argparse.Namespace) -> int:
    """Aggregate one job until stopped."""
    from hetertrain_cloud.service import AggregatorService

    return AggregatorService(arguments.settings).run()


def _settings() -> type[Settings]:
    from hetertrain_cloud.service import AggregatorSettings

    return AggregatorSettings


COMMANDS = (
    Command(
        name="aggregator",
        help="aggregate one job until stopped",
        run=run_aggregator,
        settings=_settings,
    ),
)
