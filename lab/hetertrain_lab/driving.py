"""Learn a vehicle's CO2 emission from its last ten seconds of driving.

One window of ten speeds and ten accelerations, with the vehicle's class, gives the CO2 emission
of the window's last second. The data is simulated (``data/README.md``). Each node owns trips of
*one* of five vehicle classes, so a node alone learns its own class and no other: only the fleet
together learns all five.

Who gets which trips is a pure function of the labels ``index`` and ``of``: a fifth of the trips
of every class is held out for the cloud, and node ``index`` takes its share of the other trips
of class ``index mod 5``. The label ``pooled: yes`` takes the training trips of all classes
instead: the upper line of a comparison. Of each of its trips a node keeps the last tenth to
measure itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hetertrain.errors import TaskError
from hetertrain.task import Node, Task

WINDOW_SECONDS = 10
STRIDE_SECONDS = 2
BATCH_EXAMPLES = 64
HIDDEN_UNITS = 64
LEARNING_RATE = 6e-3

CLASS_NAMES = ("petrol_car", "diesel_car", "van", "lorry", "bus")
NUM_INPUTS = 2 * WINDOW_SECONDS + len(CLASS_NAMES)

# The same for every vehicle, and never computed from pooled data: no node sees another's values.
SPEED_CENTRE, SPEED_SCALE = 12.0, 6.0  # m/s
ACCELERATION_SCALE = 1.6  # m/s^2
# One-hot of five classes. Left at 0 and 1, the fleet needs over half as many rounds again to tell
# the classes apart.
CLASS_CENTRE, CLASS_SCALE = 0.2, 0.4
CO2_CENTRE, CO2_SCALE = 10.0, 10.0  # g/s

CLOUD_TRIPS_ONE_IN = 5
OWN_WINDOWS_ONE_IN = 10
# Windows before a trip's held-out part that share seconds with it.
GAP_WINDOWS = -(-WINDOW_SECONDS // STRIDE_SECONDS) - 1
SPLIT_SEED = 11
WINDOW_SETS_CACHED_MAX = 64

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """One vehicle's way through the town, one value per second."""

    class_index: int
    speed: NDArray[np.float32]  # (seconds,), m/s
    acceleration: NDArray[np.float32]  # (seconds,), m/s^2
    co2: NDArray[np.float32]  # (seconds,), g/s


@dataclass(frozen=True, slots=True)
class Windows:
    """Examples: standardised inputs and scaled CO2, in the order of the trips."""

    inputs: torch.Tensor  # (examples, NUM_INPUTS) float32
    targets: torch.Tensor  # (examples,) float32, (g/s - CO2_CENTRE) / CO2_SCALE
    class_indices: NDArray[np.int64]  # (examples,)

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class TripSplit:
    """Who owns which trips; indices into ``trips()``."""

    cloud: tuple[int, ...]
    training_by_class: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a node's labels say: it is number ``index`` of ``of``, or holds everything."""

    index: int
    of: int
    is_pooled: bool


class DrivingTask(Task):
    """Regression with a small network; the headline is R2 over held-out trips of all classes."""

    def model(self) -> nn.Module:
        """Build a network of two hidden layers: (examples, 25) to (examples, 1)."""
        return nn.Sequential(
            nn.Linear(NUM_INPUTS, HIDDEN_UNITS),
            nn.ReLU(),
            nn.Linear(HIDDEN_UNITS, HIDDEN_UNITS),
            nn.ReLU(),
            nn.Linear(HIDDEN_UNITS, 1),
        )

    def label(self, node: Node) -> str:
        """Name the class of the node's vehicle."""
        return vehicle_class_name(node)

    def train_batches(self, node: Node) -> Iterator[Batch]:
        """Yield (inputs, targets) of up to 64 examples without end, reshuffled every epoch.

        Raises:
            TaskError: the node's labels do not name a share.
        """
        return _shuffled_batches(training_windows(node), node.seed)

    def examples(self, node: Node) -> int:
        """Count the node's training windows.

        Raises:
            TaskError: the node's labels do not name a share.
        """
        return len(training_windows(node))

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Compute the mean squared error of the scaled CO2."""
        inputs, targets = batch
        return nn.functional.mse_loss(model(inputs).squeeze(1), targets)

    def evaluate(self, model: nn.Module, node: Node | None) -> dict[str, float]:
        """Measure R2 on the cloud's trips, overall and per class, or on the node's own tenth.

        Raises:
            TaskError: the node's labels do not name a share.
        """
        windows = cloud_windows() if node is None else own_held_out_windows(node)
        predictions, targets = _predict(model, windows), windows.targets.numpy()
        metrics = {"r2": r2(predictions, targets)}
        if node is None:
            for index, name in enumerate(CLASS_NAMES):
                is_class = windows.class_indices == index
                metrics[f"r2_{name}"] = r2(predictions[is_class], targets[is_class])
        return metrics

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build Adam; of the optimisers tried it needs the fewest rounds on these shares.

        Its state is worth keeping from round to round: reset, it needs about twice as many.
        """
        return torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)


def vehicle_class_name(node: Node) -> str:
    """Name the class of the node's vehicle, such as ``bus``, or ``all`` for the pooled node.

    Raises:
        TaskError: the node's labels do not name a share.
    """
    share = share_of(node)
    return "all" if share.is_pooled else CLASS_NAMES[share.index % len(CLASS_NAMES)]


def r2(predictions: NDArray[np.float32], targets: NDArray[np.float32]) -> float:
    """Compute the coefficient of determination: 1 is exact, 0 is as good as the mean."""
    spread = float(np.square(targets - targets.mean()).sum(dtype=np.float64))
    error = float(np.square(targets - predictions).sum(dtype=np.float64))
    # Targets that are all equal have no spread to explain.
    return 1.0 - error / max(spread, float(np.finfo(np.float32).tiny))


def share_of(node: Node) -> Share:
    """Read the labels ``index``, ``of`` and ``pooled``.

    Raises:
        TaskError: a label is missing, malformed or out of range, or the fleet is so large that
            a node would hold no trip.
    """
    try:
        index, of = int(node.labels["index"]), int(node.labels["of"])
    except (KeyError, ValueError) as error:
        raise TaskError(
            f"node {node.id!r} needs the labels index and of as whole numbers, such as index=3 "
            f"and of=12; found {dict(node.labels)}"
        ) from error
    of_max = len(CLASS_NAMES) * min(map(len, trip_split().training_by_class))
    if not 0 <= index < of <= of_max:
        raise TaskError(
            f"node {node.id!r} has index={index} and of={of}; needed is 0 <= index < of <= {of_max}"
        )
    pooled = node.labels.get("pooled", "no")
    if pooled not in ("yes", "no"):
        raise TaskError(f"node {node.id!r} has pooled={pooled!r}; needed is yes or no")
    return Share(index=index, of=of, is_pooled=pooled == "yes")


def trips_of(node: Node) -> tuple[int, ...]:
    """List the node's own trips, disjoint from every other index's and from the cloud's.

    Raises:
        TaskError: the node's labels do not name a share.
    """
    share, training_by_class = share_of(node), trip_split().training_by_class
    if share.is_pooled:
        return tuple(trip for class_trips in training_by_class for trip in class_trips)
    place, class_index = divmod(share.index, len(CLASS_NAMES))
    num_owners = len(range(class_index, share.of, len(CLASS_NAMES)))
    return training_by_class[class_index][place::num_owners]


def training_windows(node: Node) -> Windows:
    """Cut the windows that the node trains on; see ``trips_of`` for errors."""
    return _cut(trips_of(node), "training")


def own_held_out_windows(node: Node) -> Windows:
    """Cut the last tenth of each of the node's trips; see ``trips_of`` for errors."""
    return _cut(trips_of(node), "held_out")


def cloud_windows() -> Windows:
    """Cut all windows of the trips that no node holds."""
    return _cut(trip_split().cloud, "all")


@cache
def trip_split() -> TripSplit:
    """Hold out every fifth trip of each class, in a fixed random order."""
    rng = np.random.default_rng(SPLIT_SEED)
    cloud: list[int] = []
    training = []
    for class_index in range(len(CLASS_NAMES)):
        own = [index for index, trip in enumerate(trips()) if trip.class_index == class_index]
        order = [int(index) for index in rng.permutation(own)]
        num_cloud = len(order) // CLOUD_TRIPS_ONE_IN
        cloud += order[:num_cloud]
        training.append(tuple(order[num_cloud:]))
    return TripSplit(cloud=tuple(cloud), training_by_class=tuple(training))


@cache
def trips() -> tuple[Trip, ...]:
    """Load the data set, once per process.

    Raises:
        TaskError: the file's classes are not this module's.
    """
    with np.load(Path(__file__).parent / "data" / "driving.npz") as arrays:
        found = tuple(str(name) for name in arrays["class_names"])
        if found != CLASS_NAMES:
            raise TaskError(f"driving.npz holds the classes {found}; needed are {CLASS_NAMES}")
        lengths = arrays["trip_length_seconds"]
        ends = np.cumsum(lengths)
        speed, acceleration, co2 = (
            arrays[name].astype(np.float32) for name in ("speed", "acceleration", "co2")
        )
        return tuple(
            Trip(
                class_index=int(class_index),
                speed=speed[start:end],
                acceleration=acceleration[start:end],
                co2=co2[start:end],
            )
            for class_index, start, end in zip(
                arrays["trip_class"], ends - lengths, ends, strict=True
            )
        )


@lru_cache(maxsize=WINDOW_SETS_CACHED_MAX)
def _cut(trip_indices: tuple[int, ...], part: str) -> Windows:
    """Cut trips into windows and keep the ``training``, ``held_out`` or ``all`` part of each."""
    inputs, targets, class_indices = [], [], []
    for trip_index in trip_indices:
        trip = trips()[trip_index]
        trip_inputs, trip_targets = _windows_of(trip)
        kept = _part(len(trip_targets), part)
        inputs.append(trip_inputs[kept])
        targets.append(trip_targets[kept])
        class_indices.append(np.full(len(targets[-1]), trip.class_index))
    return Windows(
        torch.from_numpy(np.concatenate(inputs)),
        torch.from_numpy(np.concatenate(targets)),
        np.concatenate(class_indices),
    )


def _windows_of(trip: Trip) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return inputs (windows, NUM_INPUTS) and targets (windows,), standardised."""
    speeds, accelerations = (
        np.lib.stride_tricks.sliding_window_view(values, WINDOW_SECONDS)[::STRIDE_SECONDS]
        for values in (trip.speed, trip.acceleration)
    )
    one_hot = np.zeros((len(speeds), len(CLASS_NAMES)), np.float32)
    one_hot[:, trip.class_index] = 1.0
    inputs = (
        (speeds - SPEED_CENTRE) / SPEED_SCALE,
        accelerations / ACCELERATION_SCALE,
        (one_hot - CLASS_CENTRE) / CLASS_SCALE,
    )
    co2 = trip.co2[WINDOW_SECONDS - 1 :: STRIDE_SECONDS]
    return np.concatenate(inputs, axis=1), (co2 - CO2_CENTRE) / CO2_SCALE


def _part(num_windows: int, part: str) -> slice:
    held_out_start = num_windows - max(1, num_windows // OWN_WINDOWS_ONE_IN)
    match part:
        case "training":
            return slice(0, held_out_start - GAP_WINDOWS)
        case "held_out":
            return slice(held_out_start, num_windows)
        case _:
            return slice(0, num_windows)


def _shuffled_batches(windows: Windows, seed: int) -> Iterator[Batch]:
    rng = np.random.default_rng(seed)
    while True:
        order = torch.from_numpy(rng.permutation(len(windows)))
        for start in range(0, len(windows), BATCH_EXAMPLES):
            chosen = order[start : start + BATCH_EXAMPLES]
            yield windows.inputs[chosen], windows.targets[chosen]


def _predict(model: nn.Module, windows: Windows) -> NDArray[np.float32]:
    was_training = model.training
    model.eval()
    with torch.no_grad():
        predictions: NDArray[np.float32] = model(windows.inputs).squeeze(1).numpy()
    model.train(was_training)
    return predictions
