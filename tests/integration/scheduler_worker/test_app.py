"""A scheduler's database: locks, schemas that go, answers without it, and a second deployment's."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import asyncpg
import pytest
from structlog.testing import capture_logs

from bus.bus import API
from bus.bus_ownership import BusOwnedByAnother
from bus.clock import SystemClock
from bus.contracts.build import BuildPage, BuildQuery, BuildRequest, BuildState, HostsPage, HostsQuery
from bus.contracts.operations import ServicesPage, ServicesQuery
from bus.contracts.workers import WorkersPage, WorkersQuery
from bus.faults import DatabaseReplaced, DatabaseUnprepared, first_fault
from bus.memory import MemoryBroker, MemoryTransport
from bus.persistence import database as database_module
from bus.persistence.database import Database
from bus.rabbitmq.transport import RabbitTransport
from bus.service.environment import Environment
from bus.service.service import WorkerRuntime
from bus.transport import Transport
from cell_conductor.app import build as build_conductor
from cell_conductor.config import ConductorConfig
from ironic_sync.app import build as build_ironic_sync
from ironic_sync.config import IronicSyncConfig
from placement_worker.app import build as build_placement
from placement_worker.config import PlacementConfig
from scheduler_worker.app import build as build_scheduler
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.records.build_record import BuildUpdate, NewBuild, RecordedBuild
from scheduler_worker.store.port import BuildUnit
from scheduler_worker.store.postgres import PostgresBuilds, PostgresUnit
from tests.integration.scheduler_worker.world import CELLS, World
from tests.kit import servers
from tests.kit.databases import WAITING
from tests.kit.sent import Sent
from tests.kit.waiting import PATIENCE_S, until

# --- A second deployment with a database of its own, on the buses of the first, takes none of its messages.


Build = Callable[[Environment], WorkerRuntime]
REFUSED = r"(?s)of its shared_database is.*berth bus disown.*own_database"
ROLES: dict[str, Build] = {
    "scheduler": lambda env: build_scheduler(env, SchedulerConfig(), CELLS),
    "placement": lambda env: build_placement(env, PlacementConfig(), CELLS),
    "conductor": lambda env: build_conductor(env, ConductorConfig(), CELLS[0]),
    "ironic-sync": lambda env: build_ironic_sync(env, IronicSyncConfig(url="http://127.0.0.1:1")),
}


async def never() -> bool:
    return False


async def entered_once(service: WorkerRuntime, *, has_entered: Callable[[], Awaitable[bool]] = never) -> None:
    """Start it, and stop it when it has entered its bus; raises what it ended of before that.

    has_entered: whether it has entered the bus of a cell, too: a scheduler does that on the side.
    """
    stop = asyncio.Event()
    running = asyncio.create_task(service.run(stop))
    await until(lambda: running.done() or service.phase in ("preparing", "ready"))
    async with asyncio.timeout(PATIENCE_S):
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

    def worker(url: str) -> WorkerRuntime:
        def connect(bus: str) -> MemoryTransport:
            return MemoryTransport(brokers[bus], bus)

        return ROLES[role](Environment(role, transports=connect, database_url=url, cells=CELLS))

    with servers.fresh_database(postgres_server) as first, servers.fresh_database(postgres_server) as second:
        for url in (first, first):
            await entered_once(worker(url))
        with pytest.raises(BusOwnedByAnother) as refused:
            await entered_once(worker(second))
        marks = {owner for broker in brokers.values() for name, owner in broker.owners.items() if name.endswith(role)}
        assert len(marks) == 1 and marks.pop() in str(refused.value)
        assert "berth bus disown" in str(refused.value)
        for broker in brokers.values():
            broker.owners.clear()
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

    async def is_refused(logged: list[MutableMapping[str, Any]]) -> bool:
        found = [one for one in logged if one["event"] == "cell.not_entered" and one["cell"] == CELLS[0]]
        assert all(one["code"] == BusOwnedByAnother.code and re.search(REFUSED, one["reason"]) for one in found)
        return bool(found)

    async def is_marked(role: str) -> bool:
        return bool(await looking.owner_of(role))

    looking = connect(CELLS[0])
    await looking.open()
    second_role = "scheduler" if first_role == "conductor" else "conductor"
    with servers.fresh_database(postgres_server) as first, servers.fresh_database(postgres_server) as second:
        await enter(first_role, first)
        with capture_logs() as logged:
            if second_role == "conductor":
                with pytest.raises(BusOwnedByAnother, match=REFUSED):
                    await enter(second_role, second)
            else:  # its other cells go on; it tries this one again
                env = Environment(second_role, transports=connect, database_url=second, cells=CELLS)
                await entered_once(ROLES[second_role](env), has_entered=lambda: is_refused(logged))
                assert not await is_marked(second_role)
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

    def worker(role: str, url: str) -> WorkerRuntime:
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
        with pytest.raises(BusOwnedByAnother, match="of its shared_database is"):  # a role that no deployment had yet
            await entered_once(worker("ironic-sync", second if owner == first else first))
        await entered_once(worker("ironic-sync", owner))


# --- Writers of several builds lock them by uuid, whatever plan the database makes: none waits in a circle.


pytestmark = pytest.mark.postgres
FIRST, LAST = (f"{n}0000000-0000-4000-8000-000000000000" for n in "ab")
# The plan of a large batch: rows as they come in the table, each looked for among the values.
BY_TABLE = "SET LOCAL enable_nestloop = off; SET LOCAL enable_mergejoin = off; SET LOCAL enable_indexscan = off"
WAITING_FOR_A_BUILD = f"{WAITING} AND query LIKE '%build_requests%'"
LOCK = "SELECT FROM build_requests WHERE instance_uuid = $1 FOR UPDATE"


def new(uuid: str) -> NewBuild:
    request = BuildRequest(instance_uuid=uuid, flavor="f", project_id="p", name="n")
    build = RecordedBuild(instance_uuid=uuid, project_id="p", state=BuildState.ACCEPTED, sequence=1)
    return NewBuild(request=request, build=build)


def placed(uuid: str) -> BuildUpdate:
    build = RecordedBuild(
        instance_uuid=uuid, project_id="p", state=BuildState.SCHEDULED, sequence=2, cell="c1", host="h"
    )
    return BuildUpdate(build=build)


@pytest.fixture
async def database(postgres_url: str) -> AsyncIterator[Database]:
    made = Database(postgres_url, "scheduler")
    yield made
    await made.close()


@pytest.fixture
async def store(database: Database) -> PostgresBuilds:
    """The later uuid comes first in the table."""
    made = PostgresBuilds(database)
    made.publish_through(Sent())  # type: ignore[arg-type]
    await made.open()
    for uuid in (LAST, FIRST):
        async with made.unit() as unit:
            await unit.insert([new(uuid)], 1.0)
    return made


async def decide(unit: BuildUnit) -> set[str]:
    return await unit.write_decisions([placed(LAST), placed(FIRST)], 2.0)


@pytest.mark.parametrize("optimistic", [False, True])
async def test_decisions_lock_in_the_order_of_their_uuids(
    store: PostgresBuilds, database: Database, *, optimistic: bool
) -> None:
    """While one waits for the first row it must not hold the second: who has the first may want that next."""

    async def decided() -> set[str]:
        async with store.unit(optimistic=optimistic) as unit:
            if isinstance(unit, PostgresUnit):
                await unit._connection.execute(BY_TABLE)
            return await decide(unit)

    async def waits() -> bool:
        return bool(await elsewhere(WAITING_FOR_A_BUILD))

    async def elsewhere(statement: str) -> int:
        async with database.raw() as connection:
            count: int = await connection.fetchval(statement)
            return count

    async with database.raw() as connection:
        await connection.execute(LOCK, FIRST)
        deciding = asyncio.create_task(decided())
        await until(waits)
        try:
            await connection.execute(LOCK + " NOWAIT", LAST)
        except asyncpg.LockNotAvailableError:
            pytest.fail("the second row was locked before the first")
    assert await deciding == {FIRST, LAST}


# --- A schema that is dropped under a running worker: no message is given up for it, and the worker logs why it
# ends.


async def test_a_dropped_schema_ends_the_scheduler_and_no_request(world: World) -> None:
    """Each request was taken for the cause of a crash, and ended as a dead letter."""
    await world.scheduler_and_hosts(2)
    await world.sql("DROP SCHEMA scheduler CASCADE")
    requests = [world.request() for _ in range(5)]
    await world.ask(*requests)
    _, _, task = world.services["s1"]
    with pytest.raises(DatabaseUnprepared, match="does not exist"):
        await task
    await world.kill("s1")
    assert not [event for event in world.events if event.terminal]
    with pytest.raises(BusOwnedByAnother):  # the schema is made anew, and is another one
        await world.scheduler("s2")
    await world.kill("s2")
    await world.buses[API].transport.clear_owner("scheduler")
    for cell in ("c1", "c2"):
        await world.buses[cell].transport.clear_owner("scheduler")
    await world.scheduler("s3")  # an operator's word: go on with what there is
    for request in requests:
        await world.ended(request.instance_uuid, BuildState.SCHEDULED)


# --- A schema that is made anew under a worker that stays connected: each role ends, and reports why.


SCHEMAS = {
    "scheduler": ("scheduler", "scheduler_worker.store.migrations"),
    "placement": ("placement", "placement_worker.store.migrations"),
    "conductor": (f"cell_{CELLS[0]}", "cell_conductor.store.migrations"),
    "ironic-sync": ("ironic_sync", "ironic_sync.store.migrations"),
}


async def made_anew(url: str, schema: str, migrations: str) -> None:
    """As an operator does it, but at one moment, so that no statement finds the schema missing."""
    other = Database(url, f"{schema}_new")
    await other.open(migrations)
    await other.close()
    connection = await asyncpg.connect(url)
    async with connection.transaction():
        await connection.execute(f'ALTER SCHEMA "{schema}" RENAME TO "{schema}_old"')
        await connection.execute(f'ALTER SCHEMA "{schema}_new" RENAME TO "{schema}"')
    await connection.close()


@pytest.mark.parametrize("role", ROLES)
async def test_a_worker_does_not_go_on_in_a_schema_that_was_made_anew(
    role: str, empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wrote there, with what it knew of the old one, until it was started again."""
    monkeypatch.setattr(database_module, "WATCH_S", 0.05)
    brokers = {name: MemoryBroker(SystemClock()) for name in (API, *CELLS)}

    def connect(bus: str) -> MemoryTransport:
        return MemoryTransport(brokers[bus], bus)

    service = ROLES[role](Environment(role, transports=connect, database_url=empty_database, cells=CELLS))
    running = asyncio.create_task(service.run(asyncio.Event()))
    await until(lambda: running.done() or service.phase in ("preparing", "ready"))
    async with asyncio.timeout(PATIENCE_S):
        await made_anew(empty_database, *SCHEMAS[role])
        with pytest.raises(BaseException) as ended:
            await running
    fault = first_fault(ended.value)
    assert isinstance(fault, DatabaseReplaced) and fault.code == "database.replaced"


# --- A scheduler answers from its memory while its database does not answer.


SEARCHES = 8  # more than a scheduler makes at a time


async def test_hosts_services_and_workers_are_answered_while_searches_wait_for_the_database(world: World) -> None:
    """An operator looks at the page because the database is slow: hosts and workers must not come as unknown, too."""
    await world.scheduler_and_hosts(1)
    ask = world.buses[API].request
    connection = await asyncpg.connect(world.url)
    try:
        await connection.execute("BEGIN; LOCK TABLE scheduler.build_requests")
        searches = [
            asyncio.create_task(ask(BuildQuery(project_id=f"p{number}"), BuildPage, timeout_s=PATIENCE_S))
            for number in range(SEARCHES)
        ]
        await until(lambda: connection.fetchval(WAITING))
        services = await ask(ServicesQuery(), ServicesPage, timeout_s=PATIENCE_S)
        hosts = await ask(HostsQuery(), HostsPage, timeout_s=PATIENCE_S)
        await ask(WorkersQuery(), WorkersPage, timeout_s=PATIENCE_S)
        assert not any(search.done() for search in searches)
        await connection.execute("ROLLBACK")
        await asyncio.gather(*searches)
    finally:
        await connection.close()
    assert "c1" in {one.cell for one in services.services}
    assert "c1-0" in {one.name for one in hosts.hosts}
