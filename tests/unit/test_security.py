"""Keys, requests and signatures."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from hetertrain.enrolment import is_renewal_due
from hetertrain.errors import CredentialError
from hetertrain.security import (
    Signer,
    Verifier,
    load_or_make_key,
    make_request,
    public_digest,
    read_request,
    write_private,
)
from hetertrain_cloud.control.authority import Authority

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)


def signer(
    directory: Path,
    authority: Authority,
    name: str,
    at: datetime.datetime = NOW,
    role: str | None = None,
) -> Signer:
    key = load_or_make_key(directory / f"{name}.key")
    issued = authority.issue_node(name, role, key.public_key(), at, DAY)
    write_private(directory / f"{name}.crt", issued.pem.encode())
    return Signer(directory / f"{name}.key", directory / f"{name}.crt")


def test_a_signature_counts_for_the_name_in_a_certificate_of_the_fleets_authority(
    tmp_path: Path,
) -> None:
    ours = Authority(tmp_path / "ours", NOW)
    another = Authority(tmp_path / "another", NOW)
    verifier = Verifier(tmp_path / "ours" / "authority.crt")
    good = signer(tmp_path, ours, "aggregator").sign(b"data")
    by_node = signer(tmp_path, ours, "car-1").sign(b"data")
    expired = signer(tmp_path, ours, "old", NOW - 2 * DAY).sign(b"data")
    forged = signer(tmp_path / "x", another, "aggregator").sign(b"data")

    assert verifier.check("aggregator", None, b"data", *good)
    assert not verifier.check("aggregator", None, b"other data", *good)
    assert not verifier.check("aggregator", None, b"data", *by_node)
    assert not verifier.check("old", None, b"data", *expired)
    assert not verifier.check("aggregator", None, b"data", *forged)
    assert not verifier.check("aggregator", None, b"data", b"", b"")
    assert not verifier.check("aggregator", None, b"data", good[0], b"no certificate")
    # A version that there is not: the parser's error is none of the usual ones.
    strange = good[1].replace(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x09", 1)
    assert strange != good[1]
    assert not verifier.check("aggregator", None, b"data", good[0], strange)


def test_a_signature_counts_in_a_role_if_the_authority_gave_it(tmp_path: Path) -> None:
    ours = Authority(tmp_path / "ours", NOW)
    verifier = Verifier(tmp_path / "ours" / "authority.crt")
    gateway = signer(tmp_path, ours, "edge-1", role="edge").sign(b"data")
    vehicle = signer(tmp_path, ours, "car-1", role="vehicle").sign(b"data")
    without = signer(tmp_path, ours, "car-2").sign(b"data")

    assert verifier.check("edge-1", "edge", b"data", *gateway)
    assert verifier.check("edge-1", None, b"data", *gateway)
    assert verifier.check("car-1", None, b"data", *vehicle)
    assert not verifier.check("car-1", "edge", b"data", *vehicle)
    assert not verifier.check("car-2", "edge", b"data", *without)


def test_a_renewed_certificate_is_shown_with_the_next_signature(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ours", NOW)
    ours = signer(tmp_path, authority, "aggregator")
    _, before = ours.sign(b"data")
    signer(tmp_path, authority, "aggregator")
    _, after = ours.sign(b"data")
    assert before != after


def test_a_certificate_without_a_role_is_renewed(tmp_path: Path) -> None:
    ours = Authority(tmp_path / "ours", NOW)
    for role in (None, "vehicle"):
        signer(tmp_path, ours, "car-1", role=role)
        assert is_renewal_due(tmp_path / "car-1.crt", NOW) is (role is None)


def test_a_request_shows_who_asks_and_that_it_holds_the_key(tmp_path: Path) -> None:
    key = load_or_make_key(tmp_path / "node.key")
    name, public = read_request(make_request(key, "car-1"))
    assert (name, public_digest(public)) == ("car-1", public_digest(key.public_key()))


@pytest.mark.parametrize(
    "spoil", [lambda pem: pem.replace("M", "N", 1), lambda pem: pem[:-40], str.lower]
)
def test_a_spoilt_request_is_a_typed_error(tmp_path: Path, spoil) -> None:
    pem = make_request(load_or_make_key(tmp_path / "node.key"), "car-1")
    with pytest.raises(CredentialError):
        read_request(spoil(pem))


def test_a_private_key_is_its_owners_alone_and_a_wrong_passphrase_says_so(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    load_or_make_key(path, b"right")
    assert path.stat().st_mode & 0o077 == 0
    with pytest.raises(CredentialError, match="passphrase"):
        load_or_make_key(path, b"wrong")
