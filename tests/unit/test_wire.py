"""The conversation of a node with its aggregator."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from hetertrain.core.events import Pulled
from hetertrain.core.tiers import TIERS
from hetertrain.core.update import Checkpoint
from hetertrain.transport import mqtt
from hetertrain.wire import topics
from hetertrain.wire.downlink import Downlink
from hetertrain.wire.events import (
    ContentReceived,
    ModelReceived,
    NodeGone,
    Outgoing,
    Settled,
)
from hetertrain.wire.frames import pack, unpack
from hetertrain.wire.messages import Begin, Flushed, Missing, NodeState
from hetertrain.wire.uplink import Uplink
from tests.conversation import PATIENT, STATE, TERMS, Conversation, heard


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
