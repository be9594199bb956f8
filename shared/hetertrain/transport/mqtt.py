"""The only module that touches paho-mqtt: one thread owns the client, everybody else talks to
queues.

``Connection`` is that thread. It connects, subscribes, reconnects with capped exponential backoff
and jitter, takes what ``publish`` queued, and hands what happens to one callback, which must only
enqueue. Callbacks of paho never do work. A link's rate is really limited here: a token bucket per
direction decides when the socket is read and when the next frame is handed to the client, so that a
slow link slows its node and, through TCP, the broker's queue to it.

MQTT 5, QoS 1, persistent session with an explicit expiry. The broker's PUBACK is reported as
``Delivered`` and means no more than that the broker has the frame; a PUBACK that refuses is
reported as ``Denied``.
"""

from __future__ import annotations

import random
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from hetertrain.transport.token_bucket import TokenBucket
from hetertrain.wire.events import Outgoing

KEEPALIVE_SECONDS = 30
SESSION_EXPIRY_SECONDS = 3600
BACKOFF_SECONDS_MIN = 0.2
BACKOFF_SECONDS_MAX = 30.0
REFUSED_SECONDS_MIN = 5.0
REFUSED_SECONDS_MAX = 7200.0
"""Whoever is refused for good reason, as with a revoked credential, asks ever less often: with the
jitter, once in an hour or two.
"""
REFUSALS = frozenset({0x86, 0x87, 0x8A, 0x8C})
"""CONNACK reason codes: bad user name or password, not authorised, banned, bad method."""
POLL_SECONDS_MAX = 0.5
QUEUE_BYTES_MAX = 32 << 20
"""Frames that wait for the connection; beyond it the oldest are dropped and counted: senders
repeat.
"""
INFLIGHT_MAX = 64
FRAME_OVERHEAD_BYTES = 60
"""TCP/IP and MQTT headers of one packet, as the rate limit counts them."""
SESSION_TAKEN_OVER = 0x8E


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where the broker is and how we show who we are."""

    host: str
    port: int
    client_id: str
    username: str | None = None
    password: str | None = None
    ca_file: str | None = None
    """PEM file of the CA; set: TLS."""
    certificate_file: str | None = None
    key_file: str | None = None
    session_seconds: int = SESSION_EXPIRY_SECONDS
    """How long the broker keeps our session when we are away."""
    websocket_path: str | None = None
    """Set: MQTT over WebSocket at this path, for networks that pass nothing but HTTPS."""
    rate_bits_per_second: int | None = None
    """Limit each direction to this rate; None: as fast as it goes."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The session stands and all subscriptions are made."""

    packet_bytes_max: int | None = None
    """The largest packet that the broker takes; None: it does not say."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection broke or could not be made; it is tried again, unless ``is_final``."""

    reason: str
    is_final: bool = False
    is_refusal: bool = False
    """Our credential is not good for anything there."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message arrived."""

    topic: str
    frame: bytes
    is_retained: bool = False
    """The broker had it from before, and nobody has sent it now."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """The broker has taken the frame with this token."""

    token: int


@dataclass(frozen=True, slots=True)
class Denied:
    """The broker refused a publish or subscription: check the access rights of this node."""

    what: str
    reason: str
    token: int | None = None
    """Of the frame that was refused, where it has one."""


Event = Connected | Disconnected | Received | Delivered | Denied


class Guard(Protocol):
    """Says whether our client id is another process's; ``transport.claim`` has the real one."""

    def has_owner(self, stopping: threading.Event) -> bool:
        """Return it, before long or when ``stopping``; raise OSError where it cannot be known."""


class Connection(threading.Thread):
    """One node's connection to one broker."""

    def __init__(
        self,
        endpoint: Endpoint,
        subscriptions: tuple[str, ...],
        on_event: Callable[[Event], None],
        will: Outgoing | None = None,
        other_subscriptions: tuple[str, ...] = (),
        claim: Guard | None = None,
    ) -> None:
        """Give up ``other_subscriptions``, which a session of an earlier life may still have."""
        super().__init__(name=f"mqtt-{endpoint.client_id}", daemon=True)
        self.bytes_up = 0
        self.bytes_down = 0
        self.frames_dropped = 0
        self.return_seconds = 0.0
        """A session that broke is made again at random within this time: its owner sets it."""
        self._endpoint = endpoint
        self._claim = claim
        self.packet_bytes_max: int | None = None
        """The largest packet that the broker takes; None: it does not say, or was not reached."""
        self._subscriptions = subscriptions
        self._given_up = set(other_subscriptions)
        self._added: tuple[str, ...] = ()
        self._asked: dict[int, tuple[str, ...]] = {}
        """Topics by the id of the request that subscribes to them."""
        self._on_event = on_event
        self._up = TokenBucket(endpoint.rate_bits_per_second)
        self._down = TokenBucket(endpoint.rate_bits_per_second)
        self._queue: deque[Outgoing] = deque()
        self._queue_bytes = 0
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        self._tokens: dict[int, int | None] = {}
        self._is_ready = False
        self._is_taken_over = False
        self._failures = 0
        self._refusals = 0
        self._tls: ssl.SSLContext | None = None
        self._client = self._build_client(will)

    def publish(self, outgoing: tuple[Outgoing, ...]) -> None:
        """Queue frames; any thread may call it. Never blocks."""
        if not outgoing:
            return
        with self._lock:
            for item in outgoing:
                self._queue.append(item)
                self._queue_bytes += len(item.frame)
            while self._queue_bytes > QUEUE_BYTES_MAX:
                self._queue_bytes -= len(self._queue.popleft().frame)
                self.frames_dropped += 1
        self._wake()

    def resubscribe(self, subscriptions: tuple[str, ...]) -> None:
        """Subscribe to these topics and no others; any thread may call it. Never blocks."""
        with self._lock:
            added = {*self._added, *subscriptions} - (set(self._subscriptions) - set(self._added))
            self._given_up |= set(self._subscriptions) - set(subscriptions)
            self._given_up -= set(subscriptions)
            self._added = tuple(topic for topic in subscriptions if topic in added)
            self._subscriptions = subscriptions
        self._wake()

    def stop(self, timeout_seconds: float = 2.0) -> None:
        """Send what is queued, say goodbye and end the thread, within ``timeout_seconds``."""
        deadline = time.monotonic() + timeout_seconds
        while self._queue and self._is_ready and time.monotonic() < deadline:
            self._stopping.wait(0.02)
        self._stopping.set()
        self._wake()
        self.join(max(0.1, deadline - time.monotonic()))

    def run(self) -> None:
        """Own the client until stopped."""
        try:
            while not self._stopping.is_set() and not self._is_taken_over:
                if self._connect():
                    self._serve()
                self._back_off()
            self._client.disconnect()
            self._client.loop_write()
        except Exception as error:
            # A fault of ours must not leave an owner that waits for a connection that is dead.
            self._on_event(Disconnected(f"the connection's thread failed: {error!r}", True))
            raise
        finally:
            for end in (self._wake_read, self._wake_write):
                end.close()

    def _build_client(self, will: Outgoing | None) -> paho.Client:
        endpoint = self._endpoint
        client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id=endpoint.client_id,
            protocol=paho.MQTTv5,
            transport="tcp" if endpoint.websocket_path is None else "websockets",
            reconnect_on_failure=False,
        )
        if endpoint.websocket_path is not None:
            client.ws_set_options(path=endpoint.websocket_path)
        if endpoint.username is not None:
            client.username_pw_set(endpoint.username, endpoint.password)
        self._tls = _trusting(endpoint)
        if self._tls is not None:
            client.tls_set_context(self._tls)
        client.max_inflight_messages_set(INFLIGHT_MAX)
        client.max_queued_messages_set(2 * INFLIGHT_MAX)
        if will is not None:
            client.will_set(will.topic, will.frame, qos=1, retain=will.retain)
        client.on_connect = self._connected
        client.on_subscribe = self._subscribed
        client.on_disconnect = self._disconnected
        client.on_message = self._received
        client.on_publish = self._published
        return client

    def _connect(self) -> bool:
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]  # paho
        properties.SessionExpiryInterval = self._endpoint.session_seconds
        try:
            self._load_certificate()
            if self._claim is not None and self._claim.has_owner(self._stopping):
                self._refuse()
                return False
            self._client.connect(
                self._endpoint.host,
                self._endpoint.port,
                keepalive=KEEPALIVE_SECONDS,
                clean_start=False,
                properties=properties,
            )
        except (OSError, ValueError) as error:
            is_refusal = isinstance(error, PermissionError)
            self._refusals += is_refusal
            where = f"{self._endpoint.host}:{self._endpoint.port}"
            self._on_event(Disconnected(f"{where}: {error}", is_refusal=is_refusal))
            return False
        raw = self._client.socket()
        if raw is not None:
            # Else a chunk's last piece waits for the acknowledgement of the one before: 40 ms each.
            _tcp(raw).setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._endpoint.rate_bits_per_second and raw is not None:
            # A small receive buffer, so that the rate limit reaches back to the broker.
            _tcp(raw).setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
        return True

    def _load_certificate(self) -> None:
        """Take our certificate as it is on the disk now: it may have been renewed."""
        endpoint = self._endpoint
        if self._tls is not None and endpoint.certificate_file is not None:
            self._tls.load_cert_chain(endpoint.certificate_file, endpoint.key_file)

    def _refuse(self) -> None:
        self._is_taken_over = True
        reason = f"another process is connected as {self._endpoint.client_id}; end it first"
        self._on_event(Disconnected(reason, is_final=True))

    def _serve(self) -> None:
        """Read, write and keep alive until the connection ends or we stop."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            while not self._stopping.is_set():
                now = time.monotonic()
                self._hand_over(now)
                # Handing over may write, and find the connection broken.
                raw = self._client.socket()
                if raw is None:
                    return
                wait_down = self._down.wait_seconds(now)
                interest = selectors.EVENT_READ if wait_down == 0 else 0
                interest |= selectors.EVENT_WRITE if self._client.want_write() else 0
                timeout = self._poll_seconds(now, wait_down)
                self._wait(selector, raw, interest, timeout)
                if self._client.loop_misc() != paho.MQTT_ERR_SUCCESS:
                    return

    def _wait(
        self, selector: selectors.BaseSelector, raw: Any, interest: int, timeout: float
    ) -> None:
        if interest:
            selector.register(raw, interest)
        pending = getattr(raw, "pending", lambda: 0)()
        ready = {key.fileobj: mask for key, mask in selector.select(0 if pending else timeout)}
        if interest:
            selector.unregister(raw)
        if self._wake_read in ready:
            self._drain_wake()
        mask = ready.get(raw, 0)
        if (mask & selectors.EVENT_READ) or (pending and interest & selectors.EVENT_READ):
            self._client.loop_read()
        if mask & selectors.EVENT_WRITE:
            self._client.loop_write()

    def _poll_seconds(self, now: float, wait_down: float) -> float:
        timeout = POLL_SECONDS_MAX
        if wait_down:
            timeout = min(timeout, wait_down)
        if self._queue and self._is_ready:
            timeout = min(timeout, max(self._up.wait_seconds(now), 0.001))
        return timeout

    def _hand_over(self, now: float) -> None:
        """Give paho the next frames, as the rate and its window allow."""
        if self._is_ready and (self._added or self._given_up):
            with self._lock:
                added, self._added = self._added, ()
            self._subscribe(added)
        while (
            self._is_ready and self._up.wait_seconds(now) == 0 and len(self._tokens) < INFLIGHT_MAX
        ):
            with self._lock:
                if not self._queue:
                    return
                item = self._queue.popleft()
                self._queue_bytes -= len(item.frame)
            info = self._client.publish(item.topic, item.frame, qos=1, retain=item.retain)
            if info.rc == paho.MQTT_ERR_QUEUE_SIZE:
                # It is full of what earlier connections left unacknowledged, and sends that first.
                with self._lock:
                    self._queue.appendleft(item)
                    self._queue_bytes += len(item.frame)
                return
            self._tokens[info.mid] = item.token
            size = len(item.frame) + len(item.topic) + FRAME_OVERHEAD_BYTES
            self._up.take(size, now)
            self.bytes_up += size

    def _back_off(self) -> None:
        was_ready, self._is_ready = self._is_ready, False
        self._tokens.clear()
        self._failures += 1
        self._stopping.wait(self._delay_seconds(was_ready=was_ready))

    def _delay_seconds(self, *, was_ready: bool) -> float:
        """Return how long to wait before the next try. A session that broke may have broken for a
        whole fleet.
        """
        ceiling = backoff_seconds_max(self._failures, self._refusals)
        jitter = random.uniform(0.5, 1.0)  # noqa: S311  # spreads reconnects, guards nothing
        spread = random.uniform(0.0, self.return_seconds) if was_ready else 0.0  # noqa: S311
        return max(ceiling * jitter, spread)

    def _connected(
        self, _client: paho.Client, _data: Any, _flags: Any, code: ReasonCode, properties: Any
    ) -> None:
        if code.is_failure:
            is_refusal = code.value in REFUSALS
            self._refusals += is_refusal
            reason = f"the broker refused us: {code}"
            self._on_event(Disconnected(reason, is_refusal=is_refusal))
            return
        self.packet_bytes_max = getattr(properties, "MaximumPacketSize", None)
        with self._lock:
            wanted, self._added = self._subscriptions, ()
        self._asked.clear()
        self._subscribe(wanted)
        if not wanted:
            self._become_ready()

    def _subscribe(self, wanted: tuple[str, ...]) -> None:
        with self._lock:
            given_up, self._given_up = sorted(self._given_up), set()
        if given_up:
            self._client.unsubscribe(given_up)
        if wanted:
            options = SubscribeOptions(qos=1)
            _, mid = self._client.subscribe([(topic, options) for topic in wanted])
            if mid is not None:
                self._asked[mid] = wanted

    def _subscribed(
        self, _client: Any, _data: Any, mid: int, codes: list[ReasonCode], _properties: Any
    ) -> None:
        for topic, code in zip(self._asked.pop(mid, ()), codes, strict=False):
            if code.is_failure:
                self._on_event(Denied(topic, str(code)))
        if self._is_ready:
            return
        if codes and all(code.is_failure for code in codes):
            self._refusals += 1
            reason = "the broker lets us listen to none of our topics: is this node enrolled?"
            self._on_event(Disconnected(reason, is_refusal=True))
            self._client.disconnect()
            return
        self._become_ready()

    def _become_ready(self) -> None:
        self._is_ready = True
        self._failures = self._refusals = 0
        self._on_event(Connected(self.packet_bytes_max))

    def _disconnected(
        self, _client: Any, _data: Any, _flags: Any, code: ReasonCode, _properties: Any
    ) -> None:
        self._is_taken_over = code.value == SESSION_TAKEN_OVER
        reason = str(code)
        if self._is_taken_over:
            reason += f": another process connects as {self._endpoint.client_id}; end one of them"
        if not self._stopping.is_set():
            self._on_event(Disconnected(reason, self._is_taken_over))

    def _received(self, _client: Any, _data: Any, message: paho.MQTTMessage) -> None:
        size = len(message.payload) + len(message.topic) + FRAME_OVERHEAD_BYTES
        self._down.take(size, time.monotonic())
        self.bytes_down += size
        self._on_event(Received(message.topic, bytes(message.payload), message.retain))

    def _published(
        self, _client: Any, _data: Any, mid: int, code: ReasonCode, _properties: Any
    ) -> None:
        token = self._tokens.pop(mid, None)
        if code.is_failure:
            self._on_event(Denied(f"publish {mid}", str(code), token))
        elif token is not None:
            self._on_event(Delivered(token))

    def _wake(self) -> None:
        try:
            self._wake_write.send(b"\0")
        except OSError:
            return  # Full: the thread is awake anyway. Closed: it has ended.

    def _drain_wake(self) -> None:
        try:
            while self._wake_read.recv(4096):
                continue
        except BlockingIOError:
            return


def backoff_seconds_max(failures: int, refusals: int) -> float:
    """Return how long to wait at most before the next try, after so many that failed in a row."""
    if refusals:
        return min(REFUSED_SECONDS_MAX, REFUSED_SECONDS_MIN * 4.0 ** min(refusals - 1, 16))
    return min(BACKOFF_SECONDS_MAX, BACKOFF_SECONDS_MIN * 2.0 ** min(failures, 16))


def tls_context(endpoint: Endpoint) -> ssl.SSLContext | None:
    """Return what a connection trusts and shows; None: it is without TLS.

    Raises:
        OSError: a file cannot be read, or is not what it should be.
    """
    context = _trusting(endpoint)
    if context is not None and endpoint.certificate_file is not None:
        context.load_cert_chain(endpoint.certificate_file, endpoint.key_file)
    return context


def _trusting(endpoint: Endpoint) -> ssl.SSLContext | None:
    if endpoint.ca_file is None:
        return None
    return ssl.create_default_context(cafile=endpoint.ca_file)


def _tcp(raw: Any) -> socket.socket:
    """Return the socket under paho's, which wraps it for WebSocket."""
    inner: socket.socket = getattr(raw, "_socket", raw)
    return inner
