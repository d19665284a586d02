"""Carries out a plan of faults on processes and connections, undoes them, and keeps the record."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Iterable

import structlog
from msgspec import Struct

from berth.config.ports import ServerFailed
from berth.up.embedded.postgres import Postgres
from berth.up.embedded.rabbitmq import RabbitMQ
from lab.benchmarks.probe import tree
from lab.chaos.deployment import Deployment, last_log_line
from lab.chaos.plan import BROKER, DATABASE, SERVER_RESTS_S, SERVERS, FaultKind, FaultSchedule, PlannedFault

log = structlog.get_logger("chaos")

WORKER_ROLES = ("scheduler", "placement", "conductor", "compute")
# A worker that ended by itself is started again after this, as a process supervisor would.
RESTART_AFTER_S = 0.5
WATCH_EVERY_S = 0.1
# Undoing the last faults: a server that takes longer to come back is broken, not slow.
UNDO_TIMEOUT_S = 90.0
# A worker that was started again counts as broken until it is ready, at most this long: on a busy machine a start takes
# many times as long as on a quiet one, and all workers would be starting all the time. One in four does not count:
# workers are also hit while they start.
STARTING_S = 30.0
HIT_WHILE_STARTING = 0.25
# A server that was not ready in its time (a busy machine) is ended and started again on its data, at most this often.
SERVER_STARTS = 3


class Injected(Struct):
    """One fault as it happened, in the client's monotonic seconds. over_at: undone; then recovery begins."""

    fault: PlannedFault
    began_at: float
    over_at: float | None = None


class Death(Struct, frozen=True):
    """A worker that ended by itself."""

    worker: str
    status: int
    last_log_line: str
    at: float


class FaultInjector:
    """Injects faults into a deployment. Everything random comes from `rng`."""

    def __init__(self, deployment: Deployment, rng: random.Random) -> None:
        self.injected: list[Injected] = []
        self.deaths: list[Death] = []
        self.connections_cut = 0
        self._deployment = deployment
        self._clock = deployment.site.clock
        self._rng = rng
        self._busy: dict[str, PlannedFault] = {}
        self._rests_until = dict.fromkeys(SERVERS, 0.0)
        self._under_way: set[asyncio.Task[None]] = set()
        self._not_undone: BaseException | None = None

    async def disturb(self, deck: FaultSchedule, every_s: float, most: int) -> None:
        """Inject a fault every so many seconds, until cancelled or there were enough. A fault that has begun goes on:
        see `settle`.

        Raises ServerFailed when a server did not come back.
        """
        while len(self.injected) < most:
            await self._clock.sleep(every_s)
            self._raise_if_not_undone()
            paused = sum(fault.kind is FaultKind.PAUSE for fault in self._busy.values())
            fault = deck.deal(self._free(), paused=paused, broken=len(self._busy))
            if fault is not None:
                self.begin(fault)

    def begin(self, fault: PlannedFault) -> asyncio.Task[None]:
        """Inject a fault now; the task ends when it is undone."""
        self._busy[fault.target] = fault
        entry = Injected(fault=fault, began_at=self._clock.monotonic())
        self.injected.append(entry)
        log.info("chaos.fault", fault=fault.label, target=fault.target, lasts_s=fault.lasts_s)
        task = asyncio.create_task(self._inject(entry), name=f"{fault.label} {fault.target}")
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A fault that cannot be undone ends the run: see `disturb` and `settle`."""
        self._under_way.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._not_undone = self._not_undone or error

    async def watch(self) -> None:
        """Start workers again that ended by themselves; until cancelled."""
        while True:
            await self._clock.sleep(WATCH_EVERY_S)
            for name, worker in list(self._deployment.processes.workers.items()):
                if worker.process.running or name in self._busy:
                    continue
                death = Death(name, worker.process.status or 0, last_log_line(worker.log), self._clock.monotonic())
                self.deaths.append(death)
                log.warning("chaos.death", worker=name, status=death.status, last_log_line=death.last_log_line)
                await self._clock.sleep(RESTART_AFTER_S)
                if name not in self._busy:
                    await asyncio.to_thread(self._deployment.processes.restart, name)

    async def settle(self) -> None:
        """Wait until every fault is undone and every worker is ready (`watch` runs). Raises ServerFailed."""
        async with asyncio.timeout(UNDO_TIMEOUT_S):
            await asyncio.gather(*self._under_way)
        self._raise_if_not_undone()
        until = self._clock.monotonic() + UNDO_TIMEOUT_S
        while True:
            try:
                await self._deployment.processes.ready()
                return
            except ServerFailed:  # it ended by itself: `watch` has written it down and starts it again
                if self._clock.monotonic() > until:
                    raise
            await self._clock.sleep(2 * RESTART_AFTER_S)

    def _raise_if_not_undone(self) -> None:
        if self._not_undone is not None:
            raise self._not_undone

    def _free(self) -> dict[str, list[str]]:
        roles = {role: self._deployment.workers(role) for role in WORKER_ROLES} | {name: [name] for name in SERVERS}
        now = self._clock.monotonic()
        resting = {name for name, until in self._rests_until.items() if now < until}
        taken = resting | self._busy.keys()
        return {role: [name for name in names if name not in taken] for role, names in roles.items()}

    async def _inject(self, entry: Injected) -> None:
        fault = entry.fault
        try:
            if fault.kind in (FaultKind.CUT, FaultKind.DELAY, FaultKind.STALL):
                await self._disturb_links(fault)
            elif fault.target == BROKER:
                await self._server(self._deployment.servers.broker, fault)
            elif fault.target == DATABASE:
                await self._server(self._deployment.servers.postgres, fault)
            else:
                await self._worker(fault, entry)
        finally:
            entry.over_at = entry.over_at or self._clock.monotonic()
            self._busy.pop(fault.target, None)
            if fault.target in SERVERS and fault.kind in (FaultKind.KILL, FaultKind.STOP, FaultKind.PAUSE):
                self._rests_until[fault.target] = entry.over_at + SERVER_RESTS_S
            log.info("chaos.undone", fault=fault.label, target=fault.target, after_s=entry.over_at - entry.began_at)

    async def _worker(self, fault: PlannedFault, entry: Injected) -> None:
        processes, name = self._deployment.processes, fault.target
        process = processes.workers[name].process
        if fault.kind is FaultKind.PAUSE:
            with contextlib.suppress(ProcessLookupError):  # it had ended by itself a moment ago
                processes.pause(name)
            await self._clock.sleep(fault.lasts_s)
            with contextlib.suppress(ProcessLookupError):
                processes.resume(name)
            return
        await asyncio.to_thread(process.kill if fault.kind is FaultKind.KILL else process.stop)
        await self._clock.sleep(fault.lasts_s)
        await asyncio.to_thread(processes.restart, name)
        entry.over_at = self._clock.monotonic()
        if self._rng.random() >= HIT_WHILE_STARTING:
            with contextlib.suppress(ServerFailed):  # it ended by itself, or a server that it needs is unavailable
                await processes.ready([name], timeout_s=STARTING_S)

    async def _server(self, server: RabbitMQ | Postgres, fault: PlannedFault) -> None:
        if fault.kind is FaultKind.PAUSE:
            family = tree(server.pid)  # PostgreSQL's children are no members of its process group
            _signal(family, signal.SIGSTOP)
            await self._clock.sleep(fault.lasts_s)
            _signal(reversed(family), signal.SIGCONT)
            return
        await asyncio.to_thread(server.kill if fault.kind is FaultKind.KILL else server.shut_down)
        await self._clock.sleep(fault.lasts_s)
        for start in range(1, SERVER_STARTS + 1):
            try:
                return await asyncio.to_thread(server.restart)
            except ServerFailed as failed:
                log.warning("chaos.server_not_ready", server=fault.target, start=start, reason=str(failed)[:200])
                if start == SERVER_STARTS:
                    raise

    async def _disturb_links(self, fault: PlannedFault) -> None:
        links = self._deployment.proxies[fault.target].some(fault.share, self._rng)
        if fault.kind is FaultKind.CUT:
            for link in links:
                link.cut()
            self.connections_cut += len(links)
            return
        for link in links:
            link.stalled, link.delay_s = fault.kind is FaultKind.STALL, fault.delay_s * (fault.kind is FaultKind.DELAY)
        await self._clock.sleep(fault.lasts_s)
        for link in links:
            link.release()


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
