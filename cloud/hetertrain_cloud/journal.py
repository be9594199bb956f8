"""The aggregator's journal as bytes, and the machine that a checkpoint and a journal give.

What is accepted, cut or ordered is a record; repeated in order on the checkpoint before them, the
records give the same versions bit for bit. A restart does so with the newest checkpoint, a
replay with the oldest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict

from hetertrain.core.aggregator import Aggregator, Release
from hetertrain.core.events import (
    BundleArrived,
    CutRecord,
    PartialArrived,
    Record,
    TermsRecord,
    UpdateArrived,
)
from hetertrain.core.gate import Gate
from hetertrain.core.layout import ParameterLayout
from hetertrain.errors import FrameError
from hetertrain.wire.contents import unpack_arrival
from hetertrain_cloud.checkpoints import Stored

_CUT = b"cut "
"""How the mark of a cut begins; the synchronisation that it ended follows, if any."""
_TERMS = b"terms "
"""How new terms begin; JSON follows."""


def write_record(record: Record) -> bytes | bytearray:
    """Write a record; an update as it came."""
    match record:
        case CutRecord(_, sync):
            return _CUT + (b"" if sync is None else str(sync).encode())
        case TermsRecord():
            return _TERMS + json.dumps(asdict(record)).encode()
        case UpdateArrived() | PartialArrived() | BundleArrived():
            assert record.content, "it came over the wire"
            return record.content


def read_record(content: bytes, version: int) -> Record:
    """Read a record of the time when ``version`` was the newest.

    Raises:
        FrameError: the record is damaged.
    """
    if content.startswith(_CUT):
        sync = content.removeprefix(_CUT)
        return CutRecord(version + 1, int(sync) if sync else None)
    if content.startswith(_TERMS):
        return TermsRecord.from_plain(json.loads(content.removeprefix(_TERMS)))
    return unpack_arrival(content)


def restored(stored: Stored, layout: ParameterLayout) -> Aggregator:
    """Return the machine as it stood when a checkpoint was written."""
    terms = TermsRecord.from_plain(stored.snapshot["terms"])
    max_lag = terms.policy.max_lag
    gate = Gate(layout.digest, layout.size, layout.integer_size, max_lag, terms.lineage)
    buffers = layout.buffers()
    machine = Aggregator(gate, terms.policy, terms.weights, stored.checkpoint, buffers)
    machine.restore(stored.snapshot, stored.arrays)
    return machine


def repeat(
    machine: Aggregator, contents: Iterable[bytes], on_damaged: Callable[[FrameError], None]
) -> Iterator[Release]:
    """Repeat a journal; yield each cut. A damaged record is reported and left out."""
    for content in contents:
        try:
            record = read_record(content, machine.checkpoint.version)
        except FrameError as error:
            on_damaged(error)
            continue
        if isinstance(record, CutRecord) and not machine.open.contributions:
            on_damaged(FrameError("content", f"version {record.version} has no update left"))
            continue
        release = machine.replay(record)
        if release is not None:
            yield release
