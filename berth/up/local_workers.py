"""Several workers in one process, each with its own lifecycle, connections and stop."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from msgspec import Struct

from bus.faults import Fault
from bus.service.service import WorkerRuntime
from bus.service.settings import SettingsError
from bus.transport import BusForbidden

READY_TIMEOUT_S = 60.0


class WorkerEnded(Exception):
    """A worker ended though it was not stopped, or was not ready in time.

    The cause is the error that ended it, if known.
    """


class InProcessWorker(Struct):
    """One running worker."""

    name: str
    service: WorkerRuntime
    stop: asyncio.Event
    task: asyncio.Task[None]


class InProcessWorkers:
    """Starts, kills and stops workers of this process. `failed` is set with the first that dies without a stop."""

    def __init__(self) -> None:
        self.members: dict[str, InProcessWorker] = {}
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self, *services: tuple[str, WorkerRuntime]) -> None:
        """Start workers side by side and wait until all are ready. Raises WorkerEnded when one dies first."""
        for name, service in services:
            stop = asyncio.Event()
            task = asyncio.create_task(service.run(stop), name=name)
            self.members[name] = InProcessWorker(name=name, service=service, stop=stop, task=task)
            task.add_done_callback(self._ended)
        ready = asyncio.gather(*(service.ready.wait() for _, service in services))
        try:
            waiting: set[asyncio.Future[Any]] = {ready, self.failed}
            await asyncio.wait(waiting, timeout=READY_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done() and not self.failed.done():
                late = "; ".join(f"{name}: {', '.join(s.not_ready())}" for name, s in services if s.not_ready())
                raise WorkerEnded(f"not ready within {READY_TIMEOUT_S:g} s: {late}")
        finally:
            if not ready.done():
                ready.cancel()
                await asyncio.gather(ready, return_exceptions=True)
        if self.failed.done():
            await self.failed

    async def kill(self, name: str) -> None:
        """End a worker at once, without draining: its unacknowledged messages go back to its queues."""
        member = self.members.pop(name)
        member.task.cancel()
        await asyncio.gather(member.task, return_exceptions=True)

    async def stop(self) -> None:
        """Drain and stop all, those started last first. Raises WorkerEnded when one fails at that."""
        faults: list[BaseException] = []
        while self.members:
            _, member = self.members.popitem()
            member.stop.set()
            (result,) = await asyncio.gather(member.task, return_exceptions=True)
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                faults.append(result)
        if self.failed.done():
            with contextlib.suppress(WorkerEnded):
                await self.failed  # retrieved, so that asyncio does not warn about it
        if faults:
            raise WorkerEnded(str(faults[0])) from faults[0]

    def _ended(self, task: asyncio.Task[None]) -> None:
        member = self.members.get(task.get_name())
        if member is None or member.task is not task or member.stop.is_set() or self.failed.done():
            return
        error = None if task.cancelled() else task.exception()
        why = str(error) if isinstance(error, Fault | SettingsError | BusForbidden) else repr(error)
        fault = WorkerEnded(f"worker {member.name} ended: {why}")
        fault.__cause__ = error
        self.failed.set_exception(fault)
        self.failed.exception()
