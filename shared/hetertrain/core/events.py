"""What happens to an aggregator, of the fleet or of a cell; what it asks its nodes for, and what
its journal keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hetertrain.core.policy import Statistics, SyncPolicy, WeightPolicy
from hetertrain.core.update import Partial, Update


@dataclass(frozen=True, slots=True)
class UpdateArrived:
    """A whole update of a node."""

    update: Update
    content: bytes | bytearray = field(default=b"", compare=False, repr=False)
    """How it came, for the journal."""


@dataclass(frozen=True, slots=True)
class PartialArrived:
    """A whole partial of a gateway."""

    node: str
    seq: int
    sync: int | None
    partial: Partial
    lineage: str = ""
    content: bytes | bytearray = field(default=b"", compare=False, repr=False)
    """How it came, for the journal."""


@dataclass(frozen=True, slots=True)
class BundleArrived:
    """Updates that a gateway accepted and passes on one by one, so that each is examined here."""

    node: str
    seq: int
    sync: int | None
    updates: tuple[Update, ...]
    statistics: Mapping[int, Statistics]
    """Of their base versions, as the gateway had them from us: we may have forgotten some."""
    lineage: str = ""
    content: bytes | bytearray = field(default=b"", compare=False, repr=False)
    """How it came, for the journal."""


ContentArrived = UpdateArrived | PartialArrived | BundleArrived


@dataclass(frozen=True, slots=True)
class SyncOrdered:
    """An operator asks for a synchronisation now."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class SyncNotice:
    """Asks every node to flush and to hold, for at most ``deadline_seconds`` from its arrival."""

    sync: int
    deadline_seconds: float


@dataclass(frozen=True, slots=True)
class Pulled:
    """The aggregator asks for what there is, however little."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """What the machine waits for: a stable code and a sentence."""

    code: str
    text: str


def waiting_for_updates(need: int, have: int) -> Waiting:
    """Say that updates of more nodes are needed for what comes next."""
    nodes = "node" if need == 1 else "nodes"
    return Waiting("updates", f"updates of {need} {nodes}, {have} present")


@dataclass(frozen=True, slots=True)
class CutRecord:
    """The journal's mark that all accepted before it became ``version``."""

    version: int
    sync: int | None = None
    """The synchronisation that this cut ended."""


@dataclass(frozen=True, slots=True)
class TermsRecord:
    """The journal's mark that from here on the job goes by other terms."""

    policy: SyncPolicy
    weights: WeightPolicy
    lineage: str

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> TermsRecord:
        """Read what ``asdict`` wrote; what another release does not know is left out."""
        policy = SyncPolicy(**_known(SyncPolicy, plain["policy"]))
        weights = WeightPolicy(**_known(WeightPolicy, plain["weights"]))
        return cls(policy, weights, plain["lineage"])


def _known(kind: type[SyncPolicy | WeightPolicy], plain: Mapping[str, Any]) -> dict[str, Any]:
    return {f.name: plain[f.name] for f in fields(kind) if f.name in plain}


Record = ContentArrived | CutRecord | TermsRecord
