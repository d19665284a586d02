"""A second deployment with a database of its own, on the buses of the first, takes none of its messages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from bus.bus import API
from bus.clock import SystemClock
from bus.contracts.build import BuildState
from bus.memory import MemoryBroker, MemoryTransport
from bus.owner import BusOwnedByAnother
from bus.port import Transport
from bus.rabbitmq import RabbitTransport
from bus.service.environment import Environment
from bus.service.service import Service
from cell_conductor.app import build as build_conductor
from cell_conductor.config import ConductorConfig
from ironic_sync.app import build as build_ironic_sync
from ironic_sync.config import IronicSyncConfig
from placement_worker.app import build as build_placement
from placement_worker.config import PlacementConfig
from scheduler_worker.app import build as build_scheduler
from scheduler_worker.config import SchedulerConfig
from tests.integration.scheduler.world import CELLS, PATIENCE_S, World
from tests.kit import servers

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(300)]

Build = Callable[[Environment], Service]
ROLES: dict[str, Build] = {
    "scheduler": lambda env: build_scheduler(env, SchedulerConfig(), CELLS),
    "placement": lambda env: build_placement(env, PlacementConfig(), CELLS),
    "conductor": lambda env: build_conductor(env, ConductorConfig(), CELLS[0]),
    "ironic-sync": lambda env: build_ironic_sync(env, IronicSyncConfig(url="http://127.0.0.1:1")),
}


async def never() -> bool:
    return False


async def entered_once(service: Service, *, has_entered: Callable[[], Awaitable[bool]] = never) -> None:
    """Start it, and stop it when it has entered its bus; raises what it ended of before that.

    has_entered: whether it has entered the bus of a cell, too: a scheduler does that on the side.
    """
    stop = asyncio.Event()
    running = asyncio.create_task(service.run(stop))
    async with asyncio.timeout(PATIENCE_S):
        while not running.done() and service.phase not in ("preparing", "ready"):  # noqa: ASYNC110  (a text, no event)
            await asyncio.sleep(0.005)
        while not running.done() and has_entered is not never and not await has_entered():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    stop.set()
    await running


async def test_item_36_a_second_deployment_takes_no_build_of_the_first(world: World, postgres_server: str) -> None:
    await world.scheduler("first")
    await world.add_hosts("c1", 2)
    with servers.fresh_database(postgres_server) as other, pytest.raises(BusOwnedByAnother, match="'api'"):
        first, world.url = world.url, other
        try:
            await world.scheduler("second")
        finally:
            world.url = first
            await world.kill("second")
    requests = [world.request() for _ in range(20)]
    await world.ask(*requests)
    for request in requests:
        await world.ended(request.instance_uuid, BuildState.SCHEDULED)
        assert await world.show(request.instance_uuid) is not None
    await world.stop("first")
    await world.scheduler("again")  # of the same database


@pytest.mark.parametrize("role", ROLES)
async def test_each_role_names_the_owner_of_the_bus(role: str, postgres_server: str) -> None:
    """And what can be done; the first deployment's own next worker starts."""
    brokers = {name: MemoryBroker(SystemClock()) for name in (API, *CELLS)}

    def worker(url: str) -> Service:
        def connect(bus: str) -> MemoryTransport:
            return MemoryTransport(brokers[bus], bus)

        return ROLES[role](Environment(role, transports=connect, database_url=url, cells=CELLS))

    with servers.fresh_database(postgres_server) as first, servers.fresh_database(postgres_server) as second:
        for url in (first, first):
            await entered_once(worker(url))
        with pytest.raises(BusOwnedByAnother) as refused:
            await entered_once(worker(second))
        marks = {owner for broker in brokers.values() for name, owner in broker.marks.items() if name.endswith(role)}
        assert len(marks) == 1 and marks.pop() in str(refused.value)
        assert "berth bus release" in str(refused.value)
        for broker in brokers.values():
            broker.marks.clear()
        await entered_once(worker(second))


@pytest.mark.rabbitmq
@pytest.mark.parametrize("adapter", ["memory", "rabbitmq"])
@pytest.mark.parametrize("first_role", ["conductor", "scheduler"])
async def test_a_conductor_and_the_schedulers_of_an_empty_cell_bus_are_of_one_deployment(
    first_role: str, adapter: str, amqp: tuple[str, str], postgres_server: str
) -> None:
    """A conductor claimed its role alone: the scheduler of another deployment entered too, and sent it its builds."""
    brokers = {name: MemoryBroker(SystemClock()) for name in (API, *CELLS)}

    def connect(bus: str) -> Transport:
        if adapter == "memory":
            return MemoryTransport(brokers[bus], bus)
        return RabbitTransport(amqp[0], name=bus, prefix=f"{amqp[1]}{bus}.")

    async def enter(role: str, url: str, *, config: ConductorConfig | None = None) -> None:
        env = Environment(role, transports=connect, database_url=url, cells=CELLS)
        service = ROLES[role](env) if config is None else build_conductor(env, config, CELLS[0])
        await entered_once(service, has_entered=lambda: is_marked(role))

    async def is_marked(role: str) -> bool:
        return bool(await looking.owner_of(role))

    looking = connect(CELLS[0])
    await looking.open()
    second_role = "scheduler" if first_role == "conductor" else "conductor"
    with servers.fresh_database(postgres_server) as first, servers.fresh_database(postgres_server) as second:
        await enter(first_role, first)
        with pytest.raises(BusOwnedByAnother, match=r"(?s)of its deployment is.*berth bus release.*own_database"):
            await enter(second_role, second)
        if second_role == "conductor":  # the same deployment, with a database of its own for its conductors
            await enter(second_role, second, config=ConductorConfig(own_database=True))
    await looking.close()


@pytest.mark.rabbitmq
@pytest.mark.parametrize("number", range(4))
async def test_of_two_that_start_at_once_on_an_empty_bus_one_has_all_of_it(
    number: int, amqp: tuple[str, str], postgres_server: str
) -> None:
    """Each took one role, and neither ran until an operator released the bus."""
    broker, prefix = amqp

    def worker(role: str, url: str) -> Service:
        def connect(bus: str) -> RabbitTransport:
            return RabbitTransport(broker, name=bus, prefix=f"{prefix}{bus}.")

        return ROLES[role](Environment(role, transports=connect, database_url=url, cells=CELLS))

    with servers.fresh_database(postgres_server) as first, servers.fresh_database(postgres_server) as second:
        # In each round other roles come first, each a moment before the other deployment's.
        pairs = [("placement", first), ("scheduler", second), ("placement", second), ("scheduler", first)]
        pairs = pairs[number:] + pairs[:number]
        ended = await asyncio.gather(*(entered_once(worker(*pair)) for pair in pairs), return_exceptions=True)
        entered = [pair for pair, fault in zip(pairs, ended, strict=True) if fault is None]
        refused = [fault for fault in ended if fault is not None]
        assert len({url for _, url in entered}) == 1, (entered, refused)
        assert sorted(role for role, _ in entered) == ["placement", "scheduler"]
        assert [type(fault) for fault in refused] == [BusOwnedByAnother] * 2, refused
        owner = entered[0][1]
        with pytest.raises(BusOwnedByAnother, match="of its deployment is"):  # a role that no deployment had yet
            await entered_once(worker("ironic-sync", second if owner == first else first))
        await entered_once(worker("ironic-sync", owner))
