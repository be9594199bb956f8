"""How much memory does a model's way over the wire take, beside the model itself?

An aggregator's and a node's end of the conversation, a process each, and a real broker between them
that takes no packet over 256 KiB. The model goes down whole, as to a node that is new. Memory is
the most that a process held above what it held before, the node's model not counted.
"""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from hetertrain.core.policy import SYNC_PRESETS, WEIGHT_PRESETS
from hetertrain.core.tiers import TIERS
from hetertrain.core.update import Checkpoint, model_digest
from hetertrain.errors import HetertrainError
from hetertrain.transport import mqtt
from hetertrain.transport.broker import EmbeddedBroker
from hetertrain.wire import topics
from hetertrain.wire.contents import JobTerms
from hetertrain.wire.downlink import Downlink
from hetertrain.wire.events import DownlinkReady, ModelReceived
from hetertrain.wire.messages import NodeState
from hetertrain.wire.uplink import Uplink
from hetertrain_lab.page import Rows

JOB = "transfer"
TIER = TIERS["t4"]
PACKET_BYTES = 256 << 10
MODEL_MIB, QUICK_MODEL_MIB = 1024, 64
SECONDS_MAX = 600.0
MEBIBYTE = 1 << 20
TERMS = JobTerms("layout", SYNC_PRESETS["sap"], WEIGHT_PRESETS["sap"], {}, "run")
NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Measure:
    """What it took."""

    model_mib: int
    seconds: float
    megabytes_per_second: float
    aggregator_extra_mib: float
    node_extra_mib: float


def run_transfer(
    directory: Path, *, is_quick: bool, on_progress: Callable[[float], None]
) -> Measure:
    """Send one model.

    Raises:
        HetertrainError: it did not arrive, or is another one.
    """
    model_mib = QUICK_MODEL_MIB if is_quick else MODEL_MIB
    context = multiprocessing.get_context("forkserver")
    with EmbeddedBroker(directory / "broker", packet_bytes=PACKET_BYTES) as broker:
        pipes = [context.Pipe() for _ in range(2)]
        processes = [
            context.Process(
                target=target, args=(broker.host, broker.port, model_mib, theirs), daemon=True
            )
            for target, (_, theirs) in zip((_be_aggregator, _be_node), pipes, strict=True)
        ]
        try:
            began = time.monotonic()
            for process in processes:
                process.start()
            (aggregator, _), (node, _) = pipes
            arrived = _receive(node, "the node")
            on_progress(0.9)
            aggregator.send(None)
            sent = _receive(aggregator, "the aggregator")
        finally:
            for process in processes:
                process.kill()
                process.join()
    if arrived["digest"] != sent["digest"]:
        raise HetertrainError("the model that arrived is another one")
    seconds = arrived["at"] - max(began, sent["began"])
    return Measure(
        model_mib=model_mib,
        seconds=round(seconds, 2),
        megabytes_per_second=round(model_mib * MEBIBYTE / seconds / 1e6, 1),
        aggregator_extra_mib=round(sent["extra_mib"], 1),
        node_extra_mib=round(arrived["extra_mib"] - model_mib, 1),
    )


def _receive(pipe: Connection, whom: str) -> dict[str, Any]:
    if not pipe.poll(SECONDS_MAX):
        raise HetertrainError(f"{whom} was not ready within {SECONDS_MAX:g} s")
    found: dict[str, Any] = pipe.recv()
    return found


class Memory:
    """Watches the most memory that this process holds, from now on."""

    def __init__(self) -> None:
        # Resets the peak to what is held now (proc(5)).
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._before = self._peak_mib()

    def extra_mib(self) -> float:
        """Return by how much the most was above what was held at the beginning."""
        return self._peak_mib() - self._before

    def _peak_mib(self) -> float:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        peak = next(line for line in lines if line.startswith("VmHWM"))
        return int(peak.split()[1]) / 1024


def _be_aggregator(host: str, port: int, model_mib: int, pipe: Connection) -> None:
    vector = np.random.default_rng(1).random(model_mib * MEBIBYTE // 4, np.float32)
    checkpoint = Checkpoint(0, vector, NONE)
    memory, began = Memory(), time.monotonic()
    downlink = Downlink(JOB, topics.CLOUD_CELL)
    events: queue.SimpleQueue[mqtt.Event] = queue.SimpleQueue()
    connection = mqtt.Connection(
        mqtt.Endpoint(host=host, port=port, client_id="aggregator"),
        downlink.subscriptions,
        events.put,
    )

    def apply(ready: DownlinkReady) -> float:
        connection.publish(ready.send)
        return ready.wake_at

    connection.start()
    wake_at = apply(downlink.release(checkpoint, None, TERMS, time.monotonic()))
    while not pipe.poll():
        event = _next(events, min(wake_at, time.monotonic() + 0.1))
        now = time.monotonic()
        if isinstance(event, mqtt.Connected):
            downlink.connected(event.packet_bytes_max)
        if isinstance(event, mqtt.Received):
            apply(downlink.received(event.topic, event.frame, now))
        wake_at = apply(downlink.tick(now))
    digest = model_digest(vector, NONE, TERMS.lineage)
    pipe.send({"digest": digest, "extra_mib": memory.extra_mib(), "began": began})
    pipe.poll(SECONDS_MAX)


def _be_node(host: str, port: int, model_mib: int, pipe: Connection) -> None:
    del model_mib
    memory = Memory()
    state = NodeState(
        node="n0", job=JOB, cell=topics.CLOUD_CELL, tier=TIER.name, role="vehicle", is_online=True
    )
    uplink = Uplink(state, TIER)
    events: queue.SimpleQueue[mqtt.Event] = queue.SimpleQueue()
    connection = mqtt.Connection(
        mqtt.Endpoint(host=host, port=port, client_id="n0"), uplink.subscriptions, events.put
    )
    connection.start()
    wake_at = time.monotonic()
    while True:
        event = _next(events, wake_at)
        now = time.monotonic()
        found = []
        match event:
            case mqtt.Connected(packet_bytes_max):
                ready = uplink.connected(now, packet_bytes_max)
            case mqtt.Disconnected():
                ready = uplink.disconnected(now)
            case mqtt.Received(topic, frame):
                ready = uplink.received(topic, frame, now)
            case _:
                ready = uplink.tick(now)
        connection.publish(ready.send)
        wake_at = ready.wake_at
        found = [each for each in ready.events if isinstance(each, ModelReceived)]
        if found:
            break
    extra_mib = memory.extra_mib()
    digest = model_digest(found[0].vector, found[0].integers, TERMS.lineage)
    pipe.send({"digest": digest, "extra_mib": extra_mib, "at": now})
    pipe.poll(SECONDS_MAX)


def _next(events: queue.SimpleQueue[mqtt.Event], until: float) -> mqtt.Event | None:
    try:
        return events.get(timeout=max(0.0, until - time.monotonic()))
    except queue.Empty:
        return None


def transfer_rows(measure: Measure) -> Rows:
    """Return the table."""
    header = ("", f"{measure.model_mib:,} MiB model")
    lines: list[tuple[str, ...]] = [
        ("seconds", f"{measure.seconds:,.1f}"),
        ("MB/s", f"{measure.megabytes_per_second:,.1f}"),
        ("aggregator's extra memory, MiB", f"{measure.aggregator_extra_mib:,.1f}"),
        ("node's extra memory, MiB", f"{measure.node_extra_mib:,.1f}"),
    ]
    return f"one model down, packets of {PACKET_BYTES // 1024} KiB at most", header, lines
