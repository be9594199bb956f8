"""How a delta becomes bytes and back: lossy within a byte budget, exact about what was lost.

``encode`` returns the payload and what it decodes to. The sender keeps the difference and adds it
to its next delta, so what a small budget leaves out arrives later (error feedback: Seide et al.
2014; with top-k, "memory": Stich et al. 2018, arXiv 1809.07599). The receiver either decodes
(``decode``, ``parse``) or adds the payload straight into fixed-point sums (``decode_into``).
Everything here is a pure function of its arguments: the same delta gives the same bytes.
"""

from hetertrain.codec import kernels
from hetertrain.codec.encoder import encode
from hetertrain.codec.merge import FRACTION_BITS, VALUE_MAX, add_into, decode_into
from hetertrain.codec.payload import (
    MINIMUM_BUDGET_BYTES,
    Decoded,
    Encoded,
    announced_size,
    decode,
    decode_owned,
    parse,
    whole,
)

__all__ = [
    "FRACTION_BITS",
    "MINIMUM_BUDGET_BYTES",
    "VALUE_MAX",
    "Decoded",
    "Encoded",
    "accelerate",
    "add_into",
    "announced_size",
    "decode",
    "decode_into",
    "decode_owned",
    "encode",
    "parse",
    "whole",
]


def accelerate() -> bool:
    """Use machine code from now on, where numba is installed; return whether it is.

    Costs about a second and 100 MB of memory, so a process asks for it that merges all day.
    """
    try:
        from hetertrain.codec.kernels_numba import NumbaKernels
    except ImportError:
        return False
    kernels.active = NumbaKernels()
    return True
