"""Drains of hosts that hold something of an instance that is not active there: they do not end as done."""

from __future__ import annotations

from functools import partial

import pytest

from bus.contracts.actions import ActionKind, ActionState, CellAction, Condition
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.drains import DrainAction, DrainProgress, DrainState
from tests.integration.scheduler_worker.test_drains import (
    WARM,
    active,
    begin,
    command,
    commanded,
    drain_becomes,
    drain_is,
    ends,
    has_begun,
    passed,
    plan_of,
    quick,
    shown,
    start_code,
)
from tests.integration.scheduler_worker.world import World
from tests.kit.waiting import until

pytestmark = pytest.mark.postgres
__all__ = ["quick"]  # the fixture


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance that was refused is tried again at once."""
    monkeypatch.setattr("scheduler_worker.drain.drain_steps.doubled_s", lambda *_: 0.01)


async def waits(world: World, drain: DrainProgress, instance: str) -> None:
    """The drain has looked at its hosts, goes on, and names the instance."""
    found = await drain_becomes(world, drain, lambda one: one.not_started or one.state is DrainState.ENDED)
    assert (found.state, found.not_started) == (DrainState.RUNNING, (instance,))
    await passed(world)
    assert (await shown(world, drain)).state is DrainState.RUNNING


async def building(world: World, host: str) -> BuildRequest:
    """A build that is dispatched to the host, and has not ended."""
    build = await world.scheduled(host=host)
    return build


async def arrives(world: World, build: BuildRequest, sent: CellAction) -> None:
    """The cell reports the end of a move that needs no confirm."""
    action = world.action(build, sent.kind, request_id=sent.request_id)
    done = {"host": sent.selections[0].host, "terminal": True, "condition": Condition.ACTIVE}
    await world.action_announced("c1", action, ActionState.DONE, 30, **done)
    await world.moved(action, ActionState.DONE)


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


async def leaving(world: World) -> tuple[BuildRequest, DrainProgress, CellAction]:
    """An instance that a drain moves to the second host, where it is claimed; the migration keeps its source."""
    await world.scheduler_and_hosts(2, WARM)
    (build,) = await active(world, 1, "c1-0")
    begun = await begin(world, "c1-0")
    await until(partial(has_begun, world, 1))
    sent = commanded(world)[0]
    await world.claim_destination(sent)
    return build, begun, sent


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
    assert (ended.code, ended.not_started) == (code, (build.instance_uuid,))


async def test_a_drain_does_not_end_while_placement_does_not_answer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, begun, sent = await leaving(world)
    await world.release(sent.request_id)
    await world.stop("p1")
    with monkeypatch.context() as patched:
        patched.setattr("scheduler_worker.drain.drain_inventory.ANSWER_S", 0.05)
        await arrives(world, build, sent)
        await passed(world)
        assert (await shown(world, begun)).state is DrainState.RUNNING
    await world.placement()
    assert (await drain_is(world, begun, DrainState.ENDED)).code == "drain.done"


async def test_every_page_of_the_holders_counts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_worker.drain.drain_inventory.MAX_CONSUMERS", 1)
    await world.scheduler_and_hosts(1, WARM)
    builds = [await building(world, "c1-0") for _ in range(3)]
    begun = await begin(world, "c1-0")
    found = await drain_becomes(world, begun, lambda one: len(one.not_started) == 3 or one.state is DrainState.ENDED)
    assert sorted(found.not_started) == sorted(one.instance_uuid for one in builds)


@pytest.mark.parametrize(
    ("kind", "condition", "code"),
    [
        (ActionKind.SHELVE, Condition.SHELVED, "instance.shelved"),
        (ActionKind.RESCUE, Condition.RESCUED, "instance.rescued"),
        (ActionKind.MIGRATE, Condition.RESIZED, "instance.resized"),
    ],
)
async def test_a_plan_names_what_its_cell_would_refuse_to_move(
    world: World, kind: ActionKind, condition: Condition, code: str
) -> None:
    await world.scheduler_and_hosts(2, WARM)
    (build,) = await active(world, 1, "c1-0")
    action = world.action(build, kind, rescue_password="p" if kind is ActionKind.RESCUE else "")
    sent = await world.commanded(action)
    host = "c1-0"
    if sent.selections:
        await world.claim_destination(sent)
        host = sent.selections[0].host
    await world.action_announced("c1", action, ActionState.DONE, 20, terminal=True, condition=condition, host=host)
    await world.moved(action, ActionState.DONE)
    (planned,) = (await plan_of(world, host)).moves
    assert (planned.hosts, planned.code) == ((), code)
    assert await start_code(world, host) == "drain.stuck"
