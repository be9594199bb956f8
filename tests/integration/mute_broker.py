"""A broker that acknowledges nothing on its first connections and drops them: what Mosquitto does
not do on demand. It speaks just enough of MQTT 5 for one client that publishes.
"""

from __future__ import annotations

import contextlib
import socket
import threading

PUBLISHED_BEFORE_DROP = 64


class MuteBroker(threading.Thread):
    """Listens on loopback; ``seen`` are the payloads that arrived."""

    def __init__(self, num_mute: int) -> None:
        super().__init__(daemon=True)
        self._num_mute = num_mute
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.num_connections = 0
        self.seen: set[bytes] = set()

    def run(self) -> None:
        """Serve one connection after the other."""
        while True:
            connection, _ = self._server.accept()
            self.num_connections += 1
            with contextlib.suppress(EOFError, OSError):
                self._serve(connection, is_mute=self.num_connections <= self._num_mute)
            connection.close()

    def _serve(self, connection: socket.socket, *, is_mute: bool) -> None:
        num_published = 0
        while True:
            kind, body = _packet(connection)
            match kind:
                case 1:
                    has_session = self.num_connections > 1
                    connection.sendall(bytes([0x20, 3, has_session, 0, 0]))
                case 8:
                    connection.sendall(bytes([0x90, 4]) + body[:2] + bytes([0, 1]))
                case 12:
                    connection.sendall(bytes([0xD0, 0]))
                case 3:
                    end = 2 + int.from_bytes(body[:2], "big")
                    self.seen.add(body[end + 3 :])
                    num_published += 1
                    if is_mute and num_published >= PUBLISHED_BEFORE_DROP:
                        return
                    if not is_mute:
                        connection.sendall(bytes([0x40, 2]) + body[end : end + 2])


def _packet(connection: socket.socket) -> tuple[int, bytes]:
    kind = _read(connection, 1)[0] >> 4
    length, factor = 0, 1
    while True:
        byte = _read(connection, 1)[0]
        length += (byte & 127) * factor
        factor *= 128
        if not byte & 128:
            return kind, _read(connection, length)


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        piece = connection.recv(num_bytes - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data
