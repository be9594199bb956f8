"""How much has crossed a gateway's link to the cloud in this calendar month, over its restarts.

A clock that is not set (before ``CLOCK_SET``) begins no new month.
"""

from __future__ import annotations

import json
import math
from datetime import datetime
from pathlib import Path

from hetertrain.errors import StoreError
from hetertrain.logging import Logger
from hetertrain.transport.files import write_whole

FILE = "traffic.json"
CLOCK_SET = datetime(2026, 1, 1)  # local time, as months are
SAVE_SECONDS = 60.0
"""How much of the count a power cut may lose: a shorter time would wear the flash out."""


class MonthTraffic:
    """Counts bytes, by the month of the gateway's own clock; one thread owns it."""

    def __init__(self, directory: Path, log: Logger) -> None:
        """Go on from the count in ``directory``; one that cannot be read begins anew."""
        self._path = directory / FILE
        self._log = log
        self._month = ""
        self.num_bytes = 0
        self._counted = 0
        self._save_at = -math.inf
        self._saved: tuple[str, int] = ("", 0)
        try:
            plain = json.loads(self._path.read_bytes())
            self._month, self.num_bytes = str(plain["month"]), int(plain["bytes"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._log.error("traffic_damaged", file=str(self._path), error=str(error)[:200])

    def count(self, total_bytes: int, wall: datetime) -> None:
        """Take the bytes that the link has carried since the gateway's start, at local time
        ``wall``.
        """
        month = f"{wall:%Y-%m}"
        if month != self._month and (wall >= CLOCK_SET or not self._month):
            self._month, self.num_bytes = month, 0
        self.num_bytes += total_bytes - self._counted
        self._counted = total_bytes

    def save(self, now: float) -> None:
        """Keep the count, if it has changed and it is time; what cannot be written is logged."""
        state = (self._month, self.num_bytes)
        if now < self._save_at or state == self._saved:
            return
        self._save_at = now + SAVE_SECONDS
        plain = {"month": self._month, "bytes": self.num_bytes}
        try:
            write_whole(self._path, (json.dumps(plain).encode(),))
        except StoreError as error:
            self._log.error("traffic_failed", error=str(error))
        else:
            self._saved = state
