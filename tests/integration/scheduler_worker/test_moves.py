"""Moves at the top: what is refused, where an instance may go, and one terminal event a request."""

from __future__ import annotations

import asyncio
import time

import pytest
from msgspec.structs import replace

from bus.contracts.actions import (
    ActionAccepted,
    ActionKind,
    ActionRequest,
    ActionState,
    CellTransfer,
    CellTransferOut,
    Condition,
    ResizePolicy,
)
from bus.contracts.build import BuildRequest
from bus.contracts.cell import InstanceSpec, Selection
from bus.contracts.deploy import NetworkRequest
from bus.contracts.placement import Release, ReleaseResult
from scheduler_worker.config import SchedulerConfig
from tests.integration.scheduler_worker.steps import DONE, WARM, code_of, one_active, refused
from tests.integration.scheduler_worker.world import World
from tests.kit.waiting import until

pytestmark = pytest.mark.postgres


async def test_a_migration_goes_to_other_hosts_of_the_cell_and_has_one_end(world: World) -> None:
    built = await one_active(world)
    source = (await world.show(built.instance_uuid)).host  # type: ignore[union-attr]
    action = world.action(built, ActionKind.MIGRATE)
    await world.answer(action, ActionAccepted)
    command = await world.dispatched(action)
    assert {one.host for one in command.selections} == {"c1-0", "c1-1", "c1-2"} - {source}
    assert command.spec is not None and command.spec.flavor == built.flavor and command.step_timeout_s == 300.0
    answer = await world.moved(action, ActionState.SCHEDULED)
    assert (answer.host, answer.cell, answer.condition) == (command.selections[0].host, "c1", Condition.MOVING)
    record = await world.show(built.instance_uuid)
    assert record is not None and record.under_way == action.request_id and record.host == source
    # Another request is refused while this one is under way, an abort is not.
    assert await refused(world, world.action(built, ActionKind.STOP)) == "instance.busy"
    abort = world.action(built, ActionKind.ABORT)
    await world.commanded(abort)
    await world.action_announced("c1", abort, ActionState.DONE, 13, **DONE)
    await world.moved(abort)
    target = command.selections[0].host
    at = time.time()
    for _ in range(2):  # a repeated line is shown once
        await world.action_announced(
            "c1", action, ActionState.DONE, 15, **{**DONE, "condition": Condition.RESIZED}, host=target, at=at
        )
    await world.action_announced("c1", action, ActionState.FINISHING, 14, host=target)
    await world.moved(action)
    confirm = world.action(built, ActionKind.CONFIRM)
    assert (await world.commanded(confirm)).selections == ()
    await world.action_announced("c1", confirm, ActionState.DONE, 17, **DONE, host=target)
    await world.moved(confirm)
    ends = [event.state for event in world.action_events if event.request_id == action.request_id and event.terminal]
    assert ends == [ActionState.DONE]
    record = await world.show(built.instance_uuid)
    assert record is not None and (record.host, record.under_way, record.condition) == (target, None, "active")
    choice = record.choice
    assert choice is not None and choice.what == "migrate scheduled" and action.request_id in choice.detail
    assert [one.host for one in choice.scores] == [one.host for one in command.selections]
    what = [line.what for line in record.timeline if " " in line.what]
    assert what[0] == "migrate scheduled" and what[-1] == "confirm done" and what.count("migrate done") == 1
    other = world.action(built, ActionKind.START, request_id=action.request_id)
    assert await code_of(world.answer(other, ActionAccepted)) == "request.duplicate"
    await until(lambda: [event for event in world.action_events if event.code == "request.duplicate"])


async def test_what_cannot_be_requested_is_refused_with_a_code(world: World) -> None:
    built = await one_active(world)
    asleep = await world.scheduled()
    unknown = world.request()
    codes = {
        "instance.unknown": world.action(unknown, ActionKind.STOP),
        "instance.not_active": world.action(asleep, ActionKind.STOP),
        "request.incomplete": world.action(built, ActionKind.RESIZE),
        "flavor.unknown": world.action(built, ActionKind.RESIZE, flavor="nope"),
        "flavor.same": world.action(built, ActionKind.RESIZE, flavor="m1.small"),
        "resize.same_host": world.action(built, ActionKind.RESIZE, flavor="m1.large", policy=ResizePolicy.SAME_HOST),
        "host.not_fenced": world.action(built, ActionKind.EVACUATE, fenced=True),
    }
    for code, action in codes.items():
        assert await refused(world, action) == code
        assert await refused(world, replace(action)) == code  # and again
    assert await refused(world, world.action(built, ActionKind.RESCUE)) == "request.incomplete"
    foreign = world.action(built, ActionKind.STOP, project_id="other")
    assert await refused(world, foreign) == "instance.unknown"
    answer = await world.moved(foreign)
    assert (answer.project_id, answer.flavor, answer.condition) == ("other", "", Condition.UNKNOWN)
    record = await world.show(built.instance_uuid)
    assert record is not None and record.under_way is None


async def test_what_has_lost_its_allocations_is_told_so_and_is_not_moved(world: World) -> None:
    built = await one_active(world)
    await world.answer(Release(consumer=built.instance_uuid), ReleaseResult)
    for kind, more in (
        (ActionKind.LIVE_MIGRATE, {}),
        (ActionKind.MIGRATE, {}),
        (ActionKind.RESIZE, {"flavor": "m1.large"}),
        (ActionKind.REBUILD, {"image": "other"}),
        (ActionKind.EVACUATE, {"fenced": True}),
    ):
        assert await refused(world, world.action(built, kind, **more)) == "instance.unlocated"


@pytest.mark.parametrize(
    ("word", "traits", "is_refused"),
    [
        ("required", ("CUSTOM_B",), True),
        ("required", ("CUSTOM_A",), False),
        ("forbidden", ("CUSTOM_A",), True),
        ("forbidden", ("CUSTOM_B",), False),
        ("perhaps", ("CUSTOM_A",), True),
    ],
)
async def test_a_rebuild_is_held_to_the_traits_of_its_image(
    world: World, word: str, traits: tuple[str, ...], is_refused: bool
) -> None:
    """Nova's rule. An instance of an image that its host cannot carry would have no host to move to, either."""
    built = await one_active(world, 1)
    ((host, _),) = world.hosts["c1"].items()
    await world.report(host, "c1-0", {"VCPU": 16, "MEMORY_MB": 32768, "DISK_GB": 500}, traits)
    replica = world.replicas["s1"]
    await until(lambda: replica.traits_of(replica.row_of(host)) == traits)
    rebuild = world.action(built, ActionKind.REBUILD, image="new", image_properties={"trait:CUSTOM_A": word})
    if is_refused:
        assert await refused(world, rebuild) == "image.unsuitable"
    else:
        assert (await world.commanded(rebuild)).selections == ()


async def test_a_scheduler_killed_at_any_moment_loses_and_doubles_no_move(world: World) -> None:
    built = await one_active(world, hosts=4)
    others = [world.request() for _ in range(5)]
    for one in others:
        await world.active(one)
    actions = [world.action(one, ActionKind.STOP) for one in (built, *others)]
    for at, action in enumerate(actions):
        await world.ask(action)
        for _ in range(20 * at):  # another moment each time
            await asyncio.sleep(0)
        await world.kill("s1")
        await world.scheduler("s1", WARM)
    for action in actions:
        await world.dispatched(action)
        await world.moved(action, ActionState.SCHEDULED)
    last = world.action(others[0], ActionKind.ABORT)
    await world.commanded(last)
    sent = [one.request_id for _, one in world.actions]
    assert {one.request_id for one in actions} <= set(sent)
    record = await world.show(built.instance_uuid)
    assert record is not None and [line.what for line in record.timeline].count("stop scheduled") == 1


async def test_what_was_chosen_for_the_last_move_is_offered_again_soon(world: World) -> None:
    """Only the next move released it: at rest a host of this scheduler seemed fuller than it was, for ever."""
    built = await one_active(world, config=SchedulerConfig(hosts_warmup_s=0.001, assumed_choice_s=0.05))
    action = world.action(built, ActionKind.MIGRATE)
    await world.answer(action, ActionAccepted)
    await world.dispatched(action)
    await until(lambda: action.request_id not in list(world.replicas["s1"].assumptions.keys()))
    assert [one.request_id for _, one in world.actions] == [action.request_id], "given back, and not sent once more"


async def to_be_unshelved_elsewhere(world: World, config: SchedulerConfig) -> tuple[BuildRequest, ActionRequest]:
    """An offloaded instance of c1, and a request to unshelve it on the host of c2."""
    built = await one_active(world, config=config)
    shelve = world.action(built, ActionKind.SHELVE, offload=True)
    await world.commanded(shelve)
    await world.action_announced("c1", shelve, ActionState.DONE, 15, terminal=True, condition=Condition.OFFLOADED)
    await world.moved(shelve)
    return built, world.action(built, ActionKind.UNSHELVE, host="c2-0")


def departure_of(leaving: CellTransferOut) -> CellTransfer:
    """As its cell reports it to the one that the instance leaves for."""
    last = Selection(
        host_uuid=leaving.instance_uuid,
        host="c1-0",
        service="compute-c1",
        allocations={leaving.request_id: {"VCPU": 1}},
    )
    spec = InstanceSpec(instance_uuid=leaving.instance_uuid, project_id=leaving.project_id, name="n")
    return CellTransfer(cell="c2", spec=spec, image="snapshot", last=last, attempt=4, sequence=16, kind=leaving.kind)


async def departing(world: World, action: ActionRequest) -> CellTransferOut:
    await world.ask(action)
    ((cell, leaving),) = await until(lambda: [one for one in world.departs if one[1].request_id == action.request_id])
    assert (cell, leaving.to_cell, leaving.ended) == ("c1", "c2", False)
    return leaving


async def ended(world: World, action: ActionRequest) -> tuple[str, CellTransferOut]:
    (found,) = await until(
        lambda: [one for one in world.departs if one[1].request_id == action.request_id and one[1].ended]
    )
    return found


async def test_an_offloaded_instance_leaves_for_the_cell_that_has_a_host(world: World) -> None:
    built, action = await to_be_unshelved_elsewhere(world, replace(WARM, actions_across_cells=True))
    departure = departure_of(await departing(world, action))
    await world.action_announced("c1", action, ActionState.SCHEDULED, 16, transfer=departure)
    found = await until(lambda: [one for cell, one in world.actions if cell == "c2"])
    assert (found[0].request_id, found[0].transfer, found[0].to_cell) == (action.request_id, departure, "c1")
    assert [one.host for one in found[0].selections] == ["c2-0"]
    await world.action_announced("c2", action, ActionState.DONE, 20, host="c2-0", **DONE)
    end = await world.moved(action)
    assert (end.state, end.cell, end.transfer) == (ActionState.DONE, "c2", None)
    cell, over = await ended(world, action)
    assert (cell, over.attempt) == ("c1", 4)
    record = await world.show(built.instance_uuid)
    assert record is not None and (record.cell, record.host, record.condition) == ("c2", "c2-0", "active")
    # Further requests go to its new cell.
    await world.delete(built)
    deletes = await until(lambda: list(world.deletes))
    assert [cell for cell, _ in deletes] == ["c2"]


async def test_what_has_things_of_its_cell_is_refused_before_it_leaves(world: World) -> None:
    config = replace(WARM, actions_across_cells=True)
    network = NetworkRequest(network="e0000000-0000-4000-8000-000000000001")
    built = await one_active(world, config=config, networks=(network,))
    assert await refused(world, world.action(built, ActionKind.MIGRATE, host="c2-0")) == "action.across_cells"
    assert world.departs == []


async def test_what_the_other_cell_does_not_take_is_home_again_and_its_move_has_failed(world: World) -> None:
    built = await one_active(world, config=replace(WARM, actions_across_cells=True))
    action = world.action(built, ActionKind.MIGRATE, host="c2-0")
    departure = departure_of(await departing(world, action))
    await world.action_announced("c1", action, ActionState.MIGRATING, 16, transfer=departure)
    await until(lambda: [one for cell, one in world.actions if cell == "c2"])
    back = replace(departure, cell="c1", attempt=9, sequence=30, code="image.broken")
    await world.action_announced("c2", action, ActionState.MIGRATING, 30, transfer=back)
    (home,) = await until(lambda: [one for cell, one in world.actions if cell == "c1" and one.transfer is not None])
    assert (home.to_cell, home.selections[0].host) == (None, "c1-0")
    assert {one.host for one in home.selections[1:]} == {one.name for one in world.hosts["c1"].values()}
    assert home.transfer is not None and home.transfer.code == "image.broken"
    await world.action_announced("c1", action, ActionState.FAILED, 40, host="c1-0", **DONE | {"code": "image.broken"})
    end = await world.moved(action)
    assert (end.state, end.code, end.cell) == (ActionState.FAILED, "image.broken", "c1")
    assert (await ended(world, action))[0] == "c2"
    record = await world.show(built.instance_uuid)
    assert record is not None and (record.cell, record.host, record.condition) == ("c1", "c1-0", "active")
