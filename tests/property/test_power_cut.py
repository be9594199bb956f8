"""Power fails between a write and its sync: sectors that were written since the last sync are on
the disk or not, in any mixture. What a store said was durable is still there, and it opens.

Simulated on copies of the files: what stood after one commit is safe, and each sector that the next
one changed is the old one, the new one, or zero. That SQLite syncs before a commit returns is
its promise, for which ``synchronous`` must be FULL.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetertrain.core.layout import ParameterLayout
from hetertrain.core.update import Checkpoint
from hetertrain.transport.inbox import Inbox
from hetertrain_cloud.checkpoints import CheckpointStore

SECTOR_BYTES = 512
LOG_HEADER_BYTES = 32
FILES = ("inbox.db", "inbox.db-wal")
Image = dict[str, bytes]


def image_of(directory: Path) -> Image:
    return {
        name: (directory / name).read_bytes() if (directory / name).exists() else b""
        for name in FILES
    }


def torn(before: Image, after: Image, chance: random.Random) -> Image:
    """Return what a power cut may leave of the writes that led from one image to the other.

    The log is synced before anything of it goes into the file, so the log is torn or the file is;
    and a log that begins anew syncs its header before the rest.
    """
    file, log = FILES
    if chance.random() < 0.5:
        return {file: _torn(before[file], after[file], chance), log: after[log]}
    header = after[log][:LOG_HEADER_BYTES]
    begins_anew = before[log][:LOG_HEADER_BYTES] != header
    if begins_anew and chance.random() < 0.2:
        return before
    rest = _torn(before[log], after[log], chance)
    return {file: before[file], log: header + rest[LOG_HEADER_BYTES:]}


def _torn(old: bytes, new: bytes, chance: random.Random) -> bytes:
    share = chance.choice((0.0, 0.5, 0.9, 1.0))
    size = chance.choice((len(old), len(new)))
    sectors = []
    for start in range(0, size, SECTOR_BYTES):
        end = min(start + SECTOR_BYTES, size)
        source = new if chance.random() < share else old
        sectors.append(source[start:end].ljust(end - start, b"\0"))
    return b"".join(sectors)


@settings(max_examples=25)
@given(st.integers(0, 2**32))
def test_a_journal_keeps_what_was_committed_before_a_power_cut(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    chance = random.Random(seed)
    directory = Path(tmp_path_factory.mktemp("disk"))
    inbox = Inbox(directory / "inbox.db")
    (level,) = inbox._database.execute("PRAGMA synchronous").fetchone()
    assert level == 2, "FULL: the log is synced before a commit returns"
    committed: list[bytes] = []
    images = [image_of(directory)]
    for _ in range(12):
        batch = [chance.randbytes(chance.choice((20, 5_000, 300_000))) for _ in range(2)]
        inbox.append(0, batch)
        committed += batch
        images.append(image_of(directory))
    cut = chance.randrange(1, len(images) - 1)
    left = torn(images[cut], images[cut + 1], chance)
    inbox.close()
    other = Path(tmp_path_factory.mktemp("after"))
    for name, data in left.items():
        (other / name).write_bytes(data)

    after = Inbox(other / "inbox.db")

    found = list(after.read(0, 0))
    assert not after.damage
    assert found in (committed[: 2 * cut], committed[: 2 * cut + 2])
    after.append(0, [b"more"])
    after.close()


def test_a_checkpoint_is_synced_before_it_takes_its_name_and_its_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"weight": np.arange(600, dtype=np.float32)}
    layout = ParameterLayout.of(tensors, {"weight"})
    store = CheckpointStore(tmp_path, layout)
    steps: list[str] = []
    sync, rename = os.fsync, Path.rename

    def record_sync(descriptor: int) -> None:
        steps.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        sync(descriptor)

    def record_rename(path: Path, target: Path) -> Path:
        steps.append(f"rename {path.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "rename", record_rename)
    for version in (1, 2):
        checkpoint = Checkpoint(version, tensors["weight"] + version, np.empty(0, np.int64))
        store.save(checkpoint, {}, {})

    name = "version-00000002.tmp"
    assert steps[-3:] == [f"sync {name}", f"rename {name}", f"sync {tmp_path.name}"]
    # What a power cut leaves of a third one is no checkpoint, and in nobody's way.
    whole = (tmp_path / "version-00000002.safetensors").read_bytes()
    for size in range(0, len(whole), 97):
        (tmp_path / "version-00000003.tmp").write_bytes(whole[:size])
        stored = store.load()
        assert stored is not None
        assert stored.checkpoint.version == 2
