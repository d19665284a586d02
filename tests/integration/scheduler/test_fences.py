"""Fences at the top, and the evacuation of what was on a fenced host."""

from __future__ import annotations

from functools import partial

import pytest
from msgspec.structs import replace

from bus.contracts.build import BuildRequest
from bus.contracts.moves import CellMove, Condition, MoveKind, MoveState
from bus.contracts.operations import AdminState, EvacuationPolicy, FenceState
from scheduler_worker import keepers
from scheduler_worker.domain.fences import SPEC
from tests.integration.scheduler.steps import WARM, becomes, decide, fence_sent, publish_fence
from tests.integration.scheduler.world import World
from tests.kit.waiting import until

# --- Fences at the top: sent to a cell until it acknowledges; a fenced host is used once its cell has lifted it.


pytestmark = pytest.mark.postgres


async def test_a_cell_is_notified_of_a_fence_until_it_acknowledges_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keepers, "REPUBLISH_S", 0.02)
    (uuid,) = await world.scheduler_and_hosts(1, WARM)
    decided = await decide(world, uuid, AdminState.FENCED, reason="PSU")
    assert (decided.state, decided.acknowledged) == (AdminState.FENCED, 0)
    number = decided.fence
    command = await fence_sent(world, number)
    assert (command.host_uuid, command.host, command.lift, command.by) == (uuid, "c1-0", False, "ann")
    await until(lambda: len(world.fences) >= 3)  # repeated
    assert {bus for bus, _ in world.fences} == {"c1"}
    await publish_fence(world, uuid, number, FenceState.FENCED, losses=2)
    await becomes(world, uuid, AdminState.FENCED, acknowledged=number, losses=2)
    await world.stop("s1")
    # A scheduler that starts now has it from the record, and does not publish it again before `REPEAT_S`.
    before = len(world.fences)
    await world.scheduler("s2", WARM)
    await becomes(world, uuid, AdminState.FENCED, acknowledged=number)
    monkeypatch.setattr(keepers, "REPEAT_S", 0.0)
    await until(lambda: len(world.fences) > before)


# --- Instances of a fenced host are evacuated by their policy: by any scheduler, once, and only under the cell's
# fence.


SMALL = WARM.flavors["m1.small"]
EVACUATING = replace(
    WARM,
    flavors={
        **WARM.flavors,
        "kept": replace(SMALL, extra_specs={SPEC: "restart"}),
        "left": replace(SMALL, extra_specs={SPEC: "wait"}),
    },
)
RESTART = EvacuationPolicy.RESTART


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepers, "STAGGER_S", 0.01)
    monkeypatch.setattr(keepers, "BUSY_S", 0.05)


async def active(world: World, count: int, flavor: str = "m1.small", **more: object) -> list[BuildRequest]:
    """Instances on the only host there is."""
    builds = [world.request(flavor, **more) for _ in range(count)]
    for one in builds:
        await world.active(one)
    return builds


async def fence(world: World, uuid: str, *, by_cell: bool = True) -> int:
    """The version of the fence, which the cell has recorded."""
    version = (await decide(world, uuid, AdminState.FENCED, reason="PSU")).fence
    if by_cell:
        await publish_fence(world, uuid, version, FenceState.FENCED)
    return version


def evacuated(world: World) -> list[CellMove]:
    """The requests, in the order in which the cell got them; one that a killed process sent twice is one."""
    return list({one.request_id: one for _, one in world.moves if one.kind is MoveKind.EVACUATE}.values())


def is_begun(world: World, count: int) -> bool:
    return len(evacuated(world)) >= count


async def ends(world: World, command: CellMove, state: MoveState, **more: object) -> None:
    """The cell announces how it ended."""
    move = world.move(BuildRequest(instance_uuid=command.instance_uuid, flavor="", project_id="demo"), command.kind)
    move = replace(move, request_id=command.request_id)
    fields = {"terminal": True, "condition": Condition.ACTIVE, **more}
    await world.move_announced("c1", move, state, 30, **fields)
    await world.moved(move, state)


async def test_several_schedulers_evacuate_each_instance_once(world: World) -> None:
    for name in ("s1", "s2", "s3"):
        await world.scheduler(name, EVACUATING)
    (uuid,) = await world.add_hosts("c1", 1)
    builds = await active(world, 6, on_host_failure=RESTART)
    await world.add_hosts("c1", 2)
    await fence(world, uuid)
    await until(lambda: len(evacuated(world)) >= len(builds))
    for command in list(evacuated(world)):
        await ends(world, command, MoveState.DONE, host="c1-1")
    # One more host: when what is there has been evacuated, all of them have looked at the first one again.
    last = (await active(world, 1, on_host_failure=RESTART, host="c1-2"))[0]
    await fence(world, next(uuid for uuid, host in world.hosts["c1"].items() if host.name == "c1-2"))
    await until(partial(is_begun, world, len(builds) + 1))
    builds.append(last)
    assert sorted(one.instance_uuid for one in evacuated(world)) == sorted(one.instance_uuid for one in builds)


async def test_an_instance_that_cannot_be_evacuated_is_given_up_after_so_many_tries(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keepers, "pause_s", lambda _tried: 0.0)
    monkeypatch.setattr(keepers, "MAX_TRIES", 3)
    await world.scheduler("s1", EVACUATING)
    await world.scheduler("s2", EVACUATING)
    (uuid,) = await world.add_hosts("c1", 1)
    await active(world, 1, on_host_failure=RESTART)
    await fence(world, uuid)
    await until(lambda: len({one.request_id for one in world.move_events if one.terminal}) >= 3)
    await world.stop("s1")
    await world.scheduler("s3", EVACUATING)  # it counts what is on record
    await world.add_hosts("c1", 1)
    (other,) = await active(world, 1, on_host_failure=RESTART)
    await fence(world, next(uuid for uuid, host in world.hosts["c1"].items() if host.name == "c1-1"))
    await until(lambda: any(one.instance_uuid == other.instance_uuid for one in world.move_events))
    ended = {one.request_id for one in world.move_events if one.instance_uuid != other.instance_uuid}
    assert len(ended) == 3
