"""Frames and transfers: windows, resume, and room."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from hetertrain.core.update import Checkpoint
from hetertrain.errors import FrameError
from hetertrain.wire import topics
from hetertrain.wire.downlink import AWAY_MAX, Downlink
from hetertrain.wire.events import (
    ContentReceived,
    Settled,
    TransferDeferred,
)
from hetertrain.wire.frames import pack, unpack
from hetertrain.wire.messages import Begin, Flushed, Missing
from hetertrain.wire.transfer import Receiver, Sender
from tests.conversation import STATE, TERMS, Conversation, heard


def test_a_frame_returns_what_went_in() -> None:
    message, payload = unpack(pack(STATE, b"payload"))
    assert message == STATE
    assert bytes(payload) == b"payload"


def test_no_cut_and_no_flipped_bit_of_a_frame_gets_past_the_border() -> None:
    frame = pack(Flushed(node="n0", sync=3), b"payload")
    for length in range(len(frame)):
        with pytest.raises(FrameError):
            unpack(frame[:length])
    for bit in range(8 * len(frame)):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            unpack(bytes(damaged))


@pytest.mark.parametrize(
    "change", [{"node": ""}, {"node": "x" * 65}, {"seq": -1}, {"chunk_bytes": 1}, {"seq": 1 << 62}]
)
def test_a_header_out_of_bounds_is_refused(change: dict) -> None:
    begin = Begin(node="n0", seq=1, size_bytes=3, chunk_bytes=512, digest="x")
    with pytest.raises(FrameError, match="header"):
        unpack(pack(replace(begin, **change)))


def make_sender(content: bytes, window: int = 2) -> Sender:
    return Sender("n0", 1, content, chunk_bytes=256, window=window, airtime_seconds=1.0)


def test_a_sender_never_has_more_than_its_window_unacknowledged() -> None:
    sender = make_sender(bytes(2000), window=3)
    assert len(sender.due(0.0)) == 3
    assert sender.due(0.1) == []
    sender.delivered(0.1)
    assert len(sender.due(0.2)) == 1


def test_a_sender_without_a_verdict_asks_again() -> None:
    sender = make_sender(bytes(100), window=9)
    assert len(sender.due(0.0)) == 2
    sender.delivered(0.1)
    sender.delivered(0.1)
    assert sender.due(1.0) == []
    assert [type(message) for message, _ in sender.due(sender.ask_at)] == [Begin]


@pytest.mark.parametrize("lost", [[0], [0, 1, 2, 3, 4], [4], [1, 3]])
def test_lost_chunks_and_only_those_are_sent_again(lost: list[int]) -> None:
    content = random.Random(1).randbytes(1100)
    sender = make_sender(content, window=99)
    (begin, _), *chunks = sender.due(0.0)
    receiver = Receiver(begin)
    for index, (_, data) in enumerate(chunks):
        if index not in lost:
            assert receiver.chunk(index, data) is None
    for _ in range(6):
        sender.delivered(0.1)
    sender.missing(receiver.missing())
    again = sender.due(0.1)
    assert [message.index for message, _ in again] == lost
    results = [receiver.chunk(message.index, data) for message, data in again]
    assert results[-1] == content


def test_a_receiver_refuses_chunks_that_do_not_fit() -> None:
    begin = Begin(node="n0", seq=1, size_bytes=300, chunk_bytes=256, digest="wrong")
    receiver = Receiver(begin)
    for index, size in ((2, 44), (0, 255), (1, 256), (1 << 40, 1)):
        with pytest.raises(FrameError, match="chunk"):
            receiver.chunk(index, memoryview(bytes(size)))
    receiver.chunk(0, memoryview(bytes(256)))
    with pytest.raises(FrameError, match="content"):
        receiver.chunk(1, memoryview(bytes(44)))


def ready_to_take(room_bytes: int | None = None) -> Downlink:
    aggregator = Downlink("job", "cloud", room_bytes=room_bytes)
    aggregator.release(
        Checkpoint(0, np.zeros(9, np.float32), np.empty(0, np.int64)), None, TERMS, 0
    )
    return aggregator


def frames_of(node: str, content: bytes) -> tuple[str, list[bytes]]:
    sender = Sender(node, 1, content, chunk_bytes=256, window=99, airtime_seconds=1.0)
    frames = [pack(message, chunk) for message, chunk in sender.due(0.0)]
    return topics.up("job", "cloud", "t1", node), frames


def test_a_transfer_goes_on_where_it_stood_when_its_node_comes_back_to_the_cell() -> None:
    aggregator, content = ready_to_take(), random.Random(1).randbytes(1000)
    topic, (begin, *chunks) = frames_of("n0", content)
    heard(aggregator, STATE)
    for frame in (begin, *chunks[:3]):
        aggregator.received(topic, frame, 1.0)
    heard(aggregator, replace(STATE, cell="edge-1"))
    heard(aggregator, STATE, 90.0)
    asked = [unpack(item.frame) for item in aggregator.received(topic, begin, 90.0).send]
    (missing,) = [bits for message, bits in asked if isinstance(message, Missing)]
    assert np.unpackbits(np.frombuffer(missing, np.uint8)).sum() == 1
    events = aggregator.received(topic, chunks[3], 90.0).events
    assert [bytes(e.content) for e in events if isinstance(e, ContentReceived)] == [content]


def test_half_arrived_transfers_of_nodes_that_left_are_bounded() -> None:
    aggregator = ready_to_take()
    for number in range(3 * AWAY_MAX):
        node = f"n{number}"
        topic, (begin, *_) = frames_of(node, bytes(1000))
        heard(aggregator, replace(STATE, node=node))
        aggregator.received(topic, begin, 1.0)
        heard(aggregator, replace(STATE, node=node, cell="edge-1"))
    assert len(aggregator._receivers) == AWAY_MAX


def test_without_room_a_node_keeps_its_content_and_is_taken_when_there_is_room() -> None:
    talk = Conversation(1, loss=0.0)
    talk.aggregator.room_bytes = 1000
    talk.up(talk.node.offer(5, bytes(2000), talk.now))
    talk.run(60.0)
    deferred = talk.of(TransferDeferred)
    assert {(event.node, event.size_bytes) for event in deferred} == {("n0", 2000)}
    assert talk.of(ContentReceived) == talk.of(Settled) == []
    talk.aggregator.room_bytes = 2000
    talk.run(60.0)
    assert [event.verdict.seq for event in talk.of(Settled)] == [5]


def test_what_is_under_way_takes_of_the_room_and_who_left_does_not() -> None:
    aggregator = ready_to_take(room_bytes=1500)
    one, (begin_one, *_) = frames_of("n1", bytes(1000))
    two, (begin_two, *_) = frames_of("n2", bytes(1000))
    heard(aggregator, replace(STATE, node="n1"))
    assert aggregator.received(one, begin_one, 1.0).events == ()
    assert aggregator.received(two, begin_two, 1.0).events == (TransferDeferred("n2", 1000),)
    heard(aggregator, replace(STATE, node="n1", cell="edge-1"))
    assert aggregator.received(two, begin_two, 2.0).events == ()
