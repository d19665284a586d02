"""Retries: how long to wait and when to stop. The only module that decides it.

Tenacity does the calling. Waits pass on our clock and are drawn from our random generator, so that a simulation owns
both. A policy without a bound continues until it works or its task is cancelled, which ends every wait at once.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import tenacity
from msgspec import Struct

from bus.clock import Clock
from bus.faults import Transient
from bus.port import BusError, BusForbidden

T = TypeVar("T")

# A wait is doubled at most this often: no number overflows.
MAX_DOUBLINGS = 30


class RetryPolicy(Struct, frozen=True, kw_only=True):
    """How long to wait between calls, and when to stop calling.

    The wait after failure n is drawn evenly between `least` of and all of first_s * 2**(n - 1), at most longest_s
    (least 1: it is not drawn). attempts: calls in all; lasts_s: after this, counted from the first call, no other
    begins. Both None: unbounded.
    """

    first_s: float
    longest_s: float
    least: float = 0.5
    attempts: int | None = None
    lasts_s: float | None = None

    def wait_s(self, failures: int, rng: random.Random | None) -> float:
        """How long to wait after this many failures in a row, 1 or more. rng None: this policy draws nothing."""
        longest = doubled_s(self.first_s, self.longest_s, failures - 1)
        if self.least >= 1:
            return longest
        assert rng is not None, "these waits are drawn"
        return longest * rng.uniform(self.least, 1.0)


# A server that a consumer, a worker's start or a report depends on is unavailable: until it is there.
UNTIL_AVAILABLE = RetryPolicy(first_s=0.05, longest_s=5.0)
# A request that the broker did not take, and the reply queue that it needs: within the request's own timeout.
WITHIN_A_REQUEST = RetryPolicy(first_s=0.02, longest_s=1.0)
# The outbox: until database and bus are there; its rows wait in the database meanwhile.
RELAY = RetryPolicy(first_s=0.05, longest_s=2.0, least=1.0)
# The connection to the broker: until it is back.
RECONNECT = RetryPolicy(first_s=0.2, longest_s=5.0)
# Declaring and beginning to consume, which outlive the loss of a connection. When several processes declare one quorum
# queue for the first time RabbitMQ ends some of their connections, and trying again is all that helps.
SET_UP = RetryPolicy(first_s=0.15, longest_s=0.15, least=1 / 3, lasts_s=60.0)
# A private queue that another connection has: a broker needs half a minute to notice that the former one is gone.
QUEUE_LOCKED = RetryPolicy(first_s=1.0, longest_s=1.0, least=1.0, lasts_s=60.0)
# A cell's bus that went away while its queues were declared: until it is back.
CELL_UNAVAILABLE = RetryPolicy(first_s=0.5, longest_s=0.5, least=1.0)
# The database at the start of a process, or after its connections were lost: until it answers.
DATABASE = RetryPolicy(first_s=0.1, longest_s=3.0)
# The broker does not take a client's message: until the request's own deadline.
CLIENT_PUBLISH = RetryPolicy(first_s=0.25, longest_s=0.25, least=1.0)
# A conductor's request for reports: until it is published.
REPORT_REQUEST = RetryPolicy(first_s=2.0, longest_s=2.0, least=1.0)
# Operators' objects at the start of a scheduler: until the database answers.
OBJECTS = RetryPolicy(first_s=0.1, longest_s=3.0, least=1.0)


def passes_with_time(error: BaseException) -> bool:
    """Whether waiting helps: what we depend on is unavailable, and our credentials have not been turned down."""
    return isinstance(error, Transient | BusError) and not isinstance(error, BusForbidden)


def doubled_s(first_s: float, longest_s: float, times: int) -> float:
    """`first_s`, doubled this often, at most `longest_s`."""
    return min(longest_s, first_s * 2.0 ** min(times, MAX_DOUBLINGS))


class Retrying:
    """Repeats a call according to a policy."""

    def __init__(self, policy: RetryPolicy, clock: Clock, rng: random.Random | None = None) -> None:
        self.policy = policy
        self._clock = clock
        self._rng = rng

    async def call(
        self,
        function: Callable[[], Awaitable[T]],
        passes: Callable[[BaseException], bool] = passes_with_time,
        *,
        on_failure: Callable[[BaseException, int], None] = lambda _error, _failures: None,
    ) -> T:
        """Call until it returns. Raises the last error: a fault that does not pass, or when the policy stops.

        on_failure: called with each fault that another call follows, and with the number of faults so far.
        """
        is_first = True
        try:  # nearly every call is the only one, and tenacity takes longer than some of them
            return await function()
        except Exception as error:  # `passes` decides which of them are retried
            if not passes(error):
                raise
            first = error

        async def once() -> T:
            nonlocal is_first
            if is_first:
                is_first = False
                raise first
            return await function()

        def report_failure(state: tenacity.RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome is not None else None
            if error is not None:
                on_failure(error, state.attempt_number)

        retrying = tenacity.AsyncRetrying(
            sleep=self._clock.sleep,
            wait=self._wait_s,
            stop=self._stop(),
            retry=tenacity.retry_if_exception(passes),
            before_sleep=report_failure,
            reraise=True,
        )
        return await retrying(once)

    async def until(self, is_done: Callable[[], Awaitable[bool]]) -> bool:
        """Call until it returns True; False: the policy stopped before."""
        retrying = tenacity.AsyncRetrying(
            sleep=self._clock.sleep,
            wait=self._wait_s,
            stop=self._stop(),
            retry=tenacity.retry_if_result(lambda done: not done),
            retry_error_callback=lambda _: False,
        )
        return await retrying(is_done)

    def _wait_s(self, state: tenacity.RetryCallState) -> float:
        return self.policy.wait_s(state.attempt_number, self._rng)

    def _stop(self) -> Callable[[tenacity.RetryCallState], bool]:
        policy, clock = self.policy, self._clock
        until = None if policy.lasts_s is None else clock.monotonic() + policy.lasts_s

        def stop(state: tenacity.RetryCallState) -> bool:
            if policy.attempts is not None and state.attempt_number >= policy.attempts:
                return True
            return until is not None and clock.monotonic() >= until

        return stop


class Backoff:
    """The waits of a loop that continues whatever fails in it: longer with each failure, short
    again after a success.
    """

    def __init__(self, policy: RetryPolicy, clock: Clock, rng: random.Random | None = None) -> None:
        self.failures = 0
        self._policy = policy
        self._clock = clock
        self._rng = rng

    async def wait(self) -> None:
        """It failed: wait, longer than the last time."""
        self.failures += 1
        await self._clock.sleep(self._policy.wait_s(self.failures, self._rng))

    def reset(self) -> None:
        """It went well."""
        self.failures = 0
