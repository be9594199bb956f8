"""Logging for all parts: structlog, one event name per fact, fields after; secrets are masked
whoever logs them. The last lines are kept in memory, as they went out.
"""

from __future__ import annotations

import logging as standard_logging
import re
import sys
from collections import deque
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any, TextIO, cast

# structlog would load rich, for tracebacks that nobody asks for: 3 MiB of every agent's memory.
_HAS_RICH = "rich" in sys.modules
if not _HAS_RICH:
    sys.modules["rich"] = cast(Any, None)
import structlog  # noqa: E402

if not _HAS_RICH:
    del sys.modules["rich"]

Logger = structlog.typing.FilteringBoundLogger
"""Logs events with fields."""
_SECRETS = ("password", "token", "secret", "key_pem")
LINES_KEPT = 200
LINE_CHARACTERS_KEPT = 500
"""So that what is kept takes some ten KiB, a few hundred at most."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_lines: deque[str] = deque(maxlen=LINES_KEPT)


def configure(level: str = "info", *, json: bool = False) -> None:
    """Log to standard error from ``level`` on: for people, or one JSON object per line."""
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _mask_secrets,
            structlog.processors.format_exc_info,
            _Keeping(renderer),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            standard_logging.getLevelNamesMapping()[level.upper()]
        ),
        # Looked up at each use: whoever replaces standard error gets the log.
        logger_factory=lambda *_: structlog.PrintLogger(cast(TextIO, _Unfailing(sys.stderr))),
    )


def last_lines() -> tuple[str, ...]:
    """Return the last lines that this process has logged, the newest last; any thread may ask."""
    return tuple(_lines)


class _Keeping:
    """Renders an event, and keeps its lines."""

    def __init__(self, render: Any) -> None:
        self._render = render

    def __call__(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> Any:
        text = self._render(logger, method, event)
        # Of a traceback longer than all that is kept, the end says what happened.
        for line in _COLOUR.sub("", text).splitlines()[-LINES_KEPT:]:
            _lines.append(line[:LINE_CHARACTERS_KEPT])
        return text


class _Unfailing:
    """A stream for logs: a full disk must not end who reports it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            return self._stream.write(text)
        return 0

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def get_logger(**bound: Any) -> Logger:
    """Return a logger with fields that all its events carry."""
    return cast(Logger, structlog.get_logger(**bound))


def silent_logger() -> Logger:
    """Return a logger that says nothing, and costs nothing."""
    silent = structlog.make_filtering_bound_logger(standard_logging.CRITICAL)
    return cast(
        Logger,
        structlog.wrap_logger(None, processors=[], wrapper_class=silent).bind(),
    )


def _mask_secrets(
    _logger: Any, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    for key in event:
        if any(secret in key.lower() for secret in _SECRETS):
            event[key] = "**********"
    return event
