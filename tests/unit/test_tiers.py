"""Which tier a link is in, from what its transfers show."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from hetertrain.core.tiers import TIERS, BandwidthEstimator
from hetertrain.wire.transfer import Sender

KILO, MEGA = 1e3, 1e6


def follow(estimator: BandwidthEstimator, *rates: float, num_chunks: int = 1) -> list[str]:
    """Measure one rate after the other, and go where the estimator says."""
    names = []
    for rate in rates:
        tier = estimator.measured(rate, num_chunks)
        if tier != estimator.tier:
            estimator.settle(tier)
        names.append(tier.name)
    return names


def test_one_lucky_chunk_changes_nothing() -> None:
    estimator = BandwidthEstimator(TIERS, TIERS["t1"])

    assert follow(estimator, 500 * KILO, 90 * MEGA, 500 * KILO, 90 * MEGA, 500 * KILO) == ["t1"] * 5


def test_two_measurements_move_no_further_than_both_agree_on() -> None:
    assert follow(BandwidthEstimator(TIERS, TIERS["t0"]), 90 * MEGA, 6 * MEGA)[-1] == "t2"
    assert follow(BandwidthEstimator(TIERS, TIERS["t3"]), 70 * KILO, 600 * KILO)[-1] == "t1"


def test_one_measurement_over_many_chunks_is_enough() -> None:
    assert follow(BandwidthEstimator(TIERS, TIERS["t2"]), 48 * MEGA, num_chunks=5) == ["t3"]


def test_a_node_that_may_not_move_remembers_no_more_than_it_needs() -> None:
    estimator = BandwidthEstimator(TIERS, TIERS["t0"])

    for _ in range(100):
        assert estimator.measured(90 * MEGA, 8) == TIERS["t3"]

    assert len(estimator._agreeing) <= 2


@pytest.mark.parametrize("start", TIERS)
@pytest.mark.parametrize("tier", TIERS)
def test_a_steady_link_is_in_its_tier_within_three_transfers(start: str, tier: str) -> None:
    rate = float(TIERS[tier].rate_bits_per_second)

    assert follow(BandwidthEstimator(TIERS, TIERS[start]), rate, rate, rate)[-1] == tier


@pytest.mark.parametrize("border", [64e3, 512e3, 5e6, 50e6, 500e6])
def test_a_link_that_swings_by_a_fifth_about_a_border_does_not_flap(border: float) -> None:
    rng = random.Random(1)
    estimator = BandwidthEstimator(TIERS, TIERS["t2"])

    names = follow(estimator, *(border * rng.uniform(0.8, 1.2) for _ in range(200)))

    assert sum(a != b for a, b in pairwise(names[3:])) <= 1


def send(
    sender: Sender, bits_per_second: float, round_trip_seconds: float
) -> list[tuple[float, int]]:
    """Send all over a link, acknowledged in order; return what was measured."""
    now = free_at = 0.0
    under_way: list[float] = []
    found = []
    for _ in range(10_000):
        for _, chunk in sender.due(now):
            free_at = max(free_at, now) + 8 * len(chunk) / bits_per_second
            under_way.append(free_at + round_trip_seconds)
        if not under_way:
            return found
        now = under_way.pop(0)
        goodput = sender.delivered(now)
        if goodput is not None:
            found.append((goodput.bits_per_second, goodput.num_chunks))
    raise AssertionError("never ends")


@pytest.mark.parametrize("name", TIERS)
@pytest.mark.parametrize("share", [0.2, 1.0])
def test_the_goodput_of_a_transfer_is_the_rate_of_its_link(name: str, share: float) -> None:
    tier = TIERS[name]
    rate = tier.rate_bits_per_second * share
    content = bytes(tier.budget_bytes(1.0, 0.5))
    sender = Sender("n0", 1, content, tier.chunk_bytes, tier.window_chunks, airtime_seconds=1e9)

    found = send(sender, rate, round_trip_seconds=0.03)

    assert found
    assert [measured for measured, _ in found] == pytest.approx([rate] * len(found), rel=0.25)


def test_a_slow_transfer_is_measured_while_it_lasts() -> None:
    sender = Sender("n0", 1, bytes(1 << 20), 1 << 16, 8, airtime_seconds=1e9)

    found = send(sender, 64e3, round_trip_seconds=0.05)

    assert len(found) > 10
