"""A node of a fleet that trains a small network with a PyTorch loop of its own.

Points in the plane belong to three classes; each node has seen two of them. The network normalises
batches, so it has buffers beside its parameters::

    hetertrain broker &
    python examples/torch_loop.py --save-initial initial.safetensors
    hetertrain aggregator --job fleet --initial-model initial.safetensors &
    python examples/torch_loop.py --node car-0 &
    python examples/torch_loop.py --node car-1
"""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import hetertrain

EXAMPLES, BATCH, RATE = 300, 20, 0.05
CENTRES = torch.tensor([[0.0, 2.0], [-2.0, -1.0], [2.0, -1.0]])
BUFFERS = ("*.running_mean", "*.running_var")


def network() -> nn.Module:
    """Build the network."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def arrays_of(model: nn.Module) -> dict[str, NDArray[np.generic]]:
    """Return what a network is made of."""
    return {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}


def record(seed: int, classes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points of some of the classes, and their classes."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(classes), (EXAMPLES,), generator=generator)
    labels = torch.tensor(classes)[chosen]
    return CENTRES[labels] + 0.5 * torch.randn(EXAMPLES, 2, generator=generator), labels


def loss_of(model: nn.Module) -> float:
    """Return the cross-entropy over all classes."""
    points, labels = record(0, [0, 1, 2])
    model.eval()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(points), labels))


def train(node: str) -> None:
    """Train until Ctrl-C."""
    index = int(node.rpartition("-")[2])
    points, labels = record(index + 1, [index % 3, (index + 1) % 3])
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    generator = torch.Generator().manual_seed(index)
    with hetertrain.join("fleet", arrays_of(model), buffers=BUFFERS, node=node) as session:
        for checkpoint in session:
            model.load_state_dict(
                {name: torch.from_numpy(array) for name, array in checkpoint.arrays.items()}
            )
            if checkpoint.is_new_version:
                loss = loss_of(model)
                sys.stdout.write(f"{node}: version {checkpoint.version}, loss {loss:.4f}\n")
                sys.stdout.flush()
            if checkpoint.is_fresh:
                optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
            model.train()
            steps = 0
            while steps < checkpoint.steps and not session.is_due:
                batch = torch.randint(EXAMPLES, (BATCH,), generator=generator)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(points[batch]), labels[batch]).backward()
                optimizer.step()
                steps += 1
            session.publish(arrays_of(model), examples=EXAMPLES, steps=steps)


def main() -> None:
    """Write the initial model, or train."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--save-initial", metavar="FILE", help="write the initial model and end")
    parser.add_argument("--node", default="car-0", help="this node's name; it ends with a number")
    arguments = parser.parse_args()
    if arguments.save_initial is not None:
        hetertrain.save_initial(arrays_of(network()), arguments.save_initial, buffers=BUFFERS)
    else:
        with suppress(KeyboardInterrupt):
            train(arguments.node)


if __name__ == "__main__":
    main()
