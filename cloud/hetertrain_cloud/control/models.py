"""The models of a job's versions as files to be had: exported from its checkpoints on demand, and
kept for good where they are promoted.
"""

from __future__ import annotations

from pathlib import Path

from hetertrain.errors import StoreError
from hetertrain_cloud.checkpoints import (
    OLDER,
    ROLLBACK_FILE,
    checkpoint_path,
    export_model,
    kept_versions,
)
from hetertrain_cloud.control.problems import not_found

EXPORTS_KEPT = 8
_CHECKPOINTS = ("checkpoints", f"checkpoints/{OLDER}")


def kept(directory: Path) -> set[int]:
    """Return the versions whose models can be had, of the job in a directory."""
    names = (*_CHECKPOINTS, "exports", "promoted")
    return {version for name in names for version in kept_versions(directory / name)}


def model_file(directory: Path, version: int, *, is_promoted: bool = False) -> Path:
    """Return the file of a version's model, made where it is not there yet.

    Raises:
        ProblemError: 404, it is not kept.
    """
    promoted = checkpoint_path(directory / "promoted", version)
    exported = checkpoint_path(directory / "exports", version)
    target = promoted if is_promoted or promoted.exists() else exported
    sources = (exported, *(checkpoint_path(directory / name, version) for name in _CHECKPOINTS))
    source = next((path for path in (target, *sources) if path.exists()), None)
    if source is None:
        raise not_found("version", f"{version} with a model that is kept")
    if source != target:
        try:
            export_model(source, target)
        except StoreError as error:
            raise not_found("version", f"{version} with a model that can be read") from error
        others = [v for v in kept_versions(directory / "exports") if v != version]
        for old in others[:-EXPORTS_KEPT]:
            checkpoint_path(directory / "exports", old).unlink(missing_ok=True)
    return target


def order_rollback(directory: Path, version: int) -> None:
    """Let a job's aggregator go on from a version when it starts next.

    Raises:
        ProblemError: 404, the version is not kept.
        StoreError: the disk is full or broken.
    """
    export_model(model_file(directory, version), directory / ROLLBACK_FILE)
