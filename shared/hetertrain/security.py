"""Keys, certificate requests and signatures, as nodes and cloud use them: ECDSA over P-256.

A private key is made where it is used and never leaves that machine. A node is known by the common
name of its certificate, and its key by the SHA-256 of its public half.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from hetertrain.errors import CredentialError, StoreError

REQUEST_CHARACTERS_MAX = 8192


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
