"""A node whose link really changes and breaks, between a real broker and a proxy."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from hetertrain.core.tiers import TIERS
from hetertrain_lab.broker import EmbeddedBroker
from tests.integration.pair import Pair
from tests.integration.proxy import ShapingProxy

pytestmark = pytest.mark.broker
UPDATE_BYTES_MAX = 24_000
"""On the thin link not the budget of a fast tier, which takes it minutes."""
TRANSFER_BYTES = 1 << 20
RESENT_MAX = 2


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[tuple[ShapingProxy, EmbeddedBroker]]:
    with (
        EmbeddedBroker(tmp_path / "broker") as broker,
        ShapingProxy(broker.host, broker.port, TIERS["t0"].rate_bits_per_second) as proxy,
    ):
        yield proxy, broker


def test_the_tier_follows_a_link_from_64_kilobits_to_50_megabits_and_back(
    proxy: tuple[ShapingProxy, EmbeddedBroker],
) -> None:
    shaping, broker = proxy
    pair = Pair(broker.host, broker.port, shaping.port, "t0", 3_000, follows_link=True)
    tiers: dict[str, list[str]] = {}
    seqs = iter(range(100))
    try:
        pair.run_until(lambda: bool(pair.models), "the first model")
        for name in ("t0", "t3", "t0"):
            shaping.bits_per_second = TIERS[name].rate_bits_per_second
            seen = []
            for _ in range(5):
                pair.move()
                most = UPDATE_BYTES_MAX if name == "t0" else TRANSFER_BYTES
                pair.transfer(next(seqs), min(pair.uplink.tier.budget_bytes(1.0, 0.5), most))
                seen.append(pair.uplink.tier.name)
            tiers[f"{name} {len(tiers)}"] = seen
        pair.run_until(lambda: pair.models[-1].version == pair.version, "the newest version")
    finally:
        pair.stop()

    for name, seen in tiers.items():
        settled = seen[2:]
        fast_enough = {"t2", "t3"} if name.startswith("t3") else {"t0"}
        assert set(settled) <= fast_enough, tiers
        assert sum(a != b for a, b in pairwise(settled)) <= 1, f"flaps: {tiers}"
    assert pair.settled == list(range(15))
    held = pair.downlink._chains[pair.uplink.tier.name].held
    assert held is not None
    assert pair.models[-1].vector.tobytes() == held.vector.tobytes()


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_an_upload_that_is_cut_goes_on_where_it_stood_and_counts_once(
    proxy: tuple[ShapingProxy, EmbeddedBroker], share: float
) -> None:
    shaping, broker = proxy
    shaping.bits_per_second = 16e6
    pair = Pair(broker.host, broker.port, shaping.port, "t2", 1_000, follows_link=False)
    try:
        pair.run_until(lambda: bool(pair.models), "the first model")
        begun = shaping.bytes_up
        content = pair.offer(1, TRANSFER_BYTES)
        pair.run_until(lambda: shaping.bytes_up - begun > share * TRANSFER_BYTES, "the cut")
        shaping.cut()
        pair.run_until(lambda: pair.settled == [1], "the verdict")
    finally:
        pair.stop()

    assert pair.contents == {1: content}
    assert pair.chunks_up.keys() == set(range(TRANSFER_BYTES // TIERS["t2"].chunk_bytes))
    assert pair.chunks_up.total() - len(pair.chunks_up) <= RESENT_MAX


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_a_download_that_is_cut_goes_on_where_it_stood(
    proxy: tuple[ShapingProxy, EmbeddedBroker], share: float
) -> None:
    shaping, broker = proxy
    shaping.bits_per_second = 16e6
    size = TRANSFER_BYTES // 4
    pair = Pair(broker.host, broker.port, shaping.port, "t2", size, follows_link=False)
    try:
        pair.run_until(lambda: shaping.bytes_down > share * TRANSFER_BYTES, "the cut")
        assert not pair.models
        shaping.cut()
        pair.run_until(lambda: bool(pair.models), "the model")
        pair.move()
        pair.run_until(lambda: pair.models[-1].version == 1, "the next version")
    finally:
        pair.stop()

    again = sum(times - 1 for times in pair.chunks_down.values())
    assert again <= RESENT_MAX + TIERS["t2"].window_chunks
