"""A gateway's own copy of the newest version."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hetertrain.core.policy import SYNC_PRESETS, WEIGHT_PRESETS, Statistics
from hetertrain.logging import silent_logger
from hetertrain.wire.contents import JobTerms
from hetertrain.wire.events import ModelReceived
from hetertrain_edge.kept_model import SAVE_SECONDS, KeptModel

TERMS = JobTerms("layout", SYNC_PRESETS["sap"], WEIGHT_PRESETS["sap"], {7: Statistics(9)}, "run")


def model(version: int) -> ModelReceived:
    vector = np.full(1000, version / 3, np.float32)
    return ModelReceived(version, vector, np.array([version]), 4, TERMS)


def kept(path: Path) -> ModelReceived | None:
    return KeptModel(path, silent_logger()).load()


def test_a_version_comes_back_from_the_disk_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "model.frame"
    assert kept(path) is None
    KeptModel(path, silent_logger()).take(model(7), 0.0)
    found = kept(path)
    assert found is not None
    np.testing.assert_array_equal(found.vector, model(7).vector)
    assert (found.version, found.integers.tolist(), found.terms) == (7, [7], TERMS)
    assert found.sync is None, "a synchronisation that is long over ends nobody's hold"


def test_versions_are_written_seldom_and_the_newest_when_it_matters(tmp_path: Path) -> None:
    path = tmp_path / "model.frame"
    store = KeptModel(path, silent_logger())
    for version in range(100):
        store.take(model(version), version * SAVE_SECONDS / 50)
    assert kept(path).version == 50
    store.save(SAVE_SECONDS * 2)
    assert kept(path).version == 99
    written_at = path.stat().st_mtime_ns
    store.save(SAVE_SECONDS * 3)
    assert path.stat().st_mtime_ns == written_at


def test_a_torn_or_altered_copy_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "model.frame"
    KeptModel(path, silent_logger()).take(model(7), 0.0)
    whole = path.read_bytes()
    for damaged in (b"", whole[:-5], whole[:-1] + bytes([whole[-1] ^ 1]), bytes(len(whole))):
        path.write_bytes(damaged)
        assert kept(path) is None


def test_a_full_disk_leaves_the_copy_before(tmp_path: Path) -> None:
    path = tmp_path / "model.frame"
    store = KeptModel(path, silent_logger())
    store.take(model(7), 0.0)
    path.with_suffix(".tmp").mkdir()
    store.take(model(8), 2 * SAVE_SECONDS)
    assert kept(path).version == 7
