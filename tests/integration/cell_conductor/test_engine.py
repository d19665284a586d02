"""The engine over the in-process bus and a real PostgreSQL: builds, reports, and transactions that fail."""

from __future__ import annotations

import asyncio

import pytest

from bus.contracts.build import BuildState
from bus.contracts.cell import CellBuild
from bus.faults import Transient
from cell_conductor.request_handlers import build_requested
from cell_conductor.state.events import InstanceEvent
from cell_conductor.state.instance import State
from tests.integration.cell_conductor.neighbours import Cell
from tests.kit.waiting import until

# --- The engine over the in-process bus and a real PostgreSQL, with a scripted placement and compute service.


async def test_many_builds_use_alternates_and_none_is_lost_or_doubled(cell: Cell) -> None:
    cell.around.fails = {cell.host(1), cell.host(4)}
    cell.around.full = {cell.host(2)}
    builds = [cell.build(1, 2, 3) if n % 3 else cell.build(1, 2, 4) for n in range(60)]
    await cell.around.bus.publish_all([(b, "") for b in builds] + [(b, "") for b in builds[:20]])
    await until(lambda: all(cell.around.ends(b.spec.instance_uuid) for b in builds))
    for number, build in enumerate(builds):
        expected = BuildState.ACTIVE if number % 3 else BuildState.FAILED
        # The answer to the second request is the same event once more.
        events = [one for one in cell.around.events if one.instance_uuid == build.spec.instance_uuid and one.terminal]
        assert {(one.sequence, one.state) for one in events} == {(events[0].sequence, expected)}
    failed = next(e for e in cell.around.events if e.state is BuildState.FAILED)
    assert failed.code == "max_retries_exceeded"
    assert [(r.host, r.outcome) for r in failed.history] == [
        ("host-1", "failed"),
        ("host-2", "not_claimed"),
        ("host-4", "failed"),
    ]
    await cell.check_at_rest()


async def test_two_conductors_sweep_each_instance_once(cell: Cell) -> None:
    cell.around.hangs = {cell.host(1)}
    builds = [cell.build(1, 2, timeout_s=60.0) for _ in range(40)]
    await cell.around.bus.publish_all([(b, "") for b in builds])
    await until(lambda: len(cell.around.spawns) == 40)
    cell.clock.offset += 61.0
    swept = await asyncio.gather(*[engine.sweep() for engine in (cell.engine, cell.new_engine()) for _ in range(4)])
    assert sum(swept) == 40
    await until(lambda: all(cell.around.ends(b.spec.instance_uuid) for b in builds))
    assert len(cell.around.spawns) == 80
    await cell.check_at_rest()


async def test_nothing_is_recorded_or_sent_when_the_transaction_fails(cell: Cell) -> None:
    build = cell.build(1)
    await _on_outbox_insert(cell, "RAISE EXCEPTION 'the outbox is shut'")
    with pytest.raises(Exception, match="the outbox is shut"):
        await cell.engine.take([_build_arrival(build, cell)], source="test")
    assert await cell.state(build.spec.instance_uuid) is State.ABSENT
    await _calm_outbox(cell)
    await cell.engine.take([_build_arrival(build, cell)], source="test")
    await until(lambda: bool(cell.around.ends(build.spec.instance_uuid)))
    assert len(cell.around.spawns) == 1


async def test_a_killed_connection_is_transient_and_the_batch_can_be_taken_again(cell: Cell) -> None:
    build = cell.build(1)
    await _on_outbox_insert(cell, "PERFORM pg_terminate_backend(pg_backend_pid())")
    with pytest.raises(Transient):
        await cell.engine.take([_build_arrival(build, cell)], source="test")
    await _calm_outbox(cell)
    await cell.engine.take([_build_arrival(build, cell)], source="test")
    await until(lambda: bool(cell.around.ends(build.spec.instance_uuid)))
    await cell.check_at_rest()


async def _on_outbox_insert(cell: Cell, statement: str) -> None:
    async with cell.database.raw() as connection:
        await connection.execute(
            f"CREATE FUNCTION disturb() RETURNS trigger AS $$ BEGIN {statement}; RETURN NEW; END $$ LANGUAGE plpgsql; "
            "CREATE TRIGGER disturb BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION disturb()"
        )


async def _calm_outbox(cell: Cell) -> None:
    await cell.sql("DROP TRIGGER disturb ON outbox")


def _build_arrival(build: CellBuild, cell: Cell) -> InstanceEvent:
    return InstanceEvent(build.spec.instance_uuid, build_requested(build, cell.clock.time(), "why"), "message-1")
