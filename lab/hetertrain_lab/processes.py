"""What runs in the processes of a simulated fleet: the drivers of production, on virtual links."""

from __future__ import annotations

from pathlib import Path

from hetertrain.core.tiers import Tier
from hetertrain.core.worker import Trained, Worker
from hetertrain.transport.outbox import Outbox
from hetertrain.wire import topics
from hetertrain.wire.downlink import Downlink
from hetertrain.wire.messages import NodeState
from hetertrain.wire.signing import GATEWAY_ROLE
from hetertrain.wire.uplink import Uplink
from hetertrain_cloud.driver import JobDriver
from hetertrain_edge.driver import GatewayDriver
from hetertrain_lab.network import (
    LinkShape,
    VirtualLink,
)
from hetertrain_lab.process import Process, World, between, up_seconds
from hetertrain_lab.scenario import NodePlan
from hetertrain_lab.trainers import SimulatedTrainer
from hetertrain_vehicle.driver import VehicleDriver

JOB = "simulated"
CLOUD_SHAPE = LinkShape(rate_bits_per_second=1e12, latency_seconds=0.001)
FUSE_PUBLICATIONS_MAX = 6
ACTS_PER_SECOND_MAX = 20_000


CLOUD_SHAPE = LinkShape(rate_bits_per_second=1e12, latency_seconds=0.001)
FUSE_PUBLICATIONS_MAX = 6
ACTS_PER_SECOND_MAX = 20_000


class CloudProcess(Process):
    """The job's aggregator."""

    driver: JobDriver

    def build(self) -> None:
        """Recover the job from its directory."""
        fleet = self.fleet
        downlink = Downlink(
            JOB, topics.CLOUD_CELL, fleet.tiers, heartbeat_seconds=fleet.scenario.heartbeat_seconds
        )
        link = VirtualLink(
            fleet.broker,
            self.name,
            downlink.subscriptions,
            self.listener(lambda event, now: self.driver.take(event, now)),
            self.shape,
        )
        self.links = [link]
        self.driver = JobDriver(
            downlink=downlink,
            layout=fleet.layout,
            initial=fleet.initial,
            policy=fleet.policy,
            weights=fleet.weights,
            lineage=fleet.lineage(),
            directory=self.directory,
            link=link,
            on_version=fleet.version_made,
            wall_seconds=lambda: fleet.wall_milliseconds() / 1000,
            log=fleet.log,
        )
        fleet.cloud_recovered(self.driver.machine)
        self.driver.start(fleet.clock.now)


class GatewayProcess(Process):
    """An edge gateway."""

    driver: GatewayDriver

    def __init__(self, fleet: World, plan: NodePlan) -> None:
        super().__init__(fleet, plan.name, plan.shape, plan.troubles)
        self._tier = first_tier(fleet, plan)
        self._uplink_outages = 0

    def reachable(self) -> list[VirtualLink]:
        """Return the links that can be connected: without the cloud just the cell's."""
        return self.links[1:] if self._uplink_outages else self.links

    def begin_troubles(self) -> None:
        """Plan the first crash and the first outages."""
        super().begin_troubles()
        gateways, fleet = self.fleet.scenario.gateways, self.fleet
        share, seconds = gateways.uplink_outage_share, gateways.uplink_outage_seconds
        if not share:
            return

        def meet() -> None:
            if fleet.is_calm:
                return
            lasts = between(fleet.rng, seconds)
            self.lose_uplink(lasts)
            fleet.clock.at(fleet.clock.now + lasts + up_seconds(fleet.rng, share, seconds), meet)

        at = fleet.rng.random() * up_seconds(fleet.rng, share, seconds)
        fleet.clock.at(fleet.clock.now + at, meet)

    def lose_uplink(self, seconds: float) -> None:
        """Lose the link to the cloud, and that alone, for so long."""
        self._uplink_outages += 1
        if self.links:
            self.links[0].disconnect("the cloud is out of reach")

        def end() -> None:
            self._uplink_outages -= 1
            self.connect()

        self.fleet.clock.at(self.fleet.clock.now + seconds, end)

    def build(self) -> None:
        """Recover the gateway from its directory."""
        fleet, now = self.fleet, self.fleet.clock.now
        gateways = fleet.scenario.gateways
        state = NodeState(
            node=self.name,
            job=JOB,
            cell=topics.CLOUD_CELL,
            tier=self._tier.name,
            role=GATEWAY_ROLE,
            is_online=True,
            active=0,
        )
        beat = fleet.scenario.heartbeat_seconds
        uplink = Uplink(
            state,
            self._tier,
            heartbeat_seconds=beat,
            tiers=fleet.tiers,
            follows_link=fleet.scenario.follow_link,
        )
        downlink = Downlink(JOB, self.name, fleet.tiers, heartbeat_seconds=beat)
        north = VirtualLink(
            fleet.broker,
            self.name,
            uplink.subscriptions,
            self.listener(lambda event, now: self.driver.take("north", event, now)),
            self.shape,
            uplink.will,
        )
        south = VirtualLink(
            fleet.broker,
            f"{self.name}-south",
            downlink.subscriptions,
            self.listener(lambda event, now: self.driver.take("south", event, now)),
            CLOUD_SHAPE,
        )
        self.links = [north, south]
        self.driver = GatewayDriver(
            uplink=uplink,
            downlink=downlink,
            directory=self.directory,
            first_seq=fleet.wall_milliseconds(),
            north=north,
            south=south,
            log=fleet.log,
            forward=gateways.forward,
            inbox_bytes_max=gateways.inbox_bytes_max,
            local_after_seconds=gateways.local_after_seconds,
        )
        self.driver.recover(now)


class WatchedOutbox(Outbox):
    """An outbox whose updates the ledger hears of."""

    def __init__(self, path: Path, fleet: World) -> None:
        super().__init__(path, fleet.wall_milliseconds())
        self._fleet = fleet

    def put(self, seq: int, content: bytes) -> None:
        """Make a content durable, and note it."""
        super().put(seq, content)
        self._fleet.update_stored(content)


class VehicleProcess(Process):
    """A vehicle: its driver, and its trainer."""

    driver: VehicleDriver
    trainer: SimulatedTrainer

    def __init__(self, fleet: World, plan: NodePlan, index: int) -> None:
        super().__init__(fleet, plan.name, plan.shape, plan.troubles)
        self.cell = plan.cell
        self.cells = {plan.cell}
        """Those it has been in."""
        self._plan = plan
        self._index = index
        self._tier = first_tier(fleet, plan)

    def build(self) -> None:
        """Recover the vehicle from its directory."""
        fleet, plan = self.fleet, self._plan
        outbox = WatchedOutbox(self.directory / "outbox.db", fleet)
        worker = Worker(
            node=self.name,
            policy=fleet.policy,
            tier=self._tier,
            examples=fleet.examples(self._index),
            layout=fleet.layout.digest,
            next_seq=outbox.next_seq,
        )
        state = NodeState(
            node=self.name,
            job=JOB,
            cell=self.cell,
            tier=self._tier.name,
            role="vehicle",
            is_online=True,
        )
        uplink = Uplink(
            state,
            self._tier,
            fleet.layout.digest,
            heartbeat_seconds=fleet.scenario.heartbeat_seconds,
            tiers=fleet.tiers,
            follows_link=fleet.scenario.follow_link,
        )
        link = VirtualLink(
            fleet.broker,
            self.name,
            uplink.subscriptions,
            self.listener(lambda event, now: self.driver.take(event, now)),
            self.shape,
            uplink.will,
        )
        self.links = [link]
        self.trainer = SimulatedTrainer(
            fleet.clock,
            fleet.learner(self._index, self.num_starts),
            plan.step_seconds,
            plan.step_jitter,
            fleet.rng,
            self._trained,
            fleet.stepped,
        )
        self.driver = VehicleDriver(worker, uplink, outbox, link, self.trainer, fleet.log)
        self.driver.recover(fleet.clock.now, has_moved=plan.roam_seconds is not None)
        if self.num_starts == 1 and fleet.scenario.installed:
            self.driver.hold(fleet.installed, fleet.clock.now)

    def begin_troubles(self) -> None:
        """Plan the first change of cell, too."""
        super().begin_troubles()
        self._roam_later()

    def _roam_later(self) -> None:
        mean, clock = self._plan.roam_seconds, self.fleet.clock
        if mean is not None:
            clock.at(clock.now + 2 * mean * self.fleet.rng.random(), self._roam)

    def _roam(self) -> None:
        """Go over to another gateway, whatever is under way."""
        fleet = self.fleet
        if fleet.is_calm:
            return
        others = [cell for cell in fleet.cells if cell != self.cell]
        self.cell = fleet.rng.choice(others)
        self.cells.add(self.cell)
        self.act(lambda: self.driver.move(self.cell, fleet.clock.now))
        self._roam_later()

    def _trained(self, event: Trained) -> None:
        self.act(lambda: self.driver.trained(event, self.fleet.clock.now))

    def dismantle(self) -> None:
        """Stop the trainer and close the outbox."""
        self.trainer.stop()
        super().dismantle()


def first_tier(fleet: World, plan: NodePlan) -> Tier:
    """Return the tier that a node begins in."""
    if fleet.scenario.follow_link:
        return min(fleet.tiers.values(), key=lambda tier: tier.rate_bits_per_second)
    return fleet.tiers[plan.tier]
