"""What is signed, and what is not taken without."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from hetertrain.core.events import SyncNotice
from hetertrain.core.update import Checkpoint
from hetertrain.errors import FrameError
from hetertrain.wire import topics
from hetertrain.wire.contents import model_head
from hetertrain.wire.downlink import Downlink
from hetertrain.wire.events import (
    FrameRefused,
    ModelReceived,
    SyncAnnounced,
)
from hetertrain.wire.frames import pack
from hetertrain.wire.messages import Begin, Sync
from hetertrain.wire.signing import Sign, check_signature, signed
from tests.conversation import TERMS, Conversation


def toy_signature(data: bytes) -> tuple[bytes, bytes]:
    return hashlib.sha256(b"secret" + data).digest(), b"certificate"


def toy_check(
    signer: str, role: str | None, data: bytes, signature: bytes, certificate: bytes
) -> bool:
    del role
    return signer == "aggregator" and (signature, certificate) == toy_signature(data)


BEGIN = Begin(node="n0", seq=1, size_bytes=3, chunk_bytes=512, digest="x")


def by(name: str, role: str = "") -> Sign:
    """Signs as a node with a certificate of a role."""
    whose = f"{name} {role}".encode()
    return lambda data: (hashlib.sha256(whose + data).digest(), whose)


def check(signer: str, role: str | None, data: bytes, signature: bytes, certificate: bytes) -> bool:
    name, _, certified = certificate.decode().partition(" ")
    if name != signer or role not in (None, certified):
        return False
    return (signature, certificate) == by(signer, certified)(data)


def reasons(announced: Begin) -> list[str]:
    """Announce to an aggregator; return why it refuses, if it does."""
    aggregator = Downlink("job", "cloud", check=check)
    checkpoint = Checkpoint(0, np.zeros(9, np.float32), np.empty(0, np.int64))
    aggregator.release(checkpoint, None, TERMS, 0.0)
    ready = aggregator.received(topics.up("job", "cloud", "t1", "n0"), pack(announced), 0.0)
    return [event.reason for event in ready.events if isinstance(event, FrameRefused)]


def test_a_node_that_asks_for_signatures_takes_the_versions_and_notices_that_have_them() -> None:
    talk = Conversation(1, 0.0, sign=toy_signature, check=toy_check)
    talk.run(5.0)
    talk.move()
    talk.run(30.0)
    talk.down(talk.aggregator.notice(SyncNotice(3, 1.0), talk.now))

    assert talk.of(ModelReceived)[-1].version == 1
    assert talk.of(SyncAnnounced) == [SyncAnnounced(3, 1.0)]
    assert talk.of(FrameRefused) == []


def test_unsigned_versions_and_notices_are_refused_where_signatures_are_asked_for() -> None:
    talk = Conversation(1, 0.0, check=toy_check)
    talk.run(10.0)
    talk.down(talk.aggregator.notice(SyncNotice(3, 1.0), talk.now))

    assert talk.of(ModelReceived) == talk.of(SyncAnnounced) == []
    assert {event.reason for event in talk.of(FrameRefused)} == {"signature"}


def test_an_announcement_that_its_node_did_not_sign_is_refused() -> None:
    assert reasons(BEGIN) == ["signature"]
    assert reasons(signed(BEGIN, "job", "cloud", by("n1"))) == ["signature"]
    good = signed(BEGIN, "job", "cloud", by("n0"))
    assert reasons(replace(good, digest="another")) == ["signature"]
    assert reasons(good) == []


def test_other_nodes_work_is_taken_from_one_whose_certificate_says_gateway() -> None:
    begin = replace(BEGIN, relays=True)
    assert reasons(signed(begin, "job", "cloud", by("n0"))) == ["signature"]
    assert reasons(signed(begin, "job", "cloud", by("n0", "vehicle"))) == ["signature"]
    good = signed(begin, "job", "cloud", by("n0", "edge"))
    assert reasons(good) == []
    assert reasons(replace(good, relays=False)) == ["signature"]


def test_a_cells_versions_and_notices_are_signed_by_one_whose_certificate_says_gateway() -> None:
    notice = Sync(sync=3, deadline_seconds=1)
    check_signature(signed(notice, "job", "e1", by("e1", "edge")), "job", "e1", check)
    with pytest.raises(FrameError, match="as edge"):
        check_signature(signed(notice, "job", "e1", by("e1", "vehicle")), "job", "e1", check)


def test_a_signature_is_for_one_job_one_cell_and_every_field() -> None:
    notice = signed(Sync(sync=3, deadline_seconds=1), "job", "cloud", toy_signature)
    check_signature(notice, "job", "cloud", toy_check)
    others = [
        (replace(notice, sync=4), "job", "cloud"),
        (notice, "another", "cloud"),
        (notice, "job", "edge-1"),
        (replace(notice, certificate=b"another"), "job", "cloud"),
    ]
    for message, job, cell in others:
        with pytest.raises(FrameError, match="signature"):
            check_signature(message, job, cell, toy_check)


def test_an_older_run_or_a_much_older_version_that_is_sent_again_is_refused() -> None:
    talk = Conversation(1, 0.0, sign=toy_signature, check=toy_check)
    talk.run(5.0)
    held = talk.of(ModelReceived)[-1]
    held = replace(held, version=500, terms=replace(held.terms, lineage="00000002"))
    talk.node.hold(held)

    def age(lineage: str, version: int) -> None:
        terms = replace(held.terms, lineage=lineage)
        content = model_head(
            version=version, sync=None, base="", model="m", size=1, integers=None, terms=terms
        )
        talk.node._check_age(content)

    for lineage, version in (("00000001", 900), ("00000002", 400)):
        with pytest.raises(FrameError, match="age"):
            age(lineage, version)
    age("00000003", 0)
    age("00000002", 499)
    # One that was taken though it is a little older opens no way back, a step at a time.
    talk.node.hold(replace(held, version=499))
    assert talk.node.newest.version == 500
