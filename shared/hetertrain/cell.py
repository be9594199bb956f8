"""An aggregator's nodes as its driver sees them: the ``Downlink``, its connection, and what was
refused.

Cloud and gateway are both aggregators, of the fleet and of a cell. Either owns one ``Cell``: it
turns frames into the events of the core's machines, sends what the machines answer, and counts and
logs every refusal with its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from hetertrain.core.events import (
    BundleArrived,
    ContentArrived,
    PartialArrived,
    SyncNotice,
    UpdateArrived,
)
from hetertrain.core.gate import Finding, Outcome, Reason, Verdict
from hetertrain.core.members import FlushSettled, MemberGone, MemberSeen
from hetertrain.core.update import Checkpoint
from hetertrain.errors import FrameError, TransportError
from hetertrain.logging import Logger
from hetertrain.transport import mqtt
from hetertrain.wire.contents import JobTerms, unpack_arrival
from hetertrain.wire.downlink import Downlink
from hetertrain.wire.events import (
    ContentReceived,
    DownlinkEvent,
    DownlinkReady,
    FlushReported,
    FrameRefused,
    NodeGone,
    NodeSeen,
    Outgoing,
    TransferDeferred,
)

Event = MemberSeen | MemberGone | FlushSettled | ContentArrived


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What was refused, of whom and why."""

    node: str
    """Empty: not known."""
    reason: str
    """A code (``core.gate.Reason``), or ``frame_`` and a ``FrameError``'s."""
    detail: str
    outcome: str = "frame"
    seq: int | None = None
    base_version: int | None = None
    measured: float | None = None
    limit: float | None = None


class Link(Protocol):
    """What the parts need of a connection; ``transport.mqtt`` has the real one, the simulator
    another.
    """

    @property
    def bytes_up(self) -> int:
        """Bytes that left this end."""

    @property
    def bytes_down(self) -> int:
        """Bytes that reached this end."""

    def publish(self, outgoing: tuple[Outgoing, ...]) -> None:
        """Queue frames; never blocks."""

    def resubscribe(self, subscriptions: tuple[str, ...]) -> None:
        """Subscribe to these topics and no others, before anything that is published next."""


class Cell:
    """The nodes of one aggregator; the thread that owns the machine owns it too."""

    def __init__(
        self,
        downlink: Downlink,
        link: Link,
        on_event: Callable[[Event, float], None],
        log: Logger,
        on_refused: Callable[[Refusal], None] = lambda _refusal: None,
    ) -> None:
        self.downlink = downlink
        self.link = link
        self.refused: Counter[str] = Counter()
        self.wakes_at = 0.0
        self.is_full = False
        """A node was told by silence that there is no room for its content; it asks again."""
        self._deferred_bytes = 0
        self._on_event = on_event
        self._on_refused = on_refused
        self._log = log

    def take(self, event: mqtt.Event, now: float) -> None:
        """Take what happened on the connection.

        Raises:
            TransportError: the connection ended for good.
        """
        match event:
            case mqtt.Received(topic, frame):
                self._apply(self.downlink.received(topic, frame, now), now)
            case mqtt.Connected(packet_bytes_max):
                self.downlink.connected(packet_bytes_max)
                self._log.info("connected", cell=self.downlink.cell)
            case mqtt.Disconnected(reason, is_final):
                self._log.warning("disconnected", reason=reason)
                if is_final:
                    raise TransportError(reason)
            case mqtt.Denied(what, reason):
                self._log.error("access_denied", what=what, reason=reason)
            case mqtt.Delivered():
                pass  # Broadcasts and verdicts are repeated on request, not tracked.

    def tick(self, now: float) -> None:
        """Send what is due, and notice who fell silent."""
        self._apply(self.downlink.tick(now), now)

    def answer(self, verdicts: Iterable[Verdict], now: float) -> None:
        """Acknowledge contents; what a verdict says is durable by now."""
        for verdict in verdicts:
            for each in (verdict, *verdict.refused):
                if each.outcome not in (Outcome.MERGED, Outcome.DUPLICATE):
                    self._note_refused(each)
            self._apply(self.downlink.answer(verdict, now), now)

    def _note_refused(self, verdict: Verdict) -> None:
        self.refused[str(verdict.outcome)] += 1
        self._log.warning(
            "update_refused", node=verdict.node, seq=verdict.seq, reason=verdict.reason
        )
        self._on_refused(_refusal(verdict))

    def pull(self, nodes: Iterable[str], now: float) -> None:
        """Ask nodes for what they have."""
        for node in nodes:
            self._apply(self.downlink.pull(node, now), now)

    def notice(self, notice: SyncNotice, now: float) -> None:
        """Announce a synchronisation."""
        self._apply(self.downlink.notice(notice, now), now)

    def release(
        self, checkpoint: Checkpoint, sync: int | None, terms: JobTerms, now: float
    ) -> None:
        """Announce a version."""
        self._apply(self.downlink.release(checkpoint, sync, terms, now), now)

    def limit(self, room_bytes: int) -> None:
        """Take so many more bytes of contents and no more; nodes keep what there is no room for."""
        self.downlink.room_bytes = room_bytes
        if self.is_full and room_bytes >= self._deferred_bytes:
            self.is_full = False
            self._log.info("transfers_resumed", room_bytes=room_bytes)

    def refuse(self, reason: str, detail: str, node: str = "") -> None:
        """Count and log a frame that could not be used."""
        code = f"frame_{reason}"
        self.refused[code] += 1
        self._log.warning("frame_refused", reason=reason, detail=detail)
        self._on_refused(Refusal(node=node, reason=code, detail=detail))

    def _apply(self, ready: DownlinkReady, now: float) -> None:
        self.link.publish(ready.send)
        self.wakes_at = ready.wake_at
        for event in ready.events:
            self._take_downlink(event, now)

    def _take_downlink(self, event: DownlinkEvent, now: float) -> None:
        match event:
            case NodeSeen(state):
                self._on_event(MemberSeen(state.node, state.active), now)
            case NodeGone(node):
                self._log.warning("node_gone", node=node)
                self._on_event(MemberGone(node), now)
            case FlushReported(node, sync):
                self._on_event(FlushSettled(node, sync), now)
            case ContentReceived():
                self._take_content(event, now)
            case TransferDeferred(node, size_bytes):
                self.refused["deferred"] += 1
                self._deferred_bytes = size_bytes
                if not self.is_full:
                    self.is_full = True
                    room_bytes = self.downlink.room_bytes
                    self._log.warning(
                        "transfers_deferred",
                        node=node,
                        size_bytes=size_bytes,
                        room_bytes=room_bytes,
                    )
            case FrameRefused(reason, detail, node):
                self.refuse(reason, detail, node)

    def _take_content(self, received: ContentReceived, now: float) -> None:
        num_bytes, num_parameters = len(received.content), self.downlink.num_parameters
        try:
            arrival = unpack_arrival(received.content, received.node, num_parameters or None)
            if not isinstance(arrival, UpdateArrived) and not received.relays:
                raise FrameError("identity", f"{received.node} sent other nodes' work unannounced")
        except FrameError as error:
            self.downlink.traffic.came(num_bytes, 0, num_parameters)
            finding = Finding(Reason.CONTENT)
            verdict = Verdict(
                received.node, received.seq, Outcome.QUARANTINED, str(error), finding=finding
            )
            self.answer((verdict,), now)
            return
        self.downlink.traffic.came(num_bytes, _num_updates(arrival), num_parameters)
        self._on_event(arrival, now)


def _num_updates(arrival: ContentArrived) -> int:
    match arrival:
        case UpdateArrived():
            return 1
        case PartialArrived(partial=partial):
            return len(partial.contributions)
        case BundleArrived(updates=updates):
            return len(updates)


def _refusal(verdict: Verdict) -> Refusal:
    finding = verdict.finding
    assert finding is not None, "whoever refuses says why"
    return Refusal(
        node=verdict.node,
        reason=str(finding.code),
        detail=verdict.reason,
        outcome=str(verdict.outcome),
        seq=verdict.seq,
        base_version=finding.base_version,
        measured=finding.measured,
        limit=finding.limit,
    )
