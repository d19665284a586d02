"""Between two batches lies a multiple of what a batch takes alone, whatever goes on."""

from __future__ import annotations

import pytest

from bus.consuming.batch_interval import DOUBLES_S, GAP, ITEMS_AS_A_BATCH, LONGEST_S, BatchInterval

ALONE_S = 0.01


def observe(interval: BatchInterval, seconds: float, *, batches: int = 1, items: int = 0, more: bool = False) -> None:
    for _ in range(batches):
        interval.start_batch(0.0)
        interval.end_batch(seconds, items, 0.0, more=more)


def known() -> BatchInterval:
    """One that has seen a batch alone."""
    interval = BatchInterval()
    observe(interval, ALONE_S)
    return interval


def test_the_first_batch_of_all_waits_for_nothing() -> None:
    assert BatchInterval().wait_s(-1e6) <= 0.0


def test_what_comes_after_a_pause_waits_for_nothing() -> None:
    assert known().wait_s(GAP * ALONE_S) <= 0.0


def test_what_comes_sooner_waits_for_the_rest_of_the_gap() -> None:
    assert known().wait_s(0.001) == pytest.approx(GAP * ALONE_S - 0.001)


@pytest.mark.parametrize("times", [2, 10, 1000])
def test_a_busy_machine_changes_nothing(times: float) -> None:
    """A gap that grew with the time that batches take would make the next ones larger, and so slower, and so on."""
    interval = known()
    observe(interval, times * ALONE_S, batches=100)
    assert interval.gap_s == pytest.approx(GAP * ALONE_S)


def test_a_large_batch_shows_what_one_alone_would_take() -> None:
    interval = BatchInterval()
    observe(interval, 3 * ALONE_S, items=int(2 * ITEMS_AS_A_BATCH))
    assert interval.gap_s == pytest.approx(GAP * ALONE_S)


def test_the_gap_has_a_bound() -> None:
    interval = BatchInterval()
    observe(interval, 100.0)
    assert interval.gap_s == LONGEST_S


def test_a_gap_that_would_not_make_the_next_batch_larger_is_none() -> None:
    interval = known()
    observe(interval, 3 * ALONE_S, more=True)
    assert interval.gap_s == 0.0


def test_what_it_takes_alone_is_learned_anew() -> None:
    """A machine that has become slower for good is known as that after a while."""
    interval = known()
    for minute in range(1, int(3 * DOUBLES_S / 60.0)):
        interval.end_batch(3 * ALONE_S, 0, 60.0 * minute, more=False)
    assert interval.gap_s == pytest.approx(GAP * 3 * ALONE_S)
