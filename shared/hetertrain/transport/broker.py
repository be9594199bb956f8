"""The embedded broker: rumqttd from the ``iotcore`` wheel, as a child process, on loopback and a
free port where nothing else is asked for.

It keeps nothing on disk and knows no TLS and no access rights, so it is for demos, tests, single
machines, and networks where everybody is trusted. Its defaults listen on all interfaces and allow
20 KiB per packet, hence the configuration file.
"""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

from iotcore import Broker

from hetertrain.errors import SettingsError, TransportError

_CONFIGURATION = """
id = 0

[router]
id = 0
max_connections = 10010
max_outgoing_packet_count = 200
max_segment_size = 16777216
max_segment_count = 10

[v5.1]
name = "v5-1"
listen = "{bind}:{port}"
next_connection_delay_ms = 1

[v5.1.connections]
connection_timeout_ms = 60000
max_payload_size = {packet_bytes}
max_inflight_count = 200
dynamic_filters = true
"""
LOOPBACK = "127.0.0.1"


class EmbeddedBroker:
    """A broker for the time of a ``with`` block; it ends with this process in any case."""

    def __init__(
        self, directory: Path, port: int = 0, packet_bytes: int = 1 << 20, bind: str = LOOPBACK
    ) -> None:
        """Take a port, 0: a free one, of the IPv4 address ``bind``.

        Raises:
            SettingsError: ``bind`` is no address of this machine.
        """
        self.bind = bind
        self.port = port or _free_port(bind)
        is_any = _address(bind).is_unspecified
        self.host = LOOPBACK if is_any else bind
        """Where clients on this machine find it."""
        directory.mkdir(parents=True, exist_ok=True)
        configuration = directory / "rumqttd.toml"
        configuration.write_text(
            _CONFIGURATION.format(bind=bind, port=self.port, packet_bytes=packet_bytes),
            encoding="utf-8",
        )
        self._broker = Broker(config_path=str(configuration))

    def __enter__(self) -> EmbeddedBroker:
        self.start()
        return self

    def start(self) -> None:
        """Start it, or again where it has ended.

        Raises:
            TransportError: its port is taken, or it does not start.
        """
        try:
            self._broker.start()
        except (OSError, RuntimeError) as error:
            raise TransportError(
                f"the broker cannot listen on {self.bind}:{self.port}: {error}"
            ) from error

    @property
    def is_running(self) -> bool:
        """Whether its process lives."""
        return self._broker.is_running

    def __exit__(self, *_: object) -> None:
        self._broker.stop()


def _address(bind: str) -> ipaddress.IPv4Address:
    try:
        return ipaddress.IPv4Address(bind)
    except ValueError as error:
        raise SettingsError(f"a broker listens on an IPv4 address, not on {bind!r}") from error


def _free_port(bind: str) -> int:
    with socket.socket() as probe:
        try:
            probe.bind((str(_address(bind)), 0))
        except OSError as error:
            raise SettingsError(f"{bind} is no address of this machine: {error}") from error
        return int(probe.getsockname()[1])
