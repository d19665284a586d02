"""The schedulers' database is set back to before a dispatch: the record is `accepted`, and the machine runs.

What the instance holds is of the record's own run. Nothing of it may be released before its cell was queried.
"""

from __future__ import annotations

import asyncpg
import pytest
from msgspec.structs import replace

from bus.bus import API
from bus.contracts.build import BuildAccepted, BuildRequest, BuildState, member_uuids
from bus.contracts.cell_queries import CellBuildQuery
from bus.contracts.placement import Release, ReleaseResult
from scheduler_worker.domain import delivery
from tests.integration.scheduler.test_forgotten_claims import unannounce
from tests.integration.scheduler.test_twins import CONFIG, ROOM_FOR_ONE
from tests.integration.scheduler.world import PATIENCE_S, World

pytestmark = pytest.mark.postgres


async def set_back(world: World, *uuids: str) -> None:
    """Their records are as they were before the decision."""
    connection = await asyncpg.connect(world.url)
    await connection.execute(
        "UPDATE scheduler.build_requests SET state = 'accepted', sequence = 1, terminal = false, cell = NULL,"
        " host = NULL, host_uuid = NULL, attempt = 0, history = '[]' WHERE instance_uuid = ANY($1)",
        uuids,
    )
    await connection.close()
    world.builds.clear()
    world.events.clear()


async def running(world: World) -> tuple[BuildRequest, str]:
    """An instance on the only host, and its record before the dispatch."""
    await world.scheduler("s1", CONFIG)
    (host,) = await world.add_hosts("c1", 1, on="c1", **ROOM_FOR_ONE)
    request = world.request()
    await world.active(request)
    await set_back(world, request.instance_uuid)
    return request, host


async def test_a_delete_of_a_build_that_was_set_back_reaches_its_cell(world: World) -> None:
    request, host = await running(world)
    await world.delete(request)
    ((cell, delete),) = await world.until(lambda: world.deletes)
    assert (cell, delete.instance_uuid, delete.begun) == ("c1", request.instance_uuid, True)
    assert set(await world.used()) == {host}, "the machine runs without its allocation"


async def test_the_last_delivery_of_a_build_that_was_set_back_queries_its_cell(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host is announced to nobody, so it cannot be built there; it failed, and its claim was released."""
    monkeypatch.setattr(delivery, "RETRIES", 0)
    request, host = await running(world)
    await unannounce(world, host)
    await world.buses[API].request(request, BuildAccepted, timeout_s=PATIENCE_S)
    ((cell, query),) = await world.until(lambda: world.queries)
    assert isinstance(query, CellBuildQuery) and (cell, query.attempt, query.sequence) == ("c1", 1, 2)
    assert query.spec.instance_uuid == request.instance_uuid
    assert host in await world.used(), "the machine runs without its allocation"


async def test_a_request_that_fits_no_host_any_more_queries_the_cell_of_its_claim(world: World) -> None:
    request = world.request(host="c1-0")
    await world.scheduler("s1", CONFIG)
    (host,) = await world.add_hosts("c1", 1, on="c1", **ROOM_FOR_ONE)
    await world.active(request)
    await set_back(world, request.instance_uuid)
    await unannounce(world, host)
    await world.buses[API].request(request, BuildAccepted, timeout_s=PATIENCE_S)
    ((cell, query),) = await world.until(lambda: world.queries)
    assert isinstance(query, CellBuildQuery) and (cell, query.spec.instance_uuid) == ("c1", request.instance_uuid)
    assert host in await world.used()


async def test_the_running_member_of_a_gang_that_is_short_keeps_its_claim(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other member was deleted before the records were set back."""
    monkeypatch.setattr(delivery, "RETRIES", 0)
    await world.scheduler("s1", CONFIG)
    hosts = await world.add_hosts("c1", 2, on="c1", **ROOM_FOR_ONE)
    request = world.request(count=2)
    first, second = member_uuids(request)
    await world.ask(request)
    places = {one: (await world.ended(one, BuildState.SCHEDULED)).host for one in (first, second)}
    released = Release(consumer=second, attempt=1)
    await world.buses[API].request(released, ReleaseResult, timeout_s=PATIENCE_S)
    await set_back(world, first, second)
    await world.buses[API].request(request, BuildAccepted, timeout_s=PATIENCE_S)
    await world.ended(second)
    ((cell, query),) = await world.until(lambda: world.queries)
    assert isinstance(query, CellBuildQuery) and (cell, query.spec.instance_uuid) == ("c1", first)
    assert set(await world.used()) == {hosts[0] if places[first] == "c1-0" else hosts[1]}


async def test_a_late_release_by_the_run_of_a_lost_record_releases_nothing(world: World) -> None:
    """The claim was recovered for the client's repeated request, and stayed the lost run's."""
    request, host = await running(world)
    connection = await asyncpg.connect(world.url)
    run = await connection.fetchval("DELETE FROM scheduler.build_requests RETURNING run")
    await connection.close()
    await world.ask(request)
    await world.until(lambda: world.builds)
    late = Release(consumer=request.instance_uuid, attempt=1, project_id=request.project_id, by=run)
    await world.buses[API].request(late, ReleaseResult, timeout_s=PATIENCE_S)
    assert set(await world.used()) == {host}, "the machine runs without its allocation"


@pytest.mark.parametrize("members", [1, 2])
async def test_a_build_that_no_message_carries_on_any_more_is_scheduled_again(world: World, members: int) -> None:
    """Its message was acknowledged before the records were set back, and its client waits."""
    await world.scheduler("s1", replace(CONFIG, move_query_s=0.2))
    hosts = await world.add_hosts("c1", 2, on="c1", **ROOM_FOR_ONE)
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
