"""What the two ends of a conversation tell their drivers: frames to publish, and what happened, to
a node (``uplink``) and to its aggregator (``downlink``).
"""

from __future__ import annotations

from dataclasses import dataclass

from hetertrain.core.events import Pulled
from hetertrain.core.gate import Verdict
from hetertrain.core.layout import Integers, Vector
from hetertrain.core.tiers import Tier
from hetertrain.wire.contents import JobTerms
from hetertrain.wire.messages import NodeState


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One frame to publish."""

    topic: str
    frame: bytes
    retain: bool = False
    token: int | None = None
    """Where set, the driver reports when the broker has taken the frame."""


@dataclass(frozen=True, slots=True)
class ModelReceived:
    """A version, whole and decoded."""

    version: int
    vector: Vector
    integers: Integers
    sync: int | None
    terms: JobTerms


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest version that a node has held: what is much older was sent once, and is sent again.

    A driver keeps it over a restart.
    """

    lineage: str
    version: int
    max_lag: int
    """A tier may be so many versions behind."""

    @classmethod
    def of(cls, model: ModelReceived) -> Newest:
        """Describe a model that is held."""
        return cls(model.terms.lineage, model.version, model.terms.policy.max_lag)

    def newer(self, other: Newest | None) -> Newest:
        """Return the newer of two: what is taken meanwhile may be a little older."""
        if other is None or (self.lineage, self.version) >= (other.lineage, other.version):
            return self
        return other

    def may_follow(self, lineage: str, version: int) -> bool:
        """Tell whether a version may come now. A rollback is a newer lineage."""
        if lineage != self.lineage:
            return lineage > self.lineage
        return version >= self.version - self.max_lag


@dataclass(frozen=True, slots=True)
class SyncAnnounced:
    """A synchronisation begins."""

    sync: int
    deadline_seconds: float


@dataclass(frozen=True, slots=True)
class JobOrdered:
    """An operator wants the job's nodes to train, or to rest."""

    state: str
    frame: bytes
    """As it came: a gateway passes it on."""
    train_when: tuple[str, ...] = ()
    send_when: tuple[str, ...] = ()

    @property
    def trains(self) -> bool:
        """Whether nodes are to train."""
        return self.state == "running"


@dataclass(frozen=True, slots=True)
class Settled:
    """The verdict on the content that was offered."""

    verdict: Verdict
    content: bytes
    has_moved: bool = False
    """It was offered to another cell's aggregator before, which may have taken it."""


@dataclass(frozen=True, slots=True)
class FrameRefused:
    """A frame that could not be used, by reason."""

    reason: str
    detail: str
    node: str = ""
    """On whose topic it came; empty: not known, or not a node's."""


@dataclass(frozen=True, slots=True)
class TierChanged:
    """The node is in another tier: its updates have another byte budget."""

    tier: Tier


UplinkEvent = (
    ModelReceived | SyncAnnounced | Pulled | JobOrdered | Settled | TierChanged | FrameRefused
)


@dataclass(frozen=True, slots=True)
class UplinkReady:
    """What to send, what happened, and when to call ``tick``."""

    send: tuple[Outgoing, ...]
    events: tuple[UplinkEvent, ...]
    wake_at: float
    resubscribes: bool = False
    """``subscriptions`` have changed: tell the connection before it is given anything to send."""


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """A node's heartbeat."""

    state: NodeState


@dataclass(frozen=True, slots=True)
class NodeGone:
    """A node's last will, or its silence."""

    node: str


@dataclass(frozen=True, slots=True)
class FlushReported:
    """A node has nothing (more) to flush."""

    node: str
    sync: int


@dataclass(frozen=True, slots=True)
class ContentReceived:
    """A whole content of a node: an update or a partial, still to be examined."""

    node: str
    seq: int
    content: bytearray
    relays: bool = False
    """The node announced it as other nodes' work, which it may send."""


@dataclass(frozen=True, slots=True)
class TransferDeferred:
    """There is no room for what a node announces: it keeps it, and asks again."""

    node: str
    size_bytes: int


DownlinkEvent = (
    NodeSeen | NodeGone | FlushReported | ContentReceived | TransferDeferred | FrameRefused
)


@dataclass(frozen=True, slots=True)
class DownlinkReady:
    """What to send, what happened, and when to call ``tick``."""

    send: tuple[Outgoing, ...]
    events: tuple[DownlinkEvent, ...]
    wake_at: float
