"""In which form a gateway's partials go up, and what one costs.

``exact``
    The sums themselves, 8 bytes a parameter and base version, or a bundle where that is less: the
    cloud's model is bit for bit what it would be without a gateway.
``encoded``
    The sums in as many bytes as the uplink's tier has for a partial, as an update is encoded. What
    was left out is the gateway's *residual*; it goes with the next partial (error feedback).
``bundle``
    The updates one by one, for a cloud that is to see and to examine each. Exact too.

The residual is of work that vehicles need not send again, so it is on disk: in the state that the
last settled partial left. Of the partial in flight it is computed again after a restart, from the
updates in the inbox and what the partial has of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hetertrain import codec
from hetertrain.core.gate import Outcome
from hetertrain.core.layout import Vector
from hetertrain.core.policy import Statistics
from hetertrain.core.update import DELTA_MAX, GROUPS_MAX, Group, Partial
from hetertrain.errors import FrameError, PayloadError
from hetertrain.logging import Logger
from hetertrain.transport.files import write_whole
from hetertrain.wire.contents import (
    group_payloads,
    pack_bundle,
    pack_partial,
    unpack_as,
)
from hetertrain.wire.downlink import payload_bytes_max
from hetertrain.wire.frames import pack_head, unpack
from hetertrain.wire.messages import PartialContent, UpdateContent

BUNDLE_BYTES_MAX = 64 << 20
"""A bundle is sealed before it takes more, for the cloud's memory; one update may."""

ENOUGH_BYTES = 0.55
"""A parameter: four bits of each and their scales. More would keep a last per cent of the energy,
which the next partial brings anyway, for twice the bytes."""


class Form(StrEnum):
    """How a partial is written."""

    EXACT = "exact"
    ENCODED = "encoded"
    BUNDLE = "bundle"


@dataclass(frozen=True, slots=True)
class Passage:
    """What a partial needs to go up."""

    seq: int
    sync: int | None
    partial: Partial
    lineage: str
    statistics: Mapping[int, Statistics]
    """Of its base versions."""
    budget_bytes: int | None
    """Of an encoded one; None: as many as it takes."""
    updates_bytes: int
    """What its updates take one by one."""

    @property
    def sums_bytes(self) -> int:
        """What its sums take."""
        return sum(group.sums.nbytes for group in self.partial.groups.values())


class Forwarding:
    """Writes the contents of one gateway's partials; one thread owns it."""

    def __init__(self, form: Form, node: str, directory: Path, log: Logger) -> None:
        self.form = form
        self._node = node
        self._path = directory / "residual.frame"
        self._log = log
        self._lineage = ""
        self._seq = -1
        """The last partial that the residual is after."""
        self._residual: Vector | None = None
        """In examples times delta; None: nothing was left out."""
        if self._path.exists():
            self._load()
            if form is not Form.ENCODED:
                log.warning("residual_waits", reason="it goes up once partials are encoded again")
        self._next: Vector | None = None
        """What it will be once the partial in flight is settled."""

    def updates_bytes_max(self, num_parameters: int) -> int | None:
        """Return how much the updates of one partial may take; None: that does not matter."""
        if self.form is not Form.BUNDLE:
            return None
        return bundle_bytes_max(num_parameters)

    def write(self, passage: Passage, frames: Iterable[bytes]) -> bytes:
        """Return the content. ``frames``: of updates, the partial's among them; they are read where
        it takes them.
        """
        partial, seq = passage.partial, passage.seq
        form = self._form_of(passage)
        if form is Form.BUNDLE:
            bases = {v: s for v, s in passage.statistics.items() if v in partial.groups}
            mine = _frames_of(partial, frames)
            return pack_bundle(self._node, seq, passage.sync, mine, passage.lineage, bases)
        payloads: list[bytes] = []
        if form is Form.ENCODED:
            payloads = self._encode(partial, passage.lineage, passage.budget_bytes)
        return pack_partial(self._node, seq, passage.sync, partial, passage.lineage, payloads)

    def _form_of(self, passage: Passage) -> Form:
        """Return the form in which this one goes. What was collected under another form, or by an
        earlier release, may be more than ours takes: that goes as its sums.
        """
        num_parameters = passage.sums_bytes // (8 * len(passage.partial.groups))
        fits = passage.updates_bytes <= bundle_bytes_max(num_parameters)
        match self.form:
            case Form.ENCODED if len(passage.partial.groups) <= GROUPS_MAX:
                return Form.ENCODED
            case Form.BUNDLE if fits:
                return Form.BUNDLE
            case Form.EXACT if fits and passage.updates_bytes < passage.sums_bytes:
                return Form.BUNDLE
        if self.form is not Form.EXACT:
            self._log.warning("partial_goes_as_sums", seq=passage.seq, form=self.form)
        return Form.EXACT

    def take_up(self, seq: int, content: bytes, partial: Partial) -> None:
        """Find out, after a restart, what the content in flight has left out of its sums."""
        head, payload = unpack(content)
        if not isinstance(head, PartialContent) or not head.group_bytes:
            return  # It leaves nothing out.
        if seq == self._seq:
            self._next = self._residual  # It was settled, and the crash came after that.
            return
        if {(item[0], item[1]) for item in head.contributions} != partial.contributions.keys():
            # The residual before is in it; what it has left out itself nobody knows any more.
            self._log.error("residual_lost", reason="updates of the partial in flight are missing")
            self._next = None if self._residual is None else np.zeros_like(self._residual)
            return
        bases = [base for base, _ in head.groups]
        payloads = dict(zip(bases, group_payloads(head, payload), strict=True))
        self._leave_out(partial, head.lineage, lambda base, _: payloads[base])

    def settled(self, seq: int, outcome: Outcome) -> None:
        """Learn what became of the partial in flight before the next is written, and have the
        residual on disk.

        Raises:
            StoreError: the disk is full or broken.
        """
        left_out, self._next = self._next, None
        if left_out is None or outcome is Outcome.REJECTED:
            return  # A refused one is put together again, and this residual with it.
        if outcome is Outcome.QUARANTINED:
            # It was part of what cannot be used.
            left_out = np.zeros_like(left_out)
        self._residual, self._seq = left_out, seq
        self._save()

    def _encode(self, partial: Partial, lineage: str, budget_bytes: int | None) -> list[bytes]:
        mass: Counter[int] = Counter()
        for item in partial.contributions.values():
            mass[item.base_version] += item.mass

        def code(base: int, sums: Vector) -> bytes:
            if budget_bytes is None:
                return codec.encode(sums, None).payload
            share = min(budget_bytes * mass[base] // mass.total(), int(ENOUGH_BYTES * sums.size))
            return codec.encode(sums, max(share, codec.MINIMUM_BUDGET_BYTES)).payload

        return self._leave_out(partial, lineage, code)

    def _leave_out(
        self, partial: Partial, lineage: str, code: Callable[[int, Vector], bytes | memoryview]
    ) -> list[bytes]:
        """Have each group's sums coded, the residual with those of the newest base version; what
        is left of them all is the next residual.
        """
        residual = self._residual_of(partial, lineage)
        payloads: list[bytes] = []
        newest = max(partial.groups)
        left_out = np.zeros_like(residual)
        num_updates = Counter(item.base_version for item in partial.contributions.values())
        for base, group in sorted(partial.groups.items()):
            sums = _floats(group)
            if base == newest:
                sums += residual / np.float32(group.unit)
            # Half of what the cloud takes: a level may be a little over what it stands for.
            limit = np.float32(DELTA_MAX * num_updates[base] / 2)
            payload = code(base, np.clip(sums, -limit, limit))
            codec.parse(payload, sums.size).subtract_from(sums)
            left_out += sums * np.float32(group.unit)
            payloads.append(bytes(payload))
        self._next = left_out
        return payloads

    def _residual_of(self, partial: Partial, lineage: str) -> Vector:
        size = next(iter(partial.groups.values())).sums.size
        kept = self._residual
        if kept is not None and (kept.size != size or self._lineage != lineage):
            # It was learnt on models that no longer exist.
            self._log.warning("residual_dropped", lineage=self._lineage)
            kept = self._residual = None
        self._lineage = lineage
        return np.zeros(size, np.float32) if kept is None else kept

    def _load(self) -> None:
        try:
            head, payload = unpack_as(UpdateContent, bytearray(self._path.read_bytes()))
            self._residual = codec.decode_owned(payload, codec.announced_size(payload))
        except (OSError, FrameError, PayloadError) as error:
            self._log.error("residual_lost", reason=str(error))
        else:
            self._lineage, self._seq = head.lineage, head.seq

    def _save(self) -> None:
        assert self._residual is not None, "there is something to save"
        head = UpdateContent(
            node=self._node,
            seq=self._seq,
            base_version=0,
            examples=1,
            steps=1,
            layout="",
            lineage=self._lineage,
            sync=None,
        )
        start, values = codec.whole(self._residual)
        write_whole(self._path, (pack_head(head, start, values), start, values))


def bundle_bytes_max(num_parameters: int) -> int:
    """Return how much the updates of one bundle may take."""
    return min(BUNDLE_BYTES_MAX, payload_bytes_max(num_parameters))


def _frames_of(partial: Partial, frames: Iterable[bytes]) -> list[bytes]:
    """Return those of the partial's updates, each once."""
    found = {}
    for frame in frames:
        head, _ = unpack_as(UpdateContent, frame)
        key = (head.node, head.seq)
        if key in partial.contributions:
            found[key] = frame
    return list(found.values())


def _floats(group: Group) -> NDArray[np.float32]:
    return (group.sums * 2.0**-codec.FRACTION_BITS).astype(np.float32)
