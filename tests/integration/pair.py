"""A node and its aggregator, each with its connection to a real broker, driven by one thread."""

from __future__ import annotations

import queue
import random
import time
from collections import Counter
from collections.abc import Callable

import numpy as np

from hetertrain.core.gate import Outcome, Verdict
from hetertrain.core.policy import SYNC_PRESETS, WEIGHT_PRESETS, Statistics
from hetertrain.core.tiers import TIERS
from hetertrain.core.update import Checkpoint
from hetertrain.transport import mqtt
from hetertrain.wire.contents import JobTerms
from hetertrain.wire.downlink import Downlink
from hetertrain.wire.events import (
    ContentReceived,
    DownlinkReady,
    ModelReceived,
    Settled,
    UplinkReady,
)
from hetertrain.wire.frames import unpack
from hetertrain.wire.messages import Chunk, NodeState
from hetertrain.wire.uplink import Uplink
from tests.integration.waiting import wait_until

TERMS = JobTerms("layout", SYNC_PRESETS["sap"], WEIGHT_PRESETS["sap"], {0: Statistics()})


class Pair:
    """A node behind a proxy, and its aggregator."""

    def __init__(
        self,
        host: str,
        port: int,
        proxy_port: int,
        *,
        tier: str,
        model_size: int,
        follows_link: bool = False,
        websocket_path: str | None = None,
    ) -> None:
        self.events: queue.Queue[tuple[str, mqtt.Event]] = queue.Queue()
        state = NodeState(
            node="n0", job="job", cell="cloud", tier=tier, role="vehicle", is_online=True
        )
        self.uplink = Uplink(state, TIERS[tier], follows_link=follows_link)
        self.downlink = Downlink("job", "cloud")
        self.settled: list[int] = []
        self.contents: dict[int, bytes] = {}
        self.chunks_up: Counter[int] = Counter()
        self.chunks_down: Counter[tuple[int, int]] = Counter()
        """How often each chunk arrived."""
        self.models: list[ModelReceived] = []
        self.vector = np.zeros(model_size, np.float32)
        self.version = 0
        self.node = mqtt.Connection(
            mqtt.Endpoint(
                host="127.0.0.1", port=proxy_port, client_id="n0", websocket_path=websocket_path
            ),
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
        noise = np.random.default_rng(self.version).standard_normal(self.vector.size, np.float32)
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
            case "node", mqtt.Connected(packet_bytes_max):
                self.up(self.uplink.connected(now, packet_bytes_max))
            case "aggregator", mqtt.Connected(packet_bytes_max):
                self.downlink.connected(packet_bytes_max)
            case "node", mqtt.Disconnected():
                self.up(self.uplink.disconnected(now))
            case "node", mqtt.Received(topic, frame):
                message, _ = unpack(frame)
                if isinstance(message, Chunk):
                    self.chunks_down[message.seq, message.index] += 1
                self.up(self.uplink.received(topic, frame, now))
            case "node", mqtt.Delivered(token):
                self.up(self.uplink.delivered(token, now))
            case "aggregator", mqtt.Received(topic, frame):
                message, _ = unpack(frame)
                if isinstance(message, Chunk):
                    self.chunks_up[message.index] += 1
                self.down(self.downlink.received(topic, frame, now))
        self.up(self.uplink.tick(now))
        self.down(self.downlink.tick(now))

    def offer(self, seq: int, size: int) -> bytes:
        """Begin to send a content."""
        content = random.Random(seq).randbytes(size)
        self.up(self.uplink.offer(seq, content, time.monotonic()))
        return content

    def transfer(self, seq: int, size: int) -> None:
        """Send a content, and wait until it is settled and the tier is what it shows."""
        content = self.offer(seq, size)
        self.run_until(lambda: seq in self.settled, f"the verdict on {seq}")
        self.run_until(lambda: not self.uplink.state.proposed_tier, "the confirmation")
        assert self.contents[seq] == content

    def run_until(self, condition: Callable[[], bool], what: str) -> None:
        wait_until(condition, what, meanwhile=self.step)

    def stop(self) -> None:
        self.node.stop()
        self.aggregator.stop()
