"""A whole scheduler against the real resource book: what it dispatches, what it publishes, what it leaves behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from bus.bus import API
from bus.contracts.build import (
    BuildAccepted,
    BuildRequest,
    BuildState,
    DeleteRequest,
    HostsPage,
    HostsQuery,
)
from bus.contracts.queues import BY_QUEUE, DEAD_LETTERS
from bus.faults import DatabaseUnavailable, RequestRefused
from bus.persistence.database import Database
from scheduler_worker import announcements, metrics
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.placement import PlacementRequest
from scheduler_worker.placing import Placer
from scheduler_worker.store.port import OptimisticBuildUnit
from tests.integration.scheduler.world import World
from tests.kit.waiting import PATIENCE_S, until

pytestmark = pytest.mark.postgres


def world_delete(request: BuildRequest) -> DeleteRequest:
    return DeleteRequest(instance_uuid=request.instance_uuid, project_id=request.project_id)


async def test_a_request_is_claimed_dispatched_and_announced(world: World) -> None:
    hosts = await world.scheduler_and_hosts(3)
    request = await world.requested("m1.small")
    await until(lambda: world.builds)
    cell, build = world.builds[0]
    assert cell == "c1" and build.spec.instance_uuid == request.instance_uuid
    assert [s.host_uuid in hosts for s in build.selections] == [True] * 3
    assert len({s.host_uuid for s in build.selections}) == 3
    assert {s.service for s in build.selections} == {"compute-c1"}
    scheduled = await world.ended(request.instance_uuid, BuildState.SCHEDULED)
    assert scheduled.host == build.selections[0].host and not scheduled.terminal
    # Only the selected host is claimed; alternates are not.
    assert await world.used() == {build.selections[0].host_uuid: {"VCPU": 1, "MEMORY_MB": 2048, "DISK_GB": 20}}
    assert build.selections[0].allocations == {
        build.selections[0].host_uuid: {"VCPU": 1, "MEMORY_MB": 2048, "DISK_GB": 20}
    }
    await world.announced("c1", request, BuildState.BUILDING, 10, host=scheduled.host, attempt=1)
    await world.announced("c1", request, BuildState.ACTIVE, 11, terminal=True, host=scheduled.host, attempt=1)
    active = await world.ended(request.instance_uuid)
    assert active.state is BuildState.ACTIVE and active.cell == "c1"
    # A state that the next one overtook is not published; which ones that were depends on what is quicker.
    assert world.states(request.instance_uuid)[-2:] in (["scheduled", "active"], ["building", "active"])
    record = await world.show(request.instance_uuid)
    assert record is not None and record.state is BuildState.ACTIVE and record.host == scheduled.host
    assert [line.what for line in record.timeline] == [
        "requested", "chosen", "claimed", "dispatched", "building", "active",
    ]  # fmt: skip


async def test_a_late_or_repeated_event_is_in_the_timeline_once_and_in_its_place(world: World) -> None:
    """Two schedulers share the announcements, so that one may overtake another; the stream stays in order."""
    await world.scheduler_and_hosts(1)
    request = await world.requested()
    await until(lambda: world.builds)
    started = world.builds[0][1].requested_at + 100
    await world.announced("c1", request, BuildState.ACTIVE, 11, terminal=True, attempt=1, at=started + 1)
    await world.ended(request.instance_uuid)
    for _ in range(2):
        await world.announced("c1", request, BuildState.BUILDING, 10, attempt=1, at=started)

    async def answer() -> list[str]:
        record = await world.show(request.instance_uuid)
        assert record is not None and record.state is BuildState.ACTIVE
        return [line.what for line in record.timeline]

    async with asyncio.timeout(PATIENCE_S):
        whole = ["requested", "chosen", "claimed", "dispatched", "building", "active"]
        while await answer() != whole:  # noqa: ASYNC110  (a record is read; nothing announces it)
            await asyncio.sleep(0.005)
    assert {"accepted", "scheduled"} >= set(world.states(request.instance_uuid)[:-1])
    assert world.states(request.instance_uuid)[-1] == "active"


async def test_a_loss_that_overtakes_the_end_of_its_request_waits_for_it(world: World) -> None:
    """Seed 61174 at d0562af: a database that died forgot `active`, and clients had `failed` as a second end."""
    await world.scheduler_and_hosts(1)
    request = await world.requested()
    await until(lambda: world.builds)
    await world.announced("c1", request, BuildState.FAILED, 12, attempt=1, code="instance.lost")
    await world.announced("c1", request, BuildState.ACTIVE, 11, terminal=True, attempt=1)
    await until(lambda: "failed" in world.states(request.instance_uuid))
    ends = [(e.state, e.terminal) for e in world.events if e.sequence > 2]
    assert ends == [(BuildState.ACTIVE, True), (BuildState.FAILED, False)]


async def test_a_loss_whose_request_has_no_other_end_ends_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `active` is a dead letter, or older than the scheduler's backup."""
    monkeypatch.setattr(announcements, "MAX_EARLY", 1)
    await world.scheduler_and_hosts(1)
    request = await world.requested()
    await until(lambda: world.builds)
    await world.announced("c1", request, BuildState.FAILED, 12, attempt=1, code="instance.lost")
    assert (await world.ended(request.instance_uuid, BuildState.FAILED)).terminal


async def test_a_decision_keeps_the_scores_of_its_host_and_its_alternates(world: World) -> None:
    await world.scheduler_and_hosts(2)
    await world.add_hosts("c1", 1, VCPU=16, MEMORY_MB=16384, DISK_GB=500)
    request = await world.requested()
    answer = await world.ended(request.instance_uuid, BuildState.SCHEDULED)
    record = await world.show(request.instance_uuid)
    assert record is not None
    (scores,) = (line.scores for line in record.timeline if line.what == "chosen")
    assert scores[0].host == answer.host and len(scores) == 3
    assert scores[0].weights["ram"] == 1.0 and scores[2].host == "c1-2" and scores[2].weights["ram"] == 0.5


async def test_the_same_request_twice_builds_once_and_other_content_is_refused(world: World) -> None:
    await world.scheduler_and_hosts(2)
    request = world.request()
    api = world.buses[API]
    await api.request(request, BuildAccepted, timeout_s=PATIENCE_S)
    await api.request(request, BuildAccepted, timeout_s=PATIENCE_S)
    with pytest.raises(RequestRefused) as refused:
        await api.request(
            world.request("m1.large", instance_uuid=request.instance_uuid), BuildAccepted, timeout_s=PATIENCE_S
        )
    assert refused.value.code == "request.duplicate"
    await until(lambda: world.builds)
    # Several copies in one batch too, and in the hands of two schedulers.
    await world.scheduler("s2")
    again = world.request()
    await world.ask(*[again] * 20)
    await world.ended(again.instance_uuid, BuildState.SCHEDULED)
    last = await world.scheduled()
    await until(lambda: len(world.builds) >= 3)  # on the cell's bus, which the API's events do not wait for
    built = Counter(build.spec.instance_uuid for _, build in world.builds)
    assert built == {request.instance_uuid: 1, again.instance_uuid: 1, last.instance_uuid: 1}
    answer = [event for event in world.events if event.instance_uuid == request.instance_uuid and event.code]
    assert [(event.code, event.terminal, event.sequence) for event in answer] == [("request.duplicate", True, 0)]


async def test_a_uuid_on_record_with_other_content_is_refused_on_the_event_stream(world: World) -> None:
    """No client waits for a reply: the event is all that it receives."""
    await world.scheduler_and_hosts(2)
    first = await world.scheduled()
    await world.ask(world.request("m1.large", instance_uuid=first.instance_uuid))
    await until(lambda: [e for e in world.events if e.code == "request.duplicate"])
    duplicate = world.request()
    await world.ask(duplicate, replace(duplicate, name="other"))  # in one batch
    await until(lambda: [e for e in world.events if e.instance_uuid == duplicate.instance_uuid and e.code])
    transport = world.buses[API].transport
    assert await transport.depth(DEAD_LETTERS) == 0


async def test_two_schedulers_fill_few_hosts_without_overcommitting(world: World) -> None:
    await world.add_hosts("c1", 4, CUSTOM_BAREMETAL_GOLD=1)
    await world.add_hosts("c2", 4, CUSTOM_BAREMETAL_GOLD=1)
    await world.scheduler("s1")
    await world.scheduler("s2")
    requests = [world.request("bm.gold") for _ in range(20)]
    await world.ask(*requests)
    ends = [await world.ended(request.instance_uuid, BuildState.SCHEDULED, BuildState.FAILED) for request in requests]
    assert Counter(end.state.value for end in ends) == {"scheduled": 8, "failed": 12}
    assert {end.code for end in ends if end.state is BuildState.FAILED} == {"no_valid_host"}
    await until(lambda: len(world.builds) == 8)
    taken = [build.selections[0].host_uuid for _, build in world.builds]
    assert len(set(taken)) == 8
    assert await world.used() == {uuid: {"CUSTOM_BAREMETAL_GOLD": 1} for uuid in taken}
    for cell, build in world.builds:
        assert all(selection.host.startswith(cell) for selection in build.selections)  # same cell


async def test_a_shape_that_changed_is_folded_in_and_the_same_host_claimed_again(world: World) -> None:
    service = await world.scheduler()
    (uuid,) = await world.add_hosts("c1", 1)
    await world.scheduled()
    # The shape moves while the replica cannot receive it: hold its next decision until the book has moved on.
    requests = [world.request("m1.tiny") for _ in range(10)]
    report = world.report(uuid, "c1-0", {"VCPU": 20, "MEMORY_MB": 32768, "DISK_GB": 500})
    await asyncio.gather(report, world.ask(*requests))
    for request in requests:
        await world.ended(request.instance_uuid, BuildState.SCHEDULED)
    assert (await world.used())[uuid]["VCPU"] == 11
    assert service.not_ready() == []


async def test_delete_before_after_and_of_nothing(world: World) -> None:
    await world.scheduler_and_hosts(2)
    # In one batch with its build: never dispatched, claim freed, one terminal event.
    request = world.request()
    await world.buses[API].publish_all([(request, ""), (world_delete(request), ""), (world_delete(request), "")])
    answer = await world.ended(request.instance_uuid, BuildState.DELETED)
    assert answer.terminal
    assert world.builds == [] or world.deletes or await world.used() == {}
    # After dispatch: the cell's business; its `deleted` ends it.
    built = await world.requested()
    await until(lambda: any(b.spec.instance_uuid == built.instance_uuid for _, b in world.builds))
    await world.announced("c1", built, BuildState.ACTIVE, 11, terminal=True)
    await world.ended(built.instance_uuid, BuildState.ACTIVE)
    await world.delete(built)
    await until(lambda: any(d.instance_uuid == built.instance_uuid for _, d in world.deletes))
    await world.announced("c1", built, BuildState.DELETED, 13, terminal=True)
    await world.ended(built.instance_uuid, BuildState.DELETED)
    await world.delete(built)
    # Late and repeated announcements change nothing.
    await world.announced("c1", built, BuildState.ACTIVE, 11, terminal=True)
    await world.announced("c1", built, BuildState.DELETED, 13, terminal=True)
    # Unknown, and another project's.
    nothing = world.request()
    await world.delete(nothing)
    refused = await world.ended(nothing.instance_uuid)
    assert (refused.state, refused.code) == (BuildState.REFUSED, "instance.unknown")
    with pytest.raises(RequestRefused) as other:
        await world.answer(
            type(world_delete(built))(instance_uuid=built.instance_uuid, project_id="other"), BuildAccepted
        )
    assert other.value.code == "instance.unknown"
    terminals = [e.state.value for e in world.events if e.instance_uuid == built.instance_uuid and e.terminal]
    assert terminals == ["active", "deleted"]
    record = await world.show(built.instance_uuid)
    assert record is not None and record.state is BuildState.DELETED


async def test_a_build_whose_delete_was_answered_with_no_such_instance_is_never_built(world: World) -> None:
    """It was behind the delete in another scheduler's hands, or forgotten with a database (simulation, seed 89)."""
    await world.scheduler_and_hosts(1)
    request, another = world.request(), world.request()
    await world.delete(request)
    assert (await world.ended(request.instance_uuid)).code == "instance.unknown"
    await world.answer(request, BuildAccepted)
    with pytest.raises(RequestRefused, match="no such instance"):
        await world.answer(world_delete(request), BuildAccepted)
    await world.ask(another)
    await until(lambda: world.builds)
    assert [build.spec.instance_uuid for _, build in world.builds] == [another.instance_uuid]
    assert {event.state for event in world.events if event.instance_uuid == request.instance_uuid} == {
        BuildState.REFUSED
    }
    record = await world.show(request.instance_uuid)
    assert record is not None and (record.state, record.code) == (BuildState.DELETED, "instance.unknown")


async def test_an_accepted_request_survives_its_scheduler(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the claim and the record of it: the next scheduler adopts the claim, even of the only host."""
    await world.add_hosts("c1", 1, CUSTOM_BAREMETAL_GOLD=1)
    await world.scheduler("s1")
    claimed = asyncio.Event()

    async def dies(*_: object) -> set[str]:
        claimed.set()
        await asyncio.Event().wait()  # until the process dies
        return set()

    request = world.request("bm.gold")
    with monkeypatch.context() as patched:
        patched.setattr(OptimisticBuildUnit, "write_decisions", dies)
        await world.ask(request)
        async with asyncio.timeout(PATIENCE_S):
            await claimed.wait()
        await world.kill("s1")
    (held,) = await world.used()
    assert world.builds == []
    await world.scheduler("s2")
    await world.ended(request.instance_uuid, BuildState.SCHEDULED)
    await until(lambda: world.builds)
    ((_, build),) = world.builds
    assert build.selections[0].host_uuid == held and build.selections[0].allocations == {
        held: {"CUSTOM_BAREMETAL_GOLD": 1}
    }
    assert await world.used() == {held: {"CUSTOM_BAREMETAL_GOLD": 1}}


async def test_a_request_that_no_scheduler_comes_to_an_end_with_still_gets_its_terminal_event(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each scheduler that chooses a host for it dies; the broker would give it up, and its client receive nothing."""
    await world.add_hosts("c1", 1, CUSTOM_BAREMETAL_GOLD=1)
    request, other = world.request("bm.gold"), world.request("bm.gold")
    died = asyncio.Event()
    place = Placer.place

    async def dies(placer: Placer, asking: Sequence[PlacementRequest]) -> object:
        if any(one.request.instance_uuid == request.instance_uuid for one in asking):
            died.set()
            await asyncio.Event().wait()  # until the process dies
        return await place(placer, asking)

    with monkeypatch.context() as patched:
        patched.setattr(Placer, "place", dies)
        await world.scheduler("s0")
        await world.ask(request)
        for number in range(1, BY_QUEUE["scheduler.requests"].delivery_limit):
            await until(lambda: died.is_set() or any(one.terminal for one in world.events))
            if not died.is_set():
                break
            died.clear()
            await world.kill(f"s{number - 1}")
            await world.scheduler(f"s{number}")
        failed = await world.ended(request.instance_uuid, BuildState.FAILED)
        assert (failed.code, failed.terminal) == ("delivery.exhausted", True)
        assert await world.used() == {}
        await world.ask(other)
        await world.ended(other.instance_uuid, BuildState.SCHEDULED)
    ends = [one for one in world.events if one.terminal and one.instance_uuid == request.instance_uuid]
    assert len(ends) == 1


async def test_an_unavailable_placement_is_waited_for_and_never_no_host(world: World) -> None:
    await world.scheduler_and_hosts(1, SchedulerConfig(claim_timeout_s=0.5))
    await world.scheduled()
    await world.kill("p1")
    request = await world.requested()
    await world.ended(request.instance_uuid, BuildState.ACCEPTED)
    unavailable = metrics.CLAIMS.labels("request.timeout")
    before = unavailable._value.get()
    await until(lambda: unavailable._value.get() > before + 1)
    assert world.states(request.instance_uuid) == ["accepted"]
    await world.placement("p2")
    assert (await world.ended(request.instance_uuid, BuildState.SCHEDULED, BuildState.FAILED)).state == "scheduled"


async def test_hosts_query_and_a_foreign_cell_is_ignored(world: World) -> None:
    (uuid,) = await world.scheduler_and_hosts(1)
    request = await world.scheduled()
    page = await world.answer(HostsQuery(), HostsPage)
    (host,) = page.hosts
    assert (host.uuid, host.cell, host.service, host.up) == (uuid, "c1", "compute-c1", True)
    assert host.resources["VCPU"] == (1.0, 16.0)
    await world.announced("c2", request, BuildState.FAILED, 99, terminal=True)
    await world.announced("c1", request, BuildState.BUILDING, 10)
    await world.ended(request.instance_uuid, BuildState.BUILDING)
    assert "failed" not in world.states(request.instance_uuid)


async def test_a_delete_seen_while_scheduling_frees_the_claim(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claimed, then deleted before the decision is written: its cell, which is told nothing else, ends it."""
    await world.scheduler("s1")
    await world.scheduler("s2")
    await world.add_hosts("c1", 2)
    claimed, deleted = asyncio.Event(), asyncio.Event()
    decide = OptimisticBuildUnit.write_decisions

    async def later(self: OptimisticBuildUnit, *arguments: Any) -> set[str]:
        claimed.set()
        await deleted.wait()
        return await decide(self, *arguments)

    monkeypatch.setattr(OptimisticBuildUnit, "write_decisions", later)
    request = await world.requested()
    async with asyncio.timeout(PATIENCE_S):
        await claimed.wait()
    assert len(await world.used()) == 1
    await world.answer(world_delete(request), BuildAccepted)
    deleted.set()
    ((cell, delete),) = await until(lambda: world.deletes)
    assert (cell, delete.instance_uuid, delete.begun) == ("c1", request.instance_uuid, True)
    await world.release(request.instance_uuid)
    await world.announced("c1", request, BuildState.DELETED, 12, terminal=True)
    assert (await world.ended(request.instance_uuid)).state is BuildState.DELETED
    assert await world.used() == {} and world.builds == []
    # The same request again changes nothing.
    await world.answer(request, BuildAccepted)
    assert await world.used() == {} and world.builds == []


async def test_a_request_that_the_database_forgets_while_it_is_claimed_is_recorded_anew(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record waits for no disk. Gone at the decision it was taken for deleted: a boot lost, its claim leaked."""
    await world.scheduler_and_hosts(2)
    decide, crashes = OptimisticBuildUnit.write_decisions, iter(("one",))

    async def after_a_crash(self: OptimisticBuildUnit, *arguments: Any) -> set[str]:
        if next(crashes, None) is not None:
            database = Database(world.url, "scheduler")
            async with database.raw() as connection:
                await connection.execute("DELETE FROM build_requests; DELETE FROM outbox")
            await database.close()
        return await decide(self, *arguments)

    monkeypatch.setattr(OptimisticBuildUnit, "write_decisions", after_a_crash)
    request = await world.scheduled()
    assert [build.spec.instance_uuid for _, build in world.builds] == [request.instance_uuid]
    assert list(await world.used()) == [world.builds[0][1].selections[0].host_uuid]


async def test_nothing_is_lost_or_doubled_when_connections_break(world: World) -> None:
    """Every accepted request is dispatched once, by whichever scheduler; what is claimed is what is dispatched."""
    await world.scheduler("s1", SchedulerConfig(claim_timeout_s=0.5, batch=8))
    await world.scheduler("s2", SchedulerConfig(claim_timeout_s=0.5, batch=8))
    await world.add_hosts("c1", 5, VCPU=64, MEMORY_MB=262_144, DISK_GB=4000)
    await world.add_hosts("c2", 5, VCPU=64, MEMORY_MB=262_144, DISK_GB=4000)
    requests = [world.request("m1.small") for _ in range(200)]
    asking = asyncio.gather(*(world.ask(request) for request in requests), return_exceptions=True)
    await until(lambda: len(world.builds) > 10)
    world.brokers[API].drop_connections()
    await until(lambda: len(world.builds) > 60)
    world.brokers["c1"].drop_connections()
    world.brokers[API].drop_connections()
    # A client whose publish failed requests again.
    for request, error in zip(requests, await asking, strict=True):
        if error is not None:
            await world.ask(request)
    wanted = {request.instance_uuid for request in requests}
    await until(lambda: {build.spec.instance_uuid for _, build in world.builds} == wanted)
    # The outbox may repeat a command; it never announces two results.
    commands: dict[str, set[tuple[str, str]]] = {}
    for cell, build in world.builds:
        commands.setdefault(build.spec.instance_uuid, set()).add((cell, build.selections[0].host_uuid))
    assert all(len(places) == 1 for places in commands.values())
    taken = Counter(host for places in commands.values() for _, host in places)
    assert {uuid: used["VCPU"] for uuid, used in (await world.used()).items()} == dict(taken)


async def test_an_unavailable_database_is_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.scheduler_and_hosts(2)
    failures = iter(range(3))
    insert = OptimisticBuildUnit.insert

    async def unavailable(self: OptimisticBuildUnit, *arguments: Any) -> set[str]:
        if next(failures, None) is not None:
            raise DatabaseUnavailable("gone for a moment")
        return await insert(self, *arguments)

    monkeypatch.setattr(OptimisticBuildUnit, "insert", unavailable)
    request = await world.scheduled()
    assert world.states(request.instance_uuid) in (["accepted", "scheduled"], ["scheduled"])
    assert next(failures, None) is None
