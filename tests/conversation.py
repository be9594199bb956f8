"""A node and its aggregator in conversation, without a broker."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from hetertrain.core.gate import Outcome, Verdict
from hetertrain.core.policy import SYNC_PRESETS, WEIGHT_PRESETS, Statistics
from hetertrain.core.tiers import TIERS
from hetertrain.core.update import Checkpoint
from hetertrain.wire import topics
from hetertrain.wire.contents import JobTerms
from hetertrain.wire.downlink import Downlink
from hetertrain.wire.events import (
    ContentReceived,
)
from hetertrain.wire.frames import pack
from hetertrain.wire.messages import NodeState
from hetertrain.wire.signing import Check, Sign
from hetertrain.wire.uplink import Uplink

PATIENT = replace(SYNC_PRESETS["sap"], sync_deadline_seconds=5.0)
TERMS = JobTerms("layout", PATIENT, WEIGHT_PRESETS["sap"], {0: Statistics()})
STATE = NodeState(
    node="n0", job="job", cell="cloud", tier="t1", role="vehicle", is_online=True, label="bus"
)


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


def heard(aggregator: Downlink, state: NodeState, now: float = 1.0) -> list[object]:
    return list(aggregator.received(topics.state(state.node), pack(state), now).events)
