"""A claim of another run than the request's is never released with it; `berth audit` names it.

An instance runs, and its record is lost; its client publishes the request again a moment later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import asyncpg
import pytest

from bus.bus import API
from bus.contracts.book import HeldAllocation
from bus.contracts.build import BuildAccepted, BuildState, DeleteRequest, member_uuids
from bus.contracts.catalogue import lane_of
from bus.contracts.placement import Release, ReleaseResult
from scheduler_worker.claims import HeldClaims
from scheduler_worker.domain import delivery
from scheduler_worker.engine import RequestRecorder, SchedulingEngine
from tests.integration.scheduler.test_forgotten_claims import forget, running, unannounce
from tests.integration.scheduler.test_twins import CONFIG, ROOM_FOR_ONE, Gate, cut_request_consumer, fill
from tests.integration.scheduler.world import PATIENCE_S, World

pytestmark = pytest.mark.postgres


async def in_doubt(world: World) -> set[str]:
    """The instances that hold what another run than that of their record has claimed."""
    connection = await asyncpg.connect(world.url)
    rows = await connection.fetch(
        "SELECT uuid::text FROM scheduler.build_requests b JOIN placement.consumers c ON c.uuid = b.instance_uuid"
        " WHERE c.released_at IS NULL AND c.run <> b.run"
    )
    await connection.close()
    return {row[0] for row in rows}


async def until_acknowledged(world: World) -> None:
    queue = world.brokers[API].queue(f"scheduler.requests.{lane_of('demo')}")
    await world.eventually(lambda: len(queue) == 0 and not any(one.unacked for one in queue.consumers))


@pytest.mark.parametrize("retries", [1, 0], ids=["tried again", "at once"])
async def test_a_request_that_finds_a_claim_on_a_silent_host_keeps_it(
    world: World, monkeypatch: pytest.MonkeyPatch, retries: int
) -> None:
    """Also when it is tried again: the next delivery finds the record, and cannot know of what time it is."""
    monkeypatch.setattr(delivery, "RETRIES", retries)
    request, host = await running(world)
    await unannounce(world, host)
    await world.ask(request)
    assert await world.queried(request) == "c1"
    await world.buses[API].request(request, BuildAccepted, timeout_s=PATIENCE_S)
    assert host in await world.used(), "the machine runs without its allocation"
    assert await in_doubt(world) == set(), "its request has taken it over"
    await world.delete(request)
    ((cell, delete),) = await world.until(lambda: world.deletes)
    assert (cell, delete.instance_uuid) == ("c1", request.instance_uuid)


async def test_a_redelivered_request_that_ended_before_any_look_releases_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host is not known any more, and its scheduler dies before the acknowledgement."""
    await world.scheduler("s1", CONFIG)
    (host,) = await world.add_hosts("c1", 1, on="c1", **ROOM_FOR_ONE)
    request = world.request(host="c1-0")
    await world.active(request)
    await forget(world, request.instance_uuid)
    await unannounce(world, host)
    ended = Gate(monkeypatch, SchedulingEngine, "_withdraw")
    await world.ask(request)
    await ended.wait()
    assert await world.queried(request) == "c1"
    await world.kill("s2")
    await world.scheduler("s3", CONFIG)
    await until_acknowledged(world)
    assert host in await world.used()


async def test_a_delete_in_the_batch_of_its_request_reaches_the_cell_of_a_young_claim(world: World) -> None:
    """It was answered as deleted, and the instance ran on without its allocation."""
    request, host = await running(world)
    delete = DeleteRequest(instance_uuid=request.instance_uuid, project_id=request.project_id)
    await world.ask(request, delete)  # one batch
    ((cell, command),) = await world.until(lambda: world.deletes)
    assert (cell, command.instance_uuid, command.begun) == ("c1", request.instance_uuid, True)
    assert set(await world.used()) == {host}


async def test_a_redelivered_request_whose_delete_came_first_releases_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client was answered that there is no such instance; a scheduler dies before it has looked at the record."""
    request, host = await running(world)
    await world.delete(request)
    await world.ended(request.instance_uuid, BuildState.REFUSED)
    recording = Gate(monkeypatch, RequestRecorder, "record")
    await world.ask(request)
    await recording.wait()
    await world.kill("s1")
    await world.scheduler("s2", CONFIG)
    await until_acknowledged(world)
    assert host in await world.used()


async def test_a_gang_that_is_short_keeps_young_claims_of_its_members(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One member had failed before the record was lost; its host is taken."""
    monkeypatch.setattr(delivery, "RETRIES", 0)
    await world.scheduler("s1", CONFIG)
    hosts = await world.add_hosts("c1", 2, on="c1", **ROOM_FOR_ONE)
    request = world.request(count=2)
    first, second = member_uuids(request)
    await world.ask(request)
    await world.ended(first, BuildState.SCHEDULED)
    name = (await world.ended(second, BuildState.SCHEDULED)).host
    await world.buses[API].request(Release(consumer=second), ReleaseResult, timeout_s=PATIENCE_S)
    await fill(world, hosts[0] if name == "c1-0" else hosts[1])
    await forget(world, first)
    connection = await asyncpg.connect(world.url)
    await connection.execute("DELETE FROM scheduler.build_requests WHERE instance_uuid = $1", second)
    await connection.close()
    await world.ask(request)
    assert await world.queried(request) == "c1"
    await world.ended(second)
    assert set(await world.used()) == set(hosts)


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
    await world.scheduler("s1", CONFIG)
    (host,) = await world.add_hosts("c1", 1, on="c1", **ROOM_FOR_ONE)
    other = await fill(world, host)
    request = world.request()
    await world.ask(request)
    await looking.wait()  # there is no room for it
    await forget(world, request.instance_uuid)
    await world.buses[API].request(Release(consumer=other), ReleaseResult, timeout_s=PATIENCE_S)
    cut_request_consumer(world)
    await world.scheduler("s2", CONFIG)
    await world.until(lambda: world.builds)
    looking.open.set()
    async with asyncio.timeout(PATIENCE_S):
        await taken_over.wait()
    assert await in_doubt(world) == set()
