"""Claims of another run, of an expired request, of a redelivery, and of a record that was set back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import asyncpg
import pytest
from msgspec.structs import replace

from bus.bus import API
from bus.contracts.book import HeldAllocation
from bus.contracts.build import BuildAccepted, BuildRequest, BuildState, DeleteRequest, member_uuids
from bus.contracts.catalogue import BY_TYPE
from bus.contracts.cell import CellBuild, CellBuildQuery
from bus.contracts.placement import Release, ReleaseResult, ReleaseRun
from bus.contracts.queues import BY_QUEUE, QueueKind, lane_of
from scheduler_worker import placing
from scheduler_worker.claims import HeldClaims
from scheduler_worker.domain import requests
from scheduler_worker.engine import SchedulingEngine
from tests.integration.scheduler.steps import (
    BEGUN_S,
    CONFIG,
    ROOM_FOR_ONE,
    Gate,
    cut_request_consumer,
    fill,
    forget,
    running,
    unannounce,
)
from tests.integration.scheduler.world import World
from tests.kit.waiting import PATIENCE_S, until

# --- A claim of another run than the request's is never released with it; `berth audit` names it. An instance runs,
# and its record is lost; its client publishes the request again a moment later.


pytestmark = pytest.mark.postgres


async def in_doubt(world: World) -> set[str]:
    """The instances that hold what another run than that of their record has claimed."""
    rows = await world.sql(
        "SELECT uuid::text FROM scheduler.build_requests b JOIN placement.consumers c ON c.uuid = b.instance_uuid"
        " WHERE c.released_at IS NULL AND c.run <> b.run"
    )
    return {row[0] for row in rows}


async def until_acknowledged(world: World) -> None:
    queue = world.brokers[API].queue(f"scheduler.requests.{lane_of('demo')}")
    await until(lambda: len(queue) == 0 and not any(one.unacked for one in queue.consumers))


@pytest.mark.parametrize("retries", [1, 0], ids=["tried again", "at once"])
async def test_a_request_that_finds_a_claim_on_a_silent_host_keeps_it(
    world: World, monkeypatch: pytest.MonkeyPatch, retries: int
) -> None:
    """Also when it is tried again: the next delivery finds the record, and cannot know of what time it is."""
    monkeypatch.setattr(requests, "RETRIES", retries)
    request, host = await running(world)
    await unannounce(world, host)
    await world.ask(request)
    assert await world.queried(request) == "c1"
    await world.answer(request, BuildAccepted)
    assert host in await world.used(), "the machine runs without its allocation"
    assert await in_doubt(world) == set(), "its request has taken it over"
    await world.delete(request)
    ((cell, delete),) = await until(lambda: world.deletes)
    assert (cell, delete.instance_uuid) == ("c1", request.instance_uuid)
    assert host in await world.used()


async def test_a_redelivered_request_that_ended_before_any_look_releases_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host is not known any more, and its scheduler dies before the acknowledgement."""
    request, host = await running(world, host="c1-0")
    await unannounce(world, host)
    ended = Gate(monkeypatch, placing, "write_decided", after=True)
    await world.ask(request)
    await ended.wait()
    assert await world.queried(request) == "c1"
    await world.kill("s2")
    await world.scheduler("s3", CONFIG)
    await until_acknowledged(world)
    assert host in await world.used()


async def test_a_redelivered_request_whose_delete_came_first_releases_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its delete is the cell's, which has not ended it; a scheduler dies before it has looked at the record."""
    request, host = await running(world)
    await world.delete(request)
    await until(lambda: [one.instance_uuid for _, one in world.deletes] == [request.instance_uuid])
    recording = Gate(monkeypatch, SchedulingEngine, "record")
    await world.ask(request)
    await recording.wait()
    await world.kill("s1")
    await world.scheduler("s2", CONFIG)
    await until_acknowledged(world)
    assert host in await world.used()


async def test_a_run_whose_record_is_lost_takes_no_claim_back_from_the_run_after_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Release of the lost run would take the allocation of what the later one has built."""
    looking = Gate(monkeypatch, HeldClaims, "of")
    taken_over, take_over = asyncio.Event(), HeldClaims.take_over

    async def taking_over(this: HeldClaims, held: Sequence[HeldAllocation], runs: Mapping[str, str]) -> None:
        try:
            await take_over(this, held, runs)
        finally:
            if held:
                taken_over.set()

    monkeypatch.setattr(HeldClaims, "take_over", taking_over)
    (host,) = await world.scheduler_and_hosts(1, CONFIG, on="c1", **ROOM_FOR_ONE)
    other = await fill(world, host)
    request = await world.requested()
    await looking.wait()  # there is no room for it
    await forget(world, request.instance_uuid)
    await world.answer(Release(consumer=other), ReleaseResult)
    cut_request_consumer(world)
    await world.scheduler("s2", CONFIG)
    await until(lambda: world.builds)
    looking.open.set()
    async with asyncio.timeout(PATIENCE_S):
        await taken_over.wait()
    assert await in_doubt(world) == set()


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
        writing = Gate(patched, placing, "write_decided")
        await world.expires(request, patience_s=BEGUN_S if has_deadline else None, after_s=BEGUN_S)
        await writing.wait()  # claimed, and not written
        assert await world.used()
        await world.kill("s1")
        if is_forgotten:
            await forget(world, request.instance_uuid)
        await until(lambda: world.brokers["api"].queue("scheduler.given_up").ready)
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
    """No host has room, and that of the instance is not announced. Its scheduler dies before the acknowledgement."""
    monkeypatch.setattr(requests, "RETRIES", 0)
    request, host = await running(world)
    await unannounce(world, host, has_another=False)
    book = world.replicas["s2"]
    await until(lambda: book.row_of(host) is not None)
    ended = Gate(monkeypatch, placing, "write_decided", after=True)
    await world.ask(request)
    await ended.wait()  # its end here is on record, and the message is not acknowledged
    cell = await world.queried(request)
    assert host in await world.used()
    await world.kill("s2")
    await until(lambda: len(world.brokers[API].queue(f"scheduler.requests.{lane_of(request.project_id)}")) == 1)
    await world.scheduler("s3", CONFIG)
    await until_acknowledged(world)
    used = await world.used()
    assert (cell, host in used) == ("c1", True), f"the host of the running instance has {used.get(host)}"


# --- The schedulers' database is set back to before a dispatch: the record is `accepted`, and the machine runs.
# What the instance holds is of the record's own run. Nothing of it may be released before its cell was queried.


async def set_back(world: World, *uuids: str) -> None:
    """Their records are as they were before the decision."""
    await world.sql(
        "UPDATE scheduler.build_requests SET state = 'accepted', sequence = 1, terminal = false, cell = NULL,"
        " host = NULL, host_uuid = NULL, attempt = 0, history = '[]' WHERE instance_uuid = ANY($1)",
        uuids,
    )
    world.builds.clear()
    world.events.clear()


async def set_back_running(world: World, **more: str) -> tuple[BuildRequest, str]:
    """An instance on the only host, and its record before the dispatch."""
    (host,) = await world.scheduler_and_hosts(1, CONFIG, on="c1", **ROOM_FOR_ONE)
    request = world.request(**more)
    await world.active(request)
    await set_back(world, request.instance_uuid)
    return request, host


async def test_a_delete_of_a_build_that_was_set_back_reaches_its_cell(world: World) -> None:
    request, host = await set_back_running(world)
    await world.delete(request)
    ((cell, delete),) = await until(lambda: world.deletes)
    assert (cell, delete.instance_uuid, delete.begun) == ("c1", request.instance_uuid, True)
    assert set(await world.used()) == {host}, "the machine runs without its allocation"


@pytest.mark.parametrize(
    ("retries", "named"), [(0, {}), (requests.RETRIES, {"host": "c1-0"})], ids=["its last delivery", "it fits no host"]
)
async def test_a_build_that_was_set_back_and_cannot_be_built_queries_its_cell(
    world: World, monkeypatch: pytest.MonkeyPatch, retries: int, named: dict[str, str]
) -> None:
    """Its host is announced to nobody, so it cannot be built there; it failed, and its claim was released."""
    monkeypatch.setattr(requests, "RETRIES", retries)
    request, host = await set_back_running(world, **named)
    await unannounce(world, host)
    await world.answer(request, BuildAccepted)
    ((cell, query),) = await until(lambda: world.queries)
    assert isinstance(query, CellBuildQuery) and (cell, query.attempt, query.sequence) == ("c1", 1, 2)
    assert query.spec.instance_uuid == request.instance_uuid
    assert host in await world.used(), "the machine runs without its allocation"


async def test_the_running_member_of_a_gang_that_is_short_keeps_its_claim(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other member was deleted before the records were set back."""
    monkeypatch.setattr(requests, "RETRIES", 0)
    hosts = await world.scheduler_and_hosts(2, CONFIG, on="c1", **ROOM_FOR_ONE)
    request = world.request(count=2)
    first, second = member_uuids(request)
    await world.ask(request)
    places = {one: (await world.ended(one, BuildState.SCHEDULED)).host for one in (first, second)}
    released = Release(consumer=second, attempt=1)
    await world.answer(released, ReleaseResult)
    await set_back(world, first, second)
    await world.answer(request, BuildAccepted)
    await world.ended(second)
    ((cell, query),) = await until(lambda: world.queries)
    assert isinstance(query, CellBuildQuery) and (cell, query.spec.instance_uuid) == ("c1", first)
    assert set(await world.used()) == {hosts[0] if places[first] == "c1-0" else hosts[1]}


async def test_a_late_release_by_the_run_of_a_lost_record_releases_nothing(world: World) -> None:
    """The claim was recovered for the client's repeated request, and stayed the lost run's."""
    request, host = await set_back_running(world)
    ((run,),) = await world.sql("DELETE FROM scheduler.build_requests RETURNING run")
    await world.ask(request)
    await until(lambda: world.builds)
    late = Release(consumer=request.instance_uuid, attempt=1, project_id=request.project_id, by=run)
    await world.answer(late, ReleaseResult)
    assert set(await world.used()) == {host}, "the machine runs without its allocation"


@pytest.mark.parametrize("members", [1, 2])
async def test_a_build_that_no_message_carries_on_any_more_is_scheduled_again(world: World, members: int) -> None:
    """Its message was acknowledged before the records were set back, and its client waits."""
    hosts = await world.scheduler_and_hosts(2, replace(CONFIG, move_query_s=0.2), on="c1", **ROOM_FOR_ONE)
    request = world.request(count=members)
    uuids = member_uuids(request)
    await world.ask(request)
    for uuid in uuids:
        await world.ended(uuid, BuildState.SCHEDULED)
    held = await world.used()
    await set_back(world, *uuids)
    for uuid in uuids:
        await world.ended(uuid, BuildState.SCHEDULED)
    assert {one.spec.instance_uuid for _, one in world.builds} == {*uuids}
    assert await world.used() == held and len(held) == members <= len(hosts)


# --- What a failed build costs: how often placement is asked, and what is left in the book.


QUEUES = ("placement.requests", "placement.reads", "placement.releases")


def asked(world: World) -> list[int]:
    """How many messages each queue of placement has had."""
    return [world.brokers[API].queue(name).next_number for name in QUEUES]


async def consumers(world: World) -> int:
    """How many rows the book has of consumers, fences among them."""
    ((found,),) = await world.sql("SELECT count(*) FROM placement.consumers")
    return int(found)


async def test_a_build_that_no_host_can_take_is_two_reads_and_leaves_no_row_in_the_book(world: World) -> None:
    """The newest changes, and what its instance holds. It was one round trip more, and a fence for a claim that nobody
    had sent.
    """
    await world.scheduler_and_hosts(1, CONFIG, on="c1", **ROOM_FOR_ONE)
    await world.active(world.request())
    book = world.replicas["s1"]
    await until(lambda: not book.free("VCPU", book.rows_of_roots()).any())
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
    assert (BY_QUEUE[QUEUES[2]].kind, BY_TYPE[ReleaseRun].reply) == (QueueKind.DURABLE, None)
    assert BY_TYPE[ReleaseRun].persistent and BY_TYPE[ReleaseRun].publishers == ("scheduler_worker",)
