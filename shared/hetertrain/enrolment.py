"""A node's side of enrolment: makes its key, asks for a certificate, and renews it without hands.

What it needs to take part is written into one folder: key, certificate, the fleet's authority, and
a settings file for ``--config``. The key is made there and never leaves.
"""

from __future__ import annotations

import datetime
import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509

from hetertrain.control import ControlClient, fetch_authority
from hetertrain.errors import ControlError, CredentialError, HetertrainError
from hetertrain.logging import get_logger
from hetertrain.security import certified_role, load_or_make_key, make_request, write_private

KEY_FILE = "node.key"
CERTIFICATE_FILE = "node.crt"
AUTHORITY_FILE = "authority.crt"
SETTINGS_FILE = "hetertrain.toml"
CLAIM_PREFIX = "htc"
APPROVAL_POLL_SECONDS = 5.0
RENEWAL_SHARE = 1 / 3
"""A certificate is renewed when so much of its life is left."""
CHECK_SECONDS = 3600.0
REFUSED_CHECK_SECONDS = 6 * 3600.0


@dataclass(frozen=True, slots=True)
class Enrolled:
    """What a node was given."""

    node: str
    jobs: tuple[str, ...]
    settings: Path


def authority_in(claim: str) -> str:
    """Return the fingerprint of the authority that a claim's text ends with.

    Raises:
        CredentialError: the text is no claim.
    """
    parts = claim.split(".")
    if len(parts) != 4 or parts[0] != CLAIM_PREFIX:
        raise CredentialError(f"a claim looks like {CLAIM_PREFIX}.….….…: copy the whole of it")
    return parts[3]


def enrol(
    *,
    url: str,
    claim: str,
    node: str,
    directory: Path,
    job: str | None,
    wait_seconds: float,
    on_waiting: Callable[[], None],
) -> Enrolled:
    """Enrol this machine as ``node`` and write what it needs into ``directory``; to do so again is
    harmless. Wait for approval, where the claim asks for it.

    Raises:
        CredentialError: the claim is malformed, or somebody else answers at ``url``.
        ControlError: it is refused, not approved in time, or nobody answers.
    """
    pem = fetch_authority(url, authority_in(claim))
    request = make_request(load_or_make_key(directory / KEY_FILE), node)
    deadline = time.monotonic() + wait_seconds
    with ControlClient(url, authority_pem=pem) as client:
        while True:
            answer = client.post("/enrolments", {"claim": claim, "request": request})
            if answer["certificate"] is not None:
                break
            on_waiting()
            if time.monotonic() >= deadline:
                raise ControlError("approval_pending", "not approved yet: ask again later")
            threading.Event().wait(APPROVAL_POLL_SECONDS)
    return _write(directory, url, answer, job)


def _write(directory: Path, url: str, answer: dict[str, Any], job: str | None) -> Enrolled:
    jobs = tuple(str(each) for each in answer["jobs"])
    chosen = job or (jobs[0] if len(jobs) == 1 else None)
    broker = answer["broker"]
    directory = directory.resolve()
    write_private(directory / AUTHORITY_FILE, str(answer["authority"]).encode())
    write_private(directory / CERTIFICATE_FILE, str(answer["certificate"]).encode())
    common: dict[str, object] = {
        "control_url": url,
        "broker_host": str(broker["host"]),
        "broker_port": int(broker["port"]),
        "state_directory": str(directory / "state"),
    }
    if chosen is not None:
        common["job"] = chosen
    if broker["websocket_path"] is not None:
        common["broker_websocket_path"] = str(broker["websocket_path"])
    if broker["is_tls"]:
        common |= {
            "authority_file": str(directory / AUTHORITY_FILE),
            "tls_ca_file": str(directory / AUTHORITY_FILE),
            "tls_certificate_file": str(directory / CERTIFICATE_FILE),
            "tls_key_file": str(directory / KEY_FILE),
        }
    # Strings of JSON are strings of TOML.
    lines = ["[common]", *(f"{key} = {json.dumps(value)}" for key, value in common.items())]
    lines += [f"\n[{answer['role']}]", f"node = {json.dumps(answer['node'])}", ""]
    settings = directory / SETTINGS_FILE
    write_private(settings, "\n".join(lines).encode())
    return Enrolled(str(answer["node"]), jobs, settings)


def renew(*, url: str, key_file: Path, certificate_file: Path, authority_file: Path) -> None:
    """Get a new certificate for the enrolled key, in place of the old one.

    Raises:
        ControlError: it is refused, or nobody answers.
        CredentialError: key or certificate cannot be read.
    """
    certificate = _certificate(certificate_file)
    name = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value
    request = make_request(load_or_make_key(key_file), str(name))
    pem = authority_file.read_text(encoding="ascii")
    with ControlClient(url, authority_pem=pem) as client:
        answer = client.post("/renewals", {"request": request})
    write_private(certificate_file, str(answer["certificate"]).encode())


def is_renewal_due(certificate_file: Path, now: datetime.datetime) -> bool:
    """Tell whether a third of a certificate's life, or less, is left, or it lacks the node's role,
    as those of earlier releases do.

    Raises:
        CredentialError: it cannot be read.
    """
    certificate = _certificate(certificate_file)
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    is_old = ends - now <= (ends - begins) * RENEWAL_SHARE
    return is_old or certified_role(certificate) is None


def _certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CredentialError(f"{path} is no certificate: {error}; enrol again") from error


class Renewer(threading.Thread):
    """Renews a node's certificate before it expires, for as long as the node runs."""

    def __init__(
        self, *, url: str, key_file: Path, certificate_file: Path, authority_file: Path
    ) -> None:
        super().__init__(name="renewer", daemon=True)
        self._url = url
        self._key_file = key_file
        self._certificate_file = certificate_file
        self._authority_file = authority_file
        self._stopping = threading.Event()

    def stop(self) -> None:
        """End; a request that is under way is not waited for."""
        self._stopping.set()

    def run(self) -> None:
        """Check now and then; who is refused asks less often."""
        while not self._stopping.is_set():
            seconds = self._check()
            jitter = random.uniform(0.75, 1.25)  # noqa: S311  # spreads requests, guards nothing
            self._stopping.wait(seconds * jitter)

    def _check(self) -> float:
        try:
            if is_renewal_due(self._certificate_file, datetime.datetime.now(datetime.UTC)):
                renew(
                    url=self._url,
                    key_file=self._key_file,
                    certificate_file=self._certificate_file,
                    authority_file=self._authority_file,
                )
                get_logger().info("certificate_renewed", file=str(self._certificate_file))
        except HetertrainError as error:
            get_logger().warning("certificate_not_renewed", error=str(error))
            is_refused = isinstance(error, ControlError) and error.problem == "node_refused"
            return REFUSED_CHECK_SECONDS if is_refused else CHECK_SECONDS
        except OSError as error:
            get_logger().warning("certificate_not_renewed", error=str(error))
        return CHECK_SECONDS
