"""Requests for several machines that start together or not at all, from the message to the book."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import asyncpg
import pytest
from msgspec import structs

from bus.clock import new_uuid
from bus.contracts.build import (
    BuildAccepted,
    BuildEvent,
    BuildPage,
    BuildQuery,
    BuildRequest,
    BuildState,
    FlavorCount,
    member_uuids,
)
from bus.contracts.feed import SnapshotPage, SnapshotRequest
from bus.contracts.placement import GroupPolicy, Release, ReleaseResult, ServerGroup
from bus.faults import DatabaseUnavailable
from scheduler_worker import placing
from scheduler_worker.claims import BusClaims
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.engine import SchedulingEngine
from tests.integration.scheduler.steps import Gate, cut_request_consumer, fill
from tests.integration.scheduler.world import World
from tests.kit.waiting import until

# --- Requests for several machines that start together or not at all, from the message to the book.


pytestmark = pytest.mark.postgres
ENDS = (BuildState.SCHEDULED, BuildState.FAILED, BuildState.REFUSED, BuildState.DELETED)
ROOM_FOR = {"VCPU": 1, "MEMORY_MB": 2048, "DISK_GB": 20}  # of one m1.small


def room_for(machines: int) -> dict[str, int]:
    return {name: machines * amount for name, amount in ROOM_FOR.items()}


async def ends(world: World, request: BuildRequest) -> list[BuildEvent]:
    """Of each member whether it was scheduled, or how it ended."""
    return [await world.ended(uuid, *ENDS) for uuid in member_uuids(request)]


async def boot(world: World, **fields: object) -> list[BuildEvent]:
    request = await world.requested(**fields)
    return await ends(world, request)


def codes(events: Sequence[BuildEvent]) -> dict[str, int]:
    return dict(Counter(event.code or event.state.value for event in events))


async def test_each_member_is_an_instance_of_its_own(world: World) -> None:
    await world.scheduler_and_hosts(2, **room_for(2))
    await world.add_hosts("c2", 1, **room_for(2))
    request = world.request(count=5, name="web")
    reply = await world.answer(request, BuildAccepted)
    assert reply.instance_uuid == request.instance_uuid and reply.members == member_uuids(request)
    assert codes(await ends(world, request)) == {"scheduled": 5}
    built = {command.spec.instance_uuid: command for _, command in world.builds}
    assert built.keys() == set(reply.members) and len(built) == 5
    assert {command.spec.name for command in built.values()} == {f"web-{number}" for number in range(1, 6)}
    assert sum(len(used) > 0 for used in (await world.used()).values()) == 3
    assert len({cell for cell, _ in world.builds}) == 2, "one gang, two cells"
    page = await world.answer(BuildQuery(gang=request.instance_uuid), BuildPage)
    assert {(one.instance_uuid, one.gang, one.gang_min) for one in page.builds} == {
        (uuid, request.instance_uuid, 5) for uuid in reply.members
    }


async def generations(world: World) -> list[int]:
    """Of every provider; each claim and each release moves one."""
    page = await world.answer(SnapshotRequest(limit=5000), SnapshotPage)
    return [provider.generation for provider in page.providers]


async def test_fewer_than_enough_is_none_and_every_member_has_its_reason(world: World) -> None:
    await world.scheduler_and_hosts(2, **room_for(2))
    before = await generations(world)
    events = await boot(world, count=5)
    assert codes(events) == {"no_valid_host": 1, "gang.incomplete": 4}
    assert all(event.terminal for event in events)
    (incomplete, *_) = [event for event in events if event.code == "gang.incomplete"]
    assert "4 of the 5 members" in incomplete.reason and "5 start together" in incomplete.reason
    assert await generations(world) == before, "nothing was claimed, not even for a moment"
    assert await world.used() == {} and world.builds == []
    assert codes(await boot(world, count=4)) == {"scheduled": 4}


async def test_as_many_as_fit_start_when_they_are_enough(world: World) -> None:
    await world.scheduler_and_hosts(2, **room_for(2))
    assert codes(await boot(world, count=6, min_count=5)) == {"no_valid_host": 2, "gang.incomplete": 4}
    assert codes(await boot(world, count=6, min_count=3)) == {"scheduled": 4, "no_valid_host": 2}


async def test_members_of_several_flavors_start_together(world: World) -> None:
    """The large one has but one place, and the small ones leave it to it though they stand first."""
    await world.scheduler_and_hosts(1, VCPU=2, MEMORY_MB=4096, DISK_GB=40)
    await world.add_hosts("c1", 2, **room_for(1))
    request = await world.requested(count=2, also=(FlavorCount(flavor="m1.medium"),))
    assert codes(await ends(world, request)) == {"scheduled": 3}
    flavors = {command.spec.instance_uuid: command.spec.flavor for _, command in world.builds}
    assert [flavors[uuid] for uuid in member_uuids(request)] == ["m1.small", "m1.small", "m1.medium"]


async def test_quota_counts_all_of_them(world: World) -> None:
    await world.scheduler_and_hosts(2, SchedulerConfig(default_quota={"INSTANCES": 3}))
    assert codes(await boot(world, count=4)) == {"quota.exceeded": 1, "gang.incomplete": 3}
    assert await world.used() == {}
    assert codes(await boot(world, count=5, min_count=2)) == {"scheduled": 3, "quota.exceeded": 2}


async def test_members_keep_apart_from_each_other(world: World) -> None:
    await world.scheduler_and_hosts(3)
    apart = ServerGroup(uuid=new_uuid(world.rng), policy=GroupPolicy.ANTI_AFFINITY)
    events = await boot(world, count=3, server_group=apart)
    assert codes(events) == {"scheduled": 3} and len({event.host for event in events}) == 3
    assert codes(await boot(world, count=2, min_count=1, server_group=apart)) == {"no_valid_host": 2}


async def test_members_that_stay_together_find_the_host_that_takes_all(world: World) -> None:
    """The roomiest by weight is full in another class; the only one with room for all is tried after it."""
    await world.scheduler_and_hosts(4, VCPU=2, MEMORY_MB=65536, DISK_GB=1000)
    await world.add_hosts("c2", 1, **room_for(4))
    together = ServerGroup(uuid=new_uuid(world.rng), policy=GroupPolicy.AFFINITY)
    events = await boot(world, count=4, server_group=together)
    assert codes(events) == {"scheduled": 4} and {event.host for event in events} == {"c2-0"}
    other = ServerGroup(uuid=new_uuid(world.rng), policy=GroupPolicy.AFFINITY)
    events = await boot(world, count=3, min_count=2, server_group=other)
    assert codes(events) == {"scheduled": 2, "no_valid_host": 1} and len({e.host for e in events if e.host}) == 1


async def test_a_repeated_request_changes_nothing_and_another_content_is_refused_whole(world: World) -> None:
    await world.scheduler_and_hosts(2)
    request = world.request(count=3)
    await world.ask(request, request)
    assert codes(await ends(world, request)) == {"scheduled": 3}
    await world.ask(request)
    larger = structs.replace(request, count=5)
    await world.ask(larger)
    clash = await world.ended(request.instance_uuid, BuildState.REFUSED)
    assert clash.code == "request.duplicate"
    await world.scheduled()
    assert len(world.builds) == 4, "three members once, and the last request"
    for uuid in set(member_uuids(larger)) - set(member_uuids(request)):
        assert await world.show(uuid) is None


async def test_a_member_that_was_deleted_is_not_waited_for(world: World) -> None:
    await world.scheduler_and_hosts(1, **room_for(2))
    request = world.request(count=3)
    third = structs.replace(request, instance_uuid=member_uuids(request)[2], count=1)
    await world.delete(third)
    await world.ended(third.instance_uuid, BuildState.DELETED, BuildState.REFUSED)
    await world.ask(request)
    states = [await world.ended(uuid, *ENDS) for uuid in member_uuids(request)[:2]]
    assert codes(states) == {"scheduled": 2}


async def test_what_a_scheduler_claimed_before_it_died_is_found_and_built_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gang's own claims fill the hosts, so that nothing fits any more when the request is delivered again."""
    writing = Gate(monkeypatch, placing, "write_decided")
    await world.scheduler_and_hosts(2, **room_for(2))
    request = await world.requested(count=4)
    await writing.wait()
    held = await world.used()
    await world.kill("s1")
    await world.scheduler("s2")
    assert codes(await ends(world, request)) == {"scheduled": 4}
    assert len(world.builds) == 4 and await world.used() == held


async def test_a_gangs_claim_that_lands_after_the_other_copy_has_failed_holds_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    claiming = Gate(monkeypatch, BusClaims, "submit_gangs")
    (host,) = await world.scheduler_and_hosts(1, SchedulerConfig(hosts_warmup_s=0.001), **room_for(2))
    request = await world.requested(count=2)
    await claiming.wait()
    cut_request_consumer(world)
    other = await fill(world, host)
    await world.scheduler("s2", SchedulerConfig(hosts_warmup_s=0.001))
    assert codes(await ends(world, request)) == {"no_valid_host": 1, "gang.incomplete": 1}
    await world.answer(Release(consumer=other), ReleaseResult)
    claiming.open.set()
    await until(lambda: not list(world.replicas["s1"].assumptions.keys()))
    assert await world.used() == {} and world.builds == []


async def test_a_member_names_to_whom_its_gang_lost(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another client takes one of two places while the gang's claim is on its way; no other host is left."""
    claiming = Gate(monkeypatch, BusClaims, "submit_gangs")
    (host,) = await world.scheduler_and_hosts(1, SchedulerConfig(hosts_warmup_s=0.001), **room_for(2))
    request = await world.requested(count=2)
    await claiming.wait()
    other = await fill(world, host)
    claiming.open.set()
    events = await ends(world, request)
    assert codes(events) == {"no_valid_host": 1, "gang.incomplete": 1}
    shown = [await world.show(event.instance_uuid) for event in events if event.code == "no_valid_host"]
    (lost,) = [line for one in shown if one is not None for line in one.timeline if line.what == "not_claimed"]
    assert (lost.detail, [(one.consumer, one.project_id) for one in lost.holders]) == ("c1-0: full", [(other, "other")])


class Watch:
    """Looks at the book again and again: every look is one snapshot. partial: gangs that were seen in part."""

    def __init__(self, url: str, gangs: Sequence[BuildRequest]) -> None:
        self.looks, self.partial = 0, list[tuple[str, int]]()
        self._url = url
        self._gang_of = {uuid: gang for gang in gangs for uuid in member_uuids(gang)}
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        connection = await asyncpg.connect(self._url)
        try:
            while True:
                await self._look(connection)
        finally:
            await connection.close()

    async def _look(self, connection: asyncpg.Connection) -> None:
        rows = await connection.fetch("SELECT DISTINCT consumer::text FROM placement.allocations")
        held = Counter(self._gang_of[row[0]].instance_uuid for row in rows if row[0] in self._gang_of)
        least = {gang.instance_uuid: gang.min_count or gang.members for gang in self._gang_of.values()}
        self.partial += [(gang, count) for gang, count in held.items() if count < least[gang]]
        self.looks += 1

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def test_eight_schedulers_on_full_hosts_leave_no_partial_gang(world: World) -> None:
    """Room for 12 more machines on hosts that are 95 % full, and gangs of two to five that want 84."""
    for number in range(8):
        await world.scheduler(f"s{number}")
    for cell in ("c1", "c2"):
        await world.add_hosts(cell, 6, **room_for(20))
    fillers = [world.request() for _ in range(228)]
    await world.ask(*fillers)
    for filler in fillers:
        assert (await world.ended(filler.instance_uuid, *ENDS)).state is BuildState.SCHEDULED
    gangs = [world.request(count=2 + at % 4, min_count=2 if at % 4 == 3 else None) for at in range(24)]
    watch = Watch(world.url, gangs)
    await world.ask(*gangs)
    started = [codes(await ends(world, gang)).get("scheduled", 0) for gang in gangs]
    await watch.end()
    assert watch.looks > 0 and watch.partial == []
    assert all(
        count == 0 or count >= (gang.min_count or gang.members) for gang, count in zip(gangs, started, strict=True)
    )
    assert 11 <= sum(started) <= 12, "the smallest gang is of two, so at most one place is left"
    assert len(world.builds) == 228 + sum(started)


async def test_a_record_that_fails_leaves_nothing_assumed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.scheduler_and_hosts(2)
    book, request = world.replicas["s1"], world.request()
    record, seen = SchedulingEngine.record, list[list[str]]()

    async def fail_first(self: Any, builds: Any) -> Any:
        seen.append(list(book.assumptions.keys()))
        if len(seen) == 1:
            raise DatabaseUnavailable("it went away")
        return await record(self, builds)

    monkeypatch.setattr(SchedulingEngine, "record", fail_first)
    await world.ask(request)
    await world.ended(request.instance_uuid, BuildState.SCHEDULED)
    assert seen == [[], []], "assumed while the database was unavailable"
    await until(lambda: not list(book.assumptions.keys()))
