"""What a node says of itself: old heartbeats stay readable, and new ones small and true."""

from __future__ import annotations

import math
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import msgpack
import numpy as np
import pytest

from hetertrain import __version__
from hetertrain.core.worker import Trained
from hetertrain.errors import FrameError, SettingsError
from hetertrain.logging import silent_logger
from hetertrain.service import first_state, resident_mib
from hetertrain.transport.inbox import Inbox
from hetertrain.wire import topics
from hetertrain.wire.frames import header_bytes, normal, pack, unpack
from hetertrain.wire.messages import NodeState
from hetertrain_edge.service import EdgeSettings
from hetertrain_edge.traffic import MonthTraffic
from hetertrain_vehicle.driver import Circumstances
from hetertrain_vehicle.position import LATITUDE, LONGITUDE, coarse_position
from hetertrain_vehicle.settings import VehicleSettings
from tests.unit.test_vehicle_driver import NONE, SIZE, Wire, at_work

STATE = first_state(node="n0", job="job", cell="cloud", tier="t1", role="vehicle")
LATER = {
    *("month_bytes", "backlog_updates", "backlog_bytes", "train_failures", "failure", "agent"),
    *("rss_mib", "latitude", "longitude"),
}
"""What the first release's heartbeat did not have."""


def heartbeats(wire: Wire) -> list[NodeState]:
    sent = [unpack(each.frame)[0] for each in wire.sent if each.topic == topics.state("n0")]
    return [each for each in sent if isinstance(each, NodeState)]


def test_a_heartbeat_of_the_first_release_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    old = {name: value for name, value in asdict(STATE).items() if name not in LATER}
    monkeypatch.setattr("hetertrain.wire.frames.header_bytes", lambda _: msgpack.packb(old))
    read, _ = unpack(pack(STATE))
    assert isinstance(read, NodeState)
    assert (read.node, read.agent, read.latitude, read.backlog_updates) == ("n0", "", None, 0)


@pytest.mark.parametrize("place", [{"latitude": 91.0}, {"longitude": math.nan}])
def test_a_place_that_is_not_on_earth_is_refused(place: dict[str, float]) -> None:
    with pytest.raises(FrameError, match="header"):
        unpack(pack(NodeState(**asdict(STATE) | place)))


def test_a_heartbeat_says_what_waits_how_training_failed_and_what_is_used(tmp_path: Path) -> None:
    wire = Wire()
    driver, outbox = at_work(tmp_path, wire)
    driver.circumstances = Circumstances(month_bytes=7, rss_mib=50, position=(48.137, 11.575))
    driver.trained(Trained(np.full(SIZE, 1e-3, np.float32), NONE, 1000, 1000.0), 1.0)
    driver.trainer_failed("x" * 5000, 2.0)

    said = heartbeats(wire)[-1]
    pending = outbox.pending()
    assert pending is not None
    assert (said.backlog_updates, said.backlog_bytes) == (1, len(pending.content))
    assert (said.train_failures, said.failure) == (1, "x" * 200)
    assert (said.month_bytes, said.rss_mib) == (7, 50)
    assert (said.latitude, said.longitude) == (48.137, 11.575)
    assert len(header_bytes(said)) < 2048


def test_a_node_says_which_software_it_runs_and_how_much_memory_it_has() -> None:
    assert normal(STATE).agent == __version__
    assert resident_mib() > 10


def test_a_position_is_rounded_and_none_where_it_is_not_whole() -> None:
    place = {LATITUDE: 48.1371539, LONGITUDE: 11.5761236}
    assert coarse_position(place) == (48.137, 11.576)
    assert coarse_position({LATITUDE: 48.1}) is None
    assert coarse_position(place | {LONGITUDE: math.nan}) is None
    assert coarse_position(place | {LATITUDE: True}) is None


def test_a_position_is_not_shared_unless_the_owner_says_so_and_from_where() -> None:
    settings = VehicleSettings(node="car-1", job="job", share_position=True)
    assert VehicleSettings(node="car-1", job="job").share_position is False
    with pytest.raises(SettingsError, match="signals"):
        settings.state()


def test_a_gateway_says_where_it_stands_or_nothing() -> None:
    settings = EdgeSettings(node="edge-1", job="job", latitude=48.1, longitude=11.6)
    assert (settings.state().latitude, settings.state().longitude) == (48.1, 11.6)
    with pytest.raises(SettingsError, match="together"):
        EdgeSettings(node="edge-1", job="job", latitude=48.1).check()


def test_a_gateways_month_goes_on_over_restarts_and_ends_with_the_calendars(tmp_path: Path) -> None:
    log = silent_logger()
    first = MonthTraffic(tmp_path, log)
    first.count(100, datetime(2026, 5, 1))
    first.count(250, datetime(2026, 5, 2))
    first.save(0.0)
    again = MonthTraffic(tmp_path, log)
    again.count(10, datetime(2026, 5, 31))
    assert again.num_bytes == 260
    again.count(15, datetime(1970, 1, 1))  # A clock that is not set gives nothing away.
    assert again.num_bytes == 265
    again.count(18, datetime(2026, 6, 1))
    assert again.num_bytes == 3


def test_a_damaged_count_of_a_gateway_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "traffic.json").write_text("{")
    traffic = MonthTraffic(tmp_path, silent_logger())
    traffic.count(5, datetime(2026, 5, 1))
    assert traffic.num_bytes == 5


def test_the_inbox_counts_what_it_holds(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "inbox.db")
    inbox.append(0, [b"a", b"bb"])
    assert (inbox.num_records, inbox.num_bytes) == (2, 3)
    inbox.append(1, [b"c"])
    inbox.forget(0, 0)
    assert (inbox.num_records, inbox.num_bytes) == (1, 1)
