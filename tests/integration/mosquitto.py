"""A Mosquitto of our own: a real process, that can be killed and started again."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

from tests.integration.waiting import wait_until

_OPEN = """
allow_anonymous true
max_queued_messages 0
persistence true
persistence_location {directory}/
autosave_interval 1
"""
"""For tests of loss, not of access."""
_DATABASE = "mosquitto.db"


class Mosquitto:
    """One broker on loopback, with its files in ``directory``."""

    def __init__(self, directory: Path, configuration: str = _OPEN) -> None:
        """Take a free port; ``configuration`` may name ``{directory}``, and has no listener."""
        program = shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin")
        assert program, "these tests need mosquitto: script/test installs it"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.host = "127.0.0.1"
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        # As root it would become user mosquitto, who cannot read a test's files.
        text = f"listener {self.port} 127.0.0.1\nuser root\n" + configuration
        file = directory / "mosquitto.conf"
        file.write_text(text.replace("{directory}", str(directory)))
        self._command = [program, "-c", str(file)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and return when it listens."""
        self._process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL)
        wait_until(self._is_open, "the broker")

    def kill(self, *, loses_database: bool = False) -> None:
        """Kill it outright; what it knew is that of its last autosave, or lost."""
        assert self._process is not None, "it was started"
        self._process.kill()
        self._process.wait(10)
        if loses_database:
            (self.directory / _DATABASE).unlink(missing_ok=True)

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(10)

    def _is_open(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((self.host, self.port)) == 0
