"""The pipe between an agent and its trainer: small frames, and beside them one vector in shared
memory.

::

    agent                                    trainer
      | <------------------- TrainerReady(size) |
      | MemoryShared(size), descriptor -------> |   where both can: an anonymous file of that size
      | TrainCommand, start in the memory ----> |
      | InterruptCommand (perhaps) -----------> |
      | <------ TrainedReport, local in the memory |

They take turns: the agent writes a start before its order and copies the local vector out of the
report, the trainer writes between the two. So one vector's memory serves both directions. It has no
name and ends with its last user, however that ends. Its size is sealed, so neither side can pull it
from under the other. Where there is no such memory (it is Linux's), vectors travel in the frames.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle

import numpy as np

from hetertrain.core.layout import Vector
from hetertrain.errors import FrameError, LayoutError
from hetertrain.wire.frames import pack, unpack
from hetertrain.wire.messages import (
    InterruptCommand,
    MemoryShared,
    TrainCommand,
    TrainedReport,
    TrainerReady,
    TrainFailed,
)

VECTOR_SIZE_MAX = 1 << 31
"""As many parameters as a version may have."""
ITEM_BYTES = np.dtype(np.float32).itemsize
CAN_SHARE_MEMORY = hasattr(os, "memfd_create")


class AgentEnd:
    """The agent's end. One thread sends, another may receive."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._size = 0
        """Of the trainer's vector; 0: it is not ready."""
        self._memory: Vector | None = None
        self._is_ordered = False

    def accept(self, ready: TrainerReady) -> None:
        """Share memory with a trainer that is ready, where both can."""
        self._size = ready.size
        if not (ready.shares_memory and CAN_SHARE_MEMORY):
            return
        try:
            descriptor = _new_memory(ready.size)
        except OSError:
            return  # There is no room, or a sandbox forbids it: vectors travel in frames.
        try:
            self._memory = _view(descriptor, ready.size)
            self._send(MemoryShared(size=ready.size))
            with suppress(OSError):  # A trainer that has ended is noticed by who receives.
                send_handle(self._connection, descriptor, None)
        finally:
            os.close(descriptor)

    def order(self, command: TrainCommand, start: Vector | None) -> None:
        """Send an order; a trainer that has ended hears nothing, and ``receive`` notices.

        Raises:
            LayoutError: ``start`` is not of the trainer's size.
        """
        payload = memoryview(b"")
        if start is not None:
            if start.shape != (self._size,):
                raise LayoutError(
                    f"the job's model has {start.size} parameters, the trainer's {self._size}: "
                    "both must be of one task"
                )
            if self._memory is None:
                payload = start.data.cast("B")
            else:
                self._memory[:] = start
        self._is_ordered = True
        self._send(replace(command, has_start=start is not None), payload)

    def interrupt(self) -> None:
        """Ask the trainer to stop at its next step boundary."""
        self._send(InterruptCommand())

    def receive(self) -> TrainerReady | TrainFailed | tuple[TrainedReport, Vector]:
        """Wait for what the trainer says; the vector of a report is the caller's own.

        Raises:
            EOFError, OSError: the trainer has ended.
            FrameError: it says what it must not.
        """
        message, payload = unpack(self._connection.recv_bytes())
        match message:
            case TrainerReady(size=size):
                if not 0 < size < VECTOR_SIZE_MAX:
                    raise FrameError("size", f"a trainer with {size} parameters is ready")
                return message
            case TrainFailed():
                return message
            case TrainedReport():
                return message, self._local(message, payload)
            case _:
                raise FrameError("direction", f"{type(message).__name__} from a trainer")

    def _local(self, report: TrainedReport, payload: memoryview) -> Vector:
        if not self._is_ordered:
            raise FrameError("direction", "a report without an order")
        self._is_ordered = False
        memory = self._memory
        if report.is_shared and memory is not None:
            return memory.copy()
        if len(payload) != self._size * ITEM_BYTES:
            raise FrameError("size", f"{len(payload)} bytes for {self._size} parameters")
        return np.frombuffer(payload, np.float32)

    def _send(
        self,
        message: TrainCommand | InterruptCommand | MemoryShared,
        payload: memoryview | None = None,
    ) -> None:
        with suppress(OSError):
            self._connection.send_bytes(pack(message, payload or b""))

    def close(self) -> None:
        """Close the pipe; the trainer ends."""
        self._connection.close()
        self._memory = None


class TrainerEnd:
    """The trainer's end, for one thread; ``size`` is that of its vector."""

    def __init__(self, connection: Connection, size: int) -> None:
        self._connection = connection
        self._size = size
        self._memory: Vector | None = None
        self._is_shared = False

    @property
    def vector(self) -> Vector:
        """Shape (size,): after an order with a start, that; what a report is to say, until it is
        sent. In between nobody else writes here.
        """
        if self._memory is None:
            self._memory = np.zeros(self._size, np.float32)
        return self._memory

    def ready(self, ready: TrainerReady) -> None:
        """Say that the task is loaded.

        Raises:
            OSError: the agent has gone; so too from all that follows.
        """
        self._connection.send_bytes(pack(replace(ready, shares_memory=CAN_SHARE_MEMORY)))

    def poll(self, seconds: float = 0.0) -> bool:
        """Wait at most so long; return whether there is something to receive, or an end."""
        return self._connection.poll(seconds)

    def receive(self) -> TrainCommand | InterruptCommand | MemoryShared:
        """Wait for what the agent says, and take it into ``vector`` or as ``vector``.

        Raises:
            EOFError, OSError: the agent has gone.
            FrameError: it says what it must not.
        """
        message, payload = unpack(self._connection.recv_bytes())
        match message:
            case MemoryShared(size=size) if size == self._size:
                descriptor = recv_handle(self._connection)
                try:
                    self._memory, self._is_shared = _view(descriptor, size), True
                finally:
                    os.close(descriptor)
            case TrainCommand(has_start=has_start):
                if has_start and not self._is_shared:
                    self.vector[:] = _floats(payload, self._size)
            case InterruptCommand():
                pass
            case _:
                raise FrameError("direction", f"{type(message).__name__} from an agent")
        return message

    def report(self, report: TrainedReport) -> None:
        """Answer an order; ``vector`` is the local model."""
        payload = b"" if self._is_shared else self.vector.data.cast("B")
        self._connection.send_bytes(pack(replace(report, is_shared=self._is_shared), payload))

    def fail(self, failed: TrainFailed) -> None:
        """Say that the user's code failed: there is nothing more to report."""
        self._connection.send_bytes(pack(failed))

    def close(self) -> None:
        """Close the pipe."""
        self._connection.close()


def _floats(payload: memoryview, size: int) -> Vector:
    if len(payload) != size * ITEM_BYTES:
        raise FrameError("size", f"{len(payload)} bytes for {size} parameters")
    return np.frombuffer(payload, np.float32)


def _new_memory(size: int) -> int:
    """Return the descriptor of new memory for ``size`` floats, that nobody can resize."""
    descriptor = os.memfd_create("hetertrain-vector", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size * ITEM_BYTES)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _view(descriptor: int, size: int) -> Vector:
    """Map memory; it is freed with the last view."""
    found = os.fstat(descriptor).st_size
    if found != size * ITEM_BYTES:
        raise FrameError("size", f"shared memory of {found} bytes for {size} parameters")
    return np.frombuffer(mmap.mmap(descriptor, size * ITEM_BYTES), np.float32)
