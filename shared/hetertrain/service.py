"""What every long-running part shares: one mailbox, one thread that owns the state machines, a
clean end.

Connections, pipes and timers put events into the ``Mailbox``; the thread that runs the part takes
them one by one. SIGTERM and SIGINT are events too.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import ClassVar, Generic, TypeVar

from pydantic import Field, SecretStr

from hetertrain import __version__
from hetertrain.config import Settings
from hetertrain.core.tiers import TIERS
from hetertrain.errors import FrameError, SettingsError
from hetertrain.transport.claim import Claim
from hetertrain.transport.mqtt import Endpoint
from hetertrain.wire import topics
from hetertrain.wire.frames import unpack
from hetertrain.wire.messages import NodeState
from hetertrain.wire.signing import Check, Sign
from hetertrain.wire.uplink import Uplink

E = TypeVar("E")


class Stop:
    """Asks the part to end."""


ORPHAN_SECONDS_MAX = 2.0
"""How long a process may take to end cleanly once its parent is gone."""
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


class ConnectionSettings(Settings):
    """What every part needs to reach its broker and to keep its state."""

    section: ClassVar[str] = "common"

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
        """Describe the broker for a connection.

        A broker ends the older of two sessions of one client id. So the id ends with a digest of
        our credential: nobody who has another one can end our session.

        Raises:
            SettingsError: the key file cannot be read.
        """
        password = self.broker_password
        secret = b"" if password is None else password.get_secret_value().encode()
        if self.tls_key_file is not None:
            secret += _read_key(self.tls_key_file)
        if secret:
            key = hashlib.sha256(secret).digest()
            mark = hashlib.blake2b(client_id.encode(), key=key, digest_size=8).hexdigest()
            client_id = f"{client_id}-{mark}"
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


class BrokerSettings(ConnectionSettings):
    """What every part that works on a job needs."""

    job: str = Field(description="the job to work on")
    control_url: str | None = Field(
        None, description="the control plane; set: our certificate is renewed there, in time"
    )

    authority_file: str | None = Field(
        None,
        description="certificate of the fleet's authority; set: what we take must be signed",
    )

    def signer(self) -> Sign | None:
        """Return what signs what we send; None without a certificate.

        Raises:
            CredentialError: key or certificate cannot be read.
        """
        if self.tls_certificate_file is None or self.tls_key_file is None:
            return None
        from hetertrain.security import Signer

        return Signer(Path(self.tls_key_file), Path(self.tls_certificate_file)).sign

    def verifier(self) -> Check | None:
        """Return what insists on signatures; None: they are not asked for.

        Raises:
            CredentialError: the authority's certificate cannot be read.
        """
        if self.authority_file is None:
            return None
        from hetertrain.security import Verifier

        return Verifier(Path(self.authority_file)).check

    def start_renewer(self) -> Callable[[], None]:
        """Renew our certificate from now on, where there is a control plane; return what ends it.

        Raises:
            SettingsError: there is no certificate to renew.
        """
        if self.control_url is None or self.tls_certificate_file is None:
            return lambda: None
        if self.tls_ca_file is None or self.tls_key_file is None:
            raise SettingsError("to renew a certificate, tls_ca_file and tls_key_file must be set")
        # Its libraries are not loaded where nothing is to be renewed.
        from hetertrain.enrolment import Renewer

        renewer = Renewer(
            url=self.control_url,
            key_file=Path(self.tls_key_file),
            certificate_file=Path(self.tls_certificate_file),
            authority_file=Path(self.tls_ca_file),
        )
        renewer.start()
        return renewer.stop


def _read_key(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise SettingsError(f"cannot read tls_key_file {file}: {error}") from error


def end_with_parent() -> None:
    """From now on, end this process after its parent: cleanly, or at the latest at a deadline."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        _end_after(parent.sentinel)


def end_with_process(pid: int) -> None:
    """From now on, end this process after another one, where the system can tell of its end."""
    with suppress(OSError):
        _end_after(os.pidfd_open(pid))


def _end_after(sentinel: int) -> None:
    def end() -> None:
        wait([sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_SECONDS_MAX)
        os._exit(1)

    threading.Thread(target=end, name="end-with-parent", daemon=True).start()


def first_state(*, node: str, job: str, cell: str, tier: str, role: str) -> NodeState:
    """Return a node's state as it first announces it.

    Raises:
        SettingsError: a name cannot stand in a topic, or the tier is unknown.
    """
    for kind, name in (("node", node), ("job", job), ("cell", cell)):
        topics.check_name(kind, name)
    if tier not in TIERS:
        raise SettingsError(f"tier {tier!r} is unknown: use one of {', '.join(TIERS)}")
    return NodeState(
        node=node, job=job, cell=cell, tier=tier, role=role, is_online=True, agent=__version__
    )


def resident_mib() -> int:
    """Return how much memory this process has, in MiB; 0: the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return round(pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20))


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
