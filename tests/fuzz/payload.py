"""Bytes that a coverage-guided fuzzer makes, against the reader of payloads: refused with a
``PayloadError``, or valid in every place.

Not collected by pytest: ``script/soak`` runs it with ``atheris`` (libFuzzer's flags apply).
"""

from __future__ import annotations

import sys
import tracemalloc

import atheris

with atheris.instrument_imports(include=["hetertrain.codec"]):
    import numpy as np

    from hetertrain import codec
    from hetertrain.errors import PayloadError

SIZES = (0, 9, 40, 3000, 40_000)
BYTES_PER_VALUE_MAX = 64
BYTES_FREE = 1 << 20


def check(payload: bytes) -> None:
    """Read one payload as a vector of each size, and of the one that it claims."""
    claimed = int.from_bytes(payload[4:8], "little")
    for size in (*SIZES, claimed if claimed <= SIZES[-1] else 0):
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        try:
            decoded = codec.parse(payload, size)
        except PayloadError:
            continue
        finally:
            peak_bytes = tracemalloc.get_traced_memory()[1] - before
            limit = BYTES_FREE + BYTES_PER_VALUE_MAX * (size + 8 * len(payload))
            assert peak_bytes < limit, f"{peak_bytes} bytes for {len(payload)}"
        values = decoded.values()
        assert np.isfinite(values).all()
        if decoded.indices is not None:
            assert np.all(np.diff(decoded.indices, prepend=-1, append=size) > 0)
        assert decoded.dense().shape == (size,)


if __name__ == "__main__":
    codec.decode(codec.encode(np.ones(40, np.float32), 23).payload, 40)  # Imports parts of numpy.
    tracemalloc.start()
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()
