"""Requests whose records are lost: in two hands, after a restore, and so late that the record may be gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from msgspec import structs

from bus.bus import API, Bus
from bus.clock import SystemClock
from bus.consuming import dead_letters
from bus.contracts.base import Meta
from bus.contracts.build import BuildAccepted, BuildRequest, BuildState, DeleteRequest, member_uuids
from bus.contracts.placement import Claim, ClaimOption, ClaimOutcome, ClaimResult, Release, ReleaseResult
from bus.contracts.queues import DEAD
from bus.faults import DatabaseUnavailable, RequestRefused
from bus.memory import MemoryTransport
from bus.wire import pack, single
from scheduler_worker import placing
from scheduler_worker.claims import BusClaims
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain import requests
from scheduler_worker.store.postgres import PostgresBuilds
from scheduler_worker.unanswered import max_request_age_s, purge
from tests.integration.scheduler.steps import (
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
from tests.kit.waiting import until

# --- One request in two hands: a lost connection gave it to another scheduler while the first one was still at it.


pytestmark = pytest.mark.postgres


async def test_a_claim_that_lands_after_the_other_copy_has_failed_holds_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = Gate(monkeypatch, BusClaims, "submit")
    (host,) = await world.scheduler_and_hosts(1, CONFIG, **ROOM_FOR_ONE)
    request = await world.requested()
    await asking.wait()
    cut_request_consumer(world)
    other = await fill(world, host)
    await world.scheduler("s2", CONFIG)
    assert (await world.ended(request.instance_uuid)).state is BuildState.FAILED
    await world.answer(Release(consumer=other), ReleaseResult)
    writing = Gate(monkeypatch, placing, "write_decided")
    asking.open.set()
    await writing.wait()  # the claim was asked for and answered, and s1 dies before it writes anything down
    await world.kill("s1")
    # Fenced before it landed, or freed after: the other scheduler releases when the client has its answer already.
    await world.holds_nothing()


async def test_the_claim_of_a_forgotten_record_is_found_by_the_next_scheduler(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took itself for the first, found the host full, and failed the build; the claim stayed for ever."""
    writing = Gate(monkeypatch, placing, "write_decided")
    (host,) = await world.scheduler_and_hosts(1, CONFIG, **ROOM_FOR_ONE)
    request = await world.requested()
    await writing.wait()
    await world.kill("s1")
    await forget(world, request.instance_uuid)
    await world.scheduler("s2", CONFIG)
    await until(lambda: world.builds)
    assert world.builds[0][1].selections[0].host_uuid == host


@pytest.mark.parametrize("is_full", [False, True])
async def test_a_later_claim_of_the_cell_of_a_forgotten_record_goes_to_that_cell_and_ends_there(
    world: World, *, is_full: bool
) -> None:
    """A restore: the cell had claimed under attempt 2. The request failed, and its delete ended it as never built."""
    first, second = await world.scheduler_and_hosts(2, CONFIG, **ROOM_FOR_ONE)
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
    answer = await world.answer(claim, ClaimResult, on="c1")
    assert answer.outcome is ClaimOutcome.CLAIMED
    await forget(world, request.instance_uuid)
    if is_full:
        await fill(world, here)
        book = world.replicas["s1"]
        await until(lambda: not book.free("VCPU", book.rows_of_roots()).any())
    await world.ask(request)
    ((cell, build),) = await until(lambda: world.builds)
    assert (cell, build.attempt, build.consumer_generation) == ("c1", 2, answer.consumer_generation)
    assert [(one.host_uuid, one.allocations) for one in build.selections] == [(other, {other: {"VCPU": 1}})]
    assert (here in await world.used()) is is_full
    event = await world.ended(request.instance_uuid, BuildState.SCHEDULED)
    assert (event.attempt, event.cell) == (2, "c1")
    await world.delete(request)
    ((cell, delete),) = await until(lambda: world.deletes)
    assert (cell, delete.instance_uuid) == ("c1", request.instance_uuid)


async def test_the_claim_of_a_forgotten_record_is_found_by_the_scheduler_that_made_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = placing.write_decided

    async def crash(this: Any, *arguments: Any) -> Any:
        monkeypatch.setattr(placing, "write_decided", write)
        await forget(world, request.instance_uuid)
        raise DatabaseUnavailable("crashed")

    monkeypatch.setattr(placing, "write_decided", crash)
    (host,) = await world.scheduler_and_hosts(1, CONFIG, **ROOM_FOR_ONE)
    request = await world.requested()
    await until(lambda: world.builds)
    assert world.builds[0][1].selections[0].host_uuid == host


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


async def test_a_slow_copy_does_not_free_what_the_other_one_has_dispatched(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = Gate(monkeypatch, placing, "write_decided")
    (host,) = await world.scheduler_and_hosts(1, CONFIG, **ROOM_FOR_ONE)
    request = await world.requested()
    await writing.wait()
    cut_request_consumer(world)
    await world.scheduler("s2", CONFIG)
    await until(lambda: world.builds)
    await world.delete(request)
    await until(lambda: world.deletes)
    done = Gate(monkeypatch, placing.Dispatcher, "_withdraw")
    done.open.set()
    writing.open.set()
    await done.wait()
    await world.stop("s1")  # drained: it has finished what it had in hand
    assert list(await world.used()) == [host]  # the cell frees it, once the host has destroyed what it builds


async def test_a_claim_on_a_host_without_a_service_or_a_cell_blocks_no_request_and_stays(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cell can be queried whether its machine runs: `berth audit` names it."""
    monkeypatch.setattr(requests, "RETRIES", 1)
    writing = Gate(monkeypatch, placing, "write_decided")
    (lost,) = await world.scheduler_and_hosts(1, CONFIG, **ROOM_FOR_ONE)
    stranded, healthy = world.request(), world.request(availability_zone=None)
    await world.ask(stranded)
    await writing.wait()
    await world.kill("s1")
    # The host's compute service has died with the scheduler, and does not come back.
    del world.hosts["c1"][lost]
    (alive,) = await world.add_hosts("c2", 1, **ROOM_FOR_ONE)
    await world.scheduler("s2", structs.replace(CONFIG, move_query_s=0.05))
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
    async def is_so() -> bool:
        return set(await world.used()) == hosts

    await until(is_so)


# --- After a restore: instances run, their requests are not on record any more, and their clients publish these


async def test_a_full_cloud_gives_the_request_to_the_cell_that_has_its_instance(world: World) -> None:
    request, host = await running(world)
    book = world.replicas["s1"]
    await until(lambda: not book.free("VCPU", book.rows_of_roots()).any())
    await world.ask(request)
    ((cell, build),) = await until(lambda: world.builds)
    assert (cell, build.attempt, build.selections[0].host_uuid) == ("c1", 1, host)
    assert set(await world.used()) == {host}


@pytest.mark.parametrize("ahead_s", [0.0, 60.0])
async def test_a_request_that_expires_goes_to_the_cell_of_its_claim(world: World, ahead_s: float) -> None:
    """No scheduler was there to take it, whatever its client's clock. It was released as its own."""
    request, host = await running(world)
    await world.expires(request, sent_at=world.clock.time() + ahead_s)
    ((cell, build),) = await until(lambda: world.builds)
    assert (cell, build.spec.instance_uuid, build.selections[0].host_uuid) == ("c1", request.instance_uuid, host)
    assert set(await world.used()) == {host}


@pytest.mark.parametrize(("on", "is_announced"), [("c1", False), (API, True), (API, False)])
async def test_a_delete_that_comes_before_the_decision_releases_no_older_claim(
    world: World, on: str, monkeypatch: pytest.MonkeyPatch, *, is_announced: bool
) -> None:
    """The delete goes to the cell, by the book or by the announcements; else both requests end as what they are."""
    monkeypatch.setattr(requests, "RETRIES", 1)
    request, host = await running(world, on)
    if not is_announced:
        await world.stop("s1")
        del world.hosts["c1"][host]
        await world.scheduler("s2", CONFIG)
    delete = DeleteRequest(instance_uuid=request.instance_uuid, project_id=request.project_id)
    await world.ask(request, delete)  # one batch
    if on == "c1" or is_announced:
        ((cell, command),) = await until(lambda: world.deletes)
        assert (cell, command.instance_uuid, command.begun) == ("c1", request.instance_uuid, True)
    else:
        failed = await world.ended(request.instance_uuid, BuildState.FAILED)
        refused = await world.ended(request.instance_uuid, BuildState.REFUSED)
        assert (failed.code, refused.code, refused.sequence) == ("claim.stranded", "claim.stranded", 0)
    assert set(await world.used()) == {host}
    assert BuildState.DELETED not in world.states(request.instance_uuid)


async def test_a_delete_of_a_request_that_ended_before_any_look_up_reaches_the_cell(world: World) -> None:
    """Its flavor is gone."""
    (host,) = await world.scheduler_and_hosts(1, CONFIG, on="c1", **ROOM_FOR_ONE)
    request = world.request(host="c1-0")
    await world.active(request)
    await forget(world, request.instance_uuid)
    await unannounce(world, host)
    await world.ask(structs.replace(request, flavor="no.such"))
    assert (await world.ended(request.instance_uuid)).code == "flavor.unknown"
    await world.delete(request)
    ((cell, delete),) = await until(lambda: world.deletes)
    assert (cell, delete.instance_uuid, delete.begun) == ("c1", request.instance_uuid, True)
    assert host in await world.used()


async def test_each_delete_is_refused_while_it_is_not_known_which_cell_has_the_instance(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host was reported over the API bus and is not announced. Later it is, and the delete goes to its cell."""
    monkeypatch.setattr(requests, "RETRIES", 1)
    request, host = await running(world, API)
    await world.stop("s1")
    announced = world.hosts["c1"].pop(host)
    await world.scheduler("s2", structs.replace(CONFIG, move_query_s=0.05))
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
    ((cell, _),) = await until(lambda: world.deletes)
    assert cell == "c1" and host in await world.used()


async def test_a_delete_reaches_the_cell_that_holds_a_later_attempt(world: World) -> None:
    """The cell had taken an alternate before its scheduler's database was set back."""
    request, host = await running(world)
    await world.sql("UPDATE placement.consumers SET attempt = 2 WHERE uuid = $1", request.instance_uuid)
    delete = DeleteRequest(instance_uuid=request.instance_uuid, project_id=request.project_id)
    await world.ask(request, delete)  # one batch
    ((cell, command),) = await until(lambda: world.deletes)
    assert (cell, command.instance_uuid) == ("c1", request.instance_uuid)
    assert set(await world.used()) == {host}


async def test_a_delete_of_a_failed_build_leaves_the_allocation_of_another_client(world: World) -> None:
    """It has no attempt."""
    request, host = await running(world)
    await world.sql("UPDATE placement.consumers SET attempt = 0 WHERE uuid = $1", request.instance_uuid)
    await world.ask(request)
    assert (await world.ended(request.instance_uuid)).code == "claim.consumer_changed"
    await world.delete(request)
    await world.ended(request.instance_uuid, BuildState.DELETED)
    assert world.deletes == [] and set(await world.used()) == {host}


async def test_a_copy_leaves_the_claim_of_the_copy_that_came_on_record_before_it_to_its_cell(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cell has the build, and its claim is by the run on record. That it was not dispatched, its cell proves."""
    monkeypatch.setattr(requests, "RETRIES", 1)
    writing = Gate(monkeypatch, placing, "write_decided")
    (host,) = await world.scheduler_and_hosts(1, CONFIG, on="c1", **ROOM_FOR_ONE)
    request = await world.requested()
    await writing.wait()
    await world.kill("s1")
    del world.hosts["c1"][host]
    await world.scheduler("s2", CONFIG)
    await world.add_hosts("c2", 1, **ROOM_FOR_ONE)
    assert await world.queried(request) == "c1"
    assert set(await world.used()) == {host}


@pytest.mark.parametrize("retries", [requests.RETRIES, 0])
async def test_a_gang_that_is_short_releases_no_older_claim_of_its_members(
    world: World, monkeypatch: pytest.MonkeyPatch, retries: int
) -> None:
    """One member had failed before the restore; its host is taken."""
    monkeypatch.setattr(requests, "RETRIES", retries)
    hosts = await world.scheduler_and_hosts(2, CONFIG, on="c1", **ROOM_FOR_ONE)
    request = world.request(count=2)
    first, second = member_uuids(request)
    await world.ask(request)
    await world.ended(first, BuildState.SCHEDULED)
    name = (await world.ended(second, BuildState.SCHEDULED)).host
    await world.answer(Release(consumer=second), ReleaseResult)
    free = hosts[0] if name == "c1-0" else hosts[1]
    await fill(world, free)
    await forget(world, first, second)
    await world.ask(request)
    assert await world.queried(request) == "c1"
    await world.ended(second)
    assert set(await world.used()) == set(hosts)
    await world.delete(world.request(instance_uuid=first))
    ((cell, delete),) = await until(lambda: world.deletes)
    assert (cell, delete.instance_uuid) == ("c1", first)


# --- A request that comes so late that the record of it could be gone: nothing is built twice.


DAY_S = 86_400.0
REQUESTS = "scheduler.requests"
RETAINING = SchedulerConfig(hosts_warmup_s=0.001, ended_retention_s=DAY_S)


class Yesterdays(SystemClock):
    """A clock that is two days slow: what it stamps was sent two days ago."""

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
async def test_a_late_copy_of_a_forgotten_build_builds_nothing(
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

    service, _, _ = world.services["s1"]
    store = PostgresBuilds(world.environment("gardener").database("scheduler"))
    await store.open()
    assert await purge(store, world.clock.time() + 1, 10) == 1
    await store.close()
    assert await world.show(request.instance_uuid) is None

    await bring(late, request)
    refused = await world.ended(request.instance_uuid, BuildState.REFUSED)
    assert (refused.code, len(world.builds), service.not_ready()) == ("request.too_old", 1, [])


async def test_a_late_copy_of_what_lives_is_a_repeat(world: World, late: Bus) -> None:
    await world.scheduler_and_hosts(1, RETAINING)
    request, marker = world.request(), world.request(flavor="no such flavor")
    await world.ask(request)
    await until(lambda: len(world.builds) == 1)
    await late.publish(request)
    await world.ask(marker)  # behind it on the same queue
    await world.ended(marker.instance_uuid, BuildState.REFUSED)
    assert "refused" not in world.states(request.instance_uuid) and len(world.builds) == 1


async def test_an_old_request_that_is_on_record_undecided_is_carried_out(
    world: World, late: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its scheduler died before it decided, and no scheduler ran for days: it was accepted, so it is built."""
    writing = Gate(monkeypatch, placing, "write_decided")
    await world.scheduler_and_hosts(1, SchedulerConfig(hosts_warmup_s=0.001, ended_retention_s=30 * DAY_S))
    request = world.request()
    await late.publish(request)
    await writing.wait()
    await world.kill("s1")
    await world.scheduler("s2", RETAINING)
    await until(lambda: len(world.builds) == 1)
    assert (await world.ended(request.instance_uuid, BuildState.SCHEDULED)).code == ""
