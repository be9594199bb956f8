"""How a model's named tensors become one flat float32 vector, and back.

Everything between the nodes speaks of one vector: deltas, sums, checkpoints. The layout names each
tensor's place in it and its role, because roles merge differently: parameters and float buffers by
weighted mean, integer buffers (such as BatchNorm's ``num_batches_tracked``) by maximum, local
tensors (personalised layers, FedBN) never leave the node. Two nodes may only merge when their
layouts' digests agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from math import prod

import numpy as np
from numpy.typing import NDArray

from hetertrain.errors import LayoutError

Vector = NDArray[np.float32]
Integers = NDArray[np.int64]


class Role(StrEnum):
    """How a tensor merges."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INTEGER = "integer"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor: its name, shape and role, and where it starts in its role's vector."""

    name: str
    shape: tuple[int, ...]
    role: Role
    start: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """The places of all tensors; ``size`` floats and ``integer_size`` integers travel."""

    places: tuple[TensorPlace, ...]
    size: int
    integer_size: int
    digest: str

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, NDArray[np.generic]],
        parameters: Collection[str],
        local: Collection[str] = (),
    ) -> ParameterLayout:
        """Lay out ``tensors`` in their given order.

        ``parameters`` names those that an optimiser may touch; ``local`` holds patterns
        (``"*.running_mean"``) of tensors that stay on the node.

        Raises:
            LayoutError: a tensor is neither floating nor integer.
        """
        places: list[TensorPlace] = []
        sizes = {False: 0, True: 0}
        for name, tensor in tensors.items():
            role = _role(name, tensor, parameters, local)
            is_integer = role is Role.INTEGER
            start = 0 if role is Role.LOCAL else sizes[is_integer]
            places.append(TensorPlace(name, tuple(tensor.shape), role, start))
            if role is not Role.LOCAL:
                sizes[is_integer] += int(tensor.size)
        text = "\n".join(f"{p.name} {p.shape} {p.role}" for p in places)
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return cls(tuple(places), sizes[False], sizes[True], digest)

    def buffers(self) -> NDArray[np.bool_]:
        """Mark the elements of float buffers, shape (size,): optimisers leave them alone."""
        is_buffer = np.zeros(self.size, np.bool_)
        for place in self.places:
            if place.role is Role.BUFFER:
                is_buffer[place.start : place.start + place.size] = True
        return is_buffer

    def flatten(
        self, tensors: Mapping[str, NDArray[np.generic]], into: Vector | None = None
    ) -> tuple[Vector, Integers]:
        """Copy named tensors into ``(size,)`` float32, where given ``into``, and
        ``(integer_size,)`` int64.

        Raises:
            LayoutError: a tensor is missing or has another shape.
        """
        vector = np.empty(self.size, np.float32) if into is None else into
        integers = np.empty(self.integer_size, np.int64)
        for place in self.places:
            if place.role is Role.LOCAL:
                continue
            tensor = tensors.get(place.name)
            if tensor is None or tuple(tensor.shape) != place.shape:
                found = "nothing" if tensor is None else f"shape {tuple(tensor.shape)}"
                raise LayoutError(
                    f"tensor {place.name!r}: expected shape {place.shape}, got {found}"
                )
            target = integers if place.role is Role.INTEGER else vector
            target[place.start : place.start + place.size] = tensor.reshape(-1)
        return vector, integers

    def unflatten(self, vector: Vector, integers: Integers) -> dict[str, NDArray[np.generic]]:
        """View ``vector`` and ``integers`` as named tensors; local tensors are absent.

        Raises:
            LayoutError: the vectors are not of this layout's sizes.
        """
        if vector.shape != (self.size,) or integers.shape != (self.integer_size,):
            raise LayoutError(
                f"expected vectors of {self.size} and {self.integer_size} elements, "
                f"got {vector.shape} and {integers.shape}"
            )
        tensors: dict[str, NDArray[np.generic]] = {}
        for place in self.places:
            if place.role is not Role.LOCAL:
                source = integers if place.role is Role.INTEGER else vector
                flat = source[place.start : place.start + place.size]
                tensors[place.name] = flat.reshape(place.shape)
        return tensors


def _role(
    name: str, tensor: NDArray[np.generic], parameters: Collection[str], local: Collection[str]
) -> Role:
    if any(fnmatchcase(name, pattern) for pattern in local):
        return Role.LOCAL
    if np.issubdtype(tensor.dtype, np.integer) or tensor.dtype == np.bool_:
        return Role.INTEGER
    if not np.issubdtype(tensor.dtype, np.floating):
        raise LayoutError(
            f"tensor {name!r} has dtype {tensor.dtype}: only floats and integers can be merged"
        )
    return Role.PARAMETER if name in parameters else Role.BUFFER
