"""What the federated result is held against: each vehicle alone, and one model on all data pooled.

Both train on the full speed of this machine, so that they are not held back by it.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass

import torch

from hetertrain.task import Node, load_task
from hetertrain_lab.fleet import fork_server
from hetertrain_vehicle.trainer import Trainer

ALONE_STEPS = 1500
POOLED_STEPS = 3000
TRAIN_SECONDS_MAX = 12.0
"""A larger model makes as many steps as fit in here."""
POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class References:
    """Metrics on the cloud's held-out data: headline by node alone, and all metrics of the pooled
    model.
    """

    alone: dict[str, float]
    pooled: dict[str, float]


def measure_references(
    task: str,
    nodes: list[Node],
    seed: int,
    on_progress: Callable[[int, int], None],
    interrupted: threading.Event,
) -> References | None:
    """Train all references on two cores; ``on_progress`` hears (done, total). None: interrupted."""
    pooled = Node(id="pooled", labels={"index": "0", "of": "1", "pooled": "yes"}, seed=seed)
    results: dict[str, dict[str, float]] = {}
    with ProcessPoolExecutor(2, fork_server(), ignore_interrupts) as pool:
        jobs = {pool.submit(train_alone, task, pooled, POOLED_STEPS, seed): "pooled"}
        jobs |= {pool.submit(train_alone, task, n, ALONE_STEPS, seed): n.id for n in nodes}
        waiting = set(jobs)
        while waiting:
            done, waiting = wait(waiting, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
            results |= {jobs[job]: job.result() for job in done}
            on_progress(len(results), len(jobs))
            if interrupted.is_set():
                pool.shutdown(wait=False, cancel_futures=True)
                return None
    pooled_metrics = results.pop("pooled")
    return References({node: next(iter(m.values())) for node, m in results.items()}, pooled_metrics)


def ignore_interrupts() -> None:
    """Leave Ctrl-C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def train_alone(task_reference: str, node: Node, steps: int, seed: int) -> dict[str, float]:
    """Train on one node's data only, and measure on the cloud's."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    task = load_task(task_reference)
    trainer = Trainer(task, node)
    ends_at = time.monotonic() + TRAIN_SECONDS_MAX
    for _ in range(steps):
        trainer.step()
        if time.monotonic() > ends_at:
            break
    return task.evaluate(trainer.model, None)
