"""Trying again: waits that grow to a bound, on a clock of ours, and an end where a policy has one."""

from __future__ import annotations

import asyncio
import random

import pytest

from bus.clock import SystemClock
from bus.faults import Fault, Transient
from bus.port import BusForbidden, BusUnavailable
from bus.retrying import Backoff, Retrying, RetryPolicy, passes_with_time


class Recorded(SystemClock):
    """A clock that moves when something sleeps, at once."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


class Failing:
    """Fails so many times, and then answers."""

    def __init__(self, times: int, error: Exception | None = None) -> None:
        self.calls = 0
        self._times = times
        self._error = error or Transient("unavailable")

    async def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self._times:
            raise self._error
        return "answer"


EVEN = RetryPolicy(first_s=1.0, longest_s=5.0, least=1.0)


async def test_waits_are_doubled_to_the_longest() -> None:
    clock, reported = Recorded(), []
    answer = await Retrying(EVEN, clock).call(
        Failing(5), on_failure=lambda error, count: reported.append((str(error), count))
    )
    assert (answer, clock.slept) == ("answer", [1.0, 2.0, 4.0, 5.0, 5.0])
    assert reported == [("unavailable", number) for number in range(1, 6)]


async def test_waits_are_drawn_from_the_generator_that_is_given() -> None:
    policy = RetryPolicy(first_s=1.0, longest_s=4.0, least=0.5)

    async def waits(seed: int) -> list[float]:
        clock = Recorded()
        random.seed(clock.now)  # what the process's own generator draws is of no concern
        await Retrying(policy, clock, random.Random(seed)).call(Failing(6))
        return clock.slept

    drawn = await waits(1)
    assert drawn == await waits(1) != await waits(2)
    for bound, wait in zip([1.0, 2.0, 4.0, 4.0, 4.0, 4.0], drawn, strict=True):
        assert bound / 2 <= wait <= bound


@pytest.mark.parametrize(
    ("policy", "calls"),
    [
        pytest.param(RetryPolicy(first_s=1.0, longest_s=1.0, least=1.0, attempts=3), 3, id="so often"),
        pytest.param(RetryPolicy(first_s=1.0, longest_s=1.0, least=1.0, attempts=1), 1, id="once"),
        pytest.param(RetryPolicy(first_s=1.0, longest_s=1.0, least=1.0, lasts_s=2.5), 4, id="so long"),
        pytest.param(RetryPolicy(first_s=1.0, longest_s=1.0, least=1.0, lasts_s=0.0), 1, id="no time"),
    ],
)
async def test_a_bounded_policy_ends_with_the_fault(policy: RetryPolicy, calls: int) -> None:
    failing = Failing(100)
    with pytest.raises(Transient, match="unavailable"):
        await Retrying(policy, Recorded()).call(failing)
    assert failing.calls == calls


async def test_an_unbounded_policy_stops_when_it_is_cancelled() -> None:
    task = asyncio.create_task(Retrying(EVEN, SystemClock()).call(Failing(10**9)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_what_does_not_pass_is_raised_at_once() -> None:
    for error in (BusForbidden("no"), Fault("strange"), ValueError("a bug")):
        failing = Failing(1, error)
        with pytest.raises(type(error)):
            await Retrying(EVEN, Recorded()).call(failing)
        assert failing.calls == 1
    assert passes_with_time(BusUnavailable("unavailable")) and not passes_with_time(asyncio.CancelledError())


async def test_a_fault_that_follows_one_that_passes_is_raised() -> None:
    faults = iter([Transient("unavailable"), ValueError("a bug")])

    async def call() -> None:
        raise next(faults)

    with pytest.raises(ValueError, match="a bug"):
        await Retrying(EVEN, Recorded()).call(call)


async def test_until_it_is_done_or_the_policy_ends() -> None:
    left = 3

    async def is_done() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    assert await Retrying(EVEN, Recorded()).until(is_done)
    assert not await Retrying(RetryPolicy(first_s=1.0, longest_s=1.0, least=1.0, attempts=2), Recorded()).until(is_done)


async def test_a_loops_waits_are_short_again_after_a_success() -> None:
    clock = Recorded()
    backoff = Backoff(EVEN, clock)
    for _ in range(3):
        await backoff.wait()
    backoff.reset()
    await backoff.wait()
    assert clock.slept == [1.0, 2.0, 4.0, 1.0]
