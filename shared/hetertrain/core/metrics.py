"""What is measured of a model: a few numbers by name, on a node's own data or on the cloud's."""

from __future__ import annotations

from collections.abc import Mapping

from hetertrain.errors import TrainError

METRICS_MAX, METRIC_NAME_CHARACTERS_MAX = 32, 64


def check_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics as plain numbers, not finite ones included: arrays and tensors of one number
    are that number.

    Raises:
        TrainError: a name is too long, a value is no number, or there are too many.
    """
    if len(metrics) > METRICS_MAX:
        raise TrainError(f"{len(metrics)} metrics are too many: {METRICS_MAX} can be sent")
    found = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not 0 < len(name) <= METRIC_NAME_CHARACTERS_MAX:
            raise TrainError(
                f"a metric is called {name!r}: give a name of at most "
                f"{METRIC_NAME_CHARACTERS_MAX} characters"
            )
        try:
            found[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:  # the last is torch's
            raise TrainError(f"metric {name!r} is no number: {error}") from error
    return found
