"""Settings, their origins, and the console script."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field, SecretStr

from hetertrain import cli, config
from hetertrain.cli import Command
from hetertrain.errors import SettingsError, TrainError


class PartSettings(config.Settings):
    section: ClassVar[str] = "part"
    job: str = Field(description="the job")
    port: int = Field(1883, description="the port")
    labels: dict[str, str] = Field({}, description="labels")
    password: SecretStr | None = Field(None, description="the password")


@pytest.fixture(autouse=True)
def in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_flag_wins_over_environment_over_file_over_default_and_each_says_where_it_came_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("hetertrain.toml").write_text('[common]\njob = "c"\nport = 1\n[part]\njob = "f"\n')
    loaded = config.load(PartSettings, {}, None)
    assert (loaded.settings.job, loaded.settings.port) == ("f", 1)
    assert loaded.origins["job"] == "file hetertrain.toml [part]"
    assert loaded.origins["labels"] == "default"
    monkeypatch.setenv("HETERTRAIN_PORT", "2")
    monkeypatch.setenv("HETERTRAIN_PART_JOB", "e")
    loaded = config.load(PartSettings, {}, None)
    assert (loaded.settings.job, loaded.settings.port) == ("e", 2)
    assert loaded.origins["port"] == "environment HETERTRAIN_PORT"
    loaded = config.load(PartSettings, {"port": "3"}, None)
    assert (loaded.settings.port, loaded.origins["port"]) == (3, "flag --port")


def test_a_missing_setting_fails_at_once_and_names_flag_variable_and_key() -> None:
    with pytest.raises(SettingsError) as error:
        config.load(PartSettings, {}, None)
    for way in ("--job", "HETERTRAIN_PART_JOB", "[part]"):
        assert way in str(error.value)


def test_a_wrong_value_names_where_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERTRAIN_PART_PORT", "many")
    with pytest.raises(SettingsError, match="environment HETERTRAIN_PART_PORT"):
        config.load(PartSettings, {"job": "j"}, None)


def test_an_unknown_key_suggests_the_one_that_was_meant() -> None:
    Path("hetertrain.toml").write_text("[part]\nprot = 1\n")
    with pytest.raises(SettingsError, match="did you mean port"):
        config.load(PartSettings, {}, None)


def test_a_table_of_values_comes_from_flag_variable_or_file_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HETERTRAIN_PART_LABELS", "zone=a,kind=b")
    labels = config.load(PartSettings, {"job": "j"}, None).settings.labels
    assert labels == {"zone": "a", "kind": "b"}
    monkeypatch.setenv("HETERTRAIN_PART_LABELS", "zone")
    with pytest.raises(SettingsError, match="KEY=VALUE"):
        config.load(PartSettings, {"job": "j"}, None)


def test_a_key_outside_of_a_table_is_an_error() -> None:
    Path("hetertrain.toml").write_text('job = "x"\n')
    with pytest.raises(SettingsError, match="must be in a table"):
        config.load(PartSettings, {}, None)


def test_no_error_prints_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERTRAIN_PART_PASSWORD", "hunter2")
    with pytest.raises(SettingsError) as error:
        config.load(PartSettings, {}, None)
    assert "hunter2" not in f"{error.value} {error.value.__cause__}"


def install(monkeypatch: pytest.MonkeyPatch, *commands: Command) -> None:
    found = {command.name: command for command in commands}
    monkeypatch.setattr(cli, "installed_commands", lambda *_: found)


def test_a_secret_has_no_flag_and_is_never_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HETERTRAIN_PART_PASSWORD", "hunter2")
    part = Command(name="part", help="a part", run=lambda _: 0, settings=lambda: PartSettings)
    install(monkeypatch, part)
    assert cli.main(["config", "show", "--json"]) == 0
    output = capsys.readouterr().out
    assert "hunter2" not in output
    rows = {row["setting"]: row for row in json.loads(output)["part"]}
    assert rows["password"]["flag"] == ""
    assert rows["password"]["origin"] == "environment HETERTRAIN_PART_PASSWORD"
    assert rows["job"]["origin"] == "missing"


def test_flags_reach_the_command_as_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def run(namespace) -> int:
        seen.append(namespace.settings)
        return 0

    install(
        monkeypatch, Command(name="part", help="a part", run=run, settings=lambda: PartSettings)
    )
    assert (
        cli.main(["part", "--job", "j", "--port", "5", "--labels", "a=b", "--labels", "c=d"]) == 0
    )
    assert (seen[0].job, seen[0].port, seen[0].labels) == ("j", 5, {"a": "b", "c": "d"})


def test_a_typed_error_becomes_one_line_and_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_namespace) -> int:
        raise TrainError("out of memory")

    install(monkeypatch, Command(name="part", help="a part", run=run))
    assert cli.main(["part"]) == TrainError.exit_code
    assert capsys.readouterr().err == "error[train_failed]: out of memory\n"
    assert cli.main(["prat"]) == SettingsError.exit_code
    assert "unknown command prat; installed: part" in capsys.readouterr().err


def test_a_part_whose_needs_are_not_installed_does_not_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    everything = cli.installed_commands()
    assert {"vehicle", "edge", "aggregator", "demo"} <= everything.keys()
    found = cli.importlib.util.find_spec
    missing = ("safetensors", "iotcore", "matplotlib", "fastapi")
    monkeypatch.setattr(
        cli.importlib.util, "find_spec", lambda name: None if name in missing else found(name)
    )
    shown = cli.installed_commands().keys()
    assert shown == {"vehicle", "vehicle enroll", "vehicle doctor", "vehicle inspect"}


def test_a_shell_completes_commands_of_two_words_and_their_flags(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out

    def complete(*words: str) -> set[str]:
        line = " ".join(f"'{word}'" for word in words)
        code = f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _hetertrain\n"
        code += 'printf "%s\\n" "${COMPREPLY[@]}"'
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
        return set(done.stdout.split())

    assert "node" in complete("hetertrain", "no")
    assert complete("hetertrain", "node", "ap") == {"approve"}
    assert "--state" in complete("hetertrain", "node", "list", "--st")


def test_help_imports_neither_torch_nor_an_mqtt_client() -> None:
    code = (
        "import sys; from hetertrain.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'paho', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
