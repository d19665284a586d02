"""A worker's heartbeat on its own bus, by which an operator sees every worker in one place."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress

from bus.bus import Bus
from bus.clock import event_or_time
from bus.contracts.workers import STOPPED, WorkerHeartbeat
from bus.distribution import version
from bus.service.environment import Environment
from bus.service.service import WorkerRuntime
from bus.transport import BusError

MAX_NOT_READY = 16
MAX_QUEUES = 64
MAX_TEXT = 255
LEAVE_S = 1.0


def add_heartbeat(service: WorkerRuntime, env: Environment, bus: Bus, role: str) -> None:
    """Have a service publish a heartbeat on this bus every `heartbeat_s` of `env`; where that is None, never."""
    if env.heartbeat_s is not None:
        heartbeats = WorkerHeartbeats(service, bus, role=role, every_s=env.heartbeat_s)
        service.add_task("presence", heartbeats.run)
        service.add_drain(heartbeats.leave)


class WorkerHeartbeats:
    """One worker's heartbeats. One at a time: while the bus is away none gathers."""

    def __init__(self, service: WorkerRuntime, bus: Bus, *, role: str, every_s: float) -> None:
        self._service = service
        self._bus = bus
        self._role = role
        self._every_s = every_s
        self._started_at = bus.clock.time()
        self._version = version()[:MAX_TEXT]
        self._host = socket.gethostname()[:MAX_TEXT]
        self._left = False

    async def run(self) -> None:
        """Publish it at once, when the worker is ready, and at intervals, until it has left or is cancelled."""
        while not self._left:
            await self._publish(self._service.phase)
            if self._service.ready.is_set():
                await self._bus.clock.sleep(self._every_s)
            else:
                await event_or_time(self._service.ready, self._bus.clock, self._every_s)

    async def leave(self, grace_s: float) -> None:
        """Publish the last one; a broker that does not confirm it keeps nobody waiting."""
        self._left = True
        with suppress(TimeoutError):
            async with asyncio.timeout(min(grace_s, LEAVE_S)):
                await self._publish(STOPPED)

    async def _publish(self, phase: str) -> None:
        with suppress(BusError):  # lost without harm: the next one follows, or the worker counts as silent
            await self._bus.publish(self._heartbeat(phase))

    def _heartbeat(self, phase: str) -> WorkerHeartbeat:
        in_flight = {queue[:MAX_TEXT]: count for queue, count in list(self._service.in_flight().items())[:MAX_QUEUES]}
        return WorkerHeartbeat(
            role=self._role,
            worker=self._bus.process or self._service.name,
            host=self._host,
            pid=os.getpid(),
            version=self._version,
            started_at=self._started_at,
            phase=phase,
            not_ready=tuple(reason[:MAX_TEXT] for reason in self._service.not_ready()[:MAX_NOT_READY]),
            in_flight=in_flight,
            counts=self._service.counts(),
            ages_s=self._service.ages_s(),
            every_s=self._every_s,
        )
