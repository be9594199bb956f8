"""What tests with real processes share: a broker, and somebody who watches it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hetertrain_lab.monitor import Monitor
from tests.integration.mosquitto import Mosquitto


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    """A Mosquitto without rights or TLS."""
    broker = Mosquitto(tmp_path / "broker")
    broker.start()
    yield broker
    broker.stop()


@pytest.fixture
def monitor(broker: Mosquitto) -> Iterator[Monitor]:
    """What the broker's nodes and aggregators of one job say."""
    monitor = Monitor(broker.host, broker.port, "job")
    yield monitor
    monitor.stop()
