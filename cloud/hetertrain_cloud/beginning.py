"""What a job begins with: the model of its task, or of a file where its nodes train in loops of
their own. A file has no code, so its versions are not evaluated, and torch is not loaded for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hetertrain.arrays import load_initial
from hetertrain.core.layout import ParameterLayout
from hetertrain.core.update import Checkpoint
from hetertrain_cloud.evaluator import Evaluated, Evaluator
from hetertrain_cloud.history import Progress


class Evaluation(Protocol):
    """Measures versions, beside the aggregator's own work."""

    def start(self) -> None:
        """Begin."""

    def offer(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """Ask for an evaluation; never blocks."""

    def stop(self) -> None:
        """Finish what was offered and end."""


class NoEvaluation:
    """What there is without a task."""

    def start(self) -> None:
        """Do nothing."""

    def offer(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """A layout, the model of version 0, and what measures those that follow."""

    layout: ParameterLayout
    initial: Checkpoint
    evaluation: Evaluation


def from_task(reference: str, seed: int, on_result: Callable[[Evaluated], None]) -> Beginning:
    """Begin with the model that a task builds.

    Raises:
        TaskError: it cannot be loaded.
    """
    import torch

    from hetertrain.task import layout_of, load_task, read_tensors

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    task = load_task(reference)
    model = task.model()
    layout = layout_of(task, model)
    initial = Checkpoint(0, *layout.flatten(read_tensors(model)))
    return Beginning(layout, initial, Evaluator(task, model, layout, on_result))


def from_file(path: Path) -> Beginning:
    """Begin with the model that a file holds.

    Raises:
        LayoutError, SettingsError, TrainError: it cannot be read, or is not a model.
    """
    arrays, layout = load_initial(path)
    return Beginning(layout, Checkpoint(0, *layout.flatten(arrays)), NoEvaluation())
