"""The house rules that a machine can check."""

import re
import subprocess
import sys
from pathlib import Path

from hetertrain_lab.aggregate_bench import STAGES, owner_of

ROOT = Path(__file__).resolve().parents[2]


def test_imports_keep_their_direction_and_the_core_does_no_io() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_only_one_file_touches_the_mqtt_client() -> None:
    users = [
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*/hetertrain*/**/*.py")
        if ".venv" not in path.parts and "paho" in _imports(path)
    ]
    assert users == ["shared/hetertrain/transport/mqtt.py"]


def test_only_one_file_touches_the_library_of_logs() -> None:
    """It is imported in a way that keeps out what draws tables."""
    users = [
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*/hetertrain*/**/*.py")
        if ".venv" not in path.parts and "structlog" in _imports(path)
    ]
    assert users == ["shared/hetertrain/logging.py"]


def test_nothing_that_travels_or_is_kept_is_pickled() -> None:
    users = [
        path.name
        for path in ROOT.rglob("*/hetertrain*/**/*.py")
        if ".venv" not in path.parts and "pickle" in _imports(path)
    ]
    assert users == []


def test_an_agent_and_a_gateway_never_import_torch_or_what_draws_tables() -> None:
    code = (
        "import sys, hetertrain_vehicle.cli, hetertrain_vehicle.agent, "
        "hetertrain_vehicle.trainer_process, "
        "hetertrain_edge.service; sys.exit(bool({'torch', 'rich'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _imports(path: Path) -> set[str]:
    words = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return {w[1].split(".")[0] for w in words if len(w) > 1 and w[0] in ("import", "from")}


def test_every_test_that_a_promise_names_exists() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", text))
    sources = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tests/*/test_*.py"))
    defined = set(re.findall(r"^def (test_\w+)", sources, re.MULTILINE))

    assert len(named) > 20
    assert named <= defined


def test_every_stage_that_the_aggregate_bench_times_is_a_function() -> None:
    for functions in STAGES.values():
        for function in functions:
            owner, name = owner_of(function)
            assert callable(getattr(owner, name))
