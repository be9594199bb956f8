"""A task whose data and whose personal layer are marked: one can look where they turn up."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from hetertrain.task import Batch, Node, Task

CANARY = b"CANARY-plate-ZH-123456-home-47.3769N-8.5417E"
PERSONAL = 12345.678
"""What the layer that stays is full of."""
FILE = "drive.bin"
SHARED = 64


class CanaryTask(Task):
    """Fits a line to the bytes of a file."""

    local = ("personal.*",)

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential()
        model.add_module("shared", nn.Linear(SHARED, 1))
        model.add_module("norm", nn.BatchNorm1d(1))
        model.add_module("personal", nn.Linear(1, 1))
        nn.init.constant_(model.personal.weight, PERSONAL)
        return model

    def train_batches(self, node: Node) -> Iterator[Batch]:
        assert node.data_directory is not None
        data = (node.data_directory / FILE).read_bytes()
        noise = np.random.default_rng(node.seed)
        while True:
            starts = noise.integers(0, len(data) - SHARED, 16)
            rows = [np.frombuffer(data, np.uint8, SHARED, int(start)) for start in starts]
            features = torch.from_numpy(np.stack(rows).astype(np.float32) / 255)
            yield features, features.mean(1, keepdim=True)

    def examples(self, node: Node) -> int:
        assert node.data_directory is not None
        return (node.data_directory / FILE).stat().st_size

    def label(self, node: Node) -> str:
        del node
        return "marked"

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        features, target = batch
        return nn.functional.mse_loss(model.norm(model.shared(features)), target)

    def evaluate(self, model: nn.Module, node: Node | None) -> dict[str, float]:
        del node
        return {"score": float(model.shared.bias.detach())}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.shared.parameters(), lr=0.01)
