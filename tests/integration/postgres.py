"""A PostgreSQL of our own: a real server, on a socket in a temporary folder."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from pathlib import Path


class Postgres:
    """One server, as user ``postgres`` where we are root, which it refuses to run as."""

    def __init__(self, directory: Path) -> None:
        """Make an empty cluster."""
        programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
        assert programs or shutil.which("initdb"), "script/postgres installs it"
        self._programs = programs[-1] if programs else Path(str(shutil.which("initdb"))).parent
        self._user = "postgres" if os.geteuid() == 0 else None
        self.directory = directory
        directory.mkdir(parents=True)
        if self._user:
            owner = pwd.getpwnam(self._user)
            os.chown(directory, owner.pw_uid, owner.pw_gid)
            for parent in list(directory.parents)[:-1]:
                if parent.stat().st_uid == 0 and parent != Path("/tmp"):
                    parent.chmod(parent.stat().st_mode | 0o011)
        self._run(
            "initdb",
            "--encoding=UTF8",
            "--locale=C.UTF-8",
            "-A",
            "trust",
            "-U",
            "hetertrain",
            "-D",
            str(directory / "data"),
        )
        options = f"-c listen_addresses='' -k {directory} -c fsync=off"
        self._run("pg_ctl", "-D", str(directory / "data"), "-w", "-o", options, "start")

    def database(self, name: str) -> str:
        """Make an empty database; return its address."""
        self._run("createdb", "-h", str(self.directory), "-U", "hetertrain", name)
        return f"postgresql+psycopg://hetertrain@/{name}?host={self.directory}"

    def stop(self) -> None:
        """End the server."""
        self._run("pg_ctl", "-D", str(self.directory / "data"), "-m", "immediate", "-w", "stop")

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [self._programs / program, *arguments],
            user=self._user,
            cwd=self.directory,
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=60,
        )
