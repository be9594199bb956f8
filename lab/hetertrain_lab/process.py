"""One process of a simulated fleet: it lives, sleeps, loses its network, crashes and comes back.

A crash throws the driver away, in the middle of a step where the seed says so; a restart builds it
anew from the directory. What runs in a process is in ``processes``.
"""

from __future__ import annotations

import random
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from hetertrain.core.aggregator import Aggregator, Release
from hetertrain.core.layout import ParameterLayout
from hetertrain.core.policy import SyncPolicy, WeightPolicy
from hetertrain.core.tiers import Tier
from hetertrain.core.update import Checkpoint
from hetertrain.logging import Logger
from hetertrain.transport import mqtt
from hetertrain.wire.events import ModelReceived
from hetertrain_cloud.history import Progress
from hetertrain_lab.invariants import ViolationError
from hetertrain_lab.network import (
    Clock,
    LinkShape,
    SimulatedCrashError,
    VirtualBroker,
    VirtualLink,
)
from hetertrain_lab.scenario import Range, Scenario, Troubles
from hetertrain_lab.trainers import Learner

FUSE_PUBLICATIONS_MAX = 6
ACTS_PER_SECOND_MAX = 20_000


ACTS_PER_SECOND_MAX = 20_000


class World(Protocol):
    """What processes know of the fleet that they belong to."""

    scenario: Scenario
    directory: Path
    clock: Clock
    rng: random.Random
    broker: VirtualBroker
    log: Logger
    tiers: dict[str, Tier]
    policy: SyncPolicy
    weights: WeightPolicy
    layout: ParameterLayout
    initial: Checkpoint
    installed: ModelReceived
    is_calm: bool
    num_crashes: int
    cells: tuple[str, ...]
    """The gateways' cells."""

    def learner(self, index: int, life: int) -> Learner:
        """Build what a vehicle trains, in its so-many-th life."""

    def examples(self, index: int) -> int:
        """Count the examples that a vehicle holds."""

    def lineage(self) -> str:
        """Name the run that the cloud would begin now."""

    def wall_milliseconds(self) -> int:
        """Return the wall clock."""

    def stepped(self, steps: int) -> None:
        """Count local steps."""

    def version_made(self, release: Release, progress: Progress) -> None:
        """Note a version."""

    def update_stored(self, content: bytes) -> None:
        """Note an update that entered its outbox."""

    def cloud_recovered(self, machine: Aggregator) -> None:
        """Note what the cloud is after a start."""

    def disk_lost(self, name: str) -> None:
        """Note a disk that is gone."""

    def check(self, process: Process) -> None:
        """Check what must hold after each step of a process."""


class Driver(Protocol):
    """What a process asks of the driver that it runs."""

    @property
    def wakes_at(self) -> float:
        """When to call ``tick``, if nothing happens before."""

    def tick(self, now: float) -> None:
        """Do what is due."""

    def close(self) -> None:
        """Close the stores."""


class Process(ABC):
    """One simulated process: alive or not, with a directory that outlives it."""

    driver: Driver

    def __init__(self, fleet: World, name: str, shape: LinkShape, troubles: Troubles):
        self.fleet, self.name, self.shape, self.troubles = fleet, name, shape, troubles
        self.directory = fleet.directory / name
        self.links: list[VirtualLink] = []
        self.is_up = False
        self.num_starts = 0
        self._outages = 0
        self._wake_at = float("inf")
        self._life = 0
        self._second, self._acts = 0, 0

    @abstractmethod
    def build(self) -> None:
        """Make the driver and its links from what is on disk."""

    def dismantle(self) -> None:
        """Close the stores, so that the next life can open them."""
        self.driver.close()

    def start(self) -> None:
        """Start the process."""
        self.is_up = True
        self.num_starts += 1
        self._life += 1
        self._wake_at = float("inf")
        self.act(self.build)
        self.connect()

    def connect(self) -> None:
        """Connect what is not, if the process lives and its network is there."""
        if self.is_up and not self._outages:
            for link in self.reachable():
                if not link.is_connected:
                    link.connect()

    def reachable(self) -> list[VirtualLink]:
        """Return the links that can be connected while the process has its network."""
        return self.links

    def act(self, action: Callable[[], None]) -> None:
        """Let the process do something; it may die of it."""
        if not self.is_up:
            return
        try:
            action()
        except SimulatedCrashError:
            self.crash()
            return
        self._sleep()
        self.fleet.check(self)

    def _sleep(self) -> None:
        at = max(self.driver.wakes_at, self.fleet.clock.now + 1e-6)
        if at < self._wake_at:
            self._wake_at = at
            life = self._life
            self.fleet.clock.at(at, lambda: self._wake(at, life))

    def _wake(self, at: float, life: int) -> None:
        if life == self._life and at == self._wake_at:
            self._wake_at = float("inf")
            self.act(lambda: self.driver.tick(self.fleet.clock.now))

    def check_rest(self) -> None:
        """Check that the process does not wake again and again without time passing."""
        second = int(self.fleet.clock.now)
        if second != self._second:
            self._second, self._acts = second, 0
        self._acts += 1
        if self._acts > ACTS_PER_SECOND_MAX:
            raise ViolationError(f"{self.name} is busy: {self._acts} steps in one second")

    def crash(self) -> None:
        """Die at once; come back later, sometimes with an empty disk."""
        if not self.is_up:
            return
        rng, fleet = self.fleet.rng, self.fleet
        self.is_up = False
        self._life += 1
        for link in self.links:
            link.disconnect("crash", is_abrupt=True)
        self.dismantle()
        fleet.num_crashes += 1
        if rng.random() < self.troubles.disk_loss:
            shutil.rmtree(self.directory, ignore_errors=True)
            fleet.disk_lost(self.name)
        fleet.clock.at(fleet.clock.now + between(rng, self.troubles.restart_seconds), self.start)

    def begin_troubles(self) -> None:
        """Plan the first crash and the first outage."""
        troubles, rng, clock = self.troubles, self.fleet.rng, self.fleet.clock
        if troubles.crash_seconds is not None:
            clock.at(clock.now + 2 * troubles.crash_seconds * rng.random(), self._meet_crash)
        if troubles.outage_share:
            clock.at(clock.now + rng.random() * self._up_seconds(), self._meet_outage)

    def _up_seconds(self) -> float:
        troubles = self.troubles
        return up_seconds(self.fleet.rng, troubles.outage_share, troubles.outage_seconds)

    def _meet_crash(self) -> None:
        assert self.troubles.crash_seconds is not None
        fleet = self.fleet
        if fleet.is_calm:
            return
        if self.is_up and self.links:
            if fleet.rng.random() < 0.5:  # half of all crashes in mid-step
                self.links[0].fuse = fleet.rng.randrange(FUSE_PUBLICATIONS_MAX)
            else:
                self.crash()
        after = 2 * self.troubles.crash_seconds * fleet.rng.random()
        fleet.clock.at(fleet.clock.now + after, self._meet_crash)

    def _meet_outage(self) -> None:
        fleet = self.fleet
        if fleet.is_calm:
            return
        self._outages += 1
        for link in self.links:
            link.disconnect("outage")
        after = between(fleet.rng, self.troubles.outage_seconds)
        fleet.clock.at(fleet.clock.now + after, self._end_outage)

    def _end_outage(self) -> None:
        fleet = self.fleet
        self._outages -= 1
        self.connect()
        fleet.clock.at(fleet.clock.now + self._up_seconds(), self._meet_outage)

    def listener(self, take: Callable[[mqtt.Event, float], None]) -> Callable[[mqtt.Event], None]:
        """Return what a link calls with events for the present life of the process."""
        life = self._life

        def listen(event: mqtt.Event) -> None:
            if life == self._life:
                self.act(lambda: take(event, self.fleet.clock.now))

        return listen


def up_seconds(rng: random.Random, share: float, outage_seconds: Range) -> float:
    """Draw how long a link stands between outages that take ``share`` of the time."""
    mean = sum(outage_seconds) / 2
    return 2 * mean * (1 - share) / max(share, 1e-9) * rng.random()


def between(rng: random.Random, bounds: Range) -> float:
    """Draw a number from a range."""
    least, most = bounds
    return least + (most - least) * rng.random()
