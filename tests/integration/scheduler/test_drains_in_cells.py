"""Drains move instances within their cell, also where moves across cells are allowed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.drains import DrainState
from bus.contracts.moves import MoveKind
from tests.integration.scheduler.test_drains import WARM, active, becomes, begin, commanded, plan_of, quick
from tests.integration.scheduler.world import World

pytestmark = pytest.mark.postgres
__all__ = ["quick"]  # the fixture

ACROSS = replace(WARM, moves_across_cells=True)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_worker.domain.drains.pause_s", lambda _failures: 0.01)


async def test_a_cold_drain_moves_no_instance_to_another_cell(world: World) -> None:
    await world.scheduler("s1", ACROSS)
    await world.add_hosts("c1", 1)
    await world.add_hosts("c2", 1)
    (build,) = await active(world, 1, "c1-0")
    (planned,) = (await plan_of(world, "c1-0", kind=MoveKind.MIGRATE)).moves
    assert planned.code == "no_valid_host"
    begun = await begin(world, "c1-0", kind=MoveKind.MIGRATE, force=True)
    ended = await becomes(world, begun, lambda one: commanded(world) or one.state is DrainState.ENDED)
    assert commanded(world) == []
    assert (ended.code, [(one.instance_uuid, one.code) for one in ended.failed]) == (
        "drain.left",
        [(build.instance_uuid, "no_valid_host")],
    )
