"""A node of a fleet that trains a linear model in plain numpy.

Each node records half of the inputs only, so none can learn the whole model from its own data::

    hetertrain broker &
    python examples/numpy_loop.py --save-initial initial.safetensors
    hetertrain aggregator --job fleet --initial-model initial.safetensors &
    python examples/numpy_loop.py --node car-0 &
    python examples/numpy_loop.py --node car-1
"""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

import hetertrain

NUM_INPUTS, EXAMPLES, BATCH, RATE = 8, 400, 20, 0.05
TRUE_WEIGHTS = np.linspace(-2.0, 2.0, NUM_INPUTS)
TRUE_BIAS = 0.5


def initial_arrays() -> dict[str, NDArray[np.float64]]:
    """Return the model that the job begins with."""
    return {"weights": np.zeros(NUM_INPUTS), "bias": np.zeros(1)}


def record(seed: int, parity: int | None) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return inputs and targets; a vehicle records the even or the odd inputs only."""
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((EXAMPLES, NUM_INPUTS))
    if parity is not None:
        inputs[:, 1 - parity :: 2] = 0.0
    return inputs, inputs @ TRUE_WEIGHTS + TRUE_BIAS + 0.01 * rng.standard_normal(EXAMPLES)


def loss_of(arrays: dict[str, NDArray[np.float64]], seed: int = 0) -> float:
    """Return the mean squared error on all inputs."""
    inputs, targets = record(seed, None)
    return float(np.mean((inputs @ arrays["weights"] + arrays["bias"] - targets) ** 2))


def train(node: str) -> None:
    """Train until Ctrl-C."""
    index = int(node.rpartition("-")[2])
    inputs, targets = record(seed=index + 1, parity=index % 2)
    rng = np.random.default_rng(index)
    with hetertrain.join("fleet", initial_arrays(), node=node) as session:
        for checkpoint in session:
            weights, bias = checkpoint.arrays["weights"], checkpoint.arrays["bias"]
            if checkpoint.is_new_version:
                loss = loss_of(checkpoint.arrays)
                sys.stdout.write(f"{node}: version {checkpoint.version}, loss {loss:.4f}\n")
                sys.stdout.flush()
            steps = 0
            while steps < checkpoint.steps and not session.is_due:
                batch = rng.integers(EXAMPLES, size=BATCH)
                error = inputs[batch] @ weights + bias - targets[batch]
                weights -= RATE * error @ inputs[batch] / BATCH
                bias -= RATE * error.mean()
                steps += 1
            session.publish({"weights": weights, "bias": bias}, examples=EXAMPLES, steps=steps)


def main() -> None:
    """Write the initial model, or train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--save-initial", metavar="FILE", help="write the initial model and end")
    parser.add_argument("--node", default="car-0", help="this node's name; it ends with a number")
    arguments = parser.parse_args()
    if arguments.save_initial is not None:
        hetertrain.save_initial(initial_arrays(), arguments.save_initial)
    else:
        with suppress(KeyboardInterrupt):
            train(arguments.node)


if __name__ == "__main__":
    main()
