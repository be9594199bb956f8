"""Training in virtual time: it takes the time that a scenario says, and its result comes from real
gradients or from a synthetic objective.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hetertrain.core.layout import Integers, Vector
from hetertrain.core.worker import Trained, TrainOrder
from hetertrain_lab.network import Clock


class Learner(Protocol):
    """What a simulated trainer trains; ``hetertrain_vehicle.trainer.Trainer`` is one."""

    def load(self, vector: Vector, integers: Integers) -> None:
        """Go on from another model."""

    def reset_optimizer(self) -> None:
        """Forget the optimiser's momentum."""

    def step(self) -> float:
        """Train one batch and return its loss."""

    def vector(self) -> tuple[Vector, Integers]:
        """Copy the local model."""


class SyntheticLearner:
    """Goes a part of the way to an optimum of its own at each step, with noise."""

    def __init__(self, size: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._optimum = self._rng.random(size, np.float32)
        self._local = np.zeros(size, np.float32)

    def load(self, vector: Vector, integers: Integers) -> None:
        """Go on from another model."""
        del integers
        self._local = vector.copy()

    def reset_optimizer(self) -> None:
        """Keep nothing between steps."""

    def step(self) -> float:
        """Move."""
        noise = self._rng.random(self._local.size, np.float32) - np.float32(0.5)
        self._local += np.float32(0.05) * (self._optimum + noise - self._local)
        return 0.0

    def vector(self) -> tuple[Vector, Integers]:
        """Copy the local vector."""
        return self._local.copy(), np.empty(0, np.int64)


@dataclass(slots=True)
class SimulatedTrainer:
    """Trains in virtual time: the work is done at once when its time is over."""

    clock: Clock
    learner: Learner
    step_seconds: float
    jitter: float
    rng: random.Random
    on_trained: Callable[[Trained], None]
    on_steps: Callable[[int], None]
    _order: TrainOrder | None = None
    _began_at: float = 0.0
    _each: float = 0.0
    _generation: int = 0

    def order(self, order: TrainOrder) -> None:
        """Begin to train."""
        self._order = order
        self._began_at = self.clock.now
        self._each = self.step_seconds * (1 + self.jitter * (2 * self.rng.random() - 1))
        self._finish_after(order.steps)

    def interrupt(self) -> None:
        """Stop at the next step boundary."""
        if self._order is not None:
            begun = int((self.clock.now - self._began_at) / self._each) + 1
            self._finish_after(min(begun, self._order.steps))

    def rest(self) -> None:
        """Stop; virtual steps cannot be stopped in their middle."""
        self.interrupt()

    def resume(self) -> None:
        """Go on with the next order."""

    def stop(self) -> None:
        """Die with the process."""
        self._order = None
        self._generation += 1

    def _finish_after(self, steps: int) -> None:
        self._generation += 1
        generation = self._generation
        at = self._began_at + steps * self._each
        self.clock.at(at, lambda: self._finish(steps, generation))

    def _finish(self, steps: int, generation: int) -> None:
        order = self._order
        if generation != self._generation or order is None:
            return
        self._order = None
        if order.start is not None:
            self.learner.load(*order.start)
        if order.is_fresh:
            self.learner.reset_optimizer()
        for _ in range(steps):
            self.learner.step()
        self.on_steps(steps)
        vector, integers = self.learner.vector()
        self.on_trained(Trained(vector, integers, steps, steps * self._each))
