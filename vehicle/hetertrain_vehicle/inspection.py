"""``hetertrain vehicle inspect``: all that would leave this vehicle, and nothing leaves it.

What it shows is made by the vehicle's own machines (``VehicleDriver``, and with it worker, codec
and uplink) on a link that goes nowhere: the very frames that an agent would publish. The update is
the one that waits in the outbox, which is only read and may be a running agent's; or that of a dry
run: the task is trained for some steps on the node's own data, from its own initial model.
"""

from __future__ import annotations

import hashlib
import queue
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hetertrain import codec
from hetertrain.core.layout import ParameterLayout, Role
from hetertrain.core.policy import SYNC_PRESETS, WEIGHT_PRESETS
from hetertrain.core.tiers import TIERS
from hetertrain.core.worker import Trained, TrainOrder, Worker
from hetertrain.errors import HetertrainError, TaskError
from hetertrain.logging import silent_logger
from hetertrain.service import resident_mib
from hetertrain.task import load_task
from hetertrain.transport import mqtt
from hetertrain.transport.outbox import Outbox, Pending, read_pending
from hetertrain.wire import topics
from hetertrain.wire.contents import JobTerms, unpack_as
from hetertrain.wire.events import ModelReceived, Outgoing
from hetertrain.wire.frames import pack, unpack
from hetertrain.wire.messages import NodeState, Pull, TrainerReady, UpdateContent
from hetertrain.wire.uplink import HEARTBEAT_SECONDS, Uplink
from hetertrain_vehicle.budgets import Ledger
from hetertrain_vehicle.driver import Circumstances, VehicleDriver
from hetertrain_vehicle.position import NAMES, Position, coarse_position
from hetertrain_vehicle.settings import VehicleSettings
from hetertrain_vehicle.signals import SignalsHeard, SignalTable, open_source
from hetertrain_vehicle.trainer import Trainer, prepare
from hetertrain_vehicle.trainer_process import node_of

POLICY = "sap"
"""A dry run has no job to follow, so it keeps to the preset."""
INTEGERS_SHOWN = 16
SIGNALS_SECONDS = 3.0
"""How long the source of signals may take to say where the vehicle is."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """What would leave a vehicle."""

    source: str
    content: bytes
    """The update's frame, as it goes into chunks and as its aggregator puts it together again."""
    heartbeat: NodeState
    frames: tuple[Outgoing, ...]
    """All that would be published, in order; the heartbeat is the last."""
    data_directory: Path
    layout: ParameterLayout | None
    """None: the task cannot be loaded, ``reason`` says why."""
    reason: str = ""


class Nowhere:
    """A link that keeps what is published on it, and a trainer that is told what to do."""

    bytes_up = bytes_down = 0

    def __init__(self) -> None:
        self.frames: list[Outgoing] = []
        self.orders: list[TrainOrder] = []

    def publish(self, outgoing: tuple[Outgoing, ...]) -> None:
        """Keep frames."""
        self.frames.extend(outgoing)

    def resubscribe(self, subscriptions: tuple[str, ...]) -> None:
        """Hear nothing."""

    def order(self, order: TrainOrder) -> None:
        """Keep an order."""
        self.orders.append(order)

    def interrupt(self) -> None:
        """Do nothing: an order is carried out when it is looked at."""

    def rest(self) -> None:
        """Do nothing."""

    def resume(self) -> None:
        """Do nothing."""


def inspect(settings: VehicleSettings, *, steps: int, is_dry_run: bool) -> Leaving:
    """Find out what would leave the vehicle: the update in the outbox if there is one, and no dry
    run is wanted; else what ``steps`` steps of training make.

    Raises:
        StoreError: the outbox cannot be read.
        TaskError: for a dry run, the task cannot be loaded or trained.
    """
    file = settings.directory / "outbox.db"
    pending = None if is_dry_run or not file.exists() else read_pending(file)
    # What the user's code prints is not ours to print.
    with redirect_stdout(sys.stderr):
        trainer, layout, reason = None, None, ""
        if pending is None:
            trainer = _load(settings)
            layout = trainer.layout
        else:
            layout, reason = _try_layout(settings)
        with _driver(settings) as (driver, outbox, nowhere):
            if trainer is not None:
                _train(driver, nowhere, trainer, steps)
            else:
                assert pending is not None, "else there is a trainer"
                _offer(driver, outbox, pending)
            update = outbox.pending()
            assert update is not None, "an update was put there"
            frames = _publish_all(driver, nowhere)
    heartbeat, _ = unpack(frames[-1].frame)
    assert isinstance(heartbeat, NodeState), "it was asked for last"
    source = f"the outbox {file}" if trainer is None else f"a dry run of {steps} steps"
    data_directory = node_of(settings).data_directory
    assert data_directory is not None, "a vehicle has one"
    return Leaving(source, update.content, heartbeat, frames, data_directory, layout, reason)


@contextmanager
def _driver(settings: VehicleSettings) -> Iterator[tuple[VehicleDriver, Outbox, Nowhere]]:
    """Build the vehicle as its agent does, with an outbox that is thrown away."""
    tier, nowhere = TIERS[settings.tier], Nowhere()
    with tempfile.TemporaryDirectory(prefix="hetertrain-inspect-") as directory:
        outbox = Outbox(Path(directory) / "outbox.db", int(time.time() * 1000))
        worker = Worker(
            node=settings.node,
            policy=SYNC_PRESETS[POLICY],
            tier=tier,
            examples=0,
            layout="",
            next_seq=outbox.next_seq,
        )
        uplink = Uplink(settings.state(), tier, sign=settings.signer())
        driver = VehicleDriver(worker, uplink, outbox, nowhere, nowhere, silent_logger())
        ledger = Ledger(settings.directory, settings.limits, silent_logger())
        driver.circumstances = Circumstances(
            budgets=ledger.shown(),
            month_bytes=ledger.month_bytes,
            rss_mib=resident_mib(),
            position=_position(settings),
        )
        # Who offers before it is connected asks first what had arrived, and sends less.
        driver.take(mqtt.Connected(), 0.0)
        nowhere.frames.clear()
        try:
            yield driver, outbox, nowhere
        finally:
            driver.close()


def _position(settings: VehicleSettings) -> Position | None:
    """Ask the signals' source where the vehicle is, if that would leave; it may not know."""
    if not settings.share_position or settings.signals is None:
        return None
    heard: queue.SimpleQueue[SignalsHeard] = queue.SimpleQueue()
    source = open_source(settings.signals, settings.signals_ca_file, heard.put)
    table, deadline = SignalTable(None), time.monotonic() + SIGNALS_SECONDS
    position = None
    try:
        source.want(NAMES)
        while position is None:
            try:
                said = heard.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            table.take(said, time.monotonic())
            position = coarse_position(table.known(time.monotonic()))
    finally:
        source.stop()
    return position


def _offer(driver: VehicleDriver, outbox: Outbox, pending: Pending) -> None:
    outbox.put(pending.seq, pending.content)
    driver.recover(0.0)


def _load(settings: VehicleSettings) -> Trainer:
    if settings.task is None:
        raise TaskError("there is no task: who trains in a loop of their own has it there")
    prepare(settings.seed)
    try:
        return Trainer(load_task(settings.task), node_of(settings))
    except HetertrainError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise TaskError(f"{settings.task}: {type(error).__name__}: {error}") from error


def _try_layout(settings: VehicleSettings) -> tuple[ParameterLayout | None, str]:
    try:
        return _load(settings).layout, ""
    except HetertrainError as error:
        return None, str(error)


def _train(driver: VehicleDriver, nowhere: Nowhere, trainer: Trainer, steps: int) -> None:
    """Let the vehicle hold the initial model, train, and encode what it learnt as it always does.

    Its aggregator pulls, so that it does not wait for its pace; the budget is that of one period.
    """
    uplink, task, node = driver.uplink, trainer.task, trainer.node
    layout = trainer.layout
    try:
        ready = TrainerReady(
            examples=task.examples(node),
            layout=layout.digest,
            size=layout.size,
            label=task.label(node),
        )
        driver.introduce(ready)
        terms = JobTerms(layout.digest, SYNC_PRESETS[POLICY], WEIGHT_PRESETS[POLICY], {})
        driver.hold(ModelReceived(0, *trainer.vector(), None, terms), 0.0)
        pull = pack(Pull(version=0))
        driver.take(mqtt.Received(topics.inbox(uplink.state.node), pull), 0.0)
        start = nowhere.orders[-1].start
        assert start is not None, "the first order says where to start"
        trainer.load(*start)
        began = time.monotonic()
        for _ in range(steps):
            trainer.step()
        seconds = time.monotonic() - began
    except HetertrainError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise TaskError(f"training failed: {type(error).__name__}: {error}") from error
    driver.trained(Trained(*trainer.vector(), steps, seconds), 0.0)


def _publish_all(driver: VehicleDriver, nowhere: Nowhere) -> tuple[Outgoing, ...]:
    """Let the broker take each frame in its time, until there is none left but the heartbeat."""
    now, taken = 0.0, 0
    while taken < len(nowhere.frames):
        outgoing = nowhere.frames[taken]
        taken += 1
        now += driver.uplink.tier.seconds_for(len(outgoing.frame))
        if outgoing.token is not None:
            driver.take(mqtt.Delivered(outgoing.token), now)
    driver.beat(None, now)
    return tuple(nowhere.frames)


def describe(leaving: Leaving, *, num_values: int) -> dict[str, Any]:
    """Return all of it as plain values, with the first ``num_values`` values of the update."""
    head, payload = unpack_as(UpdateContent, leaving.content)
    decoded = codec.parse(payload, codec.announced_size(payload))
    layout = leaving.layout
    is_known = layout is not None and layout.digest == head.layout
    reason = leaving.reason or ("" if is_known else "the update is of another task's layout")
    local = [p.name for p in layout.places if p.role is Role.LOCAL] if layout is not None else None
    return {
        "source": leaving.source,
        "update": asdict(head),
        "payload": {
            "form": "dense" if decoded.indices is None else "sparse",
            "bits": decoded.levels.bits,
            "values_kept": decoded.num_kept,
            "values": decoded.size,
            "bytes": len(payload),
            "bytes_as_float32": 4 * decoded.size,
            "norm": decoded.norm(),
        },
        "content": {
            "bytes": len(leaving.content),
            "sha256": hashlib.sha256(leaving.content).hexdigest(),
        },
        "values": _values(decoded, layout if is_known else None, num_values),
        "frames": _frames(leaving.frames),
        "heartbeat": asdict(leaving.heartbeat),
        "stays": {
            "data_directory": str(leaving.data_directory),
            "local_tensors": local,
            "unknown_because": reason,
        },
    }


def _values(
    decoded: codec.Decoded, layout: ParameterLayout | None, count: int
) -> list[dict[str, Any]]:
    count = min(count, decoded.num_kept)
    places = np.arange(count) if decoded.indices is None else decoded.indices[:count]
    values = decoded.values()[:count]
    return [
        {"index": int(index), "tensor": _tensor(layout, int(index)), "value": float(value)}
        for index, value in zip(places, values, strict=True)
    ]


def _tensor(layout: ParameterLayout | None, index: int) -> str | None:
    if layout is None:
        return None
    travels = (Role.PARAMETER, Role.BUFFER)
    return next(
        place.name
        for place in layout.places
        if place.role in travels and place.start <= index < place.start + place.size
    )


def _frames(frames: tuple[Outgoing, ...]) -> list[dict[str, Any]]:
    """Count what is published, by topic and kind."""
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for outgoing in frames:
        key = outgoing.topic, type(unpack(outgoing.frame)[0]).__name__
        counts[key] += 1
        sizes[key] += len(outgoing.frame)
    return [
        {"topic": topic, "kind": kind, "count": counts[topic, kind], "bytes": sizes[topic, kind]}
        for topic, kind in counts
    ]


def show(report: dict[str, Any]) -> None:
    """Print what ``describe`` returned, for people."""
    from rich.console import Console

    console = Console()
    update, payload, stays = report["update"], report["payload"], report["stays"]
    integers = update["integers"]
    shown = ", ".join(map(str, integers[:INTEGERS_SHOWN]))
    more = len(integers) - INTEGERS_SHOWN
    update |= {"integers": f"{shown} and {more} more" if more > 0 else shown or "none"}
    payload |= {"values_kept": f"{payload['values_kept']} of {payload.pop('values')}"}
    _print(console, f"The update, from {report['source']}", update | payload)
    _print(console, "Its frame, which goes out in chunks", report["content"])
    if report["values"]:
        rows = {
            f"{row['index']} {row['tensor'] or ''}": f"{row['value']:.9g}"
            for row in report["values"]
        }
        _print(console, "The first values of it", rows)
    _print(console, f"The heartbeat, each {HEARTBEAT_SECONDS:g} s", report["heartbeat"])
    rows = {
        f"{row['kind']} on {row['topic']}": f"{row['count']} frames, {row['bytes']} bytes"
        for row in report["frames"]
    }
    _print(console, "What is published for both, and nothing else", rows)
    local = stays["local_tensors"]
    tensors = f"unknown: {stays['unknown_because']}" if local is None else ", ".join(local)
    console.print(
        f"Never leaves: {stays['data_directory']}; tensors marked local: {tensors or 'none'}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _print(console: Any, title: str, rows: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left", show_header=False)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(escape(name), escape(str(value)))
    console.print(table)
