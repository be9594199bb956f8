"""A training loop of the user's own, in any framework, as a node of the fleet.

::

    with hetertrain.join("job", initial_arrays, config="vehicle.toml") as session:
        for checkpoint in session:
            ...train on checkpoint.arrays, about checkpoint.steps steps...
            session.publish(arrays, examples=n, steps=k)

The session starts the vehicle's agent as a process of its own and takes the trainer's part towards
it: each checkpoint is an order, each ``publish`` the report to it. So a loop has all that a managed
task has (outbox, error feedback, tiers, budgets, reconnects), and however long it computes, the
agent's heartbeat goes on. Nothing here has a thread, and a session is for one.
"""

from __future__ import annotations

import logging
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np
from pydantic import SecretStr

from hetertrain.arrays import Array, Arrays, check_arrays, layout_of_arrays
from hetertrain.config import PREFIX, SECRET_WORDS, flag_name
from hetertrain.core.layout import Integers, Role
from hetertrain.core.metrics import check_metrics
from hetertrain.errors import AgentError, SettingsError, TrainError
from hetertrain.transport.pipe import TrainerEnd
from hetertrain.wire.messages import TrainCommand, TrainedReport, TrainerReady, TrainFailed

END_SECONDS = 15.0
"""How long the agent may take to end before it is killed."""
LOOK_SECONDS = 1.0
"""How often a waiting session looks whether its agent lives."""
NOTICE_SECONDS = 30.0
"""Who waits so long is told what the agent last said."""
LAST_WORDS_BYTES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Where to train on from."""

    arrays: dict[str, Array]
    """The whole model, in the dtypes that ``join`` was given; the caller's own to change. It is the
    fleet's newest version with what this node learnt beyond it.
    """
    version: int
    """The fleet's version that this node is on."""
    is_new_version: bool
    """Whether that is another one than last time."""
    steps: int
    """How many steps the agent would take before the next ``publish``: about a quarter second's."""
    is_fresh: bool
    """A synchronisation has ended: the optimiser's momentum is to be forgotten."""
    wants_metrics: bool
    """The job asks what ``arrays`` measure on the node's own held-out data."""


def join(
    job: str,
    initial_arrays: Arrays,
    *,
    config: Path | str | None = None,
    buffers: Sequence[str] = (),
    local: Sequence[str] = (),
    label: str = "",
    timeout_seconds: float | None = None,
    agent_log: Path | str | None = None,
    **settings: object,
) -> Session:
    """Return a session of a job, to be used in ``with``.

    ``initial_arrays`` say what the model's arrays are; of their values only those that ``local``
    names count, for version 0 is the cloud's. ``buffers`` and ``local`` are patterns of names
    (``"*.running_mean"``), the same on all nodes. ``label`` says in a word what is particular to
    the node's data. An iteration that waits longer than ``timeout_seconds`` fails; None: it waits
    as long as the job has nothing to do. The agent logs to the end of the file ``agent_log``.

    ``settings`` are the agent's, as ``node="car-1"`` or ``broker_port=1884``; they come before the
    environment's and those of the file ``config`` (``hetertrain config show vehicle`` lists them).

    Raises:
        LayoutError: the arrays are not a model's.
    """
    return Session(
        initial_arrays,
        buffers=buffers,
        local=local,
        label=label,
        timeout_seconds=timeout_seconds,
        agent=AgentProcess(job, config, agent_log, settings),
    )


class Session:
    """A node at work on a job: an iterator of checkpoints without end."""

    def __init__(
        self,
        initial_arrays: Arrays,
        *,
        buffers: Sequence[str],
        local: Sequence[str],
        label: str,
        timeout_seconds: float | None,
        agent: AgentProcess,
    ) -> None:
        self._layout = layout_of_arrays(initial_arrays, buffers, local)
        self._dtypes = {name: np.asarray(array).dtype for name, array in initial_arrays.items()}
        self._local = {
            place.name: np.array(initial_arrays[place.name])
            for place in self._layout.places
            if place.role is Role.LOCAL
        }
        self._integers: Integers = np.zeros(self._layout.integer_size, np.int64)
        self._label = label
        self._timeout_seconds = math.inf if timeout_seconds is None else timeout_seconds
        self._agent = agent
        self._pipe: TrainerEnd | None = None
        self._order: TrainCommand | None = None
        """What is to be reported on."""
        self._version = -1
        self._is_interrupted = False
        self._began = self._cpu_began = 0.0

    def __enter__(self) -> Self:
        pipe = TrainerEnd(self._agent.start(), self._layout.size)
        self._pipe = pipe
        ready = TrainerReady(
            examples=0, layout=self._layout.digest, size=self._layout.size, label=self._label
        )
        with suppress(OSError):  # An agent that has ended already is noticed by the iteration.
            pipe.ready(ready)
        return self

    def __exit__(
        self,
        error_class: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pipe = self._started()
        self._pipe = None
        try:
            if isinstance(error, Exception) and not isinstance(error, AgentError):
                self._report_failure(pipe, error)
        finally:
            self._agent.stop()
            pipe.close()

    def _report_failure(self, pipe: TrainerEnd, error: Exception) -> None:
        """Tell the agent, which tells the fleet and ends."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        failed = TrainFailed(
            error=type(error).__name__[:500], message=str(error)[:500], peak_mib=peak
        )
        with suppress(OSError):
            pipe.fail(failed)
            self._agent.wait(END_SECONDS)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Checkpoint:
        """Wait for what to train on.

        Raises:
            AgentError: the agent has ended, or ``timeout_seconds`` have passed.
        """
        if self._order is not None:
            self._report(steps=0)
        order = self._await_order()
        if order.has_start:
            self._integers = np.asarray(order.integers, np.int64)
        checkpoint = Checkpoint(
            arrays=self._arrays(),
            version=order.version,
            is_new_version=order.version != self._version,
            steps=order.steps,
            is_fresh=order.is_fresh,
            wants_metrics=order.measures,
        )
        self._order, self._version = order, order.version
        self._is_interrupted = False
        self._began, self._cpu_began = time.monotonic(), time.process_time()
        return checkpoint

    @property
    def is_due(self) -> bool:
        """Whether the agent waits for ``publish``: a version came, or a synchronisation began. An
        inner loop may end then; one that does not only answers later.
        """
        pipe = self._started()
        if self._order is None:
            return False
        with suppress(EOFError, OSError):
            if not self._is_interrupted and pipe.poll():
                pipe.receive()  # All that can come while an order is open is an interruption.
                self._is_interrupted = True
            return self._is_interrupted
        return True  # The agent has ended: the next call says so.

    def publish(
        self,
        arrays: Arrays,
        *,
        examples: int,
        steps: int,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Hand over what the loop made of the checkpoint, once, after any number of ``steps``.

        ``examples`` says how many training examples the node holds: that is its weight. ``metrics``
        are what the checkpoint's arrays measured, where it ``wants_metrics``; else they are left
        out. Wrong arrays are refused before anything of them is sent, and may be published right.

        Raises:
            AgentError: the agent has ended.
            LayoutError: an array is missing, is one too many, or has another shape or dtype.
            TrainError: a number is not finite or negative, or there is no checkpoint to answer.
        """
        pipe, order = self._started(), self._order
        if order is None:
            raise TrainError("publish answers a checkpoint, once: take the next one first")
        if examples < 1 or steps < 0:
            raise TrainError(
                f"publish takes examples >= 1 and steps >= 0, got {examples} and {steps}"
            )
        checked = _checked(metrics) if metrics is not None and order.measures else {}
        check_arrays(self._layout, arrays)
        plain = {name: np.asarray(array) for name, array in arrays.items()}
        _, self._integers = self._layout.flatten(plain, pipe.vector)
        self._local = {name: np.array(plain[name]) for name in self._local}
        self._report(steps=int(steps), examples=int(examples), metrics=checked)

    def _report(
        self, *, steps: int, examples: int = 0, metrics: dict[str, float] | None = None
    ) -> None:
        self._order = None
        report = TrainedReport(
            steps=steps,
            seconds=time.monotonic() - self._began,
            loss=0.0,
            integers=tuple(int(i) for i in self._integers),
            metrics=metrics or {},
            cpu_seconds=max(0.0, time.process_time() - self._cpu_began),
            examples=examples,
        )
        try:
            self._started().report(report)
        except OSError as error:
            raise self._agent.error() from error

    def _await_order(self) -> TrainCommand:
        pipe = self._started()
        began = time.monotonic()
        notice_at = began + NOTICE_SECONDS
        while True:
            now = time.monotonic()
            remaining = began + self._timeout_seconds - now
            try:
                if pipe.poll(max(0.0, min(LOOK_SECONDS, remaining))):
                    message = pipe.receive()
                    if isinstance(message, TrainCommand):
                        return message
                    continue
            except (EOFError, OSError) as error:
                raise self._agent.error() from error
            if not self._agent.is_alive:
                raise self._agent.error()
            if remaining <= 0:
                raise AgentError(
                    f"there was nothing to do for {self._timeout_seconds:g} s; the agent says: "
                    f"{self._agent.last_line()}"
                )
            if now >= notice_at:
                notice_at = math.inf
                said = self._agent.last_line()
                logging.getLogger("hetertrain").warning("waits for a model; agent: %s", said)

    def _arrays(self) -> dict[str, Array]:
        vector = self._started().vector
        found = self._layout.unflatten(vector, self._integers) | self._local
        return {name: found[name].astype(dtype) for name, dtype in self._dtypes.items()}

    def _started(self) -> TrainerEnd:
        if self._pipe is None:
            raise AgentError("the session is not at work: use it in 'with hetertrain.join(…)'")
        return self._pipe


class AgentProcess:
    """The agent of a session."""

    def __init__(
        self,
        job: str,
        config: Path | str | None,
        log: Path | str | None,
        settings: Mapping[str, object],
    ) -> None:
        self._arguments = ["--job", job]
        if config is not None:
            self._arguments += ["--config", str(config)]
        self._secrets: dict[str, str] = {}
        for name, value in settings.items():
            if name.endswith(SECRET_WORDS) and value is not None:
                text = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
                self._secrets[f"{PREFIX}VEHICLE_{name}".upper()] = text
            else:
                self._arguments += _flags(name, value)
        self._log_path = log
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Connection:
        """Start it; return the trainer's end of its pipe.

        Raises:
            SettingsError: the log cannot be opened.
        """
        if self._process is not None:
            raise AgentError("a session is used once: join again")
        self._log, level = self._open_log()
        ours, theirs = Pipe()
        command = [sys.executable, "-P", "-m", "hetertrain", "vehicle", "--log-level", level]
        command += ["--trainer-fd", str(theirs.fileno()), *self._arguments]
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603  # ours
                command,
                pass_fds=(theirs.fileno(),),
                env=os.environ | self._secrets,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                # Ctrl-C is for the loop, which then ends the agent.
                start_new_session=True,
            )
        return ours

    def _open_log(self) -> tuple[IO[bytes], str]:
        """Return where the agent logs to, and what; without a file only what explains its end."""
        if self._log_path is None:
            return tempfile.TemporaryFile("a+b"), "warning"
        try:
            return Path(self._log_path).open("a+b"), "info"
        except OSError as error:
            raise SettingsError(f"cannot open agent_log {self._log_path}: {error}") from error

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    def wait(self, seconds: float) -> None:
        """Wait for its end for so long."""
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)

    def error(self) -> AgentError:
        """Return what its end means."""
        self.wait(END_SECONDS)
        code = None if self._process is None else self._process.poll()
        how = "closed its pipe" if code is None else f"ended with exit code {code}"
        return AgentError(f"the agent {how}: {self.last_line()}", code, self.last_words())

    def last_line(self) -> str:
        """Return the last line of its log."""
        words = self.last_words()
        return words.splitlines()[-1] if words else "nothing"

    def last_words(self) -> str:
        """Return the end of its log."""
        if self._log is None:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), LAST_WORDS_BYTES, max(0, size - LAST_WORDS_BYTES))
        return tail.decode(errors="replace").strip()

    def stop(self) -> None:
        """End it: ask, wait, and kill it where it does not listen."""
        if self._process is None or self._log is None:
            return
        try:
            self._process.terminate()
            self.wait(END_SECONDS)
        finally:
            if self.is_alive:
                self._process.kill()
                self.wait(END_SECONDS)
            self._log.close()


def _flags(name: str, value: object) -> list[str]:
    """Return a setting as the agent's command line has it."""
    flag = flag_name(name)
    match value:
        case None:
            return []
        case bool():
            return [flag if value else flag.replace("--", "--no-", 1)]
        case Mapping():
            return [f"{flag}={key}={each}" for key, each in value.items()]
        case list() | tuple():
            return [f"{flag}={each}" for each in value]
        case _:
            return [f"{flag}={value}"]


def _checked(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics that the fleet can take.

    Raises:
        TrainError: see ``check_metrics``; or a value is not finite.
    """
    found = check_metrics(metrics)
    for name, value in found.items():
        if not math.isfinite(value):
            raise TrainError(f"metric {name!r} is {value}: give a finite number, or leave it out")
    return found
