"""Requests without news: their cell is queried; its answer ends them, or they are marked as silent."""

from __future__ import annotations

import asyncio

import pytest

from bus.bus import API
from bus.contracts.build import BuildAccepted, BuildState
from bus.contracts.moves import CellMoveQuery, Condition, MoveKind, MovePage, MoveQuery, MoveState
from scheduler_worker.config import SchedulerConfig
from tests.integration.scheduler.test_moves import one_active
from tests.integration.scheduler.world import PATIENCE_S, World

pytestmark = pytest.mark.postgres

QUERIES_SOON = SchedulerConfig(hosts_warmup_s=0.001, move_query_s=0.2)
SOON_S = 8.0


async def soon(condition) -> bool:  # type: ignore[no-untyped-def]
    try:
        async with asyncio.timeout(SOON_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    except TimeoutError:
        return False
    return True


def queries_of(world: World, request: str) -> list[tuple[str, CellMoveQuery]]:
    return [(cell, one) for cell, one in world.queries if isinstance(one, CellMoveQuery) and one.request_id == request]


async def test_a_cell_is_queried_and_its_answer_ends_the_request(world: World) -> None:
    built = await one_active(world, config=QUERIES_SOON)
    move = world.move(built, MoveKind.MIGRATE)
    await world.ask(move)
    await world.dispatched(move)
    # A cell that was set back counts from lower numbers again than those that it has announced before.
    await world.move_announced("c1", move, MoveState.CLAIMING, 40, condition=Condition.MOVING)
    queried = await world.until(lambda: queries_of(world, move.request_id))
    cell, query = queried[0]
    assert (cell, query.instance_uuid, query.kind) == ("c1", built.instance_uuid, MoveKind.MIGRATE)
    await world.move_announced(
        "c1", move, MoveState.FAILED, 12, terminal=True, code="move.lost", condition=Condition.ACTIVE
    )
    end = await world.moved(move)
    assert (end.state, end.code) == (MoveState.FAILED, "move.lost")
    record = await world.show(built.instance_uuid)
    assert record is not None and (record.under_way, record.condition) == (None, "active")


async def test_of_a_cell_that_does_not_answer_the_record_states_it(world: World) -> None:
    built = await one_active(world, config=QUERIES_SOON)
    move = world.move(built, MoveKind.STOP)
    await world.ask(move)
    await world.dispatched(move)

    async def state() -> tuple[bool, str]:
        page = await world.buses[API].request(MoveQuery(request_id=move.request_id), MovePage, timeout_s=PATIENCE_S)
        return page.moves[0].terminal, page.moves[0].code

    async with asyncio.timeout(PATIENCE_S):
        while (await state())[1] == "":
            pass  # each turn waits for an answer
    assert await state() == (False, "cell.silent")
    record = await world.show(built.instance_uuid)
    assert record is not None and any(line.what == "stop waits" for line in record.timeline)
    await world.move_announced("c1", move, MoveState.DONE, 12, terminal=True, condition=Condition.STOPPED)
    assert (await world.moved(move)).state is MoveState.DONE
    assert await state() == (True, "")


@pytest.mark.parametrize("is_lost", [False, True], ids=["its machine runs", "its machine is gone"])
@pytest.mark.parametrize("repeats", [0, 1])
async def test_a_delete_that_its_cell_has_forgotten_is_carried_out(
    world: World, repeats: int, *, is_lost: bool
) -> None:
    """The scripted cell has acknowledged it and announces nothing: its record is `active` again."""
    await world.scheduler("s1", QUERIES_SOON)
    await world.add_hosts("c1", 1)
    request = world.request()
    host = await world.active(request)
    await world.delete(request)
    await world.until(lambda: world.deletes)
    assert (await world.show(request.instance_uuid)).state is BuildState.DELETING  # type: ignore[union-attr]
    world.deletes.clear()
    for _ in range(repeats):
        await world.delete(request)
    # The announcement of a cell whose record of the instance was set back, under a higher number.
    state, more = (BuildState.FAILED, {"code": "instance.lost"}) if is_lost else (BuildState.ACTIVE, {})
    await world.announced("c1", request, state, 1_000_011, host=host, attempt=1, **more)
    reached = await soon(lambda: world.deletes or BuildState.DELETED in world.states(request.instance_uuid))
    record = await world.show(request.instance_uuid)
    assert record is not None
    assert reached, (
        f"{repeats} repeats: no delete has reached the cell in {SOON_S} s; on record: {record.state.value},"
        f" events: {world.states(request.instance_uuid)}"
    )


@pytest.mark.parametrize("state", [BuildState.SCHEDULED, BuildState.BUILDING])
@pytest.mark.parametrize("repeats", [0, 1])
async def test_a_build_that_its_cell_has_forgotten_has_an_end(world: World, state: BuildState, repeats: int) -> None:
    await world.scheduler("s1", QUERIES_SOON)
    (host,) = await world.add_hosts("c1", 1)
    request = world.request()
    await world.ask(request)
    await world.until(lambda: world.builds)
    if state is BuildState.BUILDING:
        await world.announced("c1", request, BuildState.BUILDING, 10, host="c1-0", attempt=1)
    await world.ended(request.instance_uuid, state)
    world.builds.clear()
    for _ in range(repeats):
        answer = await world.buses[API].request(request, BuildAccepted, timeout_s=PATIENCE_S)
        assert answer.instance_uuid == request.instance_uuid

    def cares() -> object:
        """The cell has the build again or is queried about it, or it has an end."""
        return world.builds or world.queries or any(event.terminal for event in world.events)

    found = await soon(cares)
    record = await world.show(request.instance_uuid)
    assert record is not None
    assert found, (
        f"{repeats} repeats: nothing in {SOON_S} s; on record: {record.state.value}, host {host} holds"
        f" {(await world.used()).get(host)}; events: {world.states(request.instance_uuid)}"
    )
