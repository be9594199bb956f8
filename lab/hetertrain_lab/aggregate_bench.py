"""How many updates a second does one aggregator process take, and where does the time go?

A real aggregator, a real broker and real connections on this machine; only training is left out: a
load of nodes sends updates that were encoded before. Counted are updates that were journalled and
acknowledged to their node. Meanwhile the aggregator cuts a version a second, broadcasts it and
writes checkpoints, as it always does.

Broker and load share the processor with the aggregator, so the rate is what this machine does in
all; the aggregator's own seconds per update say what it alone could do.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import queue
import resource
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hetertrain import codec
from hetertrain.core.tiers import TIERS
from hetertrain.core.update import Update
from hetertrain.errors import HetertrainError
from hetertrain.logging import configure
from hetertrain.service import ConnectionSettings
from hetertrain.task import Node, Task
from hetertrain.transport import mqtt
from hetertrain.transport.broker import EmbeddedBroker
from hetertrain.wire import topics
from hetertrain.wire.contents import pack_update
from hetertrain.wire.events import ModelReceived, Outgoing, UplinkReady
from hetertrain.wire.frames import pack, unpack
from hetertrain.wire.messages import Missing, NodeState, VerdictMessage
from hetertrain.wire.transfer import Sender
from hetertrain.wire.uplink import HEARTBEAT_SECONDS, Uplink
from hetertrain_cloud.service import AggregatorService, AggregatorSettings
from hetertrain_lab.codec_bench import DENSITY, RESNET18_PARAMETERS, bytes_per_value
from hetertrain_lab.page import Rows

JOB = "aggregate"
TIER = TIERS["t4"]
NUM_LOADS = 2
NODES_PER_LOAD = 128
CUT_SECONDS = 1.0
WARM_UP_SECONDS, MEASURED_SECONDS, QUICK_SECONDS = 6.0, 30.0, 10.0
START_SECONDS_MAX = 120.0
MEBIBYTE = 1 << 20
SEED = 1
DELTA_SCALE = 1e-3

STAGES: dict[str, tuple[str, ...]] = {
    "frames and chunks": ("hetertrain.wire.downlink:Downlink.received",),
    "decoding": ("hetertrain.codec:parse",),
    "checking": ("hetertrain.core.gate:_implausible",),
    "merging": ("hetertrain.codec:add_into",),
    "journal": ("hetertrain.transport.inbox:Inbox.append",),
    "cutting": ("hetertrain.core.aggregator:cut",),
    "broadcasting": ("hetertrain.wire.broadcast:Broadcaster._broadcast",),
    "checkpoints": ("hetertrain_cloud.checkpoints:CheckpointStore.save",),
}
"""What the aggregator's thread does, by the functions that do it."""


class VectorTask(Task):
    """A model of ResNet-18's size that nobody trains."""

    num_parameters = RESNET18_PARAMETERS

    def model(self) -> nn.Module:
        """Build one tensor."""
        module = nn.Module()
        module.register_parameter("vector", nn.Parameter(torch.zeros(self.num_parameters)))
        return module

    def train_batches(self, node: Node) -> Iterator[Any]:
        """Yield nothing."""
        del node
        return iter(())

    def examples(self, node: Node) -> int:
        """Count one."""
        del node
        return 1

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return zero."""
        del model, batch
        return torch.zeros(())

    def evaluate(self, model: nn.Module, node: Node | None) -> dict[str, float]:
        """Measure nothing."""
        del model, node
        return {"value": 0.0}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build any."""
        return torch.optim.SGD(model.parameters(), lr=0.0)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of update, and of its nodes."""

    name: str
    budget_bytes: int | None
    bits: int | None
    in_flight: int
    """Transfers under way at a time, per load."""
    num_parameters: int = RESNET18_PARAMETERS
    cell: str = topics.CLOUD_CELL
    num_nodes: int = NODES_PER_LOAD
    """Of one load."""


KINDS = (
    Kind("1 %, 8 bits", int(DENSITY * RESNET18_PARAMETERS * bytes_per_value(8)), 8, 8),
    Kind("dense float32", None, None, 2),
)


@dataclass(frozen=True, slots=True)
class Measure:
    """What one kind of update costs."""

    update: str
    payload_bytes: int
    updates_per_second: float
    megabytes_per_second: float
    versions: int
    seconds_per_update: float
    """Of the aggregator's process, all threads."""
    cores: float
    """How many the aggregator kept busy."""
    stages: dict[str, float]
    """Milliseconds per update, by stage."""
    peak_memory_mib: float
    idle_memory_mib: float


def run_aggregate(
    directory: Path, *, is_quick: bool, on_progress: Callable[[float], None]
) -> list[Measure]:
    """Measure each kind of update with an aggregator of its own.

    Raises:
        HetertrainError: no update was acknowledged in time, or a part of it ended.
    """
    seconds = QUICK_SECONDS if is_quick else MEASURED_SECONDS
    found = []
    for done, kind in enumerate(KINDS):
        with EmbeddedBroker(directory / "broker") as broker:
            state = directory / f"state-{time.time_ns()}"
            settings = AggregatorSettings(
                job=JOB,
                task=f"{__name__}:{VectorTask.__name__}",
                cut_fraction=1.0,
                cut_seconds=CUT_SECONDS,
                state_directory=state,
                broker_host=broker.host,
                broker_port=broker.port,
            )
            found.append(_measure(kind, settings, seconds))
        on_progress((done + 1) / len(KINDS))
    return found


def _measure(kind: Kind, settings: AggregatorSettings, seconds: float) -> Measure:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    counter = context.Value("q", 0)
    ours, theirs = context.Pipe()
    aggregator = context.Process(target=_run_aggregator, args=(settings, theirs), daemon=True)
    loads = [
        context.Process(target=run_load, args=(settings, kind, index, counter), daemon=True)
        for index in range(NUM_LOADS)
    ]
    processes: list[BaseProcess] = [aggregator, *loads]
    for process in processes:
        process.start()
    try:
        await_first(counter, processes)
        pass_seconds(WARM_UP_SECONDS, processes)
        before = _usage(ours), counter.value, time.monotonic()
        pass_seconds(seconds, processes)
        after = _usage(ours), counter.value, time.monotonic()
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
    return _compare(kind, before, after)


def await_first(counter: Synchronized[int], processes: list[BaseProcess]) -> None:
    """Wait until an update was acknowledged.

    Raises:
        HetertrainError: none was in time, or a process has ended.
    """
    give_up_at = time.monotonic() + START_SECONDS_MAX
    while counter.value == 0:
        if time.monotonic() > give_up_at or not all(process.is_alive() for process in processes):
            raise HetertrainError("no update was acknowledged: see the log above")
        time.sleep(0.1)


def pass_seconds(seconds: float, processes: list[BaseProcess]) -> None:
    """Let a part of a measurement pass.

    Raises:
        HetertrainError: a process ended meanwhile, so what was measured would be too little.
    """
    time.sleep(seconds)
    if not all(process.is_alive() for process in processes):
        raise HetertrainError("a process ended while it was measured: see the log above")


Sample = tuple[dict[str, Any], int, float]


def _compare(kind: Kind, before: Sample, after: Sample) -> Measure:
    first, last = before[0], after[0]
    updates, seconds = after[1] - before[1], after[2] - before[2]
    if updates == 0:
        raise HetertrainError(f"no update of {kind.name} was acknowledged in {seconds:.0f} s")
    busy = last["cpu_seconds"] - first["cpu_seconds"]
    stages = {
        name: 1e3 * (last["stages"][name] - first["stages"].get(name, 0.0)) / updates
        for name in last["stages"]
    }
    stages["other and threads"] = 1e3 * busy / updates - sum(stages.values())
    return Measure(
        update=kind.name,
        payload_bytes=len(_payload(kind)),
        updates_per_second=round(updates / seconds, 2),
        megabytes_per_second=round(updates * len(_payload(kind)) / seconds / 1e6, 1),
        versions=last["versions"] - first["versions"],
        seconds_per_update=round(busy / updates, 5),
        cores=round(busy / seconds, 2),
        stages={name: round(value, 3) for name, value in stages.items()},
        peak_memory_mib=round(last["peak_memory_mib"], 1),
        idle_memory_mib=round(first["idle_memory_mib"], 1),
    )


def _payload(kind: Kind) -> bytes:
    rng = np.random.default_rng(SEED)
    delta = rng.standard_normal(kind.num_parameters, np.float32) * np.float32(DELTA_SCALE)
    return codec.encode(delta, kind.budget_bytes, bits=kind.bits).payload


def _usage(pipe: Connection) -> dict[str, Any]:
    pipe.send(None)
    if not pipe.poll(START_SECONDS_MAX):
        raise HetertrainError("the aggregator does not answer")
    usage: dict[str, Any] = pipe.recv()
    return usage


def _run_aggregator(settings: AggregatorSettings, pipe: Connection) -> None:
    configure("WARNING")
    spent: dict[str, float] = defaultdict(float)
    with contextlib.ExitStack() as stack:
        for stage, functions in STAGES.items():
            for function in functions:
                stack.enter_context(_timed(function, stage, spent))
        idle_memory_mib = _memory_mib()
        service = AggregatorService(settings)

        def answer() -> None:
            while True:
                pipe.recv()
                pipe.send(
                    {
                        "cpu_seconds": time.process_time(),
                        "stages": dict(spent),
                        "versions": service.version,
                        "peak_memory_mib": _memory_mib(),
                        "idle_memory_mib": idle_memory_mib,
                    }
                )

        threading.Thread(target=answer, daemon=True).start()
        service.run()


def _memory_mib() -> float:
    """Return the most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def owner_of(reference: str) -> tuple[Any, str]:
    """Return the module or class of a function that is named ``module:path``, and its name."""
    module_name, _, path = reference.partition(":")
    *parents, name = path.split(".")
    owner: Any = importlib.import_module(module_name)
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name


@contextlib.contextmanager
def _timed(reference: str, stage: str, spent: dict[str, float]) -> Iterator[None]:
    """Add up the processor time of a function, without that of stages inside it."""
    owner, name = owner_of(reference)
    function = getattr(owner, name)

    def timed(*arguments: Any, **named: Any) -> Any:
        inner = sum(spent.values())
        began = time.thread_time()
        try:
            return function(*arguments, **named)
        finally:
            inside = sum(spent.values()) - inner
            spent[stage] += time.thread_time() - began - inside

    setattr(owner, name, timed)
    try:
        yield
    finally:
        setattr(owner, name, function)


def run_load(
    settings: ConnectionSettings, kind: Kind, index: int, counter: Synchronized[int]
) -> None:
    """Be a process of many nodes that send updates until it is killed."""
    configure("WARNING")
    Load(settings, kind, index, counter).run()


class Load:
    """Many nodes behind one connection; the first of them is a whole one and tells the others
    which version there is.
    """

    def __init__(
        self, settings: ConnectionSettings, kind: Kind, index: int, counter: Synchronized[int]
    ) -> None:
        names = [f"load-{index}-{number}" for number in range(kind.num_nodes)]
        self._state = NodeState(
            node=names[0],
            job=JOB,
            cell=kind.cell,
            tier=TIER.name,
            role="vehicle",
            is_online=True,
        )
        self._uplink = Uplink(self._state, TIER)
        self._kind = kind
        self._payload = _payload(kind)
        self._counter = counter
        self._model: ModelReceived | None = None
        self._idle = names[1:]
        self._others = names[1:]
        self._senders: dict[str, Sender] = {}
        self._seq = time.time_ns()
        self._heartbeat_at = 0.0
        self._events: queue.SimpleQueue[mqtt.Event] = queue.SimpleQueue()
        self._tokens: dict[int, str] = {}
        self._connection = mqtt.Connection(
            settings.endpoint(f"load-{index}"),
            self._uplink.subscriptions + tuple(topics.inbox(name) for name in self._others),
            self._events.put,
        )

    def run(self) -> None:
        """Send updates until killed."""
        self._connection.start()
        while os.getppid() != 1:
            with contextlib.suppress(queue.Empty):
                self._take(self._events.get(timeout=0.02))
            now = time.monotonic()
            self._apply(self._uplink.tick(now))
            if now >= self._heartbeat_at and self._uplink.is_connected:
                self._heartbeat_at = now + HEARTBEAT_SECONDS
                self._beat()
            self._send(now)

    def _take(self, event: mqtt.Event) -> None:
        now = time.monotonic()
        match event:
            case mqtt.Connected(packet_bytes_max):
                self._apply(self._uplink.connected(now, packet_bytes_max))
            case mqtt.Received(topic, frame) if topic in self._uplink.subscriptions:
                self._apply(self._uplink.received(topic, frame, now))
            case mqtt.Received(topic, frame):
                self._answered(topic.split("/")[-2], frame)
            case mqtt.Delivered(token):
                sender = self._senders.get(self._tokens.get(token, ""))
                if sender is not None:
                    sender.delivered(now)

    def _answered(self, node: str, frame: bytes) -> None:
        message, payload = unpack(frame)
        sender = self._senders.get(node)
        if sender is None:
            return
        if isinstance(message, Missing):
            sender.missing(payload)
        elif isinstance(message, VerdictMessage) and message.seq == sender.seq:
            if message.outcome == "merged":
                with self._counter.get_lock():
                    self._counter.value += 1
            del self._senders[node]
            del self._tokens[sender.seq]
            self._idle.append(node)

    def _apply(self, ready: UplinkReady) -> None:
        self._connection.publish(ready.send)
        for event in ready.events:
            if isinstance(event, ModelReceived):
                self._model = event

    def _beat(self) -> None:
        mine = self._uplink.state
        states = (replace(mine, node=name) for name in self._others)
        self._connection.publish(
            tuple(Outgoing(topics.state(each.node), pack(each)) for each in states)
        )

    def _send(self, now: float) -> None:
        while self._model is not None and len(self._senders) < self._kind.in_flight:
            node = self._idle.pop(0)
            self._senders[node] = self._sender(node, self._model)
        for node, sender in self._senders.items():
            topic = topics.up(JOB, self._kind.cell, TIER.name, node)
            for message, chunk in sender.due(now):
                frame = Outgoing(topic, pack(message, chunk), token=sender.seq)
                self._connection.publish((frame,))

    def _sender(self, node: str, model: ModelReceived) -> Sender:
        self._seq += 1
        self._tokens[self._seq] = node
        update = Update(
            node=node,
            seq=self._seq,
            base_version=model.version,
            examples=100,
            steps=1,
            layout=model.terms.layout,
            lineage=model.terms.lineage,
            payload=self._payload,
        )
        content = pack_update(update)
        return Sender(
            node=node,
            seq=self._seq,
            content=content,
            chunk_bytes=TIER.chunk_bytes,
            window=TIER.window_chunks,
            airtime_seconds=TIER.seconds_for(len(content)),
        )


def figures(measures: list[Measure]) -> dict[str, float]:
    """Return the figures by which an aggregator is judged."""
    sparse, dense = measures
    return {
        "updates_per_second_1pct": sparse.updates_per_second,
        "updates_per_second_dense": dense.updates_per_second,
        "milliseconds_per_update_1pct": round(1e3 * sparse.seconds_per_update, 3),
        "milliseconds_per_update_dense": round(1e3 * dense.seconds_per_update, 3),
        "peak_memory_mib": max(m.peak_memory_mib for m in measures),
        "model_mib": round(4 * RESNET18_PARAMETERS / MEBIBYTE, 1),
    }


def aggregate_rows(measures: list[Measure]) -> Rows:
    """Return the table."""
    header = ("", *(m.update for m in measures))
    lines: list[tuple[str, ...]] = [
        ("updates/s, acknowledged", *(f"{m.updates_per_second:,.1f}" for m in measures)),
        ("MB/s", *(f"{m.megabytes_per_second:,.1f}" for m in measures)),
        ("versions meanwhile", *(f"{m.versions}" for m in measures)),
        ("aggregator's cores busy", *(f"{m.cores:.2f}" for m in measures)),
        ("its ms per update", *(f"{1e3 * m.seconds_per_update:,.2f}" for m in measures)),
        *(
            (f"  {name}", *(f"{m.stages.get(name, 0.0):,.2f}" for m in measures))
            for name in measures[0].stages
        ),
        ("peak memory, MiB", *(f"{m.peak_memory_mib:,.0f}" for m in measures)),
        ("of which before the job", *(f"{m.idle_memory_mib:,.0f}" for m in measures)),
    ]
    return f"one aggregator, {RESNET18_PARAMETERS:,} parameters", header, lines
