"""The jobs of a service: work on one instance on one host is a chain, one job at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import structlog

from compute_agent.records.records import Key

log = structlog.get_logger()


class Chain:
    """The work on one instance on one host: one job holds the lock, others wait in order. build: that a Destroy would
    cancel. answers: attempts whose Destroy is answered by the next job that clears the host of them.
    """

    # clearing: that build has yet to clear away an older attempt.

    __slots__ = ("answers", "build", "clearing", "jobs", "lock")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.jobs = 0
        self.build: asyncio.Task[None] | None = None
        self.answers: set[int] = set()
        self.clearing = False


class Jobs:
    """The chains that have work, and the tasks that do it. None of them may fail."""

    def __init__(self) -> None:
        self.on_idle: Callable[[Key], None] = lambda _: None  # called when a chain has no work left
        self.tasks: set[asyncio.Task[None]] = set()
        self._chains: dict[Key, Chain] = {}
        self._faults: list[BaseException] = []
        self._failed = asyncio.Event()

    def chain(self, key: Key) -> Chain | None:
        """The chain of this key, while it has work."""
        return self._chains.get(key)

    def chains(self) -> Iterable[tuple[Key, Chain]]:
        """The jobs that have work."""
        return self._chains.items()

    def without_build(self, key: Key) -> Chain:
        """Return the chain of this key for new work, after cancelling its build, if there is one."""
        chain = self._chains.get(key)
        if chain is None:
            chain = self._chains[key] = Chain()
        elif chain.build is not None:
            chain.build.cancel()
            chain.build = None
        return chain

    def start(self, key: Key, chain: Chain, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start this work as a further job of its chain."""
        chain.jobs += 1
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)

        def over(task: asyncio.Task[None]) -> None:
            self.tasks.discard(task)
            chain.jobs -= 1
            if not chain.jobs and self._chains.get(key) is chain:
                del self._chains[key]
                self.on_idle(key)
            if not task.cancelled() and (fault := task.exception()) is not None:
                self._report(fault)

        task.add_done_callback(over)
        return task

    def _report(self, fault: BaseException) -> None:
        """Hand it to `watch`, which takes the process down."""
        log.error("compute.job_failed", exc_info=fault)
        self._faults.append(fault)
        self._failed.set()

    async def watch(self) -> None:
        """Raise the first fault of any job."""
        await self._failed.wait()
        raise self._faults[0]

    async def stop(self, grace_s: float) -> None:
        """Let running jobs end within the grace time (seconds), then cancel the rest; builds are on record for the next
        start.
        """
        if self.tasks and grace_s > 0:
            await asyncio.wait(self.tasks, timeout=grace_s)
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
