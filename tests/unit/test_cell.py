"""What a cell lets through to its machine."""

from __future__ import annotations

import numpy as np

from hetertrain.cell import Cell, Event
from hetertrain.core.policy import SYNC_PRESETS, WEIGHT_PRESETS
from hetertrain.core.update import Checkpoint
from hetertrain.logging import silent_logger
from hetertrain.transport import mqtt
from hetertrain.wire import topics
from hetertrain.wire.contents import JobTerms, pack_update
from hetertrain.wire.downlink import Downlink
from hetertrain.wire.events import Outgoing
from hetertrain.wire.frames import pack, unpack
from hetertrain.wire.messages import Begin, Chunk, VerdictMessage
from hetertrain.wire.transfer import content_digest
from tests.builders import LAYOUT, SIZE, make_update

TERMS = JobTerms(LAYOUT, SYNC_PRESETS["sap"], WEIGHT_PRESETS["sap"], {}, "run")


class Wire:
    bytes_up = bytes_down = 0

    def __init__(self) -> None:
        self.sent: list[Outgoing] = []

    def publish(self, outgoing: tuple[Outgoing, ...]) -> None:
        self.sent.extend(outgoing)

    def resubscribe(self, subscriptions: tuple[str, ...]) -> None:
        del subscriptions


def test_a_content_that_could_not_be_read_back_from_a_journal_is_quarantined() -> None:
    """Its chunks are what was announced, but the frame inside is not what it says of itself."""
    wire, events = Wire(), list[Event]()
    downlink = Downlink("job", "cloud")
    cell = Cell(downlink, wire, lambda event, _now: events.append(event), silent_logger())
    checkpoint = Checkpoint(0, np.zeros(SIZE, np.float32), np.empty(0, np.int64))
    cell.release(checkpoint, None, TERMS, 0.0)
    topic = topics.up("job", "cloud", "t1", "n0")

    for seq, mask in ((1, 0), (2, 1)):
        content = bytearray(pack_update(make_update("n0", seq)))
        content[-1] ^= mask
        digest, size = content_digest(content), len(content)
        begin = Begin(node="n0", seq=seq, size_bytes=size, chunk_bytes=4096, digest=digest)
        cell.take(mqtt.Received(topic, pack(begin)), 1.0)
        chunk = pack(Chunk(node="n0", seq=seq, index=0), bytes(content))
        cell.take(mqtt.Received(topic, chunk), 1.0)

    assert len(events) == 1
    assert cell.refused == {"quarantined": 1}
    verdict, _ = unpack(wire.sent[-1].frame)
    assert isinstance(verdict, VerdictMessage)
    assert (verdict.seq, verdict.outcome) == (2, "quarantined")
    assert "digest" in verdict.reason
