"""Real trainer processes: what they may take, and what they may know."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hetertrain.transport.pipe import AgentEnd
from hetertrain.wire.messages import TrainCommand, TrainerReady
from hetertrain_vehicle.settings import VehicleSettings
from hetertrain_vehicle.trainer_process import TrainerProcess
from tests.integration.waiting import wait_until

TASK = "hetertrain_lab.driving:DrivingTask"
TRAIN_SECONDS = 3.0
STEPS_WITHOUT_END = 1_000_000


@pytest.mark.broker
def test_a_trainer_keeps_to_its_share_of_the_processor_and_stops_at_once(tmp_path: Path) -> None:
    share = 0.1
    settings = VehicleSettings(
        job="j",
        node="n",
        task=TASK,
        labels={"index": "0", "of": "2"},
        trainer_cpu_share=share,
        state_directory=tmp_path,
    )
    trainers = TrainerProcess(multiprocessing.get_context("spawn"), settings)
    pipe = AgentEnd(trainers.start())
    try:
        ready = pipe.receive()
        assert isinstance(ready, TrainerReady)
        pipe.accept(ready)
        pipe.order(TrainCommand(steps=STEPS_WITHOUT_END, is_fresh=False), None)
        time.sleep(TRAIN_SECONDS)
        pipe.interrupt()
        said = pipe.receive()
        assert isinstance(said, tuple)
        report = said[0]
    finally:
        pipe.close()
        trainers.stop()
    assert report.steps > 0
    # The report's own work is not rested for yet.
    assert 0 < report.cpu_seconds / report.seconds < 2 * share


@pytest.mark.broker
def test_a_trainer_does_not_know_its_agents_secrets(tmp_path: Path) -> None:
    secrets = {
        "HETERTRAIN_BROKER_PASSWORD": "hunter2",
        "HETERTRAIN_VEHICLE_BROKER_PASSWORD": "hunter2",
        "HETERTRAIN_TOKEN": "hunter2",
    }
    flags = ["--job", "j", "--node", "n", "--task", TASK, "--state-directory", str(tmp_path)]
    agent = subprocess.Popen(
        [sys.executable, "-m", "hetertrain", "vehicle", *flags],
        env=os.environ | secrets | {"HETERTRAIN_COLOUR": "green"},
        stderr=subprocess.DEVNULL,
    )
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")

    def environments() -> list[bytes]:
        # Between fork and exec a child still shows what its parent began with.
        return [
            Path(f"/proc/{pid}/environ").read_bytes()
            for pid in children.read_text().split()
            if b"multiprocessing" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]

    try:
        wait_until(lambda: len(environments()) == 2, "the trainer and its resource tracker")
        for environment in environments():
            assert b"HETERTRAIN_COLOUR=green" in environment
            assert b"hunter2" not in environment
    finally:
        agent.terminate()
        agent.wait(30)
