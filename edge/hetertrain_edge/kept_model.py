"""The newest version that a gateway was given, on its disk: after a restart without the cloud its
cell is served from it, and with the cloud only what is new comes down.

The file is the frame in which a whole model travels, with the digests of both. A version comes
every second or two, which would wear out a disk. So it is written at first, when the link to the
cloud breaks, at the end, and between these every ``SAVE_SECONDS``, or so seldom that it comes to
``SAVE_BYTES_PER_SECOND``: what was lost in a power cut is a few versions.
"""

from __future__ import annotations

import math
from pathlib import Path

from hetertrain import codec
from hetertrain.core.update import model_digest
from hetertrain.errors import FrameError, PayloadError, StoreError
from hetertrain.logging import Logger
from hetertrain.transport.files import write_whole
from hetertrain.wire.contents import integers_of, model_head, model_terms, unpack_as
from hetertrain.wire.events import ModelReceived
from hetertrain.wire.frames import pack_head
from hetertrain.wire.messages import ModelContent

SAVE_SECONDS = 30.0
SAVE_BYTES_PER_SECOND = 1 << 20


class KeptModel:
    """One file with the newest version; one thread owns it."""

    def __init__(self, path: Path, log: Logger) -> None:
        self._path = path
        self._log = log
        self._unsaved: ModelReceived | None = None
        self._save_at = -math.inf

    def load(self) -> ModelReceived | None:
        """Return what was saved; None where there is nothing, or nothing whole."""
        if not self._path.exists():
            return None
        try:
            head, payload = unpack_as(ModelContent, bytearray(self._path.read_bytes()))
            vector = codec.decode_owned(payload, head.size)
            integers = integers_of(head)
            if model_digest(vector, integers, head.lineage) != head.model:
                raise FrameError("model", "it is not what its head says")
        except (OSError, FrameError, PayloadError) as error:
            self._log.error("kept_model_unusable", path=str(self._path), error=str(error))
            return None
        return ModelReceived(head.version, vector, integers, None, model_terms(head))

    def take(self, model: ModelReceived, now: float) -> None:
        """Keep a version, on disk too where that is due."""
        self._unsaved = model
        if now >= self._save_at:
            self.save(now)

    def save(self, now: float) -> None:
        """Write the newest version, if it is not written yet. Where the disk does not take it, the
        one before stays.
        """
        model, self._unsaved = self._unsaved, None
        if model is None:
            return
        self._save_at = now + max(SAVE_SECONDS, model.vector.nbytes / SAVE_BYTES_PER_SECOND)
        head = model_head(
            version=model.version,
            sync=None,
            base="",
            model=model_digest(model.vector, model.integers, model.terms.lineage),
            size=model.vector.size,
            integers=model.integers,
            terms=model.terms,
        )
        try:
            start, values = codec.whole(model.vector)
            write_whole(self._path, (pack_head(head, start, values), start, values))
        except (StoreError, PayloadError) as error:
            self._log.error("model_not_kept", version=model.version, error=str(error))
