"""The certificates of the cloud's own parts, signed by the fleet's authority: the API's, those by
which control plane and aggregators log in at the broker, and the broker's.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path

from cryptography import x509

from hetertrain.security import load_or_make_key, write_private
from hetertrain_cloud.control.access import AGGREGATOR, CONTROL
from hetertrain_cloud.control.authority import Authority
from hetertrain_cloud.control.dynsec import initial_configuration

LIFETIME = datetime.timedelta(days=90)
RENEWAL = datetime.timedelta(days=30)
"""A certificate is made anew when so much of its life is left."""
DYNSEC_FILE = "dynamic-security.json"


def write_own(authority: Authority, directory: Path, now: datetime.datetime) -> None:
    """Make the certificates of control plane and aggregators, where they are missing or old."""
    for user in (CONTROL, AGGREGATOR):
        path = directory / f"{user}.crt"
        if _is_due(path, authority, now):
            key = load_or_make_key(directory / f"{user}.key").public_key()
            issued = authority.issue_node(user, None, key, now, LIFETIME)
            write_private(path, issued.pem.encode())


def write_server(
    authority: Authority, directory: Path, name: str, hosts: tuple[str, ...], now: datetime.datetime
) -> bool:
    """Make a server's certificate where it is missing, old, or for other hosts; return whether."""
    path = directory / f"{name}.crt"
    if not _is_due(path, authority, now) and _hosts(path) == set(hosts):
        return False
    key = load_or_make_key(directory / f"{name}.key").public_key()
    write_private(path, authority.issue_server(hosts, key, now, LIFETIME).pem.encode())
    return True


def write_broker_files(
    authority: Authority, directory: Path, hosts: tuple[str, ...], now: datetime.datetime
) -> list[str]:
    """Write what Mosquitto needs beside its configuration; return what was written.

    A dynamic security file that is there is kept if it can be read: the plugin's own. One that a
    crash tore is begun anew, and the control plane puts everybody's rights back.
    """
    written = []
    directory.mkdir(parents=True, exist_ok=True)
    trusted = directory / "authority.crt"
    if not trusted.exists() or trusted.read_text(encoding="ascii") != authority.pem:
        write_private(trusted, authority.pem.encode())
        written.append(trusted.name)
    if write_server(authority, directory, "broker", hosts, now):
        written += ["broker.crt", "broker.key"]
    rules = directory / DYNSEC_FILE
    if not _is_whole(rules):
        write_private(rules, initial_configuration().encode())
        written.append(rules.name)
    return written


def expires_at(path: Path) -> datetime.datetime | None:
    """Return when the certificate in a file expires; None where there is none."""
    certificate = _read(path)
    return None if certificate is None else certificate.not_valid_after_utc


def _is_whole(path: Path) -> bool:
    try:
        rules = json.loads(path.read_bytes())
        return any(client["username"] == CONTROL for client in rules["clients"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _is_due(path: Path, authority: Authority, now: datetime.datetime) -> bool:
    certificate = _read(path)
    if certificate is None or certificate.issuer != authority.name:
        return True
    return certificate.not_valid_after_utc - now < RENEWAL


def _hosts(path: Path) -> set[str]:
    certificate = _read(path)
    if certificate is None:
        return set()
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(name.value) for name in names}


def _read(path: Path) -> x509.Certificate | None:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError):
        return None
