"""Small real objects for tests: one layout of a few parameters, updates and machines of it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetertrain import codec
from hetertrain.core.aggregator import Aggregator
from hetertrain.core.gate import Gate
from hetertrain.core.policy import SYNC_PRESETS, SyncPolicy, WeightPolicy
from hetertrain.core.update import Checkpoint, Update
from hetertrain.wire.messages import AggregatorStatus, NodeState

LAYOUT = "test-layout"
SIZE = 8


def make_update(
    node: str,
    seq: int,
    delta: NDArray[np.float32] | float = 0.1,
    *,
    base_version: int = 0,
    examples: int = 100,
    steps: int = 10,
    sync: int | None = None,
    integers: tuple[int, ...] = (),
) -> Update:
    vector = np.full(SIZE, delta, np.float32) if isinstance(delta, float) else delta
    return Update(
        node=node,
        seq=seq,
        base_version=base_version,
        examples=examples,
        steps=steps,
        layout=LAYOUT,
        sync=sync,
        integers=integers,
        payload=codec.encode(vector, None).payload,
    )


def make_checkpoint(version: int = 0, value: float = 0.0) -> Checkpoint:
    return Checkpoint(version, np.full(SIZE, value, np.float32), np.empty(0, np.int64))


def make_aggregator(
    policy: SyncPolicy = SYNC_PRESETS["sap"], weights: WeightPolicy | None = None
) -> Aggregator:
    gate = Gate(LAYOUT, SIZE, 0, policy.max_lag)
    return Aggregator(gate, policy, weights or WeightPolicy(), make_checkpoint())


def make_state(node: str, **said: Any) -> NodeState:
    """Return what a vehicle at work says; ``said`` changes fields."""
    usual = {"job": "fleet", "cell": "cloud", "tier": "t2", "role": "vehicle", "is_online": True}
    return NodeState(node=node, **usual | said)


def make_status(**said: Any) -> AggregatorStatus:
    """Return what an aggregator at work says; ``said`` changes fields."""
    usual: dict[str, Any] = {
        "job": "fleet",
        "cell": "cloud",
        "version": 1,
        "elapsed_seconds": 1.0,
        "sync": 0,
        "sync_in_seconds": None,
        "is_syncing": False,
        "active": 1,
        "open_updates": 1,
        "metrics": {},
        "updates_by_lag": {},
        "refused": {},
        "waiting_code": "updates",
        "waiting_for": "2 needed, 1 present",
    }
    return AggregatorStatus(**usual | said)
