"""A node whose link really changes and breaks, between a real broker and a proxy."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hetertrain.core.tiers import TIERS
from hetertrain.transport import mqtt
from hetertrain.transport.broker import EmbeddedBroker
from hetertrain.wire.events import Outgoing
from hetertrain_lab.transfer_bench import run_transfer
from tests.integration.mosquitto import Mosquitto
from tests.integration.mute_broker import MuteBroker
from tests.integration.pair import Pair
from tests.integration.proxy import ShapingProxy
from tests.integration.waiting import wait_until
from tests.integration.websocket_proxy import WebSocketProxy

pytestmark = pytest.mark.broker
UPDATE_BYTES_MAX = 24_000
"""On the thin link not the budget of a fast tier, which takes it minutes."""
TRANSFER_BYTES = 1 << 20
CUT_BITS_PER_SECOND = 16e6
RESENT_MAX = 2
EXTRA_MIB_MAX = 32
"""Half of the model: one more copy of it would be noticed."""


Start = Callable[..., tuple[Pair, ShapingProxy]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a pair on a link of some rate; it ends with the test."""
    with (
        EmbeddedBroker(tmp_path / "broker") as broker,
        ShapingProxy(broker.host, broker.port) as proxy,
        ExitStack() as ends,
    ):

        def start(bits_per_second: float, **settings: Any) -> tuple[Pair, ShapingProxy]:
            proxy.bits_per_second = bits_per_second
            pair = Pair(broker.host, broker.port, proxy.port, **settings)
            ends.callback(pair.stop)
            return pair, proxy

        yield start


def test_the_tier_follows_a_link_from_64_kilobits_to_50_megabits_and_back(start: Start) -> None:
    pair, link = start(64e3, tier="t0", model_size=3_000, follows_link=True)
    tiers: dict[str, list[str]] = {}
    seqs = iter(range(100))
    pair.run_until(lambda: bool(pair.models), "the first model")
    for name in ("t0", "t3", "t0"):
        link.bits_per_second = TIERS[name].rate_bits_per_second
        seen = []
        for _ in range(5):
            pair.move()
            most = UPDATE_BYTES_MAX if name == "t0" else TRANSFER_BYTES
            pair.transfer(next(seqs), min(pair.uplink.tier.budget_bytes(1.0, 0.5), most))
            seen.append(pair.uplink.tier.name)
        tiers[f"{name} {len(tiers)}"] = seen
    pair.run_until(lambda: pair.models[-1].version == pair.version, "the newest version")

    for name, seen in tiers.items():
        settled = seen[2:]
        fast_enough = {"t2", "t3"} if name.startswith("t3") else {"t0"}
        assert set(settled) <= fast_enough, tiers
        assert sum(a != b for a, b in pairwise(settled)) <= 1, f"flaps: {tiers}"
    assert pair.settled == list(range(15))
    held = pair.downlink.broadcaster.chains[pair.uplink.tier.name].held
    assert held is not None
    assert pair.models[-1].vector.tobytes() == held.vector.tobytes()


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_an_upload_that_is_cut_goes_on_where_it_stood_and_counts_once(
    start: Start, share: float
) -> None:
    pair, link = start(CUT_BITS_PER_SECOND, tier="t2", model_size=1_000)
    pair.run_until(lambda: bool(pair.models), "the first model")
    begun = link.bytes_up
    content = pair.offer(1, TRANSFER_BYTES)
    pair.run_until(lambda: link.bytes_up - begun > share * TRANSFER_BYTES, "the cut")
    link.cut()
    pair.run_until(lambda: pair.settled == [1], "the verdict")

    assert pair.contents == {1: content}
    assert pair.chunks_up.keys() == set(range(TRANSFER_BYTES // TIERS["t2"].chunk_bytes))
    assert pair.chunks_up.total() - len(pair.chunks_up) <= RESENT_MAX


def test_a_model_goes_through_small_packets_in_little_memory(tmp_path: Path) -> None:
    """64 MiB here; ``hetertrain bench transfer`` sends 1 GiB."""
    measure = run_transfer(tmp_path, is_quick=True, on_progress=lambda _share: None)

    assert measure.aggregator_extra_mib < EXTRA_MIB_MAX
    assert measure.node_extra_mib < EXTRA_MIB_MAX


def test_a_node_behind_a_web_server_speaks_over_websocket(tmp_path: Path) -> None:
    with (
        EmbeddedBroker(tmp_path) as broker,
        WebSocketProxy(broker.host, broker.port) as proxy,
    ):
        pair = Pair(
            broker.host,
            broker.port,
            proxy.port,
            tier="t3",
            model_size=100_000,
            websocket_path="/mqtt",
        )
        try:
            pair.run_until(lambda: bool(pair.models), "the first model")
            pair.transfer(1, TRANSFER_BYTES)
            assert proxy.paths == ["/mqtt"]
        finally:
            pair.stop()


def test_chunks_are_no_larger_than_a_brokers_packets(tmp_path: Path) -> None:
    """Mosquitto ends the connection of who sends a larger packet."""
    broker = Mosquitto(tmp_path, "allow_anonymous true\nmax_packet_size 20000\n")
    broker.start()
    pair = Pair(broker.host, broker.port, broker.port, tier="t3", model_size=100_000)
    try:
        pair.run_until(lambda: bool(pair.models), "the first model")
        pair.transfer(1, TRANSFER_BYTES)
        assert len(pair.chunks_up) > TRANSFER_BYTES / 20_000
    finally:
        pair.stop()
        broker.stop()


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_a_download_that_is_cut_goes_on_where_it_stood(start: Start, share: float) -> None:
    pair, link = start(CUT_BITS_PER_SECOND, tier="t2", model_size=TRANSFER_BYTES // 4)
    pair.run_until(lambda: link.bytes_down > share * TRANSFER_BYTES, "the cut")
    assert not pair.models
    link.cut()
    pair.run_until(lambda: bool(pair.models), "the model")
    pair.move()
    pair.run_until(lambda: pair.models[-1].version == 1, "the next version")

    again = sum(times - 1 for times in pair.chunks_down.values())
    assert again <= RESENT_MAX + TIERS["t2"].window_chunks


def test_topics_that_are_wanted_and_given_up_at_once_are_not_subscribed_to(
    tmp_path: Path,
) -> None:
    with EmbeddedBroker(tmp_path / "broker") as broker:
        events: queue.Queue[mqtt.Event] = queue.Queue()
        endpoint = mqtt.Endpoint(host=broker.host, port=broker.port, client_id="n0")
        connection = mqtt.Connection(endpoint, ("a",), events.put)
        connection.resubscribe(("a", "b"))
        connection.resubscribe(("a",))
        connection.resubscribe(("a", "c"))
        connection.start()
        assert isinstance(events.get(timeout=10), mqtt.Connected)

        connection.resubscribe(("a", "c", "d"))
        connection.resubscribe(("a", "c"))
        sent = tuple(Outgoing(topic, topic.encode()) for topic in ("b", "d", "a", "c"))
        connection.publish(sent)
        received: list[str] = []
        while len(received) < 2:
            event = events.get(timeout=10)
            assert isinstance(event, mqtt.Received)
            received.append(event.topic)
        connection.stop()

    assert sorted(received) == ["a", "c"]


def test_a_broker_that_acknowledges_nothing_for_a_while_loses_no_frame_and_stalls_nobody() -> None:
    broker = MuteBroker(num_mute=4)
    broker.start()
    endpoint = mqtt.Endpoint(host="127.0.0.1", port=broker.port, client_id="node")
    connection = mqtt.Connection(endpoint, ("topic",), lambda _: None)
    frames = {f"frame {number}".encode() for number in range(400)}
    connection.start()
    try:
        connection.publish(tuple(Outgoing("up", frame, token=1) for frame in sorted(frames)))
        wait_until(lambda: broker.seen >= frames, "all frames")
    finally:
        connection.stop()
    assert broker.num_connections > 4
