"""Requests without news: their cell is queried; its answer ends them, or they are marked as silent."""

from __future__ import annotations

import asyncio

import pytest

from bus.bus import API
from bus.contracts.moves import Condition, MoveKind, MovePage, MoveQuery, MoveState
from scheduler_worker.config import SchedulerConfig
from tests.integration.scheduler.test_moves import one_active
from tests.integration.scheduler.world import PATIENCE_S, World

pytestmark = pytest.mark.postgres

QUERIES_SOON = SchedulerConfig(hosts_warmup_s=0.001, move_query_s=0.2)


async def test_a_cell_is_queried_and_its_answer_ends_the_request(world: World) -> None:
    built = await one_active(world, config=QUERIES_SOON)
    move = world.move(built, MoveKind.MIGRATE)
    await world.ask(move)
    await world.dispatched(move)
    # A cell that was set back counts from lower numbers again than those that it has announced before.
    await world.move_announced("c1", move, MoveState.CLAIMING, 40, condition=Condition.MOVING)
    queried = await world.until(lambda: [one for one in world.queries if one[1].request_id == move.request_id])
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
