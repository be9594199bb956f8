"""Updates, partials and models as bytes: what transfers carry and journals repeat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from hetertrain.core.aggregator import PartialArrived, UpdateArrived
from hetertrain.core.gate import Outcome, Verdict
from hetertrain.core.layout import Integers
from hetertrain.core.policy import Statistics, SyncPolicy, WeightPolicy
from hetertrain.core.update import Contribution, Group, Partial, Update
from hetertrain.errors import FrameError
from hetertrain.wire.frames import (
    Message,
    ModelContent,
    PartialContent,
    UpdateContent,
    VerdictMessage,
    pack,
    unpack,
)

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class JobTerms:
    """What a node must know of a job to work on it; comes with every model."""

    layout: str
    policy: SyncPolicy
    weights: WeightPolicy
    statistics: dict[int, Statistics]
    lineage: str = ""
    slowest: int = 0
    local: int = 0
    """Counts the models that a gateway without its cloud makes on a version; 0: the cloud's own."""


def unpack_as(
    message_class: type[M],
    frame: bytes | bytearray | memoryview,
    *,
    is_verified: bool = False,
) -> tuple[M, memoryview]:
    """Unpack a frame that must carry a ``message_class``.

    Raises:
        FrameError: it is damaged, or carries something else (reason ``content``).
    """
    message, payload = unpack(frame, is_verified=is_verified)
    if not isinstance(message, message_class):
        raise FrameError(
            "content", f"{type(message).__name__} where {message_class.__name__} was due"
        )
    return message, payload


def pack_update(update: Update) -> bytes:
    """Put an update into one frame."""
    head = UpdateContent(
        node=update.node,
        seq=update.seq,
        base_version=update.base_version,
        examples=update.examples,
        steps=update.steps,
        layout=update.layout,
        lineage=update.lineage,
        sync=update.sync,
        integers=update.integers,
    )
    return pack(head, update.payload)


def unpack_update(frame: bytes | memoryview) -> Update:
    """Take an update out of its frame.

    Raises:
        FrameError: the frame is damaged or carries something else.
    """
    return _read_update(*unpack_as(UpdateContent, frame))


def _read_update(head: UpdateContent, payload: memoryview) -> Update:
    return Update(
        node=head.node,
        seq=head.seq,
        base_version=head.base_version,
        examples=head.examples,
        steps=head.steps,
        layout=head.layout,
        lineage=head.lineage,
        sync=head.sync,
        integers=head.integers,
        payload=payload,
    )


def pack_partial(
    node: str, seq: int, sync: int | None, partial: Partial, lineage: str = ""
) -> bytes:
    """Put a gateway's partial into one frame."""
    groups = sorted(partial.groups.items())
    head = PartialContent(
        node=node,
        seq=seq,
        sync=sync,
        groups=tuple((version, group.unit) for version, group in groups),
        lineage=lineage,
        integers=_plain(partial.integers),
        contributions=tuple(
            (c.node, c.seq, c.base_version, c.examples, c.mass, c.steps, c.norm)
            for c in sorted(partial.contributions.values())
        ),
    )
    return pack(head, b"".join(group.sums.astype("<i8").tobytes() for _, group in groups))


def unpack_partial(frame: bytes | memoryview) -> tuple[PartialContent, Partial]:
    """Take a partial out of its frame.

    Raises:
        FrameError: the frame is damaged, or its sums do not match its head.
    """
    head, payload = unpack_as(PartialContent, frame)
    return head, _read_partial(head, payload)


def _read_partial(head: PartialContent, payload: memoryview) -> Partial:
    num_groups = len(head.groups)
    if num_groups == 0 or len(payload) % (8 * num_groups):
        raise FrameError("content", f"{len(payload)} bytes of sums for {num_groups} groups")
    sums = np.frombuffer(payload, "<i8").astype(np.int64).reshape(num_groups, -1)
    items = [Contribution(*fields) for fields in head.contributions]
    if any(not 0 < item.mass <= item.examples or item.steps < 1 for item in items):
        raise FrameError("content", "a contribution without mass, examples or steps")
    partial = Partial(
        {version: Group(unit, sums[i]) for i, (version, unit) in enumerate(head.groups)},
        np.asarray(head.integers, np.int64),
        {(item.node, item.seq): item for item in items},
    )
    if len(partial.groups) != num_groups or len(partial.contributions) != len(items):
        raise FrameError("content", "a group or contribution is there twice")
    return partial


def unpack_arrival(
    frame: bytes | bytearray, sender: str | None = None
) -> UpdateArrived | PartialArrived:
    """Take an update or a partial out of its frame, and check that it is of its sender.

    The result keeps the frame, and views into it. The frame's own digest is always compared, though
    its chunks were: it goes into a journal as it is, and must be whole when it is read again.

    Raises:
        FrameError: the frame is damaged, carries something else, or speaks in another's name.
    """
    head, payload = unpack(frame)
    arrival: UpdateArrived | PartialArrived
    match head:
        case UpdateContent():
            arrival = UpdateArrived(_read_update(head, payload), frame)
        case PartialContent():
            partial = _read_partial(head, payload)
            arrival = PartialArrived(head.node, head.seq, head.sync, partial, head.lineage, frame)
        case _:
            raise FrameError("content", f"{type(head).__name__} is neither update nor partial")
    if sender is not None and head.node != sender:
        raise FrameError("identity", f"{sender} sent content of {head.node}")
    return arrival


def model_head(
    *,
    version: int,
    sync: int | None,
    base: str,
    model: str,
    size: int,
    integers: Integers,
    terms: JobTerms,
) -> ModelContent:
    """Write the head of a model from the core's types."""
    return ModelContent(
        version=version,
        sync=sync,
        base=base,
        model=model,
        layout=terms.layout,
        lineage=terms.lineage,
        size=size,
        integers=_plain(integers),
        policy=terms.policy,
        weights=terms.weights,
        statistics=tuple(
            (v, s.examples_cap, s.reference_steps, s.norm_median)
            for v, s in sorted(terms.statistics.items())
        ),
        slowest=terms.slowest,
        local=terms.local,
    )


def model_terms(head: ModelContent) -> JobTerms:
    """Read the job's terms from the head of a model."""
    statistics = {
        version: Statistics(cap, steps, norm) for version, cap, steps, norm in head.statistics
    }
    return JobTerms(
        head.layout,
        head.policy,
        head.weights,
        statistics,
        head.lineage,
        head.slowest,
        head.local,
    )


def integers_of(head: ModelContent) -> Integers:
    """Read the integer buffers from the head of a model."""
    return np.asarray(head.integers, np.int64)


def verdict_message(verdict: Verdict) -> VerdictMessage:
    """Write a verdict as a message; a long reason is cut short."""
    return VerdictMessage(
        node=verdict.node,
        seq=verdict.seq,
        outcome=str(verdict.outcome),
        reason=verdict.reason[:500],
        known=verdict.known,
        hold_until_clock=verdict.hold_until_clock,
    )


def read_verdict(message: VerdictMessage) -> Verdict:
    """Read a verdict from its message.

    Raises:
        FrameError: the outcome is unknown.
    """
    try:
        outcome = Outcome(message.outcome)
    except ValueError as error:
        raise FrameError("content", f"unknown outcome {message.outcome!r}") from error
    return Verdict(
        message.node,
        message.seq,
        outcome,
        message.reason,
        message.known,
        message.hold_until_clock,
    )


def _plain(integers: Integers | None) -> tuple[int, ...]:
    return () if integers is None else tuple(int(value) for value in integers)
