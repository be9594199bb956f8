"""A vehicle's link as its driver sees it: one connection at a time, closed while nothing may cross
it, and made anew where the vehicle has gone into another cell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetertrain.transport import mqtt
from hetertrain.wire.events import Outgoing


@dataclass(frozen=True, slots=True)
class Linked:
    """What happened on the connection that was made as number ``life``."""

    life: int
    event: mqtt.Event


class VehicleLink:
    """The agent's thread owns it; ``build`` makes a connection to the cell's broker of the time."""

    def __init__(
        self,
        build: Callable[[Callable[[mqtt.Event], None]], mqtt.Connection],
        put: Callable[[Linked], None],
    ) -> None:
        self._build = build
        self._put = put
        self._connection: mqtt.Connection | None = None
        self._life = 0
        self._bytes_up = self._bytes_down = 0
        """Of the connections that are closed."""

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, or one is tried."""
        return self._connection is not None

    @property
    def bytes_up(self) -> int:
        """Bytes that left the vehicle since the agent's start."""
        return self._bytes_up + (self._connection.bytes_up if self._connection else 0)

    @property
    def bytes_down(self) -> int:
        """Bytes that reached it."""
        return self._bytes_down + (self._connection.bytes_down if self._connection else 0)

    def return_within(self, seconds: float) -> None:
        """Make a session that breaks again at random within this time."""
        if self._connection is not None:
            self._connection.return_seconds = seconds

    def open(self) -> None:
        """Connect, and stay so until ``close``."""
        assert self._connection is None, "one connection at a time"
        self._life += 1
        life = self._life
        self._connection = self._build(lambda event: self._put(Linked(life, event)))
        self._connection.start()

    def close(self, farewell: Outgoing) -> None:
        """Say goodbye where that is possible, and disconnect."""
        connection = self._connection
        if connection is not None:
            connection.publish((farewell,))
            connection.stop()
            self._bytes_up, self._bytes_down = self.bytes_up, self.bytes_down
            self._connection = None

    def hear(self, linked: Linked) -> mqtt.Event | None:
        """Return what happened, unless it was on a connection that is closed."""
        is_current = self._connection is not None and linked.life == self._life
        return linked.event if is_current else None

    def publish(self, outgoing: tuple[Outgoing, ...]) -> None:
        """Queue frames; while the link is closed they are dropped, since senders repeat."""
        if self._connection is not None:
            self._connection.publish(outgoing)

    def resubscribe(self, subscriptions: tuple[str, ...]) -> None:
        """Subscribe to these topics and no others; the next connection does so anyway."""
        if self._connection is not None:
            self._connection.resubscribe(subscriptions)
