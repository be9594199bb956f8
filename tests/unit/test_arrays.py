"""Models as named arrays: their layout, and the file that a job begins with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hetertrain.arrays import layout_of_arrays, load_initial, save_initial
from hetertrain.core.layout import Role
from hetertrain.errors import LayoutError, SettingsError, TrainError

ARRAYS = {
    "z.weight": np.arange(6, dtype=np.float64).reshape(2, 3),
    "a.running_mean": np.ones(2, np.float32),
    "a.num_batches": np.array(3),
    "own.bias": np.zeros(2),
}
PATTERNS = {"buffers": ("*.running_*",), "local": ("own.*",)}


def test_a_file_keeps_a_model_and_its_layout(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_initial(ARRAYS, path, **PATTERNS)
    arrays, layout = load_initial(path)

    assert layout == layout_of_arrays(ARRAYS, **PATTERNS)
    assert {place.name: place.role for place in layout.places} == {
        "z.weight": Role.PARAMETER,
        "a.running_mean": Role.BUFFER,
        "a.num_batches": Role.INTEGER,
        "own.bias": Role.LOCAL,
    }
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name], array)
        assert arrays[name].shape == array.shape


def test_the_order_of_names_and_the_precision_do_not_matter() -> None:
    other = {name: array.astype(array.dtype.kind + "4") for name, array in reversed(ARRAYS.items())}

    assert layout_of_arrays(other, **PATTERNS) == layout_of_arrays(ARRAYS, **PATTERNS)


@pytest.mark.parametrize(
    ("arrays", "patterns"),
    [
        ({}, {}),
        ({"n": np.zeros(3, np.int64)}, {}),
        ({"w": np.zeros(3)}, {"local": ("w",)}),
        ({"w": np.zeros(3)}, {"local": ("v*",)}),
        ({"w": np.zeros(3)}, {"buffers": "w"}),
        ({"w": np.zeros(3, np.complex64)}, {}),
    ],
)
def test_what_is_no_model_is_refused(arrays: dict, patterns: dict) -> None:
    with pytest.raises(LayoutError):
        layout_of_arrays(arrays, **patterns)


def test_a_model_with_a_number_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="'w'"):
        save_initial({"w": np.array([np.inf])}, tmp_path / "m")


@pytest.mark.parametrize("content", [None, b"", b"no model", bytes(100)])
def test_a_file_that_is_no_model_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError, match="initial model"):
        load_initial(path)


def test_the_client_is_imported_when_it_is_used() -> None:
    code = (
        "import sys, hetertrain\n"
        "assert not {'hetertrain.client', 'hetertrain.arrays', 'pydantic'} & sys.modules.keys()\n"
        "hetertrain.join, hetertrain.Session, hetertrain.Checkpoint, hetertrain.save_initial\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
