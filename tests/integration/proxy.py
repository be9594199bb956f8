"""A TCP proxy between a client and its broker, as fast as it is told to be."""

from __future__ import annotations

import math
import socket
import threading
import time
from contextlib import suppress

PIECE_BYTES = 2048
BUFFER_BYTES = 16 * 1024
"""Small, so that what is written is soon as slow as the link."""


class ShapingProxy:
    """Passes bytes on at ``bits_per_second`` in each direction; change it at any time."""

    def __init__(self, host: str, port: int, bits_per_second: float = math.inf) -> None:
        self.bits_per_second = bits_per_second
        self._upstream = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self.bytes_up = self.bytes_down = 0
        """What was passed on to the broker, and to the client."""
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> ShapingProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Break all connections; what is on its way is lost."""
        while self._sockets:
            each = self._sockets.pop()
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._upstream)
            for each in (client, server):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets.append(each)
            for is_up, ends in ((True, (client, server)), (False, (server, client))):
                threading.Thread(target=self._pass_on, args=(*ends, is_up), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_up: bool) -> None:
        free_at = time.monotonic()
        try:
            while piece := source.recv(PIECE_BYTES):
                free_at = max(free_at, time.monotonic()) + 8 * len(piece) / self.bits_per_second
                time.sleep(max(0.0, free_at - time.monotonic()))
                target.sendall(piece)
                if is_up:
                    self.bytes_up += len(piece)
                else:
                    self.bytes_down += len(piece)
        except OSError:
            return  # One end has gone; so goes the other.
        finally:
            source.close()
            target.close()
