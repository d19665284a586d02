"""The lifecycle of every worker: open, declare, ready, consume, drain within a grace time, close.

A side task that ends while the service runs ends the service, and `run` raises the first fault. After a fault nothing
is drained: unacknowledged messages go back to their queue, and another process, or this one restarted, takes them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

import structlog

from bus.clock import Clock
from bus.consuming.stall_watch import LOOK_S, StallWatch
from bus.faults import Fault, first_fault
from bus.retrying import RIGHTS, Retrying, needs_grant

if TYPE_CHECKING:
    from bus.consuming.consumer import Consumer

DEFAULT_GRACE_S = 10.0
# One resource; a connection that does not close is left to the operating system. Longer than the bounds within: a bus
# sends what is gathered for 5 s, and its connection closes within 5 s.
CLOSE_TIMEOUT_S = 12.0
CANCEL_TIMEOUT_S = 5.0  # side tasks, together
REFRESH_TIMEOUT_S = 2.0  # gauges that ask a server for their value, together


class SideTaskEnded(Fault):
    """A task that must run as long as the service ended without an error."""

    code = "service.task_ended"


class WorkerRuntime:
    """The lifecycle of one worker. Register all parts, then call `run(stop)`; `ready` is set while the worker
    consumes.
    """

    def __init__(self, name: str, *, clock: Clock, grace_s: float = DEFAULT_GRACE_S, log: Any = None) -> None:
        self.name = name
        self.clock = clock
        self.grace_s = grace_s
        self.log = log if log is not None else structlog.get_logger("service").bind(service=name)
        self.ready = asyncio.Event()
        self.phase = "new"
        self.on_reload: Callable[[], None] | None = None  # reads settings again; None: they are read at the start
        self._refused = ""  # what a server refuses to this start
        self._resources: list[tuple[Callable[[], Awaitable[Any]] | None, Callable[[], Awaitable[Any]]]] = []
        self._declarations: list[Callable[[], Awaitable[Any]]] = []
        self._preparations: list[Callable[[], Awaitable[Any]]] = []
        self._consumers: list[Consumer] = []
        self._task_makers: list[tuple[str, Callable[[], Coroutine[Any, Any, Any]]]] = []
        self._drains: list[Callable[[float], Awaitable[Any]]] = []
        self._checks: dict[str, Callable[[], str]] = {}
        self._counts: list[Callable[[], Mapping[str, int]]] = []
        self._ages: dict[str, Callable[[], float]] = {}
        self._refreshes: list[Callable[[], Awaitable[Any]]] = []
        self._closings: list[Callable[[], Awaitable[Any]]] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failed: asyncio.Future[None] | None = None

    def add_resource(self, opening: Callable[[], Awaitable[Any]] | None, closing: Callable[[], Awaitable[Any]]) -> None:
        """Add a resource. Resources are opened in order before anything else, and those that were opened are closed in
        the opposite order at the end. opening: None when it opens later, or by itself; called again after rights were
        missing.
        """
        self._resources.append((opening, closing))

    def add_declaration(self, declaring: Callable[[], Awaitable[Any]]) -> None:
        """Add a declaration of a queue that must exist before the worker is ready. Declarations run when everything is
        open.
        """
        self._declarations.append(declaring)

    def add_preparation(self, preparing: Callable[[], Awaitable[Any]]) -> None:
        """Add a preparation, such as the loading of a replica. Preparations run beside the side tasks and before the
        first message is taken.
        """
        self._preparations.append(preparing)

    def add_consumer(self, consumer: Consumer) -> None:
        """Add a consumer. Consumers are started last and drained first."""
        self._consumers.append(consumer)

    def add_task(self, name: str, body: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Add a side task. It runs until it is cancelled; when it ends before that, the service ends."""
        self._task_makers.append((name, body))

    def add_drain(self, draining: Callable[[float], Awaitable[Any]]) -> None:
        """Add a drain, such as that of an outbox relay. It is called after the consumers have drained, with the rest of
        the grace time (seconds).
        """
        self._drains.append(draining)

    def add_check(self, name: str, fn: Callable[[], bool]) -> None:
        """Add a line of /readyz, which is true while that part can do its work."""
        self._checks[name] = lambda: "" if fn() else name

    def add_bus_check(self, name: str, reason: Callable[[], str]) -> None:
        """Add a line of /readyz for a bus. reason: why nothing can be published on it now; "": it can."""
        self._checks[name] = lambda: f"{name}: {why}" if (why := reason()) else ""

    def add_refresh(self, refreshing: Callable[[], Awaitable[Any]]) -> None:
        """Add a function that sets gauges whose value must be queried. It is called before metrics are scraped and must
        not raise.
        """
        self._refreshes.append(refreshing)

    async def refresh(self) -> None:
        """Set these gauges within REFRESH_TIMEOUT_S. A gauge that takes longer keeps its last value."""
        try:
            async with asyncio.timeout(REFRESH_TIMEOUT_S):
                await asyncio.gather(*(refreshing() for refreshing in self._refreshes))
        except TimeoutError:
            self.log.warning("metrics.refresh_too_slow", limit_s=REFRESH_TIMEOUT_S)

    def in_flight(self) -> dict[str, int]:
        """{queue: deliveries taken and not answered} of the consumers."""
        return {one.queue: one.in_flight for one in self._consumers}

    def add_counts(self, counting: Callable[[], Mapping[str, int]]) -> None:
        """Add counts that the heartbeats carry to the page: {what: count since the start}."""
        self._counts.append(counting)

    def counts(self) -> dict[str, int]:
        """All of these."""
        return {what: count for counting in self._counts for what, count in counting().items()}

    def add_age(self, name: str, age_s: Callable[[], float]) -> None:
        """Add the age of a copy that is decided by to /readyz and the heartbeats; infinite: there is none yet."""
        self._ages[name] = age_s

    def ages_s(self) -> dict[str, float]:
        """All of these (seconds)."""
        found = {name: age_s() for name, age_s in self._ages.items()}
        return {name: round(one, 3) for name, one in found.items() if math.isfinite(one)}

    def not_ready(self) -> list[str]:
        """Names of the parts that are not ready now; empty when the service can do its work."""
        failing = [problem for fn in self._checks.values() if (problem := fn())]
        refused = [self._refused] if self._refused else []
        return failing if self.ready.is_set() else [f"service is {self.phase}", *refused, *failing]

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set (drain, close, return) or a part fails (close, raise the first fault)."""
        self._failed = asyncio.get_running_loop().create_future()
        stopping: asyncio.Future[Any] = asyncio.create_task(stop.wait(), name=f"{self.name} stop")
        starting: asyncio.Future[Any] = asyncio.create_task(self._start(), name=f"{self.name} start")
        clean = False
        try:
            await asyncio.wait([starting, stopping, self._failed], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                await starting
                await asyncio.wait([stopping, self._failed], return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                await self._failed
            clean = starting.done()
        finally:
            self.ready.clear()
            await _cancel({starting, stopping})
            try:
                if clean:
                    self._enter_phase("draining")
                    await self._drain()
            finally:
                self._enter_phase("closing")
                await self._close()
                self._enter_phase("closed")
        if self._failed.done():  # something died while draining
            await self._failed

    async def _start(self) -> None:
        self._enter_phase("opening")
        for opening, closing in self._resources:
            self._closings.append(closing)  # before it is opened: half open still needs closing
            if opening is not None:
                await self._permitted(opening)
        self._enter_phase("declaring")
        for step in self._declarations:
            await self._permitted(step)
        for name, body in self._task_makers:
            self._spawn(name, body())
        self._enter_phase("preparing")
        for step in self._preparations:
            await step()
        if self._consumers:
            self._spawn("stalls", self._watch_stalls(self._consumers[0].stall_watch))
        for consumer in self._consumers:
            await self._permitted(consumer.start)
            self._spawn(f"consumer {consumer.queue}", consumer.run())
        self._enter_phase("ready")
        self.ready.set()

    async def _permitted(self, step: Callable[[], Awaitable[Any]]) -> None:
        """Take a step of the start; again and again while a server refuses it rights that a person may grant."""

        def say(error: BaseException, failures: int) -> None:
            code = getattr(error, "code", "")
            self._refused = f"{code}: {error}"
            self.log.warning("service.rights_missing", code=code, reason=str(error), attempt=failures)

        await Retrying(RIGHTS, self.clock).call(step, needs_grant, on_failure=say)
        self._refused = ""

    async def _watch_stalls(self, watch: StallWatch) -> None:
        """Have consumers know that what they read may have waited while this process stood still."""
        while True:
            watch.look(self.clock.monotonic())
            await self.clock.sleep(LOOK_S)

    def _spawn(self, name: str, body: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(body, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_ended)

    def _on_task_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        assert self._failed is not None
        if task.cancelled() and self.phase in {"closing", "closed"}:
            return
        error = None if task.cancelled() else task.exception()
        if error is None and self.phase in {"draining", "closing", "closed"}:
            return
        first = first_fault(error) if error is not None else SideTaskEnded(f"{task.get_name()} ended")
        self.log.error("service.task_died", task=task.get_name(), error=type(first).__name__, reason=str(first))
        if not self._failed.done():
            self._failed.set_exception(first)
            self._failed.exception()  # read once, so that asyncio does not warn when `run` raises something else

    async def _drain(self) -> None:
        until = self.clock.monotonic() + self.grace_s
        await _gather(consumer.drain(self.grace_s) for consumer in self._consumers)
        await _gather(draining(max(0.0, until - self.clock.monotonic())) for draining in self._drains)

    async def _close(self) -> None:
        await _cancel(self._tasks)
        for closing in reversed(self._closings):
            # In a task of its own: in one that was cancelled a time limit of Python 3.11.2 does not end as a time-out.
            closed = asyncio.create_task(_limited(closing))
            await asyncio.wait({closed})
            error = asyncio.CancelledError() if closed.cancelled() else closed.exception()
            if error is not None:  # the others still have to be closed
                self.log.warning("service.close_failed", error=type(error).__name__, reason=str(error))
        self._closings.clear()

    def _enter_phase(self, phase: str) -> None:
        self.phase = phase
        self.log.info("service.phase", phase=phase)


async def _limited(closing: Callable[[], Awaitable[Any]]) -> None:
    async with asyncio.timeout(CLOSE_TIMEOUT_S):
        await closing()


async def _cancel(tasks: Collection[asyncio.Future[Any]]) -> None:
    waiting = {task for task in tasks if not task.done()}
    for task in waiting:
        task.cancel()
    if waiting:
        await asyncio.wait(waiting, timeout=CANCEL_TIMEOUT_S)


async def _gather(work: Any) -> None:
    """Wait for all, then raise the first failure."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
