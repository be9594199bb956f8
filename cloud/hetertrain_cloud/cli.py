"""Commands of the cloud."""

from __future__ import annotations

import argparse

from hetertrain.cli import Command
from hetertrain.config import Settings

NEEDS = ("safetensors", "torch", "fastapi")
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

    from hetertrain_cloud.replay import replay

    settings = arguments.settings
    layout = settings.beginning(on_result=lambda _: None).layout
    found = replay(settings.directory, layout)
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


def run_cloud(arguments: argparse.Namespace) -> int:
    """Be the cloud side until stopped."""
    from hetertrain_cloud.control.supervisor import Supervisor

    return Supervisor(arguments.settings).run()


def add_broker_files_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the broker's files."""
    from pathlib import Path

    parser.add_argument("--to", type=Path, required=True, help="the folder to write into")
    parser.add_argument(
        "--broker-hosts", required=True, metavar="HOSTS", help="the broker's names and addresses"
    )


def run_broker_files(arguments: argparse.Namespace) -> int:
    """Write certificates and first access rights for a Mosquitto."""
    import sys

    from hetertrain_cloud.control.authority import Authority
    from hetertrain_cloud.control.credentials import write_broker_files
    from hetertrain_cloud.control.service import now

    settings = arguments.settings
    authority = Authority(settings.authority, now(), settings.authority_passphrase_file)
    hosts = tuple(host.strip() for host in arguments.broker_hosts.split(",") if host.strip())
    written = write_broker_files(authority, arguments.to, hosts, now())
    sys.stderr.write(f"{arguments.to}: wrote {', '.join(written) or 'nothing: all is there'}\n")
    return 0


def _cloud_settings() -> type[Settings]:
    from hetertrain_cloud.control.settings import CloudSettings

    return CloudSettings


def _settings() -> type[Settings]:
    from hetertrain_cloud.service import AggregatorSettings

    return AggregatorSettings


COMMANDS = (
    Command(
        name="cloud",
        help="run the cloud side: control plane, and an aggregator for each job",
        run=run_cloud,
        settings=_cloud_settings,
    ),
    Command(
        name="broker files",
        help="write certificates and first access rights for a Mosquitto",
        run=run_broker_files,
        add_arguments=add_broker_files_arguments,
        settings=_cloud_settings,
    ),
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
