"""Where logs of nodes are asked for: a request goes out, and whoever asked waits for the answer.

::

    nothing ──read──> asked ──answer in time──> answered ──REUSE_SECONDS──> nothing
                        └──ANSWER_SECONDS──> nothing: the node is silent

Who asks while a request is out waits for the same answer, and who asks just after it has the one
that came: nodes answer no more often.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hetertrain.wire.log_share import ANSWER_SECONDS_MIN
from hetertrain.wire.messages import LogLines
from hetertrain_cloud.control.problems import ProblemError

ANSWER_SECONDS = 4.0
REUSE_SECONDS = ANSWER_SECONDS_MIN + 0.5
"""Longer than a node rests between two answers, since those travel."""
WAITING_MAX = 16
"""So many requests of the API may wait at a time: each takes a thread of it."""
FRAME_BYTES_MAX = 64 << 10


@dataclass(slots=True)
class Asked:
    """A request that went out."""

    number: int
    at: float
    done: threading.Event = field(default_factory=threading.Event)
    answer: LogLines | None = None

    def is_over(self, now: float) -> bool:
        """Tell whether another request is to go out."""
        if self.answer is None:
            return now >= self.at + ANSWER_SECONDS
        return now >= self.at + REUSE_SECONDS


class LogDesk:
    """Asks nodes for the end of their logs; any thread may use it."""

    def __init__(
        self,
        send: Callable[[str, int], None],
        clock: Callable[[], float] = time.monotonic,
        first_number: int | None = None,
    ) -> None:
        """``send`` sends a node a request of this number; numbers grow over restarts, by the
        time where no ``first_number`` is given.
        """
        self._send = send
        self._clock = clock
        self._number = int(time.time() * 1000) if first_number is None else first_number
        self._lock = threading.Lock()
        self._room = threading.BoundedSemaphore(WAITING_MAX)
        self._asked: dict[str, Asked] = {}

    def read(self, node: str) -> LogLines:
        """Ask a node, and wait for its answer.

        Raises:
            ProblemError: 504, it did not answer in time; 429, too many wait.
        """
        if not self._room.acquire(blocking=False):
            raise ProblemError(429, "too_often", "many ask for logs at this moment: wait", 5)
        try:
            asked = self._ask(node)
            asked.done.wait(max(0.0, asked.at + ANSWER_SECONDS - self._clock()))
        finally:
            self._room.release()
        if asked.answer is None:
            raise ProblemError(
                504,
                "node_silent",
                f"{node} did not answer within {ANSWER_SECONDS:g} s: ask again; software of an "
                "earlier release does not know how to",
                5,
            )
        return asked.answer

    def _ask(self, node: str) -> Asked:
        with self._lock:
            now = self._clock()
            self._asked = {name: a for name, a in self._asked.items() if not a.is_over(now)}
            asked = self._asked.get(node)
            if asked is not None:
                return asked
            self._number += 1
            asked = self._asked[node] = Asked(self._number, now)
        self._send(node, asked.number)
        return asked

    def take(self, answer: LogLines) -> bool:
        """Take what a node says; False: nobody has asked for it, or it has said it already."""
        with self._lock:
            asked = self._asked.get(answer.node)
            if asked is None or asked.number != answer.number or asked.answer is not None:
                return False
            asked.answer, asked.at = answer, self._clock()
        asked.done.set()
        return True
