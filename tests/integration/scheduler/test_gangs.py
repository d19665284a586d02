"""Requests for several machines that start together or not at all, from the message to the book."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import asyncpg
import pytest
from msgspec import structs

from bus.contracts.build import (
    BuildAccepted,
    BuildEvent,
    BuildPage,
    BuildQuery,
    BuildRequest,
    BuildState,
    member_uuids,
)
from tests.integration.scheduler.world import World

# --- Requests for several machines that start together or not at all, from the message to the book.


pytestmark = pytest.mark.postgres
ENDS = (BuildState.SCHEDULED, BuildState.FAILED, BuildState.REFUSED, BuildState.DELETED)
ROOM_FOR = {"VCPU": 1, "MEMORY_MB": 2048, "DISK_GB": 20}  # of one m1.small


def room_for(machines: int) -> dict[str, int]:
    return {name: machines * amount for name, amount in ROOM_FOR.items()}


async def ends(world: World, request: BuildRequest) -> list[BuildEvent]:
    """Of each member whether it was scheduled, or how it ended."""
    return [await world.ended(uuid, *ENDS) for uuid in member_uuids(request)]


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


async def test_a_member_that_was_deleted_is_not_waited_for(world: World) -> None:
    await world.scheduler_and_hosts(1, **room_for(2))
    request = world.request(count=3)
    third = structs.replace(request, instance_uuid=member_uuids(request)[2], count=1)
    await world.delete(third)
    await world.ended(third.instance_uuid, BuildState.DELETED, BuildState.REFUSED)
    await world.ask(request)
    states = [await world.ended(uuid, *ENDS) for uuid in member_uuids(request)[:2]]
    assert codes(states) == {"scheduled": 2}


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
