"""What the example tasks promise about shares, batches, measures and labels."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hetertrain.errors import TaskError, TrainError
from hetertrain.task import Node, load_task, measure
from hetertrain.wire.frames import pack, unpack
from hetertrain_lab import digits, driving
from hetertrain_lab.digits import DigitsTask
from hetertrain_lab.driving import DrivingTask
from tests.builders import make_status

NUM_NODES = 12


def node(index: int = 0, of: int = NUM_NODES, seed: int = 0, **labels: str) -> Node:
    return Node(id=f"v{index}", labels={"index": str(index), "of": str(of), **labels}, seed=seed)


class Measured(DrivingTask):
    """Has measured something, whatever the model."""

    def __init__(self, metrics: dict[Any, Any]) -> None:
        self._metrics = metrics

    def evaluate(self, model: nn.Module, node: Node | None) -> dict[str, float]:
        del model, node
        return self._metrics


class MeanPredictor(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return driving.cloud_windows().targets.mean().expand(len(inputs), 1)


@pytest.mark.parametrize("of", [1, 5, 12, 60])
def test_no_trip_is_in_two_shares_nor_held_by_the_cloud(of: int) -> None:
    owned = [trip for index in range(of) for trip in driving.trips_of(node(index, of))]
    owned += driving.trip_split().cloud

    assert len(owned) == len(set(owned))


def test_five_nodes_and_the_cloud_hold_all_trips() -> None:
    owned = {trip for index in range(5) for trip in driving.trips_of(node(index, 5))}

    assert owned | set(driving.trip_split().cloud) == set(range(len(driving.trips())))


def test_a_share_is_of_the_class_that_the_node_is_named_after() -> None:
    for index in range(NUM_NODES):
        names = {
            driving.CLASS_NAMES[driving.trips()[trip].class_index]
            for trip in driving.trips_of(node(index))
        }
        assert names == {driving.vehicle_class_name(node(index))}


def test_the_cloud_holds_a_fifth_of_the_trips_of_every_class() -> None:
    classes = [driving.trips()[trip].class_index for trip in driving.trip_split().cloud]

    assert np.bincount(classes).tolist() == [12] * 5


def test_the_pooled_node_holds_what_all_nodes_hold_together() -> None:
    pooled = node(0, 1, pooled="yes")

    total = sum(DrivingTask().examples(node(index)) for index in range(NUM_NODES))

    assert DrivingTask().examples(pooled) == total
    assert driving.vehicle_class_name(pooled) == "all"


def test_a_window_predicts_its_last_second() -> None:
    trip = driving.trips()[driving.trip_split().cloud[0]]
    second = driving.WINDOW_SECONDS - 1
    windows = driving.cloud_windows()

    assert windows.targets[0] == pytest.approx((trip.co2[second] - 10) / 10)
    assert windows.inputs[0, second] == pytest.approx((trip.speed[second] - 12) / 6)
    assert windows.inputs[0, 2 * second + 1] == pytest.approx(trip.acceleration[second] / 1.6)


def test_a_nodes_own_measure_shares_no_second_with_its_training() -> None:
    (trip_index,) = driving.trips_of(node(0, 240))
    trip = driving.trips()[trip_index]
    num_windows = (len(trip.co2) - driving.WINDOW_SECONDS) // driving.STRIDE_SECONDS + 1

    training = len(driving.training_windows(node(0, 240)))
    held_out = len(driving.own_held_out_windows(node(0, 240)))

    last_training_second = (training - 1) * driving.STRIDE_SECONDS + driving.WINDOW_SECONDS - 1
    assert last_training_second < (num_windows - held_out) * driving.STRIDE_SECONDS


@pytest.mark.parametrize("task", [DrivingTask(), DigitsTask()])
def test_the_same_seed_gives_the_same_batches(task: DrivingTask | DigitsTask) -> None:
    first, again, other = (
        torch.cat([batch[1] for batch in islice(task.train_batches(node(seed=seed)), 100)])
        for seed in (3, 3, 4)
    )

    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_an_epoch_yields_every_example_once() -> None:
    num_examples = DrivingTask().examples(node())
    num_batches = -(-num_examples // driving.BATCH_EXAMPLES)
    batches = list(islice(DrivingTask().train_batches(node()), num_batches))

    assert batches[0][0].dtype == torch.float32
    assert batches[0][0].shape == (64, 25)
    targets = torch.cat([targets for _, targets in batches])
    assert torch.equal(
        targets.sort().values, driving.training_windows(node()).targets.sort().values
    )


def test_the_mean_has_an_r2_of_zero_overall_and_explains_no_class() -> None:
    metrics = DrivingTask().evaluate(MeanPredictor(), None)

    assert next(iter(metrics)) == "r2"
    assert metrics["r2"] == pytest.approx(0, abs=1e-5)
    assert all(metrics[f"r2_{name}"] < 0 for name in driving.CLASS_NAMES)


def test_a_node_measures_itself_with_the_headline_alone() -> None:
    task = DrivingTask()

    assert list(task.evaluate(task.model(), node())) == ["r2"]


def test_what_a_diverged_model_measures_can_be_said_in_a_status() -> None:
    values = {"lost": math.nan, "far": -math.inf, "r2": torch.tensor(0.5), "of": np.float32(2)}
    metrics = measure(Measured(values), nn.Module(), None)

    assert metrics == {"r2": 0.5, "of": 2.0}
    message, _ = unpack(pack(make_status(metrics=metrics)))
    assert message == make_status(metrics=metrics)


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"r2": torch.ones(2)}, "'r2' is no number"),
        ({"r2": "good"}, "'r2' is no number"),
        ({"r" * 65: 1.0}, "at most 64"),
        ({2: 1.0}, "called 2"),
        ({f"r{number}": 1.0 for number in range(33)}, "33 metrics are too many"),
    ],
)
def test_what_is_no_metric_is_refused_with_a_reason(metrics: dict[Any, Any], reason: str) -> None:
    with pytest.raises(TrainError, match=reason):
        measure(Measured(metrics), nn.Module(), None)


def test_training_on_all_trips_explains_every_class() -> None:
    torch.manual_seed(0)
    task, pooled = DrivingTask(), node(0, 1, pooled="yes")
    model = task.model()
    optimizer = task.optimizer(model)
    for batch in islice(task.train_batches(pooled), 500):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()

    assert min(task.evaluate(model, None).values()) > 0.9


@pytest.mark.parametrize("of", [1, 12, 100, 400])
def test_the_deal_of_digits_covers_all_training_images_once(of: int) -> None:
    shares = digits.deal(of, 0.3)

    dealt = np.sort(np.concatenate(shares))
    assert np.array_equal(dealt, np.arange(len(digits.training_images())))
    assert min(map(len, shares)) >= digits.SHARE_IMAGES_MIN


def test_a_small_alpha_gives_a_node_few_digits() -> None:
    labels = digits.training_images().labels.numpy()

    def largest_portions(alpha: float) -> float:
        counts = [np.bincount(labels[share], minlength=10) for share in digits.deal(20, alpha)]
        return float(np.mean([count.max() / count.sum() for count in counts]))

    assert largest_portions(0.05) > 0.5 > 0.2 > largest_portions(100.0)


def test_digits_measure_accuracy_first() -> None:
    task = DigitsTask()

    metrics = task.evaluate(task.model(), None)

    assert list(metrics) == ["accuracy", "loss"]
    assert metrics["accuracy"] < 0.4


@pytest.mark.parametrize(
    "labels",
    [
        {},
        {"index": "0"},
        {"of": "5"},
        {"index": "five", "of": "12"},
        {"index": "12", "of": "12"},
        {"index": "-1", "of": "12"},
        {"index": "0", "of": "0"},
        {"index": "0", "of": "1000000"},
    ],
)
@pytest.mark.parametrize("reference", ["driving:DrivingTask", "digits:DigitsTask"])
def test_labels_that_name_no_share_are_refused(reference: str, labels: dict[str, str]) -> None:
    with pytest.raises(TaskError, match=r"index|of"):
        load_task(f"hetertrain_lab.{reference}").examples(Node(id="v", labels=labels))


@pytest.mark.parametrize("alpha", ["0", "-1", "nan", "inf", "wide"])
def test_an_alpha_that_is_no_positive_number_is_refused(alpha: str) -> None:
    with pytest.raises(TaskError, match="alpha"):
        DigitsTask().examples(node(alpha=alpha))


def test_a_pooled_label_other_than_yes_and_no_is_refused() -> None:
    with pytest.raises(TaskError, match="pooled"):
        DrivingTask().examples(node(pooled="true"))
