"""A cell with nothing in it but a compute service: what it receives, and what it publishes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from bus.bus import Bus
from bus.clock import SystemClock, new_uuid
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.base import Message
from bus.contracts.cell import (
    ComputeHosts,
    ComputeOutcome,
    ComputeResult,
    Destroy,
    Heartbeat,
    InstanceSpec,
    ReportHosts,
    RingMembers,
    Spawn,
)
from bus.contracts.placement import InventoryUpdate
from bus.memory import MemoryBroker, MemoryTransport
from bus.port import Transport
from bus.rabbitmq import RabbitTransport
from bus.service.environment import Environment
from bus.service.service import Service
from compute_sim.app import build
from compute_sim.config import ComputeConfig
from compute_sim.driver import Driver
from compute_sim.fleet import Fleet
from tests.kit.waiting import PATIENCE_S

CELL = "c1"
SERVICE = "c1-a"
DEPLOYMENT = "dddddddd-0000-4000-8000-000000000001"


class Cell:
    """A bus, ears on it, and compute services that start, stop and die on demand."""

    def __init__(self, transports: Callable[[str], Transport] | None = None) -> None:
        self.clock = SystemClock()
        self.rng = random.Random(7)
        self.broker = MemoryBroker(self.clock)
        self.transports = transports or partial(MemoryTransport, self.broker)
        self.bus = Bus(CELL, self.transports(CELL), process="ears", clock=self.clock, rng=self.rng)
        self.received: list[Message] = []
        self._changed = asyncio.Condition()
        self.silenced: set[str] = set()
        self._rings: dict[str, dict[str, int]] = {}
        self._ring_number = 0
        self._consumers: list[Consumer] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._lives: list[Life] = []

    async def open(self) -> None:
        await self.bus.open()
        for queue in (
            "conductor.results",
            "conductor.hosts.{process}",
            "conductor.leases.{process}",
            "placement.inventory",
            "scheduler.metrics.{process}",
        ):
            consumer = self.bus.consumer(queue, self._receive, max_batch=1000, concurrency=1)
            await consumer.start()
            self._tasks.append(asyncio.create_task(consumer.run()))
            self._consumers.append(consumer)

    async def close(self) -> None:
        """Services that still run are stopped first."""
        for life in self._lives:
            if not life.task.done():
                await life.stop()
        for consumer in self._consumers:
            await consumer.drain(1.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.bus.close()

    async def _receive(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        async with self._changed:
            self.received.extend(received.message for received in batch)
            self._changed.notify_all()
        await self._send_rings()
        return [Done()] * len(batch)

    async def _send_rings(self) -> None:
        """As the cell's keeper does: who is in which ring, whenever that changes. `away` are dead, by its word."""
        rings: dict[str, dict[str, int]] = {}
        for beat in self.heartbeats():
            if beat.ring is not None:
                ring = rings.setdefault(beat.ring, {})
                ring.pop(beat.service, None)
                if not beat.stopping and beat.service not in self.silenced:
                    ring[beat.service] = beat.epoch
        if rings == self._rings:
            return
        self._rings, self._ring_number = rings, self._ring_number + 1
        for ring, members in rings.items():
            published = RingMembers(
                cell=CELL, ring=ring, term=1, number=self._ring_number, members=tuple(sorted(members))
            )
            await self.bus.publish(published)

    async def lose(self, *services: str) -> None:
        """The keeper receives no heartbeat of these any more."""
        self.silenced.update(services)
        await self._send_rings()

    async def until(self, there: Callable[[], Any]) -> Any:
        """Wait until what was received makes this true; returns it."""
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(there)
        return there()

    # --- what was received

    def results(self, instance: str | None = None) -> list[ComputeResult]:
        return [m for m in self.received if isinstance(m, ComputeResult) and instance in (None, m.instance_uuid)]

    def announced(self) -> list[ComputeHosts]:
        return [m for m in self.received if isinstance(m, ComputeHosts)]

    def heartbeats(self) -> list[Heartbeat]:
        return [m for m in self.received if isinstance(m, Heartbeat)]

    def inventory(self) -> list[InventoryUpdate]:
        return [m for m in self.received if isinstance(m, InventoryUpdate)]

    async def outcome(self, instance: str, attempt: int, count: int = 1) -> ComputeResult:
        """The count-th result of this attempt."""

        def published() -> list[ComputeResult]:
            found = [r for r in self.results(instance) if r.attempt == attempt]
            return found if len(found) >= count else []

        return (await self.until(published))[count - 1]  # type: ignore[no-any-return]

    async def ended(self, instance: str, attempt: int, outcome: ComputeOutcome) -> ComputeResult:
        """A result of this attempt with this outcome."""
        found = await self.until(
            lambda: [r for r in self.results(instance) if r.attempt == attempt and r.outcome is outcome]
        )
        return found[0]  # type: ignore[no-any-return]

    async def built(self, host: str, instance: str = "", attempt: int = 1, service: str = SERVICE) -> str:
        """Have an instance built there, a new one by default; returns it when its machine runs."""
        instance = instance or self.instance()
        await self.spawn(host, instance, attempt, service)
        await self.ended(instance, attempt, ComputeOutcome.ACTIVE)
        return instance

    async def destroyed(self, host: str, instance: str, attempt: int = 1, service: str = SERVICE) -> None:
        """Have a machine destroyed, and wait for the result."""
        await self.destroy(host, instance, attempt, service)
        await self.ended(instance, attempt, ComputeOutcome.DESTROYED)

    async def asked(self) -> list[ComputeHosts]:
        """Have all hosts announced; the whole announcements that came since, at least one."""
        first = len(self.announced())
        await self.ask()
        return await self.until(lambda: [page for page in self.announced()[first:] if page.complete])  # type: ignore[no-any-return]

    # --- what is asked

    def instance(self) -> str:
        return new_uuid(self.rng)

    async def spawn(self, host: str, instance: str, attempt: int = 1, service: str = SERVICE) -> None:
        await self.bus.publish(spawn(host, instance, attempt, service), cause=instance)

    async def destroy(
        self, host: str, instance: str, attempt: int = 1, service: str = SERVICE, deployment: str = DEPLOYMENT
    ) -> None:
        command = Destroy(
            instance_uuid=instance, attempt=attempt, host_uuid=host, service=service, deployment=deployment
        )
        await self.bus.publish(command, cause=instance)

    async def ask(self) -> None:
        await self.bus.publish(ReportHosts(why="test"))

    # --- compute services

    async def compute(
        self, config: ComputeConfig, fleet: Fleet, *, service: str = SERVICE, driver: Driver | None = None
    ) -> Life:
        env = Environment(f"compute-{service}", transports=self.transports, clock=self.clock, rng=self.rng)
        life = Life(build(env, config, CELL, service, fleet=fleet, driver=driver))
        self._lives.append(life)
        await life.ready()
        return life


class Life:
    """One life of a service."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._stop = asyncio.Event()
        self.task = asyncio.create_task(service.run(self._stop))

    async def ready(self) -> None:
        ready = asyncio.create_task(self.service.ready.wait())
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait({ready, self.task}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self.task.done():
            await self.task
            raise AssertionError("the service ended before it was ready")

    async def stop(self) -> None:
        """Drain and close."""
        self._stop.set()
        await self.task

    async def kill(self) -> None:
        """End it abruptly: nothing is drained."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def spawn(host: str, instance: str, attempt: int = 1, service: str = SERVICE) -> Spawn:
    return Spawn(
        spec=InstanceSpec(instance_uuid=instance, project_id="p1", flavor="m1.small"),
        attempt=attempt,
        host_uuid=host,
        allocations={host: {"VCPU": 1, "MEMORY_MB": 512}},
        service=service,
        deployment=DEPLOYMENT,
    )


def running(pages: Sequence[ComputeHosts]) -> dict[str, list[tuple[str, int]]]:
    """By host: the instances that run there, each with its attempt, as the last of these has it."""
    return {
        host.uuid: [(one.instance_uuid, one.attempt) for one in host.running or ()]
        for page in pages
        for host in page.hosts
    }


def planned(settings: ComputeConfig) -> Fleet:
    """The simulated fleet of SERVICE."""
    return Fleet.planned(settings, CELL, SERVICE)


def cell_on(url: str, prefix: str = "") -> Cell:
    """A cell on a real broker."""
    return Cell(lambda name: RabbitTransport(url, name=name, prefix=prefix))
