"""What the nodes of one tier hold, and how a node that holds something else gets there.

A tier's models are a chain: each broadcast goes on from the one before, by a difference or, where
that is less, by a whole model. Differences are remembered, up to the bytes of one model, so a node
that missed some is given just those; one that is further behind, or new, is given the model that
the tier holds, and from there the differences since. Both go to that node alone, a window of chunks
at a time as it asks for them, so they crowd out nobody's link and pass any queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from hetertrain.core.tiers import Tier
from hetertrain.core.update import Checkpoint
from hetertrain.wire.messages import Begin, Chunk, Message
from hetertrain.wire.transfer import Content

FLOAT_BYTES = 4
Newest = tuple[str, int, int]
"""Lineage, version, and number of a gateway's own model on it; 0: the cloud's."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A content that nodes of the tier may ask for."""

    begin: Begin
    content: Content
    base: str
    """Digest of the model that it applies to; empty: it is whole."""
    model: str
    """Digest of the model that it leads to."""
    due_at: float
    """When its broadcast should have arrived everywhere."""

    def messages(self, indices: Iterable[int]) -> Iterator[tuple[Message, bytes | memoryview]]:
        """Return the chunks of ``indices``."""
        size = self.begin.chunk_bytes
        for index in indices:
            chunk = Chunk(node=self.begin.node, seq=self.begin.seq, index=index)
            yield chunk, self.content.part(index * size, (index + 1) * size)

    @property
    def num_chunks(self) -> int:
        """How many chunks the content has."""
        return -(-len(self.content) // self.begin.chunk_bytes)


@dataclass(slots=True)
class Chain:
    """The models of one tier's nodes."""

    tier: Tier
    held: Checkpoint | None = None
    digest: str = ""
    newest: Newest | None = None
    """What ``held`` stands for."""
    sent_at: float = -1e9
    free_at: float = 0.0
    """When the link has had time for what was sent."""
    needs_whole: bool = True
    """The next broadcast is a whole model."""
    whole_until: float = 0.0
    """Until then a broadcast of a whole model is on its way; nobody needs to be given one."""
    whole_airtime: float = 0.0
    """How long that broadcast takes on the tier's link."""
    needy: dict[str, None] = field(default_factory=dict)
    """Nodes that hold nothing from which differences go on, in the order of their need."""
    is_overtaken: bool = False
    """A node was so slow to take a whole model that no difference goes on from it any more: only a
    broadcast, for which the differences pause, ever brings it up."""
    serve_at: float = 0.0
    """When they are served, together."""
    sending: Offer | None = None
    """A broadcast that goes out burst by burst."""
    send_from: int = 0
    """The chunk with which it goes on."""
    send_at: float = 0.0
    sent_whole: Offer | None = None
    """The last whole model that was broadcast, for those who miss chunks of it."""
    whole: Offer | None = None
    """What they are given, while somebody takes it."""
    whole_used_at: float = 0.0
    _differences: dict[str, Offer] = field(default_factory=dict)
    """By the model that each leads on from, the oldest first."""
    _bytes: int = 0

    def hold(self, checkpoint: Checkpoint, digest: str, newest: Newest) -> None:
        """Note what the tier's nodes hold from now on."""
        self.held, self.digest, self.newest = checkpoint, digest, newest

    def remember(self, difference: Offer) -> None:
        """Keep a difference that was broadcast, and as many before as one model has bytes.

        A budget that holds no value gives a difference that leads nowhere; the next one from the
        same model takes its place, else a node would be led in a circle.
        """
        assert self.held is not None, "a difference leads to a model"
        self._drop(difference.base)
        self._differences[difference.base] = difference
        self._bytes += len(difference.content)
        while self._bytes > FLOAT_BYTES * self.held.vector.size and len(self._differences) > 1:
            self._drop(next(iter(self._differences)))

    def _drop(self, base: str) -> None:
        dropped = self._differences.pop(base, None)
        self._bytes -= 0 if dropped is None else len(dropped.content)

    def restart(self) -> None:
        """Forget the differences: the tier starts anew from a whole model."""
        self._differences.clear()
        self._bytes = 0
        if self.whole is not None and self.whole.model != self.digest:
            self.whole = None

    def after(self, model: str) -> Offer | None:
        """Return the difference that leads on from ``model``."""
        return self._differences.get(model)

    def find(self, seq: int) -> Offer | None:
        """Return what is on offer under this number."""
        offers = (self.whole, self.sent_whole, *self._differences.values())
        found = (each for each in offers if each is not None and each.begin.seq == seq)
        return next(found, None)

    @property
    def offers_whole(self) -> bool:
        """Whether ``whole`` still leads to what the tier holds."""
        whole = self.whole
        return whole is not None and (
            whole.model == self.digest or self.after(whole.model) is not None
        )
