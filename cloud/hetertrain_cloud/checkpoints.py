"""The checkpoint store: safetensors files that are whole or not there, newest first, with
fall-back.

A checkpoint is written to a temporary file, synced, and renamed; its digest stands in its own
metadata, so that a torn or altered file is noticed and the one before it is used.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from hetertrain.core.layout import ParameterLayout
from hetertrain.core.update import Checkpoint
from hetertrain.errors import LayoutError, StoreError
from hetertrain.logging import get_logger
from hetertrain.transport.database import store_errors
from hetertrain.transport.files import write_whole

KEPT = 3
OLDER = "older"
"""Folder in the store's: superseded checkpoints, ever fewer with age, to roll back to."""
ROLLBACK_FILE = "rollback.safetensors"
"""In a job's folder: the model that its aggregator goes on from when it starts."""
FORMAT = "hetertrain-2"
"""2: the job's terms are in the snapshot."""
STATE_PREFIX = "aggregator-state/"
"""Names of arrays that are the aggregator's, not the model's."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint, and the aggregator's state beside it."""

    checkpoint: Checkpoint
    snapshot: dict[str, Any]
    arrays: dict[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class CheckpointStore:
    """The checkpoints of one job in one directory: the newest ``KEPT``, which a start may need, and
    in ``OLDER`` one for each range of ages, to roll back to.
    """

    directory: Path
    layout: ParameterLayout
    keep_first: bool = False
    """Keep the oldest one too."""

    def save(
        self,
        checkpoint: Checkpoint,
        snapshot: dict[str, Any],
        arrays: Mapping[str, NDArray[np.generic]],
    ) -> Path:
        """Make a checkpoint durable, with plain data and arrays of the aggregator's state.

        Raises:
            StoreError: the disk is full or broken; older checkpoints are untouched.
        """
        path = checkpoint_path(self.directory, checkpoint.version)
        extra = {f"{STATE_PREFIX}{name}": array for name, array in arrays.items()}
        write_model(path, self.layout, checkpoint, {"snapshot": json.dumps(snapshot)}, extra)
        superseded = self._newest_first()[KEPT:]
        with store_errors(f"set older checkpoints in {self.directory} aside"):
            for old in superseded[:-1] if self.keep_first else superseded:
                self._set_aside(old)
            self._thin(checkpoint.version)
        return path

    def _set_aside(self, path: Path) -> None:
        older = self.directory / OLDER
        older.mkdir(exist_ok=True)
        path.replace(older / path.name)

    def _thin(self, newest: int) -> None:
        """Keep the oldest of each range of ages; the next older range begins where it ends, so that
        each has one at any time. Ages are counted in versions: minutes or days, as the job goes.
        """
        has_one: set[int] = set()
        for version in kept_versions(self.directory / OLDER):
            age_range = (newest - version).bit_length() // 2
            if age_range in has_one:
                checkpoint_path(self.directory / OLDER, version).unlink(missing_ok=True)
            has_one.add(age_range)

    def oldest_version(self) -> int:
        """Return the version of the oldest checkpoint that is kept."""
        return kept_versions(self.directory)[0]

    def load(self, *, is_oldest: bool = False) -> Stored | None:
        """Return the newest or oldest checkpoint that is whole; None where none was ever written.

        Raises:
            StoreError: there are checkpoints, but none is whole.
        """
        paths = self._newest_first()
        for path in reversed(paths) if is_oldest else paths:
            try:
                return self._read(path)
            except (
                StoreError,
                LayoutError,
                SafetensorError,
                OSError,
                KeyError,
                ValueError,
            ) as error:
                get_logger().error("checkpoint_unusable", path=str(path), error=str(error))
        if paths:
            raise StoreError(
                f"no checkpoint in {self.directory} is whole and of this task: put one back from a "
                "backup, or move the folder away to begin anew"
            )
        return None

    def _newest_first(self) -> list[Path]:
        return sorted(self.directory.glob("version-*.safetensors"), reverse=True)

    def _read(self, path: Path) -> Stored:
        metadata, tensors = _read_tensors(path)
        checkpoint = _checked(path, self.layout, metadata, tensors)
        arrays = {
            name.removeprefix(STATE_PREFIX): tensor
            for name, tensor in tensors.items()
            if name.startswith(STATE_PREFIX)
        }
        return Stored(checkpoint, json.loads(metadata["snapshot"]), arrays)


def read_model(path: Path, layout: ParameterLayout) -> Checkpoint:
    """Read a model that ``write_model`` or ``export_model`` wrote.

    Raises:
        StoreError: the file is torn, altered, or of another format or task.
    """
    try:
        return _checked(path, layout, *_read_tensors(path))
    except (LayoutError, SafetensorError, OSError, KeyError, ValueError) as error:
        raise StoreError(f"cannot use the model {path}: {error}") from error


def export_model(source: Path, target: Path) -> None:
    """Write the model of a checkpoint alone, without the aggregator's state.

    Raises:
        StoreError: the checkpoint is torn, or the disk full.
    """
    try:
        metadata, tensors = _read_tensors(source)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise StoreError(f"cannot use the checkpoint {source}: {error}") from error
    model = {n: tensor for n, tensor in tensors.items() if not n.startswith(STATE_PREFIX)}
    metadata.pop("snapshot", None)
    # Several may be exporting it at once.
    temporary = target.with_name(f"{target.stem}-{secrets.token_hex(4)}.tmp")
    write_whole(target, (save(model, metadata),), temporary)


def checkpoint_path(directory: Path, version: int) -> Path:
    """Return where the checkpoint of a version is, if it is kept."""
    return directory / f"version-{version:08d}.safetensors"


def kept_versions(directory: Path) -> list[int]:
    """Return the versions whose files are in a directory, in order."""
    paths = directory.glob("version-*.safetensors")
    return sorted(int(path.stem.removeprefix("version-")) for path in paths)


def _read_tensors(path: Path) -> tuple[dict[str, str], dict[str, NDArray[np.generic]]]:
    with safe_open(path, framework="numpy") as file:
        metadata: dict[str, str] = file.metadata()
        if metadata["format"] != FORMAT:
            raise StoreError(f"{path} is of format {metadata['format']}, not {FORMAT}")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict
    return metadata, tensors


def _checked(
    path: Path,
    layout: ParameterLayout,
    metadata: dict[str, str],
    tensors: dict[str, NDArray[np.generic]],
) -> Checkpoint:
    checkpoint = Checkpoint(int(metadata["version"]), *layout.flatten(tensors))
    if checkpoint.digest() != metadata["digest"]:
        raise StoreError(f"{path} was altered: its digest is not {metadata['digest']}")
    return checkpoint


def write_model(
    path: Path,
    layout: ParameterLayout,
    checkpoint: Checkpoint,
    metadata: dict[str, str],
    extra: Mapping[str, NDArray[np.generic]] | None = None,
) -> None:
    """Write a model by tensor name, and ``extra`` arrays beside it, atomically.

    Raises:
        StoreError: the disk is full or broken; a file that was there is untouched.
    """
    metadata = metadata | {
        "format": FORMAT,
        "version": str(checkpoint.version),
        "digest": checkpoint.digest(),
    }
    tensors = layout.unflatten(checkpoint.vector, checkpoint.integers) | dict(extra or {})
    write_whole(path, (save(tensors, metadata),))
