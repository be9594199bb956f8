"""Where settings are looked for, and what the log never shows."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field

from hetertrain import config, logging
from hetertrain.errors import SettingsError


class PartSettings(config.Settings):
    section: ClassVar[str] = "part"
    host: str = Field("localhost", description="the host")
    is_fast: bool = Field(True, description="whether it is fast")


@pytest.fixture(autouse=True)
def in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HETERTRAIN_CONFIG", raising=False)


def test_the_parts_own_variable_wins_over_the_shared_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERTRAIN_HOST", "shared")
    monkeypatch.setenv("HETERTRAIN_PART_HOST", "own")
    loaded = config.load(PartSettings, {}, None)
    assert loaded.settings.host == "own"
    assert loaded.origins["host"] == "environment HETERTRAIN_PART_HOST"


def test_a_shared_variable_wins_over_the_parts_own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("hetertrain.toml").write_text('[part]\nhost = "file"\n')
    monkeypatch.setenv("HETERTRAIN_HOST", "shared")
    assert config.load(PartSettings, {}, None).settings.host == "shared"


def test_what_is_common_may_be_meant_for_another_part() -> None:
    Path("hetertrain.toml").write_text('[common]\nhost = "h"\nof_another_part = 1\n')
    assert config.load(PartSettings, {}, None).settings.host == "h"


def test_the_named_file_wins_over_the_variable_over_the_working_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("hetertrain", "variable", "named"):
        Path(f"{name}.toml").write_text(f'[part]\nhost = "{name}"\n')
    assert config.load(PartSettings, {}, None).settings.host == "hetertrain"
    monkeypatch.setenv("HETERTRAIN_CONFIG", "variable.toml")
    assert config.load(PartSettings, {}, None).settings.host == "variable"
    assert config.load(PartSettings, {}, Path("named.toml")).settings.host == "named"


def test_a_named_file_that_is_missing_is_an_error() -> None:
    with pytest.raises(SettingsError, match=r"cannot read the settings file missing\.toml"):
        config.load(PartSettings, {}, Path("missing.toml"))


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [([], {}), (["--is-fast"], {"is_fast": True}), (["--no-is-fast"], {"is_fast": False})],
)
def test_only_flags_that_were_used_count(arguments: list[str], flags: dict[str, object]) -> None:
    parser = argparse.ArgumentParser()
    config.add_flags(parser, PartSettings)
    assert config.flags_of(parser.parse_args(arguments), PartSettings) == flags


def test_the_log_masks_secrets_and_leaves_out_what_is_below_its_level(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logging.configure("warning", json=True)
    log = logging.get_logger(part="part")
    log.info("too_quiet")
    log.warning("refused", broker_password="hunter2", tls_key_pem="hunter2", node="v1")
    (line,) = capsys.readouterr().err.splitlines()
    event = json.loads(line)
    assert "hunter2" not in line
    assert (event["event"], event["part"], event["node"]) == ("refused", "part", "v1")
    assert event["timestamp"].endswith("Z")
