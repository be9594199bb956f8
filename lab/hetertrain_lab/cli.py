"""Commands of the lab."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from hetertrain.cli import Command
from hetertrain.config import Settings

NEEDS = ("torch", "iotcore", "safetensors", "matplotlib")


def add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the demo's flags."""
    parser.add_argument(
        "--task", choices=("driving", "digits"), default="driving", help="what is learnt"
    )
    parser.add_argument(
        "--vehicles", type=_at_least(2), default=12, metavar="N", help="vehicles (12)"
    )
    parser.add_argument("--edges", type=_at_least(0), default=2, metavar="M", help="gateways (2)")
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="training time (60)"
    )
    parser.add_argument(
        "--seed", type=_at_least(0), default=1, metavar="K", help="seeds everything (1)"
    )
    parser.add_argument("--no-baseline", action="store_true", help="leave out the synchronous run")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/demo"),
        metavar="DIR",
        help="where results go (runs/demo)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )


def run_demo(arguments: argparse.Namespace) -> int:
    """Run the main job and print or show what came out."""
    from hetertrain_lab import demo

    settings = demo.DemoSettings(
        task=arguments.task,
        num_vehicles=arguments.vehicles,
        num_edges=arguments.edges,
        seconds=arguments.seconds,
        seed=arguments.seed,
        has_baseline=not arguments.no_baseline,
        directory=arguments.output,
        is_quiet=arguments.json,
    )
    results = demo.run_demo(settings)
    if arguments.json:
        plain = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(settings).items()}
        machine = {"architecture": platform.machine(), "cores": os.cpu_count()}
        document = {"name": "demo", "settings": plain, "machine": machine, "results": results}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    return 0


def run_broker(arguments: argparse.Namespace) -> int:
    """Be the embedded broker until interrupted."""
    from hetertrain.service import Mailbox
    from hetertrain_lab.broker import EmbeddedBroker

    mailbox: Mailbox[None] = Mailbox()
    mailbox.stop_on_signals()
    with tempfile.TemporaryDirectory(prefix="hetertrain-broker-") as directory:
        settings = arguments.settings
        with EmbeddedBroker(Path(directory), settings.port) as broker:
            sys.stderr.write(f"broker listens on {broker.host}:{broker.port}\n")
            while mailbox.take(time.monotonic() + 3600.0) is None:
                continue
    return 0


def _broker_settings() -> type[Settings]:
    from hetertrain_lab.broker import EmbeddedBrokerSettings

    return EmbeddedBrokerSettings


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}")
        return value

    return parse


COMMANDS = (
    Command(
        name="demo",
        help="train a fleet of real processes on this machine, and write a report",
        run=run_demo,
        add_arguments=add_demo_arguments,
    ),
    Command(
        name="broker",
        help="run the embedded broker on loopback, for trying things on one machine",
        run=run_broker,
        settings=_broker_settings,
    ),
)
