"""One request in two hands: a lost connection gave it to another scheduler while the first one was still at it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import asyncpg
import pytest

from bus.bus import API
from bus.clock import new_uuid
from bus.contracts.build import BuildAccepted, BuildState, DeleteRequest
from bus.contracts.placement import Claim, ClaimOption, ClaimOutcome, ClaimResult, Release, ReleaseResult
from bus.faults import DatabaseUnavailable, RequestRefused
from scheduler_worker import engine
from scheduler_worker.claims import BusClaims
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain import delivery
from scheduler_worker.store.postgres import PostgresBuilds
from tests.integration.scheduler.world import PATIENCE_S, World

pytestmark = pytest.mark.postgres

CONFIG = SchedulerConfig(hosts_warmup_s=0.001, concurrency=1)
ROOM_FOR_ONE = {"VCPU": 1, "MEMORY_MB": 4096, "DISK_GB": 100}


class Gate:
    """Holds the first call of a method until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type[Any], name: str) -> None:
        self.reached, self.open = asyncio.Event(), asyncio.Event()
        real: Callable[..., Any] = getattr(owner, name)

        async def held(this: Any, *arguments: Any) -> Any:
            if not self.reached.is_set():
                self.reached.set()
                await self.open.wait()
            return await real(this, *arguments)

        monkeypatch.setattr(owner, name, held)

    async def wait(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.reached.wait()


def cut_request_consumer(world: World) -> None:
    """Cut the connection of the one that takes requests; it comes back, but takes none any more."""
    for transport in list(world.brokers[API].transports):
        kept = [one for one in transport.subscriptions if not one._queue.startswith("scheduler.requests")]
        if len(kept) != len(transport.subscriptions):
            transport.subscriptions[:] = kept
            transport.lose()
            transport.reconnect_soon()


async def fill(world: World, host: str) -> str:
    consumer = new_uuid(world.rng)
    claim = Claim(consumer=consumer, options=(ClaimOption(allocations={host: {"VCPU": 1}}),), project_id="other")
    answer = await world.buses[API].request(claim, ClaimResult, timeout_s=PATIENCE_S)
    assert answer.outcome is ClaimOutcome.CLAIMED
    return consumer


async def test_a_claim_that_lands_after_the_other_copy_has_failed_holds_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = Gate(monkeypatch, BusClaims, "submit")
    await world.scheduler("s1", CONFIG)
    (host,) = await world.add_hosts("c1", 1, **ROOM_FOR_ONE)
    request = world.request()
    await world.ask(request)
    await asking.wait()
    cut_request_consumer(world)
    other = await fill(world, host)
    await world.scheduler("s2", CONFIG)
    assert (await world.ended(request.instance_uuid)).state is BuildState.FAILED
    await world.buses[API].request(Release(consumer=other), ReleaseResult, timeout_s=PATIENCE_S)
    writing = Gate(monkeypatch, engine.SchedulingEngine, "_write")
    asking.open.set()
    await writing.wait()  # the claim was asked for and answered, and s1 dies before it writes anything down
    await world.kill("s1")
    # Fenced before it landed, or freed after: the other scheduler releases when the client has its answer already.
    await world.holds_nothing()


async def forgotten(world: World, uuid: str) -> None:
    """The scheduler's database has crashed, and forgotten a record that was in no hurry; placement has its own."""
    connection = await asyncpg.connect(world.url)
    assert await connection.execute("DELETE FROM scheduler.build_requests WHERE instance_uuid = $1", uuid) == "DELETE 1"
    await connection.close()


async def test_the_claim_of_a_forgotten_record_is_found_by_the_next_scheduler(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took itself for the first, found the host full, and failed the build; the claim stayed for ever."""
    writing = Gate(monkeypatch, engine.SchedulingEngine, "_write")
    await world.scheduler("s1", CONFIG)
    (host,) = await world.add_hosts("c1", 1, **ROOM_FOR_ONE)
    request = world.request()
    await world.ask(request)
    await writing.wait()
    await world.kill("s1")
    await forgotten(world, request.instance_uuid)
    await world.scheduler("s2", CONFIG)
    await world.until(lambda: world.builds)
    assert world.builds[0][1].selections[0].host_uuid == host


@pytest.mark.parametrize("is_full", [False, True])
async def test_a_later_claim_of_the_cell_of_a_forgotten_record_goes_to_that_cell_and_ends_there(
    world: World, *, is_full: bool
) -> None:
    """A restore: the cell had claimed under attempt 2. The request failed, and its delete ended it as never built."""
    await world.scheduler("s1", CONFIG)
    first, second = await world.add_hosts("c1", 2, **ROOM_FOR_ONE)
    request = world.request()
    chosen = await world.active(request)
    here, other = (first, second) if chosen == "c1-0" else (second, first)
    option = ClaimOption(allocations={other: {"VCPU": 1}})
    claim = Claim(
        consumer=request.instance_uuid,
        attempt=2,
        consumer_generation=1,
        release_first=True,
        options=(option,),
        project_id=request.project_id,
    )
    answer = await world.buses["c1"].request(claim, ClaimResult, timeout_s=PATIENCE_S)
    assert answer.outcome is ClaimOutcome.CLAIMED
    await forgotten(world, request.instance_uuid)
    if is_full:
        await fill(world, here)
        book = world.replicas["s1"]
        await world.eventually(lambda: not book.free("VCPU", book.rows_of_roots()).any())
    world.builds.clear()
    world.events.clear()
    await world.ask(request)
    ((cell, build),) = await world.until(lambda: world.builds)
    assert (cell, build.attempt, build.consumer_generation) == ("c1", 2, answer.consumer_generation)
    assert [(one.host_uuid, one.allocations) for one in build.selections] == [(other, {other: {"VCPU": 1}})]
    assert (here in await world.used()) is is_full
    event = await world.ended(request.instance_uuid, BuildState.SCHEDULED)
    assert (event.attempt, event.cell) == (2, "c1")
    await world.delete(request)
    ((cell, delete),) = await world.until(lambda: world.deletes)
    assert (cell, delete.instance_uuid) == ("c1", request.instance_uuid)


async def test_the_claim_of_a_forgotten_record_is_found_by_the_scheduler_that_made_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = engine.SchedulingEngine._write

    async def crash(this: engine.SchedulingEngine, *arguments: Any) -> Any:
        monkeypatch.setattr(engine.SchedulingEngine, "_write", write)
        await forgotten(world, request.instance_uuid)
        raise DatabaseUnavailable("crashed")

    monkeypatch.setattr(engine.SchedulingEngine, "_write", crash)
    await world.scheduler("s1", CONFIG)
    (host,) = await world.add_hosts("c1", 1, **ROOM_FOR_ONE)
    request = world.request()
    await world.ask(request)
    await world.until(lambda: world.builds)
    assert world.builds[0][1].selections[0].host_uuid == host


async def test_a_refusal_is_on_disk_before_its_request_is_acknowledged(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash of the database could forget it with no worker left to answer the client."""
    flushing = Gate(monkeypatch, PostgresBuilds, "flush")
    await world.scheduler("s1", CONFIG)
    asking = world.buses[API].request(world.request("no.such"), BuildAccepted, timeout_s=PATIENCE_S)
    requested = asyncio.create_task(asking)
    await flushing.wait()
    assert not requested.done()
    flushing.open.set()
    with pytest.raises(RequestRefused):
        await requested


async def test_a_slow_copy_does_not_free_what_the_other_one_has_dispatched(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = Gate(monkeypatch, engine.SchedulingEngine, "_write")
    await world.scheduler("s1", CONFIG)
    (host,) = await world.add_hosts("c1", 1, **ROOM_FOR_ONE)
    request = world.request()
    await world.ask(request)
    await writing.wait()
    cut_request_consumer(world)
    await world.scheduler("s2", CONFIG)
    await world.until(lambda: world.builds)
    await world.delete(request)
    await world.until(lambda: world.deletes)
    done = Gate(monkeypatch, engine.SchedulingEngine, "_withdraw")
    done.open.set()
    writing.open.set()
    await done.wait()
    await world.stop("s1")  # drained: it has finished what it had in hand
    assert list(await world.used()) == [host]  # the cell frees it, once the host has destroyed what it builds


async def test_a_claim_on_a_host_without_a_service_or_a_cell_blocks_no_request_and_stays(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cell can be queried whether its machine runs: `berth audit` names it."""
    monkeypatch.setattr(delivery, "RETRIES", 1)
    writing = Gate(monkeypatch, engine.SchedulingEngine, "_write")
    await world.scheduler("s1", CONFIG)
    (lost,) = await world.add_hosts("c1", 1, **ROOM_FOR_ONE)
    stranded, healthy = world.request(), world.request(availability_zone=None)
    await world.ask(stranded)
    await writing.wait()
    await world.kill("s1")
    # The host's compute service has died with the scheduler, and does not come back.
    del world.hosts["c1"][lost]
    (alive,) = await world.add_hosts("c2", 1, **ROOM_FOR_ONE)
    await world.scheduler("s2", CONFIG)
    await world.ask(healthy)
    assert (await world.ended(healthy.instance_uuid, BuildState.SCHEDULED)).cell == "c2"
    failed = await world.ended(stranded.instance_uuid)
    assert (failed.state, failed.code) == (BuildState.FAILED, "claim.stranded")
    await _until_used(world, {alive, lost})


async def test_a_build_deleted_under_the_uuid_of_a_foreign_consumer_frees_nothing_of_it(world: World) -> None:
    """Placement has other users: what they hold under a uuid that a client of ours makes up stays theirs."""
    (host,) = await world.add_hosts("c1", 1, **ROOM_FOR_ONE)
    theirs = await fill(world, host)
    request = world.request(instance_uuid=theirs)
    delete = DeleteRequest(instance_uuid=theirs, project_id=request.project_id)
    await world.buses[API].declare("scheduler.requests")
    await world.ask(request, delete)  # one batch: it is deleted before it is scheduled
    await world.scheduler("s1", CONFIG)
    assert (await world.ended(theirs)).state is BuildState.DELETED
    assert await world.used() == {host: {"VCPU": 1}}


async def _until_used(world: World, hosts: set[str]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while set(await world.used()) != hosts:
            pass
