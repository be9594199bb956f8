"""Starts trainer processes; importing it does not import torch."""

from __future__ import annotations

import signal
from multiprocessing.connection import Connection, Pipe
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess

from hetertrain.task import Node
from hetertrain_vehicle.agent import VehicleSettings


def start_trainer(
    context: SpawnContext | ForkServerContext, settings: VehicleSettings
) -> tuple[BaseProcess, Connection]:
    """Start the trainer of one vehicle; return its process and the agent's end of the pipe."""
    ours, theirs = Pipe()
    process = context.Process(
        target=run_trainer,
        args=(theirs, settings.task, node_of(settings), settings.step_seconds_min),
        name=f"trainer-{settings.node}",
        daemon=True,
    )
    process.start()
    theirs.close()
    return process, ours


def node_of(settings: VehicleSettings) -> Node:
    """Describe the node to its task."""
    return Node(
        id=settings.node,
        labels=settings.labels,
        data_directory=settings.directory / "data",
        seed=settings.seed,
    )


def run_trainer(pipe: Connection, task: str, node: Node, step_seconds_min: float) -> None:
    """Be a trainer process: the agent ends it by closing the pipe, not a Ctrl-C in the terminal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from hetertrain_vehicle.trainer import serve

    serve(pipe, task, node, step_seconds_min)
