"""A limit on the rate of one direction of a link."""

from __future__ import annotations


class TokenBucket:
    """A rate in bytes; a packet may overdraw it, and then all wait until the debt is paid."""

    def __init__(self, rate_bits_per_second: int | None) -> None:
        self._bytes_per_second = rate_bits_per_second / 8 if rate_bits_per_second else None
        self._free_at = 0.0

    def wait_seconds(self, now: float) -> float:
        """Return how long until the next packet may pass."""
        return max(0.0, self._free_at - now)

    def take(self, num_bytes: int, now: float) -> None:
        """Account for one packet."""
        if self._bytes_per_second is not None:
            self._free_at = max(now, self._free_at) + num_bytes / self._bytes_per_second
