"""What a vehicle's doctor looks at: its task, the node itself, and the link to its broker."""

from __future__ import annotations

import subprocess
import sys

from hetertrain.checks_link import Link, link_checks
from hetertrain.checks_node import control_check, node_checks
from hetertrain.core.tiers import TIERS
from hetertrain.doctor import Check, Finding, failed, ok
from hetertrain.wire.uplink import Uplink
from hetertrain_vehicle.settings import VehicleSettings

TASK_SECONDS = 24.0
SPARE_SECONDS = 1.0
_IMPORT = "import sys; from hetertrain.task import load_task; load_task(sys.argv[1])"


def vehicle_checks(settings: VehicleSettings) -> list[Check]:
    """Return a vehicle's checks.

    Raises:
        SettingsError: settings do not go together.
    """
    state = settings.state()
    uplink = Uplink(state, TIERS[state.tier])
    host, port = settings.broker_of(settings.cell)
    link = Link(
        host=host,
        port=port,
        endpoint=lambda: settings.endpoint_in(settings.cell),
        # The last: whether another process is at work in its name, a vehicle hears there.
        subscriptions=(*uplink.subscriptions, uplink.will.topic),
        publications=uplink.publications,
    )
    task = Check(
        name="task",
        run=lambda: _check_task(settings.task),
        seconds=TASK_SECONDS,
        silence="see what the task's module does when it is imported",
    )
    node = node_checks(settings, settings.node, settings.directory)
    return [task, *node, *link_checks(link), control_check(settings)]


def _check_task(task: str | None) -> Finding:
    """Import the task and build it, in a process of its own, as a trainer does."""
    if task is None:
        return ok("there is none: this vehicle trains in a loop of its own")
    advice = "check task and PYTHONPATH, and that what the task imports is installed"
    seconds = TASK_SECONDS - SPARE_SECONDS
    try:
        done = subprocess.run(  # noqa: S603  # our own interpreter, and the task that we would run
            [sys.executable, "-P", "-c", _IMPORT, task],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return failed(f"{task} was not imported within {seconds:g} s", advice)
    if done.returncode == 0:
        return ok(f"{task} can be imported")
    last = (done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"])[-1]
    return failed(last.removeprefix("hetertrain.errors.TaskError: ")[:500], advice)
