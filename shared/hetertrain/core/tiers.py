"""The classes of link bandwidth, what each allows, and which one a link is in today.

A tier decides the byte budget of an update, the size of a chunk and how many chunks may be on their
way. The defaults span NB-IoT to fibre; a chunk takes at most about half a second of its tier's
link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field


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

RISE = 0.8
"""A link is in a tier when it carries this share of the tier's rate; updates take half of it."""
FALL = 0.5
"""A link has left its tier when it carries less than this share of the tier's rate. What lies
between is no reason to move, so a rate near a border does not make a node flap."""
VOTES = 2
SURE_CHUNKS = 4
"""A measurement over so many chunks counts for two votes."""
SMOOTHING = 0.5


@dataclass(slots=True)
class BandwidthEstimator:
    """Proposes the tier that a link is in, from the goodput of real transfers.

    It takes two measurements that say the same, or one over several chunks: never one lucky chunk.
    """

    tiers: Mapping[str, Tier]
    """By name, in any order."""
    tier: Tier
    """The tier in use."""
    goodput_bits_per_second: float = 0.0
    """The moving average, for people; 0: nothing measured yet."""
    _direction: int = 0
    """Whether what was measured last asks for a faster (1) or a slower tier (-1)."""
    _agreeing: deque[float] = field(default_factory=lambda: deque(maxlen=VOTES))
    """What was measured last, in a row, in that direction."""
    _votes: int = 0

    def measured(self, bits_per_second: float, num_chunks: int) -> Tier:
        """Take the goodput over ``num_chunks``; return the tier that the link is in."""
        before = self.goodput_bits_per_second or bits_per_second
        self.goodput_bits_per_second = before + SMOOTHING * (bits_per_second - before)
        direction = self._direction_of(bits_per_second)
        if direction != self._direction:
            self.settle(self.tier)
            self._direction = direction
        if direction == 0:
            return self.tier
        self._agreeing.append(bits_per_second)
        self._votes += VOTES if num_chunks >= SURE_CHUNKS else 1
        if self._votes < VOTES:
            return self.tier
        # No further than all agree on.
        agreed = min(self._agreeing) if direction > 0 else max(self._agreeing)
        return self._ordered[max(self._fastest(agreed), 0)]

    def settle(self, tier: Tier) -> None:
        """Begin anew in ``tier``."""
        self.tier = tier
        self._direction = self._votes = 0
        self._agreeing.clear()

    def _direction_of(self, bits_per_second: float) -> int:
        rate = self.tier.rate_bits_per_second
        best = self._fastest(bits_per_second)
        if best >= 0 and self._ordered[best].rate_bits_per_second > rate:
            return 1
        has_slower = self._ordered[0].rate_bits_per_second < rate
        return -1 if has_slower and bits_per_second < FALL * rate else 0

    @property
    def _ordered(self) -> list[Tier]:
        return sorted(self.tiers.values(), key=lambda tier: tier.rate_bits_per_second)

    def _fastest(self, bits_per_second: float) -> int:
        """Return the rank of the fastest tier that so much goodput carries; -1: none."""
        able = (t for t in self._ordered if bits_per_second >= RISE * t.rate_bits_per_second)
        return sum(1 for _ in able) - 1
