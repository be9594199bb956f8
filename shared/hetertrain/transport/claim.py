"""Is another process at work under our client id? It is asked before the connection is made.

A broker lets one connection have a client id, and ends the older one: so a process that was paused
and replaced finds a dead connection. What a broker does not do is to refuse the second. So whoever
is about to connect listens first, on a connection of its own, for signs of life of the other.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hetertrain.transport import mqtt

CONNECT_SECONDS = 10.0
SETTLE_SECONDS = 0.3
"""A broker sends what is retained at once; where nothing came in this time, there is nothing."""
POLL_SECONDS = 0.1


@dataclass(slots=True, kw_only=True)
class Claim:
    """Where another process with the endpoint's client id would show that it lives."""

    endpoint: mqtt.Endpoint
    topic: str
    seconds: float
    """How long its next sign of life may take."""
    is_online: Callable[[bytes], bool] | None = None
    """Whether a retained frame is of somebody who may live: else there is nothing to wait for.
    None: nothing is retained."""
    is_repeated: bool = False
    """Listen before each connection, not only before the first."""
    _is_granted: bool = field(default=False, init=False)

    def has_owner(self, stopping: threading.Event) -> bool:
        """Listen, until ``stopping``; return whether another process shows signs of life.

        Raises:
            OSError: the broker cannot be reached.
        """
        if self._is_granted and not self.is_repeated:
            return False
        events: queue.SimpleQueue[mqtt.Event] = queue.SimpleQueue()
        client_id = f"{self.endpoint.client_id}-claim-{secrets.token_hex(4)}"
        endpoint = replace(self.endpoint, client_id=client_id, session_seconds=0)
        listener = mqtt.Connection(endpoint, (self.topic,), events.put)
        listener.start()
        try:
            is_owned = self._hears(events, stopping)
        finally:
            listener.stop()
        self._is_granted = not is_owned
        return is_owned

    def _is_sign(self, frame: bytes) -> bool:
        """Tell a sign of life from a last will, or from an empty message of a doctor."""
        return self.is_online is None or self.is_online(frame)

    def _hears(self, events: queue.SimpleQueue[mqtt.Event], stopping: threading.Event) -> bool:
        began = time.monotonic()
        ends_at, is_connected = began + CONNECT_SECONDS, False
        while not stopping.is_set() and time.monotonic() < ends_at:
            try:
                event = events.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            match event:
                case mqtt.Connected():
                    is_connected, began = True, time.monotonic()
                    is_short = self.is_online is not None
                    seconds = min(SETTLE_SECONDS, self.seconds) if is_short else self.seconds
                    ends_at = began + seconds
                case mqtt.Received(frame=frame, is_retained=is_retained) if self._is_sign(frame):
                    if not is_retained:
                        return True
                    ends_at = began + self.seconds
                case mqtt.Denied(what, reason):
                    raise PermissionError(f"we must read {what} to see who lives: {reason}")
                case mqtt.Disconnected(reason, is_refusal=is_refusal):
                    kind = PermissionError if is_refusal else ConnectionError
                    raise kind(f"listening for another process: {reason}")
        if not is_connected and not stopping.is_set():
            raise TimeoutError("the broker did not answer who listened for another process")
        return False
