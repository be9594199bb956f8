"""The control plane itself: its release, its settings, its authority and its broker."""

from __future__ import annotations

import platform
from datetime import datetime

from fastapi import APIRouter
from pydantic import Field

from hetertrain import __version__
from hetertrain_cloud.control.api.convention import (
    ALWAYS,
    Body,
    Caller,
    Plane,
    problems,
    shown_as,
)
from hetertrain_cloud.control.credentials import expires_at
from hetertrain_cloud.control.survey import disk_free

router = APIRouter(prefix="/api/v1", tags=["live"])


class SettingShown(Body):
    """A setting as it is in force."""

    name: str = Field(examples=["listen_port"])
    description: str
    value: str | None = Field(description="null: unset", examples=["8443"])
    is_given: bool = Field(description="by flag, variable or file; else it is the default")
    variable: str = Field(
        description="the environment variable that sets it",
        examples=["HETERTRAIN_CLOUD_LISTEN_PORT"],
    )


class AuthorityShown(Body):
    """The fleet's certificate authority."""

    fingerprint: str = Field(description="SHA-256 of the certificate, hexadecimal")
    begins_at: datetime
    expires_at: datetime


class CertificateShown(Body):
    """One of the cloud's own certificates."""

    name: str = Field(description="what it is for", examples=["the API"])
    expires_at: datetime


class ConnectedBroker(Body):
    """The broker as nodes reach it."""

    kind: str = Field(
        description="mosquitto: it knows who may do what; embedded: one of our own, which does not",
        examples=["mosquitto"],
    )
    host: str
    port: int
    is_tls: bool
    websocket_path: str | None
    error: str = Field(description="empty: the control plane reaches it")
    access_error: str = Field(description="empty: its rules are up to date")


class SettingsShown(Body):
    """The control plane itself; nothing in it is secret."""

    version: str = Field(description="the release", examples=["0.1.0"])
    python: str = Field(examples=["3.11.7"])
    machine: str = Field(examples=["Linux x86_64"])
    database: str = Field(description="sqlite or postgresql", examples=["postgresql"])
    disk_free_share: float | None = Field(
        description="of the disk of the state directory; null: not known", examples=[0.42]
    )
    disk_free_bytes: int
    authority: AuthorityShown
    certificates: list[CertificateShown]
    broker: ConnectedBroker
    settings: list[SettingShown]


@router.get("/settings", responses=problems(*ALWAYS))
def show_settings(caller: Caller, plane: Plane) -> SettingsShown:
    """Show the settings in force and what the control plane runs on. Whether the audit trail is
    whole is a call of its own: ``/api/v1/audit/verification``.
    """
    caller.require("settings:read")
    share, num_bytes = disk_free(plane.jobs_directory)
    certificates = ((name, expires_at(path)) for name, path in plane.certificates.items())
    authority = plane.authority
    return SettingsShown(
        version=__version__,
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}",
        database=plane.database.url.get_backend_name(),
        disk_free_share=share,
        disk_free_bytes=num_bytes,
        authority=shown_as(AuthorityShown, authority, fingerprint=authority.fingerprint()),
        certificates=[
            CertificateShown(name=name, expires_at=at)
            for name, at in certificates
            if at is not None
        ],
        broker=shown_as(
            ConnectedBroker,
            plane.advertised,
            kind="embedded" if plane.access is None else "mosquitto",
            error=plane.live.broker_error,
            access_error=plane.access_error,
        ),
        settings=[shown_as(SettingShown, each) for each in plane.settings],
    )
