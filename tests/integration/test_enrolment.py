"""How nodes join and leave the fleet, and what a credential is worth."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from cryptography import x509

from hetertrain.errors import CredentialError
from hetertrain_cloud.control.access import node_rights
from hetertrain_cloud.control.authority import Authority
from tests.control import Bench, code


def test_a_node_enrols_once_with_its_own_key_and_a_repeat_is_harmless(any_bench: Bench) -> None:
    bench = any_bench
    client = bench.client()
    secret = bench.claim(client, labels={"region": "north"})
    body = {"claim": secret, "request": bench.request("car-1")}

    first = client.post("/api/v1/enrolments", json=body)
    again = client.post("/api/v1/enrolments", json=body)
    other = client.post("/api/v1/enrolments", json=body | {"request": bench.request("car-2")})

    certificate = x509.load_pem_x509_certificate(first.json()["certificate"].encode())
    authority = x509.load_pem_x509_certificate(first.json()["authority"].encode())
    certificate.verify_directly_issued_by(authority)
    assert certificate.subject.rfc4514_string() == "OU=vehicle,CN=car-1"
    assert again.json()["certificate"] == first.json()["certificate"]
    assert code(other) == "claim_used_up"
    shown = client.get("/api/v1/nodes/car-1").json()
    assert (shown["state"], shown["labels"]) == ("active", {"region": "north"})


def test_a_claim_that_is_over_is_refused_with_the_reason(bench: Bench) -> None:
    client = bench.client()
    expired, revoked = bench.claim(client, hours=1), bench.claim(client, hours=100)
    bench.clock.move(hours=2)
    client.delete(f"/api/v1/claims/{revoked.split('.')[1]}")

    def refusal(claim: str) -> str:
        body = {"claim": claim, "request": bench.request("car-1")}
        return code(client.post("/api/v1/enrolments", json=body))

    assert refusal(expired) == "claim_expired"
    assert refusal(revoked) == "claim_revoked"


def test_a_claim_that_was_guessed_or_is_another_nodes_is_refused(bench: Bench) -> None:
    client = bench.client()
    parts = bench.claim(client, node="car-1").split(".")
    guessed = ".".join([parts[0], parts[1], "x" * len(parts[2]), parts[3]])
    request = bench.request("car-1")
    of_another = {"claim": ".".join(parts), "request": bench.request("car-2")}

    assert code(client.post("/api/v1/enrolments", json={"claim": guessed, "request": request})) == (
        "claim_refused"
    )
    assert code(client.post("/api/v1/enrolments", json=of_another)) == "claim_for_another"


def test_nobody_takes_an_enrolled_nodes_name_without_a_claim_for_it(bench: Bench) -> None:
    client = bench.client()
    bench.enrol(client, "car-1")
    request = bench.request("car-1", key="thief")
    with_any = {"claim": bench.claim(client, uses=5), "request": request}
    with_its_own = {"claim": bench.claim(client, node="car-1"), "request": request}

    assert code(client.post("/api/v1/enrolments", json=with_any)) == "node_exists"
    assert client.post("/api/v1/enrolments", json=with_its_own).status_code == 200


@pytest.mark.parametrize("name", ["aggregator", "control", "a/b", "+", "#", "a b", "ä"])
def test_a_name_that_the_broker_would_misread_is_refused(bench: Bench, name: str) -> None:
    client = bench.client()
    body = {"claim": bench.claim(client), "request": bench.request(name, key="any")}
    assert code(client.post("/api/v1/enrolments", json=body)) == "name_invalid"


def test_a_node_waits_to_be_approved_where_its_claim_says_so(bench: Bench) -> None:
    client = bench.client()
    answer = bench.enrol(client, "car-1", needs_approval=True)
    assert (answer["state"], answer["certificate"]) == ("pending", None)
    assert "car-1" not in bench.plane.rights()

    assert client.post("/api/v1/nodes/car-1/approve").json()["state"] == "active"
    assert "car-1" in bench.plane.rights()
    assert code(client.post("/api/v1/nodes/car-1/approve")) == "node_not_pending"


def test_a_certificate_is_renewed_with_the_enrolled_key_only(bench: Bench) -> None:
    client = bench.client()
    first = bench.enrol(client, "car-1")
    bench.clock.move(days=25)

    renewed = client.post("/api/v1/renewals", json={"request": bench.request("car-1")})
    thief = client.post("/api/v1/renewals", json={"request": bench.request("car-1", key="x")})
    client.post("/api/v1/nodes/car-1/revoke")
    revoked = client.post("/api/v1/renewals", json={"request": bench.request("car-1")})

    assert renewed.json()["expires_at"] > first["expires_at"]
    assert code(thief) == "node_refused"
    assert code(revoked) == "node_refused"


def test_a_revoked_node_has_no_rights_and_its_certificates_are_on_the_list(bench: Bench) -> None:
    client = bench.client()
    pem = bench.enrol(client, "car-1")["certificate"]
    client.post("/api/v1/nodes/car-1/revoke")

    revoked = x509.load_pem_x509_crl(client.get("/api/v1/authority/revocations").content)
    serial = x509.load_pem_x509_certificate(pem.encode()).serial_number
    assert revoked.get_revoked_certificate_by_serial_number(serial) is not None
    assert "car-1" not in bench.plane.rights()
    again = bench.enrol(client, "car-1", node="car-1")
    assert again["state"] == "active"


def test_a_stolen_key_gets_no_rights_back_with_its_nodes_name(bench: Bench) -> None:
    client = bench.client()
    bench.enrol(client, "car-1")
    client.post("/api/v1/nodes/car-1/revoke")
    claim = bench.claim(client, node="car-1", hours=2000)
    body = {"claim": claim, "request": bench.request("car-1", key="new device")}

    assert code(client.post("/api/v1/enrolments", json=body)) == "old_certificate_valid"
    bench.clock.move(days=31)
    assert client.post("/api/v1/enrolments", json=body).status_code == 200


def test_the_authoritys_key_is_encrypted_and_survives_a_restart(
    bench: Bench, tmp_path: Path
) -> None:
    key = tmp_path / "authority" / "authority.key"
    assert b"ENCRYPTED" in key.read_bytes()
    assert key.stat().st_mode & 0o077 == 0
    again = Authority(tmp_path / "authority", bench.clock.now())
    assert again.pem == bench.plane.authority.pem
    (tmp_path / "authority" / "authority.passphrase").write_text("another")
    with pytest.raises(CredentialError, match="passphrase"):
        Authority(tmp_path / "authority", bench.clock.now())


def test_a_vehicle_may_speak_in_its_own_name_and_hear_its_jobs_only() -> None:
    rights = node_rights("car-1", "vehicle", ["fleet"])
    assert rights.publish == {
        "ht/1/node/car-1/state",
        "ht/1/node/car-1/log",
        "ht/1/fleet/+/up/+/car-1",
    }
    assert rights.subscribe == {
        "ht/1/node/car-1/in",
        "ht/1/node/car-1/state",
        "ht/1/fleet/+/down/+",
        "ht/1/fleet/+/sync",
        "ht/1/fleet/order",
    }


def test_a_certificate_is_valid_for_clocks_that_are_a_little_behind(bench: Bench) -> None:
    pem = bench.enrol(bench.client(), "car-1")["certificate"]
    begins = x509.load_pem_x509_certificate(pem.encode()).not_valid_before_utc
    assert bench.clock.now() - begins >= datetime.timedelta(minutes=5)
