"""A gateway with data of its own trains too: by an in-vehicle agent beside it, a node of its cell.

The agent is a process of its own, started as on a vehicle, so the gateway needs no task and no
torch, and whatever the task does, the gateway goes on. It has a name and, where nodes are known by
certificates, a credential of its own: with the gateway's it could speak for the whole cell. It is
started again where it ends, ever less often, and ends with the gateway, however that ends.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from multiprocessing.process import BaseProcess

from hetertrain.logging import Logger
from hetertrain.service import end_with_parent

RESTART_SECONDS_MIN, RESTART_SECONDS_MAX = 1.0, 60.0
SETTLED_SECONDS = 60.0
"""An agent that lived so long fails for the first time."""
STOP_SECONDS = 15.0


class OwnWork:
    """The agent of one gateway; the thread that owns it calls ``look`` every second or so."""

    def __init__(self, arguments: Sequence[str], log: Logger) -> None:
        """``arguments``: those of ``hetertrain vehicle``."""
        self.state = "own work starts"
        """For people."""
        self._arguments = tuple(arguments)
        self._log = log
        self._context = multiprocessing.get_context("spawn")
        self._process: BaseProcess | None = None
        self._started_at = 0.0
        self._start_at = 0.0
        self._failures = 0
        """In a row."""
        self._last_code: int | None = None

    def look(self, now: float) -> None:
        """Start the agent where it does not run, and is due."""
        if self._process is not None and not self._process.is_alive():
            self._note_end(self._process.exitcode, now)
        if self._process is None and now >= self._start_at:
            self._start(now)
        if self._process is not None and now - self._started_at > SETTLED_SECONDS:
            self.state = "trains too"

    def _start(self, now: float) -> None:
        self._process = self._context.Process(
            target=be_vehicle, args=(self._arguments,), name="own-work"
        )
        self._process.start()
        self._started_at = now
        self.state = "trains too"
        if self._failures:
            self.state += f", again since it ended with code {self._last_code}, its log says why"
        self._log.info("own_work_started", pid=self._process.pid)

    def _note_end(self, code: int | None, now: float) -> None:
        assert self._process is not None, "it was started"
        self._process.close()
        self._process = None
        has_settled = now - self._started_at > SETTLED_SECONDS
        self._failures = 1 if has_settled else self._failures + 1
        self._last_code = code
        wait = min(RESTART_SECONDS_MAX, RESTART_SECONDS_MIN * 2.0 ** min(self._failures - 1, 16))
        self._start_at = now + wait
        self.state = f"own work ended with code {code}, its log says why; again in {wait:g} s"
        self._log.error("own_work_ended", code=code, restart_seconds=wait)

    def stop(self) -> None:
        """End the agent: ask, and kill it where it does not listen."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        process.join(STOP_SECONDS)
        if process.is_alive():
            self._log.error("own_work_killed", pid=process.pid)
            process.kill()
            process.join(STOP_SECONDS)


def be_vehicle(arguments: Sequence[str]) -> None:
    """Be the agent's process."""
    end_with_parent()
    # The vehicle's part is another one: it is known by its command alone.
    from hetertrain.cli import main

    raise SystemExit(main(["vehicle", *arguments]))
