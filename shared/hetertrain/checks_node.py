"""What a doctor looks at on the node itself, and between it and the control plane: disk, clock,
certificate, control plane.
"""

from __future__ import annotations

import datetime
import os
import shutil
import ssl
import tempfile
import time
from contextlib import suppress
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx2
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import NameOID

from hetertrain.config import read_text
from hetertrain.control import ControlClient
from hetertrain.doctor import Check, Finding, failed, ok, skipped
from hetertrain.errors import ControlError, CredentialError, SettingsError
from hetertrain.security import certified_role, read_certificate, read_key
from hetertrain.service import BrokerSettings
from hetertrain.transport.database import owner_of

DISK_SECONDS = 5.0
CERTIFICATE_SECONDS = 5.0
CONTROL_SECONDS = 8.0
FREE_BYTES_MIN = 64 << 20
CLOCK_SECONDS_MAX = 60.0
"""A clock may be so far from the control plane's."""
REACH = "check control_url, and that the network lets HTTPS pass"


def node_checks(settings: BrokerSettings, node: str, directory: Path) -> list[Check]:
    """Return the checks of a node's disk (its state is in ``directory``), clock and certificate."""
    return [
        Check(
            name="disk",
            run=lambda: check_disk(directory),
            seconds=DISK_SECONDS,
            silence="the disk does not answer: check it",
        ),
        Check(
            name="clock",
            run=lambda: check_clock(settings),
            seconds=CONTROL_SECONDS,
            silence=REACH,
        ),
        Check(
            name="certificate",
            run=lambda: check_certificate(settings, node),
            seconds=CERTIFICATE_SECONDS,
            silence="the disk with the certificate does not answer: check it",
        ),
    ]


def control_check(settings: BrokerSettings) -> Check:
    """Return the check of the way to the control plane."""
    return Check(
        name="control",
        run=lambda: check_control(settings),
        seconds=CONTROL_SECONDS,
        silence=REACH,
    )


def check_disk(directory: Path) -> Finding:
    """Look whether state can be written, how much room there is, and who uses it."""
    place = next(each for each in (directory, *directory.absolute().parents) if each.exists())
    try:
        if place == directory:
            with tempfile.TemporaryFile(dir=directory) as file:
                file.write(bytes(4096))
                file.flush()
                os.fsync(file.fileno())
        elif not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
            return failed(
                f"{directory} cannot be made in {place}",
                "name another state_directory, or give this user the right to write there",
            )
        free_bytes = shutil.disk_usage(place).free
    except OSError as error:
        advice = "check the disk, its space and its rights, or name another state_directory"
        return failed(f"{directory} cannot be written: {error}", advice)
    found = f"{directory}, {free_bytes >> 20} MiB free"
    if free_bytes < FREE_BYTES_MIN:
        return failed(found, f"make room: {FREE_BYTES_MIN >> 20} MiB at least")
    owner = owner_of(directory)
    return ok(found + (f"; process {owner} works there" if owner else "; nobody works there now"))


def check_clock(settings: BrokerSettings) -> Finding:
    """Compare the clock with our certificate's beginning, and with the control plane's clock."""
    now = datetime.datetime.now(datetime.UTC)
    advice = "set the clock, as with NTP: certificates and signatures are valid by it"
    begins = None
    if settings.tls_certificate_file is not None:
        # What is wrong with the certificate, its own check says.
        with suppress(CredentialError):
            begins = read_certificate(Path(settings.tls_certificate_file)).not_valid_before_utc
    if begins is not None and now < begins:
        return failed(f"{now:%F %T} UTC is before our certificate's {begins:%F %T}", advice)
    offset = control_offset_seconds(settings.control_url) if settings.control_url else None
    if offset is None:
        finding = skipped if begins is None else ok
        return finding(f"{now:%F %T} UTC; no control plane said its time to compare")
    found = f"{now:%F %T} UTC, {offset:+.0f} s from the control plane's"
    return ok(found) if abs(offset) <= CLOCK_SECONDS_MAX else failed(found, advice)


def control_offset_seconds(url: str) -> float | None:
    """Return our clock minus the control plane's, to a second; None: nobody says.

    Nobody is authenticated, since with a wrong clock no certificate is valid, and nothing but the
    time is asked for and believed.
    """
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    began = time.time()
    try:
        with httpx2.Client(verify=context, timeout=CONTROL_SECONDS / 2) as http:
            date = http.head(f"{url.rstrip('/')}/healthz").headers.get("Date", "")
            theirs = parsedate_to_datetime(date).timestamp()
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError):
        return None
    # A date is cut to the second.
    return (began + time.time()) / 2 - (theirs + 0.5)


def check_certificate(settings: BrokerSettings, node: str) -> Finding:
    """Look whether our certificate is good: key, dates, authority, name and role."""
    if settings.tls_certificate_file is None and settings.tls_key_file is None:
        return skipped("not used: tls_certificate_file is not set")
    again = f"enroll again: hetertrain {settings.section} enroll"
    if settings.tls_certificate_file is None or settings.tls_key_file is None:
        return failed(
            "only one of tls_certificate_file and tls_key_file is set", "set both, or neither"
        )
    file = Path(settings.tls_certificate_file)
    try:
        certificate, key = read_certificate(file), read_key(Path(settings.tls_key_file))
        if settings.authority_file is not None:
            certificate.verify_directly_issued_by(read_certificate(Path(settings.authority_file)))
        is_pair = key.public_key() == certificate.public_key()
    except CredentialError as error:
        return failed(str(error), f"check the file and its rights, or {again}")
    except (ValueError, TypeError, InvalidSignature):
        return failed(f"{file} is not of the authority in {settings.authority_file}", again)
    if not is_pair:
        return failed(f"{settings.tls_key_file} is not the key of {file}", again)
    now, ends = datetime.datetime.now(datetime.UTC), certificate.not_valid_after_utc
    if now > ends:
        return failed(f"{file} expired on {ends:%F %T} UTC", f"check the clock, then {again}")
    names = [str(n.value) for n in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if settings.authority_file is not None and names != [node]:
        advice = "set node to the name that was enrolled"
        return failed(f"{file} is of {', '.join(names)}, not of {node}", advice)
    role = certified_role(certificate)
    if settings.authority_file is not None and role not in (None, settings.section):
        return failed(f"{file} is for the role {role}, not {settings.section}", again)
    return ok(f"of {', '.join(names)}, for {(ends - now).days} more days, until {ends:%F}")


def check_control(settings: BrokerSettings) -> Finding:
    """Look whether the control plane answers, where our certificate is to be renewed."""
    url = settings.control_url
    if url is None:
        return skipped("not used: control_url is not set")
    advice = "check control_url, tls_ca_file and the network: the certificate is renewed there"
    try:
        ca_file = settings.tls_ca_file
        pem = None if ca_file is None else read_text(Path(ca_file), "tls_ca_file")
        with ControlClient(url, authority_pem=pem, timeout_seconds=CONTROL_SECONDS / 2) as client:
            client.ready()
    except (ControlError, SettingsError, ssl.SSLError) as error:
        return failed(str(error), advice)
    return ok(f"{url} answers")
