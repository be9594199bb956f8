"""What the federated result is held against: each vehicle trained alone, and one model on all data pooled.

Both get more steps than any vehicle of the fleet makes, on the full speed of this machine, so they are not held back.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import torch

from hetertrain.task import Node, load_task
from hetertrain_lab.fleet import fork_server
from hetertrain_vehicle.trainer import Trainer

ALONE_STEPS = 1500
POOLED_STEPS = 3000


@dataclass(frozen=True, slots=True)
class References:
    """Metrics on the cloud's held-out data: headline by node alone, and all metrics of the pooled model."""

    alone: dict[str, float]
    pooled: dict[str, float]


def measure_references(
    task: str, nodes: list[Node], seed: int, on_progress: Callable[[int, int], None]
) -> References:
    """Train all references on every core; ``on_progress`` hears (done, total)."""
    pooled = Node(id="pooled", labels={"index": "0", "of": "1", "pooled": "yes"}, seed=seed)
    results: dict[str, dict[str, float]] = {}
    with ProcessPoolExecutor(max_workers=2, mp_context=fork_server()) as pool:
        jobs = {pool.submit(train_alone, task, pooled, POOLED_STEPS, seed): "pooled"}
        jobs |= {pool.submit(train_alone, task, n, ALONE_STEPS, seed): n.id for n in nodes}
        try:
            for number, job in enumerate(as_completed(jobs), start=1):
                results[jobs[job]] = job.result()
                on_progress(number, len(jobs))
        except (KeyboardInterrupt, BrokenProcessPool):
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    pooled_metrics = results.pop("pooled")
    return References({node: next(iter(m.values())) for node, m in results.items()}, pooled_metrics)


def train_alone(task_reference: str, node: Node, steps: int, seed: int) -> dict[str, float]:
    """Train on one node's data only, and measure on the cloud's."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    task = load_task(task_reference)
    trainer = Trainer(task, node)
    for _ in range(steps):
        trainer.step()
    return task.evaluate(trainer.model, None)
