"""Every command block of the documentation is run as it stands."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
WAIT_SECONDS = 90.0


def blocks() -> list[str]:
    found = []
    for page in PAGES:
        found += re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return found


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "HETERTRAIN_BROKER_PORT": free_port()}


def command(line: str, tmp_path: Path) -> str:
    # A short run stands for the demo's minute; what it prints and writes is the same.
    if line.startswith("script/demo"):
        return f"{ROOT}/{line} --seconds 5 --vehicles 4 --edges 1 --no-baseline --output {tmp_path}"
    return in_place(line)


def in_place(line: str) -> str:
    """Let a command find what it names from the repository's root."""
    return line.replace("scenarios/", f"{ROOT}/scenarios/").replace(
        "examples/", f"{ROOT}/examples/"
    )


FOREGROUND = [b for b in blocks() if "&" not in b and not b.startswith("script/test")]
BACKGROUND = [b for b in blocks() if "&" in b]


@pytest.mark.broker
@pytest.mark.parametrize("block", FOREGROUND)
def test_a_documented_command_runs(block: str, tmp_path: Path) -> None:
    for line in block.strip().splitlines():
        done = subprocess.run(
            ["bash", "-c", command(line, tmp_path)],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.broker
@pytest.mark.parametrize("block", BACKGROUND)
def test_documented_parts_train_together(block: str, tmp_path: Path) -> None:
    process = subprocess.Popen(
        ["bash", "-c", in_place(block) + "wait"],
        cwd=tmp_path,
        env=environment(),
        start_new_session=True,
    )
    history = tmp_path / "state" / "fleet" / "versions.jsonl"
    try:
        wait_until(
            lambda: history.exists() and len(history.read_text().splitlines()) >= 3,
            "three versions",
            seconds=WAIT_SECONDS,
        )
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)


PRODUCTION = (ROOT / "README.md").read_text().partition("The same by hand")[2]


class Shell:
    """Runs the production section's commands, with this machine in place of its hosts and paths."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = environment() | {"XDG_CONFIG_HOME": str(directory / "operator")}
        del self.environment["HETERTRAIN_BROKER_PORT"]  # It comes before what a node was given.
        self.background: list[subprocess.Popen[bytes]] = []
        broker, api = free_port(), free_port()
        (directory / "password").write_text("correct horse battery")
        self.places = {
            "broker.example.org": "localhost",
            "cloud.example.org": "localhost",
            "/var/lib/": f"{directory}/",
            "/etc/mosquitto/hetertrain": str(directory / "broker"),
            "0.0.0.0": "127.0.0.1",  # what is replaced
            "8443": api,
            "8883": broker,
            "cloud/compose/job.toml": str(ROOT / "cloud" / "compose" / "job.toml"),
            "--name anna": f"--name anna --password-file {directory}/password",
        }
        self.environment["HETERTRAIN_CLOUD_LISTEN_PORT"] = api
        self.port = api

    def run(self, line: str) -> None:
        """Run a command, in the background if it does not end."""
        for example, ours in self.places.items():
            line = line.replace(example, ours)
        if line.startswith("export "):
            pairs = (word.partition("=") for word in line.removeprefix("export ").split())
            self.environment |= {name: value for name, _, value in pairs}
        elif line.startswith(("mosquitto", "hetertrain cloud", "hetertrain vehicle --config")):
            self.prepare()
            self.background.append(
                subprocess.Popen(
                    ["bash", "-c", f"exec {line}"], cwd=self.directory, env=self.environment
                )
            )
        else:
            if line.startswith("hetertrain login"):
                wait_until(self.answers, "the API")
            if "rollback" in line:
                line = line.replace("120", self.kept())
            done = self.once(line)
            assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"

    def once(self, line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", line],
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def prepare(self) -> None:
        """Put the shipped configuration where the broker looks for it."""
        text = (ROOT / "broker_cfg" / "mosquitto.conf").read_text()
        for example, ours in self.places.items():
            text = text.replace(example, ours)
        (self.directory / "broker" / "mosquitto.conf").write_text(f"user root\n{text}")
        self.environment["PATH"] += ":/usr/sbin"

    def answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", int(self.port))) == 0

    def kept(self) -> str:
        """Wait for a version that can be gone back to; return it."""
        found: list[str] = []

        def look() -> bool:
            listed = self.once("hetertrain version list driving --json").stdout
            found.extend(str(row["version"]) for row in json.loads(listed) if row["is_kept"])
            return bool(found)

        wait_until(look, "a version that is kept", seconds=WAIT_SECONDS)
        return found[0]


@pytest.mark.broker
def test_production_by_hand_works_as_the_readme_says(tmp_path: Path) -> None:
    section = "".join(re.findall(r"```console\n(.*?)```", PRODUCTION, re.DOTALL))
    lines = section.replace("\\\n", " ").removeprefix("$ ").strip().split("\n$ ")
    shell = Shell(tmp_path)
    try:
        for line in lines:
            shell.run(line)
    finally:
        for process in reversed(shell.background):
            process.terminate()
            process.wait(30)
    assert len(lines) >= 15


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
