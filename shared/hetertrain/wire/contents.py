"""Updates, partials and models as bytes: what transfers carry and journals repeat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hetertrain import codec
from hetertrain.core.events import BundleArrived, ContentArrived, PartialArrived, UpdateArrived
from hetertrain.core.gate import Outcome, Verdict
from hetertrain.core.layout import Integers
from hetertrain.core.policy import Statistics, SyncPolicy, WeightPolicy
from hetertrain.core.update import DELTA_MAX, GROUPS_MAX, Contribution, Group, Partial, Update
from hetertrain.errors import FrameError, PayloadError
from hetertrain.wire.frames import pack, unpack
from hetertrain.wire.messages import (
    BundleContent,
    Message,
    ModelContent,
    PartialContent,
    UpdateContent,
    VerdictMessage,
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
    node: str,
    seq: int,
    sync: int | None,
    partial: Partial,
    lineage: str = "",
    payloads: Sequence[bytes] = (),
) -> bytes:
    """Put a gateway's partial into one frame.

    ``payloads``: each group's sums as the codec has them, in the order of base versions; empty: the
    sums themselves.
    """
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
        group_bytes=tuple(len(payload) for payload in payloads),
    )
    if payloads:
        return pack(head, b"".join(payloads))
    return pack(head, b"".join(group.sums.astype("<i8").tobytes() for _, group in groups))


def unpack_partial(frame: bytes | memoryview) -> tuple[PartialContent, Partial]:
    """Take a partial out of its frame.

    Raises:
        FrameError: the frame is damaged, or its sums do not match its head.
    """
    head, payload = unpack_as(PartialContent, frame)
    return head, _read_partial(head, payload, None)


def group_payloads(head: PartialContent, payload: memoryview) -> list[memoryview]:
    """Return the codec's payload of each group of an encoded partial; none where it is exact.

    Raises:
        FrameError: they do not fit the groups.
    """
    if not head.group_bytes:
        return []
    num_groups = len(head.groups)
    if num_groups != len(head.group_bytes) or num_groups > GROUPS_MAX:
        raise FrameError("content", f"{len(head.group_bytes)} payloads for {num_groups} groups")
    return _pieces(payload, head.group_bytes)


def _pieces(payload: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    if sum(sizes) != len(payload):
        raise FrameError("content", f"{len(payload)} bytes where {sum(sizes)} were due")
    starts = np.cumsum((0, *sizes)).tolist()
    return [payload[start : start + size] for start, size in zip(starts[:-1], sizes, strict=True)]


def _read_sums(
    head: PartialContent, payload: memoryview, num_parameters: int | None
) -> Sequence[NDArray[np.int64]]:
    encoded, num_groups = group_payloads(head, payload), len(head.groups)
    if not encoded:
        if num_groups == 0 or len(payload) % (8 * num_groups):
            raise FrameError("content", f"{len(payload)} bytes of sums for {num_groups} groups")
        return list(np.frombuffer(payload, "<i8").astype(np.int64).reshape(num_groups, -1))
    limit = DELTA_MAX * len(head.contributions)
    found = []
    for each in encoded:
        try:
            decoded = codec.parse(each, num_parameters or codec.announced_size(each))
        except PayloadError as error:
            raise FrameError("content", f"sums: {error}") from error
        if not decoded.peak() <= limit:
            raise FrameError("content", f"a sum of {decoded.peak():g} is over {limit:g}")
        sums = np.zeros(decoded.size, np.int64)
        codec.add_into(sums, decoded, 1.0)
        found.append(sums)
    return found


def _read_partial(head: PartialContent, payload: memoryview, num_parameters: int | None) -> Partial:
    num_groups = len(head.groups)
    sums = _read_sums(head, payload, num_parameters)
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


def pack_bundle(
    node: str,
    seq: int,
    sync: int | None,
    frames: Sequence[bytes],
    lineage: str,
    statistics: Mapping[int, Statistics],
) -> bytes:
    """Put updates, each in its own frame, into one. ``statistics``: of their base versions."""
    head = BundleContent(
        node=node,
        seq=seq,
        sync=sync,
        lineage=lineage,
        statistics=_plain_statistics(statistics),
        sizes=tuple(len(frame) for frame in frames),
    )
    return pack(head, b"".join(frames))


def _read_bundle(
    head: BundleContent, payload: memoryview, frame: bytes | bytearray
) -> BundleArrived:
    updates = tuple(unpack_update(piece) for piece in _pieces(payload, head.sizes))
    if not updates or len({(update.node, update.seq) for update in updates}) != len(updates):
        raise FrameError("content", "a bundle without updates, or with one twice")
    return BundleArrived(
        head.node,
        head.seq,
        head.sync,
        updates,
        _read_statistics(head.statistics),
        head.lineage,
        frame,
    )


def unpack_arrival(
    frame: bytes | bytearray, sender: str | None = None, num_parameters: int | None = None
) -> ContentArrived:
    """Take an update, a partial or a bundle out of its frame, and check that it is of its sender.

    ``num_parameters``: of the model, where it is known; encoded sums must be of so many.

    The result keeps the frame, and views into it. The frame's own digest is always compared, though
    its chunks were: it goes into a journal as it is, and must be whole when it is read again.

    Raises:
        FrameError: the frame is damaged, carries something else, or speaks in another's name.
    """
    head, payload = unpack(frame)
    arrival: ContentArrived
    match head:
        case UpdateContent():
            arrival = UpdateArrived(_read_update(head, payload), frame)
        case PartialContent():
            partial = _read_partial(head, payload, num_parameters)
            arrival = PartialArrived(head.node, head.seq, head.sync, partial, head.lineage, frame)
        case BundleContent():
            arrival = _read_bundle(head, payload, frame)
        case _:
            raise FrameError("content", f"{type(head).__name__} is not something to merge")
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
        statistics=_plain_statistics(terms.statistics),
        slowest=terms.slowest,
        local=terms.local,
    )


def model_terms(head: ModelContent) -> JobTerms:
    """Read the job's terms from the head of a model."""
    return JobTerms(
        head.layout,
        head.policy,
        head.weights,
        _read_statistics(head.statistics),
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


def _plain_statistics(
    statistics: Mapping[int, Statistics],
) -> tuple[tuple[int, int, float, float], ...]:
    return tuple(
        (v, s.examples_cap, s.reference_steps, s.norm_median) for v, s in sorted(statistics.items())
    )


def _read_statistics(
    plain: Sequence[tuple[int, int, float, float]],
) -> dict[int, Statistics]:
    return {version: Statistics(cap, steps, norm) for version, cap, steps, norm in plain}


def _plain(integers: Integers | None) -> tuple[int, ...]:
    return () if integers is None else tuple(int(value) for value in integers)
