"""Retries: how long to wait and when to stop. No other module decides that.

Tenacity makes the calls. Waits use the Clock and the random generator of the caller, so that a simulation controls
both. A policy without a bound continues until a call succeeds or the task is cancelled, which ends every wait at once.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import tenacity
from msgspec import Struct

from bus.clock import Clock
from bus.faults import DatabaseRightsMissing, Transient
from bus.transport import BusError, BusForbidden, BusRightsMissing, Unroutable

T = TypeVar("T")

# A wait is doubled at most this often, so that no number overflows.
MAX_DOUBLINGS = 30


class RetryPolicy(Struct, frozen=True, kw_only=True):
    """How long to wait between calls, and when to stop. The wait after failure n is drawn evenly from `least` to 1
    times first_s * 2**(n - 1), at most longest_s. Without max_calls and lasts_s there is no bound.
    """

    first_s: float
    longest_s: float
    least: float = 0.5  # 1: the waits are not random
    max_calls: int | None = None
    lasts_s: float | None = None  # no call begins later than this after the first one

    def wait_s(self, failures: int, rng: random.Random | None) -> float:
        """Return the wait after this many failures in a row, 1 or more. rng: None for a policy without randomness."""
        longest = doubled_s(self.first_s, self.longest_s, failures - 1)
        if self.least >= 1:
            return longest
        assert rng is not None, "these waits are drawn"
        return longest * rng.uniform(self.least, 1.0)


# For a server that a consumer, the start of a worker or a report depends on: until the server is available.
UNTIL_AVAILABLE = RetryPolicy(first_s=0.05, longest_s=5.0)
# For a request that the broker did not accept, and for its reply queue: within the time-out of the request.
WITHIN_A_REQUEST = RetryPolicy(first_s=0.02, longest_s=1.0)
# For the outbox: until database and bus are available; the rows wait in the database meanwhile.
RELAY = RetryPolicy(first_s=0.05, longest_s=2.0, least=1.0)
# For the connection to the broker: until it is restored.
RECONNECT = RetryPolicy(first_s=0.2, longest_s=5.0)
# For declarations and subscriptions across the loss of a connection. When several processes declare one quorum queue
# for the first time, RabbitMQ closes some of their connections, and a retry succeeds.
SET_UP = RetryPolicy(first_s=0.15, longest_s=0.15, least=1 / 3, lasts_s=60.0)
# For a private queue that another connection has: a broker takes half a minute to notice that a former connection is
# lost.
QUEUE_LOCKED = RetryPolicy(first_s=1.0, longest_s=1.0, least=1.0, lasts_s=60.0)
# For a cell's bus that was lost while its queues were declared: until it is available.
CELL_UNAVAILABLE = RetryPolicy(first_s=0.5, longest_s=0.5, least=1.0)
# For the database at the start of a process, or after its connections were lost: until it answers.
DATABASE = RetryPolicy(first_s=0.1, longest_s=3.0)
# For rights that a worker lacks at its start: until they are granted.
RIGHTS = RetryPolicy(first_s=0.2, longest_s=15.0, least=1.0)
# For a client's message that the broker does not accept: until the deadline of the request.
CLIENT_PUBLISH = RetryPolicy(first_s=0.25, longest_s=0.25, least=1.0)
# For a conductor's request for reports: until it is published.
REPORT_REQUEST = RetryPolicy(first_s=2.0, longest_s=2.0, least=1.0)
# For loading the operators' objects at the start of a scheduler: until the database answers.
OBJECTS = RetryPolicy(first_s=0.1, longest_s=3.0, least=1.0)
# For a call of Nova while a server that it depends on is unavailable: its client gets heartbeats meanwhile.
NOVA_CALL = RetryPolicy(first_s=0.1, longest_s=2.0, lasts_s=60.0)
# For a reply to Nova whose queue does not exist at the moment, as after a restart of the broker: as oslo.messaging does
# (`kombu_missing_consumer_retry_timeout`).
NOVA_REPLY = RetryPolicy(first_s=0.25, longest_s=0.25, least=1.0, lasts_s=60.0)


def is_transient(error: BaseException) -> bool:
    """Whether a wait helps: a server is unavailable, and has not refused the credentials."""
    return isinstance(error, Transient | BusError) and not isinstance(error, BusForbidden)


def needs_grant(error: BaseException) -> bool:
    """Whether a server knows this process and refuses it rights, which a person grants meanwhile."""
    return isinstance(error, DatabaseRightsMissing | BusRightsMissing)


def level_of(error: BaseException) -> int:
    """Of the log line about a retry: a message without a queue only waits for another worker's start."""
    return logging.INFO if isinstance(error, Unroutable) else logging.WARNING


def doubled_s(first_s: float, longest_s: float, times: int) -> float:
    """Return `first_s` (seconds) doubled this often, at most `longest_s` (seconds)."""
    return min(longest_s, first_s * 2.0 ** min(times, MAX_DOUBLINGS))


class _NotDone(Exception):
    """A call is to be repeated."""


class Retrying:
    """Repeats a call according to a policy."""

    def __init__(self, policy: RetryPolicy, clock: Clock, rng: random.Random | None = None) -> None:
        self.policy = policy
        self._clock = clock
        self._rng = rng

    async def call(
        self,
        function: Callable[[], Awaitable[T]],
        passes: Callable[[BaseException], bool] = is_transient,
        *,
        on_failure: Callable[[BaseException, int], None] = lambda _error, _failures: None,
    ) -> T:
        """Call until it returns. Raises the last error when a wait does not help, or when the policy stops.

        on_failure: called before each retry with the fault and the number of faults so far.
        """
        stop = self._stop()
        try:  # nearly every first call succeeds, and tenacity would take longer than some of them
            return await function()
        except Exception as error:  # `passes` decides which of them are retried
            if not passes(error):
                raise
            failed = [error]

        async def again() -> T:
            if failed:
                raise failed.pop()
            return await function()

        def report_failure(state: tenacity.RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome is not None else None
            if error is not None:
                on_failure(error, state.attempt_number)

        retrying = tenacity.AsyncRetrying(
            sleep=self._clock.sleep,
            wait=self._wait_s,
            stop=stop,
            retry=tenacity.retry_if_exception(passes),
            before_sleep=report_failure,
            reraise=True,
        )
        return await retrying(again)

    async def until(self, is_done: Callable[[], Awaitable[bool]]) -> bool:
        """Call the function until it returns True. Returns False when the policy stops before."""

        async def once() -> None:
            if not await is_done():
                raise _NotDone

        try:
            await self.call(once, lambda error: isinstance(error, _NotDone))
        except _NotDone:
            return False
        return True

    def _wait_s(self, state: tenacity.RetryCallState) -> float:
        return self.policy.wait_s(state.attempt_number, self._rng)

    def _stop(self) -> Callable[[tenacity.RetryCallState], bool]:
        policy, clock = self.policy, self._clock
        until = None if policy.lasts_s is None else clock.monotonic() + policy.lasts_s

        def stop(state: tenacity.RetryCallState) -> bool:
            if policy.max_calls is not None and state.attempt_number >= policy.max_calls:
                return True
            return until is not None and clock.monotonic() >= until

        return stop


class Backoff:
    """The waits of a loop that continues after failures: longer with each failure, short again after a success."""

    def __init__(self, policy: RetryPolicy, clock: Clock, rng: random.Random | None = None) -> None:
        self.failures = 0
        self._policy = policy
        self._clock = clock
        self._rng = rng

    async def wait(self) -> None:
        """Wait after a failure, longer than the last time."""
        self.failures += 1
        await self._clock.sleep(self._policy.wait_s(self.failures, self._rng))

    def reset(self) -> None:
        """Record a success: the next wait is short again."""
        self.failures = 0
