"""What a user implements: the model, the node's data, the loss, the evaluation.

A task is named in settings as ``module:Class`` and built without arguments, in the trainer process
of a vehicle and in the evaluator of the cloud. Nothing here imports torch, so that an agent that
only relays vectors stays small.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hetertrain.core.layout import ParameterLayout
from hetertrain.core.metrics import check_metrics
from hetertrain.errors import TaskError

if TYPE_CHECKING:
    import torch
    from torch import nn

Batch = Any
"""Whatever the task's ``train_batches`` yields and its ``loss`` understands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The node that trains: its stable id, its labels, and where its own data lies."""

    id: str
    labels: Mapping[str, str] = field(default_factory=dict)
    data_directory: Path | None = None
    seed: int = 0


class Task(ABC):
    """A model to train and how to train it on one node's own data."""

    local: tuple[str, ...] = ()
    """Patterns of tensors that never leave the node (``"*.running_mean"``)."""

    def label(self, node: Node) -> str:
        """Say in a word what is particular to the node's data; for people."""
        return node.id

    @abstractmethod
    def model(self) -> nn.Module:
        """Build the model. The initial weights of version 0 are the cloud's."""

    @abstractmethod
    def train_batches(self, node: Node) -> Iterator[Batch]:
        """Yield the node's own training batches without end, shuffled by ``node.seed``."""

    @abstractmethod
    def examples(self, node: Node) -> int:
        """Count the training examples that the node holds; at least 1."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Compute the scalar training loss of one batch."""

    @abstractmethod
    def evaluate(self, model: nn.Module, node: Node | None) -> dict[str, float]:
        """Measure the model on the node's held-out data, or on the cloud's where ``node`` is None.

        The first key is the task's headline metric; higher is better. At most 32.
        """

    @abstractmethod
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build the node's local optimiser."""


def measure(task: Task, model: nn.Module, node: Node | None) -> dict[str, float]:
    """Evaluate a model; a metric that is not finite, as of a model that has diverged, is left out.

    Raises:
        TrainError: what the task returns are no metrics.
    """
    metrics = check_metrics(task.evaluate(model, node))
    return {name: value for name, value in metrics.items() if isfinite(value)}


def read_tensors(model: nn.Module) -> dict[str, NDArray[np.generic]]:
    """View a module's state as arrays by name; they share the module's memory."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in model.state_dict().items()}


def layout_of(task: Task, model: nn.Module) -> ParameterLayout:
    """Return the layout of a task's model."""
    parameters = {name for name, _ in model.named_parameters()}
    return ParameterLayout.of(read_tensors(model), parameters, task.local)


def write_tensors(model: nn.Module, tensors: Mapping[str, NDArray[np.generic]]) -> None:
    """Copy arrays into a module's state in place; tensors that are not named stay as they are."""
    for name, tensor in read_tensors(model).items():
        if name in tensors:
            tensor[...] = tensors[name]


def load_task(reference: str) -> Task:
    """Build the task named ``module:Class``.

    Raises:
        TaskError: the name is malformed, cannot be imported, or is not a Task.
    """
    module_name, separator, class_name = reference.partition(":")
    if not separator:
        raise TaskError(f"task {reference!r} is not of the form module:Class")
    try:
        task_class = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise TaskError(f"task {reference!r} cannot be imported: {error}") from error
    if not (isinstance(task_class, type) and issubclass(task_class, Task)):
        raise TaskError(f"task {reference!r} is not a subclass of hetertrain.Task")
    return task_class()
