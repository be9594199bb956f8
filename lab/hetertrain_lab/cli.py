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
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from hetertrain.cli import Command
from hetertrain.config import Settings
from hetertrain.errors import SettingsError

if TYPE_CHECKING:
    from hetertrain_lab.page import Rows

NEEDS = ("torch", "iotcore", "safetensors", "matplotlib")
PIPED_COLUMNS = 150
"""The width of wide tables that go to a file."""
VEHICLES, VEHICLES_WITH_CONSOLE = 12, 8
SECONDS = 60.0
"""The demo trains for so long."""
VIOLATED = 1
"""Exit code of a simulation in which a promise was broken."""


def add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the demo's flags."""
    parser.add_argument(
        "--task", choices=("driving", "digits"), default="driving", help="what is learnt"
    )
    parser.add_argument(
        "--vehicles", type=_at_least(2), metavar="N", help="vehicles (12; with a console 8)"
    )
    parser.add_argument("--edges", type=_at_least(0), default=2, metavar="M", help="gateways (2)")
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="training time (60; with a console: no end)"
    )
    parser.add_argument(
        "--seed", type=_at_least(0), default=1, metavar="K", help="seeds everything (1)"
    )
    parser.add_argument("--no-baseline", action="store_true", help="leave out the synchronous run")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="where results go (runs/demo; with a console nothing is kept)",
    )
    parser.add_argument(
        "--console", action="store_true", help="show the fleet in the admin console, until Ctrl-C"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )


def run_demo(arguments: argparse.Namespace) -> int:
    """Run the main job and print or show what came out."""
    if arguments.console:
        return _run_console_demo(arguments)
    from hetertrain_lab import demo

    settings = demo.DemoSettings(
        task=arguments.task,
        num_vehicles=arguments.vehicles or VEHICLES,
        num_edges=arguments.edges,
        seconds=arguments.seconds or SECONDS,
        seed=arguments.seed,
        has_baseline=not arguments.no_baseline,
        directory=arguments.output or Path("runs/demo"),
        is_quiet=arguments.json,
    )
    results = demo.run_demo(settings)
    if arguments.json:
        plain = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(settings).items()}
        _print_json("demo", plain, results)
    return 0


def _run_console_demo(arguments: argparse.Namespace) -> int:
    from hetertrain_lab import console_demo

    settings = console_demo.ConsoleDemoSettings(
        directory=arguments.output and arguments.output / "console",
        task=arguments.task,
        num_vehicles=arguments.vehicles or VEHICLES_WITH_CONSOLE,
        num_edges=arguments.edges,
        seed=arguments.seed,
    )

    def show(demo: console_demo.ConsoleDemo) -> None:
        if arguments.json:
            where = {"url": demo.url, "name": demo.name, "password": demo.password}
            _print_json("demo", {"console": True}, where)
            sys.stdout.flush()
        else:
            # Who sets a time is a program, or looks already.
            console_demo.show_console(demo, opens_browser=arguments.seconds is None)

    console_demo.run_console_demo(settings, arguments.seconds, show)
    return 0


def run_broker(arguments: argparse.Namespace) -> int:
    """Be the embedded broker until interrupted."""
    from hetertrain.service import Mailbox
    from hetertrain.transport.broker import EmbeddedBroker

    mailbox: Mailbox[None] = Mailbox()
    mailbox.stop_on_signals()
    with tempfile.TemporaryDirectory(prefix="hetertrain-broker-") as directory:
        settings = arguments.settings
        with EmbeddedBroker(Path(directory), settings.port) as broker:
            sys.stderr.write(f"broker listens on {broker.host}:{broker.port}\n")
            while mailbox.take(time.monotonic() + 3600.0) is None:
                continue
    return 0


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the simulator's flags."""
    from hetertrain.core.policy import SYNC_PRESETS

    parser.add_argument("scenario", type=Path, nargs="?", help="what to simulate (TOML)")
    parser.add_argument(
        "--seed", type=_at_least(0), default=1, metavar="K", help="decides all chance (1)"
    )
    parser.add_argument("--policy", choices=sorted(SYNC_PRESETS), help="replaces the scenario's")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a page with plots (HTML)")
    parser.add_argument(
        "--fuzz", type=_at_least(1), metavar="N", help="try N random scenarios, from --seed on"
    )
    parser.add_argument(
        "--drop", default="", metavar="NAMES", help="leave out troubles of a random scenario"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )


def run_simulate(arguments: argparse.Namespace) -> int:
    """Simulate a scenario, or random ones."""
    if arguments.fuzz is not None:
        return _fuzz(arguments)
    if arguments.scenario is None:
        raise SettingsError("name a scenario file, or try random ones with --fuzz N")
    from rich.console import Console

    from hetertrain_lab.page import terminal_table
    from hetertrain_lab.progress import track
    from hetertrain_lab.scenario import load_scenario
    from hetertrain_lab.simulation_report import result_rows, write_simulation_page
    from hetertrain_lab.simulator import simulate

    scenario = load_scenario(arguments.scenario)
    if arguments.policy is not None:
        scenario = scenario.model_copy(update={"policy": arguments.policy})
    with track(f"simulate {scenario.name}", scenario.seconds) as on_progress:
        result = simulate(scenario, arguments.seed, on_progress=on_progress)
    if arguments.plot is not None:
        write_simulation_page(arguments.plot, result)
    if arguments.json:
        settings = scenario.model_dump(mode="json", exclude_defaults=True)
        _print_json("simulate", settings | {"seed": arguments.seed}, asdict(result))
    else:
        Console().print(terminal_table(result_rows(result)))
    return 0


def _fuzz(arguments: argparse.Namespace) -> int:
    from hetertrain_lab.fuzz import fuzz_one, minimise, parse_drops
    from hetertrain_lab.progress import track

    drops = parse_drops(arguments.drop)
    with track("fuzz", arguments.fuzz) as on_progress:
        for done in range(arguments.fuzz):
            failure = fuzz_one(arguments.seed + done, drops)
            if failure is not None:
                break
            on_progress(done + 1)
    if failure is not None:
        failure = minimise(failure)
        sys.stderr.write(f"seed {failure.seed}: {failure.message}\nreplay: {failure.replay}\n")
    if arguments.json:
        found = None if failure is None else asdict(failure)
        settings = {"seed": arguments.seed, "scenarios": arguments.fuzz}
        _print_json("fuzz", settings, {"failure": found})
    elif failure is None:
        sys.stdout.write(f"{arguments.fuzz} scenarios from seed {arguments.seed}: all held\n")
    return VIOLATED if failure is not None else 0


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmarks' flags."""
    parser.add_argument("name", choices=sorted(BENCHES), help="what to measure")
    parser.add_argument("--quick", action="store_true", help="less of it, in a few minutes")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="where plots go (runs/bench/NAME)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )


def run_bench(arguments: argparse.Namespace) -> int:
    """Run a benchmark."""
    output = arguments.output or Path("runs/bench") / arguments.name
    results = BENCHES[arguments.name](arguments, output)
    if arguments.json:
        _print_json(arguments.name, {"quick": arguments.quick}, results)
    return 0


def _show(arguments: argparse.Namespace, *tables: Rows) -> None:
    """Print tables, unless JSON is asked for."""
    from rich.console import Console

    from hetertrain_lab.page import terminal_table

    if arguments.json:
        return
    console = Console(width=None if sys.stdout.isatty() else PIPED_COLUMNS)
    for table in tables:
        console.print(terminal_table(table))


def _bench_speedup(arguments: argparse.Namespace, output: Path) -> dict[str, Any]:
    from hetertrain_lab import speedup
    from hetertrain_lab.progress import track
    from hetertrain_lab.speedup_report import scenario_rows, write_speedup_page

    with track("speedup", 1.0) as on_progress:
        entries, figures = speedup.run_speedup(
            is_quick=arguments.quick,
            on_progress=on_progress,
            partial=output / "entries.jsonl",
        )
    page = write_speedup_page(output, entries, figures)
    results: dict[str, Any] = {**figures, "entries": speedup.as_plain(entries), "page": str(page)}
    (output / "speedup.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    _show(arguments, *(scenario_rows(scenario, entries) for scenario in figures))
    if not arguments.json:
        sys.stdout.write(f"plots and all trials: {page}\n")
    return results


def _bench_fidelity(arguments: argparse.Namespace, output: Path) -> dict[str, Any]:
    from hetertrain_lab.fidelity import fidelity_rows, run_fidelity
    from hetertrain_lab.progress import track

    with track("fidelity", 1.0) as on_progress:
        measures = run_fidelity(output, on_progress)
    _show(arguments, fidelity_rows(measures))
    results: dict[str, Any] = {name: asdict(measure) for name, measure in measures.items()}
    return results | {"ratios": measures["processes"].ratios(measures["simulator"])}


def _bench_codec(arguments: argparse.Namespace, _output: Path) -> dict[str, Any]:
    from hetertrain_lab.codec_bench import codec_rows, figures, run_codec
    from hetertrain_lab.progress import track

    with track("codec", 1.0) as on_progress:
        found = run_codec(is_quick=arguments.quick, on_progress=on_progress)
    _show(arguments, *(codec_rows(kind, measures) for kind, measures in found.items()))
    fastest = next(iter(found))
    by_kind = {kind: [asdict(m) for m in measures] for kind, measures in found.items()}
    results: dict[str, Any] = {**figures(found[fastest])}
    return results | {
        "kernels": fastest,
        "by_kernels": {kind: figures(measures) for kind, measures in found.items()},
        "measures": by_kind,
    }


def _bench_wire(arguments: argparse.Namespace, _output: Path) -> dict[str, Any]:
    from hetertrain_lab.progress import track
    from hetertrain_lab.wire_bench import figures, run_wire, wire_rows

    with track("wire", 1.0) as on_progress:
        measures = run_wire(is_quick=arguments.quick, on_progress=on_progress)
    _show(arguments, wire_rows(measures))
    return {**figures(measures), "measures": [asdict(m) for m in measures]}


def _bench_aggregate(arguments: argparse.Namespace, output: Path) -> dict[str, Any]:
    from hetertrain_lab.aggregate_bench import aggregate_rows, figures, run_aggregate
    from hetertrain_lab.progress import track

    with track("aggregate", 1.0) as on_progress:
        measures = run_aggregate(output, is_quick=arguments.quick, on_progress=on_progress)
    _show(arguments, aggregate_rows(measures))
    return {**figures(measures), "measures": [asdict(m) for m in measures]}


def _bench_transfer(arguments: argparse.Namespace, output: Path) -> dict[str, Any]:
    from hetertrain_lab.progress import track
    from hetertrain_lab.transfer_bench import run_transfer, transfer_rows

    with track("transfer", 1.0) as on_progress:
        measure = run_transfer(output, is_quick=arguments.quick, on_progress=on_progress)
    _show(arguments, transfer_rows(measure))
    return asdict(measure)


def _bench_control(arguments: argparse.Namespace, output: Path) -> dict[str, Any]:
    from hetertrain_lab.control_bench import control_rows, run_control
    from hetertrain_lab.progress import track

    url = os.environ.get("HETERTRAIN_CLOUD_DATABASE_URL")
    with track("control", 1.0) as on_progress:
        measure = run_control(output, is_quick=arguments.quick, url=url, on_progress=on_progress)
    _show(arguments, control_rows(measure))
    return asdict(measure) | {"slowest_median_ms": max(p.median_ms for p in measure.pages)}


def _bench_console(arguments: argparse.Namespace, output: Path) -> dict[str, Any]:
    from hetertrain_lab.console_bench import console_rows, run_console
    from hetertrain_lab.progress import track

    with track("console", 1.0) as on_progress:
        measure = run_console(output, is_quick=arguments.quick, on_progress=on_progress)
    _show(arguments, console_rows(measure))
    return asdict(measure)


def _bench_agent(arguments: argparse.Namespace, output: Path) -> dict[str, Any]:
    from hetertrain_lab.agent_bench import agent_rows, run_agent
    from hetertrain_lab.progress import track

    output.mkdir(parents=True, exist_ok=True)
    with track("agent", 1.0) as on_progress:
        measure = run_agent(output, is_quick=arguments.quick, on_progress=on_progress)
    _show(arguments, agent_rows(measure))
    return asdict(measure)


def _bench_edge(arguments: argparse.Namespace, output: Path) -> dict[str, Any]:
    from hetertrain_lab.edge_bench import figures, load_rows, run_edge, saving_rows
    from hetertrain_lab.progress import track

    with track("edge", 1.0) as on_progress:
        savings, loads = run_edge(output, is_quick=arguments.quick, on_progress=on_progress)
    _show(arguments, saving_rows(savings))
    _show(arguments, load_rows(loads))
    measures = {"savings": [asdict(s) for s in savings], "loads": [asdict(each) for each in loads]}
    return figures(savings, loads) | measures


BENCHES: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
    "speedup": _bench_speedup,
    "fidelity": _bench_fidelity,
    "codec": _bench_codec,
    "wire": _bench_wire,
    "aggregate": _bench_aggregate,
    "transfer": _bench_transfer,
    "control": _bench_control,
    "console": _bench_console,
    "agent": _bench_agent,
    "edge": _bench_edge,
}
"""Benchmarks by name; each returns its results and shows them, unless JSON is asked for."""


def _print_json(name: str, settings: dict[str, Any], results: dict[str, Any]) -> None:
    machine = {"architecture": platform.machine(), "cores": os.cpu_count()}
    document = {"name": name, "settings": settings, "machine": machine, "results": results}
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def _broker_settings() -> type[Settings]:
    return EmbeddedBrokerSettings


class EmbeddedBrokerSettings(Settings):
    """Settings of the embedded broker."""

    section: ClassVar[str] = "broker"

    port: int = Field(1883, ge=0, le=65535, description="TCP port on loopback; 0: a free one")


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
        name="simulate",
        help="run a fleet in virtual time, deterministically, and check every promise",
        run=run_simulate,
        add_arguments=add_simulate_arguments,
    ),
    Command(
        name="bench",
        help="measure something, against its limit or against others",
        run=run_bench,
        add_arguments=add_bench_arguments,
    ),
    Command(
        name="broker",
        help="run the embedded broker on loopback, for trying things on one machine",
        run=run_broker,
        settings=_broker_settings,
    ),
)
