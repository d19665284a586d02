"""Instances of a fenced host are evacuated by their policy: by any scheduler, once, and only under the cell's fence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
from msgspec.structs import replace

from bus.bus import Bus
from bus.contracts.base import Message
from bus.contracts.build import BuildRequest
from bus.contracts.fences import EvacuationPolicy, FenceState
from bus.contracts.moves import CellMove, Condition, MoveKind, MoveRequest, MoveState
from bus.contracts.operations import AdminState
from scheduler_worker import fences
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.fences import SPEC
from tests.integration.scheduler.test_fences import publish_fence
from tests.integration.scheduler.test_host_decisions import decide
from tests.integration.scheduler.world import World

pytestmark = pytest.mark.postgres

BASE = SchedulerConfig(hosts_warmup_s=0.001)
SMALL = BASE.flavors["m1.small"]
WARM = replace(
    BASE,
    flavors={
        **BASE.flavors,
        "kept": replace(SMALL, extra_specs={SPEC: "restart"}),
        "left": replace(SMALL, extra_specs={SPEC: "wait"}),
    },
)
RESTART = EvacuationPolicy.RESTART


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fences, "STAGGER_S", 0.01)
    monkeypatch.setattr(fences, "BUSY_S", 0.05)


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


async def test_the_policy_is_that_of_the_request_else_of_the_flavor_else_of_the_settings(world: World) -> None:
    await world.scheduler("s1", WARM)
    (uuid,) = await world.add_hosts("c1", 1)
    (by_request,) = await active(world, 1, "left", on_host_failure=RESTART)
    (by_flavor,) = await active(world, 1, "kept")
    await active(world, 1)
    await active(world, 1, "left")
    await active(world, 1, "kept", on_host_failure=EvacuationPolicy.FAIL)
    policies = [one.spec.on_host_failure for _, one in world.builds]
    assert policies == [RESTART, RESTART, None, None, EvacuationPolicy.FAIL]
    await world.add_hosts("c1", 2)
    await fence(world, uuid)
    await world.until(lambda: len(evacuated(world)) >= 2)
    wanted = {by_request.instance_uuid, by_flavor.instance_uuid}
    assert {one.instance_uuid for one in evacuated(world)} == wanted
    assert all(not one.fenced and {s.host for s in one.selections} == {"c1-1", "c1-2"} for one in evacuated(world))
    for command in evacuated(world):
        await ends(world, command, MoveState.DONE, host="c1-1")
    # The others wait, also for a scheduler that looks at them for the first time; by its settings they are restarted.
    await world.stop("s1")
    await world.scheduler("s2", replace(WARM, on_host_failure=RESTART))
    await world.until(lambda: len(evacuated(world)) >= 3)
    assert len(evacuated(world)) == 3


async def test_several_schedulers_evacuate_each_instance_once(world: World) -> None:
    for name in ("s1", "s2", "s3"):
        await world.scheduler(name, WARM)
    (uuid,) = await world.add_hosts("c1", 1)
    builds = await active(world, 6, on_host_failure=RESTART)
    await world.add_hosts("c1", 2)
    await fence(world, uuid)
    await world.until(lambda: len(evacuated(world)) >= len(builds))
    for command in list(evacuated(world)):
        await ends(world, command, MoveState.DONE, host="c1-1")
    # One more host: when what is there has been evacuated, all of them have looked at the first one again.
    last = (await active(world, 1, on_host_failure=RESTART, host="c1-2"))[0]
    await fence(world, next(uuid for uuid, host in world.hosts["c1"].items() if host.name == "c1-2"))
    await world.until(partial(is_begun, world, len(builds) + 1))
    builds.append(last)
    assert sorted(one.instance_uuid for one in evacuated(world)) == sorted(one.instance_uuid for one in builds)


async def test_a_scheduler_that_is_killed_leaves_nothing_undone_and_nothing_twice(world: World) -> None:
    await world.scheduler("s1", replace(WARM, evacuations_at_once=2))
    (uuid,) = await world.add_hosts("c1", 1)
    builds = await active(world, 5, on_host_failure=RESTART)
    await world.add_hosts("c1", 2)
    await fence(world, uuid)
    await world.until(lambda: len(evacuated(world)) == 2)
    await world.kill("s1")
    await world.scheduler("s2", replace(WARM, evacuations_at_once=2))
    for done in range(len(builds)):
        await world.until(partial(is_begun, world, done + 1))
        assert len(evacuated(world)) - done <= 2  # so many at a time
        await ends(world, evacuated(world)[done], MoveState.DONE, host="c1-1")
    assert sorted(one.instance_uuid for one in evacuated(world)) == sorted(one.instance_uuid for one in builds)


@pytest.mark.parametrize("lifting", [False, True])
async def test_nothing_is_evacuated_while_the_cell_has_not_the_fence_on_record(world: World, lifting: bool) -> None:
    """Also not once the host is to be used again."""
    await world.scheduler("s1", WARM)
    (uuid,) = await world.add_hosts("c1", 1)
    (built,) = await active(world, 1, on_host_failure=RESTART)
    other, there = (await world.add_hosts("c1", 2))[0], world.request(host="c1-1", on_host_failure=RESTART)
    await world.active(there)
    version = await fence(world, uuid, by_cell=False)
    if lifting:
        again = await decide(world, uuid, AdminState.ENABLED)
        await publish_fence(world, uuid, again.fence, FenceState.LIFTING, losses=1)
    # A fence that came later has been carried out when nothing has come of the first.
    await fence(world, other)
    await world.until(lambda: evacuated(world))
    assert {one.instance_uuid for one in evacuated(world)} == {there.instance_uuid}
    if not lifting:
        await publish_fence(world, uuid, version, FenceState.FENCED)
        await world.until(lambda: built.instance_uuid in {one.instance_uuid for one in evacuated(world)})


async def test_what_found_no_room_is_tried_again_under_another_id(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fences, "pause_s", lambda _tried: 0.05)
    await world.scheduler("s1", WARM)
    (uuid,) = await world.add_hosts("c1", 1)
    (built,) = await active(world, 1, on_host_failure=RESTART)
    await fence(world, uuid)
    await world.until(lambda: len({one.request_id for one in world.move_events if one.terminal}) >= 2)
    assert {one.code for one in world.move_events} == {"no_valid_host"}
    await world.add_hosts("c1", 1)
    await world.until(lambda: evacuated(world))
    (command,) = evacuated(world)
    assert command.instance_uuid == built.instance_uuid
    # A request that the cell could not carry out is tried again, too, and no other instance's request has the same id.
    await ends(world, command, MoveState.FAILED, code="move.no_host", host="c1-0")
    await world.until(lambda: len(evacuated(world)) == 2)
    assert len({one.request_id for one in evacuated(world)}) == 2


async def test_a_request_that_was_lost_on_its_way_is_published_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fences, "AGAIN_S", 0.2)
    publish_all, lost = Bus.publish_all, list[object]()

    async def losing(self: Bus, messages: Sequence[tuple[Message, str]], traces: Sequence[str] = ()) -> None:
        if lost or not any(isinstance(one, MoveRequest) for one, _ in messages):
            await publish_all(self, messages, traces)
        else:
            lost.append(messages)

    monkeypatch.setattr(Bus, "publish_all", losing)
    await world.scheduler("s1", WARM)
    (uuid,) = await world.add_hosts("c1", 1)
    await active(world, 1, on_host_failure=RESTART)
    await world.add_hosts("c1", 1)
    await fence(world, uuid)
    await world.until(partial(is_begun, world, 1))
    assert lost


async def test_a_shelved_instance_gives_its_host_up_and_is_unshelved_elsewhere(world: World) -> None:
    """No host is chosen for it: its cell has the proof that its host is off, and offloads it."""
    await world.scheduler("s1", WARM)
    (uuid,) = await world.add_hosts("c1", 1)
    (built,) = await active(world, 1, on_host_failure=RESTART)
    shelve = world.move(built, MoveKind.SHELVE)
    await world.ask(shelve)
    await world.dispatched(shelve)
    await world.move_announced("c1", shelve, MoveState.DONE, 20, terminal=True, condition=Condition.SHELVED)
    await world.moved(shelve)
    await world.add_hosts("c1", 1)
    await fence(world, uuid)
    found = await world.until(lambda: [one for _, one in world.moves if one.request_id != shelve.request_id])
    assert (found[0].kind, found[0].instance_uuid, found[0].selections) == (MoveKind.EVACUATE, built.instance_uuid, ())
    await ends(world, found[0], MoveState.DONE, condition=Condition.OFFLOADED)
    unshelve = world.move(built, MoveKind.UNSHELVE)
    await world.ask(unshelve)
    assert [one.host for one in (await world.dispatched(unshelve)).selections] == ["c1-1"]


async def test_an_instance_that_cannot_be_evacuated_is_given_up_after_so_many_tries(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fences, "pause_s", lambda _tried: 0.0)
    monkeypatch.setattr(fences, "MAX_TRIES", 3)
    await world.scheduler("s1", WARM)
    await world.scheduler("s2", WARM)
    (uuid,) = await world.add_hosts("c1", 1)
    await active(world, 1, on_host_failure=RESTART)
    await fence(world, uuid)
    await world.until(lambda: len({one.request_id for one in world.move_events if one.terminal}) >= 3)
    await world.stop("s1")
    await world.scheduler("s3", WARM)  # it counts what is on record
    await world.add_hosts("c1", 1)
    (other,) = await active(world, 1, on_host_failure=RESTART)
    await fence(world, next(uuid for uuid, host in world.hosts["c1"].items() if host.name == "c1-1"))
    await world.until(lambda: any(one.instance_uuid == other.instance_uuid for one in world.move_events))
    ended = {one.request_id for one in world.move_events if one.instance_uuid != other.instance_uuid}
    assert len(ended) == 3
