"""The edge gateway as a process: a node to the cloud, an aggregator to its cell.

One thread takes events of both connections from one mailbox.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from hetertrain import codec
from hetertrain.core.tiers import TIERS
from hetertrain.errors import SettingsError, TransportError
from hetertrain.logging import get_logger, last_lines
from hetertrain.service import (
    BrokerSettings,
    Mailbox,
    Stop,
    first_state,
    node_claim,
    resident_mib,
)
from hetertrain.transport import mqtt
from hetertrain.transport.broker import EmbeddedBroker
from hetertrain.transport.database import own_directory
from hetertrain.wire import topics
from hetertrain.wire.downlink import Downlink
from hetertrain.wire.events import Outgoing
from hetertrain.wire.frames import pack
from hetertrain.wire.log_share import LogShare
from hetertrain.wire.messages import NodeState
from hetertrain.wire.signing import GATEWAY_ROLE
from hetertrain.wire.uplink import Uplink
from hetertrain_edge.cell_report import CellReport
from hetertrain_edge.driver import GatewayDriver, Side
from hetertrain_edge.forwarding import Form
from hetertrain_edge.own_work import OwnWork
from hetertrain_edge.traffic import MonthTraffic

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
    south_host: str | None = Field(
        None,
        description="the cell's own broker, reached with the same credential; unset: the cloud's",
    )
    south_port: int | None = Field(
        None, ge=0, le=65535, description="its port; 0: a free one, where it is south_embedded"
    )
    south_embedded: bool = Field(
        False,
        description="be the cell's broker too; it has no TLS and lets everybody do everything, so "
        "for networks of trusted devices only",
    )
    south_bind: str = Field(
        "127.0.0.1", description="the IPv4 address that south_embedded listens on; 0.0.0.0: all"
    )
    forward: Form = Field(
        Form.EXACT,
        description="how updates go to the cloud: exact, their sums or one by one, whichever is "
        "less; encoded, their sums in what the link's tier has for an update, for thin links; "
        "bundle, one by one, so that the cloud examines each",
    )
    inbox_mib_max: int = Field(
        1024,
        ge=1,
        description="disk for updates that the cloud has not settled; beyond it vehicles keep "
        "theirs",
    )
    local_versions: bool = Field(
        False, description="make versions for the cell while the cloud is out of reach"
    )
    local_after_seconds: float = Field(
        30.0, ge=0, description="how long the cloud must be out of reach before that"
    )
    share_log: bool = Field(
        True, description="show the end of this gateway's log to an operator who asks for it"
    )
    latitude: float | None = Field(
        None, ge=-90, le=90, description="where the gateway stands, in degrees, for maps"
    )
    longitude: float | None = Field(
        None, ge=-180, le=180, description="where the gateway stands, in degrees, for maps"
    )
    task: str | None = Field(
        None,
        description="train on this machine's own data too, as node NAME.own: the task as "
        "module:Class",
    )
    own_work_config: Path | None = Field(
        None,
        description="settings file of the node that trains here; where nodes have credentials it "
        "is enrolled as a vehicle of its own",
    )

    def check(self) -> None:
        """Insist that the settings go together.

        Raises:
            SettingsError: they do not.
        """
        if self.south_embedded and self.south_host is not None:
            raise SettingsError("south_embedded makes the cell's broker: leave south_host unset")
        if (self.latitude is None) is not (self.longitude is None):
            raise SettingsError("latitude and longitude go together: set both or none")
        if self.south_port == 0 and not self.south_embedded:
            raise SettingsError("south_port 0 means a free port, for south_embedded only")
        credentials = (self.tls_ca_file, self.broker_username, self.authority_file)
        if self.task is not None and self.own_work_config is None and any(credentials):
            raise SettingsError(
                "nodes have credentials here, and who trains needs its own: enrol it with "
                "`hetertrain vehicle enroll`, and name its settings file in own_work_config"
            )

    def south(self, north: mqtt.Endpoint, broker: EmbeddedBroker | None) -> mqtt.Endpoint:
        """Describe the cell's broker for a connection."""
        client_id = f"{north.client_id}-south"
        if broker is not None:
            return mqtt.Endpoint(host=broker.host, port=broker.port, client_id=client_id)
        if self.south_host is None:
            return replace(north, client_id=client_id, port=self.south_port or north.port)
        return replace(
            north,
            client_id=client_id,
            host=self.south_host,
            port=self.south_port or north.port,
            websocket_path=None,
        )

    def own_work(self, south: mqtt.Endpoint) -> tuple[str, ...]:
        """Return the arguments of the agent that trains beside the gateway; empty: none does."""
        given: dict[str, object] = {"task": self.task, "config": self.own_work_config}
        if not any(given.values()):
            return ()
        given |= {"cell": self.node, "broker-host": south.host, "broker-port": south.port}
        if self.own_work_config is None:
            node = topics.check_name("node", f"{self.node}.own")
            given |= {"node": node, "job": self.job, "state-directory": self.state_directory}
            given["broker-websocket-path"] = south.websocket_path
        return tuple(
            word
            for name, value in given.items()
            if value is not None
            for word in (f"--{name}", str(value))
        )

    def state(self) -> NodeState:
        """Return the gateway's state as it first announces it.

        Raises:
            SettingsError: a name cannot stand in a topic, or the tier is unknown.
        """
        state = first_state(
            node=self.node, job=self.job, cell=topics.CLOUD_CELL, tier=self.tier, role=GATEWAY_ROLE
        )
        return replace(
            state,
            active=0,
            label="gateway",
            latitude=self.latitude,
            longitude=self.longitude,
        )

    @property
    def has_own_broker(self) -> bool:
        """Whether the cell has another broker than the cloud."""
        north = (self.broker_host, self.broker_port)
        return (
            self.south_embedded
            or (self.south_host or north[0], self.south_port or north[1]) != north
        )


Input = tuple[Side, mqtt.Event]


class EdgeService:
    """One gateway at work."""

    def __init__(self, settings: EdgeSettings, log_flags: Sequence[str] = ()) -> None:
        """``log_flags``: how this process logs, for the one that trains beside it.

        Raises:
            SettingsError: the settings do not go together.
            StoreError: the state directory is not usable.
        """
        settings.check()
        state = settings.state()
        self._owner = own_directory(settings.state_directory / settings.node)
        self._settings = settings
        self._mailbox: Mailbox[Input] = Mailbox()
        self._log = get_logger(node=settings.node)
        sign, check = settings.signer(), settings.verifier()
        tier, follows_link = TIERS[settings.tier], settings.follow_link
        log_share = LogShare(last_lines if settings.share_log else None)
        uplink = Uplink(
            state, tier, follows_link=follows_link, sign=sign, check=check, log_share=log_share
        )
        downlink = Downlink(settings.job, settings.node, sign=sign, check=check)
        north = settings.endpoint(settings.node)
        directory = settings.state_directory / settings.node
        self._broker: EmbeddedBroker | None = None
        if settings.south_embedded:
            port = settings.south_port or 0
            self._broker = EmbeddedBroker(directory / "broker", port, bind=settings.south_bind)
        south = settings.south(north, self._broker)
        own = settings.own_work(south)
        self._own_work = OwnWork((*log_flags, *own), self._log) if own else None
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
            directory=directory,
            first_seq=int(time.time() * 1000),
            north=self._north,
            south=self._south,
            log=self._log,
            relays_orders=settings.has_own_broker,
            forward=settings.forward,
            inbox_bytes_max=settings.inbox_mib_max << 20,
            local_after_seconds=settings.local_after_seconds if settings.local_versions else None,
        )
        self._report: CellReport | None = None
        if settings.has_own_broker:
            self._report = CellReport(downlink, first_number=int(time.time() * 1000))
        self._traffic = MonthTraffic(directory, self._log)
        self._status_at = 0.0

    def run(self) -> int:
        """Work until stopped; return the exit code."""
        self._mailbox.stop_on_signals()
        codec.accelerate()
        with self._broker or nullcontext():
            if self._broker is not None:
                bind, port = self._broker.bind, self._broker.port
                self._log.info("south_broker_started", bind=bind, port=port)
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
                self._driver.take(*event, now, has_more=not self._mailbox.is_empty)
            if self._mailbox.is_empty or now >= self._driver.wakes_at:
                self._driver.tick(now)
            if now >= self._status_at:
                self._status_at = now + STATUS_SECONDS
                self._look_after_children(now)
                self._count(now)
                status = self._driver.status(now)
                if status is not None:
                    topic = topics.status(self._settings.job, self._settings.node)
                    self._north.publish((Outgoing(topic, pack(status)),))
                if self._report is not None:
                    self._north.publish(self._report.tick(self._driver.uplink, now))

    def _count(self, now: float) -> None:
        """Have the next heartbeat say what this process uses."""
        self._traffic.count(self._north.bytes_up + self._north.bytes_down, datetime.now())
        self._traffic.save(now)
        uplink = self._driver.uplink
        uplink.report(
            replace(uplink.state, month_bytes=self._traffic.num_bytes, rss_mib=resident_mib())
        )

    def _look_after_children(self, now: float) -> None:
        """Start again what has ended."""
        if self._broker is not None and not self._broker.is_running:
            self._log.error("south_broker_ended", port=self._broker.port)
            try:
                self._broker.start()
            except TransportError as error:
                self._log.error("south_broker_failed", error=str(error))
        if self._own_work is not None:
            self._own_work.look(now)
            self._driver.own_work = self._own_work.state

    def _end(self) -> None:
        self._mailbox.close()
        if self._own_work is not None:
            self._own_work.stop()
        self._stop_renewer()
        self._north.publish((self._driver.uplink.will,))
        self._north.stop()
        self._south.stop()
        self._traffic.save(math.inf)
        self._driver.keep(time.monotonic())
        self._driver.close()
        self._log.info("gateway_stopped", partials=self._driver.num_partials)
