"""Keys, certificate requests and signatures, as nodes and cloud use them: ECDSA over P-256.

A private key is made where it is used and never leaves that machine. A node is known by the common
name of its certificate, its role by the organizational unit, and its key by the SHA-256 of its
public half.
"""

from __future__ import annotations

import datetime
import hashlib
import os
from contextlib import suppress
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from hetertrain.errors import CredentialError, StoreError

REQUEST_CHARACTERS_MAX = 8192
CERTIFICATES_MAX = 64


def load_or_make_key(path: Path, passphrase: bytes | None = None) -> ec.EllipticCurvePrivateKey:
    """Return the private key in a PEM file of mode 0600, made where there is none.

    Raises:
        CredentialError: the file holds no P-256 key, or the passphrase is wrong.
        StoreError: it cannot be read or written.
    """
    try:
        if path.exists():
            return _parse_key(path.read_bytes(), passphrase, path)
        key = ec.generate_private_key(ec.SECP256R1())
        encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if passphrase is not None:
            encryption = serialization.BestAvailableEncryption(passphrase)
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
        )
        write_private(path, pem)
    except OSError as error:
        raise StoreError(f"cannot use the key file {path}: {error}") from error
    return key


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the private key in a PEM file.

    Raises:
        CredentialError: there is none, or it holds no P-256 key.
        StoreError: it cannot be read.
    """
    if not path.exists():
        raise CredentialError(f"there is no key file {path}")
    return load_or_make_key(path)


def _parse_key(pem: bytes, passphrase: bytes | None, path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(pem, passphrase)
    except (ValueError, TypeError) as error:
        raise CredentialError(
            f"{path} cannot be read as a private key; is its passphrase right? {error}"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CredentialError(f"{path} holds another kind of key, not ECDSA over P-256")
    return key


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    with suppress(FileNotFoundError):
        temporary.unlink()
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(descriptor)
    temporary.rename(path)


def make_request(key: ec.EllipticCurvePrivateKey, node: str) -> str:
    """Return a certificate request (PEM) for a node; its signature shows that we hold the key."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node)])
    request = x509.CertificateSigningRequestBuilder().subject_name(name)
    signed = request.sign(key, hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.PEM).decode()


def read_request(pem: str) -> tuple[str, ec.EllipticCurvePublicKey]:
    """Return the node and public key of a certificate request whose signature is right.

    Raises:
        CredentialError: it is malformed, of another kind of key, or not signed by its key.
    """
    try:
        request = x509.load_pem_x509_csr(pem.encode())
        names = request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        key = request.public_key()
        is_signed = request.is_signature_valid
    except Exception as error:  # a stranger's DER: the parser's errors are of many kinds
        raise CredentialError(f"the certificate request is malformed: {error}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp256r1":
        raise CredentialError("the certificate request must be for an ECDSA key over P-256")
    if not is_signed or len(names) != 1:
        raise CredentialError("the certificate request must be signed, with one common name")
    return str(names[0].value), key


def public_digest(key: ec.EllipticCurvePublicKey) -> str:
    """Return the SHA-256 of a public key, in hexadecimal."""
    der = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(der).hexdigest()


def fingerprint(certificate_pem: str) -> str:
    """Return the SHA-256 of a certificate, in hexadecimal.

    Raises:
        CredentialError: it is no certificate.
    """
    try:
        certificate = x509.load_pem_x509_certificate(certificate_pem.encode())
    except ValueError as error:
        raise CredentialError(f"not a certificate: {error}") from error
    return certificate.fingerprint(hashes.SHA256()).hex()


def read_certificate(path: Path) -> x509.Certificate:
    """Return the certificate in a PEM file.

    Raises:
        CredentialError: it cannot be read.
    """
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CredentialError(f"{path} cannot be read as a certificate: {error}") from error


def certified_role(certificate: x509.Certificate) -> str | None:
    """Return the role that a certificate gives its node; None: it gives none."""
    units = certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)
    return str(units[0].value) if len(units) == 1 else None


class Signer:
    """Signs with a key, and shows by its certificate whose key that is."""

    def __init__(self, key_file: Path, certificate_file: Path) -> None:
        """Read both.

        Raises:
            CredentialError: one of them cannot be read.
        """
        self._key = read_key(key_file)
        self._certificate_file = certificate_file
        self._certificate = read_certificate(certificate_file)
        self._read_at = certificate_file.stat().st_mtime_ns

    def sign(self, data: bytes) -> tuple[bytes, bytes]:
        """Return the signature (ECDSA with SHA-256, DER) of some bytes, and our certificate (DER),
        which may have been renewed meanwhile.
        """
        # What cannot be read just now is read with a later signature; the old one is still good.
        with suppress(OSError, CredentialError):
            changed_at = self._certificate_file.stat().st_mtime_ns
            if changed_at != self._read_at:
                self._certificate = read_certificate(self._certificate_file)
                self._read_at = changed_at
        signature = self._key.sign(data, ec.ECDSA(hashes.SHA256()))
        return signature, self._certificate.public_bytes(serialization.Encoding.DER)


class Verifier:
    """Knows signatures by the certificates that a fleet's authority has issued."""

    def __init__(self, authority_file: Path) -> None:
        """Read the authority's certificate.

        Raises:
            CredentialError: it cannot be read.
        """
        self._authority = read_certificate(authority_file)
        self._known: dict[bytes, x509.Certificate] = {}
        """Certificates that were checked, by their bytes; few, since few sign."""

    def check(
        self, signer: str, role: str | None, data: bytes, signature: bytes, certificate: bytes
    ) -> bool:
        """Tell whether bytes have a signer's signature, by a certificate that is valid now and, if
        a role is asked for, of that role.
        """
        found = self._known.get(certificate) or self._issued(certificate)
        if found is None:
            return False
        names = found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        is_in_role = role is None or certified_role(found) == role
        now = datetime.datetime.now(datetime.UTC)
        is_valid = found.not_valid_before_utc <= now <= found.not_valid_after_utc
        key = found.public_key()
        if not is_valid or not is_in_role or [name.value for name in names] != [signer]:
            return False
        if not isinstance(key, ec.EllipticCurvePublicKey):
            return False
        try:
            key.verify(signature, data, ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            return False
        return True

    def _issued(self, certificate: bytes) -> x509.Certificate | None:
        try:
            found = x509.load_der_x509_certificate(certificate)
            found.verify_directly_issued_by(self._authority)
        except Exception:  # a stranger's DER: the parser's errors are of many kinds
            return None
        if len(self._known) >= CERTIFICATES_MAX:
            self._known.clear()
        self._known[certificate] = found
        return found
