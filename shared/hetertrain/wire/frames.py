"""The one frame that carries each message: versioned, validated, limited in size.

::

    offset  0  2        3     4              8               12        20
            HT version  kind  header bytes   payload bytes   digest    header (msgpack), payload
            (raw)

The digest (BLAKE2b, 8 bytes) covers all the rest, the frame's head included. The header is msgpack;
the payload stays raw, because msgpack copies binaries. A stranger's frame is refused by ``unpack``
with a reason before it is looked at further, and a header is validated field by field; nothing in a
frame is ever executed.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import asdict, fields
from typing import TypeVar, cast

import msgpack
from pydantic import TypeAdapter, ValidationError

from hetertrain.errors import FrameError
from hetertrain.wire.messages import (
    AggregatorStatus,
    Begin,
    BundleContent,
    CellMembers,
    Chunk,
    Flushed,
    InterruptCommand,
    JobOrder,
    LogLines,
    LogRequest,
    MemoryShared,
    Message,
    Missing,
    ModelContent,
    NodeState,
    PartialContent,
    Pull,
    Sync,
    TierConfirmed,
    TrainCommand,
    TrainedReport,
    TrainerReady,
    TrainFailed,
    UpdateContent,
    VerdictMessage,
)

MAGIC = b"HT"
PROTOCOL_VERSION = 1
HEADER_BYTES_MAX = 1 << 22
_HEAD = struct.Struct("<2sBBII8s")

M = TypeVar("M", bound=Message)

_KINDS: dict[int, type[Message]] = {
    1: NodeState,
    2: Begin,
    3: Chunk,
    4: Missing,
    5: VerdictMessage,
    6: Flushed,
    7: Sync,
    8: Pull,
    9: TierConfirmed,
    10: JobOrder,
    11: LogRequest,
    12: LogLines,
    16: UpdateContent,
    17: PartialContent,
    18: ModelContent,
    19: BundleContent,
    32: AggregatorStatus,
    33: CellMembers,
    48: TrainCommand,
    49: InterruptCommand,
    50: TrainerReady,
    51: TrainedReport,
    52: TrainFailed,
    53: MemoryShared,
}
"""The numbers are the protocol: never reuse one."""
_NUMBERS = {message_class: number for number, message_class in _KINDS.items()}


_FIELDS: dict[type[Message], tuple[str, ...]] = {
    message_class: tuple(field.name for field in fields(message_class))
    for message_class in _NUMBERS
}
_ADAPTERS: dict[type[Message], TypeAdapter[Message]] = {
    message_class: TypeAdapter(message_class) for message_class in _NUMBERS
}


def pack(message: Message, payload: bytes | memoryview = b"") -> bytes:
    """Put a message and its raw payload into one frame."""
    return b"".join((pack_head(message, payload), payload))


def pack_head(message: Message, *payload: bytes | memoryview) -> bytes:
    """Return what goes before the parts of a payload, in a frame that is never put together."""
    header = header_bytes(message)
    assert len(header) <= HEADER_BYTES_MAX, "a header is small"
    num_bytes = sum(len(part) for part in payload)
    head = (MAGIC, PROTOCOL_VERSION, _NUMBERS[type(message)], len(header), num_bytes)
    digest = _digest(_HEAD.pack(*head, b""), header, *payload)
    return b"".join((_HEAD.pack(*head, digest), header))


def header_bytes(message: Message) -> bytes:
    """Return the header of a message's frame."""
    names = _FIELDS[type(message)]
    header: bytes = msgpack.packb({name: getattr(message, name) for name in names}, default=asdict)
    return header


def normal(message: M) -> M:
    """Return a message as its receiver will read it."""
    message_class = cast(type[Message], type(message))
    read = _parse(message_class, memoryview(header_bytes(message)))
    assert isinstance(read, type(message)), "it was parsed as one"
    return read


def unpack(
    frame: bytes | bytearray | memoryview, *, is_verified: bool = False
) -> tuple[Message, memoryview]:
    """Take a frame apart; the payload is a view into it.

    ``is_verified`` says that its bytes were compared with a digest before.

    Raises:
        FrameError: with reason ``foreign``, ``version``, ``kind``, ``length``, ``digest`` or
        ``header``.
    """
    view = memoryview(frame)
    if len(view) < _HEAD.size or bytes(view[:2]) != MAGIC:
        raise FrameError("foreign", f"{len(view)} bytes that do not begin with {MAGIC!r}")
    magic, version, kind, header_bytes, payload_bytes, digest = _HEAD.unpack(view[: _HEAD.size])
    if version != PROTOCOL_VERSION:
        raise FrameError(
            "version", f"protocol {version}, expected {PROTOCOL_VERSION}: upgrade one side"
        )
    message_class = _KINDS.get(kind)
    if message_class is None:
        raise FrameError("kind", f"unknown kind {kind}")
    if len(view) != _HEAD.size + header_bytes + payload_bytes or header_bytes > HEADER_BYTES_MAX:
        raise FrameError("length", f"{len(view)} bytes, announced {header_bytes} + {payload_bytes}")
    header = view[_HEAD.size : _HEAD.size + header_bytes]
    payload = view[_HEAD.size + header_bytes :]
    blank = _HEAD.pack(magic, version, kind, header_bytes, payload_bytes, b"")
    if not is_verified and _digest(blank, header, payload) != digest:
        raise FrameError("digest", "damaged on its way")
    return _parse(message_class, header), payload


def _parse(message_class: type[Message], header: memoryview) -> Message:
    try:
        plain = msgpack.unpackb(header, use_list=False, strict_map_key=False)
        return _ADAPTERS[message_class].validate_python(plain)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise FrameError("header", f"{message_class.__name__}.{where}: {first['msg']}") from error
    except (ValueError, msgpack.UnpackException) as error:
        raise FrameError("header", f"{message_class.__name__}: {error}") from error


def _digest(*parts: bytes | memoryview) -> bytes:
    hasher = hashlib.blake2b(digest_size=8)
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def payload_share(frame: bytes) -> int:
    """Count the bytes of a frame that are a model's or update's numbers, not heads.

    The first chunk of a content begins with the content's own frame head. For accounting only:
    nothing is validated.
    """
    _, _, kind, header_bytes, payload_bytes, _ = _HEAD.unpack_from(frame)
    if _KINDS.get(kind) is not Chunk:
        return 0
    inner = memoryview(frame)[_HEAD.size + header_bytes :]
    if bytes(inner[:2]) != MAGIC or len(inner) < _HEAD.size:
        return int(payload_bytes)
    return max(0, int(payload_bytes) - _HEAD.size - int(_HEAD.unpack_from(inner)[3]))
