"""What the owner of a vehicle lets training use up: bytes a month by type of link, processor time a
day, room on the disk.

The ledger counts, and keeps the count over restarts. Time comes from the vehicle's own clock, in
its own time zone; a clock that is not set (before ``CLOCK_SET``) begins no new month and no new
day, so that a reset clock gives nothing away.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from hetertrain.logging import Logger
from hetertrain.transport.files import write_whole

FILE = "ledger.json"
ANY = "any"
CLOCK_SET = datetime(2026, 1, 1)  # local time, as the owner's months are
SAVE_SECONDS = 60.0
"""How much of the count a power cut may lose: a shorter time would wear the flash out."""
DISK_SECONDS = 10.0
_DATA = "data"


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be used; what is not named is free."""

    megabytes_per_month: Mapping[str, float] = field(default_factory=dict)
    """By type of link (10**6 bytes, both directions); ``any`` counts all together."""
    processor_seconds_per_day: float | None = None
    disk_mib: float | None = None


class Ledger:
    """Counts what one node uses; one thread owns it."""

    def __init__(self, directory: Path, limits: Limits, log: Logger) -> None:
        """Go on from the count in ``directory``; one that cannot be read begins anew."""
        self._directory = directory
        self._limits = limits
        self._log = log
        self._month = self._day = ""
        self._bytes: dict[str, int] = {}
        self._processor_seconds = 0.0
        self._disk_mib = 0.0
        self._disk_at = self._save_at = -math.inf
        self._is_saved = True
        self._load()

    def _load(self) -> None:
        path = self._directory / FILE
        try:
            plain = json.loads(path.read_bytes())
            self._month, self._day = str(plain["month"]), str(plain["day"])
            self._bytes = {str(kind): int(count) for kind, count in plain["bytes"].items()}
            self._processor_seconds = float(plain["processor_seconds"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._log.error("ledger_damaged", file=str(path), error=str(error)[:200])

    def count_bytes(self, network: str, num_bytes: int, wall: datetime) -> None:
        """Count bytes that crossed a link of this type."""
        if num_bytes:
            self._turn(wall)
            self._bytes[network] = self._bytes.get(network, 0) + num_bytes
            self._is_saved = False

    def count_processor(self, seconds: float, wall: datetime) -> None:
        """Count processor time of training."""
        if seconds:
            self._turn(wall)
            self._processor_seconds += seconds
            self._is_saved = False

    def _turn(self, wall: datetime) -> None:
        """Begin a new month or day."""
        if wall < CLOCK_SET and self._month:
            return
        month, day = f"{wall:%Y-%m}", f"{wall:%Y-%m-%d}"
        if month != self._month:
            self._month, self._bytes = month, {}
        if day != self._day:
            self._day, self._processor_seconds = day, 0.0

    def send_refusal(self, network: str, wall: datetime) -> str:
        """Say why nothing may cross a link of this type; empty: it may."""
        self._turn(wall)
        for kind in (network, ANY):
            limit = self._limits.megabytes_per_month.get(kind)
            if limit is not None and self._used(kind) >= limit * 1e6:
                over = "all links" if kind == ANY else kind
                return f"this month's {limit:g} MB over {over} are used up"
        return ""

    def train_refusal(self, now: float, wall: datetime) -> str:
        """Say why there may be no training; empty: there may."""
        self._turn(wall)
        limit = self._limits.processor_seconds_per_day
        if limit is not None and self._processor_seconds >= limit:
            return f"today's {limit:g} s of processor time are used up"
        room = self._limits.disk_mib
        if room is not None:
            self._measure_disk(now)
            if self._disk_mib > room:
                return f"{self._disk_mib:.0f} MiB of state are over the {room:g} that it may take"
        return ""

    def _measure_disk(self, now: float) -> None:
        if now >= self._disk_at + DISK_SECONDS:
            self._disk_at = now
            self._disk_mib = _state_bytes(self._directory) / (1 << 20)

    @property
    def month_bytes(self) -> int:
        """How many bytes crossed all links this month."""
        return self._used(ANY)

    def _used(self, kind: str) -> int:
        return sum(self._bytes.values()) if kind == ANY else self._bytes.get(kind, 0)

    def shown(self) -> str:
        """Say in a line what is used of what may be."""
        lines = [
            f"{self._used(kind) / 1e6:.1f} of {limit:g} MB over {kind} this month"
            for kind, limit in sorted(self._limits.megabytes_per_month.items())
        ]
        if self._limits.processor_seconds_per_day is not None:
            limit = self._limits.processor_seconds_per_day
            lines.append(f"{self._processor_seconds:.0f} of {limit:g} s of processor time today")
        if self._limits.disk_mib is not None:
            lines.append(f"{self._disk_mib:.0f} of {self._limits.disk_mib:g} MiB of disk")
        return "; ".join(lines)

    def save(self, now: float) -> None:
        """Keep the count, if it has changed and it is time.

        Raises:
            StoreError: the disk is full or broken.
        """
        if self._is_saved or now < self._save_at:
            return
        self._save_at = now + SAVE_SECONDS
        plain = {
            "month": self._month,
            "day": self._day,
            "bytes": self._bytes,
            "processor_seconds": round(self._processor_seconds, 3),
        }
        write_whole(self._directory / FILE, (json.dumps(plain).encode(),))
        self._is_saved = True


def _state_bytes(directory: Path) -> int:
    """Count the bytes of a node's state, without its own data."""
    total = 0
    for root, folders, files in os.walk(directory):
        if Path(root) == directory and _DATA in folders:
            folders.remove(_DATA)
        for name in files:
            try:
                total += (Path(root) / name).stat().st_size
            except FileNotFoundError:
                continue  # It went while we looked.
    return total
