"""Files that are whole or not there, also after a power cut."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hetertrain.errors import StoreError


def write_whole(
    path: Path, parts: Iterable[bytes | memoryview], temporary: Path | None = None
) -> None:
    """Write a file of ``parts`` one after the other: to ``temporary``, synced, then renamed.

    Raises:
        StoreError: the disk is full or broken; a file that was there is untouched.
    """
    temporary = temporary or path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)  # It takes the space that is missing.
        raise StoreError(f"cannot write {path}: {error}; check the disk and its space") from error
