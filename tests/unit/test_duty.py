"""The duty cycle in virtual time."""

from __future__ import annotations

import pytest

from hetertrain_vehicle.duty import DutyCycle


def worked_for(share: float, steps: list[float]) -> tuple[float, float]:
    """Work steps of so many seconds each; return processor and elapsed time, rests included."""
    now = cpu = 0.0
    duty = DutyCycle(share, now, cpu)
    for seconds in steps:
        now, cpu = now + seconds, cpu + seconds
        now += duty.rest_seconds(now, cpu)
    return cpu, now


@pytest.mark.parametrize("share", [0.05, 0.3, 1.0])
def test_the_processor_time_stays_within_its_share(share: float) -> None:
    cpu, elapsed = worked_for(share, [0.01, 0.2, 0.03, 1.0])
    assert cpu / elapsed == pytest.approx(share)


def test_a_rest_that_was_cut_short_is_made_up_for() -> None:
    duty = DutyCycle(0.5, 0.0, 0.0)
    assert duty.rest_seconds(1.0, 1.0) == pytest.approx(1.0)
    assert duty.rest_seconds(1.2, 1.0) == pytest.approx(0.8)


def test_time_without_work_is_not_saved_up() -> None:
    duty = DutyCycle(0.5, 0.0, 0.0)
    assert duty.rest_seconds(100.0, 0.0) == 0.0
    assert duty.rest_seconds(101.0, 1.0) == pytest.approx(1.0)


def test_without_a_share_there_is_no_rest() -> None:
    assert DutyCycle(None, 0.0, 0.0).rest_seconds(1.0, 1.0) == 0.0
