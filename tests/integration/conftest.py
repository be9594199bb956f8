"""What tests with real processes share: a broker and who watches it; control planes and their
database.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hetertrain_lab.monitor import Monitor
from tests.control import Bench, control_plane
from tests.integration.mosquitto import Mosquitto
from tests.integration.postgres import Postgres


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


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    """A server of our own."""
    server = Postgres(tmp_path_factory.mktemp("postgres") / "server")
    yield server
    server.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def any_bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    """For what a database decides."""
    url = None
    if request.param == "postgresql":
        server: Postgres = request.getfixturevalue("postgres")
        url = server.database(f"test_{abs(hash(request.node.name)) % 10**9}")
    with control_plane(tmp_path, url) as bench:
        yield bench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A control plane on SQLite."""
    with control_plane(tmp_path) as made:
        yield made
