"""The certificate authority of a fleet: ECDSA over P-256, its key in an encrypted file.

It signs what the control plane decides and decides nothing itself. A fleet that has an authority
already puts that one's self-signed certificate and its key in place of ours. (An intermediate would
need its whole chain at every broker and node.)
"""

from __future__ import annotations

import datetime
import ipaddress
import secrets
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hetertrain.errors import CredentialError
from hetertrain.security import load_or_make_key, write_private

KEY_FILE = "authority.key"
CERTIFICATE_FILE = "authority.crt"
PASSPHRASE_FILE = "authority.passphrase"  # noqa: S105  # a name
OWN_DAYS = 3650
CLOCK_SKEW = datetime.timedelta(minutes=10)
"""A certificate is valid from a little before its issue: clocks of vehicles differ."""
REVOCATION_DAYS = 7


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate that was just signed."""

    pem: str
    serial: str
    expires_at: datetime.datetime


class Authority:
    """Signs certificates with the key in a directory; made where there is none."""

    def __init__(
        self, directory: Path, now: datetime.datetime, passphrase_file: Path | None = None
    ) -> None:
        """Load the authority, or make it.

        Raises:
            CredentialError: key, certificate and passphrase do not belong together.
            StoreError: a file cannot be read or written.
        """
        file = passphrase_file or directory / PASSPHRASE_FILE
        if passphrase_file is None and not file.exists():
            write_private(file, secrets.token_urlsafe(32).encode())
        passphrase = file.read_bytes().strip()
        self._key = load_or_make_key(directory / KEY_FILE, passphrase)
        path = directory / CERTIFICATE_FILE
        if not path.exists():
            write_private(path, _self_signed(self._key, now))
            path.chmod(0o644)
        self.pem = path.read_text(encoding="ascii")
        try:
            self._certificate = x509.load_pem_x509_certificate(self.pem.encode())
        except ValueError as error:
            raise CredentialError(f"{path} is no certificate: {error}") from error
        if self._certificate.public_key() != self._key.public_key():
            raise CredentialError(f"{path} is not the certificate of {KEY_FILE} beside it")

    @property
    def name(self) -> x509.Name:
        """Who signs."""
        return self._certificate.subject

    @property
    def begins_at(self) -> datetime.datetime:
        """From when our certificate is valid."""
        return self._certificate.not_valid_before_utc

    @property
    def expires_at(self) -> datetime.datetime:
        """Until when our certificate is valid."""
        return self._certificate.not_valid_after_utc

    def fingerprint(self) -> str:
        """Return the SHA-256 of our certificate, in hexadecimal."""
        return self._certificate.fingerprint(hashes.SHA256()).hex()

    def issue_node(
        self,
        node: str,
        role: str | None,
        key: ec.EllipticCurvePublicKey,
        now: datetime.datetime,
        lifetime: datetime.timedelta,
    ) -> Issued:
        """Sign a client's certificate: its common name is the node's, its organizational unit the
        role (None: a part of the cloud).
        """
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
        return self._sign(_name(node, role), key, now, lifetime, [usage])

    def issue_server(
        self,
        hosts: tuple[str, ...],
        key: ec.EllipticCurvePublicKey,
        now: datetime.datetime,
        lifetime: datetime.timedelta,
    ) -> Issued:
        """Sign a server's certificate for host names and addresses."""
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
        return self._sign(_name(hosts[0]), key, now, lifetime, [usage, names])

    def revocations(
        self, revoked: list[tuple[str, datetime.datetime]], now: datetime.datetime
    ) -> str:
        """Return the signed list (PEM) of serial numbers (hexadecimal) that are revoked."""
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self._certificate.subject)
            .last_update(now)
            .next_update(now + datetime.timedelta(days=REVOCATION_DAYS))
        )
        for serial, at in revoked:
            entry = x509.RevokedCertificateBuilder(int(serial, 16), at)
            builder = builder.add_revoked_certificate(entry.build())
        signed = builder.sign(self._key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM).decode()

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        now: datetime.datetime,
        lifetime: datetime.timedelta,
        extensions: list[x509.ExtensionType],
    ) -> Issued:
        expires_at = min(now + lifetime, self._certificate.not_valid_after_utc)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._certificate.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_SKEW)
            .not_valid_after(expires_at)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        pem = certificate.public_bytes(serialization.Encoding.PEM).decode()
        return Issued(pem, f"{certificate.serial_number:040x}", expires_at)


def _self_signed(key: ec.EllipticCurvePrivateKey, now: datetime.datetime) -> bytes:
    name = _name("Heter-Train fleet authority")
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=OWN_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM)


def _name(common_name: str, unit: str | None = None) -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if unit is not None:
        attributes.append(x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, unit))
    return x509.Name(attributes)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
