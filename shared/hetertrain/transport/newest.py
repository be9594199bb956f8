"""Keeps over a restart which version a node held last, so that it takes no older one after it.

It is a note in the node's outbox, written when it changed, and seldom: who loses the last seconds
of it takes a version that is older by those.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from hetertrain.transport.outbox import Outbox
from hetertrain.wire.events import Newest
from hetertrain.wire.uplink import Uplink

WRITE_SECONDS = 10.0
"""A changed note waits so long for the next write at most."""


class NewestNote:
    """The note of one node and job; whoever drives the node's uplink calls ``tick``."""

    def __init__(self, outbox: Outbox, uplink: Uplink) -> None:
        """Tell the uplink what was noted; it may know better.

        Raises:
            StoreError: the outbox cannot be read.
        """
        self._outbox = outbox
        self._uplink = uplink
        # Each job counts by itself.
        self._name = f"newest {uplink.state.job}"
        noted = outbox.noted(self._name)
        self._noted = None if noted is None else Newest(**json.loads(noted))
        uplink.newest = uplink.newest or self._noted
        self._write_at = 0.0

    def tick(self, now: float) -> None:
        """Write what changed, if it is time.

        Raises:
            StoreError: the disk is full or broken.
        """
        if now >= self._write_at and self._uplink.newest != self._noted:
            self._write_at = now + WRITE_SECONDS
            self.write()

    def write(self) -> None:
        """Write what changed.

        Raises:
            StoreError: the disk is full or broken.
        """
        newest = self._uplink.newest
        if newest is not None and newest != self._noted:
            self._outbox.note(self._name, json.dumps(asdict(newest)))
            self._noted = newest
