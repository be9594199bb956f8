"""The outer optimiser: what a synchronisation makes of an interval's drift.

Between synchronisations cuts move the model by means of deltas. At one, the drift of the whole
interval, ``model - anchor``, can be taken as a gradient of an optimiser of its own (FedOpt, Reddi
et al. 2021; DiLoCo, Douillard et al. 2023). Never at an ordinary cut: momentum on single stale
arrivals is what makes asynchronous training unstable (Liu et al. 2024, arXiv 2401.09135). It moves
parameters only; buffers, such as running means, stay what they were merged to.

All of it is elementwise IEEE arithmetic in float64, so that a replay gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetertrain.core.layout import Vector
from hetertrain.core.policy import WeightPolicy

Doubles = NDArray[np.float64]

ADAM_SECOND_DECAY = 0.99
ADAM_FLOOR = 1e-3
"""τ of FedAdam: keeps steps small where an interval moved nothing yet."""


@dataclass(slots=True)
class OuterOptimizer:
    """The state of one job's outer optimiser; shapes are that of the model."""

    anchor: Vector
    """The model that the last synchronisation made."""
    first: Doubles
    second: Doubles

    @classmethod
    def start(cls, model: Vector) -> OuterOptimizer:
        """Begin an interval with ``model``."""
        return cls(model, np.zeros(model.size), np.zeros(model.size))

    def step(self, merged: Vector, policy: WeightPolicy, is_buffer: NDArray[np.bool_]) -> Vector:
        """Return the model that ends the interval in which cuts led to ``merged``."""
        drift = merged.astype(np.float64) - self.anchor
        decay = policy.outer_momentum
        match policy.outer:
            case "sgd":
                move = drift
            case "momentum":
                self.first = decay * self.first + drift
                move = self.first
            case "nesterov":
                self.first = decay * self.first + drift
                move = drift + decay * self.first
            case "adam":
                self.first = decay * self.first + (1 - decay) * drift
                self.second = (
                    ADAM_SECOND_DECAY * self.second + (1 - ADAM_SECOND_DECAY) * drift * drift
                )
                move = self.first / (np.sqrt(self.second) + ADAM_FLOOR)
            case _:
                return merged
        model = (self.anchor + policy.outer_rate * move).astype(np.float32)
        self.anchor = np.where(is_buffer, merged, model)
        return self.anchor

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Return the state by name, to be stored beside a checkpoint."""
        return {"anchor": self.anchor, "first": self.first, "second": self.second}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[np.generic]]) -> OuterOptimizer:
        """Take back what ``arrays`` returned."""
        return cls(
            arrays["anchor"].astype(np.float32),
            arrays["first"].astype(np.float64),
            arrays["second"].astype(np.float64),
        )
