"""Fences at the top, and the evacuation of what was on a fenced host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
from msgspec.structs import replace

from bus.bus import Bus
from bus.contracts.base import Message
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.moves import CellMove, Condition, MoveKind, MoveRequest, MoveState
from bus.contracts.objects import ObjectChange, ObjectKind, ObjectLogPage, ObjectLogQuery, ObjectsChange, ObjectsChanged
from bus.contracts.operations import AdminState, EvacuationPolicy, FenceState
from bus.faults import RequestRefused
from scheduler_worker import keepers
from scheduler_worker.domain.fences import SPEC
from tests.integration.scheduler.steps import WARM, becomes, code_of, decide, fence_sent, publish_fence, refused
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


async def test_a_fenced_host_is_used_only_when_its_cell_has_lifted_the_fence(world: World) -> None:
    await world.scheduler("s1", WARM)
    await world.scheduler("s2", WARM)
    (uuid,) = await world.add_hosts("c1", 1)
    first = (await decide(world, uuid, AdminState.FENCED)).fence
    await publish_fence(world, uuid, first, FenceState.FENCED)
    await becomes(world, uuid, AdminState.FENCED, acknowledged=first)
    back = await decide(world, uuid, AdminState.ENABLED, reason="repaired")
    assert (back.state, back.pending, back.fence > first) == (AdminState.FENCED, AdminState.ENABLED, True)
    assert (await fence_sent(world, back.fence)).lift
    await publish_fence(world, uuid, back.fence, FenceState.LIFTING, losses=3)
    await becomes(world, uuid, AdminState.FENCED, losses=3, pending=AdminState.ENABLED)
    early = await world.requested(host="c1-0")
    assert (await world.ended(early.instance_uuid)).state is BuildState.FAILED
    await publish_fence(world, uuid, first, FenceState.LIFTED)  # of an older decision
    await publish_fence(world, uuid, back.fence, FenceState.LIFTED, cell="c2")  # of a cell that the host is not in
    await publish_fence(world, uuid, back.fence, FenceState.LIFTING, losses=1)
    await becomes(world, uuid, AdminState.FENCED, losses=1)
    await publish_fence(world, uuid, back.fence, FenceState.LIFTED)
    await becomes(world, uuid, AdminState.ENABLED, pending=None)
    await world.scheduled(host="c1-0")


async def test_a_fence_that_is_commanded_once_more_is_a_new_decision_also_with_the_same_reason(world: World) -> None:
    """The host ran when it was fenced first, and is off now: its cell is notified, and its evacuations begin anew. A
    configuration that has the fence already states nothing new; a command that is delivered twice is in
    `test_host_decisions.py`.
    """
    (uuid,) = await world.scheduler_and_hosts(1, WARM)
    first = await decide(world, uuid, AdminState.FENCED, reason="PSU")
    again = await decide(world, uuid, AdminState.FENCED, reason="PSU")
    assert again.fence > first.fence
    sent = [await fence_sent(world, one.fence) for one in (first, again)]
    assert sent[1].at > sent[0].at
    disabled = [await decide(world, uuid, AdminState.DISABLED) for _ in range(2)]
    assert disabled[0].fence == disabled[1].fence, "it is requested to be lifted once"
    await decide(world, uuid, AdminState.FENCED, reason="PSU")
    body = {"host": "c1-0", "state": "fenced", "reason": "PSU"}
    applied = ObjectsChange(changes=(ObjectChange(kind=ObjectKind.HOST, name=uuid, body=body),), who="ann", force=True)
    assert (await world.answer(applied, ObjectsChanged)).changed == ()


async def test_a_fence_that_only_its_cell_knows_is_lifted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record was set back to before the decision: the fence was neither repeated nor lifted, for ever."""
    monkeypatch.setattr(keepers, "REPUBLISH_S", 0.02)
    (uuid,) = await world.scheduler_and_hosts(1, WARM)
    await publish_fence(world, uuid, 1000, FenceState.FENCED, losses=2)
    command = await fence_sent(world, 1001)
    assert (command.host_uuid, command.host, command.lift) == (uuid, "c1-0", True)
    await becomes(world, uuid, AdminState.FENCED, pending=AdminState.ENABLED, losses=2)
    await publish_fence(world, uuid, 1001, FenceState.LIFTED)
    await until(lambda: [table.decision_of(uuid) for table in world.tables.values()] == [None])
    await world.scheduled(host="c1-0")
    await publish_fence(world, uuid, 1002, FenceState.LIFTING)  # and one that is being lifted is left to its cell
    again = (await decide(world, uuid, AdminState.FENCED)).fence
    assert (await fence_sent(world, again)).lift is False and again < 1000


@pytest.mark.parametrize("forgotten", [ObjectKind.HOST, ObjectKind.FENCE])
async def test_no_change_of_objects_removes_a_fence(world: World, forgotten: ObjectKind) -> None:
    """Without the decision the fence is to be lifted, and the host stays fenced until it is."""
    (uuid,) = await world.scheduler_and_hosts(1, WARM)
    await decide(world, uuid, AdminState.FENCED)
    change = ObjectsChange(changes=(ObjectChange(kind=forgotten, name=uuid),), who="ann", force=True)
    if forgotten is ObjectKind.FENCE:
        with pytest.raises(RequestRefused, match="follows from a decision"):
            await world.answer(change, ObjectsChanged)
        return
    await world.answer(change, ObjectsChanged)
    await becomes(world, uuid, AdminState.FENCED, pending=AdminState.ENABLED)


async def test_nothing_is_evacuated_from_a_host_that_is_to_be_used_again(world: World) -> None:
    (uuid,) = await world.scheduler_and_hosts(1, WARM)
    built = world.request()
    await world.active(built)
    await world.add_hosts("c1", 2)
    await decide(world, uuid, AdminState.FENCED)
    await decide(world, uuid, AdminState.ENABLED)
    assert await refused(world, world.move(built, MoveKind.EVACUATE)) == "host.not_fenced"


async def test_a_fence_whose_cell_is_gone_for_good_is_ended_by_force_with_a_reason(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keepers, "REPUBLISH_S", 0.02)
    monkeypatch.setattr(keepers, "REPEAT_S", 0.1)
    await world.scheduler("s1", WARM)
    await world.scheduler("s2", WARM)
    (uuid,) = await world.add_hosts("c1", 1)
    number = (await decide(world, uuid, AdminState.FENCED)).fence
    await publish_fence(world, uuid, number, FenceState.FENCED, losses=2)
    await becomes(world, uuid, AdminState.FENCED, acknowledged=number)
    assert await code_of(decide(world, uuid, AdminState.ENABLED, reason="", force=True)) == "host.reason_missing"
    await decide(world, uuid, AdminState.ENABLED)
    await becomes(world, uuid, AdminState.FENCED, pending=AdminState.ENABLED)
    forced = await decide(world, uuid, AdminState.ENABLED, reason="burnt", force=True)
    assert forced.state is AdminState.ENABLED
    await becomes(world, uuid, AdminState.ENABLED)
    query = ObjectLogQuery(kind=ObjectKind.HOST)
    log = await world.answer(query, ObjectLogPage)
    assert (log.entries[0].who, log.entries[0].why, log.entries[0].forced) == ("ann", "burnt", True)
    await world.scheduled(host="c1-0")
    # Should the cell come back after all, it is commanded to lift the fence, and does so when it can.
    last, before = max(one.version for _, one in world.fences), len(world.fences)
    await until(lambda: len(world.fences) > before)
    assert world.fences[-1][1].lift and world.fences[-1][1].version == last
    await publish_fence(world, uuid, last, FenceState.LIFTING, losses=1)
    await publish_fence(world, uuid, last, FenceState.LIFTED)
    again = (await decide(world, uuid, AdminState.FENCED)).fence
    assert again > last
    await becomes(world, uuid, AdminState.FENCED, fence=again)


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


async def test_the_policy_is_that_of_the_request_else_of_the_flavor_else_of_the_settings(world: World) -> None:
    (uuid,) = await world.scheduler_and_hosts(1, EVACUATING)
    (by_request,) = await active(world, 1, "left", on_host_failure=RESTART)
    (by_flavor,) = await active(world, 1, "kept")
    await active(world, 1)
    await active(world, 1, "left")
    await active(world, 1, "kept", on_host_failure=EvacuationPolicy.FAIL)
    policies = [one.spec.on_host_failure for _, one in world.builds]
    assert policies == [RESTART, RESTART, None, None, EvacuationPolicy.FAIL]
    await world.add_hosts("c1", 2)
    await fence(world, uuid)
    await until(lambda: len(evacuated(world)) >= 2)
    wanted = {by_request.instance_uuid, by_flavor.instance_uuid}
    assert {one.instance_uuid for one in evacuated(world)} == wanted
    assert all(not one.fenced and {s.host for s in one.selections} == {"c1-1", "c1-2"} for one in evacuated(world))
    for command in evacuated(world):
        await ends(world, command, MoveState.DONE, host="c1-1")
    # The others wait, also for a scheduler that looks at them for the first time; by its settings they are restarted.
    await world.stop("s1")
    await world.scheduler("s2", replace(EVACUATING, on_host_failure=RESTART))
    await until(lambda: len(evacuated(world)) >= 3)
    assert len(evacuated(world)) == 3


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


async def test_a_scheduler_that_is_killed_leaves_nothing_undone_and_nothing_twice(world: World) -> None:
    (uuid,) = await world.scheduler_and_hosts(1, replace(EVACUATING, evacuations_at_once=2))
    builds = await active(world, 5, on_host_failure=RESTART)
    await world.add_hosts("c1", 2)
    await fence(world, uuid)
    await until(lambda: len(evacuated(world)) == 2)
    await world.kill("s1")
    await world.scheduler("s2", replace(EVACUATING, evacuations_at_once=2))
    for done in range(len(builds)):
        await until(partial(is_begun, world, done + 1))
        assert len(evacuated(world)) - done <= 2  # so many at a time
        await ends(world, evacuated(world)[done], MoveState.DONE, host="c1-1")
    assert sorted(one.instance_uuid for one in evacuated(world)) == sorted(one.instance_uuid for one in builds)


async def test_what_found_no_room_is_tried_again_under_another_id(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keepers, "pause_s", lambda _tried: 0.05)
    (uuid,) = await world.scheduler_and_hosts(1, EVACUATING)
    (built,) = await active(world, 1, on_host_failure=RESTART)
    await fence(world, uuid)
    await until(lambda: len({one.request_id for one in world.move_events if one.terminal}) >= 2)
    assert {one.code for one in world.move_events} == {"no_valid_host"}
    await world.add_hosts("c1", 1)
    await until(lambda: evacuated(world))
    (command,) = evacuated(world)
    assert command.instance_uuid == built.instance_uuid
    # A request that the cell could not carry out is tried again, too, and no other instance's request has the same id.
    await ends(world, command, MoveState.FAILED, code="move.no_host", host="c1-0")
    await until(lambda: len(evacuated(world)) == 2)
    assert len({one.request_id for one in evacuated(world)}) == 2


async def test_a_request_that_was_lost_on_its_way_is_published_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keepers, "AGAIN_S", 0.2)
    publish_all, lost = Bus.publish_all, list[object]()

    async def losing(self: Bus, messages: Sequence[tuple[Message, str]], traces: Sequence[str] = ()) -> None:
        if lost or not any(isinstance(one, MoveRequest) for one, _ in messages):
            await publish_all(self, messages, traces)
        else:
            lost.append(messages)

    monkeypatch.setattr(Bus, "publish_all", losing)
    (uuid,) = await world.scheduler_and_hosts(1, EVACUATING)
    await active(world, 1, on_host_failure=RESTART)
    await world.add_hosts("c1", 1)
    await fence(world, uuid)
    await until(partial(is_begun, world, 1))
    assert lost


async def test_a_shelved_instance_gives_its_host_up_and_is_unshelved_elsewhere(world: World) -> None:
    """No host is chosen for it: its cell has the proof that its host is off, and offloads it."""
    (uuid,) = await world.scheduler_and_hosts(1, EVACUATING)
    (built,) = await active(world, 1, on_host_failure=RESTART)
    shelve = world.move(built, MoveKind.SHELVE)
    await world.commanded(shelve)
    await world.move_announced("c1", shelve, MoveState.DONE, 20, terminal=True, condition=Condition.SHELVED)
    await world.moved(shelve)
    await world.add_hosts("c1", 1)
    await fence(world, uuid)
    found = await until(lambda: [one for _, one in world.moves if one.request_id != shelve.request_id])
    assert (found[0].kind, found[0].instance_uuid, found[0].selections) == (MoveKind.EVACUATE, built.instance_uuid, ())
    await ends(world, found[0], MoveState.DONE, condition=Condition.OFFLOADED)
    unshelve = world.move(built, MoveKind.UNSHELVE)
    assert [one.host for one in (await world.commanded(unshelve)).selections] == ["c1-1"]


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
