"""Publishes the results of attempts to the conductor, and repeats this until the broker has confirmed them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import structlog

from bus.clock import Clock
from bus.contracts.actions import MachineChanged
from bus.contracts.base import Message
from bus.contracts.cell import ComputeResult
from bus.retrying import Retrying, RetryPolicy, level_of
from bus.tracing.context import traceparent_of
from compute_agent import metrics

log = structlog.get_logger()

Result = ComputeResult | MachineChanged

MAX_BATCH = 500  # results published at once
BATCH_YIELDS = 8  # the turns of the event loop before the gathered results are published, while further ones arrive
MAX_WAITING = 50_000  # the bound of unconfirmed results; above it no commands are taken
# Until the results are published: the jobs that ended have been done, and their conductor must get the results.
RESULTS = RetryPolicy(first_s=0.1, longest_s=5.0, least=0.0)


class ResultBus(Protocol):
    """The part of a Bus that is needed here."""

    async def publish_all(self, messages: Sequence[tuple[Message, str]], traceparents: Sequence[str] = ()) -> None:
        """Publish many messages with their causes and traces; returns when all are confirmed."""


class ResultSender:
    """A queue of results, published in the order they came, in batches that grow under load. on_reported: called with
    the results that were confirmed. sync: returns when what is on record survives a power cut.
    """

    # A batch that was confirmed only in part is published again as a whole: results may arrive twice, which conductors
    # expect.

    def __init__(
        self,
        bus: ResultBus,
        *,
        clock: Clock,
        rng: random.Random,
        on_reported: Callable[[Sequence[Result]], None],
        sync: Callable[[], Awaitable[None]],
        service: str,
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._retrying = Retrying(RESULTS, clock, rng)
        self._on_reported = on_reported
        self._sync = sync
        self._service = service
        self._waiting: deque[tuple[Result, str]] = deque()  # each with its trace
        self._some = asyncio.Event()
        self._has_capacity = asyncio.Event()
        self._has_capacity.set()
        self._publishing = asyncio.Lock()

    def send(self, result: Result) -> None:
        """Publish this soon. Never waits; a handler awaits `wait_for_capacity` before it takes new work."""
        self._waiting.append((result, traceparent_of(result.instance_uuid)))
        self._some.set()
        if len(self._waiting) >= MAX_WAITING:
            self._has_capacity.clear()

    async def wait_for_capacity(self) -> None:
        """Wait while too many results are not confirmed yet (the broker is unavailable, or full)."""
        if not self._has_capacity.is_set():
            await self._has_capacity.wait()

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await self._some.wait()
            await self._gather()
            await self._step()

    async def _gather(self) -> None:
        """Let jobs that end at this moment end first: they began together, and their results are published together."""
        for _ in range(BATCH_YIELDS):
            had = len(self._waiting)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if len(self._waiting) == had:
                return

    async def flush(self, seconds: float) -> bool:
        """Publish what waits, at most for this long; returns whether all of it was confirmed. `run` may have ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._waiting:
                    await self._step()
        return not self._waiting

    async def _step(self) -> None:
        async with self._publishing:
            batch = list(itertools.islice(self._waiting, MAX_BATCH))
            if not batch:
                return
            await self._sync()
            await self._publish(batch)
            for _ in batch:
                self._waiting.popleft()
            self._settle()
            self._on_reported([result for result, _ in batch])

    def _settle(self) -> None:
        if len(self._waiting) < MAX_WAITING:
            self._has_capacity.set()
        if not self._waiting:
            self._some.clear()

    async def _publish(self, batch: Sequence[tuple[Result, str]]) -> None:
        """Publish a batch until it is confirmed. An unavailable broker, a full queue and an unroutable message (no
        conductor has declared its queue yet) are all temporary.
        """
        messages = [(result, result.instance_uuid) for result, _ in batch]
        traces = [trace for _, trace in batch]
        await self._retrying.call(lambda: self._bus.publish_all(messages, traces), on_failure=self._log_state)
        metrics.RESULTS.labels(self._service).inc(len(batch))

    def _log_state(self, error: BaseException, _failures: int) -> None:
        code = getattr(error, "code", "")
        log.log(level_of(error), "results.not_published", waiting=len(self._waiting), code=code)
