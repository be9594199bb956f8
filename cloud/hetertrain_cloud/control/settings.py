"""Settings of the cloud side: control plane, supervisor, and what they tell nodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, SecretStr

from hetertrain.config import is_secret, read_text, variable_name
from hetertrain.service import ConnectionSettings
from hetertrain_cloud.control.database import Database

CONTROL_DIRECTORY = "control"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSetting:
    """One setting as it is in force."""

    name: str
    description: str
    value: str | None
    is_given: bool
    """By flag, variable or file; else it is the default."""
    variable: str


class CloudSettings(ConnectionSettings):
    """Settings of the cloud side."""

    section: ClassVar[str] = "cloud"

    listen_host: str = Field("127.0.0.1", description="address that the API listens on")
    listen_port: int = Field(8443, ge=0, le=65535, description="its port; 0: a free one")
    hosts: str = Field(
        "localhost,127.0.0.1",
        description="names and addresses of this machine, for the API's certificate",
    )
    tls_directory: Path | None = Field(
        None, description="set: tls.crt and tls.key of the API, instead of one of our authority"
    )
    database_url: SecretStr | None = Field(
        None, description="the database; unset: SQLite in the state directory"
    )
    database_password_file: Path | None = Field(
        None, description="a file that holds the password, for a database_url without one"
    )
    authority_directory: Path | None = Field(
        None, description="authority.key and .crt; unset: in the state directory"
    )
    authority_passphrase_file: Path | None = Field(
        None, description="passphrase of authority.key; unset: one is made"
    )
    broker: Literal["embedded", "mosquitto"] = Field(
        "embedded",
        description="embedded: one of our own, on loopback; mosquitto: with dynamic security, "
        "where we log in with certificates of our authority",
    )
    advertised_host: str | None = Field(
        None, description="the broker's host as nodes reach it; unset: broker_host"
    )
    advertised_port: int | None = Field(
        None, ge=1, le=65535, description="the broker's port as nodes reach it"
    )
    advertised_websocket_path: str | None = Field(
        None, description="set: nodes use MQTT over WebSocket at this path"
    )

    @property
    def directory(self) -> Path:
        """The folder of the control plane's state."""
        return self.state_directory / CONTROL_DIRECTORY

    @property
    def jobs_directory(self) -> Path:
        """The folder with a folder for each job's state."""
        return self.state_directory / "jobs"

    @property
    def authority(self) -> Path:
        """The folder of the certificate authority."""
        return self.authority_directory or self.directory / "authority"

    @property
    def host_names(self) -> tuple[str, ...]:
        """Names and addresses of this machine."""
        return tuple(host.strip() for host in self.hosts.split(",") if host.strip())

    def shown(self) -> tuple[ShownSetting, ...]:
        """Describe the settings in force that are not secret."""
        fields = CloudSettings.model_fields
        return tuple(
            ShownSetting(
                name=name,
                description=info.description or "",
                value=None if getattr(self, name) is None else str(getattr(self, name)),
                is_given=name in self.model_fields_set,
                variable=variable_name(CloudSettings, name),
            )
            for name, info in fields.items()
            if not is_secret(info)
        )

    def open_database(self) -> Database:
        """Open the database.

        Raises:
            SettingsError: the file of its password cannot be read.
            StoreError: its address is wrong.
        """
        url, password = f"sqlite:///{self.directory / 'control.db'}", None
        if self.database_url is not None:
            url = self.database_url.get_secret_value()
        if self.database_password_file is not None:
            password = read_text(self.database_password_file, "database_password_file").strip()
        return Database(url, password)

    def credential(self, user: str) -> dict[str, str]:
        """Return the settings by which a part of ours logs in at the broker."""
        if self.broker == "embedded":
            return {}
        own = self.directory / "credentials"
        return {
            "tls_ca_file": str(self.authority / "authority.crt"),
            "tls_certificate_file": str(own / f"{user}.crt"),
            "tls_key_file": str(own / f"{user}.key"),
        }
