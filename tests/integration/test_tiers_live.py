"""A node whose link really changes, between a real broker and a proxy that shapes it."""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hetertrain.core.gate import Outcome, Verdict
from hetertrain.core.policy import SYNC_PRESETS, WEIGHT_PRESETS, Statistics
from hetertrain.core.tiers import TIERS
from hetertrain.core.update import Checkpoint
from hetertrain.transport import mqtt
from hetertrain.wire.contents import JobTerms
from hetertrain.wire.downlink import ContentReceived, Downlink, DownlinkReady
from hetertrain.wire.frames import NodeState
from hetertrain.wire.uplink import ModelReceived, Settled, Uplink, UplinkReady
from hetertrain_lab.broker import EmbeddedBroker
from tests.integration.proxy import ShapingProxy

pytestmark = pytest.mark.broker
WAIT_SECONDS = 60.0
UPDATE_BYTES_MAX = 24_000
"""Not the whole budget of a fast tier: a transfer that was begun there ends on the thin link."""
MODEL_SIZE = 3_000
TERMS = JobTerms("layout", SYNC_PRESETS["sap"], WEIGHT_PRESETS["sap"], {0: Statistics()})


class Pair:
    """A node behind the proxy and its aggregator, each with its connection, in one thread."""

    def __init__(self, host: str, port: int, proxy_port: int) -> None:
        self.events: queue.Queue[tuple[str, mqtt.Event]] = queue.Queue()
        state = NodeState(
            node="n0", job="job", cell="cloud", tier="t0", role="vehicle", is_online=True
        )
        self.uplink = Uplink(state, TIERS["t0"], follows_link=True)
        self.downlink = Downlink("job", "cloud")
        self.settled: list[int] = []
        self.contents: dict[int, bytes] = {}
        self.models: list[ModelReceived] = []
        self.vector = np.zeros(MODEL_SIZE, np.float32)
        self.version = 0
        self.node = mqtt.Connection(
            mqtt.Endpoint(host="127.0.0.1", port=proxy_port, client_id="n0"),
            self.uplink.subscriptions,
            lambda event: self.events.put(("node", event)),
            self.uplink.will,
            self.uplink.other_subscriptions,
        )
        self.aggregator = mqtt.Connection(
            mqtt.Endpoint(host=host, port=port, client_id="aggregator"),
            self.downlink.subscriptions,
            lambda event: self.events.put(("aggregator", event)),
        )
        self.release()
        self.aggregator.start()
        self.node.start()

    def release(self) -> None:
        checkpoint = Checkpoint(self.version, self.vector.copy(), np.empty(0, np.int64))
        self.down(self.downlink.release(checkpoint, None, TERMS, time.monotonic()))

    def move(self) -> None:
        self.version += 1
        noise = np.random.default_rng(self.version).standard_normal(MODEL_SIZE, np.float32)
        self.vector += noise
        self.release()

    def up(self, ready: UplinkReady) -> None:
        if ready.resubscribes:
            self.node.resubscribe(self.uplink.subscriptions)
        self.node.publish(ready.send)
        for event in ready.events:
            if isinstance(event, Settled):
                self.settled.append(event.verdict.seq)
            elif isinstance(event, ModelReceived):
                self.models.append(event)

    def down(self, ready: DownlinkReady) -> None:
        self.aggregator.publish(ready.send)
        for event in ready.events:
            if isinstance(event, ContentReceived):
                self.contents[event.seq] = bytes(event.content)
                verdict = Verdict(event.node, event.seq, Outcome.MERGED)
                self.down(self.downlink.answer(verdict, time.monotonic()))

    def step(self) -> None:
        try:
            who, event = self.events.get(timeout=0.02)
        except queue.Empty:
            who, event = "", mqtt.Delivered(-1)
        now = time.monotonic()
        match who, event:
            case "node", mqtt.Connected():
                self.up(self.uplink.connected(now))
            case "node", mqtt.Received(topic, frame):
                self.up(self.uplink.received(topic, frame, now))
            case "node", mqtt.Delivered(token):
                self.up(self.uplink.delivered(token, now))
            case "aggregator", mqtt.Received(topic, frame):
                self.down(self.downlink.received(topic, frame, now))
        self.up(self.uplink.tick(now))
        self.down(self.downlink.tick(now))

    def transfer(self, seq: int) -> str:
        """Send an update of the tier's budget; return the tier after it."""
        size = min(self.uplink.tier.budget_bytes(1.0, 0.5), UPDATE_BYTES_MAX)
        content = random.Random(seq).randbytes(size)
        self.up(self.uplink.offer(seq, content, time.monotonic()))
        self.run_until(lambda: seq in self.settled, f"the verdict on {seq}")
        # A proposal goes out with the next heartbeats and is confirmed.
        self.run_until(lambda: not self.uplink.state.proposed_tier, "the confirmation")
        assert self.contents[seq] == content
        return self.uplink.tier.name

    def run_until(self, condition, what: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"waited {WAIT_SECONDS} s for {what}"
            self.step()

    def stop(self) -> None:
        self.node.stop()
        self.aggregator.stop()


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[tuple[ShapingProxy, EmbeddedBroker]]:
    with (
        EmbeddedBroker(tmp_path / "broker") as broker,
        ShapingProxy(broker.host, broker.port, TIERS["t0"].rate_bits_per_second) as proxy,
    ):
        yield proxy, broker


def test_the_tier_follows_a_link_from_64_kilobits_to_50_megabits_and_back(
    proxy: tuple[ShapingProxy, EmbeddedBroker],
) -> None:
    shaping, broker = proxy
    pair = Pair(broker.host, broker.port, shaping.port)
    tiers: dict[str, list[str]] = {}
    seqs = iter(range(100))
    try:
        pair.run_until(lambda: bool(pair.models), "the first model")
        for name in ("t0", "t3", "t0"):
            shaping.bits_per_second = TIERS[name].rate_bits_per_second
            seen = []
            for _ in range(5):
                pair.move()
                seen.append(pair.transfer(next(seqs)))
            tiers[f"{name} {len(tiers)}"] = seen
        pair.run_until(lambda: pair.models[-1].version == pair.version, "the newest version")
    finally:
        pair.stop()

    for name, seen in tiers.items():
        settled = seen[2:]
        fast_enough = {"t2", "t3"} if name.startswith("t3") else {"t0"}
        assert set(settled) <= fast_enough, tiers
        assert len(set(settled)) == 1, f"flaps: {tiers}"
    assert pair.settled == list(range(15))
    held = pair.downlink._chains[pair.uplink.tier.name].held
    assert held is not None
    assert pair.models[-1].vector.tobytes() == held.vector.tobytes()
