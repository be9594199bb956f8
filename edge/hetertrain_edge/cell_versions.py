"""The versions that a cell is served: the cloud's newest, after a restart from its copy on disk, or
the cell's own while the cloud is out of reach.

A version of the cell's own has the number of the cloud's that it stands on, since what starts from
it is to the cloud as what starts from that; it is made anew from that each time (``local_cut``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from hetertrain.cell import Cell
from hetertrain.core.combiner import Combiner
from hetertrain.core.update import Checkpoint
from hetertrain.logging import Logger
from hetertrain.transport.inbox import Inbox
from hetertrain.wire.events import ModelReceived
from hetertrain_edge.kept_model import KeptModel
from hetertrain_edge.local_versions import LocalVersions

LOCAL_NOTED = 16
"""Of so many local versions the first is noted durably."""


class CellVersions:
    """What one gateway's cell is served; the thread that owns the driver owns it."""

    def __init__(
        self,
        cell: Cell,
        inbox: Inbox,
        directory: Path,
        log: Logger,
        local_after_seconds: float | None,
    ) -> None:
        """``local_after_seconds``: how long the cloud must be out of reach before the cell has
        versions of its own; None: it never has.
        """
        self._cell = cell
        self._inbox = inbox
        self._log = log
        self._kept = KeptModel(directory / "model.frame", log)
        self._local = LocalVersions(local_after_seconds)
        self._model: ModelReceived | None = None
        """The newest version of the cloud."""

    @property
    def makes_local(self) -> bool:
        """Whether the cell may have versions of its own."""
        return self._local.after_seconds is not None

    @property
    def local_number(self) -> int:
        """Of the newest one on the cloud's present version; 0: there is none."""
        return self._local.number

    def recover(self, combiner: Combiner, now: float) -> ModelReceived | None:
        """Serve the version that was kept, or the cell's own on it where there was one; return the
        kept one. None: there is none of this run.
        """
        model = self._kept.load()
        if model is None or model.terms.lineage != combiner.gate.lineage:
            return None
        self._model = model
        combiner.serve(model.version, model.terms.statistics)
        noted = int(self._inbox.noted("local") or 0)
        # At least as many as there were.
        self._local.number = noted + LOCAL_NOTED if noted else 0
        self._local.worked(combiner.nodes(), now)
        if self._local.number and self.makes_local:
            self.make_local(combiner, now)
        else:
            self._serve(model, now)
        return model

    def take(self, model: ModelReceived, now: float) -> None:
        """Serve a version of the cloud; it takes the place of the cell's own."""
        self._model = model
        self._kept.take(model, now)
        if self._local.number:
            self._local.number = 0
            self._inbox.note("local", "0")
        self._serve(model, now)

    def _serve(self, model: ModelReceived, now: float) -> None:
        self._cell.release(_checkpoint(model), model.sync, model.terms, now)

    def worked(self, nodes: Iterable[str], now: float) -> None:
        """Note whose updates were collected."""
        self._local.worked(nodes, now)

    def local_due_at(self, combiner: Combiner | None, down_since: float | None) -> float:
        """Return when to make a version of the cell's own; infinite where there is no reason to."""
        if combiner is None or self._model is None:
            return math.inf
        return self._local.due_at(combiner.policy, combiner.members.num_active, down_since)

    def make_local(self, combiner: Combiner, now: float) -> None:
        """Serve what the newest version and all work that the cloud has not got give together."""
        model = self._model
        assert model is not None, "it was received or kept"
        number = self._local.made()
        if not combiner.has_work:
            return
        if number % LOCAL_NOTED == 1:
            self._inbox.note("local", str(number))
        made = combiner.local_cut(_checkpoint(model))
        if not np.isfinite(made.vector).all():
            self._log.error("local_version_not_finite", version=made.version, local=number)
            return
        self._cell.release(made, None, replace(model.terms, local=number), now)
        self._log.info("local_version_made", version=made.version, local=number)

    def save(self, now: float) -> None:
        """Have the cloud's newest version on disk."""
        self._kept.save(now)


def _checkpoint(model: ModelReceived) -> Checkpoint:
    return Checkpoint(model.version, model.vector, model.integers)
