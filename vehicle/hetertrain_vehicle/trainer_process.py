"""Starts trainer processes, within limits, and knows how one ended; imports no torch itself."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import stat
import sys
from multiprocessing.connection import Connection, Pipe
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess

from hetertrain.errors import SettingsError, TrainError
from hetertrain.service import end_with_process
from hetertrain.task import Node
from hetertrain_vehicle.settings import VehicleSettings

END_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1


class TrainerProcess:
    """The trainer of one vehicle, and the next one after it failed."""

    def __init__(self, context: SpawnContext | ForkServerContext, settings: VehicleSettings):
        self._context = context
        self._settings = settings
        self._process: BaseProcess | None = None

    def start(self) -> Connection:
        """Start a trainer, in place of the one before; return our end of its pipe."""
        self.stop()
        self._process, pipe = start_trainer(self._context, self._settings)
        return pipe

    def ending(self) -> str:
        """Say how the trainer ended that closed its pipe."""
        process = self._process
        if process is None:
            return "it was not started"
        process.join(END_SECONDS)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
        code = process.exitcode
        if code == -signal.SIGKILL:
            return f"killed, as where memory ran out; children had up to {peak} MiB"
        return f"ended with code {code}; children had up to {peak} MiB"

    def pause(self) -> None:
        """Stop the process where it is."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the process go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.is_alive():
            assert self._process.pid is not None, "it was started"
            os.kill(self._process.pid, number)

    def stop(self) -> None:
        """End the trainer; its pipe is closed already."""
        self.resume()
        if self._process is not None:
            self._process.join(END_SECONDS)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
            self._process = None


class GivenTrainer:
    """A trainer that somebody else started: there is no other after it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe: Connection | None = pipe

    @classmethod
    def at(cls, descriptor: int) -> GivenTrainer:
        """Take over the trainer that started this process, and end after it.

        Raises:
            SettingsError: the descriptor is not a socket's.
        """
        try:
            is_socket = stat.S_ISSOCK(os.fstat(descriptor).st_mode)
        except OSError:
            is_socket = False
        if not is_socket:
            raise SettingsError(f"trainer-fd {descriptor} is no socket: it is for hetertrain.join")
        os.set_inheritable(descriptor, False)
        end_with_process(os.getppid())
        return cls(Connection(descriptor))

    def start(self) -> Connection:
        """Return its pipe.

        Raises:
            TrainError: it has failed.
        """
        pipe, self._pipe = self._pipe, None
        if pipe is None:
            raise TrainError("the trainer failed, and whoever started it has no other")
        return pipe

    def ending(self) -> str:
        """Say what is known of its end."""
        return "it closed its pipe"

    def pause(self) -> None:
        """Leave it to end its order at the next step."""

    def resume(self) -> None:
        """Wait for the next order, as it does."""

    def stop(self) -> None:
        """Leave it to whoever started it."""


def start_trainer(
    context: SpawnContext | ForkServerContext, settings: VehicleSettings
) -> tuple[BaseProcess, Connection]:
    """Start the trainer of one vehicle; return its process and the agent's end of the pipe."""
    assert settings.task is not None, "who starts a trainer has a task for it"
    ours, theirs = Pipe()
    limits = (settings.trainer_nice, settings.trainer_memory_mib)
    arguments = (
        settings.task,
        node_of(settings),
        settings.step_seconds_min,
        settings.trainer_cpu_share,
    )
    process = context.Process(
        target=run_trainer,
        args=(theirs, *arguments, *limits),
        name=f"trainer-{settings.node}",
        daemon=True,
    )
    process.start()
    theirs.close()
    return process, ours


def node_of(settings: VehicleSettings) -> Node:
    """Describe the node to its task."""
    return Node(
        id=settings.node,
        labels=settings.labels,
        data_directory=settings.directory / "data",
        seed=settings.seed,
    )


def run_trainer(
    pipe: Connection,
    task: str,
    node: Node,
    step_seconds_min: float,
    cpu_share: float | None,
    nice: int,
    memory_mib: int | None,
) -> None:
    """Be a trainer process: the agent ends it by closing the pipe, not a Ctrl-C in the terminal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent()
    os.nice(nice)
    if memory_mib is not None:
        limit = memory_mib << 20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    from hetertrain_vehicle.trainer import serve

    serve(pipe, task, node, step_seconds_min, cpu_share)


def _end_with_parent() -> None:
    """Be killed when the agent dies: one that is paused would not notice that its pipe closes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
