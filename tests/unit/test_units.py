"""The systemd units that are shipped: they start a command that exists, under limits, in a cage."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hetertrain import cli
from hetertrain.transport.mqtt import Connection
from hetertrain_vehicle.trainer_process import END_SECONDS

ROOT = Path(__file__).resolve().parents[2]
UNITS = {
    part: ROOT / part / "systemd" / f"hetertrain-{part}.service" for part in ("vehicle", "edge")
}
INSTALLED = "/opt/hetertrain/bin/hetertrain"
STOP_SECONDS = 2.0
"""What a connection takes to say goodbye, by its default."""
EXPOSURE_MAX = 20
"""Tenths, as systemd rates a unit: 0 is a cage, 100 is none. What is left, is needed."""


def read(part: str) -> dict[str, str]:
    """Return the directives of a unit; the last of a name counts."""
    lines = UNITS[part].read_text(encoding="utf-8").splitlines()
    pairs = (line.partition("=") for line in lines if line and line[0] not in "#[")
    return {name: value for name, _, value in pairs}


@pytest.mark.parametrize("part", UNITS)
def test_a_unit_starts_its_part_again_for_ever_and_lets_it_end_in_peace(part: str) -> None:
    unit = read(part)
    program, name, *flags = unit["ExecStart"].split()
    assert (program, name) == (INSTALLED, part)
    assert part in cli.installed_commands()
    home = f"/var/lib/{unit['StateDirectory']}"
    assert flags == ["--config", f"{home}/hetertrain.toml", "--log-json"]
    assert unit["WorkingDirectory"] == home
    assert (unit["Restart"], unit["StartLimitIntervalSec"]) == ("always", "0")
    assert int(unit["RestartMaxDelaySec"]) > int(unit["RestartSec"]) > 0
    # A gateway has two connections; a vehicle one, and a trainer.
    longest = max(2 * STOP_SECONDS, STOP_SECONDS + END_SECONDS)
    assert Connection.stop.__defaults__ == (STOP_SECONDS,)
    assert int(unit["TimeoutStopSec"]) > 2 * longest
    assert unit["KillMode"] == "mixed"


@pytest.mark.parametrize("part", UNITS)
def test_a_unit_limits_its_part_and_gives_it_no_rights(part: str) -> None:
    unit = read(part)
    assert {"MemoryMax", "CPUQuota", "CPUWeight", "Nice", "TasksMax"} <= unit.keys()
    assert (unit["User"], unit["CapabilityBoundingSet"], unit["UMask"]) == (
        "hetertrain",
        "",
        "0077",
    )
    assert unit["ProtectSystem"] == "strict"
    for right in ("NoNewPrivileges", "PrivateTmp", "PrivateDevices", "RestrictNamespaces"):
        assert unit[right] == "yes"
    assert "AF_PACKET" not in unit["RestrictAddressFamilies"]
    text = UNITS[part].read_text(encoding="utf-8")
    assert "SystemCallFilter=@system-service\nSystemCallFilter=~@privileged" in text


@pytest.mark.parametrize("part", UNITS)
def test_systemd_takes_a_unit_as_it_is_and_rates_it_well(part: str, tmp_path: Path) -> None:
    analyse = shutil.which("systemd-analyze")
    if analyse is None:
        return  # The tests above read the units by themselves.
    unit = tmp_path / UNITS[part].name
    ours = str(Path(sys.executable).with_name("hetertrain"))
    unit.write_text(UNITS[part].read_text(encoding="utf-8").replace(INSTALLED, ours))

    verify = [analyse, "verify", "--man=no", str(unit)]
    done = subprocess.run(verify, capture_output=True, text=True, check=False, timeout=60)
    newer = ("RestartSteps", "RestartMaxDelaySec")  # Those of systemd 254.
    complaints = [
        line
        for line in done.stderr.splitlines()
        if unit.name in line and not any(name in line for name in newer)
    ]
    assert (done.returncode, complaints) == (0, [])

    rate = [analyse, "security", "--offline=true", f"--threshold={EXPOSURE_MAX}", str(unit)]
    rated = subprocess.run(rate, capture_output=True, text=True, check=False, timeout=60)
    assert rated.returncode == 0, rated.stdout
