"""Commands of the cloud."""

from __future__ import annotations

import argparse

from hetertrain.cli import Command
from hetertrain.config import Settings

NEEDS = ("safetensors", "torch")
NOT_CLEAN = 1
"""The exit code where something is not what it should be."""


def run_aggregator(arguments: argparse.Namespace) -> int:
    """Aggregate one job until stopped."""
    from hetertrain_cloud.service import AggregatorService

    return AggregatorService(arguments.settings).run()


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the replay's flags."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )


def run_replay(arguments: argparse.Namespace) -> int:
    """Repeat a job's journal; say whether it gives the versions of its history."""
    import json
    import sys
    from dataclasses import asdict

    from hetertrain.task import layout_of, load_task
    from hetertrain_cloud.replay import replay

    settings = arguments.settings
    task = load_task(settings.task)
    found = replay(settings.directory, layout_of(task, task.model()))
    if arguments.json:
        sys.stdout.write(json.dumps(asdict(found) | {"is_clean": found.is_clean}, indent=2) + "\n")
    else:
        span = f"versions {found.first_version} to {found.last_version}, {found.updates} updates"
        faults = [f"version {version} is another model" for version in found.different]
        faults += [f"update {seq} of {node} was counted twice" for node, seq in found.repeated]
        faults += [f"{found.damaged} records of the journal are damaged"] if found.damaged else []
        summary = f"{span}: {'clean' if found.is_clean else 'NOT clean'}"
        sys.stdout.write("\n".join([summary, *faults]) + "\n")
    return 0 if found.is_clean else NOT_CLEAN


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
    Command(
        name="replay",
        help="repeat a job's journal and compare every version with its history",
        run=run_replay,
        add_arguments=add_replay_arguments,
        settings=_settings,
    ),
)
