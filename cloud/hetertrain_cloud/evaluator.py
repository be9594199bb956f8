"""Measures versions on the cloud's held-out data, in a thread of its own, so that no cut waits for
it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetertrain.core.layout import ParameterLayout
from hetertrain.core.update import Checkpoint
from hetertrain.logging import get_logger
from hetertrain.task import Task, measure, write_tensors
from hetertrain_cloud.history import Progress

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The metrics of a version, and how far the job had come when it was made."""

    version: int
    progress: Progress
    metrics: dict[str, float]


class Evaluator(threading.Thread):
    """Evaluates the newest version offered; one that comes while it is busy replaces one that
    waits.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        layout: ParameterLayout,
        on_result: Callable[[Evaluated], None],
    ) -> None:
        super().__init__(name="evaluator", daemon=True)
        self._task = task
        self._model = model
        self._layout = layout
        self._on_result = on_result
        self._condition = threading.Condition()
        self._next: tuple[Checkpoint, Progress] | None = None
        self._is_stopping = False

    def offer(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """Ask for an evaluation; never blocks."""
        with self._condition:
            self._next = (checkpoint, progress)
            self._condition.notify()

    def stop(self, timeout_seconds: float = 5.0) -> None:
        """Finish what was offered and end."""
        with self._condition:
            self._is_stopping = True
            self._condition.notify()
        self.join(timeout_seconds)

    def run(self) -> None:
        """Evaluate until stopped."""
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._next is not None or self._is_stopping)
                if self._next is None:
                    return
                (checkpoint, progress), self._next = self._next, None
            try:
                result = self.evaluate(checkpoint, progress)
            except Exception as error:  # the user's code may raise anything
                get_logger().error(
                    "evaluation_failed", version=checkpoint.version, error=repr(error)
                )
            else:
                self._on_result(result)

    def evaluate(self, checkpoint: Checkpoint, progress: Progress) -> Evaluated:
        """Measure one version."""
        tensors = self._layout.unflatten(checkpoint.vector, checkpoint.integers)
        write_tensors(self._model, tensors)
        metrics = measure(self._task, self._model, None)
        if not metrics:
            get_logger().warning(
                "nothing_measured",
                version=checkpoint.version,
                reason="no metric is finite: has the model diverged?",
            )
        return Evaluated(checkpoint.version, progress, metrics)
