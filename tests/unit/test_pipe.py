"""The two ends of the pipe between an agent and its trainer, with and without shared memory."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from hetertrain.errors import FrameError, LayoutError
from hetertrain.transport import pipe
from hetertrain.transport.pipe import AgentEnd, TrainerEnd
from hetertrain.wire.frames import pack
from hetertrain.wire.messages import MemoryShared, TrainCommand, TrainedReport, TrainerReady

SIZE = 5
REPORT = TrainedReport(steps=3, seconds=0.1, loss=0.5, integers=())


def ready(size: int = SIZE) -> TrainerReady:
    return TrainerReady(examples=1, layout="l", size=size, label="")


@pytest.fixture(params=["in shared memory", "in frames"])
def ends(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[AgentEnd, TrainerEnd]]:
    monkeypatch.setattr(pipe, "CAN_SHARE_MEMORY", request.param == "in shared memory")
    ours, theirs = Pipe()
    agent, trainer = AgentEnd(ours), TrainerEnd(theirs, SIZE)
    introduce(agent, trainer)
    yield agent, trainer
    agent.close()
    trainer.close()


def introduce(agent: AgentEnd, trainer: TrainerEnd) -> None:
    trainer.ready(ready())
    said = agent.receive()
    assert isinstance(said, TrainerReady)
    agent.accept(said)
    if pipe.CAN_SHARE_MEMORY:
        assert isinstance(trainer.receive(), MemoryShared)


def test_an_order_and_its_report_carry_their_vectors(ends: tuple[AgentEnd, TrainerEnd]) -> None:
    agent, trainer = ends
    start = np.arange(SIZE, dtype=np.float32)

    agent.order(TrainCommand(steps=3, is_fresh=False, integers=(7,)), start)
    command = trainer.receive()
    assert command == TrainCommand(steps=3, is_fresh=False, integers=(7,), has_start=True)
    np.testing.assert_array_equal(trainer.vector, start)

    trainer.vector[:] = start + 1
    trainer.report(REPORT)
    said = agent.receive()
    assert isinstance(said, tuple)
    np.testing.assert_array_equal(said[1], start + 1)


def test_a_report_stays_as_it_was_when_the_next_is_written(
    ends: tuple[AgentEnd, TrainerEnd],
) -> None:
    agent, trainer = ends
    agent.order(TrainCommand(steps=1, is_fresh=False), None)
    trainer.receive()
    trainer.vector[:] = 1
    trainer.report(REPORT)
    said = agent.receive()
    trainer.vector[:] = 2
    assert isinstance(said, tuple)
    assert said[1].tolist() == [1.0] * SIZE


def test_an_order_for_another_size_is_refused(ends: tuple[AgentEnd, TrainerEnd]) -> None:
    with pytest.raises(LayoutError):
        ends[0].order(TrainCommand(steps=1, is_fresh=False), np.zeros(SIZE + 1, np.float32))


@pytest.mark.parametrize(
    "frame",
    [
        pack(REPORT, bytes(4 * SIZE)),  # without an order
        pack(ready(size=0)),
        pack(ready(size=1 << 40)),
        pack(TrainCommand(steps=1, is_fresh=False)),
    ],
)
def test_an_agent_refuses_what_a_trainer_must_not_say(frame: bytes) -> None:
    ours, theirs = Pipe()
    theirs.send_bytes(frame)
    with pytest.raises(FrameError):
        AgentEnd(ours).receive()


def test_an_agent_refuses_a_vector_of_another_size(ends: tuple[AgentEnd, TrainerEnd]) -> None:
    agent, trainer = ends
    agent.order(TrainCommand(steps=1, is_fresh=False), None)
    connection: Connection = trainer._connection
    connection.send_bytes(pack(REPORT, bytes(4 * SIZE - 1)))
    with pytest.raises(FrameError, match="size"):
        agent.receive()


def test_a_trainer_refuses_memory_and_vectors_of_another_size() -> None:
    ours, theirs = Pipe()
    trainer = TrainerEnd(theirs, SIZE)
    ours.send_bytes(pack(TrainCommand(steps=1, is_fresh=False, has_start=True), bytes(4)))
    with pytest.raises(FrameError):
        trainer.receive()
    ours.send_bytes(pack(MemoryShared(size=SIZE + 1)))
    with pytest.raises(FrameError):
        trainer.receive()


def test_nobody_can_pull_the_memory_from_under_the_other() -> None:
    descriptor = pipe._new_memory(SIZE)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 1)
    os.close(descriptor)


def test_the_memory_is_freed_with_the_pipe() -> None:
    def num_mapped() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("hetertrain-vector")

    before = num_mapped()
    ours, theirs = Pipe()
    agent, trainer = AgentEnd(ours), TrainerEnd(theirs, SIZE)
    introduce(agent, trainer)
    assert num_mapped() == before + 2
    agent.close()
    trainer.close()
    del trainer
    assert num_mapped() == before
