"""Claims of an expired request and of a redelivery, what a failed build costs, and requests that come very late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import asyncpg
import pytest

from bus.bus import API, Bus
from bus.clock import SystemClock
from bus.codec import pack, single
from bus.consuming import dead_letters
from bus.contracts.base import Meta
from bus.contracts.build import BuildAccepted, BuildRequest, BuildState, DeleteRequest
from bus.contracts.catalogue import BY_TYPE
from bus.contracts.cell import CellBuild, CellBuildQuery
from bus.contracts.placement import ReleaseByOwner
from bus.contracts.queues import BY_QUEUE, DEAD, QueueKind
from bus.faults import RequestRefused
from bus.memory import MemoryTransport
from scheduler_worker.build import dispatcher
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.requests import request_delivery as requests
from scheduler_worker.store.postgres import PostgresBuilds
from scheduler_worker.upkeep.purge import max_request_age_s, purge
from tests.integration.scheduler_worker.steps import BEGUN_S, CONFIG, ROOM_FOR_ONE, Gate, forget, running, unannounce
from tests.integration.scheduler_worker.world import World
from tests.kit.waiting import until

pytestmark = pytest.mark.postgres


async def until_acknowledged(world: World) -> None:
    queue = world.brokers[API].queue("scheduler.requests")
    await until(lambda: len(queue) == 0 and not any(one.unacked for one in queue.consumers))


# --- The claim of an expired request whose record was lost is built on or left to its cell, with a deadline or
# without.


SOON_S = 8.0


@pytest.mark.parametrize("has_deadline", [False, True])
@pytest.mark.parametrize("is_forgotten", [False, True])
async def test_what_an_expired_request_had_claimed_is_built_or_left_to_its_cell(
    world: World, monkeypatch: pytest.MonkeyPatch, *, has_deadline: bool, is_forgotten: bool
) -> None:
    await world.scheduler_and_hosts(1)
    request = world.request()
    with monkeypatch.context() as patched:
        writing = Gate(patched, dispatcher, "write_decided")
        await world.expires(request, patience_s=BEGUN_S if has_deadline else None, after_s=BEGUN_S)
        await writing.wait()  # claimed, and not written
        assert await world.used()
        await world.kill("s1")
        if is_forgotten:
            await forget(world, request.instance_uuid)
        await until(lambda: world.brokers["api"].queue("scheduler.dead_letters").ready)
    await world.scheduler("s2")
    await world.until_expired_are_handled()
    world.events.clear()

    async def cared_for() -> bool:
        return not await world.used() or any(
            one.spec.instance_uuid == request.instance_uuid
            for _, one in [*world.builds, *world.queries]
            if isinstance(one, CellBuild | CellBuildQuery)
        )

    try:
        await until(cared_for, SOON_S)
    except TimeoutError:
        connection = await asyncpg.connect(world.url)
        held = await connection.fetchval("SELECT count(*) FROM placement.consumers")
        known = await connection.fetchval("SELECT count(*) FROM scheduler.build_requests")
        await connection.close()
        pytest.fail(
            f"used after {SOON_S} s: {await world.used()}; {held} consumers; {known} builds on record"
            f" (another request's); events: {world.states(request.instance_uuid)}"
        )


# --- A redelivery releases nothing that the first run kept because it was an earlier request's.


async def test_a_redelivered_request_that_sent_no_claim_releases_none(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No host has room, and that of the instance is not reported. Its scheduler dies before the acknowledgement."""
    monkeypatch.setattr(requests, "MAX_RETRIES", 0)
    request, host = await running(world)
    await unannounce(world, host, has_another=False)
    replica = world.replicas["s2"]
    await until(lambda: replica.row_of(host) is not None)
    ended = Gate(monkeypatch, dispatcher, "write_decided", after=True)
    await world.ask(request)
    await ended.wait()  # its end here is on record, and the message is not acknowledged
    cell = await world.queried(request)
    assert host in await world.used()
    await world.kill("s2")
    await until(lambda: len(world.brokers[API].queue("scheduler.requests")) == 1)
    await world.scheduler("s3", CONFIG)
    await until_acknowledged(world)
    used = await world.used()
    assert (cell, host in used) == ("c1", True), f"the host of the running instance has {used.get(host)}"


async def test_a_delete_reaches_the_cell_that_holds_a_later_attempt(world: World) -> None:
    """The cell had taken an alternate before its scheduler's database was restored."""
    request, host = await running(world)
    await world.sql("UPDATE placement.consumers SET attempt = 2 WHERE uuid = $1", request.instance_uuid)
    delete = DeleteRequest(instance_uuid=request.instance_uuid, project_id=request.project_id)
    await world.ask(request, delete)  # one batch
    ((cell, command),) = await until(lambda: world.deletes)
    assert (cell, command.instance_uuid) == ("c1", request.instance_uuid)
    assert set(await world.used()) == {host}


# --- What a failed build costs: how often placement is asked, and what is left in placement.


QUEUES = ("placement.requests", "placement.reads", "placement.releases")


def asked(world: World) -> list[int]:
    """How many messages each queue of placement has had."""
    return [world.brokers[API].queue(name).next_number for name in QUEUES]


async def consumers(world: World) -> int:
    """How many rows placement has of consumers, those of ended attempts among them."""
    ((found,),) = await world.sql("SELECT count(*) FROM placement.consumers")
    return int(found)


async def test_a_build_that_no_host_can_take_is_two_reads_and_leaves_no_row_in_placement(world: World) -> None:
    """The newest changes, and what its instance holds. It was one round trip more, and an ended attempt for a claim
    that nobody had sent.
    """
    await world.scheduler_and_hosts(1, CONFIG, on="c1", **ROOM_FOR_ONE)
    await world.active(world.request())
    replica = world.replicas["s1"]
    await until(lambda: not replica.free("VCPU", replica.rows_of_roots()).any())
    before, rows = asked(world), await consumers(world)
    request = world.request()
    await world.answer(request, BuildAccepted)
    assert (await world.ended(request.instance_uuid)).code == "no_valid_host"
    assert [now - then for now, then in zip(asked(world), before, strict=True)] == [0, 2, 0]
    assert await consumers(world) == rows


async def test_a_delete_of_a_build_that_another_scheduler_may_claim_for_is_released_behind_it(world: World) -> None:
    """Nobody waits for that: the message is committed with the delete, and kept until placement has carried it out."""
    await world.scheduler_and_hosts(1, CONFIG, on="c1", **ROOM_FOR_ONE)
    request = world.request()
    before = asked(world)
    await world.ask(request, DeleteRequest(instance_uuid=request.instance_uuid, project_id=request.project_id))
    await world.ended(request.instance_uuid, BuildState.DELETED)
    await until(lambda: asked(world)[2] == before[2] + 1)
    assert (BY_QUEUE[QUEUES[2]].kind, BY_TYPE[ReleaseByOwner].reply) == (QueueKind.DURABLE, None)
    assert BY_TYPE[ReleaseByOwner].persistent and BY_TYPE[ReleaseByOwner].publishers == ("scheduler_worker",)


# --- A refusal waits for the disk.


async def test_a_refusal_is_on_disk_before_its_request_is_acknowledged(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash of the database could forget it with no worker left to answer the client."""
    flushing = Gate(monkeypatch, PostgresBuilds, "flush")
    await world.scheduler("s1", CONFIG)
    asking = world.answer(world.request("no.such"), BuildAccepted)
    requested = asyncio.create_task(asking)
    await flushing.wait()
    assert not requested.done()
    flushing.open.set()
    with pytest.raises(RequestRefused):
        await requested


# --- A request that comes so late that the record of it could be gone: nothing is built twice.


DAY_S = 86_400.0
REQUESTS = "scheduler.requests"
RETAINING = SchedulerConfig(hosts_warmup_s=0.001, ended_retention_s=DAY_S)


class Yesterdays(SystemClock):
    """A clock that is two days slow: what it stage_times was sent two days ago."""

    def time(self) -> float:
        return super().time() - 2 * DAY_S


@pytest.fixture
async def late(world: World) -> AsyncIterator[Bus]:
    """A client whose messages were two days under way."""
    bus = Bus(API, MemoryTransport(world.brokers[API], API), process="late", clock=Yesterdays(), rng=world.rng)
    await bus.open()
    yield bus
    await bus.close()


def test_a_request_is_refused_before_the_record_of_it_can_be_gone() -> None:
    for keep_s in (60.0, DAY_S, 7 * DAY_S):
        assert 0 < max_request_age_s(SchedulerConfig(ended_retention_s=keep_s)) < keep_s


async def publish_late(late: Bus, request: BuildRequest) -> None:
    await late.publish(request)


async def replay(late: Bus, request: BuildRequest) -> None:
    """It was given up two days ago, and an operator sends it back."""
    packed = pack(request, Meta(id="m1", sent_at=late.clock.time()))
    await late.transport.publish(single(packed, DEAD, REQUESTS, mandatory=True))
    assert await dead_letters.replay(late.transport, REQUESTS) == ["m1"]


@pytest.mark.parametrize("bring", [publish_late, replay])
async def test_a_late_copy_of_a_purged_build_builds_nothing(
    world: World, late: Bus, bring: Callable[[Bus, BuildRequest], Awaitable[None]]
) -> None:
    await world.scheduler_and_hosts(1, RETAINING)
    request = await world.requested()
    await until(lambda: len(world.builds) == 1)
    await world.announced("c1", request, BuildState.ACTIVE, 10, terminal=True)
    await world.ended(request.instance_uuid, BuildState.ACTIVE)
    await world.delete(request)
    await until(lambda: world.deletes)
    await world.announced("c1", request, BuildState.DELETED, 11, terminal=True)
    await world.ended(request.instance_uuid, BuildState.DELETED)
    await world.release(request.instance_uuid)  # as its cell does; what is held still would be left to that

    service, _, _ = world.services["s1"]
    store = PostgresBuilds(world.environment("gardener").database("scheduler"))
    await store.open()
    assert await purge(store, world.clock.time() + 1, 10) == 1
    await store.close()
    assert await world.show(request.instance_uuid) is None

    await bring(late, request)
    refused = await world.ended(request.instance_uuid, BuildState.REFUSED)
    assert (refused.code, len(world.builds), service.not_ready()) == ("request.too_old", 1, [])
