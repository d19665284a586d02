"""Moves at the top: what is refused, where an instance may go, and one terminal event a request."""

from __future__ import annotations

import asyncio
import time

import pytest
from msgspec.structs import replace

from bus.contracts.build import BuildRequest
from bus.contracts.cell import InstanceSpec, Selection
from bus.contracts.deploy import NetworkRequest
from bus.contracts.moves import (
    CellDepart,
    Condition,
    Departure,
    MoveAccepted,
    MoveKind,
    MoveRequest,
    MoveState,
    ResizePolicy,
)
from bus.contracts.placement import Release, ReleaseResult
from scheduler_worker.config import SchedulerConfig
from tests.integration.scheduler.steps import DONE, WARM, code_of, one_active, refused
from tests.integration.scheduler.world import World
from tests.kit.waiting import until

pytestmark = pytest.mark.postgres


async def test_a_migration_goes_to_other_hosts_of_the_cell_and_has_one_end(world: World) -> None:
    built = await one_active(world)
    source = (await world.show(built.instance_uuid)).host  # type: ignore[union-attr]
    move = world.move(built, MoveKind.MIGRATE)
    await world.answer(move, MoveAccepted)
    command = await world.dispatched(move)
    assert {one.host for one in command.selections} == {"c1-0", "c1-1", "c1-2"} - {source}
    assert command.spec is not None and command.spec.flavor == built.flavor and command.step_timeout_s == 300.0
    answer = await world.moved(move, MoveState.SCHEDULED)
    assert (answer.host, answer.cell, answer.condition) == (command.selections[0].host, "c1", Condition.MOVING)
    record = await world.show(built.instance_uuid)
    assert record is not None and record.under_way == move.request_id and record.host == source
    # Another request is refused while this one is under way, an abort is not.
    assert await refused(world, world.move(built, MoveKind.STOP)) == "instance.busy"
    abort = world.move(built, MoveKind.ABORT)
    await world.commanded(abort)
    await world.move_announced("c1", abort, MoveState.DONE, 13, **DONE)
    await world.moved(abort)
    target = command.selections[0].host
    at = time.time()
    for _ in range(2):  # a repeated line is shown once
        await world.move_announced(
            "c1", move, MoveState.DONE, 15, **{**DONE, "condition": Condition.RESIZED}, host=target, at=at
        )
    await world.move_announced("c1", move, MoveState.FINISHING, 14, host=target)
    await world.moved(move)
    confirm = world.move(built, MoveKind.CONFIRM)
    assert (await world.commanded(confirm)).selections == ()
    await world.move_announced("c1", confirm, MoveState.DONE, 17, **DONE, host=target)
    await world.moved(confirm)
    ends = [event.state for event in world.move_events if event.request_id == move.request_id and event.terminal]
    assert ends == [MoveState.DONE]
    record = await world.show(built.instance_uuid)
    assert record is not None and (record.host, record.under_way, record.condition) == (target, None, "active")
    choice = record.choice
    assert choice is not None and choice.what == "migrate scheduled" and move.request_id in choice.detail
    assert [one.host for one in choice.scores] == [one.host for one in command.selections]
    what = [line.what for line in record.timeline if " " in line.what]
    assert what[0] == "migrate scheduled" and what[-1] == "confirm done" and what.count("migrate done") == 1
    other = world.move(built, MoveKind.START, request_id=move.request_id)
    assert await code_of(world.answer(other, MoveAccepted)) == "request.duplicate"
    await until(lambda: [event for event in world.move_events if event.code == "request.duplicate"])


async def test_what_cannot_be_requested_is_refused_with_a_code(world: World) -> None:
    built = await one_active(world)
    asleep = await world.scheduled()
    unknown = world.request()
    codes = {
        "instance.unknown": world.move(unknown, MoveKind.STOP),
        "instance.not_active": world.move(asleep, MoveKind.STOP),
        "request.incomplete": world.move(built, MoveKind.RESIZE),
        "flavor.unknown": world.move(built, MoveKind.RESIZE, flavor="nope"),
        "flavor.same": world.move(built, MoveKind.RESIZE, flavor="m1.small"),
        "resize.same_host": world.move(built, MoveKind.RESIZE, flavor="m1.large", policy=ResizePolicy.SAME_HOST),
        "host.not_fenced": world.move(built, MoveKind.EVACUATE, fenced=True),
    }
    for code, move in codes.items():
        assert await refused(world, move) == code
        assert await refused(world, replace(move)) == code  # and again
    assert await refused(world, world.move(built, MoveKind.RESCUE)) == "request.incomplete"
    foreign = world.move(built, MoveKind.STOP, project_id="other")
    assert await refused(world, foreign) == "instance.unknown"
    answer = await world.moved(foreign)
    assert (answer.project_id, answer.flavor, answer.condition) == ("other", "", Condition.UNKNOWN)
    record = await world.show(built.instance_uuid)
    assert record is not None and record.under_way is None


async def test_what_has_lost_its_allocations_is_told_so_and_is_not_moved(world: World) -> None:
    built = await one_active(world)
    await world.answer(Release(consumer=built.instance_uuid), ReleaseResult)
    for kind, more in (
        (MoveKind.LIVE_MIGRATE, {}),
        (MoveKind.MIGRATE, {}),
        (MoveKind.RESIZE, {"flavor": "m1.large"}),
        (MoveKind.REBUILD, {"image": "other"}),
        (MoveKind.EVACUATE, {"fenced": True}),
    ):
        assert await refused(world, world.move(built, kind, **more)) == "instance.unlocated"


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
    book = world.replicas["s1"]
    await until(lambda: book.traits_of(book.row_of(host)) == traits)
    rebuild = world.move(built, MoveKind.REBUILD, image="new", image_properties={"trait:CUSTOM_A": word})
    if is_refused:
        assert await refused(world, rebuild) == "image.unsuitable"
    else:
        assert (await world.commanded(rebuild)).selections == ()


async def test_a_scheduler_killed_at_any_moment_loses_and_doubles_no_move(world: World) -> None:
    built = await one_active(world, hosts=4)
    others = [world.request() for _ in range(5)]
    for one in others:
        await world.active(one)
    moves = [world.move(one, MoveKind.STOP) for one in (built, *others)]
    for at, move in enumerate(moves):
        await world.ask(move)
        for _ in range(20 * at):  # another moment each time
            await asyncio.sleep(0)
        await world.kill("s1")
        await world.scheduler("s1", WARM)
    for move in moves:
        await world.dispatched(move)
        await world.moved(move, MoveState.SCHEDULED)
    last = world.move(others[0], MoveKind.ABORT)
    await world.commanded(last)
    sent = [one.request_id for _, one in world.moves]
    assert {one.request_id for one in moves} <= set(sent)
    record = await world.show(built.instance_uuid)
    assert record is not None and [line.what for line in record.timeline].count("stop scheduled") == 1


async def test_what_was_chosen_for_the_last_move_is_offered_again_soon(world: World) -> None:
    """Only the next move released it: at rest a host of this scheduler seemed fuller than it was, for ever."""
    built = await one_active(world, config=SchedulerConfig(hosts_warmup_s=0.001, choice_held_s=0.05))
    move = world.move(built, MoveKind.MIGRATE)
    await world.answer(move, MoveAccepted)
    await world.dispatched(move)
    await until(lambda: move.request_id not in list(world.replicas["s1"].assumptions.keys()))
    assert [one.request_id for _, one in world.moves] == [move.request_id], "given back, and not sent once more"


async def to_be_unshelved_elsewhere(world: World, config: SchedulerConfig) -> tuple[BuildRequest, MoveRequest]:
    """An offloaded instance of c1, and a request to unshelve it on the host of c2."""
    built = await one_active(world, config=config)
    shelve = world.move(built, MoveKind.SHELVE, offload=True)
    await world.commanded(shelve)
    await world.move_announced("c1", shelve, MoveState.DONE, 15, terminal=True, condition=Condition.OFFLOADED)
    await world.moved(shelve)
    return built, world.move(built, MoveKind.UNSHELVE, host="c2-0")


def departure_of(leaving: CellDepart) -> Departure:
    """As its cell announces it to the one that the instance leaves for."""
    last = Selection(
        host_uuid=leaving.instance_uuid,
        host="c1-0",
        service="compute-c1",
        allocations={leaving.request_id: {"VCPU": 1}},
    )
    spec = InstanceSpec(instance_uuid=leaving.instance_uuid, project_id=leaving.project_id, name="n")
    return Departure(cell="c2", spec=spec, image="snapshot", last=last, attempt=4, sequence=16, kind=leaving.kind)


async def departing(world: World, move: MoveRequest) -> CellDepart:
    await world.ask(move)
    ((cell, leaving),) = await until(lambda: [one for one in world.departs if one[1].request_id == move.request_id])
    assert (cell, leaving.to_cell, leaving.ended) == ("c1", "c2", False)
    return leaving


async def ended(world: World, move: MoveRequest) -> tuple[str, CellDepart]:
    (found,) = await until(
        lambda: [one for one in world.departs if one[1].request_id == move.request_id and one[1].ended]
    )
    return found


async def test_an_offloaded_instance_leaves_for_the_cell_that_has_a_host(world: World) -> None:
    built, move = await to_be_unshelved_elsewhere(world, replace(WARM, moves_across_cells=True))
    departure = departure_of(await departing(world, move))
    await world.move_announced("c1", move, MoveState.SCHEDULED, 16, departure=departure)
    found = await until(lambda: [one for cell, one in world.moves if cell == "c2"])
    assert (found[0].request_id, found[0].departure, found[0].to_cell) == (move.request_id, departure, "c1")
    assert [one.host for one in found[0].selections] == ["c2-0"]
    await world.move_announced("c2", move, MoveState.DONE, 20, host="c2-0", **DONE)
    end = await world.moved(move)
    assert (end.state, end.cell, end.departure) == (MoveState.DONE, "c2", None)
    cell, over = await ended(world, move)
    assert (cell, over.attempt) == ("c1", 4)
    record = await world.show(built.instance_uuid)
    assert record is not None and (record.cell, record.host, record.condition) == ("c2", "c2-0", "active")
    # Further requests go to its new cell.
    await world.delete(built)
    deletes = await until(lambda: list(world.deletes))
    assert [cell for cell, _ in deletes] == ["c2"]


async def test_what_has_things_of_its_cell_is_refused_before_it_leaves(world: World) -> None:
    config = replace(WARM, moves_across_cells=True)
    network = NetworkRequest(network="e0000000-0000-4000-8000-000000000001")
    built = await one_active(world, config=config, networks=(network,))
    assert await refused(world, world.move(built, MoveKind.MIGRATE, host="c2-0")) == "move.across_cells"
    assert world.departs == []


async def test_what_the_other_cell_does_not_take_is_home_again_and_its_move_has_failed(world: World) -> None:
    built = await one_active(world, config=replace(WARM, moves_across_cells=True))
    move = world.move(built, MoveKind.MIGRATE, host="c2-0")
    departure = departure_of(await departing(world, move))
    await world.move_announced("c1", move, MoveState.MIGRATING, 16, departure=departure)
    await until(lambda: [one for cell, one in world.moves if cell == "c2"])
    back = replace(departure, cell="c1", attempt=9, sequence=30, code="image.broken")
    await world.move_announced("c2", move, MoveState.MIGRATING, 30, departure=back)
    (home,) = await until(lambda: [one for cell, one in world.moves if cell == "c1" and one.departure is not None])
    assert (home.to_cell, home.selections[0].host) == (None, "c1-0")
    assert {one.host for one in home.selections[1:]} == {one.name for one in world.hosts["c1"].values()}
    assert home.departure is not None and home.departure.code == "image.broken"
    await world.move_announced("c1", move, MoveState.FAILED, 40, host="c1-0", **DONE | {"code": "image.broken"})
    end = await world.moved(move)
    assert (end.state, end.code, end.cell) == (MoveState.FAILED, "image.broken", "c1")
    assert (await ended(world, move))[0] == "c2"
    record = await world.show(built.instance_uuid)
    assert record is not None and (record.cell, record.host, record.condition) == ("c1", "c1-0", "active")
