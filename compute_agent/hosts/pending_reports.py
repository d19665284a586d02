"""Collects all changes of hosts: which hosts are to be reported, and whose inventory is to be published."""

# The driver, the agent, the quarantine and the startup gate record here which hosts have changed; the reporter and the
# inventory reporter wait here for hosts that are due. None of them knows the others.

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import structlog

from bus.clock import Clock
from bus.contracts.base import Message
from bus.contracts.cell import MAX_RESCANS, RescanHosts
from bus.retrying import Retrying, RetryPolicy, is_transient, level_of
from compute_agent.driver import DriverUnavailable

# The inventory of a host that changed is published once more with the first whole report after this: a report
# that another service made of it before, and that waited somewhere, may have undone the first one.
UNDONE_S = 15.0


class PendingReport:
    """The hosts to report, everything or some hosts. Setting it wakes the waiting task."""

    def __init__(self) -> None:
        self.everything = True  # a start publishes everything
        self.hosts: dict[str, None] = {}
        self._some = asyncio.Event()
        self._some.set()

    def add(self, hosts: Sequence[str] | None = None) -> None:
        """Add these hosts, or everything."""
        if hosts is None:
            self.everything = True
        else:
            self.hosts.update(dict.fromkeys(hosts))
        self._some.set()

    async def wait(self, seconds: float) -> None:
        """Wait until something is to be reported; after `seconds` everything is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._some.wait()
            return
        self.everything = True

    def take(self) -> list[str] | None:
        """Return the hosts to report (None: all of them), and clear them."""
        taken = None if self.everything else list(self.hosts)
        self.everything, self.hosts = False, {}
        self._some.clear()
        return taken


class PendingHostReports:
    """The pending reports of one service about its hosts: `announcements` go to its cell, `inventory` to placement."""

    def __init__(self, clock: Clock) -> None:
        self.announcements = PendingReport()
        self.inventory = PendingReport()
        self._clock = clock
        # To be named by a scan that has not begun yet or is under way, the oldest first; with the hosts of their
        # command.
        self._rescans: dict[str, tuple[str, ...]] = {}
        self._changed: dict[str, float] = {}  # hosts whose inventory is due once more, and when they changed

    def on_request(self) -> None:
        """Report everything: a listener has just started."""
        self.announcements.add()

    def on_rescan(self, command: RescanHosts) -> None:
        """A conductor waits for a scan of these hosts that begins now, or later. The oldest rescans are dropped. It
        repeats its command with each report until one names them.
        """
        if {self._rescans.get(rescan) for rescan in command.rescans} == {command.hosts}:
            return
        self._rescans.update(dict.fromkeys(command.rescans, command.hosts))
        while len(self._rescans) > MAX_RESCANS:
            del self._rescans[next(iter(self._rescans))]
        self.announcements.add(command.hosts)

    @property
    def rescans(self) -> tuple[str, ...]:
        """The rescans that a scan which begins now names, and those after it until one was published."""
        return tuple(self._rescans)

    def clear_rescans(self, rescans: Sequence[str]) -> None:
        """A scan that names these was published."""
        for rescan in rescans:
            self._rescans.pop(rescan, None)

    def on_host_changed(self, hosts: Sequence[str]) -> None:
        """Report these hosts: they were enabled or disabled, offer other amounts, or may be offered from now on."""
        self.announcements.add(hosts)
        self.inventory.add(hosts)
        self._changed.update(dict.fromkeys(hosts, self._clock.monotonic()))

    def on_failures_changed(self, host: str) -> None:
        """This host's count of consecutive failed builds changed."""
        self.announcements.add((host,))

    def on_reconnected(self) -> None:
        """The broker was unavailable: reports that were published meanwhile, or just before, may be lost."""
        self.announcements.add()
        self.inventory.add()

    def repeat_changed(self) -> None:
        """Publish the inventory of hosts once more that changed `UNDONE_S` ago or earlier."""
        before = self._clock.monotonic() - UNDONE_S
        due = [host for host, at in self._changed.items() if at <= before]
        for host in due:
            del self._changed[host]
        if due:
            self.inventory.add(due)


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
