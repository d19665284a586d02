"""The times at which all processes of a machine do what nothing waits for."""

from __future__ import annotations

import pytest

from bus.clock import shared_delay_s


@pytest.mark.parametrize("now", [1_700_000_000.0, 1_700_000_000.1, 1_700_000_000.249, 1_700_000_000.26, 0.49, 0.0])
def test_it_ends_at_a_shared_time_neither_soon_nor_late(now: float) -> None:
    delay_s = shared_delay_s(now, 0.5)
    assert 0.25 <= delay_s < 0.75
    at = now + delay_s
    assert abs(at / 0.5 - round(at / 0.5)) < 1e-6


def test_two_that_begin_within_half_of_it_end_together() -> None:
    assert 100.3 + shared_delay_s(100.3, 0.5) == pytest.approx(100.7 + shared_delay_s(100.7, 0.5))
