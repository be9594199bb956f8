"""The process that trains: runs the user's task on the node's own data, step by step, as it is
told.

It speaks over a pipe to its agent: a ``TrainCommand`` with a number of steps (and a vector to start
from), answered by a ``TrainedReport`` with the local vector; an ``InterruptCommand`` ends the order
at the next step boundary. When the agent goes away, so does the trainer. Training state beside the
model (the optimiser's) lives here only.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import nn

from hetertrain.core.layout import Integers, ParameterLayout, Vector
from hetertrain.errors import TaskError, TrainError
from hetertrain.task import (
    Batch,
    Node,
    Task,
    layout_of,
    load_task,
    measure,
    read_tensors,
    write_tensors,
)
from hetertrain.transport.pipe import TrainerEnd
from hetertrain.wire.frames import pack
from hetertrain.wire.messages import TrainCommand, TrainedReport, TrainerReady, TrainFailed
from hetertrain_vehicle.duty import DutyCycle


@dataclass(slots=True)
class Trainer:
    """A model, its data and its optimiser, trained in steps."""

    task: Task
    node: Node
    step_seconds_min: float = 0.0
    """Pads every step to this duration: a slower processor than the one at hand."""
    learning_rate: float | None = None
    """Replaces that of the task's optimiser."""
    model: nn.Module = field(init=False)
    layout: ParameterLayout = field(init=False)
    _optimizer: torch.optim.Optimizer = field(init=False)
    _batches: Iterator[Batch] = field(init=False)

    def __post_init__(self) -> None:
        self.model = self.task.model()
        self.layout = layout_of(self.task, self.model)
        self.reset_optimizer()
        self._batches = iter(self.task.train_batches(self.node))

    def load(self, vector: Vector, integers: Integers) -> None:
        """Go on from another model; the optimiser's state stays."""
        write_tensors(self.model, self.layout.unflatten(vector, integers))

    def reset_optimizer(self) -> None:
        """Forget the optimiser's momentum."""
        self._optimizer = self.task.optimizer(self.model)
        if self.learning_rate is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = self.learning_rate

    def measure(self) -> dict[str, float]:
        """Evaluate the model on the node's own held-out data."""
        return measure(self.task, self.model, self.node)

    def vector(self) -> tuple[Vector, Integers]:
        """Copy the local model."""
        return self.layout.flatten(read_tensors(self.model))

    def write(self, vector: Vector) -> Integers:
        """Copy the local model into ``vector``; return its integers.

        Raises:
            TrainError: a parameter is not finite.
        """
        _, integers = self.layout.flatten(read_tensors(self.model), vector)
        if not np.isfinite(vector).all():
            raise TrainError(
                "a parameter is not finite: lower the learning rate, or check the data"
            )
        return integers

    def step(self) -> float:
        """Train one batch and return its loss.

        Raises:
            TrainError: the loss is not finite.
        """
        started = time.monotonic()
        if not self.model.training:
            self.model.train()
        self._optimizer.zero_grad(set_to_none=True)
        loss = self.task.loss(self.model, next(self._batches))
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._optimizer.step()
        value = float(loss.detach())
        if not np.isfinite(value):
            raise TrainError(f"the loss is {value}: lower the learning rate, or check the data")
        remaining = self.step_seconds_min - (time.monotonic() - started)
        if remaining > 0:
            time.sleep(remaining)
        return value


def prepare(seed: int) -> None:
    """Make this process one that trains: one thread, and chance from a seed."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)


def serve(
    connection: Connection,
    task_reference: str,
    node: Node,
    step_seconds_min: float = 0.0,
    cpu_share: float | None = None,
) -> None:
    """Run a trainer for the agent at the other end of a pipe until it closes."""
    prepare(node.seed)
    try:
        task = load_task(task_reference)
        trainer = Trainer(task, node, step_seconds_min)
        pipe = TrainerEnd(connection, trainer.layout.size)
        ready = TrainerReady(
            examples=task.examples(node),
            layout=trainer.layout.digest,
            size=trainer.layout.size,
            label=task.label(node),
        )
        pipe.ready(ready)
        # Loading is over in a while, whatever it took, and is not rested for.
        duty = DutyCycle(cpu_share, time.monotonic(), time.process_time())
        while True:
            command = pipe.receive()
            if isinstance(command, TrainCommand):
                pipe.report(_train(trainer, command, pipe, duty))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # The agent has gone.
    except Exception as error:  # the user's code may raise anything; the agent reports it
        _report_failure(connection, error)


def _train(
    trainer: Trainer, command: TrainCommand, pipe: TrainerEnd, duty: DutyCycle
) -> TrainedReport:
    if command.has_start:
        trainer.load(pipe.vector, np.asarray(command.integers, np.int64))
    if command.is_fresh:
        trainer.reset_optimizer()
    metrics = trainer.measure() if command.measures else {}
    started, cpu_started = time.monotonic(), time.process_time()
    loss, done = 0.0, 0
    while done < command.steps and not pipe.poll(
        duty.rest_seconds(time.monotonic(), time.process_time())
    ):
        loss = trainer.step()
        done += 1
    seconds, cpu_seconds = time.monotonic() - started, time.process_time() - cpu_started
    integers = trainer.write(pipe.vector)
    return TrainedReport(
        steps=done,
        seconds=seconds,
        loss=loss,
        integers=tuple(int(i) for i in integers),
        metrics=metrics,
        cpu_seconds=cpu_seconds,
    )


def _report_failure(connection: Connection, error: Exception) -> None:
    code: Any = error.code if isinstance(error, TaskError | TrainError) else type(error).__name__
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    failed = TrainFailed(error=str(code)[:500], message=str(error)[:500], peak_mib=peak)
    with suppress(OSError):  # An agent that has gone logged the end of the pipe.
        connection.send_bytes(pack(failed))
