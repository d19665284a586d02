"""Drains of hosts that hold something of an instance that is not active there: they do not end as done."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
from msgspec.structs import replace

from bus.clock import new_uuid
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.cell import HostReport
from bus.contracts.drains import DrainAction, DrainProgress, DrainState
from bus.contracts.moves import CellMove, Condition, MoveKind, MoveRequest, MoveState
from scheduler_worker.domain.drains import LOOKS, UNRELEASED, DrainedHost, HeldInstance
from scheduler_worker.drain_plan import DrainHolders
from tests.integration.scheduler.test_drains import (
    AMOUNTS,
    WARM,
    active,
    begin,
    command,
    commanded,
    drain_becomes,
    drain_is,
    ends,
    has_begun,
    left_by,
    passed,
    plan_of,
    quick,
    shown,
    start_code,
)
from tests.integration.scheduler.world import World
from tests.kit.waiting import until

pytestmark = pytest.mark.postgres
__all__ = ["quick"]  # the fixture


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance that has failed is tried again at once; what is not released yet is waited for."""
    monkeypatch.setattr("scheduler_worker.domain.drains.doubled_s", lambda *_: 0.01)
    monkeypatch.setitem(LOOKS, UNRELEASED, 10**6)


async def waits(world: World, drain: DrainProgress, instance: str) -> None:
    """The drain has looked at its hosts, goes on, and names the instance."""
    found = await drain_becomes(world, drain, lambda one: one.not_begun or one.state is DrainState.ENDED)
    assert (found.state, found.not_begun) == (DrainState.RUNNING, (instance,))
    await passed(world)
    assert (await shown(world, drain)).state is DrainState.RUNNING


async def building(world: World, host: str) -> BuildRequest:
    """A build that is dispatched to the host, and has not ended."""
    build = await world.scheduled(host=host)
    return build


async def moving(world: World, build: BuildRequest, kind: MoveKind = MoveKind.MIGRATE) -> tuple[MoveRequest, CellMove]:
    """A move of a client, dispatched, of which the cell has announced nothing yet."""
    move = world.move(build, kind)
    await world.ask(move)
    return move, await world.dispatched(move)


async def unconfirmed(world: World, build: BuildRequest) -> tuple[MoveRequest, CellMove]:
    """The instance has been migrated, and its source is kept."""
    move, sent = await moving(world, build)
    await world.claim_destination(sent)
    host = sent.selections[0].host
    await world.move_announced("c1", move, MoveState.DONE, 30, host=host, terminal=True, condition=Condition.RESIZED)
    await world.moved(move, MoveState.DONE)
    return move, sent


async def arrives(world: World, build: BuildRequest, sent: CellMove) -> None:
    """The cell announces the end of a move that needs no confirm."""
    move = world.move(build, sent.kind, request_id=sent.request_id)
    done = {"host": sent.selections[0].host, "terminal": True, "condition": Condition.ACTIVE}
    await world.move_announced("c1", move, MoveState.DONE, 30, **done)
    await world.moved(move, MoveState.DONE)


async def test_a_build_in_progress_is_waited_for_and_moved(world: World) -> None:
    await world.scheduler("s1", WARM)
    await world.scheduler("s2", WARM)
    await world.add_hosts("c1", 2)
    build = await building(world, "c1-0")
    assert (await plan_of(world, "c1-0")).moves == ()  # there is nothing to move yet
    begun = await begin(world, "c1-0")
    await waits(world, begun, build.instance_uuid)
    await world.announced("c1", build, BuildState.ACTIVE, 11, host="c1-0", attempt=1, terminal=True)
    await until(partial(has_begun, world, 1))
    await ends(world, commanded(world)[0])
    ended = await drain_is(world, begun, DrainState.ENDED)
    assert (ended.code, ended.moved) == ("drain.done", (build.instance_uuid,))


async def test_a_build_that_fails_is_waited_for_until_its_resources_are_released(world: World) -> None:
    await world.scheduler_and_hosts(1, WARM)
    build = await building(world, "c1-0")
    begun = await begin(world, "c1-0")
    await waits(world, begun, build.instance_uuid)
    await world.announced("c1", build, BuildState.FAILED, 11, code="build.failed", terminal=True)
    await world.ended(build.instance_uuid, BuildState.FAILED)
    await waits(world, begun, build.instance_uuid)
    await world.release(build.instance_uuid)
    ended = await drain_is(world, begun, DrainState.ENDED)
    assert (ended.code, ended.counts) == ("drain.done", {"left": 1})


async def test_a_move_to_the_host_is_waited_for_and_its_instance_moved_on(world: World) -> None:
    """Before its conductor has claimed anything there, the record of the request alone names the host."""
    await world.scheduler_and_hosts(2, WARM)
    (build,) = await active(world, 1, "c1-0")
    move, sent = await moving(world, build, MoveKind.LIVE_MIGRATE)
    assert sent.selections[0].host == "c1-1"
    begun = await begin(world, "c1-1")
    await waits(world, begun, build.instance_uuid)
    await ends(world, sent)
    await world.add_hosts("c1", 1)
    await until(partial(has_begun, world, 2))
    on = commanded(world)[1]
    assert (on.instance_uuid, on.request_id != move.request_id) == (build.instance_uuid, True)
    await ends(world, on, sequence=40)
    assert (await drain_is(world, begun, DrainState.ENDED)).code == "drain.done"


async def test_the_source_of_an_unconfirmed_move_is_in_the_plan_and_is_what_is_left(world: World) -> None:
    await world.scheduler_and_hosts(2, WARM)
    (build,) = await active(world, 1, "c1-0")
    move, _ = await unconfirmed(world, build)
    (planned,) = (await plan_of(world, "c1-0")).moves
    assert (planned.instance_uuid, planned.code, planned.source) == (
        build.instance_uuid,
        "instance.unconfirmed",
        "c1-0",
    )
    assert move.request_id in planned.reason and planned.flavor == "m1.small"
    assert await start_code(world, "c1-0") == "drain.stuck"
    begun = await begin(world, "c1-0", force=True)
    assert begun.planned == 1
    assert await left_by(world, begun) == [(build.instance_uuid, "instance.unconfirmed")]
    await world.release(move.request_id)  # it is confirmed
    confirmed = {"host": "c1-1", "terminal": True, "condition": Condition.ACTIVE}
    await world.move_announced("c1", move, MoveState.SOURCE_GONE, 31, **confirmed)
    await command(world, begun, DrainAction.RESUME)
    assert (await drain_is(world, begun, DrainState.ENDED)).code == "drain.done"


async def test_an_instance_that_is_reverted_to_the_host_is_moved(world: World) -> None:
    """It was left; the drain is resumed, and looks at it again."""
    source, _ = await world.scheduler_and_hosts(2, WARM)
    (build,) = await active(world, 1, "c1-0")
    _, sent = await unconfirmed(world, build)
    begun = await begin(world, "c1-0", force=True)
    assert (await drain_is(world, begun, DrainState.ENDED)).code == "drain.left"
    revert, _ = await moving(world, build, MoveKind.REVERT)
    await command(world, begun, DrainAction.RESUME)
    await passed(world)
    await world.revert_claim(sent, source)
    back = {"host": "c1-0", "terminal": True, "condition": Condition.ACTIVE}
    await world.move_announced("c1", revert, MoveState.DONE, 40, **back)
    await until(partial(has_begun, world, 3))
    await ends(world, commanded(world)[2], sequence=50)
    ended = await drain_is(world, begun, DrainState.ENDED)
    assert (ended.code, ended.moved) == ("drain.done", (build.instance_uuid,))


async def leaving(world: World) -> tuple[BuildRequest, DrainProgress, CellMove]:
    """An instance that a drain moves to the second host, where it is claimed; the migration keeps its source."""
    await world.scheduler_and_hosts(2, WARM)
    (build,) = await active(world, 1, "c1-0")
    begun = await begin(world, "c1-0")
    await until(partial(has_begun, world, 1))
    sent = commanded(world)[0]
    await world.claim_destination(sent)
    return build, begun, sent


async def test_a_source_that_is_being_released_is_waited_for(world: World) -> None:
    """The drain's own move has ended; its instance counts as moved all the same."""
    build, begun, sent = await leaving(world)
    await arrives(world, build, sent)
    await waits(world, begun, build.instance_uuid)
    await world.release(sent.request_id)
    ended = await drain_is(world, begun, DrainState.ENDED)
    assert (ended.code, ended.moved) == ("drain.done", (build.instance_uuid,))


@pytest.mark.parametrize(("action", "code"), [(None, "drain.deadline"), (DrainAction.STOP, "drain.stopped")])
async def test_a_drain_that_waits_for_a_build_ends_by_its_deadline_or_a_stop(
    world: World, action: DrainAction | None, code: str
) -> None:
    await world.scheduler_and_hosts(1, WARM)
    build = await building(world, "c1-0")
    begun = await begin(world, "c1-0", deadline_s=0.2 if action is None else None)
    if action is not None:
        await waits(world, begun, build.instance_uuid)
        await command(world, begun, action)
    ended = await drain_is(world, begun, DrainState.ENDED)
    assert (ended.code, ended.not_begun) == (code, (build.instance_uuid,))


async def test_a_drain_does_not_end_while_the_book_does_not_answer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, begun, sent = await leaving(world)
    await world.release(sent.request_id)
    await world.stop("p1")
    with monkeypatch.context() as patched:
        patched.setattr("scheduler_worker.drain_plan.ANSWER_S", 0.05)
        await arrives(world, build, sent)
        await passed(world)
        assert (await shown(world, begun)).state is DrainState.RUNNING
    await world.placement()
    assert (await drain_is(world, begun, DrainState.ENDED)).code == "drain.done"


async def test_resources_that_are_never_released_are_what_is_left(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The migration of the drain's own move has leaked. It is released by hand, and the drain resumed."""
    build, begun, sent = await leaving(world)
    monkeypatch.setitem(LOOKS, UNRELEASED, 3)
    await arrives(world, build, sent)
    assert await left_by(world, begun) == [(build.instance_uuid, "instance.unreleased")]
    await world.release(sent.request_id)
    await command(world, begun, DrainAction.RESUME)
    ended = await drain_is(world, begun, DrainState.ENDED)
    assert (ended.code, ended.moved) == ("drain.done", (build.instance_uuid,))


async def test_a_host_that_no_service_has_announced_to_this_scheduler_is_not_waited_for(world: World) -> None:
    """Its service has died, and the scheduler was started again: a build there does not become active."""
    await world.scheduler_and_hosts(1, WARM)
    build = await building(world, "c1-0")
    begun = await begin(world, "c1-0")
    await waits(world, begun, build.instance_uuid)
    await world.stop("s1")
    world.hosts["c1"].clear()
    await world.scheduler("s2", WARM)
    ended = await drain_is(world, begun, DrainState.ENDED)
    assert (ended.code, [(one.instance_uuid, one.code) for one in ended.failed]) == (
        "drain.left",
        [(build.instance_uuid, "instance.building")],
    )
    assert "service.down" in ended.failed[0].reason


async def test_every_page_of_the_holders_counts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_worker.drain_plan.MAX_HOLDERS", 1)
    await world.scheduler_and_hosts(1, WARM)
    builds = [await building(world, "c1-0") for _ in range(3)]
    begun = await begin(world, "c1-0")
    found = await drain_becomes(world, begun, lambda one: len(one.not_begun) == 3 or one.state is DrainState.ENDED)
    assert sorted(found.not_begun) == sorted(one.instance_uuid for one in builds)


async def test_a_look_that_a_command_has_overtaken_changes_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drain is stopped while a scheduler reads what its host holds, which does not count any more."""
    await world.scheduler_and_hosts(1, WARM)
    build = await building(world, "c1-0")
    begun = await begin(world, "c1-0")
    await waits(world, begun, build.instance_uuid)
    held_on, stopped = DrainHolders.held_on, list[str]()

    async def overtaken(self: DrainHolders, hosts: Sequence[DrainedHost], *most: int) -> list[HeldInstance]:
        found = await held_on(self, hosts, *most)
        if hosts and not stopped:
            stopped.append(begun.id)
            await command(world, begun, DrainAction.STOP)
        return [*found, *(replace(one, instance_uuid=begun.id) for one in found)]

    monkeypatch.setattr(DrainHolders, "held_on", overtaken)
    ended = await drain_is(world, begun, DrainState.ENDED)
    assert (ended.code, ended.counts) == ("drain.stopped", {"waiting": 1})


# --- Drains move instances within their cell, also where moves across cells are allowed.


ACROSS = replace(WARM, moves_across_cells=True)


async def test_a_cold_drain_moves_no_instance_to_another_cell(world: World) -> None:
    await world.scheduler_and_hosts(1, ACROSS)
    await world.add_hosts("c2", 1)
    (build,) = await active(world, 1, "c1-0")
    (planned,) = (await plan_of(world, "c1-0", kind=MoveKind.MIGRATE)).moves
    assert planned.code == "no_valid_host"
    begun = await begin(world, "c1-0", kind=MoveKind.MIGRATE, force=True)
    ended = await drain_becomes(world, begun, lambda one: commanded(world) or one.state is DrainState.ENDED)
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
    await world.scheduler_and_hosts(2, WARM)
    (build,) = await active(world, 1, "c1-0")
    move = world.move(build, kind, rescue_password="p" if kind is MoveKind.RESCUE else "")
    sent = await world.commanded(move)
    host = "c1-0"
    if sent.selections:
        await world.claim_destination(sent)
        host = sent.selections[0].host
    await world.move_announced("c1", move, MoveState.DONE, 20, terminal=True, condition=condition, host=host)
    await world.moved(move, MoveState.DONE)
    (planned,) = (await plan_of(world, host)).moves
    assert (planned.hosts, planned.code) == ((), code)
    assert await start_code(world, host) == "drain.stuck"


async def test_a_drain_moves_no_instance_of_a_namesake_in_another_cell(world: World) -> None:
    """Also while the host's cell is not known: the record has each instance by the uuid of its host."""
    (host,) = await world.scheduler_and_hosts(1, WARM)
    namesake = new_uuid(world.rng)
    world.hosts["c2"][namesake] = HostReport(uuid=namesake, name="c1-0")
    await world.report(namesake, "c2-namesake", AMOUNTS)
    await world.add_hosts("c2", 1)
    await world.active(world.request(host=namesake), "c2", "c1-0")
    begun = await begin(world, host)
    ended = await drain_is(world, begun, DrainState.ENDED)
    assert (ended.code, ended.counts, commanded(world)) == ("drain.done", {}, [])
