"""Watches a running fleet from outside, over the same broker: the newest state of every node and
aggregator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from hetertrain.errors import FrameError
from hetertrain.transport import mqtt
from hetertrain.wire import topics
from hetertrain.wire.frames import unpack
from hetertrain.wire.messages import AggregatorStatus, NodeState


class Monitor:
    """A subscriber to states and statuses of one job; safe to read from any thread."""

    def __init__(self, host: str, port: int, job: str) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._nodes: dict[str, NodeState] = {}
        self._statuses: dict[str, AggregatorStatus] = {}
        self._connection = mqtt.Connection(
            mqtt.Endpoint(host=host, port=port, client_id=f"{job}-monitor"),
            (topics.state("+"), topics.status(job, "+")),
            self._take,
        )
        self._connection.start()

    def _take(self, event: mqtt.Event) -> None:
        if not isinstance(event, mqtt.Received):
            return
        try:
            message, _ = unpack(event.frame)
        except FrameError:
            return  # The aggregators count foreign frames; a watcher only skips them.
        with self._lock:
            if isinstance(message, NodeState) and message.job == self._job:
                self._nodes[message.node] = message
            elif isinstance(message, AggregatorStatus) and message.job == self._job:
                self._statuses[message.cell] = message

    def nodes(self) -> dict[str, NodeState]:
        """Return the newest state of each node."""
        with self._lock:
            return dict(self._nodes)

    def statuses(self) -> dict[str, AggregatorStatus]:
        """Return the newest status of each aggregator by cell."""
        with self._lock:
            return dict(self._statuses)

    def each(
        self,
        on_node: Callable[[NodeState], None],
        on_status: Callable[[AggregatorStatus], None],
    ) -> None:
        """Hand the newest of everything to two callbacks."""
        for state in self.nodes().values():
            on_node(state)
        for status in self.statuses().values():
            on_status(status)

    def stop(self) -> None:
        """Stop watching."""
        self._connection.stop()
