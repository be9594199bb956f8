"""What the API says of the control plane itself, and of what can be chosen for a job."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from hetertrain_cloud.control.jobs import JobSpecification
from hetertrain_cloud.control.settings import CloudSettings
from tests.control import Bench, control_plane

SETTINGS = CloudSettings(
    database_url=SecretStr("postgresql+psycopg://anna:opensesame@db/fleet"),
    broker_password=SecretStr("opensesame"),
    listen_port=9443,
)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with control_plane(tmp_path) as made:
        made.plane.settings = SETTINGS.shown()
        yield made


def test_settings_are_shown_without_secrets_and_to_operators_only(bench: Bench) -> None:
    assert bench.client("viewer").get("/api/v1/settings").status_code == 403
    answer = bench.client("operator").get("/api/v1/settings")
    shown = answer.json()
    settings = {each["name"]: each for each in shown["settings"]}

    assert "opensesame" not in answer.text
    assert not {"database_url", "broker_password"} & settings.keys()
    assert (settings["listen_port"]["value"], settings["listen_port"]["is_given"]) == ("9443", True)
    assert settings["listen_port"]["variable"] == "HETERTRAIN_CLOUD_LISTEN_PORT"
    assert not settings["listen_host"]["is_given"]
    assert all(each["description"] for each in settings.values())
    assert shown["authority"]["fingerprint"] == bench.plane.authority.fingerprint()
    assert shown["authority"]["expires_at"] > shown["authority"]["begins_at"]
    assert (shown["database"], shown["broker"]["kind"]) == ("sqlite", "embedded")
    assert (shown["broker"]["host"], shown["broker"]["port"]) == ("broker", 8883)


def test_what_was_given_is_still_known_in_the_process_that_serves() -> None:
    there: CloudSettings = pickle.loads(pickle.dumps(SETTINGS))  # as spawn does
    assert there.shown() == SETTINGS.shown()


def test_a_form_for_jobs_has_all_options_with_bounds_and_what_schemes_have(bench: Bench) -> None:
    form = bench.client("viewer").get("/api/v1/job-schema").json()
    properties = form["specification"]["properties"]

    assert properties.keys() == JobSpecification.model_fields.keys()
    assert all(each["description"] for each in properties.values())
    assert set(properties["policy"]["enum"]) == set(form["presets"])
    assert form["presets"]["sap"]["sync_seconds"] == 20.0
    assert form["presets"]["fedavg"]["sync_seconds"] is None
    assert '"maximum": 1' in json.dumps(properties["cut_fraction"])
