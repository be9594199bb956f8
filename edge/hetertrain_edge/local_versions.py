"""When a gateway whose cloud is out of reach makes a version for its own cell.

Its rhythm is that of the cloud's cuts, counted from the last one it made: enough nodes' updates, or
a time since the first. The model itself is the combiner's (``local_cut``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from hetertrain.core.policy import SyncPolicy


@dataclass(slots=True)
class LocalVersions:
    """What has happened in the cell since the last local version."""

    after_seconds: float | None = None
    """How long the cloud must have been out of reach; None: no local versions are made."""
    number: int = 0
    """Of the newest one on the cloud's present version; 0: there is none."""
    _nodes: set[str] = field(default_factory=set)
    """Who has worked since."""
    _first_at: float = math.inf

    def worked(self, nodes: Iterable[str], now: float) -> None:
        """Note whose updates were collected."""
        self._nodes.update(nodes)
        if self._nodes:
            self._first_at = min(self._first_at, now)

    def due_at(self, policy: SyncPolicy, num_active: int, down_since: float | None) -> float:
        """Return when to make the next one; infinite where there is no reason to.

        ``down_since``: when the link to the cloud broke; None: it stands.
        """
        if self.after_seconds is None or down_since is None or not self._nodes:
            return math.inf
        is_enough = len(self._nodes) >= policy.nodes_for_cut(num_active)
        at = self._first_at if is_enough else self._first_at + policy.cut_seconds
        return max(at, down_since + self.after_seconds)

    def made(self) -> int:
        """Begin to count anew; return the number of the one that is made now."""
        self._nodes.clear()
        self._first_at = math.inf
        self.number += 1
        return self.number
