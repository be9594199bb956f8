"""Every command block of the documentation is run as it stands."""

from __future__ import annotations

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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "HETERTRAIN_BROKER_PORT": port}


def command(line: str, tmp_path: Path) -> str:
    # A short run stands for the demo's minute; what it prints and writes is the same.
    if line.startswith("script/demo"):
        return f"{ROOT}/{line} --seconds 5 --vehicles 4 --edges 1 --no-baseline --output {tmp_path}"
    return line.replace("scenarios/", f"{ROOT}/scenarios/")


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
        ["bash", "-c", block + "wait"], cwd=tmp_path, env=environment(), start_new_session=True
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
