"""A recovering cell asks the schedulers what they have of it, and has a whole answer: with a real placement and
database; and on a real broker, of 3,000 instances while a scheduler dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import asyncpg
import pytest
from msgspec.structs import replace

from bus.bus import API
from bus.clock import new_uuid
from bus.consuming.consumer import Consumer
from bus.contracts.actions import ActionKind, ActionState, Condition
from bus.contracts.base import DatabaseMark
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.cell import Selection
from bus.contracts.operations import AdminState
from bus.contracts.placement import Claim, ClaimOption, ClaimOutcome, ClaimResult, Migration, Release, ReleaseResult
from bus.contracts.recovery import CellRecovering
from bus.rabbitmq.transport import RabbitTransport
from bus.transport import Transport
from cell_conductor.recovery import known_reader
from cell_conductor.recovery.known_reader import KnownPart, KnownReader, OwnInstances
from cell_conductor.rules.recovery_facts import KnownInstance
from scheduler_worker.upkeep import recovery_answers as recovery
from scheduler_worker.upkeep import recovery_rules as rules
from tests.integration.scheduler_worker.steps import WARM, decide, fence_sent
from tests.integration.scheduler_worker.world import World
from tests.kit.waiting import PATIENCE_S, until

pytestmark = pytest.mark.postgres

ROOMY = {"VCPU": 4_000, "MEMORY_MB": 8_000_000, "DISK_GB": 80_000}


def owning(*uuids: str) -> OwnInstances:
    """The cell's own instances."""

    async def own(after: str, last: str, most: int) -> Sequence[str]:
        return [one for one in sorted(uuids) if one > after and (not last or one <= last)][:most]

    return own


@asynccontextmanager
async def reader_of(world: World, cell: str = "c1") -> AsyncIterator[KnownReader]:
    """A conductor of the cell that can ask."""
    reader = KnownReader(world.buses[cell])
    consumer = Consumer(world.buses[cell], "conductor.known.{process}", reader.handle, max_batch=1, concurrency=1)
    await consumer.start()
    running = asyncio.create_task(consumer.run())
    try:
        yield reader
    finally:
        await consumer.drain(1.0)
        await running


async def answer(
    world: World, *own: str, cell: str = "c1", between: Callable[[KnownPart], Awaitable[None]] | None = None
) -> list[KnownPart]:
    """The whole answer to a cell that has these instances. between: called after each part."""
    parts = list[KnownPart]()
    async with reader_of(world, cell) as reader:
        async for part in reader.parts(owning(*own)):
            parts.append(part)
            if between is not None:
                await between(part)
    return parts


def told(parts: Sequence[KnownPart]) -> dict[str, KnownInstance]:
    return {uuid: one for part in parts for uuid, one in part.instances.items()}


def hosts(one: KnownInstance) -> list[str]:
    return [place.host_uuid for place in one.selections]


def held_on(host: str) -> dict[str, dict[str, int]]:
    return {host: {"VCPU": 1, "MEMORY_MB": 2048, "DISK_GB": 20}}


async def move_to(
    world: World, built: BuildRequest, kind: ActionKind, source: str, attempt: int
) -> tuple[str, Selection]:
    """A move that the cell has begun: its claim holds the destination, and the migration the source."""
    request = world.action(built, kind)
    command = await world.commanded(request)
    to = command.selections[0]
    claim = Claim(
        consumer=built.instance_uuid,
        attempt=attempt,
        consumer_generation=1,
        options=(ClaimOption(allocations=to.allocations),),
        project_id=built.project_id,
        migration=Migration(uuid=request.request_id, source=held_on(source)),
    )
    result = await world.answer(claim, ClaimResult)
    assert result.outcome is ClaimOutcome.CLAIMED, result
    return request.request_id, to


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (recovery, rules):
        monkeypatch.setattr(module, "MAX_KNOWN", 2)
    monkeypatch.setattr(known_reader, "FIRST_WAIT_S", 0.2)


async def cell_with_hosts(world: World, count: int = 3) -> list[str]:
    return await world.scheduler_and_hosts(count, WARM, on="c1")


@pytest.mark.usefixtures("small_pages")
async def test_everything_that_the_map_or_placement_has_in_the_cell_is_told(world: World) -> None:
    """In pages of two. The instance that moves has both hosts; the source that awaits a confirm is told, too."""
    await cell_with_hosts(world)
    active, moving, resized, elsewhere, ended = (world.request() for _ in range(5))
    for one in (active, moving, resized, ended):
        await world.active(one)
    scheduled = await world.scheduled()
    (away,) = await world.add_hosts("c2", 1, on="c2")
    await world.active(replace(elsewhere, host="c2-0"), "c2")
    at = dict(await world.sql("SELECT instance_uuid::text, host_uuid::text FROM scheduler.build_requests"))
    request_id, to = await move_to(world, moving, ActionKind.MIGRATE, at[moving.instance_uuid], 2)
    confirms, there = await move_to(world, resized, ActionKind.MIGRATE, at[resized.instance_uuid], 3)
    done = {"host": there.host, "terminal": True, "condition": Condition.RESIZED}
    action = replace(world.action(resized, ActionKind.MIGRATE), request_id=confirms)
    await world.action_announced("c1", action, ActionState.DONE, 20, **done)
    await world.moved(action)
    await world.announced("c1", ended, BuildState.FAILED, 20, code="instance.lost")
    await world.ended(ended.instance_uuid, BuildState.FAILED)
    await world.release(ended.instance_uuid)
    orphan = new_uuid(world.rng)
    claim = Claim(consumer=orphan, options=(ClaimOption(allocations=held_on(to.host_uuid)),), project_id="lost")
    assert (await world.answer(claim, ClaimResult)).outcome is ClaimOutcome.CLAIMED
    nobody = new_uuid(world.rng)

    parts = await answer(world, elsewhere.instance_uuid, nobody)
    found = told(parts)
    assert len(parts) > 2
    there_by_map = {one.instance_uuid for one in (active, moving, resized, scheduled)}
    assert found.keys() == {*there_by_map, orphan, elsewhere.instance_uuid, nobody}

    assert found[active.instance_uuid].is_in_this_cell and found[active.instance_uuid].is_active
    assert hosts(found[active.instance_uuid]) == [at[active.instance_uuid]]
    assert found[active.instance_uuid].selections[0].service == "compute-c1"
    assert not found[scheduled.instance_uuid].is_active and found[scheduled.instance_uuid].attempt == 1
    spec = found[scheduled.instance_uuid].spec
    assert spec is not None and (spec.project_id, spec.flavor) == ("demo", scheduled.flavor)

    one = found[moving.instance_uuid]
    assert (hosts(one), one.attempt) == ([to.host_uuid, at[moving.instance_uuid]], 2)
    assert (one.request_id, one.kind) == (request_id, ActionKind.MIGRATE)
    one = found[resized.instance_uuid]
    assert (hosts(one), one.attempt) == ([there.host_uuid, at[resized.instance_uuid]], 3)
    assert (one.request_id, one.power) == ("", None)

    assert (found[orphan].exists, found[orphan].project_id, hosts(found[orphan])) == (False, "lost", [to.host_uuid])
    one = found[elsewhere.instance_uuid]
    assert (one.is_in_other_cell, one.is_in_this_cell, hosts(one)) == (True, False, [away])
    assert found[nobody] == KnownInstance(exists=False, is_active=False)

    asked = told(await answer(world, ended.instance_uuid))
    assert not asked[ended.instance_uuid].exists


async def test_a_page_states_what_placement_and_the_schedulers_have_heard_of_the_cells_database(world: World) -> None:
    await cell_with_hosts(world)
    assert {part.marks for part in await answer(world)} == {(DatabaseMark(), DatabaseMark())}
    one, other, bus = world.request(), world.request(), world.buses["c1"]
    bus.states_mark(lambda: DatabaseMark(5, (0, 3)))
    await world.active(one)
    assert [part.marks for part in await answer(world)] == [(DatabaseMark(), DatabaseMark(5, (0, 3)))]
    bus.states_mark(lambda: DatabaseMark(6, (4,)))
    released = Release(consumer=one.instance_uuid)
    await bus.request(released, ReleaseResult, timeout_s=PATIENCE_S)
    assert [part.marks for part in await answer(world)] == [(DatabaseMark(6, (4,)), DatabaseMark(5, (0, 3)))]
    await world.active(other)
    assert [part.marks for part in await answer(world)] == [(DatabaseMark(6, (4,)),) * 2]


async def test_an_instance_that_a_client_gave_the_id_of_a_move_is_told(world: World) -> None:
    await cell_with_hosts(world)
    first = world.request()
    await world.active(first)
    action = world.action(first, ActionKind.STOP)
    await world.commanded(action)
    second = world.request(instance_uuid=action.request_id)
    await world.active(second)
    found = told(await answer(world))
    assert found.keys() == {first.instance_uuid, second.instance_uuid}
    assert [len(one.selections) for one in found.values()] == [1, 1]


@pytest.mark.usefixtures("small_pages")
async def test_a_cell_is_told_the_fences_of_its_own_hosts(world: World) -> None:
    mine = await cell_with_hosts(world, 3)
    await world.add_hosts("c2", 1, on="c2")
    for name in ("c1-0", "c1-1", "c1-2", "c2-0"):
        await decide(world, name, AdminState.FENCED)
    fences = [fence for part in await answer(world) for fence in part.fences]
    assert [one.host_uuid for one in fences] == sorted(mine)
    sent = await fence_sent(world, fences[0].version)
    assert sent == next(one for one in fences if one.host_uuid == sent.host_uuid)


async def test_a_fence_is_told_by_what_is_on_record(world: World) -> None:
    """Another scheduler has just committed it, and its notification is on the way."""
    (mine,) = await cell_with_hosts(world, 1)
    assert [part.fences for part in await answer(world)] == [()]
    await world.sql(
        "WITH made AS (INSERT INTO scheduler.objects (kind, name, body, version, changed_at, changed_by)"
        " VALUES ('fence', $1, $2, 99, 0, 'ann'))"
        " UPDATE scheduler.objects_revision SET revision = 99, token = gen_random_uuid()",
        mine,
        '{"host": "c1-0", "cell": "c1", "version": 99}',
    )
    assert [one.host_uuid for part in await answer(world) for one in part.fences] == [mine]


@pytest.mark.usefixtures("small_pages")
async def test_what_schedulers_commit_while_they_answer_is_told_or_comes_as_a_command(world: World) -> None:
    """What is committed before is told. What is committed behind a page comes to the cell's requests, above the answer;
    what is committed before its page comes is told as well.
    """
    await cell_with_hosts(world)
    first = [world.request() for _ in range(6)]
    for one in first:
        await world.active(one)
    low, high = (world.request(instance_uuid=f"{digit}{new_uuid(world.rng)[1:]}") for digit in "0f")
    deleted = {}

    async def meanwhile(part: KnownPart) -> None:
        if part.after or deleted:
            return
        for build in (low, high):
            await world.ask(build)
            await world.ended(build.instance_uuid, BuildState.SCHEDULED)
        passed = next(one for one in first if one.instance_uuid in part.instances)
        coming = next(one for one in first if one.instance_uuid > part.last)
        deleted.update(passed=passed.instance_uuid, coming=coming.instance_uuid)
        for one in (passed, coming):
            await world.delete(one)
        await until(lambda: {one.instance_uuid for _, one in world.deletes} >= set(deleted.values()))

    parts = await answer(world, between=meanwhile)
    found = told(parts)
    assert parts[0].last > low.instance_uuid
    assert found.keys() == {high.instance_uuid, *(one.instance_uuid for one in first)}
    assert {one.spec.instance_uuid for _, one in world.builds} >= {low.instance_uuid, high.instance_uuid}
    assert not found[deleted["passed"]].is_deleted and found[deleted["coming"]].is_deleted
    assert found[high.instance_uuid].is_in_this_cell and hosts(found[high.instance_uuid])


async def test_a_build_that_is_not_dispatched_yet_is_nowhere(world: World) -> None:
    """Its claim holds already. Were it told as the cell's, the cell would end it, and its command would come later."""
    (mine,) = await cell_with_hosts(world, 1)
    build = world.request(flavor="bm.gold")  # of which there is no host: it has no end while a claim of it is held
    claim = Claim(
        consumer=build.instance_uuid, options=(ClaimOption(allocations=held_on(mine)),), project_id=build.project_id
    )
    assert (await world.answer(claim, ClaimResult)).outcome is ClaimOutcome.CLAIMED
    found = told(await answer(world))[build.instance_uuid]
    assert (found.exists, found.is_in_this_cell, hosts(found)) == (False, False, [mine])


async def test_a_cell_that_asks_on_anothers_bus_or_has_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_reader, "FIRST_WAIT_S", 0.2)
    await cell_with_hosts(world, 1)
    await world.active(world.request())
    assert told(await answer(world, cell="c2")) == {}
    foreign = CellRecovering(cell="c1", process="world", query_id=new_uuid(world.rng))
    got = list[object]()
    reader = KnownReader(world.buses["c2"])

    async def note(batch: Sequence[object]) -> Sequence[object]:
        got.extend(batch)
        return await reader.handle(batch)  # type: ignore[arg-type]

    consumer = Consumer(world.buses["c2"], "conductor.known.{process}", note, max_batch=1, concurrency=1)  # type: ignore[arg-type]
    await consumer.start()
    running = asyncio.create_task(consumer.run())
    await world.buses["c2"].publish(foreign)
    parts = [part async for part in reader.parts(owning())]
    await consumer.drain(1.0)
    await running
    assert len(parts) == len(got) == 1, "the other question came before, and was not answered"


async def test_a_conductor_that_is_gone_keeps_no_other_waiting(world: World) -> None:
    await cell_with_hosts(world, 1)
    question = CellRecovering(cell="c1", process="gone", query_id=new_uuid(world.rng))
    await world.buses["c1"].publish(question)
    build = world.request()
    await world.active(build)
    assert told(await answer(world)).keys() == {build.instance_uuid}


@pytest.mark.parametrize("above", [False, True], ids=["of the cell", "of no cell"])
async def test_hosts_that_no_cell_has_reported_count_for_each(world: World, above: bool) -> None:
    """Ironic's nodes: placement does not know who serves them."""
    await world.scheduler_and_hosts(1, WARM, on=API if above else "c1")
    (host,) = world.hosts["c1"]
    orphan = new_uuid(world.rng)
    claim = Claim(consumer=orphan, options=(ClaimOption(allocations=held_on(host)),), project_id="lost")
    assert (await world.answer(claim, ClaimResult)).outcome is ClaimOutcome.CLAIMED
    assert told(await answer(world)).keys() == {orphan}
    assert told(await answer(world, cell="c2")).keys() == ({orphan} if above else set())


async def test_what_cannot_be_answered_is_asked_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_reader, "FIRST_WAIT_S", 0.2)
    monkeypatch.setattr(recovery, "ANSWER_S", 0.2)
    await cell_with_hosts(world, 1)
    build = world.request()
    await world.active(build)
    await world.stop("p1")
    asking = asyncio.create_task(answer(world))
    await asyncio.wait([asking], timeout=1.0)
    assert not asking.done()
    await world.placement("p2")
    assert told(await asking).keys() == {build.instance_uuid}


# --- on a real broker


class RabbitWorld(World):
    """The same world on RabbitMQ."""

    def __init__(self, postgres_url: str, amqp: tuple[str, str]) -> None:
        super().__init__(postgres_url)
        self._amqp = amqp

    def transport(self, bus: str) -> Transport:
        url, prefix = self._amqp
        return RabbitTransport(url, name=bus, prefix=f"{prefix}{bus}.")


@pytest.fixture
async def rabbit_world(postgres_url: str, amqp: tuple[str, str]) -> AsyncIterator[World]:
    made = RabbitWorld(postgres_url, amqp)
    await made.open()
    try:
        await made.placement()
        yield made
    finally:
        await made.close()


BLOCKED = """
SELECT application_name FROM pg_stat_activity
WHERE wait_event_type = 'Lock' AND query LIKE '%cardinality(found)%' AND application_name ~ ' s[12]$' LIMIT 1
"""


@pytest.mark.rabbitmq
async def test_a_cell_with_3000_instances_has_a_whole_answer_although_a_scheduler_dies(rabbit_world: World) -> None:
    """It dies amid its answer to one question, which the other scheduler then has."""
    world = rabbit_world
    await world.scheduler("s1", WARM)
    await world.scheduler("s2", WARM)
    await world.add_hosts("c1", 4, on="c1", **ROOMY)
    wanted = [world.request() for _ in range(3_000)]
    for start in range(0, len(wanted), 500):
        await world.ask(*wanted[start : start + 500])

    def dispatched() -> bool:
        return len({one.spec.instance_uuid for _, one in world.builds}) == len(wanted)

    await until(dispatched)
    lock = await asyncpg.connect(world.url)
    killed = list[str]()

    async def kill(part: KnownPart) -> None:
        if killed or not part.after:
            return
        transaction = lock.transaction()
        await transaction.start()
        await lock.execute("LOCK TABLE scheduler.build_requests IN ACCESS EXCLUSIVE MODE")
        killed.append("")
        releasing.append(asyncio.create_task(release(transaction)))

    async def release(transaction: asyncpg.transaction.Transaction) -> None:
        while not (blocked := await world.sql(BLOCKED)):
            pass
        name = blocked[0][0].split()[-1]
        killed[0] = name
        await world.kill(name)
        await transaction.rollback()

    releasing = list[asyncio.Task[None]]()
    try:
        parts = await answer(world, between=kill)
        await asyncio.gather(*releasing)
    finally:
        await lock.close()
    found = told(parts)
    assert killed[0] in {"s1", "s2"} and len(world.services) == 2  # placement, and the other scheduler
    assert found.keys() == {one.instance_uuid for one in wanted}
    assert all(one.is_in_this_cell and len(one.selections) == 1 for one in found.values())
    assert [part.after for part in parts[1:]] == [part.last for part in parts[:-1]]
    assert max(len(part.instances) for part in parts) <= 500
