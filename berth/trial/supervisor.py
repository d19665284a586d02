"""Keeps worker processes alive: a worker that died is started again, a bounded number of times.

One whose event loop stands still is ended first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from berth.trial.embedded.process import ServerFailed
from berth.trial.worker_processes import WorkerProcesses
from bus.clock import Clock

LOOK_S = 0.2
# One worker may die so often within so long; past it something is wrong that a restart does not mend.
MAX_DEATHS = 5
WITHIN_S = 60.0
# The first restart comes at once, each further one within that time waits longer.
PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0
# A worker that stands still is aborted, which prints its stacks into its log, and after so long it is killed.
ABORT_S = 5.0


class Supervisor:
    """Watches worker processes. notify: called with a sentence for each death and restart."""

    def __init__(self, processes: WorkerProcesses, *, clock: Clock, notify: Callable[[str], None]) -> None:
        self._processes = processes
        self._clock = clock
        self._notify = notify
        self._deaths: dict[str, deque[float]] = {}
        self._again_at: dict[str, float] = {}
        self._killed_at: dict[str, float] = {}  # when a worker that was aborted is killed

    async def watch(self) -> None:
        """Until cancelled. Raises ServerFailed when a worker dies again and again."""
        while True:
            self.check_workers()
            await self._clock.sleep(LOOK_S)

    def check_workers(self) -> None:
        """End those that stand still, note those that died, start those again whose pause is over."""
        now = self._clock.monotonic()
        if self._processes.pings is not None:
            self._processes.pings.receive(now)
        for name, worker in list(self._processes.workers.items()):
            if worker.process.running:
                self._check_loop(name, now)
                continue
            if name not in self._again_at:
                self._again_at[name] = now + self._died(name, now)
            if self._again_at[name] <= now:
                del self._again_at[name]
                self._processes.restart(name)

    def _check_loop(self, name: str, now: float) -> None:
        """End a worker whose event loop has given no watchdog ping for too long."""
        pings, worker = self._processes.pings, self._processes.workers[name]
        if pings is None:
            return
        if name in self._killed_at:
            if self._killed_at[name] <= now:
                worker.process.kill()
            return
        if pings.stalled_s(worker.process.pid, now) <= pings.limit_s:
            return
        self._notify(
            f"the event loop of {name} stood still for {pings.limit_s:g} s, so it is ended; its log: {worker.log}"
        )
        self._killed_at[name] = now + ABORT_S
        worker.process.abort()

    def _died(self, name: str, now: float) -> float:
        """Count a death; returns how long to wait before the restart."""
        worker = self._processes.workers[name]
        self._killed_at.pop(name, None)
        if self._processes.pings is not None:
            self._processes.pings.remove(worker.process.pid)
        deaths = self._deaths.setdefault(name, deque(maxlen=MAX_DEATHS))
        while deaths and deaths[0] < now - WITHIN_S:
            deaths.popleft()
        status = f"{name} died with status {worker.process.status}"
        if len(deaths) >= MAX_DEATHS:
            raise ServerFailed(f"{status}, {MAX_DEATHS} times within {WITHIN_S:g} s:\n{worker.process.tail()}")
        pause_s = min(PAUSE_S * 2 ** (len(deaths) - 1), LONGEST_PAUSE_S) if deaths else 0.0
        deaths.append(now)
        self._notify(f"{status}; started again{f' after {pause_s:g} s' if pause_s else ''} (its log: {worker.log})")
        return pause_s


async def supervised(supervisor: Supervisor, stop: asyncio.Event) -> None:
    """Until `stop` is set. Raises what ended the supervision."""
    watching = asyncio.create_task(supervisor.watch())
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({watching, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()
    finally:
        for task in (watching, stopped):
            task.cancel()
        await asyncio.gather(watching, stopped, return_exceptions=True)
