"""What every long-running part shares: one mailbox, one thread that owns the state machines, a
clean end.

Connections, pipes and timers put events into the ``Mailbox``; the thread that runs the part takes
them one by one. SIGTERM and SIGINT are events too.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import ClassVar, Generic, TypeVar

from pydantic import Field, SecretStr

from hetertrain.config import Settings
from hetertrain.errors import FrameError
from hetertrain.transport.claim import Claim
from hetertrain.transport.mqtt import Endpoint
from hetertrain.wire import topics
from hetertrain.wire.frames import NodeState, unpack
from hetertrain.wire.uplink import Uplink

E = TypeVar("E")


class Stop:
    """Asks the part to end."""


MAILBOX_EVENTS_MAX = 256
"""With a chunk each, 32 MiB."""


class Mailbox(Generic[E]):
    """Events for one owner, in the order of their arrival.

    It holds ``MAILBOX_EVENTS_MAX`` at most: then a connection's thread waits, its socket is not
    read, and TCP holds back the broker. A ``Stop`` always finds room, and may come from a signal
    handler.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[E | Stop] = queue.SimpleQueue()
        self._room = threading.Semaphore(MAILBOX_EVENTS_MAX)
        self._is_closing = False

    def put(self, event: E) -> None:
        """Add an event; any thread but the owner's may call it."""
        if not self._is_closing:
            self._room.acquire()
        self._queue.put(event)

    @property
    def is_empty(self) -> bool:
        """Whether the owner has taken all."""
        return self._queue.empty()

    def close(self) -> None:
        """The owner is ending: from now on nobody waits for room, so that all threads can end."""
        self._is_closing = True
        self._room.release(MAILBOX_EVENTS_MAX)

    def stop(self) -> None:
        """Ask the owner to end, after what is already here."""
        self._queue.put(Stop())

    def take(self, until: float) -> E | Stop | None:
        """Return the next event, or None at ``until`` (monotonic seconds)."""
        try:
            event = self._queue.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return None
        if not isinstance(event, Stop):
            self._room.release()
        return event

    def stop_on_signals(self) -> None:
        """Turn SIGTERM and SIGINT into a ``Stop``; call it in the main thread."""

        def stop(_number: int, _frame: FrameType | None) -> None:
            self.stop()

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)


class BrokerSettings(Settings):
    """What every part needs to reach its broker and to keep its state."""

    section: ClassVar[str] = "common"

    job: str = Field(description="the job to work on")
    state_directory: Path = Field(
        Path("state"), description="where durable state is kept, in a folder for each part"
    )
    broker_host: str = Field("127.0.0.1", description="the broker's host name or address")
    broker_port: int = Field(1883, ge=1, le=65535, description="the broker's TCP port")
    broker_username: str | None = Field(None, description="user name at the broker")
    broker_password: SecretStr | None = Field(None, description="password at the broker")
    broker_websocket_path: str | None = Field(
        None, description="set: MQTT over WebSocket at this path, as /mqtt on port 443"
    )
    tls_ca_file: str | None = Field(None, description="PEM file of the broker's CA; set: TLS")
    tls_certificate_file: str | None = Field(None, description="PEM file of our certificate")
    tls_key_file: str | None = Field(None, description="PEM file of our key")

    def endpoint(self, client_id: str, rate_bits_per_second: int | None = None) -> Endpoint:
        """Describe the broker for a connection."""
        password = self.broker_password
        return Endpoint(
            host=self.broker_host,
            port=self.broker_port,
            client_id=client_id,
            username=self.broker_username,
            password=None if password is None else password.get_secret_value(),
            ca_file=self.tls_ca_file,
            certificate_file=self.tls_certificate_file,
            key_file=self.tls_key_file,
            websocket_path=self.broker_websocket_path,
            rate_bits_per_second=rate_bits_per_second,
        )


def node_claim(uplink: Uplink, endpoint: Endpoint) -> Claim:
    """Let a node be refused where one with its name is at work."""

    def is_online(frame: bytes) -> bool:
        try:
            message, _ = unpack(frame)
        except FrameError:
            return False
        return isinstance(message, NodeState) and message.is_online

    return Claim(
        endpoint=endpoint,
        topic=topics.state(uplink.state.node),
        seconds=uplink.claim_seconds,
        is_online=is_online,
    )
