"""Drains move instances within their cell, also where moves across cells are allowed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.clock import new_uuid
from bus.contracts.cell import HostReport
from bus.contracts.drains import DrainState
from bus.contracts.moves import Condition, MoveKind, MoveState
from tests.integration.scheduler.test_drains import (
    AMOUNTS,
    WARM,
    active,
    becomes,
    begin,
    code_of,
    commanded,
    plan_of,
    quick,
    until,
)
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


@pytest.mark.parametrize(
    ("kind", "condition", "code"),
    [
        (MoveKind.SHELVE, Condition.SHELVED, "instance.shelved"),
        (MoveKind.RESCUE, Condition.RESCUED, "instance.rescued"),
        (MoveKind.MIGRATE, Condition.RESIZED, "instance.resized"),
    ],
)
async def test_a_plan_names_what_its_cell_would_refuse_to_move(
    world: World, kind: MoveKind, condition: Condition, code: str
) -> None:
    await world.scheduler("s1", WARM)
    await world.add_hosts("c1", 2)
    (build,) = await active(world, 1, "c1-0")
    move = world.move(build, kind, rescue_password="p" if kind is MoveKind.RESCUE else "")
    await world.ask(move)
    sent = await world.dispatched(move)
    host = "c1-0"
    if sent.selections:
        await world.claim_destination(sent)
        host = sent.selections[0].host
    await world.move_announced("c1", move, MoveState.DONE, 20, terminal=True, condition=condition, host=host)
    await world.moved(move, MoveState.DONE)
    (planned,) = (await plan_of(world, host)).moves
    assert (planned.hosts, planned.code) == ((), code)
    assert await code_of(world, host) == "drain.stuck"


async def test_a_drain_moves_no_instance_of_a_namesake_in_another_cell(world: World) -> None:
    """Also while the host's cell is not known: the record has each instance by the uuid of its host."""
    await world.scheduler("s1", WARM)
    (host,) = await world.add_hosts("c1", 1)
    namesake = new_uuid(world.rng)
    world.hosts["c2"][namesake] = HostReport(uuid=namesake, name="c1-0")
    await world.report(namesake, "c2-namesake", AMOUNTS)
    await world.add_hosts("c2", 1)
    await world.active(world.request(host=namesake), "c2", "c1-0")
    begun = await begin(world, host)
    ended = await until(world, begun, DrainState.ENDED)
    assert (ended.code, ended.counts, commanded(world)) == ("drain.done", {}, [])
