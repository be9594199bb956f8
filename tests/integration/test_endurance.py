"""Eight connections whose owners are slow, and a broker that is killed and started again: nobody
stalls, and no thread, file or memory is left behind.

``HETERTRAIN_ENDURANCE_SECONDS`` says how long; ``script/soak`` asks for ten minutes.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from hetertrain.transport import mqtt
from hetertrain.wire.events import Outgoing
from tests.integration.mosquitto import Mosquitto
from tests.integration.waiting import wait_until

SECONDS = float(os.environ.get("HETERTRAIN_ENDURANCE_SECONDS", "8"))
pytestmark = [pytest.mark.broker, pytest.mark.timeout(SECONDS + 120)]
NUM_CONNECTIONS = 8
FRAME_BYTES = 20_000
GROWTH_MIB_MAX = 40
"""Buffers of the allocator, and Python's own; the queues alone could hold 256."""


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def memory_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def test_slow_owners_and_a_broker_that_comes_and_goes_leave_nothing_behind(
    broker: Mosquitto,
) -> None:
    chance, heard = random.Random(5), Counter[int]()
    gc.collect()  # What tests before left is none of it.
    threads, files = threading.active_count(), open_files()

    def listen(number: int) -> mqtt.Connection:
        def take(event: mqtt.Event) -> None:
            if isinstance(event, mqtt.Received):
                heard[number] += 1
                time.sleep(0.002)

        endpoint = mqtt.Endpoint(host=broker.host, port=broker.port, client_id=f"c{number}")
        return mqtt.Connection(endpoint, (f"t/{number}",), take)

    connections = [listen(number) for number in range(NUM_CONNECTIONS)]
    for each in connections:
        each.start()
    wait_until(lambda: _ping(connections, heard), "the first frame of each")
    before, ends_at = memory_mib(), time.monotonic() + SECONDS
    kill_at = time.monotonic() + 1.0
    while time.monotonic() < ends_at:
        number = chance.randrange(NUM_CONNECTIONS)
        connections[number - 1].publish((Outgoing(f"t/{number}", bytes(FRAME_BYTES)),))
        time.sleep(0.001)
        if time.monotonic() >= kill_at:
            broker.kill(loses_database=chance.random() < 0.5)
            time.sleep(chance.uniform(0.0, 1.0))
            broker.start()
            kill_at = time.monotonic() + chance.uniform(1.0, 4.0)
    heard.clear()
    wait_until(lambda: _ping(connections, heard), "a frame of each after the last start")
    assert all(each.is_alive() for each in connections)
    growth = memory_mib() - before
    while connections:
        connections.pop().stop(10.0)

    assert growth < GROWTH_MIB_MAX, f"{growth:.0f} MiB more than at the beginning"
    gc.collect()
    assert (threading.active_count(), open_files()) == (threads, files)


def _ping(connections: list[mqtt.Connection], heard: Counter[int]) -> bool:
    for number in range(NUM_CONNECTIONS):
        connections[number - 1].publish((Outgoing(f"t/{number}", b"ping"),))
    return len(heard) == NUM_CONNECTIONS
