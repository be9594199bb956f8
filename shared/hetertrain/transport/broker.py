"""The embedded broker: rumqttd from the ``iotcore`` wheel, as a child process on loopback and a
free port.

It keeps nothing on disk and knows no access rights, so it is for demos, tests and single machines.
Its defaults listen on all interfaces and allow 20 KiB per packet, hence the configuration file.
"""

from __future__ import annotations

import socket
from pathlib import Path

from iotcore import Broker

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
listen = "127.0.0.1:{port}"
next_connection_delay_ms = 1

[v5.1.connections]
connection_timeout_ms = 60000
max_payload_size = {packet_bytes}
max_inflight_count = 200
dynamic_filters = true
"""


class EmbeddedBroker:
    """A broker for the time of a ``with`` block; it ends with this process in any case."""

    def __init__(self, directory: Path, port: int = 0, packet_bytes: int = 1 << 20) -> None:
        self.host = "127.0.0.1"
        self.port = port or _free_port()
        directory.mkdir(parents=True, exist_ok=True)
        configuration = directory / "rumqttd.toml"
        configuration.write_text(
            _CONFIGURATION.format(port=self.port, packet_bytes=packet_bytes), encoding="utf-8"
        )
        self._broker = Broker(config_path=str(configuration))

    def __enter__(self) -> EmbeddedBroker:
        self._broker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._broker.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
