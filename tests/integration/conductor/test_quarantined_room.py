"""The resources of a machine in quarantine are not offered: a conductor, a compute service, and the inventory it
reports.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from itertools import groupby

import pytest
from prometheus_client import REGISTRY

import cell_conductor.app
import compute_sim.app
from bus.bus import Bus
from bus.clock import SystemClock
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.base import Message
from bus.contracts.cell import ComputeHosts, ReportHosts
from bus.contracts.placement import InventoryUpdate
from bus.memory import MemoryBroker, MemoryTransport
from bus.persistence.database import Database
from bus.service.environment import Environment
from cell_conductor.config import ConductorConfig
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable
from cell_conductor.store.port import InstanceStore
from cell_conductor.store.postgres import PostgresInstances
from cell_conductor.store.safety import DESTROY, KEEP, DecidedMachine
from compute_sim.config import ComputeConfig, HostSize
from compute_sim.fleet import Fleet, Guest
from tests.integration.compute.harness import Life
from tests.kit.waiting import PATIENCE_S

CELL = "c1"
SERVICE = "c1-a"
OURS = "00000000-0000-4000-8000-00000000000a"
CONFIG = ComputeConfig(
    hosts=1, sizes=(HostSize(vcpus=16, cpu_ratio=1.0),), heartbeat_interval_s=0.1, report_interval_s=60.0
)
LOOKS = 3


class World:
    """A cell's bus with ears on it, a compute service over its machines, and conductors over one store."""

    def __init__(self, url: str | None) -> None:
        self.clock = SystemClock()
        self.rng = random.Random(7)
        self.broker = MemoryBroker(self.clock)
        self.url = url
        self.table = MemoryInstanceTable(self.clock)
        self.fleet = Fleet.planned(CONFIG, CELL, SERVICE)
        (self.host,) = (host.plan.uuid for host in self.fleet.hosts)
        self.bus = Bus(CELL, MemoryTransport(self.broker, "ears"), process="ears", clock=self.clock, rng=self.rng)
        self.received: list[Message] = []
        self.store: InstanceStore
        self._changed = asyncio.Condition()
        self._lives: dict[str, Life] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        await self.bus.open()
        for queue in ("placement.inventory", "conductor.hosts.{process}"):
            consumer = self.bus.consumer(queue, self._receive, concurrency=1)
            await consumer.start()
            self._tasks.append(asyncio.create_task(consumer.run()))

    async def close(self) -> None:
        for name in list(self._lives):
            await self.stop(name)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.bus.close()

    async def start(self, name: str) -> None:
        env = Environment(name, transports=partial(self._transport, name), clock=self.clock, rng=self.rng)
        if name == "compute":
            service = compute_sim.app.build(env, CONFIG, CELL, SERVICE, fleet=self.fleet)
        else:
            self.store = (
                MemoryInstances(self.table.session())
                if self.url is None
                else PostgresInstances(Database(self.url, f"cell_{CELL}"))
            )
            config = ConductorConfig(report_grace_s=0.001, sweep_interval_s=0.05)
            service = cell_conductor.app.build(env, config, CELL, store=self.store)
        self._lives[name] = Life(service)
        await self._lives[name].ready()

    def _transport(self, name: str, _bus: str) -> MemoryTransport:
        return MemoryTransport(self.broker, name)

    async def stop(self, name: str) -> None:
        await self._lives.pop(name).stop()

    async def _receive(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        async with self._changed:
            self.received += [received.message for received in batch]
            self._changed.notify_all()
        return [Done()] * len(batch)

    async def look(self) -> None:
        """Some whole reports more."""
        for _ in range(LOOKS):
            earlier = len(self.received)
            await self.bus.publish(ReportHosts(why="test"))
            await self.until(
                lambda earlier=earlier: any(isinstance(m, ComputeHosts) and m.complete for m in self.received[earlier:])
            )

    async def until(self, there: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: bool(there()))

    def offered(self) -> list[int]:
        """The processors that each inventory update offers, the newest last."""
        updates = [m for m in self.received if isinstance(m, InventoryUpdate)]
        found = [update.providers[0].inventories["VCPU"] for update in updates]
        return [inventory.total - inventory.reserved for inventory in found]

    async def offers(self, processors: int) -> None:
        await self.until(lambda: self.offered()[-1:] == [processors])

    def put(self, uuid: str = OURS, vcpus: int = 4) -> None:
        """A machine that carries this cell's mark, and of which its record knows nothing."""
        self.fleet.put(self.host, Guest(uuid, 1, {self.host: {"VCPU": vcpus}}, deployment=self.store.deployment))


@pytest.fixture(params=["memory", "postgres"])
async def world(request: pytest.FixtureRequest, postgres_url: str) -> AsyncIterator[World]:
    made = World(None if request.param == "memory" else postgres_url)
    await made.open()
    yield made
    await made.close()


async def test_its_room_is_not_offered_until_it_is_gone(world: World) -> None:
    """A hypervisor with a machine in quarantine was offered as if it were empty."""
    await world.start("conductor")
    world.put()
    await world.start("compute")
    await world.offers(12)
    world.put(OURS.replace("a", "b"), vcpus=2)
    await world.look()
    await world.offers(10)
    world.fleet.remove(world.host, OURS)
    await world.look()
    await world.offers(14)
    assert [processors for processors, _ in groupby(world.offered())][-3:] == [12, 10, 14]


async def test_it_is_kept_over_restarts_of_the_service_and_of_the_conductor(world: World) -> None:
    await world.start("conductor")
    world.put()
    await world.start("compute")
    await world.offers(12)
    await world.stop("conductor")
    await world.stop("compute")
    world.received.clear()
    await world.start("compute")  # no conductor is there to name it anew
    await world.until(world.offered)
    await world.start("conductor")
    await world.look()
    assert set(world.offered()) == {12}


@pytest.mark.parametrize("verdict", [KEEP, DESTROY])
async def test_an_operators_word_frees_it_with_the_machine_and_not_before(world: World, verdict: str) -> None:
    await world.start("conductor")
    world.put()
    await world.start("compute")
    await world.offers(12)
    world.received.clear()
    async with asyncio.timeout(PATIENCE_S):
        while not await world.store.safety.decide([DecidedMachine(OURS)], verdict, "op", 1.0):  # noqa: ASYNC110  (until it is on record)
            await asyncio.sleep(0.01)
    await world.look()
    if verdict == KEEP:
        world.put(OURS.replace("a", "b"), vcpus=1)  # what is offered then is reported anew
        await world.look()
        await world.offers(11)
        assert set(world.offered()) <= {12, 11}
    else:
        async with asyncio.timeout(PATIENCE_S):
            while world.fleet.guest(world.host, OURS) is not None:
                assert set(world.offered()) <= {12}
                await world.look()  # a look that began before the operator's word may be the one that is reported
                await asyncio.sleep(0.01)
        await world.look()
        await world.offers(16)


async def test_a_report_that_agrees_requests_nothing(world: World) -> None:
    await world.start("conductor")
    world.put()
    await world.start("compute")
    await world.offers(12)
    await world.look()  # of the first report another may have been under way
    before = _orders()
    await world.look()
    assert _orders() == before > 0


def _orders() -> float:
    return REGISTRY.get_sample_value("berth_conductor_reserve_orders_total", {"service": SERVICE}) or 0.0
