"""A model as named numpy arrays: its layout, what is wrong with arrays that do not fit it, and the
file that a job without a task begins with.

Float arrays are parameters, those that a pattern of ``buffers`` names are buffers (no optimiser
touches them), integer arrays are counters, and what a pattern of ``local`` names stays on its node.
Arrays are laid out by name, because a file does not keep their order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hetertrain.core.layout import ParameterLayout, Role
from hetertrain.errors import LayoutError, SettingsError, TrainError

Array = NDArray[np.generic]
Arrays = Mapping[str, Array]
PATTERNS_KEY = "hetertrain-patterns"
"""In a file's metadata: the patterns, as JSON."""


def layout_of_arrays(
    arrays: Arrays, buffers: Sequence[str] = (), local: Sequence[str] = ()
) -> ParameterLayout:
    """Return the layout of a model's arrays.

    Raises:
        LayoutError: an array is neither floating nor integer, or there is no parameter.
    """
    _check_patterns("buffers", buffers, arrays)
    _check_patterns("local", local, arrays)
    in_order = {name: np.asarray(arrays[name]) for name in sorted(arrays)}
    parameters = {name for name in arrays if not _matches(name, buffers)}
    layout = ParameterLayout.of(in_order, parameters, local)
    if not any(place.role is Role.PARAMETER and place.size for place in layout.places):
        raise LayoutError("no array is a parameter: there must be a float array that is not local")
    return layout


def check_arrays(layout: ParameterLayout, arrays: Arrays) -> None:
    """Compare arrays with a layout; their floats may be of any precision.

    Raises:
        LayoutError: an array is missing, is one too many, or has another shape or kind of number.
        TrainError: a number is not finite, as float32.
    """
    missing = [place.name for place in layout.places if place.name not in arrays]
    if missing:
        raise LayoutError(f"array {missing[0]!r} is missing: give all arrays of the model")
    surplus = sorted(arrays.keys() - {place.name for place in layout.places})
    if surplus:
        raise LayoutError(f"array {surplus[0]!r} is not one of the model's")
    for place in layout.places:
        array = np.asarray(arrays[place.name])
        if array.shape != place.shape:
            raise LayoutError(
                f"array {place.name!r} has shape {array.shape}, expected {place.shape}"
            )
        if place.role is not Role.LOCAL:
            _check_numbers(place.name, array, is_integer=place.role is Role.INTEGER)


def _check_numbers(name: str, array: Array, *, is_integer: bool) -> None:
    kinds, expected = ("iub", "integers") if is_integer else ("f", "floats")
    if array.dtype.kind not in kinds:
        raise LayoutError(f"array {name!r} has dtype {array.dtype}, expected {expected}")
    if not is_integer:
        # A number that float32 cannot hold becomes infinite on its way.
        with np.errstate(over="ignore"):
            is_finite = np.isfinite(array.astype(np.float32, copy=False)).all()
        if not is_finite:
            raise TrainError(
                f"array {name!r} has a number that is not finite: lower the learning rate, or "
                "check the data"
            )


def save_initial(
    arrays: Arrays, path: Path | str, *, buffers: Sequence[str] = (), local: Sequence[str] = ()
) -> None:
    """Write the model that ``hetertrain aggregator --initial-model`` begins a job with.

    ``buffers`` and ``local`` are the patterns that every node gives to ``join`` too.

    Raises:
        LayoutError: the arrays are not a model's.
        SettingsError: the library safetensors is not installed.
        TrainError: a number is not finite.
    """
    check_arrays(layout_of_arrays(arrays, buffers, local), arrays)
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise SettingsError("a model file needs safetensors: pip install safetensors") from error
    patterns = json.dumps({"buffers": list(buffers), "local": list(local)})
    plain = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    save_file(plain, path, {PATTERNS_KEY: patterns})


def load_initial(path: Path) -> tuple[dict[str, Array], ParameterLayout]:
    """Read a model file and its layout.

    Raises:
        LayoutError, TrainError: what is in it is not a model's.
        SettingsError: it cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            patterns = json.loads((file.metadata() or {}).get(PATTERNS_KEY, "{}"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict
        buffers, local = (list(map(str, patterns.get(key, ()))) for key in ("buffers", "local"))
    except (OSError, SafetensorError, ValueError, AttributeError, TypeError) as error:
        raise SettingsError(f"cannot read the initial model {path}: {error}") from error
    layout = layout_of_arrays(arrays, buffers, local)
    check_arrays(layout, arrays)
    return arrays, layout


def _check_patterns(what: str, patterns: Sequence[str], arrays: Arrays) -> None:
    if isinstance(patterns, str):
        raise LayoutError(f"{what} takes several patterns, as ({patterns!r},)")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in arrays):
            raise LayoutError(f"no array is named {pattern!r}, which {what} says")


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
