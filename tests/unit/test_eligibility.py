"""When may a vehicle train and use its link: rules, signals and budgets."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from hetertrain.core.eligibility import (
    RULE_CHARACTERS_MAX,
    RULES_MAX,
    Rule,
    Signals,
    check_rules,
    first_unmet,
    parse_rules,
)
from hetertrain.logging import silent_logger
from hetertrain.wire.frames import pack
from hetertrain.wire.messages import JobOrder
from hetertrain_vehicle.budgets import CLOCK_SET, FILE, SAVE_SECONDS, Ledger, Limits
from hetertrain_vehicle.permission import Permission, Permissions
from hetertrain_vehicle.signals import SignalsHeard, SignalTable, network_type, read_signals

CHARGING = "Vehicle.Powertrain.TractionBattery.Charging.IsCharging"
NOON = datetime(2026, 12, 2, 12)  # local


@pytest.mark.parametrize(
    ("rule", "signals", "holds"),
    [
        ("Vehicle.Speed < 1", {"Vehicle.Speed": 0.0}, True),
        ("Vehicle.Speed < 1", {"Vehicle.Speed": 52.0}, False),
        ("Vehicle.Speed < 1", {}, False),
        ("Vehicle.Speed < 1", {"Vehicle.Speed": "fast"}, False),
        ("Vehicle.Speed < 1", {"Vehicle.Speed": False}, False),
        (f"{CHARGING} == true", {CHARGING: True}, True),
        (f"{CHARGING} == true", {CHARGING: 1.0}, False),
        ("Vehicle.IsMoving != true", {}, False),
        (f"{CHARGING} == true or Vehicle.Speed < 1", {CHARGING: False, "Vehicle.Speed": 0.0}, True),
        ("network in wifi, ethernet", {"network": "ethernet"}, True),
        ("network in wifi, ethernet", {"network": "cellular"}, False),
        ("time in 22:00-06:00", {"time": 23 * 60.0}, True),
        ("time in 22:00-06:00", {"time": 5 * 60 + 59.0}, True),
        ("time in 22:00-06:00", {"time": 6 * 60.0}, False),
        ("time in 08:00-08:00", {"time": 3.0}, True),
    ],
)
def test_a_rule_holds_only_where_a_known_value_of_the_right_kind_satisfies_it(
    rule: str, signals: Signals, *, holds: bool
) -> None:
    assert Rule.parse(rule).holds(signals) is holds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "speed",
        "speed = 1",
        "speed > fast",
        "speed == 1, 2",
        "time == 3",
        "a < nan",
        "x" * 300,
        "country == Österreich",
    ],
)
def test_a_rule_that_cannot_be_read_is_refused_and_says_how_to_write_it(text: str) -> None:
    with pytest.raises(ValueError, match=r"write|only|compares|characters"):
        Rule.parse(text)
    with pytest.raises(ValueError, match="there may be"):
        parse_rules(["a < 1"] * (RULES_MAX + 1))


def test_the_first_rule_that_does_not_hold_says_what_is_the_case() -> None:
    rules = parse_rules(["Vehicle.Speed < 1", f"{CHARGING} == true"])
    assert first_unmet(rules, {"Vehicle.Speed": 52.0}) == "Vehicle.Speed < 1: it is 52"
    assert first_unmet(rules, {"Vehicle.Speed": 0.0}).endswith("it is not known")
    assert first_unmet(rules, {"Vehicle.Speed": 0.0, CHARGING: True}) == ""


def test_signals_are_read_nested_or_with_dots_and_what_is_none_is_left_out() -> None:
    text = {"Vehicle": {"Speed": 3, "IsMoving": True}, "network": "wifi", "odd": [1], "no": None}
    expected = {"Vehicle.Speed": 3.0, "Vehicle.IsMoving": True, "network": "wifi"}
    assert read_signals(json.dumps(text).encode()) == expected
    for damaged in (b"", b"[1]", b"{", b"x" * (1 << 20)):
        with pytest.raises(ValueError, match=r".+"):
            read_signals(damaged)


def test_a_signal_is_unknown_when_its_source_is_lost_or_falls_silent() -> None:
    table = SignalTable(seconds_max=10.0)
    table.take(SignalsHeard({"a": 1.0, "b": 2.0}, is_whole=True), 0.0)
    table.take(SignalsHeard({"a": 3.0}, is_whole=False), 8.0)
    assert table.known(9.0) == {"a": 3.0, "b": 2.0}
    assert table.known(11.0) == {"a": 3.0}
    table.take(SignalsHeard({}, is_whole=True), 12.0)
    assert table.known(12.0) == {}


@pytest.mark.parametrize(
    ("routes", "network"),
    [
        ("eth0 00000000 010011AC 0003 0 0 0 00000000", "ethernet"),
        ("wlan0 00000000 010011AC 0003 0 0 600 00000000", "wifi"),
        (
            "wlan0 00000000 010011AC 0003 0 0 600 00000000\n"
            "wwan0 00000000 010011AC 0003 0 0 50 00000000",
            "cellular",
        ),
        ("eth0 000011AC 00000000 0001 0 0 0 0000FFFF", "none"),
    ],
)
def test_the_type_of_the_link_is_that_of_the_best_default_route(
    routes: str, network: str, tmp_path: Path
) -> None:
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "sys/class/net/wlan0/wireless").mkdir(parents=True)
    (tmp_path / "proc/net/route").write_text(f"Iface Destination …\n{routes}\n".replace("…", "x"))
    assert network_type(tmp_path) == network


def ledger(directory: Path, **limits: object) -> Ledger:
    return Ledger(directory, Limits(**limits), silent_logger())  # type: ignore[arg-type]


def test_a_months_bytes_are_counted_by_type_of_link_and_begin_anew_with_the_month(
    tmp_path: Path,
) -> None:
    budget = ledger(tmp_path, megabytes_per_month={"cellular": 1, "any": 3})
    budget.count_bytes("cellular", 999_999, NOON)
    assert budget.send_refusal("cellular", NOON) == ""
    budget.count_bytes("cellular", 1, NOON)
    assert "1 MB over cellular" in budget.send_refusal("cellular", NOON)
    assert budget.send_refusal("wifi", NOON) == ""
    budget.count_bytes("wifi", 2_000_000, NOON)
    assert "3 MB over all links" in budget.send_refusal("wifi", NOON)
    assert budget.send_refusal("cellular", NOON + timedelta(days=31)) == ""


def test_the_count_survives_a_restart_and_a_clock_that_is_not_set(tmp_path: Path) -> None:
    budget = ledger(tmp_path, processor_seconds_per_day=60)
    budget.count_processor(60.0, NOON)
    budget.save(0.0)
    again = ledger(tmp_path, processor_seconds_per_day=60)
    unset = CLOCK_SET.replace(year=1970)
    assert "60 s of processor time" in again.train_refusal(0.0, unset)
    assert "60 s of processor time" in again.train_refusal(0.0, NOON)
    assert again.train_refusal(0.0, NOON + timedelta(days=1)) == ""


def test_a_damaged_count_begins_anew_and_is_written_seldom(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"month": 3}')
    budget = ledger(tmp_path, processor_seconds_per_day=60)
    budget.count_processor(1.0, NOON)
    budget.save(0.0)
    written = (tmp_path / FILE).read_text()
    budget.count_processor(1.0, NOON)
    budget.save(SAVE_SECONDS - 1)
    assert (tmp_path / FILE).read_text() == written
    budget.save(SAVE_SECONDS)
    assert json.loads((tmp_path / FILE).read_text())["processor_seconds"] == 2.0


def test_state_over_its_room_stops_training_and_the_nodes_own_data_do_not_count(
    tmp_path: Path,
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "recorded").write_bytes(bytes(4 << 20))
    budget = ledger(tmp_path, disk_mib=1)
    assert budget.train_refusal(0.0, NOON) == ""
    (tmp_path / "outbox.db").write_bytes(bytes(2 << 20))
    assert "2 MiB of state are over" in budget.train_refusal(60.0, NOON)


def test_the_jobs_rules_and_the_owners_must_both_hold(tmp_path: Path) -> None:
    table = SignalTable(seconds_max=None)
    rules = ("Vehicle.Speed < 1", "time in 06:00-18:00")
    permissions = Permissions(rules, (), table, ledger(tmp_path))
    parked = SignalsHeard({"Vehicle.Speed": 0.0, "time": 3.0, "other": 1.0}, is_whole=True)
    assert permissions.hear(parked, 0.0)
    assert permissions.judge("cellular", 0.0, NOON) == Permission("", "")
    permissions.take_job_rules((f"{CHARGING} == true",), ("network == wifi",))
    refused = permissions.judge("cellular", 0.0, NOON)
    assert refused.train.startswith(CHARGING)
    assert refused.send == "network == wifi: it is cellular"
    with pytest.raises(ValueError, match="malformed"):
        permissions.take_job_rules(("nonsense",), ())
    assert permissions.judge("cellular", 0.0, NOON) == refused
    midnight = NOON.replace(hour=0)
    assert permissions.judge("wifi", 0.0, midnight).train == "time in 06:00-18:00"


def test_only_a_change_of_what_matters_is_worth_a_look(tmp_path: Path) -> None:
    table = SignalTable(seconds_max=None)
    seen: list[str] = []

    def link_type() -> str:
        seen.append("looked")
        return "wifi"

    permissions = Permissions(("Vehicle.Speed < 1",), (), table, ledger(tmp_path), link_type)
    assert permissions.hear(SignalsHeard({"Vehicle.Speed": 3.0}, is_whole=False), 0.0)
    assert not permissions.hear(SignalsHeard({"Vehicle.Speed": 3.0}, is_whole=False), 1.0)
    assert not permissions.hear(SignalsHeard({"Vehicle.Cabin.Lights": True}, is_whole=False), 2.0)
    assert permissions.hear(SignalsHeard({"cell": "edge-2"}, is_whole=False), 3.0)
    assert (permissions.network(3.0), seen) == ("wifi", ["looked"])
    assert permissions.hear(SignalsHeard({"network": "cellular"}, is_whole=False), 4.0)
    assert (permissions.network(4.0), seen) == ("cellular", ["looked"])
    assert permissions.hear(SignalsHeard({}, is_whole=True), 5.0)


def test_the_longest_rules_of_a_job_fit_a_retained_message() -> None:
    rule = "A == " + "x" * (RULE_CHARACTERS_MAX - 5)
    rules = check_rules((rule,) * RULES_MAX)
    order = JobOrder(
        number=1 << 60,
        state="running",
        train_when=rules,
        send_when=rules,
        signature=bytes(128),
        certificate=bytes(2048),
    )
    assert len(pack(order)) <= 8192
