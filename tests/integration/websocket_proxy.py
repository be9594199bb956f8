"""MQTT over WebSocket for a broker that speaks TCP only, as a web server in front of it does."""

from __future__ import annotations

import socket
import threading

from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve
from websockets.typing import Subprotocol

PIECE_BYTES = 1 << 16


class WebSocketProxy:
    """Passes the bytes of binary frames on to a broker, and its answers back."""

    def __init__(self, host: str, port: int) -> None:
        self._upstream = (host, port)
        self.paths: list[str] = []
        """What clients asked for."""
        self._server = serve(self._pass_on, "127.0.0.1", 0, subprotocols=[Subprotocol("mqtt")])
        self.port: int = self._server.socket.getsockname()[1]

    def __enter__(self) -> WebSocketProxy:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()

    def _pass_on(self, client: ServerConnection) -> None:
        assert client.request is not None, "a handshake has a request"
        self.paths.append(client.request.path)
        with socket.create_connection(self._upstream) as upstream:
            threading.Thread(target=_pass_back, args=(upstream, client), daemon=True).start()
            try:
                for piece in client:
                    assert isinstance(piece, bytes), "MQTT is binary"
                    upstream.sendall(piece)
            except ConnectionClosed:
                return  # MQTT said goodbye before.
            finally:
                upstream.shutdown(socket.SHUT_RDWR)


def _pass_back(upstream: socket.socket, client: ServerConnection) -> None:
    try:
        while piece := upstream.recv(PIECE_BYTES):
            client.send(piece)
    except (OSError, ConnectionClosed):
        return
    client.close()
