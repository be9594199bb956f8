"""What a cell lets through to its machine."""

from __future__ import annotations

import numpy as np

from hetertrain.cell import Cell, Event
from hetertrain.core.policy import SYNC_PRESETS, WEIGHT_PRESETS
from hetertrain.core.update import Checkpoint
from hetertrain.logging import silent_logger
from hetertrain.transport import mqtt
from hetertrain.wire import topics
from hetertrain.wire.contents import JobTerms, pack_bundle, pack_update
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


class OpenCell:
    """A cell with its first version out, and what comes of what is sent to it."""

    def __init__(self) -> None:
        self.wire, self.events = Wire(), list[Event]()
        self.cell = Cell(
            Downlink("job", "cloud"),
            self.wire,
            lambda event, _now: self.events.append(event),
            silent_logger(),
        )
        checkpoint = Checkpoint(0, np.zeros(SIZE, np.float32), np.empty(0, np.int64))
        self.cell.release(checkpoint, None, TERMS, 0.0)

    def send(self, node: str, seq: int, content: bytes, relays: bool = False) -> None:
        topic = topics.up("job", "cloud", "t1", node)
        begin = Begin(
            node=node,
            seq=seq,
            size_bytes=len(content),
            chunk_bytes=1 << 16,
            digest=content_digest(content),
            relays=relays,
        )
        self.cell.take(mqtt.Received(topic, pack(begin)), 1.0)
        chunk = pack(Chunk(node=node, seq=seq, index=0), content)
        self.cell.take(mqtt.Received(topic, chunk), 1.0)

    def last_verdict(self) -> VerdictMessage:
        verdict, _ = unpack(self.wire.sent[-1].frame)
        assert isinstance(verdict, VerdictMessage)
        return verdict


def test_a_content_that_could_not_be_read_back_from_a_journal_is_quarantined() -> None:
    """Its chunks are what was announced, but the frame inside is not what it says of itself."""
    open_cell = OpenCell()
    content = bytearray(pack_update(make_update("n0", 2)))
    content[-1] ^= 1
    open_cell.send("n0", 1, pack_update(make_update("n0", 1)))
    open_cell.send("n0", 2, bytes(content))

    assert len(open_cell.events) == 1
    assert open_cell.cell.refused == {"quarantined": 1}
    verdict = open_cell.last_verdict()
    assert (verdict.seq, verdict.outcome) == (2, "quarantined")
    assert "digest" in verdict.reason


def test_other_nodes_work_that_was_not_announced_as_such_is_quarantined() -> None:
    """What is announced as relayed must be signed by a gateway; so nothing else may be relayed."""
    open_cell = OpenCell()
    update = pack_update(make_update("n1", 1))
    open_cell.send("n0", 1, pack_bundle("n0", 1, None, [update], "", {}))
    assert open_cell.events == []
    verdict = open_cell.last_verdict()
    assert (verdict.seq, verdict.outcome) == (1, "quarantined")
    assert "unannounced" in verdict.reason

    open_cell.send("n0", 2, pack_bundle("n0", 2, None, [update], "", {}), relays=True)
    assert len(open_cell.events) == 1
