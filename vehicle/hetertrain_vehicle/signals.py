"""Where the agent learns how its vehicle is: signals by their COVESA VSS names, from a file, a
local MQTT broker or a KUKSA databroker.

A source has a thread of its own and hands on what it hears; where it is lost it says so, and what
it knew is no longer known. ``SignalTable`` keeps the newest values; the agent's thread owns it.
"""

from __future__ import annotations

import json
import math
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import SplitResult, urlsplit

from hetertrain.core.eligibility import NETWORK, TIME, Value
from hetertrain.errors import SettingsError
from hetertrain.logging import get_logger
from hetertrain.transport import mqtt

POLL_SECONDS = 0.5
"""How often a file is looked at."""
RETRY_SECONDS = 5.0
SIGNALS_MAX = 1024
FILE_BYTES_MAX = 1 << 18
TEXT_CHARACTERS_MAX = 128
STOP_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class SignalsHeard:
    """Values that a source has."""

    values: dict[str, Value]
    is_whole: bool
    """They are all that the source has: what it had before and is not among them is unknown."""


OnSignals = Callable[[SignalsHeard], None]


class SignalSource(Protocol):
    """Hands on what it hears, from a thread of its own."""

    def want(self, names: frozenset[str]) -> None:
        """Say which signals matter from now on; the first call starts the source."""

    def stop(self) -> None:
        """End the source."""


@dataclass(slots=True)
class SignalTable:
    """The newest value of each signal."""

    seconds_max: float | None
    """A value that nobody repeated for so long is no longer known; None: it stands until replaced.
    """
    _values: dict[str, tuple[Value, float]] = field(default_factory=dict)

    def take(self, heard: SignalsHeard, now: float) -> None:
        """Note what a source says at monotonic time ``now``."""
        if heard.is_whole:
            self._values.clear()
        for name, value in heard.values.items():
            if name in self._values or len(self._values) < SIGNALS_MAX:
                self._values[name] = (value, now)

    def known(self, now: float) -> dict[str, Value]:
        """Return what is known at monotonic time ``now``."""
        oldest = -math.inf if self.seconds_max is None else now - self.seconds_max
        return {name: value for name, (value, at) in self._values.items() if at >= oldest}


def open_source(url: str, ca_file: str | None, on_signals: OnSignals) -> SignalSource:
    """Return the source that a URL names.

    ``file:PATH`` is a JSON file; ``mqtt://HOST:PORT/PREFIX`` topics below a prefix;
    ``kuksa://HOST:PORT`` a databroker. Of the last two ``ca_file`` makes the connection one with
    TLS.

    Raises:
        SettingsError: it is none of these.
    """
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.path:
        return FileSource(Path(parts.path), on_signals)
    if parts.scheme == "mqtt" and parts.hostname and parts.path.strip("/"):
        return MqttSource(parts, ca_file, on_signals)
    if parts.scheme == "kuksa" and parts.hostname:
        return KuksaSource(parts, ca_file, on_signals)
    raise SettingsError(
        f"signals {url!r} is none of file:PATH, mqtt://HOST:PORT/PREFIX, kuksa://HOST:PORT"
    )


class FileSource:
    """A JSON object by signal names, nested or with dots, that another program keeps up to date.

    Who writes it puts a new file in its place (``rename``), so that it is never read half.
    """

    def __init__(self, path: Path, on_signals: OnSignals) -> None:
        self._path = path
        self._on_signals = on_signals
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def want(self, names: frozenset[str]) -> None:
        """Start to look at the file; it has all names."""
        del names
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()

    def _watch(self) -> None:
        log, seen, problem = get_logger(part="signals"), (0, 0, 0), ""
        while not self._stopping.is_set():
            try:
                status = self._path.stat()
                mark = (status.st_mtime_ns, status.st_ino, status.st_size)
                if mark != seen:
                    values = read_signals(self._path.read_bytes())
                    seen, problem = mark, ""
                    self._on_signals(SignalsHeard(values, is_whole=True))
            except (OSError, ValueError) as error:
                seen = (0, 0, 0)
                if str(error) != problem:
                    problem = str(error)
                    log.warning("signals_lost", source=str(self._path), error=problem)
                    self._on_signals(SignalsHeard({}, is_whole=True))
            self._stopping.wait(POLL_SECONDS)


class MqttSource:
    """Topics of a broker in the vehicle: ``PREFIX/Vehicle/Speed`` with a JSON value, or any topic
    below the prefix with a JSON object by names.
    """

    def __init__(self, parts: SplitResult, ca_file: str | None, on_signals: OnSignals) -> None:
        self._prefix = parts.path.strip("/")
        self._on_signals = on_signals
        self._log = get_logger(part="signals")
        assert parts.hostname is not None, "checked by open_source"
        endpoint = mqtt.Endpoint(
            host=parts.hostname,
            port=parts.port or 1883,
            client_id=f"hetertrain-signals-{secrets.token_hex(8)}",
            ca_file=ca_file,
            session_seconds=0,
        )
        self._connection = mqtt.Connection(endpoint, (f"{self._prefix}/#",), self._take)

    def want(self, names: frozenset[str]) -> None:
        """Connect; all below the prefix is heard."""
        del names
        if not self._connection.is_alive():
            self._connection.start()

    def stop(self) -> None:
        """Disconnect."""
        if self._connection.is_alive():
            self._connection.stop()

    def _take(self, event: mqtt.Event) -> None:
        match event:
            case mqtt.Received(topic, payload):
                try:
                    values = self._read(topic, payload)
                except ValueError as error:
                    self._log.warning("signal_refused", topic=topic[:128], error=str(error)[:200])
                    return
                self._on_signals(SignalsHeard(values, is_whole=False))
            case mqtt.Disconnected(reason):
                self._log.warning("signals_lost", source="mqtt", error=reason)
                self._on_signals(SignalsHeard({}, is_whole=True))
            case mqtt.Denied(what, reason):
                self._log.error("signals_denied", what=what, reason=reason)

    def _read(self, topic: str, payload: bytes) -> dict[str, Value]:
        name = topic.removeprefix(f"{self._prefix}/").replace("/", ".")
        content = _parse(payload)
        return flat(content if isinstance(content, dict) else {name: content})


class KuksaSource:
    """A KUKSA databroker, through its own client (extra ``kuksa``)."""

    def __init__(self, parts: SplitResult, ca_file: str | None, on_signals: OnSignals) -> None:
        try:
            from kuksa_client.grpc import VSSClient
        except ImportError as error:
            raise SettingsError(
                "signals from a KUKSA databroker need: pip install 'hetertrain[kuksa]'"
            ) from error
        self._client_class: Any = VSSClient
        self._host, self._port = parts.hostname, parts.port or 55555
        self._ca = None if ca_file is None else Path(ca_file)
        self._on_signals = on_signals
        self._names: frozenset[str] = frozenset()
        self._changed = threading.Event()
        self._stopping = threading.Event()
        self._client: Any = None
        self._thread: threading.Thread | None = None
        self._log = get_logger(part="signals")

    def want(self, names: frozenset[str]) -> None:
        """Subscribe to these signals, and no others."""
        names -= {TIME, NETWORK}
        if names == self._names and self._thread is not None:
            return
        self._names = names
        self._changed.set()
        self._end_subscription()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the subscription and the thread."""
        self._stopping.set()
        self._changed.set()
        self._end_subscription()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)

    def _end_subscription(self) -> None:
        client = self._client
        if client is not None:
            client.disconnect()

    def _watch(self) -> None:
        while not self._stopping.is_set():
            self._changed.clear()
            names = sorted(self._names)
            if names:
                self._follow(names)
                self._on_signals(SignalsHeard({}, is_whole=True))
            # A new set of names does not wait.
            self._changed.wait(RETRY_SECONDS if names else None)

    def _follow(self, names: list[str]) -> None:
        """Hand on what the databroker says, until it ends or is no longer wanted."""
        try:
            client = self._client_class(
                self._host,
                self._port,
                root_certificates=self._ca,
                ensure_startup_connection=False,
            )
            with client:
                self._client = client
                if self._changed.is_set():
                    return  # Who changed it did not see this client yet.
                for updates in client.subscribe_current_values(names):
                    values = {name: point.value for name, point in updates.items() if point}
                    self._on_signals(SignalsHeard(flat(values), is_whole=False))
        except Exception as error:  # the client raises bare ones too, as when it is disconnected
            if not (self._stopping.is_set() or self._changed.is_set()):
                self._log.warning("signals_lost", source="kuksa", error=str(error)[:300])
        finally:
            self._client = None


def read_signals(payload: bytes) -> dict[str, Value]:
    """Read a JSON object of signals.

    Raises:
        ValueError: it is not one, or too long.
    """
    content = _parse(payload)
    if not isinstance(content, dict):
        raise ValueError("the signals are not a JSON object")  # noqa: TRY004  # content, not type
    return flat(content)


def flat(content: Mapping[str, Any]) -> dict[str, Value]:
    """Return nested names as names with dots; what is neither truth, number nor text is left out.

    Raises:
        ValueError: there are too many.
    """
    values: dict[str, Value] = {}
    waiting: list[tuple[str, Any]] = list(content.items())
    while waiting:
        name, value = waiting.pop()
        if len(values) + len(waiting) > SIGNALS_MAX:
            raise ValueError(f"there are more than {SIGNALS_MAX} signals")
        if isinstance(value, dict):
            waiting += [(f"{name}.{inner}", each) for inner, each in value.items()]
        elif isinstance(value, bool):
            values[name] = value
        elif isinstance(value, int | float):
            values[name] = float(value)
        elif isinstance(value, str):
            values[name] = value[:TEXT_CHARACTERS_MAX]
    return values


def _parse(payload: bytes) -> Any:
    if len(payload) > FILE_BYTES_MAX:
        raise ValueError(f"{len(payload)} bytes of signals: at most {FILE_BYTES_MAX}")
    return json.loads(payload)


def network_type(root: Path = Path("/")) -> str:
    """Return the type of the link of the default route: ``ethernet``, ``wifi``, ``cellular``,
    ``none`` (there is no such route) or ``other``.
    """
    try:
        lines = (root / "proc/net/route").read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return "other"
    routes = [line.split() for line in lines]
    defaults = [(int(r[6]), r[0]) for r in routes if len(r) > 7 and r[1] == r[7] == "00000000"]
    if not defaults:
        return "none"
    interface = min(defaults)[1]
    if (root / "sys/class/net" / interface / "wireless").exists():
        return "wifi"
    if interface.startswith(("wwan", "rmnet", "ppp", "ccmni")):
        return "cellular"
    return "ethernet" if interface.startswith(("eth", "en")) else "other"
