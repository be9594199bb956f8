"""Frames, transfers, and the conversation of a node with its aggregator."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace

import numpy as np
import pytest

from hetertrain.core.events import Pulled, SyncNotice
from hetertrain.core.gate import Outcome, Verdict
from hetertrain.core.policy import SYNC_PRESETS, WEIGHT_PRESETS, Statistics
from hetertrain.core.tiers import TIERS
from hetertrain.core.update import Checkpoint
from hetertrain.errors import FrameError
from hetertrain.transport import mqtt
from hetertrain.wire import topics
from hetertrain.wire.contents import JobTerms, model_head
from hetertrain.wire.downlink import AWAY_MAX, Downlink
from hetertrain.wire.events import (
    ContentReceived,
    FrameRefused,
    ModelReceived,
    NodeGone,
    Outgoing,
    Settled,
    SyncAnnounced,
    TransferDeferred,
)
from hetertrain.wire.frames import pack, unpack
from hetertrain.wire.messages import Begin, Flushed, Missing, NodeState, Sync
from hetertrain.wire.signing import Check, Sign, check_signature, signed
from hetertrain.wire.transfer import Receiver, Sender
from hetertrain.wire.uplink import Uplink

PATIENT = replace(SYNC_PRESETS["sap"], sync_deadline_seconds=5.0)
TERMS = JobTerms("layout", PATIENT, WEIGHT_PRESETS["sap"], {0: Statistics()})
STATE = NodeState(
    node="n0", job="job", cell="cloud", tier="t1", role="vehicle", is_online=True, label="bus"
)


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


class Conversation:
    """A node and an aggregator, a network that may lose frames, and a virtual clock."""

    def __init__(
        self,
        seed: int,
        loss: float,
        *,
        follows_link: bool = False,
        sign: Sign | None = None,
        check: Check | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.loss = loss
        self.now = 0.0
        self.node = Uplink(STATE, TIERS["t1"], follows_link=follows_link, check=check)
        self.bits_per_second = 1e6
        self.aggregator = Downlink("job", "cloud", sign=sign)
        self.node_events: list[object] = []
        self.aggregator_events: list[object] = []
        self.vector = np.zeros(60_000, np.float32)
        self.version = 0
        self.release(None)
        self.up(self.node.connected(self.now))

    def release(self, sync: int | None) -> None:
        checkpoint = Checkpoint(self.version, self.vector.copy(), np.empty(0, np.int64))
        self.down(self.aggregator.release(checkpoint, sync, TERMS, self.now))

    def move(self) -> None:
        noise = np.random.default_rng(self.version).normal(0, 1, self.vector.size)
        self.vector += noise.astype(np.float32)
        self.version += 1
        self.release(None)

    def up(self, ready) -> None:
        self.node_events += ready.events
        for item in ready.send:
            if item.token is not None:
                self.now += 8 * len(item.frame) / self.bits_per_second
            if self.random.random() >= self.loss:
                self.down(self.aggregator.received(item.topic, item.frame, self.now))
            if item.token is not None:
                self.up(self.node.delivered(item.token, self.now))

    def down(self, ready) -> None:
        self.aggregator_events += ready.events
        for item in ready.send:
            if item.topic in self.node.subscriptions and self.random.random() >= self.loss:
                self.up(self.node.received(item.topic, item.frame, self.now))
        for event in ready.events:
            if isinstance(event, ContentReceived):
                verdict = Verdict(event.node, event.seq, Outcome.MERGED)
                self.down(self.aggregator.answer(verdict, self.now))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.25
            self.up(self.node.tick(self.now))
            self.down(self.aggregator.tick(self.now))

    def of(self, kind: type) -> list:
        return [e for e in (*self.node_events, *self.aggregator_events) if isinstance(e, kind)]


@pytest.mark.parametrize("seed", range(5))
def test_a_content_arrives_whole_and_is_settled_once_though_a_third_of_frames_is_lost(
    seed: int,
) -> None:
    talk = Conversation(seed, loss=0.33)
    content = random.Random(seed).randbytes(200_000)
    talk.up(talk.node.offer(5, content, talk.now))
    talk.run(240.0)
    assert {bytes(event.content) for event in talk.of(ContentReceived)} == {content}
    assert [event.verdict.seq for event in talk.of(Settled)] == [5]


@pytest.mark.parametrize("seed", range(5))
def test_a_node_holds_its_tiers_model_within_seconds_though_frames_are_lost(seed: int) -> None:
    talk = Conversation(seed, loss=0.1)
    for _ in range(20):
        talk.run(1.5)
        talk.move()
    talk.loss = 0.0
    talk.run(30.0)
    newest = talk.of(ModelReceived)[-1]
    assert newest.version == talk.version
    chain = talk.aggregator.broadcaster.chains["t1"]
    np.testing.assert_array_equal(newest.vector, chain.held.vector)


def toy_signature(data: bytes) -> tuple[bytes, bytes]:
    return hashlib.sha256(b"secret" + data).digest(), b"certificate"


def toy_check(signer: str, data: bytes, signature: bytes, certificate: bytes) -> bool:
    return signer == "aggregator" and (signature, certificate) == toy_signature(data)


def test_a_node_that_asks_for_signatures_takes_the_versions_and_notices_that_have_them() -> None:
    talk = Conversation(1, 0.0, sign=toy_signature, check=toy_check)
    talk.run(5.0)
    talk.move()
    talk.run(30.0)
    talk.down(talk.aggregator.notice(SyncNotice(3, 1.0), talk.now))

    assert talk.of(ModelReceived)[-1].version == 1
    assert talk.of(SyncAnnounced) == [SyncAnnounced(3, 1.0)]
    assert talk.of(FrameRefused) == []


def test_unsigned_versions_and_notices_are_refused_where_signatures_are_asked_for() -> None:
    talk = Conversation(1, 0.0, check=toy_check)
    talk.run(10.0)
    talk.down(talk.aggregator.notice(SyncNotice(3, 1.0), talk.now))

    assert talk.of(ModelReceived) == talk.of(SyncAnnounced) == []
    assert {event.reason for event in talk.of(FrameRefused)} == {"signature"}


def test_an_announcement_that_its_node_did_not_sign_is_refused() -> None:
    begin = Begin(node="n0", seq=1, size_bytes=3, chunk_bytes=512, digest="x")

    def by(name: str) -> Sign:
        return lambda data: (hashlib.sha256(name.encode() + data).digest(), name.encode())

    def check(signer: str, data: bytes, signature: bytes, certificate: bytes) -> bool:
        return (signature, certificate) == by(signer)(data)

    aggregator = Downlink("job", "cloud", check=check)
    checkpoint = Checkpoint(0, np.zeros(9, np.float32), np.empty(0, np.int64))
    aggregator.release(checkpoint, None, TERMS, 0.0)
    topic = topics.up("job", "cloud", "t1", "n0")

    def reasons(announced: Begin) -> list[str]:
        ready = aggregator.received(topic, pack(announced), 0.0)
        return [event.reason for event in ready.events if isinstance(event, FrameRefused)]

    assert reasons(begin) == ["signature"]
    assert reasons(signed(begin, "job", "cloud", by("n1"))) == ["signature"]
    good = signed(begin, "job", "cloud", by("n0"))
    assert reasons(replace(good, digest="another")) == ["signature"]
    assert reasons(good) == []


def test_a_signature_is_for_one_job_one_cell_and_every_field() -> None:
    notice = signed(Sync(sync=3, deadline_seconds=1), "job", "cloud", toy_signature)
    check_signature(notice, "job", "cloud", toy_check)
    others = [
        (replace(notice, sync=4), "job", "cloud"),
        (notice, "another", "cloud"),
        (notice, "job", "edge-1"),
        (replace(notice, certificate=b"another"), "job", "cloud"),
    ]
    for message, job, cell in others:
        with pytest.raises(FrameError, match="signature"):
            check_signature(message, job, cell, toy_check)


def test_an_older_run_or_a_much_older_version_that_is_sent_again_is_refused() -> None:
    talk = Conversation(1, 0.0, sign=toy_signature, check=toy_check)
    talk.run(5.0)
    held = talk.of(ModelReceived)[-1]
    held = replace(held, version=500, terms=replace(held.terms, lineage="00000002"))
    talk.node.hold(held)

    def age(lineage: str, version: int) -> None:
        terms = replace(held.terms, lineage=lineage)
        content = model_head(
            version=version, sync=None, base="", model="m", size=1, integers=None, terms=terms
        )
        talk.node._check_age(content)

    for lineage, version in (("00000001", 900), ("00000002", 400)):
        with pytest.raises(FrameError, match="age"):
            age(lineage, version)
    age("00000003", 0)
    age("00000002", 499)
    # One that was taken though it is a little older opens no way back, a step at a time.
    talk.node.hold(replace(held, version=499))
    assert talk.node.newest.version == 500


class Tier1:
    """Nodes of one tier, and what each is sent, alone or with the others."""

    def __init__(self, num_nodes: int, queue_max: int = 1 << 30) -> None:
        self.now = 0.0
        self.queue_max = queue_max
        self.aggregator = Downlink("job", "cloud")
        self.nodes = {f"n{i}": Uplink(replace(STATE, node=f"n{i}"), TIERS["t1"]) for i in range(4)}
        self.online = [f"n{i}" for i in range(num_nodes)]
        self.bytes_alone = dict.fromkeys(self.nodes, 0)
        self.models: dict[str, list[ModelReceived]] = {name: [] for name in self.nodes}
        self.vector = np.zeros(40_000, np.float32)
        self.version = 0
        self.release()
        for name in self.online:
            self.up(self.nodes[name].connected(self.now))
        self.run(10.0)

    def join(self, name: str) -> None:
        self.online.append(name)
        self.up(self.nodes[name].connected(self.now))

    def release(self) -> None:
        checkpoint = Checkpoint(self.version, self.vector.copy(), np.empty(0, np.int64))
        self.down(self.aggregator.release(checkpoint, None, TERMS, self.now))

    def move(self) -> None:
        self.version += 1
        self.vector += np.random.default_rng(self.version).standard_normal(40_000, np.float32)
        self.release()
        self.run(2.0)

    def up(self, ready) -> None:
        for item in ready.send:
            self.down(self.aggregator.received(item.topic, item.frame, self.now))

    def down(self, ready) -> None:
        for name in self.online:
            node = self.nodes[name]
            mine = [item for item in ready.send if item.topic in node.subscriptions]
            # A broker with a short queue drops the rest, silently.
            for item in mine[: self.queue_max]:
                if item.topic == topics.inbox(name):
                    self.bytes_alone[name] += len(item.frame)
                answer = node.received(item.topic, item.frame, self.now)
                self.models[name] += [e for e in answer.events if isinstance(e, ModelReceived)]
                self.up(answer)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.25
            self.down(self.aggregator.tick(self.now))
            for name in self.online:
                self.up(self.nodes[name].tick(self.now))

    def held(self, name: str) -> bytes:
        return self.models[name][-1].vector.tobytes()


def test_a_node_that_is_overtaken_while_it_is_given_a_model_gets_a_broadcast_now_and_then() -> None:
    """Else it would be given one model after the other, and never be done with any. One that asks
    on and on leaves the others at least half of the link.
    """
    cell, began = Tier1(num_nodes=3), []
    take, slow = cell.down, replace(STATE, node="n9")
    airtime = TIERS["t1"].seconds_for(4 * cell.vector.size)

    def down(ready) -> None:
        for item in ready.send:
            if item.topic == topics.down("job", "cloud", "t1"):
                message, _ = unpack(item.frame)
                if isinstance(message, Begin) and message.size_bytes > 4 * cell.vector.size:
                    began.append(cell.now)
        take(ready)

    cell.down = down
    for _ in range(60):
        cell.move()
        down(cell.aggregator.received(topics.state("n9"), pack(slow), cell.now))
        gone = pack(Missing(seq=9999), b"\xff")
        down(cell.aggregator.received(topics.up("job", "cloud", "t1", "n9"), gone, cell.now))

    assert len(began) > 2
    assert min(np.diff(began)) > 2 * airtime
    cell.run(20.0)
    assert cell.held("n0") == cell.held("n1") == cell.held("n2")


def test_a_crowd_that_needs_whole_models_is_served_in_bursts() -> None:
    """A window for each of a thousand nodes at once would be gigabytes."""
    downlink, now = Downlink("job", "cloud"), 0.0
    states = [replace(STATE, node=f"n{i}", tier="t4") for i in range(100)]
    vector = np.zeros(2_000_000, np.float32)
    downlink.release(Checkpoint(0, vector, np.empty(0, np.int64)), None, TERMS, now)
    sent, served = [], set()
    for _ in range(400):
        now += 0.05
        ready = [downlink.received(topics.state(s.node), pack(s), now) for s in states]
        frames = [item for each in (*ready, downlink.tick(now)) for item in each.send]
        sent.append(sum(len(item.frame) for item in frames))
        served |= {item.topic for item in frames if item.topic.startswith("ht/1/node/")}

    assert served == {topics.inbox(state.node) for state in states}
    assert max(sent) < 10 << 20, "a broadcast's burst, a crowd's burst"


def test_a_node_that_joins_late_is_given_the_model_alone_and_is_no_burden_to_the_others() -> None:
    cell = Tier1(3)
    cell.move()
    cell.join("n3")
    for _ in range(3):
        cell.move()
    cell.run(10.0)

    assert cell.held("n3") == cell.held("n0")
    assert cell.models["n3"][-1].version == cell.version
    assert cell.bytes_alone["n3"] > 4 * cell.vector.size
    assert max(cell.bytes_alone[name] for name in ("n0", "n1", "n2")) < 2000


def test_a_node_that_missed_versions_is_given_just_those() -> None:
    cell = Tier1(3)
    cell.move()
    cell.online.remove("n1")
    for _ in range(2):
        cell.move()
    cell.online.append("n1")
    cell.run(15.0)

    assert cell.held("n1") == cell.held("n0")
    assert 0 < cell.bytes_alone["n1"] < 4 * cell.vector.size


def test_a_version_that_changed_nothing_leads_no_node_in_a_circle() -> None:
    cell = Tier1(3)
    cell.online.remove("n1")
    for _ in range(3):
        cell.version += 1  # The same model again: its difference leads from it to itself.
        cell.release()
        cell.run(2.0)
    cell.move()
    cell.online.append("n1")
    cell.run(20.0)

    assert cell.held("n1") == cell.held("n0")
    assert cell.models["n1"][-1].version == cell.version


@pytest.mark.parametrize("queue_max", [3, 10])
def test_a_broker_that_drops_all_beyond_a_short_queue_passes_whole_models(queue_max: int) -> None:
    cell = Tier1(3, queue_max)
    cell.join("n3")
    cell.move()
    cell.run(60.0)

    assert {cell.held(name) for name in cell.nodes} == {cell.held("n0")}
    assert all(models[-1].version == cell.version for models in cell.models.values())


def test_a_download_goes_on_after_a_break_where_it_stood() -> None:
    cell = Tier1(3)
    cell.online.append("n3")
    node = cell.nodes["n3"]
    cell.queue_max = 2
    cell.up(node.connected(cell.now))
    cell.run(2.5)
    cell.queue_max = 1 << 30
    before = cell.bytes_alone["n3"]
    cell.up(node.disconnected(cell.now))
    cell.online.remove("n3")
    cell.run(3.0)
    cell.online.append("n3")
    cell.up(node.connected(cell.now))
    cell.run(20.0)

    assert before > 0
    assert cell.held("n3") == cell.held("n0")
    window = TIERS["t1"].window_chunks * TIERS["t1"].chunk_bytes
    assert cell.bytes_alone["n3"] < 4 * cell.vector.size + window + 6000


def test_versions_travel_as_differences_and_a_sync_sends_the_exact_model() -> None:
    talk = Conversation(0, loss=0.0)
    talk.run(10.0)
    for _ in range(5):
        talk.move()
        talk.run(3.0)
    assert talk.of(ModelReceived)[-1].version == 5
    assert not np.array_equal(talk.of(ModelReceived)[-1].vector, talk.vector)
    talk.release(sync=1)
    talk.run(3.0)
    assert talk.of(ModelReceived)[-1].sync == 1
    np.testing.assert_array_equal(talk.of(ModelReceived)[-1].vector, talk.vector)


def test_a_syncs_model_never_holds_a_thin_link_for_longer_than_its_budget() -> None:
    """Where the whole model takes longer than the sync's deadline, a difference goes out."""
    talk = Conversation(0, loss=0.0)
    talk.run(10.0)
    talk.move()
    terms = replace(TERMS, policy=replace(PATIENT, sync_deadline_seconds=0.5))
    checkpoint = Checkpoint(talk.version, talk.vector.copy(), np.empty(0, np.int64))
    ready = talk.aggregator.release(checkpoint, 1, terms, talk.now + 1.0)
    sent = sum(len(item.frame) for item in ready.send if item.topic.endswith("/t1"))
    assert 0 < sent < 4 * talk.vector.size / 2


def test_a_silent_node_counts_as_gone() -> None:
    talk = Conversation(0, loss=0.0)
    talk.loss = 1.0
    talk.run(talk.aggregator.silence_seconds + 1)
    assert [event.node for event in talk.of(NodeGone)] == ["n0"]


@pytest.mark.parametrize("frame", [b"", b"garbage", pack(STATE), pack(Flushed(node="n1", sync=1))])
def test_garbage_and_messages_in_anothers_name_are_counted_and_never_dispatched(
    frame: bytes,
) -> None:
    aggregator = Downlink("job", "cloud")
    ready = aggregator.received(topics.up("job", "cloud", "t1", "n9"), frame, 0.0)
    assert [type(event).__name__ for event in ready.events] == ["FrameRefused"]


def test_an_announced_size_over_the_limit_is_refused_before_memory_is_taken() -> None:
    talk = Conversation(0, loss=0.0)
    begin = Begin(node="n0", seq=9, size_bytes=1 << 40, chunk_bytes=1 << 16, digest="x")
    topic = topics.up("job", "cloud", "t1", "n0")
    ready = talk.aggregator.received(topic, pack(begin), talk.now)
    assert ready.events[0].reason == "size"


def test_the_last_will_says_offline_and_is_retained() -> None:
    will: Outgoing = Uplink(STATE, TIERS["t1"]).will
    message, _ = unpack(will.frame)
    assert will.retain
    assert isinstance(message, NodeState)
    assert (message.node, message.is_online, message.active) == (STATE.node, False, 0)


def test_a_job_that_starts_anew_reaches_a_node_that_holds_its_first_version() -> None:
    """The same bytes as version 0 of another run are another model."""
    talk = Conversation(seed=1, loss=0.0)
    talk.run(5)
    before = len(talk.node_events)
    terms = replace(TERMS, lineage="anew")
    checkpoint = Checkpoint(talk.version, talk.vector.copy(), np.empty(0, np.int64))
    talk.down(talk.aggregator.release(checkpoint, None, terms, talk.now))
    talk.run(10)
    received = [e for e in talk.node_events[before:] if isinstance(e, ModelReceived)]
    assert received[-1].terms.lineage == "anew"


def test_a_node_changes_its_tier_with_its_link_and_goes_on_from_the_model_it_holds() -> None:
    """Nothing is lost or sent twice, and no whole model is needed."""
    talk = Conversation(seed=1, loss=0.0, follows_link=True)
    talk.run(5.0)
    tiers = [talk.node.tier.name]
    for seq, rate in enumerate((1e6, 60e6, 60e6, 60e6, 64e3, 64e3, 64e3, 64e3)):
        talk.bits_per_second = rate
        size = talk.node.tier.budget_bytes(1.0, 0.5)
        talk.up(talk.node.offer(seq, random.Random(seq).randbytes(size), talk.now))
        talk.move()
        talk.run(3.0)
        tiers.append(talk.node.tier.name)

    assert tiers == ["t1", "t1", "t1", "t3", "t3", "t0", "t0", "t0", "t0"]
    assert [event.verdict.seq for event in talk.of(Settled)] == list(range(8))
    newest = talk.of(ModelReceived)[-1]
    assert newest.version == talk.version
    np.testing.assert_array_equal(
        newest.vector, talk.aggregator.broadcaster.chains["t0"].held.vector
    )
    assert talk.aggregator.broadcaster.chains.keys() == {"t0"}
    assert not np.array_equal(newest.vector, talk.vector), "a whole model was sent"


def test_a_node_that_has_the_newest_version_already_is_sent_none() -> None:
    talk = Conversation(seed=1, loss=0.0)
    node = Uplink(replace(STATE, node="n1", tier="t3"), TIERS["t3"])
    node.hold(ModelReceived(0, talk.vector.copy(), np.empty(0, np.int64), None, TERMS))
    ready = node.connected(talk.now)
    sent = talk.aggregator.received(ready.send[0].topic, ready.send[0].frame, talk.now).send
    later = talk.aggregator.tick(talk.now + 3.0).send
    assert not [item for item in (*sent, *later) if item.topic.endswith("/t3")]


def heard(aggregator: Downlink, state: NodeState, now: float = 1.0) -> list[object]:
    return list(aggregator.received(topics.state(state.node), pack(state), now).events)


def test_a_node_that_says_it_is_in_another_cell_is_forgotten_at_once() -> None:
    aggregator = Downlink("job", "cloud")
    heard(aggregator, STATE)
    gone = heard(aggregator, replace(STATE, cell="edge-1"))
    again = heard(aggregator, replace(STATE, cell="edge-1"))
    assert gone == [NodeGone("n0")]
    assert again == []
    assert aggregator.nodes == {}


def test_the_last_will_of_the_cell_that_a_node_left_ends_nothing_in_its_new_one() -> None:
    aggregator = Downlink("job", "cloud")
    heard(aggregator, STATE)
    assert heard(aggregator, replace(STATE, cell="edge-1", is_online=False)) == []
    assert heard(aggregator, replace(STATE, is_online=False)) == [NodeGone("n0")]


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


def test_a_gateways_own_versions_reach_its_nodes_though_the_number_stays() -> None:
    talk = Conversation(seed=1, loss=0.0)
    talk.run(10.0)
    for local in (1, 2, 0):
        talk.vector = talk.vector + np.float32(local + 1)
        terms = replace(TERMS, local=local)
        checkpoint = Checkpoint(talk.version, talk.vector.copy(), np.empty(0, np.int64))
        talk.down(talk.aggregator.release(checkpoint, None, terms, talk.now))
        talk.run(10.0)
    received = [(e.version, e.terms.local) for e in talk.of(ModelReceived)]
    assert received == [(0, 0), (0, 1), (0, 2), (0, 0)]
    late = replace(STATE, node="n9")
    given = talk.aggregator.received(topics.state("n9"), pack(late), talk.now)
    assert given.events
    assert talk.node.state.model == talk.aggregator.broadcaster.chains["t1"].digest


def test_a_pull_reaches_its_node() -> None:
    talk = Conversation(seed=1, loss=0.0)
    talk.down(talk.aggregator.pull("n0", talk.now))
    assert Pulled() in talk.node_events


def test_a_fleet_is_told_to_come_back_over_a_time_that_grows_with_it() -> None:
    talk = Conversation(seed=3, loss=0.0)
    for number in range(10_000):
        other = replace(STATE, node=f"other-{number}")
        talk.down(talk.aggregator.received(topics.state(other.node), pack(other), talk.now))
    talk.move()
    talk.run(20)
    assert talk.node.return_seconds == pytest.approx(100, rel=0.01)
    endpoint = mqtt.Endpoint(host="localhost", port=1, client_id="n0")
    connection = mqtt.Connection(endpoint, (), lambda _: None)
    connection.return_seconds = talk.node.return_seconds
    delays = [connection._delay_seconds(was_ready=True) for _ in range(2000)]
    assert max(delays) < 101
    assert 40 < sum(delays) / len(delays) < 60
    assert connection._delay_seconds(was_ready=False) < 1
