"""Publishes pending messages, until they are published: the loop that reports of hosts and inventory share."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import structlog

from bus.clock import Clock
from bus.contracts.base import Message
from bus.retrying import Retrying, RetryPolicy, is_transient, level_of
from compute_sim.driver import DriverUnavailable
from compute_sim.host_changes import PendingReport

log = structlog.get_logger()

BATCH_S = 0.1  # changes and questions that come within this are answered together
JITTER = 0.1  # share of the report interval, so that services started together drift apart
REPORTS = RetryPolicy(first_s=0.1, longest_s=10.0, least=0.0)  # until they are published
LOOKS = RetryPolicy(first_s=0.1, longest_s=1.0, least=0.0)  # until the driver answers: hosts are offered soon after


class PublishingBus(Protocol):
    """The part of a bus that is needed here."""

    async def publish(self, message: Message, *, cause: str = "") -> None:
        """Publish one message."""

    async def publish_all(self, messages: Sequence[tuple[Message, str]]) -> None:
        """Publish many messages."""


class PendingPublisher:
    """Publishes one kind of report. interval_s: seconds after which everything is published without any change."""

    def __init__(self, pending: PendingReport, *, clock: Clock, rng: random.Random, interval_s: float) -> None:
        self._pending = pending
        self._clock = clock
        self._rng = rng
        self._interval_s = interval_s
        self._retrying = Retrying(REPORTS, clock, rng)
        self._looking = Retrying(LOOKS, clock, rng)

    async def run(self, publish: Callable[[list[str] | None], Awaitable[None]]) -> None:
        """Call `publish` with the hosts that are pending (None: all of them), until cancelled."""
        while True:
            await self._pending.wait(self._interval_s * self._rng.uniform(1 - JITTER, 1 + JITTER))
            await self._publish(publish)
            await self._clock.sleep(BATCH_S)

    async def _publish(self, publish: Callable[[list[str] | None], Awaitable[None]]) -> None:
        """Until it is published: a broker, a consumer or a driver that is unavailable comes back with time. What is
        published then is what is pending then: a report names all that was requested before its scan began.
        """

        async def publish_pending() -> None:
            hosts = self._pending.take()
            try:
                await publish(hosts)
            except BaseException:
                self._pending.add(hosts)
                raise

        async def look_and_publish() -> None:
            await self._looking.call(
                publish_pending, lambda error: isinstance(error, DriverUnavailable), on_failure=_log_failure
            )

        await self._retrying.call(look_and_publish, is_transient, on_failure=_log_failure)


def _log_failure(error: BaseException, failures: int) -> None:
    code = getattr(error, "code", "")
    log.log(level_of(error), "report.not_published", code=code, reason=str(error), attempt=failures)
