"""After a restore: instances run, their requests are not on record any more, and their clients publish these again."""

from __future__ import annotations

import asyncpg
import pytest
from msgspec import structs

from bus.bus import API
from bus.contracts.build import BuildAccepted, BuildRequest, BuildState, DeleteRequest, member_uuids
from bus.contracts.placement import Release, ReleaseResult
from scheduler_worker.domain import delivery
from scheduler_worker.engine import SchedulingEngine
from tests.integration.scheduler.test_twins import CONFIG, ROOM_FOR_ONE, Gate, fill
from tests.integration.scheduler.world import PATIENCE_S, World

pytestmark = pytest.mark.postgres


async def forget(world: World, *uuids: str) -> None:
    """Their records are lost."""
    connection = await asyncpg.connect(world.url)
    gone = await connection.execute("DELETE FROM scheduler.build_requests WHERE instance_uuid = ANY($1)", uuids)
    assert gone == f"DELETE {len(uuids)}"
    await connection.close()
    world.builds.clear()
    world.events.clear()


async def running(world: World, on: str = "c1") -> tuple[BuildRequest, str]:
    """An instance on the only host, which has room for no other; its request is forgotten."""
    await world.scheduler("s1", CONFIG)
    (host,) = await world.add_hosts("c1", 1, on=on, **ROOM_FOR_ONE)
    request = world.request()
    await world.active(request)
    await forget(world, request.instance_uuid)
    return request, host


async def unannounce(world: World, host: str) -> None:
    """Another scheduler takes over, and nothing announces this host to it; there is one of another cell."""
    await world.stop("s1")
    del world.hosts["c1"][host]
    await world.scheduler("s2", CONFIG)
    await world.add_hosts("c2", 1, **ROOM_FOR_ONE)


async def test_a_full_cloud_gives_the_request_to_the_cell_that_has_its_instance(world: World) -> None:
    request, host = await running(world)
    book = world.replicas["s1"]
    await world.eventually(lambda: not book.free("VCPU", book.rows_of_roots()).any())
    await world.ask(request)
    ((cell, build),) = await world.until(lambda: world.builds)
    assert (cell, build.attempt, build.selections[0].host_uuid) == ("c1", 1, host)
    assert set(await world.used()) == {host}


@pytest.mark.parametrize("ahead_s", [0.0, 60.0])
async def test_a_request_that_expires_goes_to_the_cell_of_its_claim(world: World, ahead_s: float) -> None:
    """No scheduler was there to take it, whatever its client's clock. It was released as its own."""
    request, host = await running(world)
    await world.expires(request, sent_at=world.clock.time() + ahead_s)
    ((cell, build),) = await world.until(lambda: world.builds)
    assert (cell, build.spec.instance_uuid, build.selections[0].host_uuid) == ("c1", request.instance_uuid, host)
    assert set(await world.used()) == {host}


async def test_a_request_that_cannot_be_placed_is_left_to_the_cell_of_its_claim_and_so_is_its_delete(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host of the instance is not announced; the machine runs on there."""
    monkeypatch.setattr(delivery, "RETRIES", 1)
    request, host = await running(world)
    await unannounce(world, host)
    await world.ask(request)
    assert await world.queried(request) == "c1"
    await world.buses[API].request(request, BuildAccepted, timeout_s=PATIENCE_S)
    assert set(await world.used()) == {host}, "a repeated request releases nothing either"
    await world.delete(request)
    ((cell, delete),) = await world.until(lambda: world.deletes)
    assert (cell, delete.instance_uuid) == ("c1", request.instance_uuid)
    assert host in await world.used()
    await world.announced("c1", request, BuildState.DELETED, 12, terminal=True)
    await world.ended(request.instance_uuid, BuildState.DELETED)


@pytest.mark.parametrize(("on", "is_announced"), [("c1", False), (API, True), (API, False)])
async def test_a_delete_that_comes_before_the_decision_releases_no_older_claim(
    world: World, on: str, *, is_announced: bool
) -> None:
    """The delete goes to the cell, by the book or by the announcements; else both requests end as what they are."""
    request, host = await running(world, on)
    if not is_announced:
        await world.stop("s1")
        del world.hosts["c1"][host]
        await world.scheduler("s2", CONFIG)
    delete = DeleteRequest(instance_uuid=request.instance_uuid, project_id=request.project_id)
    await world.ask(request, delete)  # one batch
    if on == "c1" or is_announced:
        ((cell, command),) = await world.until(lambda: world.deletes)
        assert (cell, command.instance_uuid, command.begun) == ("c1", request.instance_uuid, True)
    else:
        failed = await world.ended(request.instance_uuid, BuildState.FAILED)
        refused = await world.ended(request.instance_uuid, BuildState.REFUSED)
        assert (failed.code, refused.code, refused.sequence) == ("claim.stranded", "claim.stranded", 0)
    assert set(await world.used()) == {host}
    assert BuildState.DELETED not in world.states(request.instance_uuid)


async def test_a_request_that_has_sent_no_claim_releases_none(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """No host has room, and that of the instance is not announced."""
    monkeypatch.setattr(delivery, "RETRIES", 0)
    request, host = await running(world)
    await world.stop("s1")
    del world.hosts["c1"][host]
    await world.scheduler("s2", CONFIG)
    book = world.replicas["s2"]
    await world.eventually(lambda: book.row_of(host) is not None)
    await world.ask(request)
    assert await world.queried(request) == "c1"
    await world.buses[API].request(request, BuildAccepted, timeout_s=PATIENCE_S)
    assert set(await world.used()) == {host}


async def test_a_delete_of_a_request_that_ended_before_any_look_up_reaches_the_cell(world: World) -> None:
    """Its flavor is gone."""
    await world.scheduler("s1", CONFIG)
    (host,) = await world.add_hosts("c1", 1, on="c1", **ROOM_FOR_ONE)
    request = world.request(host="c1-0")
    await world.active(request)
    await forget(world, request.instance_uuid)
    await unannounce(world, host)
    await world.ask(structs.replace(request, flavor="no.such"))
    assert (await world.ended(request.instance_uuid)).code == "flavor.unknown"
    await world.delete(request)
    ((cell, delete),) = await world.until(lambda: world.deletes)
    assert (cell, delete.instance_uuid, delete.begun) == ("c1", request.instance_uuid, True)
    assert host in await world.used()


async def test_each_delete_is_refused_while_it_is_not_known_which_cell_has_the_instance(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host was reported over the API bus and is not announced. Later it is, and the delete goes to its cell."""
    monkeypatch.setattr(delivery, "RETRIES", 1)
    request, host = await running(world, API)
    await world.stop("s1")
    announced = world.hosts["c1"].pop(host)
    await world.scheduler("s2", CONFIG)
    await world.ask(request)
    assert (await world.ended(request.instance_uuid)).code == "claim.stranded"
    for _ in range(2):
        world.events.clear()
        await world.delete(request)
        refused = await world.ended(request.instance_uuid, BuildState.REFUSED)
        assert (refused.code, refused.sequence) == ("claim.stranded", 0)
    world.hosts["c1"][host] = announced
    await world.scheduler("s3", CONFIG)
    await world.stop("s2")
    await world.delete(request)
    ((cell, _),) = await world.until(lambda: world.deletes)
    assert cell == "c1" and host in await world.used()


async def test_a_delete_reaches_the_cell_that_holds_a_later_attempt(world: World) -> None:
    """The cell had taken an alternate before its scheduler's database was set back."""
    request, host = await running(world)
    connection = await asyncpg.connect(world.url)
    await connection.execute("UPDATE placement.consumers SET attempt = 2 WHERE uuid = $1", request.instance_uuid)
    await connection.close()
    delete = DeleteRequest(instance_uuid=request.instance_uuid, project_id=request.project_id)
    await world.ask(request, delete)  # one batch
    ((cell, command),) = await world.until(lambda: world.deletes)
    assert (cell, command.instance_uuid) == ("c1", request.instance_uuid)
    assert set(await world.used()) == {host}


async def test_a_delete_of_a_failed_build_leaves_the_allocation_of_another_client(world: World) -> None:
    """It has no attempt."""
    request, host = await running(world)
    connection = await asyncpg.connect(world.url)
    await connection.execute("UPDATE placement.consumers SET attempt = 0 WHERE uuid = $1", request.instance_uuid)
    await connection.close()
    await world.ask(request)
    assert (await world.ended(request.instance_uuid)).code == "claim.consumer_changed"
    await world.delete(request)
    await world.ended(request.instance_uuid, BuildState.DELETED)
    assert world.deletes == [] and set(await world.used()) == {host}


async def test_a_copy_leaves_the_claim_of_the_copy_that_came_on_record_before_it_to_its_cell(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cell has the build, and its claim is by the run on record. That it was not dispatched, its cell proves."""
    monkeypatch.setattr(delivery, "RETRIES", 1)
    writing = Gate(monkeypatch, SchedulingEngine, "_write")
    await world.scheduler("s1", CONFIG)
    (host,) = await world.add_hosts("c1", 1, on="c1", **ROOM_FOR_ONE)
    request = world.request()
    await world.ask(request)
    await writing.wait()
    await world.kill("s1")
    del world.hosts["c1"][host]
    await world.scheduler("s2", CONFIG)
    await world.add_hosts("c2", 1, **ROOM_FOR_ONE)
    assert await world.queried(request) == "c1"
    assert set(await world.used()) == {host}


async def test_a_gang_that_is_short_releases_no_older_claim_of_its_members(world: World) -> None:
    """One member had failed before the restore; its host is taken."""
    await world.scheduler("s1", CONFIG)
    hosts = await world.add_hosts("c1", 2, on="c1", **ROOM_FOR_ONE)
    request = world.request(count=2)
    first, second = member_uuids(request)
    await world.ask(request)
    await world.ended(first, BuildState.SCHEDULED)
    name = (await world.ended(second, BuildState.SCHEDULED)).host
    await world.buses[API].request(Release(consumer=second), ReleaseResult, timeout_s=PATIENCE_S)
    free = hosts[0] if name == "c1-0" else hosts[1]
    await fill(world, free)
    await forget(world, first)
    connection = await asyncpg.connect(world.url)
    await connection.execute("DELETE FROM scheduler.build_requests WHERE instance_uuid = $1", second)
    await connection.close()
    await world.ask(request)
    assert await world.queried(request) == "c1"
    await world.ended(second)
    assert set(await world.used()) == set(hosts)
    await world.delete(world.request(instance_uuid=first))
    ((cell, delete),) = await world.until(lambda: world.deletes)
    assert (cell, delete.instance_uuid) == ("c1", first)
