"""The promises, in virtual time: the real drivers under crashes, losses and lost disks."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from hetertrain.cli import main
from hetertrain.core.aggregator import Aggregator
from hetertrain.core.gate import Seen
from hetertrain.core.policy import SYNC_PRESETS
from hetertrain.errors import SettingsError
from hetertrain_lab.fuzz import fuzz_one, minimise, random_scenario
from hetertrain_lab.invariants import ViolationError
from hetertrain_lab.scenario import load_scenario, parse_scenario
from hetertrain_lab.simulator import Result, simulate

FLEET = {
    "name": "test",
    "seconds": 20.0,
    "vehicles": [
        {
            "count": 4,
            "step_seconds": (0.1, 0.5),
            "rate_bits_per_second": (1e5, 1e7),
            "loss": 0.05,
            "duplication": 0.05,
            "reordering": 0.05,
            "outage_share": 0.2,
            "crash_seconds": 15.0,
            "disk_loss": 0.3,
        }
    ],
    "gateways": {"count": 1, "crash_seconds": 15.0},
    "cloud": {"crash_seconds": 15.0},
    "learning": {"parameters": 500},
}


def digests(result: Result) -> tuple[str, str]:
    return result.model_digest, result.event_digest


def test_a_seed_gives_the_same_bytes_again_and_in_another_process() -> None:
    scenario = parse_scenario(FLEET)
    first = simulate(scenario, 1)
    assert first.crashes > 0
    program = (
        "import json; from hetertrain_lab.scenario import parse_scenario;"
        "from hetertrain_lab.simulator import simulate;"
        f"r = simulate(parse_scenario(json.loads({json.dumps(json.dumps(FLEET))})), 1);"
        "print(r.model_digest, r.event_digest)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True
    )
    assert tuple(done.stdout.split()) == digests(first)
    assert digests(simulate(scenario, 2)) != digests(first)


@pytest.mark.parametrize("first", range(0, 50, 10))
def test_random_fleets_break_no_promise(first: int) -> None:
    for seed in range(first, first + 10):
        failure = fuzz_one(seed)
        assert failure is None, f"{failure.message}\nreplay: {failure.replay}"


@pytest.mark.parametrize("policy", sorted(SYNC_PRESETS))
def test_every_policy_makes_versions_and_keeps_every_promise(policy: str) -> None:
    result = simulate(parse_scenario(FLEET | {"policy": policy}), 3)
    assert result.versions > 0


def forgetful(seen: Seen, key: tuple[str, int]) -> None:
    del seen, key


def test_an_update_counted_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Seen, "add", forgetful)
    # Only a cloud that forgot its verdicts in a crash must tell a repetition by what it has seen.
    scenario = parse_scenario(FLEET | {"gateways": {"count": 0}, "cloud": {"crash_seconds": 3.0}})
    with pytest.raises(ViolationError, match="counted twice"):
        [simulate(scenario, seed) for seed in range(20)]


def test_an_acknowledgement_before_the_journal_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Aggregator.handle

    def unjournalled(self, event, now):
        ready = handle(self, event, now)
        return replace(ready, persist=()) if len(ready.persist) == 1 else ready

    monkeypatch.setattr(Aggregator, "handle", unjournalled)
    rules = {"cut_fraction": 1.0, "cut_seconds": 5.0}
    changes = {"sync": rules, "cloud": {"crash_seconds": 3.0}, "gateways": {"count": 0}}
    scenario = parse_scenario(FLEET | changes)
    with pytest.raises(ViolationError):
        [simulate(scenario, seed) for seed in range(10)]


def test_a_failure_is_made_smaller_and_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Seen, "add", forgetful)
    found = next(f for f in map(fuzz_one, range(100, 140)) if f is not None)
    small = minimise(found)
    assert small.drops
    assert f"--seed {small.seed}" in small.replay
    again = fuzz_one(small.seed, small.drops)
    assert again is not None
    assert again.message == small.message


def test_real_gradients_learn_in_virtual_time() -> None:
    task = "hetertrain_lab.digits:SmallDigitsTask"
    learning = {"task": task, "labels": {"alpha": "1000"}, "learning_rate": 0.3, "target": 0.6}
    plain = {
        "name": "digits",
        "seconds": 60.0,
        "vehicles": [{"count": 4, "step_seconds": (0.05, 0.2)}],
        "learning": learning,
    }
    result = simulate(parse_scenario(plain), 1)
    assert result.reached_at is not None
    assert result.evaluations[0].metrics["accuracy"] < 0.3


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"policy": "nonsense"}, "nonsense"),
        ({"sync": {"cut_fraktion": 0.5}}, "cut_fraktion"),
        ({"sync": {"cut_fraction": 2.0}}, "cut_fraction"),
        ({"vehicles": [{"count": -1}]}, "count"),
        ({"secconds": 3}, "secconds"),
    ],
)
def test_a_wrong_scenario_is_refused_and_the_error_names_the_key(change: dict, names: str) -> None:
    with pytest.raises(SettingsError, match=names):
        parse_scenario(FLEET | change)


def test_an_unreadable_scenario_is_a_settings_error(tmp_path) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(b"\xff\xfe not toml")
    with pytest.raises(SettingsError, match=r"bad\.toml"):
        load_scenario(path)


def test_random_scenarios_depend_on_their_seed_alone() -> None:
    assert random_scenario(5) == random_scenario(5)
    assert random_scenario(5) != random_scenario(6)


def test_the_command_prints_one_json_object_and_writes_a_page(tmp_path, capsys) -> None:
    path = tmp_path / "small.toml"
    path.write_text("seconds = 5.0\n[[vehicles]]\ncount = 2\n", encoding="utf-8")
    page = tmp_path / "out.html"
    code = main(["simulate", str(path), "--policy", "fedasync", "--json", "--plot", str(page)])
    results = json.loads(capsys.readouterr().out)["results"]
    assert code == 0
    assert results["policy"] == "fedasync"
    assert results["versions"] > 0
    assert "staleness of updates" in page.read_text(encoding="utf-8")


def test_a_failed_search_says_how_to_replay_and_fails(monkeypatch, capsys) -> None:
    monkeypatch.setattr(Seen, "add", forgetful)
    assert main(["simulate", "--fuzz", "40", "--seed", "100"]) == 1
    assert "hetertrain simulate --fuzz 1 --seed" in capsys.readouterr().err
