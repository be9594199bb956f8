"""The edge gateway as a process: a node to the cloud, an aggregator to its cell.

One thread takes events of both connections from one mailbox.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from hetertrain import codec
from hetertrain.core.tiers import TIERS
from hetertrain.errors import SettingsError
from hetertrain.logging import get_logger
from hetertrain.service import BrokerSettings, Mailbox, Stop, node_claim
from hetertrain.transport import mqtt
from hetertrain.transport.database import own_directory
from hetertrain.wire import topics
from hetertrain.wire.downlink import Downlink
from hetertrain.wire.frames import NodeState, pack
from hetertrain.wire.uplink import Outgoing, Uplink
from hetertrain_edge.driver import GatewayDriver, Side

STATUS_SECONDS = 1.0


class EdgeSettings(BrokerSettings):
    """Settings of one edge gateway. The broker is the cloud's (north); the cell's may be another
    (south).
    """

    section: ClassVar[str] = "edge"

    node: str = Field(description="this gateway's stable id, and the name of its cell")
    tier: str = Field(
        "t4", description="the class of this gateway's link to the cloud to begin with: t0 to t4"
    )
    follow_link: bool = Field(
        True, description="change the tier when transfers show that the link is in another one"
    )
    south_host: str | None = Field(None, description="the cell's broker; unset: the same broker")
    south_port: int | None = Field(None, ge=1, le=65535, description="its port")

    def state(self) -> NodeState:
        """Return the gateway's state as it first announces it.

        Raises:
            SettingsError: a name cannot stand in a topic, or the tier is unknown.
        """
        topics.check_name("node", self.node)
        topics.check_name("job", self.job)
        if self.tier not in TIERS:
            raise SettingsError(f"tier {self.tier!r} is unknown: use one of {', '.join(TIERS)}")
        return NodeState(
            node=self.node,
            job=self.job,
            cell=topics.CLOUD_CELL,
            tier=self.tier,
            role="edge",
            is_online=True,
            active=0,
            label="gateway",
        )

    def south(self) -> mqtt.Endpoint:
        """Describe the cell's broker for a connection.

        Raises:
            SettingsError: the key file cannot be read.
        """
        north = self.endpoint(self.node)
        return replace(
            north,
            client_id=f"{north.client_id}-south",
            host=self.south_host or north.host,
            port=self.south_port or north.port,
        )

    @property
    def has_own_broker(self) -> bool:
        """Whether the cell has another broker than the cloud."""
        north = (self.broker_host, self.broker_port)
        return (self.south_host or north[0], self.south_port or north[1]) != north


Input = tuple[Side, mqtt.Event]


class EdgeService:
    """One gateway at work."""

    def __init__(self, settings: EdgeSettings) -> None:
        state = settings.state()
        self._owner = own_directory(settings.state_directory / settings.node)
        self._settings = settings
        self._mailbox: Mailbox[Input] = Mailbox()
        self._log = get_logger(node=settings.node)
        sign, check = settings.signer(), settings.verifier()
        tier, follows_link = TIERS[settings.tier], settings.follow_link
        uplink = Uplink(state, tier, follows_link=follows_link, sign=sign, check=check)
        downlink = Downlink(settings.job, settings.node, sign=sign, check=check)
        north, south = settings.endpoint(settings.node), settings.south()
        self._north = mqtt.Connection(
            north,
            uplink.subscriptions,
            lambda event: self._mailbox.put(("north", event)),
            uplink.will,
            uplink.other_subscriptions,
            node_claim(uplink, north),
        )
        self._south = mqtt.Connection(
            south, downlink.subscriptions, lambda event: self._mailbox.put(("south", event))
        )
        self._driver = GatewayDriver(
            uplink=uplink,
            downlink=downlink,
            directory=settings.state_directory / settings.node,
            first_seq=int(time.time() * 1000),
            north=self._north,
            south=self._south,
            log=self._log,
            relays_orders=settings.has_own_broker,
        )
        self._status_at = 0.0

    def run(self) -> int:
        """Work until stopped; return the exit code."""
        self._mailbox.stop_on_signals()
        codec.accelerate()
        self._driver.recover(time.monotonic())
        self._stop_renewer = self._settings.start_renewer()
        self._north.start()
        self._south.start()
        self._log.info("gateway_started")
        try:
            self._serve()
        finally:
            self._end()
        return 0

    def _serve(self) -> None:
        while True:
            event = self._mailbox.take(min(self._driver.wakes_at, self._status_at))
            if isinstance(event, Stop):
                return
            now = time.monotonic()
            if event is not None:
                self._driver.take(*event, now)
            self._driver.tick(now)
            if now >= self._status_at:
                self._status_at = now + STATUS_SECONDS
                status = self._driver.status(now)
                if status is not None:
                    topic = topics.status(self._settings.job, self._settings.node)
                    self._north.publish((Outgoing(topic, pack(status)),))

    def _end(self) -> None:
        self._mailbox.close()
        self._stop_renewer()
        self._north.publish((self._driver.uplink.will,))
        self._north.stop()
        self._south.stop()
        self._driver.keep(time.monotonic())
        self._driver.close()
        self._log.info("gateway_stopped", partials=self._driver.num_partials)
