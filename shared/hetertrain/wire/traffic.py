"""How many bytes of contents came and went at an aggregator, and how many the same ones would be
without compression.

Contents are updates, partials and versions, with their heads; what carries them (chunk heads,
heartbeats, MQTT, TLS) is not counted. What is broadcast to a tier leaves an aggregator once,
however many nodes receive it, and counts once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FLOAT_BYTES = 4


@dataclass(slots=True)
class Traffic:
    """Sums; whoever counts owns it."""

    uplink_bytes: int = 0
    uplink_dense_bytes: int = 0
    """A gateway's partial stands for all the updates in it."""
    downlink_bytes: int = 0
    downlink_dense_bytes: int = 0

    def resume(self, before: Mapping[str, int]) -> None:
        """Go on from the sums of an earlier life, by field."""
        for name, value in before.items():
            setattr(self, name, value)

    def came(self, num_bytes: int, num_updates: int, num_parameters: int) -> None:
        """Count a content that arrived whole, merged or not."""
        self.uplink_bytes += num_bytes
        self.uplink_dense_bytes += num_updates * num_parameters * FLOAT_BYTES

    def went(self, num_bytes: int, content_bytes: int, num_parameters: int) -> None:
        """Count a part of a content that is sent, for the first time or again."""
        self.downlink_bytes += num_bytes
        self.downlink_dense_bytes += round(
            num_bytes / max(content_bytes, 1) * num_parameters * FLOAT_BYTES
        )
