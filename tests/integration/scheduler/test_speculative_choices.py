"""A few requests choose their hosts while they are put on record: nothing stays assumed that was not to be built."""

from __future__ import annotations

from typing import Any

import pytest

from bus.contracts.build import BuildState
from bus.faults import DatabaseUnavailable
from scheduler_worker.engine import RequestRecorder
from scheduler_worker.placing import Placer
from tests.integration.scheduler.world import World

pytestmark = pytest.mark.postgres


async def test_a_repeat_leaves_its_choice(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same request as a new message: known only when the record's statement comes back."""
    chosen: list[str] = []
    choose = Placer.choose_speculatively

    def recorded(self: Placer, builds: Any) -> Any:
        found = choose(self, builds)
        chosen.extend(found)
        return found

    monkeypatch.setattr(Placer, "choose_speculatively", recorded)
    await world.scheduler()
    await world.add_hosts("c1", 2)
    book, request = world.replicas["s1"], world.request()
    for _ in range(2):
        await world.ask(request)
        await world.ended(request.instance_uuid, BuildState.SCHEDULED)
        await world.eventually(lambda: not list(book.assumed_keys()))
    await world.eventually(lambda: len(chosen) == 2)
    other = world.request()
    await world.ask(other)  # after the repeat has been settled
    await world.ended(other.instance_uuid, BuildState.SCHEDULED)
    await world.eventually(lambda: not list(book.assumed_keys()))
    assert chosen == [request.instance_uuid, request.instance_uuid, other.instance_uuid]
    assert [build.spec.instance_uuid for _, build in world.builds] == [request.instance_uuid, other.instance_uuid]


async def test_a_record_that_fails_leaves_its_choice(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.scheduler()
    await world.add_hosts("c1", 2)
    book, request = world.replicas["s1"], world.request()
    record, seen = RequestRecorder.record, list[list[str]]()

    async def fail_first(self: Any, builds: Any) -> Any:
        seen.append(list(book.assumed_keys()))
        if len(seen) == 1:
            await record(self, builds[:0])  # the database is asked, as it is otherwise
            raise DatabaseUnavailable("it went away")
        return await record(self, builds)

    monkeypatch.setattr(RequestRecorder, "record", fail_first)
    await world.ask(request)
    await world.ended(request.instance_uuid, BuildState.SCHEDULED)
    assert seen == [[], []], "assumed while the database was unavailable"
    await world.eventually(lambda: not list(book.assumed_keys()))
