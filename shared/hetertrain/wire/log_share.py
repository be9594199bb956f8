"""How a node answers who asks for the end of its log: if its owner lets it, seldom, and never much.

Pure: the lines come from a function, the time is given. Whether the request is the control plane's
is looked at before.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetertrain.wire.messages import LOG_LINE_CHARACTERS_MAX, LOG_LINES_MAX, LogLines, LogRequest

ANSWER_SECONDS_MIN = 2.0
"""Requests that come faster are not answered."""
LINES_BYTES_MAX = 56 << 10
"""Of all lines together, as UTF-8: a frame of them is less than 64 KiB."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@dataclass(slots=True)
class LogShare:
    """A node's last lines, for the control plane."""

    read: Callable[[], Sequence[str]] | None = None
    """Returns them, the newest last; None: the node's owner does not share them."""
    _number: int = -1
    """Of the newest request that was answered."""
    _answered_at: float = -math.inf

    def answer(self, request: LogRequest, now: float) -> LogLines | None:
        """Return the answer; None: it was asked a moment ago, or this is an old request."""
        if request.number <= self._number or now < self._answered_at + ANSWER_SECONDS_MIN:
            return None
        self._number, self._answered_at = request.number, now
        lines = () if self.read is None else bounded(self.read())
        return LogLines(
            node=request.node, number=request.number, is_shared=self.read is not None, lines=lines
        )


def bounded(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the newest lines that may travel, without what is no text in them."""
    kept: list[str] = []
    room_bytes = LINES_BYTES_MAX
    for line in reversed(lines[-LOG_LINES_MAX:]):
        # A file's name may hold half a character, which no text on the wire can.
        whole = line[:LOG_LINE_CHARACTERS_MAX].encode("utf-8", "replace")
        room_bytes -= len(whole) + 3  # Each has a head of its own.
        if room_bytes < 0:
            break
        kept.append(_CONTROL.sub(" ", whole.decode()))
    return tuple(reversed(kept))
