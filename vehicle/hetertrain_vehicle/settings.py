"""What can be set for one vehicle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from hetertrain.core.eligibility import check_rules
from hetertrain.core.tiers import TIERS
from hetertrain.errors import SettingsError
from hetertrain.service import BrokerSettings, first_state
from hetertrain.transport.mqtt import Endpoint
from hetertrain.wire import topics
from hetertrain.wire.messages import NodeState
from hetertrain_vehicle.budgets import Limits

Rules = Annotated[tuple[str, ...], AfterValidator(check_rules)]


class VehicleSettings(BrokerSettings):
    """Settings of one vehicle."""

    section: ClassVar[str] = "vehicle"

    node: str = Field(description="this node's stable id")
    cell: str = Field(topics.CLOUD_CELL, description="the gateway to speak to at first, or 'cloud'")
    cells: dict[str, str] = Field(
        {},
        description="brokers of the cells that the vehicle comes through, as cell=HOST:PORT; it "
        "goes to the one that the signal 'cell' names, and to the next where it has no link",
    )
    cell_patience_seconds: float = Field(
        15.0, ge=1, description="how long without a link before the next of the cells is tried"
    )
    tier: str = Field("t2", description="the class of this node's link to begin with: t0 to t4")
    follow_link: bool = Field(
        True, description="change the tier when transfers show that the link is in another one"
    )
    task: str | None = Field(
        None, description="the task to train, as module:Class; a loop of your own needs none"
    )
    labels: dict[str, str] = Field({}, description="labels of this node, as key=value")
    seed: int = Field(0, ge=0, description="seeds the order of batches")
    step_seconds_min: float = Field(0.0, ge=0, description="pad each step to this duration")
    trainer_nice: int = Field(
        0, ge=0, le=19, description="how much the trainer gives way to other programs"
    )
    trainer_memory_mib: int | None = Field(
        None, ge=64, description="memory that the trainer may have; unset: what there is"
    )
    signals: str | None = Field(
        None,
        description="where the vehicle's signals come from: file:PATH, mqtt://HOST:PORT/PREFIX or "
        "kuksa://HOST:PORT",
    )
    signals_ca_file: str | None = Field(
        None, description="PEM file of the CA of the signals' source; set: TLS"
    )
    signals_seconds_max: float | None = Field(
        None, gt=0, description="a signal not repeated for so long is unknown; unset: it stands"
    )
    train_when: Rules = Field(
        (), description="train only when this holds, as 'Vehicle.Speed < 1'; may be repeated"
    )
    send_when: Rules = Field(
        (), description="use the link only when this holds, as 'network in wifi, ethernet'"
    )
    follow_job_rules: bool = Field(
        True, description="the job's own rules count too; off: the owner's alone"
    )
    megabytes_per_month: dict[str, float] = Field(
        {}, description="what may cross a link, by its type, as cellular=500; any: all together"
    )
    processor_seconds_per_day: float | None = Field(
        None, gt=0, description="processor time that training may take in a day"
    )
    disk_mib: float | None = Field(
        None, gt=0, description="room that this node's state may take before training rests"
    )
    trainer_cpu_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of one core that the trainer may take, by rests between its steps",
    )
    share_position: bool = Field(
        False,
        description="say in the heartbeat where the vehicle is, to about 100 m, by the signals "
        "Vehicle.CurrentLocation.Latitude and .Longitude",
    )
    share_log: bool = Field(
        False,
        description="show the end of this agent's log to an operator who asks for it; it may tell "
        "of the driver",
    )
    limit_link: bool = Field(
        False, description="hold the link to the tier's rate, and stay in the tier"
    )

    @property
    def directory(self) -> Path:
        """The folder of this node's state."""
        return self.state_directory / self.node

    @property
    def roams(self) -> bool:
        """Whether the vehicle may have been in another cell before."""
        return bool(self.cells) or self.signals is not None

    @property
    def limits(self) -> Limits:
        """What training may use up."""
        return Limits(self.megabytes_per_month, self.processor_seconds_per_day, self.disk_mib)

    def broker_of(self, cell: str) -> tuple[str, int]:
        """Return host and port of a cell's broker.

        Raises:
            SettingsError: the address is malformed.
        """
        address = self.cells.get(cell)
        return (self.broker_host, self.broker_port) if address is None else read_address(address)

    def endpoint_in(self, cell: str) -> Endpoint:
        """Describe a cell's broker for a connection.

        Raises:
            SettingsError: the address is malformed, or the key file cannot be read.
        """
        rate = TIERS[self.tier].rate_bits_per_second if self.limit_link else None
        host, port = self.broker_of(cell)
        return replace(self.endpoint(self.node, rate), host=host, port=port)

    def state(self) -> NodeState:
        """Return the node's state as it first announces it.

        Raises:
            SettingsError: a name cannot stand in a topic, the tier is unknown, or settings do not
                go together.
        """
        if self.share_position and self.signals is None:
            raise SettingsError("share_position needs signals: say where they come from")
        for cell, address in self.cells.items():
            topics.check_name("cell", cell)
            read_address(address)
        return first_state(
            node=self.node, job=self.job, cell=self.cell, tier=self.tier, role="vehicle"
        )


def read_address(text: str) -> tuple[str, int]:
    """Read ``HOST:PORT``.

    Raises:
        SettingsError: it is not of this form.
    """
    host, separator, port = text.rpartition(":")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise SettingsError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)
