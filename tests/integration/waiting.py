"""Waiting for something that real processes will do."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_SECONDS = 60.0
POLL_SECONDS = 0.1


def poll() -> None:
    """Let some time pass."""
    time.sleep(POLL_SECONDS)


def wait_until(
    condition: Callable[[], bool],
    what: str,
    *,
    meanwhile: Callable[[], None] = poll,
    seconds: float = WAIT_SECONDS,
) -> None:
    """Return when ``condition`` holds; fail, saying ``what`` was waited for, at the deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for: {what}"
        meanwhile()
