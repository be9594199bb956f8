"""A live fleet with its control plane and console on this machine, to be looked at in a browser.

Everything is made as an operator would make it: the first admin by the one-time token, nodes by
claims, the job by the API. Two vehicles may train only while they charge, which comes and goes, and
one waits to be let in, so that the console has something to explain. All is forgotten at the end
where no directory is given.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import tempfile
import threading
import time
import webbrowser
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from hetertrain.control import ControlClient
from hetertrain.enrolment import enrol
from hetertrain.errors import ControlError, HetertrainError
from hetertrain_cloud.control.authority import CERTIFICATE_FILE
from hetertrain_cloud.control.service import BOOTSTRAP_FILE
from hetertrain_cloud.control.settings import CloudSettings
from hetertrain_cloud.control.supervisor import Supervisor
from hetertrain_lab.demo import TASKS, Interruption, forget_earlier_run
from hetertrain_lab.fleet import Fleet, FleetPlan, fork_server, run_part
from hetertrain_vehicle.settings import VehicleSettings

ADMIN = "admin"
PORT = 8443
"""Of the console, where it is free."""
STEP_SECONDS = {"driving": 0.05, "digits": 0.12}
"""Duration of a step on the fastest vehicle; the browser needs some of this machine, too."""
START_SECONDS_MAX = 90.0
STOP_SECONDS_MAX = 20.0
LOOK_SECONDS = 0.5
CHARGE_SECONDS = 20.0
CHARGING = "Vehicle.Powertrain.TractionBattery.Charging.IsCharging"
REGIONS = ("north", "south")
OWNER = "<b>owner</b>"
"""A label that would be markup, were it not shown as text."""
NEWCOMER = "vehicle-new"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleDemoSettings:
    """What the demo runs."""

    directory: Path | None = None
    """Where all is kept; None: in one that is deleted at the end."""
    task: str = "driving"
    num_vehicles: int = 8
    num_edges: int = 2
    seed: int = 1


class ConsoleDemo:
    """A fleet, its cloud side and its console, for the time of a ``with`` block."""

    def __init__(self, settings: ConsoleDemoSettings) -> None:
        self._own = ExitStack()
        if settings.directory is None:
            temporary = tempfile.TemporaryDirectory(prefix="hetertrain-demo-")
            self._directory = Path(self._own.enter_context(temporary))
        else:
            self._directory = settings.directory.resolve()
            forget_earlier_run(self._directory)
        self._cloud: BaseProcess | None = None
        broker_port, port = free_port(), PORT if is_free(PORT) else free_port()
        self._cloud_settings = CloudSettings(
            state_directory=self._directory / "cloud", broker_port=broker_port, listen_port=port
        )
        self._plan = FleetPlan(
            job=settings.task,
            task=TASKS[settings.task],
            policy="sap",
            num_vehicles=settings.num_vehicles,
            num_edges=settings.num_edges,
            seed=settings.seed,
            step_seconds=STEP_SECONDS[settings.task],
            host="127.0.0.1",
            port=broker_port,
            directory=self._directory / "fleet",
        )
        self._fleet = Fleet(self._plan)
        self.url = f"https://localhost:{port}"
        self.name = ADMIN
        self.password = "-".join(secrets.token_hex(2) for _ in range(4))
        """Of the admin, new each time."""

    def __enter__(self) -> ConsoleDemo:
        try:
            self._start()
        except BaseException:
            self._own.close()
            raise
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._own.close()

    def dead(self) -> list[str]:
        """Return the names of parts that ended by themselves."""
        is_cloud_dead = self._cloud is not None and not self._cloud.is_alive()
        return [*(["cloud"] if is_cloud_dead else []), *self._fleet.dead()]

    @property
    def logs(self) -> Path:
        """The folder with the log of each part."""
        return self._plan.directory / "logs"

    def _start(self) -> None:
        self._start_cloud()
        client = ControlClient(self.url, authority_pem=self._authority())
        operator = Operator(self._own.enter_context(client))
        operator.begin(self._bootstrap_token(), self.name, self.password)
        self._enrol(operator)
        operator.send("/jobs", {"name": self._plan.job, "specification": {"task": self._plan.task}})
        operator.send(f"/jobs/{self._plan.job}/start")
        self._own.callback(self._fleet.stop)
        for edge in self._plan.edges():
            self._fleet.start_edge(edge)
        charging = self._plan.vehicles()[1::3][:2]
        for vehicle in self._plan.vehicles():
            held = vehicle in charging
            self._fleet.start_vehicle(self._held(vehicle) if held else vehicle)
        chargers = [self._signals(vehicle) for vehicle in charging]
        self._own.enter_context(Chargers(chargers))

    def _start_cloud(self) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        self._cloud = fork_server().Process(
            target=run_part,
            args=(self.logs / "cloud.log", run_cloud, self._cloud_settings),
            name="cloud",
            daemon=False,  # it has children
        )
        self._cloud.start()
        self._own.callback(end, self._cloud)
        address = ("127.0.0.1", self._cloud_settings.listen_port)
        self._wait(lambda: is_open(address), "the control plane")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        give_up_at = time.monotonic() + START_SECONDS_MAX
        while not condition():
            if self.dead() or time.monotonic() > give_up_at:
                raise HetertrainError(f"{what} did not start: see {self.logs}")
            threading.Event().wait(LOOK_SECONDS / 5)

    def _authority(self) -> str:
        return (self._cloud_settings.authority / CERTIFICATE_FILE).read_text(encoding="ascii")

    def _bootstrap_token(self) -> str:
        return (self._cloud_settings.directory / BOOTSTRAP_FILE).read_text(encoding="ascii")

    def _enrol(self, operator: Operator) -> None:
        """Let all nodes join: by region, one with a label of its own, one that has to wait."""
        directory = self._directory / "nodes"
        names = [vehicle.node for vehicle in self._plan.vehicles()]
        owned, *others = names
        edges = [edge.node for edge in self._plan.edges()]
        groups: list[tuple[str, list[str], dict[str, str]]] = [
            ("vehicle", others[index :: len(REGIONS)], {"region": region})
            for index, region in enumerate(REGIONS)
        ]
        groups.append(("vehicle", [owned], {"region": REGIONS[0], "owner": OWNER}))
        groups.append(("edge", edges, {"site": "roadside"}))
        for role, nodes, labels in groups:
            if nodes:
                claim = operator.claim(role=role, labels=labels, uses=len(nodes) + 2)
                for node in nodes:
                    join(self.url, claim, node, directory)
        claim = operator.claim(role="vehicle", labels={"region": REGIONS[1]}, needs_approval=True)
        join(self.url, claim, NEWCOMER, directory)

    def _signals(self, vehicle: VehicleSettings) -> Path:
        return self._directory / "signals" / f"{vehicle.node}.json"

    def _held(self, vehicle: VehicleSettings) -> VehicleSettings:
        """Let a vehicle train only while it charges."""
        rules = {
            "signals": f"file:{self._signals(vehicle)}",
            "train_when": (f"{CHARGING} == true",),
        }
        return vehicle.model_copy(update=rules)


class Operator:
    """The first admin at the API."""

    def __init__(self, client: ControlClient) -> None:
        self._client = client
        self._headers: dict[str, str] = {}

    def begin(self, token: str, name: str, password: str) -> None:
        """Become the first admin, and log in.

        Raises:
            ControlError: there is an admin already.
        """
        credentials = {"name": name, "password": password}
        self._client.post("/bootstrap", credentials | {"token": token.strip()})
        session = self._client.ask("POST", "/sessions", body=credentials)
        self._headers = {"X-CSRF-Token": str(session.json()["csrf_token"])}

    def send(self, path: str, body: object = None) -> Any:
        """Make or order something."""
        return self._client.ask("POST", path, body=body, headers=self._headers).json()

    def claim(self, **wanted: object) -> str:
        """Make a claim; return its secret."""
        return str(self.send("/claims", wanted)["secret"])


class Chargers:
    """Plugs vehicles in and out by turns, for the time of a ``with`` block."""

    def __init__(self, files: list[Path]) -> None:
        """``files`` are where vehicles look for their signals."""
        self._files = files
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._turn, name="chargers", daemon=True)

    def __enter__(self) -> Chargers:
        self._thread.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._stopping.set()
        self._thread.join(STOP_SECONDS_MAX)

    def _turn(self) -> None:
        turn = 0
        while not self._stopping.is_set():
            for place, file in enumerate(self._files):
                write_signals(file, {CHARGING: (turn + place) % 2 == 1})
            turn += 1
            self._stopping.wait(CHARGE_SECONDS)


def write_signals(file: Path, signals: dict[str, Any]) -> None:
    """Put a new file in the place of the old one, so that it is never read half."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(json.dumps(signals), encoding="utf-8")
    new.replace(file)


def join(url: str, claim: str, node: str, directory: Path) -> None:
    """Enrol a node; one that has to be approved is left waiting."""
    try:
        enrol(
            url=url,
            claim=claim,
            node=node,
            directory=directory / node,
            job=None,
            wait_seconds=0,
            on_waiting=lambda: None,
        )
    except ControlError as error:
        if error.problem != "approval_pending":
            raise


def run_cloud(settings: CloudSettings) -> None:
    """Be the cloud side."""
    Supervisor(settings).run()


def end(process: BaseProcess) -> None:
    """End a process: ask, wait, and kill it where it does not listen."""
    process.terminate()
    process.join(STOP_SECONDS_MAX)
    if process.is_alive():
        process.kill()
        process.join(STOP_SECONDS_MAX)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Tell whether a port can be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def is_open(address: tuple[str, int]) -> bool:
    """Tell whether somebody listens."""
    with socket.socket() as probe:
        return probe.connect_ex(address) == 0


def has_display() -> bool:
    """Tell whether a browser can be opened here."""
    return sys.platform == "darwin" or bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )


def run_console_demo(
    settings: ConsoleDemoSettings, seconds: float | None, on_ready: Callable[[ConsoleDemo], None]
) -> None:
    """Run the demo until interrupted, or for so many seconds; ``on_ready`` is told when it is up.

    Raises:
        HetertrainError: a part did not start, or died.
    """
    with ConsoleDemo(settings) as demo:
        interruption = Interruption()
        interruption.install()
        on_ready(demo)
        ends_at = None if seconds is None else time.monotonic() + seconds
        while not interruption.event.wait(LOOK_SECONDS):
            if dead := demo.dead():
                raise HetertrainError(f"{', '.join(dead)} ended unexpectedly: see {demo.logs}")
            if ends_at is not None and time.monotonic() >= ends_at:
                return


def show_console(demo: ConsoleDemo, *, opens_browser: bool) -> None:
    """Say where the console is and how to log in; open it where it can be seen."""
    sys.stdout.write(
        f"console     {demo.url}\n"
        f"name        {demo.name}\n"
        f"password    {demo.password}\n"
        "The browser asks whether to trust the certificate: it is of the demo's own authority.\n"
        "Ctrl-C ends the demo.\n"
    )
    sys.stdout.flush()
    if opens_browser and has_display():
        webbrowser.open(demo.url)
