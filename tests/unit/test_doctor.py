"""How a doctor goes from layer to layer, and what it makes of settings."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hetertrain import cli, errors
from hetertrain.cli import INTERRUPTED
from hetertrain.doctor import EXIT_CODES, Check, Finding, Status, examine, exit_code, failed, ok
from hetertrain.doctor import seconds_max as longest
from hetertrain.transport.database import own_directory, owner_of
from hetertrain_edge.checks import edge_checks
from hetertrain_edge.service import EdgeSettings
from hetertrain_vehicle.checks import vehicle_checks
from hetertrain_vehicle.settings import VehicleSettings

START_SECONDS = 2.0
"""For the interpreter, and what it loads."""


def check(name: str, run: Callable[[], Finding], *needs: str, seconds: float = 30.0) -> Check:
    return Check(name=name, run=run, seconds=seconds, silence="wait no longer", needs=needs)


def well() -> Finding:
    return ok("well")


def test_what_needs_a_failed_layer_is_skipped_and_all_else_is_looked_at() -> None:
    findings = examine(
        [
            check("disk", well),
            check("dns", lambda: failed("no name", "give one")),
            check("tcp", well, "dns"),
            check("tls", well, "tcp", "disk"),
            check("control", well),
        ]
    )
    statuses = {name: finding.status for name, finding in findings.items()}
    assert statuses == {
        "disk": Status.OK,
        "dns": Status.FAILED,
        "tcp": Status.SKIPPED,
        "tls": Status.SKIPPED,
        "control": Status.OK,
    }
    assert findings["tls"].found == "dns comes first"
    assert exit_code(findings) == EXIT_CODES["dns"]


def test_a_check_that_hangs_fails_at_its_deadline_and_holds_up_nobody() -> None:
    forever = threading.Event()

    def hang() -> Finding:
        forever.wait()
        return well()

    findings = examine([check("south dns", hang, seconds=0.05), check("disk", well)])
    assert findings["south dns"] == failed("no answer in 0.05 s", "wait no longer")
    assert findings["disk"].status is Status.OK
    assert exit_code(findings) == EXIT_CODES["dns"]
    forever.set()


def test_a_check_that_breaks_is_a_finding() -> None:
    findings = examine([check("disk", lambda: ok(str(1 / 0)))])
    assert "ZeroDivisionError" in findings["disk"].found


def test_a_doctor_is_done_within_half_a_minute_whatever_hangs() -> None:
    common = {"job": "job", "node": "n0"}
    vehicle = vehicle_checks(VehicleSettings(task="a:B", **common))
    edge = edge_checks(EdgeSettings(south_port=9, **common))
    assert len(edge) > len(vehicle)
    for checks in (vehicle, edge):
        assert longest(checks) + START_SECONDS < 30.0
        assert {each.layer for each in checks} <= EXIT_CODES.keys()


def test_no_exit_code_of_a_layer_is_another_errors() -> None:
    kinds = [each for each in vars(errors).values() if isinstance(each, type)]
    codes = {each.exit_code for each in kinds if issubclass(each, errors.HetertrainError)}
    assert not (codes | {INTERRUPTED}) & set(EXIT_CODES.values())
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)


@pytest.mark.parametrize(
    "flags",
    [
        ["--job", "job", "--task", "a:B"],
        ["--job", "job", "--node", "n/0", "--task", "a:B"],
        ["--job", "job", "--node", "n0", "--task", "a:B", "--tier", "t9"],
        ["--job", "job", "--node", "n0", "--task", "a:B", "--config", "nowhere.toml"],
    ],
)
def test_settings_that_do_not_go_together_are_the_first_layer(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["vehicle", "doctor", "--json", *flags]) == EXIT_CODES["settings"]
    printed = json.loads(capsys.readouterr().out)
    statuses = [row["status"] for row in printed["findings"]]
    assert printed["exit_code"] == EXIT_CODES["settings"]
    assert statuses == ["failed"] + ["skipped"] * (len(EXIT_CODES) - 1)


def test_who_owns_a_directory_is_known_without_a_try_of_its_lock(tmp_path: Path) -> None:
    assert owner_of(tmp_path) is None
    lock = own_directory(tmp_path)
    assert owner_of(tmp_path) == int((tmp_path / "owner.lock").read_text())
    lock.close()
    assert owner_of(tmp_path) is None
