"""How fast is the codec, and how few bytes does it take? Against the time that copying the vector
takes in the same run, and against the entropy of the places.

Times are medians of pairs: each measured call stands beside a copy of the dense vector, so that a
busy machine slows both. *Encode* is from a delta to bytes; *feedback* is error feedback whole: the
residual is added to the delta, the sum encoded, and what was sent subtracted again. *Merge* decodes
a payload into fixed-point sums.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from hetertrain import codec
from hetertrain.codec import kernels
from hetertrain.codec.indices import plan_gaps
from hetertrain.codec.planner import dense_bytes
from hetertrain.task import Node, load_task
from hetertrain_lab.page import Rows
from hetertrain_vehicle.trainer import Trainer

RESNET18_PARAMETERS = 11_689_512
DENSITY = 0.01
BITS_SPARSE, BITS_DENSE = (8, 4, 1), (8, 4, 2, 1)
REPEATS, QUICK_REPEATS = 15, 5
TASKS = ("hetertrain_lab.digits:DigitsTask", "hetertrain_lab.driving:DrivingTask")
LOCAL_STEPS = 40
SEED = 1
BUDGET_SEARCHES = 30

Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Measure:
    """One way of coding one delta."""

    delta: str
    form: str
    parameters: int
    kept: int
    bytes_per_kept: float
    index_over_entropy: float | None
    """Bytes of the places over those of their entropy; None where all are kept."""
    relative_error: float
    encode_x_memcpy: float
    feedback_x_memcpy: float
    merge_x_memcpy: float
    encode_gigabytes_per_second: float
    """Of dense float32, without the feedback."""


def run_codec(*, is_quick: bool, on_progress: Callable[[float], None]) -> dict[str, list[Measure]]:
    """Measure all, with every kind of kernel that is installed; the fastest kind comes first."""
    repeats = QUICK_REPEATS if is_quick else REPEATS
    deltas = synthetic_deltas(RESNET18_PARAMETERS) | recorded_deltas()
    found: dict[str, list[Measure]] = {}
    kinds = ["numpy"]
    if codec.accelerate():
        kinds = ["numba", "numpy"]
    jobs = [(kind, name) for kind in kinds for name in deltas]
    for done, (kind, name) in enumerate(jobs):
        if kind == "numpy":
            kernels.active = kernels.NumpyKernels()
        found.setdefault(kind, []).extend(_measure(name, deltas[name], repeats))
        on_progress((done + 1) / len(jobs))
    return found


def figures(measures: list[Measure]) -> dict[str, float]:
    """Return the figures by which the codec is judged: Gaussian values, the hardest to compress."""
    by_form = {m.form: m for m in measures if m.delta == "Gaussian"}
    sparse = by_form["1 %, 4 bits"]
    assert sparse.index_over_entropy is not None, "a sparse form has places"
    return {
        "encode_1pct_x_memcpy": sparse.encode_x_memcpy,
        "feedback_1pct_x_memcpy": sparse.feedback_x_memcpy,
        "merge_1pct_x_memcpy": sparse.merge_x_memcpy,
        "dense_int8_encode_x_memcpy": by_form["dense, 8 bits"].encode_x_memcpy,
        "dense_int4_encode_x_memcpy": by_form["dense, 4 bits"].encode_x_memcpy,
        "dense_int8_merge_x_memcpy": by_form["dense, 8 bits"].merge_x_memcpy,
        "bytes_per_kept_1pct_4bit": sparse.bytes_per_kept,
        "bytes_per_kept_1pct_signs": by_form["1 %, 1 bit"].bytes_per_kept,
        "index_over_entropy_1pct": sparse.index_over_entropy,
    }


def synthetic_deltas(size: int) -> dict[str, Vector]:
    """Draw deltas of known distributions."""
    rng = np.random.default_rng(SEED)
    return {
        "Gaussian": rng.standard_normal(size, np.float32),
        "Laplace": rng.laplace(size=size).astype(np.float32),
    }


def recorded_deltas() -> dict[str, Vector]:
    """Train the example tasks on one node for some steps, and take what they learnt."""
    deltas = {}
    for reference in TASKS:
        torch.manual_seed(SEED)
        trainer = Trainer(load_task(reference), Node(id="bench", labels={"index": "0", "of": "8"}))
        before, _ = trainer.vector()
        for _ in range(LOCAL_STEPS):
            trainer.step()
        after, _ = trainer.vector()
        deltas[reference.rpartition(":")[2]] = after - before
    return deltas


def _measure(name: str, delta: Vector, repeats: int) -> list[Measure]:
    found = [
        _measure_form(
            name, f"1 %, {_in_bits(bits)}", delta, bits, _sparse_budget(delta, bits), repeats
        )
        for bits in BITS_SPARSE
    ]
    for bits in BITS_DENSE:
        budget = dense_bytes(delta.size, bits) + codec.MINIMUM_BUDGET_BYTES
        form = f"dense, {_in_bits(bits)}"
        found.append(_measure_form(name, form, delta, bits, budget, repeats))
    return found


def _in_bits(bits: int) -> str:
    return "1 bit" if bits == 1 else f"{bits} bits"


def _sparse_budget(delta: Vector, bits: int) -> int:
    """Find the budget that keeps 1 % of the values."""
    wanted = DENSITY * delta.size
    budget = int(wanted * bytes_per_value(bits))
    for _ in range(BUDGET_SEARCHES):
        kept = codec.encode(delta, budget, bits=bits).decoded.num_kept
        if abs(kept - wanted) <= max(1.0, 0.002 * wanted):
            break
        budget += int((wanted - kept) * bytes_per_value(bits)) or (1 if kept < wanted else -1)
    return budget


def bytes_per_value(bits: int) -> float:
    """Return about how many bytes a value and its place take at 1 % density."""
    return 1.03 + bits / 8


def _measure_form(
    name: str, form: str, delta: Vector, bits: int, budget: int, repeats: int
) -> Measure:
    encoded = codec.encode(delta, budget, bits=bits)
    decoded = encoded.decoded
    work, residual = np.empty_like(delta), np.zeros_like(delta)
    copy = np.empty_like(delta)
    sums = np.zeros(delta.size, np.int64)

    def feedback() -> None:
        np.add(delta, residual, out=work)
        codec.encode(work, budget, bits=bits).decoded.subtract_from(work)

    def merge() -> None:
        codec.decode_into(sums, encoded.payload, 0.5)

    copying = partial(np.copyto, copy, delta)
    encode_ratio, seconds = _paired(
        partial(codec.encode, delta, budget, bits=bits), copying, repeats
    )
    feedback_ratio, _ = _paired(feedback, copying, repeats)
    merge_ratio, _ = _paired(merge, copying, repeats)
    rest = delta.copy()
    decoded.subtract_from(rest)
    return Measure(
        delta=name,
        form=form,
        parameters=delta.size,
        kept=decoded.num_kept,
        bytes_per_kept=round(len(encoded.payload) / max(decoded.num_kept, 1), 4),
        index_over_entropy=None if decoded.indices is None else _over_entropy(decoded),
        relative_error=round(float(np.linalg.norm(rest) / np.linalg.norm(delta)), 4),
        encode_x_memcpy=round(encode_ratio, 3),
        feedback_x_memcpy=round(feedback_ratio, 3),
        merge_x_memcpy=round(merge_ratio, 3),
        encode_gigabytes_per_second=round(delta.nbytes / seconds / 1e9, 3),
    )


def _over_entropy(decoded: codec.Decoded) -> float:
    assert decoded.indices is not None, "a sparse form has places"
    p = decoded.num_kept / decoded.size
    entropy_bits = -p * np.log2(p) - (1 - p) * np.log2(1 - p)
    entropy_bytes = float(entropy_bits) * decoded.size / 8
    return round(plan_gaps(decoded.indices).num_bytes / entropy_bytes, 4)


def _paired(
    call: Callable[[], object], copying: Callable[[], None], repeats: int
) -> tuple[float, float]:
    """Return the median ratio of the times of ``call`` and ``copying``, and the median time."""
    ratios, times = [], []
    call()
    for _ in range(repeats):
        # The better of two, so that a copy is not the one that brings the cache back.
        copied = min(_seconds(copying), _seconds(copying))
        took = _seconds(call)
        ratios.append(took / copied)
        times.append(took)
    return median(ratios), median(times)


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def codec_rows(kind: str, measures: list[Measure]) -> Rows:
    """Return the table of one kind of kernel."""
    header: tuple[str, ...] = (
        "delta, form",
        "parameters",
        "kept",
        "bytes/kept",
        "places/entropy",
        "error",
        "encode × memcpy",
        "GB/s",
        "feedback × memcpy",
        "merge × memcpy",
    )
    lines: list[tuple[str, ...]] = [
        (
            f"{m.delta}, {m.form}",
            f"{m.parameters:,}",
            f"{m.kept:,}",
            f"{m.bytes_per_kept:.3f}",
            "–" if m.index_over_entropy is None else f"{m.index_over_entropy:.4f}",
            f"{m.relative_error:.3f}",
            f"{m.encode_x_memcpy:.2f}",
            f"{m.encode_gigabytes_per_second:.2f}",
            f"{m.feedback_x_memcpy:.2f}",
            f"{m.merge_x_memcpy:.2f}",
        )
        for m in measures
    ]
    return f"codec, {kind} kernels, one thread", header, lines
