"""What must survive a crash: outbox, inbox and checkpoints."""

from __future__ import annotations

import resource
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from hetertrain.core.layout import ParameterLayout
from hetertrain.core.update import Checkpoint
from hetertrain.errors import LayoutError, StoreError
from hetertrain.transport.database import own_directory
from hetertrain.transport.inbox import Inbox
from hetertrain.transport.outbox import Outbox, read_pending
from hetertrain.wire.contents import unpack_update
from hetertrain_cloud.checkpoints import KEPT, OLDER, CheckpointStore, kept_versions
from hetertrain_cloud.history import whole_lines

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
TENSORS = {
    "weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "running_mean": np.ones(2, np.float32),
    "num_batches_tracked": np.array(7, np.int64),
    "personal.bias": np.zeros(3, np.float32),
}
LAYOUT = ParameterLayout.of(TENSORS, {"weight", "personal.bias"}, local=("personal.*",))


def make_checkpoint(version: int) -> Checkpoint:
    vector, integers = LAYOUT.flatten(TENSORS)
    return Checkpoint(version, vector + np.float32(version), integers)


def test_a_layout_returns_every_tensor_but_those_that_stay_local() -> None:
    back = LAYOUT.unflatten(*LAYOUT.flatten(TENSORS))
    assert back.keys() == TENSORS.keys() - {"personal.bias"}
    for name, tensor in back.items():
        np.testing.assert_array_equal(tensor, TENSORS[name])
    assert (LAYOUT.size, LAYOUT.integer_size) == (8, 1)


def test_a_layout_refuses_tensors_of_another_shape_by_name() -> None:
    with pytest.raises(LayoutError, match="weight"):
        LAYOUT.flatten(TENSORS | {"weight": np.zeros((3, 2), np.float32)})


def test_an_update_stays_in_the_outbox_until_it_has_its_verdict(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox.db", first_seq=100)
    outbox.put(outbox.next_seq, b"update")
    outbox.close()
    reopened = Outbox(tmp_path / "outbox.db", first_seq=1)
    pending = reopened.pending()
    assert (pending.seq, pending.content, reopened.next_seq) == (100, b"update", 101)
    reopened.settle(100)
    assert reopened.pending() is None
    assert reopened.next_seq == 101


def test_an_outbox_that_is_no_database_is_set_aside_and_counts_on(tmp_path: Path) -> None:
    (tmp_path / "outbox.db").write_bytes(b"no database" * 1000)

    outbox = Outbox(tmp_path / "outbox.db", first_seq=7)

    assert "0 rows were saved" in outbox.damage
    assert (outbox.next_seq, outbox.pending()) == (7, None)
    (aside,) = tmp_path.glob("outbox.db.damaged-*")
    assert aside.read_bytes().startswith(b"no database")
    outbox.close()
    assert not Outbox(tmp_path / "outbox.db", first_seq=9).damage


def restore(file: Path, dump: str) -> None:
    """Make a database of a golden dump: what a release wrote, to be opened by all that follow."""
    with closing(sqlite3.connect(file)) as database:
        database.executescript((GOLDEN / dump).read_text())


def test_an_outbox_of_every_release_opens_with_its_update_and_counts_on(tmp_path: Path) -> None:
    for dump in sorted(GOLDEN.glob("outbox_*.sql")):
        file = tmp_path / dump.stem
        restore(file, dump.name)
        assert read_pending(file).seq == 41  # To look changes nothing.
        outbox = Outbox(file, first_seq=1)
        pending = outbox.pending()
        update = unpack_update(pending.content)

        assert (pending.seq, outbox.next_seq, outbox.damage) == (41, 42, "")
        assert (update.node, update.seq, update.base_version, update.sync) == ("car-1", 41, 7, 3)
        outbox.note("a", "b")
        outbox.close()
        assert Outbox(file, first_seq=1).noted("a") == "b"


def test_an_inbox_of_every_release_opens_with_its_records(tmp_path: Path) -> None:
    for dump in sorted(GOLDEN.glob("inbox_*.sql")):
        restore(tmp_path / dump.stem, dump.name)
        inbox = Inbox(tmp_path / dump.stem)
        (record,) = inbox.read(0, 0)

        assert unpack_update(record).seq == 41
        assert inbox.noted("model") == "bW9kZWw="


def test_a_new_file_has_the_schema_that_an_old_one_is_brought_to(tmp_path: Path) -> None:
    def schema(file: Path) -> set[tuple[object, ...]]:
        Outbox(file, first_seq=1).close()
        with closing(sqlite3.connect(file)) as database:
            version = database.execute("PRAGMA user_version").fetchone()
            return {version, *database.execute("SELECT name, type FROM sqlite_master")}

    restore(tmp_path / "old.db", "outbox_1.sql")
    assert schema(tmp_path / "new.db") == schema(tmp_path / "old.db")


@pytest.mark.parametrize("open_store", [lambda file: Outbox(file, 1), Inbox, read_pending])
def test_a_file_of_a_later_release_is_refused_and_not_touched(
    open_store: Callable[[Path], object], tmp_path: Path
) -> None:
    file = tmp_path / "store.db"
    with closing(sqlite3.connect(file)) as database:
        database.executescript("CREATE TABLE pending (new); PRAGMA user_version = 99")
    before = file.read_bytes()

    with pytest.raises(StoreError, match=r"schema 99 of a later release.*upgrade"):
        open_store(file)

    assert file.read_bytes() == before
    assert not list(tmp_path.glob("*damaged*"))


def test_what_can_be_read_of_a_damaged_inbox_is_kept(tmp_path: Path) -> None:
    records = [bytes([i]) * 100_000 for i in range(50)]
    inbox = Inbox(tmp_path / "inbox.db")
    inbox.append(0, records)
    inbox.close()
    with (tmp_path / "inbox.db").open("r+b") as file:
        file.seek(2_000_000)
        file.write(b"\xff" * 500_000)

    damaged = Inbox(tmp_path / "inbox.db")

    saved = list(damaged.read(0, 0))
    assert damaged.damage
    assert 0 < len(saved) < 50
    assert all(record in records for record in saved if b"\xff" not in record)


def test_who_only_reads_sees_one_moment_and_never_touches_a_damaged_file(tmp_path: Path) -> None:
    owner = Inbox(tmp_path / "inbox.db")
    owner.append(0, [b"a", b"b"])
    reader = Inbox(tmp_path / "inbox.db", is_read_only=True)
    owner.forget(0, 0)
    owner.append(1, [b"c"])

    assert list(reader.read(0, 9)) == [b"a", b"b"]
    with pytest.raises(StoreError):
        reader.append(0, [b"d"])

    reader.close()
    owner.close()
    (tmp_path / "damaged.db").write_bytes(b"no database" * 1000)
    with pytest.raises(StoreError, match=r"damaged\.db"):
        Inbox(tmp_path / "damaged.db", is_read_only=True)
    assert (tmp_path / "damaged.db").read_bytes().startswith(b"no database")


def test_a_store_on_a_full_disk_is_a_typed_error_and_goes_on_when_there_is_room(
    tmp_path: Path,
) -> None:
    outbox, inbox = Outbox(tmp_path / "outbox.db", first_seq=1), Inbox(tmp_path / "inbox.db")
    outbox.put(1, b"small")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(StoreError, match="space"):
            outbox.put(2, bytes(2 << 20))
        with pytest.raises(StoreError, match="space"):
            inbox.append(0, [bytes(2 << 20)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert (outbox.pending().content, list(inbox.read(0, 0))) == (b"small", [])
    outbox.put(2, bytes(2 << 20))
    inbox.append(0, [bytes(2 << 20)])
    assert (outbox.pending().seq, len(list(inbox.read(0, 0)))) == (2, 1)


def test_the_inbox_repeats_what_it_took_in_order_by_section(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "inbox.db")
    inbox.append(0, [b"a", b"b"])
    inbox.append(1, [b"c"])
    inbox.close()
    reopened = Inbox(tmp_path / "inbox.db")
    assert list(reopened.read(0, 9)) == [b"a", b"b", b"c"]
    reopened.remark(0, 5)
    assert list(reopened.read(5, 5)) == [b"a", b"b"]
    assert (reopened.marks(), reopened.num_bytes) == ([1, 5], 3)
    reopened.append(1, [b"dd"])
    reopened.forget(5, 5)
    assert list(reopened.read(0, 9)) == [b"c", b"dd"]
    assert reopened.num_bytes == 3


def test_a_torn_checkpoint_falls_back_to_the_one_before(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, LAYOUT)
    store.save(make_checkpoint(1), {"seen": 1}, {})
    newest = store.save(make_checkpoint(2), {"seen": 2}, {})
    newest.write_bytes(newest.read_bytes()[:-5])
    stored = store.load()
    assert (stored.checkpoint.version, stored.snapshot) == (1, {"seen": 1})


def test_an_altered_checkpoint_is_not_used(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, LAYOUT)
    store.save(make_checkpoint(1), {}, {})
    newest = store.save(make_checkpoint(2), {}, {})
    altered = bytearray(newest.read_bytes())
    altered[-1] ^= 1
    newest.write_bytes(altered)
    assert store.load().checkpoint.version == 1


def test_a_torn_line_of_the_history_is_cut_off(tmp_path: Path) -> None:
    history = tmp_path / "versions.jsonl"
    history.write_text('{"version": 1}\n{"vers')
    assert whole_lines(history) == ['{"version": 1}']
    assert history.read_text() == '{"version": 1}\n'


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, LAYOUT)
    for version in range(KEPT + 3):
        store.save(make_checkpoint(version), {}, {})
    assert kept_versions(tmp_path) == [3, 4, 5]
    assert store.load().checkpoint.digest() == make_checkpoint(KEPT + 2).digest()


def test_a_disk_that_takes_no_older_checkpoint_is_a_typed_error_and_the_new_one_is_kept(
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path, LAYOUT)
    (tmp_path / OLDER).touch()
    for version in range(KEPT):
        store.save(make_checkpoint(version), {}, {})
    with pytest.raises(StoreError, match="aside"):
        store.save(make_checkpoint(KEPT), {}, {})
    assert store.load().checkpoint.version == KEPT


def test_older_checkpoints_grow_fewer_with_age_and_reach_back_to_the_beginning(
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path, LAYOUT)
    for version in range(0, 1000, 3):
        store.save(make_checkpoint(version), {}, {})
        ages = [version - older for older in kept_versions(tmp_path / OLDER)]
        assert len(ages) <= 5
        assert all(older <= 16 * newer for older, newer in pairwise(ages)), ages
    assert ages[0] == version


def test_a_directory_of_state_has_one_owner_though_it_be_paused(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, pathlib\n"
            "from hetertrain.transport.database import own_directory\n"
            "owner = own_directory(pathlib.Path(sys.argv[1]))\n"
            "print('owns', flush=True)\n"
            "sys.stdin.read()\n",
            str(tmp_path),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"owns\n"
        owner.send_signal(signal.SIGSTOP)

        with pytest.raises(StoreError, match=str(owner.pid)):
            own_directory(tmp_path)
    finally:
        owner.kill()
        owner.wait()

    own_directory(tmp_path).close()
