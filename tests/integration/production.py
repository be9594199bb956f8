"""The cloud side as an operator runs it: real processes, a Mosquitto with TLS and dynamic security,
a control plane that is spoken to over HTTPS.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetertrain.service import ConnectionSettings
from hetertrain.transport import mqtt
from tests.control import PASSWORD
from tests.integration.mosquitto import Mosquitto
from tests.integration.waiting import wait_until

CONFIGURATION = Path(__file__).resolve().parents[2] / "broker_cfg" / "mosquitto.conf"
HETERTRAIN = Path(sys.executable).with_name("hetertrain")
TASK = "hetertrain_lab.driving:DrivingTask"


def shipped_mosquitto(directory: Path) -> Mosquitto:
    """Return a broker with the configuration that we ship, and its files in ``directory``."""
    text = CONFIGURATION.read_text().replace("/etc/mosquitto/hetertrain", str(directory))
    return Mosquitto(directory, text.replace("listener 8883\n", ""))


@dataclass
class Production:
    """A cloud side, and what enrols with it; ``stop`` ends all of it."""

    directory: Path
    database_url: str | None = None
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self) -> None:
        """Start broker and cloud, and make the first admin."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"https://localhost:{self.port}"
        self.environment = os.environ | {
            "HETERTRAIN_CLOUD_STATE_DIRECTORY": str(self.directory / "cloud"),
            "HETERTRAIN_CLOUD_BROKER": "mosquitto",
            "HETERTRAIN_CLOUD_BROKER_HOST": "localhost",
            "HETERTRAIN_CLOUD_LISTEN_PORT": str(self.port),
            "XDG_CONFIG_HOME": str(self.directory / "operator"),
        }
        if self.database_url is not None:
            self.environment["HETERTRAIN_CLOUD_DATABASE_URL"] = self.database_url
        broker = self.directory / "broker"
        self.run("broker", "files", "--to", str(broker), "--broker-hosts", "localhost,127.0.0.1")
        self.mosquitto = shipped_mosquitto(broker)
        self.mosquitto.start()
        self.environment["HETERTRAIN_CLOUD_BROKER_PORT"] = str(self.mosquitto.port)
        self.spawn("cloud", "cloud", "--log-json")
        control = self.directory / "cloud" / "control"
        wait_until((control / "bootstrap-token").exists, "the token for the first admin")
        wait_until(self._answers, "the API")
        password = self.directory / "password"
        password.write_text(PASSWORD)
        self.run(
            *("login", "--url", self.url, "--name", "anna", "--password-file", str(password)),
            *("--bootstrap-file", str(control / "bootstrap-token")),
            *("--authority-file", str(control / "authority" / "authority.crt")),
        )

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run a command to its end; return what it printed."""
        done = self._command(*arguments)
        assert done.returncode == code, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    def _command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [HETERTRAIN, *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def node_log(self, node: str) -> list[str]:
        """Ask for the end of a node's log until it answers; return its lines.

        A node on its way back to the broker leaves a request unanswered, and a busy one may.
        """
        lines: list[str] = []

        def answers() -> bool:
            lines[:] = self._command("node", "log", node).stdout.splitlines()
            return bool(lines)

        wait_until(answers, f"the log of {node}")
        return lines

    def json(self, *arguments: str) -> Any:
        """Run an operator's command; return what it answered."""
        return json.loads(self.run(*arguments, "--json"))

    def spawn(self, name: str, *arguments: str) -> None:
        """Start a part."""
        log = (self.directory / f"{name}.log").open("ab")
        self.processes[name] = subprocess.Popen(
            [HETERTRAIN, *arguments], env=self.environment, stdout=log, stderr=log
        )

    def enrol(self, node: str, role: str = "vehicle", *claim: str) -> Path:
        """Enrol a node; return its settings file."""
        secret = self.run("claim", "create", "--role", role, *claim).strip()
        directory = self.directory / node
        self.run(
            *(role, "enroll", "--url", self.url, "--claim", secret),
            *("--node", node, "--directory", str(directory)),
        )
        return directory / "hetertrain.toml"

    def vehicle(self, node: str, index: int, of: int, *more: str) -> None:
        """Start an enrolled vehicle."""
        labels = ("--labels", f"index={index}", "--labels", f"of={of}")
        settings = str(self.directory / node / "hetertrain.toml")
        self.spawn(node, "vehicle", "--config", settings, "--task", TASK, *labels, *more)

    def connect(
        self, node: str, *subscriptions: str, broker: Mosquitto | None = None
    ) -> tuple[mqtt.Connection, queue.Queue[mqtt.Event]]:
        """Connect by hand, with a node's credential; return what happens there, too."""
        directory = self.directory / node
        settings = ConnectionSettings(
            broker_host="localhost",
            broker_port=(broker or self.mosquitto).port,
            tls_ca_file=str(directory / "authority.crt"),
            tls_certificate_file=str(directory / "node.crt"),
            tls_key_file=str(directory / "node.key"),
        )
        events: queue.Queue[mqtt.Event] = queue.Queue()
        endpoint = settings.endpoint(f"{node}-by-hand")
        connection = mqtt.Connection(endpoint, subscriptions, events.put)
        connection.start()
        return connection, events

    def create_job(self, name: str = "fleet", **options: object) -> None:
        """Add a job and start it."""
        file = self.directory / f"{name}.json"
        file.write_text(json.dumps({"task": TASK} | options))
        self.run("job", "create", name, str(file), "--start")

    def version(self, job: str = "fleet") -> int:
        """Return a job's newest version."""
        return int(self.json("job", "status", job)["version"] or 0)

    def history(self, file: str = "versions.jsonl", job: str = "fleet") -> list[dict[str, Any]]:
        """Return the rows of one of a job's history files."""
        path = self.directory / "cloud" / "jobs" / job / file
        return [json.loads(row) for row in path.read_text().splitlines()] if path.exists() else []

    def contributors(self) -> set[str]:
        """Return whose updates are in the job's model."""
        return {item[0] for row in self.history() for item in row["contributions"]}

    def logs(self, name: str) -> str:
        """Return what a part has logged."""
        return (self.directory / f"{name}.log").read_text()

    def stop(self) -> dict[str, int]:
        """End everything, the cloud last; return exit codes."""
        codes = {}
        for name in sorted(self.processes, key=lambda name: name == "cloud"):
            self.processes[name].terminate()
            codes[name] = self.processes[name].wait(30)
        if hasattr(self, "mosquitto"):
            self.mosquitto.stop()
        return codes
