"""Which of its hosts a service may offer after a start: none on which it still has to destroy something."""

# While the service was down its queue kept its commands, among them those to destroy the stale machines of a fence. The
# service publishes a barrier to its own queue: when it comes back, all that was waiting there has been taken. Only then
# builds and changes begin: the command that ends one of them may have come behind it. And each host may be offered as
# soon as nothing is left that was to be destroyed there before the barrier.

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from bus.clock import Clock
from bus.contracts.base import Message
from bus.contracts.cell import QueueBarrier
from bus.faults import Transient
from bus.transport import BusError
from compute_agent.records.records import Key, Records

log = structlog.get_logger()

RESEND_S = 5.0  # a barrier that has not come back is published once more
DESTROYING = "the service destroys this host's stale machines"


class BarrierBus(Protocol):
    """The part of a bus that is needed here."""

    async def publish(self, message: Message, *, cause: str = "") -> None:
        """Publish one message."""


class StartupGate:
    """One service's. opened: set when the barrier has come back. on_ready: these hosts may be offered from now on."""

    def __init__(
        self,
        bus: BarrierBus,
        *,
        service: str,
        records: Records,
        clock: Clock,
        on_ready: Callable[[Sequence[str]], None],
    ) -> None:
        self.opened = asyncio.Event()
        self._bus = bus
        self._service = service
        self._records = records
        self._clock = clock
        self._on_ready = on_ready
        self._waits_for: dict[str, set[str]] = {}  # by host: instances that are to be destroyed there first

    async def run(self) -> None:
        """Publish the barrier until it has come back, then do nothing, until cancelled."""
        while not self.opened.is_set():
            with contextlib.suppress(BusError, Transient):
                await self._bus.publish(QueueBarrier(service=self._service, epoch=self._records.epoch))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESEND_S):
                    await self.opened.wait()
        await asyncio.get_running_loop().create_future()

    def on_barrier(self, barrier: QueueBarrier, pending_destroys: Sequence[Key]) -> None:
        """A barrier came back, after all that was before it in the queue. Barriers of former runs mean nothing.
        pending_destroys: the machines that are being destroyed now, and those that could not be destroyed so far.
        """
        if barrier.epoch != self._records.epoch or self.opened.is_set():
            return
        for host, instance in pending_destroys:
            self._waits_for.setdefault(host, set()).add(instance)
        if pending_destroys:
            machines, hosts = len(set(pending_destroys)), len(self._waits_for)
            log.info("compute.destroys_first", service=self._service, machines=machines, hosts=hosts)
        self.opened.set()

    def on_destroys_done(self, key: Key) -> None:
        """Nothing of this instance is left to be destroyed on this host, or nothing can be."""
        host, instance = key
        left = self._waits_for.get(host, set())
        if instance not in left:
            return
        left.discard(instance)
        if not left:
            del self._waits_for[host]
            self._on_ready((host,))

    def is_ready(self, host: str) -> bool:
        """Whether this host may be offered."""
        return self.opened.is_set() and host not in self._waits_for
