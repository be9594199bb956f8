"""The classes of link bandwidth, and what each allows.

A tier decides the byte budget of an update, the size of a chunk and how many chunks may be on their
way. The defaults span NB-IoT to fibre; a chunk takes at most about half a second of its tier's
link.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tier:
    """A class of link: assumed goodput, chunk size and window."""

    name: str
    rate_bits_per_second: int
    chunk_bytes: int
    window_chunks: int

    def budget_bytes(self, seconds: float, share: float) -> int:
        """Return how many bytes fit into ``share`` of ``seconds`` on this link."""
        return int(self.rate_bits_per_second / 8 * seconds * share)

    def seconds_for(self, num_bytes: int) -> float:
        """Return how long ``num_bytes`` take on this link."""
        return num_bytes * 8 / self.rate_bits_per_second


TIERS: dict[str, Tier] = {
    tier.name: tier
    for tier in (
        Tier("t0", 64_000, 4 * 1024, 1),
        Tier("t1", 512_000, 16 * 1024, 2),
        Tier("t2", 5_000_000, 64 * 1024, 4),
        Tier("t3", 50_000_000, 128 * 1024, 8),
        Tier("t4", 500_000_000, 128 * 1024, 32),
    )
}
"""The default tiers by name, slowest first."""
