"""A request of another instance under the id of an evacuation."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import pytest

from bus.clock import SystemClock
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.moves import MoveKind, MoveState
from bus.contracts.operations import EvacuationPolicy
from scheduler_worker.domain.builds import NewBuild, RecordedBuild
from scheduler_worker.domain.fences import MAX_TRIES, FencedHost
from scheduler_worker.domain.recorded_moves import RecordedMove
from scheduler_worker.keepers import EvacuationTask
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildTable
from tests.kit.sent import Sent
from tests.unit.scheduler.hosts import Hosts

MINE, OTHER = (f"{n}0000000-0000-4000-8000-000000000000" for n in "ab")
HOST = "10000000-0000-4000-8000-000000000000"


async def test_a_foreign_request_under_an_evacuations_id_ends_no_pass() -> None:
    store = MemoryBuilds(MemoryBuildTable(SystemClock()).session())
    store.publish_through(Sent())  # type: ignore[arg-type]
    request = BuildRequest(
        instance_uuid=MINE, flavor="m1.small", project_id="p", on_host_failure=EvacuationPolicy.RESTART
    )
    build = RecordedBuild(
        instance_uuid=MINE,
        project_id="p",
        state=BuildState.ACTIVE,
        sequence=9,
        terminal=True,
        cell="c1",
        host="h",
        host_uuid=HOST,
    )
    async with store.unit() as unit:
        await unit.insert([NewBuild(request=request, build=build)], 1.0)
    fenced = FencedHost(HOST, "h", 7)
    # What a client publishes before the fence: refused (no such instance), and on record as terminal all the same.
    squatter = RecordedMove(
        request_id=fenced.request_id(MINE, 0),
        instance_uuid=OTHER,
        project_id="p",
        kind=MoveKind.STOP,
        digest=b"x",
        state=MoveState.REFUSED,
        sequence=3,
        terminal=True,
        code="instance.unknown",
        created_at=1.0,
    )
    async with store.operation() as unit:
        await unit.insert_moves([squatter], 1.0)
    task = EvacuationTask(
        store, SimpleNamespace(), Hosts([]).selector, SimpleNamespace(), clock=SystemClock(), rng=random.Random(1)
    )  # type: ignore[arg-type]
    counted = 0
    real = task._count_failure

    def count(*args: object) -> None:
        nonlocal counted
        counted += 1
        if counted > 10 * MAX_TRIES:
            pytest.fail("the pass does not end: the same request is looked up again and again")
        real(*args)  # type: ignore[arg-type]

    task._count_failure = count  # type: ignore[method-assign]
    (request,) = await asyncio.wait_for(task._open_requests([MINE], {HOST: fenced}), 20)
    assert request.request_id == fenced.request_id(MINE, 1)


async def test_an_instance_that_is_busy_uses_up_no_try_of_its_evacuation() -> None:
    """Of one whose former source was silent 24 were refused, and then none was made any more."""
    store, fenced = MemoryBuilds(MemoryBuildTable(SystemClock()).session()), FencedHost(HOST, "h", 7)
    task = EvacuationTask(
        store, SimpleNamespace(), Hosts([]).selector, SimpleNamespace(), clock=SystemClock(), rng=random.Random(1)
    )  # type: ignore[arg-type]
    for number in range(40):
        task._count_failure(fenced, MINE, fenced.request_id(MINE, number), "instance.busy")
    assert task._tried[fenced, MINE] == (40, 0)
    for number in range(MAX_TRIES):
        task._count_failure(fenced, MINE, fenced.request_id(MINE, number), "no_valid_host")
    assert task._tried[fenced, MINE] == (40 + MAX_TRIES, MAX_TRIES)
