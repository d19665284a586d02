"""Larger batches less often, only where a batch takes longer than it does alone."""

from __future__ import annotations

from bus.consuming.batch_interval import FIRST_S, ITEMS_AS_A_BATCH, LONGEST_S, AdaptiveBatchInterval

ALONE_S = 0.01


def told(
    interval: AdaptiveBatchInterval, seconds: float, *, batches: int = 1, items: int = 0, more: bool = False
) -> None:
    for _ in range(batches):
        interval.start_batch(0.0)
        interval.end_batch(seconds, items, 0.0, more=more)


def known() -> AdaptiveBatchInterval:
    """One that has seen a batch alone."""
    interval = AdaptiveBatchInterval()
    told(interval, ALONE_S)
    return interval


def test_alone_nothing_waits() -> None:
    interval = known()
    told(interval, ALONE_S, batches=50)
    assert interval.wait_s(0.0) <= 0.0


def test_the_first_batch_of_all_waits_for_nothing() -> None:
    assert AdaptiveBatchInterval().wait_s(-1e6) <= 0.0


def test_batches_that_take_longer_than_alone_are_taken_less_often_within_a_bound() -> None:
    interval = known()
    told(interval, 3 * ALONE_S)
    assert interval.gap_s == FIRST_S and interval.wait_s(0.001) == FIRST_S - 0.001
    told(interval, 3 * ALONE_S, batches=100)
    assert interval.gap_s == LONGEST_S


def test_a_large_batch_may_take_longer() -> None:
    interval = known()
    told(interval, 3 * ALONE_S, items=int(2 * ITEMS_AS_A_BATCH))
    assert interval.gap_s == 0.0


def test_when_it_is_calm_again_the_gap_goes() -> None:
    interval = known()
    told(interval, 3 * ALONE_S, batches=100)
    told(interval, ALONE_S, batches=30)
    assert interval.gap_s == 0.0


def test_a_gap_that_would_not_make_the_next_batch_larger_is_none() -> None:
    interval = known()
    told(interval, 3 * ALONE_S, batches=100)
    told(interval, 3 * ALONE_S, more=True)
    assert interval.gap_s == 0.0


def test_what_it_takes_alone_is_learned_anew() -> None:
    """A machine that has become slower for good is not busy for ever."""
    interval = known()
    for minute in range(1, 60):
        interval.end_batch(3 * ALONE_S, 0, 60.0 * minute, more=False)
    assert interval.gap_s == 0.0
