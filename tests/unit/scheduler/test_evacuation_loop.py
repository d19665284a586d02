"""A request of another instance under the id of an evacuation, or of a drain's move."""

from __future__ import annotations

from typing import Any

import pytest

from bus.clock import SystemClock
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.moves import MoveKind, MoveState
from bus.contracts.operations import EvacuationPolicy
from scheduler_worker.domain.builds import NewBuild, RecordedBuild
from scheduler_worker.domain.drains import BegunMoves, DrainedHost, HeldInstance, evacuating, next_moves, request_id
from scheduler_worker.domain.recorded_moves import MoveContext, RecordedMove
from scheduler_worker.emptying import HostEmptier
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildTable
from tests.kit.sent import Sent

MINE, OTHER, HOST, FENCE = (f"{n}0000000-0000-4000-8000-000000000000" for n in "ab1f")


@pytest.mark.parametrize("squatted", [0, 1, 3])
async def test_a_foreign_request_under_an_evacuations_id_ends_no_pass(squatted: int) -> None:
    """What a client publishes before the fence: refused (no such instance), and on record as terminal all the same."""
    store: Any = MemoryBuilds(MemoryBuildTable(SystemClock()).session())
    store.publish_through(Sent())
    request = BuildRequest(
        instance_uuid=MINE, flavor="m1.small", project_id="p", on_host_failure=EvacuationPolicy.RESTART
    )
    build = RecordedBuild(
        instance_uuid=MINE, project_id="p", state=BuildState.ACTIVE, sequence=9, terminal=True, cell="c1", host="h",
        host_uuid=HOST,
    )  # fmt: skip
    async with store.unit() as unit:
        await unit.insert([NewBuild(request=request, build=build)], 1.0)
    ids = [request_id(FENCE, MINE)]
    for _ in range(3):
        ids.append(request_id(FENCE, MINE, ids[-1]))
    squatters = [
        RecordedMove(
            request_id=one, instance_uuid=OTHER, project_id="p", kind=MoveKind.STOP, digest=b"x",
            state=MoveState.REFUSED, sequence=3, terminal=True, code="instance.unknown", created_at=1.0,
        )
        for one in ids[:squatted]
    ]  # fmt: skip
    async with store.operation() as unit:
        await unit.insert_moves(squatters, 1.0)
        assert await unit.ended([MINE], 5) == {}, "those of another instance are none of this one's"
    none: Any = None
    emptier = HostEmptier(store, none, none, none, warmup=none, clock=SystemClock())
    known = MoveContext(build=build, build_request=request)
    held = HeldInstance(instance_uuid=MINE, project_id="p", source=DrainedHost(HOST, "h", drain=FENCE), known=known)
    (move,) = await emptier._free_ids(next_moves(evacuating(1), [held], {}, BegunMoves(), 2.0).moves)
    assert (move.request.request_id, move.request.instance_uuid) == (ids[squatted], MINE)
