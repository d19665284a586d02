"""The schedulers query a build that has had no event: it is answered from the record, or ends if there is nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.cell import CellBuild, CellDelete
from bus.contracts.cell_queries import CellBuildQuery
from cell_conductor.domain.instance import State
from tests.integration.conductor.neighbours import WAIT_S, Cell, opened

pytestmark = pytest.mark.postgres


@pytest.fixture
async def cell(postgres_url: str) -> AsyncIterator[Cell]:
    async with opened(postgres_url) as made:
        made.around.names_amounts = True
        yield made


async def ask(cell: Cell, build: CellBuild, sequence: int = 0) -> None:
    query = CellBuildQuery(spec=build.spec, sequence=sequence, requested_at=cell.clock.time())
    await cell.around.bus.publish(query)


async def answered(cell: Cell, build: CellBuild, sequence: int = 0) -> BuildEvent:
    """The first event that answers a query."""
    known = len(cell.around.events)
    await ask(cell, build, sequence)
    await cell.around.until(lambda: len(cell.around.events) > known)
    return cell.around.events[known]


async def forget(cell: Cell, build: CellBuild) -> None:
    """The cell has taken the build, and its database is what it was before."""
    await cell.around.bus.publish(build)
    uuid = build.spec.instance_uuid
    await cell.around.until(lambda: bool(cell.around.ends(uuid) or cell.around.spawns))
    async with asyncio.timeout(WAIT_S):
        while sum(one.in_hand for one in cell.consumers):  # noqa: ASYNC110  (nothing announces it)
            await asyncio.sleep(0.01)
    async with cell.database.raw() as connection:
        await connection.execute("DELETE FROM instances WHERE uuid = $1", uuid)
        await connection.execute("UPDATE identity SET origin = 'another cluster'")


async def test_a_build_without_a_record_and_without_a_machine_ends_and_holds_nothing(cell: Cell) -> None:
    build = cell.build(1, 2)
    uuid = build.spec.instance_uuid
    await ask(cell, build, 3)
    await cell.around.until(lambda: bool(cell.around.ends(uuid)))
    (end,) = [one for one in cell.around.events if one.terminal]
    assert (end.state, end.code, end.sequence > 3) == (BuildState.FAILED, "build.outcome_unknown", True)
    assert "build.lost" in end.reason
    assert uuid not in cell.around.held
    assert not cell.around.spawns


async def test_a_copy_of_its_command_that_comes_after_its_end_is_not_built(cell: Cell) -> None:
    build = replace(cell.build(1, 2), requested_at=cell.clock.time() - 61.0)
    uuid = build.spec.instance_uuid
    await ask(cell, build)
    await cell.around.until(lambda: bool(cell.around.ends(uuid)))
    await cell.around.bus.publish(build)
    await cell.around.until(lambda: len(cell.around.ends(uuid)) == 2)
    assert cell.around.ends(uuid) == [BuildState.FAILED, BuildState.FAILED]
    assert len({one.sequence for one in cell.around.events if one.terminal}) == 1  # the same end once more
    assert not cell.around.spawns


async def test_a_forgotten_build_whose_machine_runs_is_adopted_with_its_claim(cell: Cell) -> None:
    build = cell.build(1, 2)
    uuid = build.spec.instance_uuid
    await forget(cell, build)
    await ask(cell, build, 10)
    await cell.around.until(lambda: len(cell.around.ends(uuid)) == 2)
    assert cell.around.ends(uuid) == [BuildState.ACTIVE, BuildState.ACTIVE]
    assert await cell.state(uuid) is State.ACTIVE
    assert cell.around.running == {(cell.host(1), uuid): 1}
    await cell.check_at_rest()


async def test_nothing_is_released_while_a_service_does_not_answer(cell: Cell) -> None:
    build = cell.build(1, 2)
    uuid = build.spec.instance_uuid
    await forget(cell, build)
    events = len(cell.around.events)
    cell.around.silent = True
    with capture_logs() as logs:
        await ask(cell, build, 10)
        async with asyncio.timeout(WAIT_S):
            while not any(line["event"] == "build.searched" for line in logs):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert await cell.state(uuid) is State.ABSENT and len(cell.around.events) == events
    assert cell.around.held[uuid][:2] == (1, cell.host(1)) and cell.around.running
    cell.around.silent = False
    await ask(cell, build, 10)
    await cell.around.until(lambda: len(cell.around.ends(uuid)) == 2)
    await cell.check_at_rest()


async def test_a_machine_that_is_not_proved_to_be_its_own_stays_and_the_build_fails(cell: Cell) -> None:
    build = cell.build(1, 2)
    uuid = build.spec.instance_uuid
    await forget(cell, build)
    cell.around.names_amounts = False
    await ask(cell, build, 10)
    await cell.around.until(lambda: cell.around.ends(uuid)[-1:] == [BuildState.FAILED])
    assert cell.around.events[-1].code == "build.machine_exists"
    assert cell.around.running == {(cell.host(1), uuid): 1}
    assert not cell.around.destroys


async def test_a_query_releases_no_later_attempt_than_the_next_of_the_one_it_names(cell: Cell) -> None:
    """A record of it in another cell may have claimed since: only the query's own attempt is known to be over."""
    build = cell.build(1, 2)
    uuid = build.spec.instance_uuid
    cell.around.held[uuid] = (7, cell.host(2), 3)
    await ask(cell, build, 10)
    await cell.around.until(lambda: cell.around.ends(uuid) == [BuildState.FAILED])
    assert cell.around.held[uuid] == (7, cell.host(2), 3)


async def test_a_build_under_way_is_answered_by_a_number_above_all_that_the_schedulers_have(cell: Cell) -> None:
    cell.around.hangs = {cell.host(1)}
    build = cell.build(1, 2)
    await cell.around.bus.publish(build)
    await cell.around.until(lambda: bool(cell.around.events))
    for sequence in (10, 500):
        answer = await answered(cell, build, sequence)
        assert (answer.state, answer.terminal, answer.sequence) == (BuildState.BUILDING, False, sequence + 1)
    cell.around.hangs = set()
    await cell.around.bus.publish(cell.around.spawns[0])
    await cell.around.until(lambda: cell.around.ends(build.spec.instance_uuid) == [BuildState.ACTIVE])
    assert cell.around.events[-1].sequence == 502


async def test_an_end_that_the_schedulers_have_not_had_is_announced_under_its_own_number(cell: Cell) -> None:
    build = cell.build(1, 2)
    await cell.around.bus.publish(build)
    await cell.around.until(lambda: bool(cell.around.ends(build.spec.instance_uuid)))
    end = cell.around.events[-1]
    assert (await answered(cell, build, end.sequence - 1)).sequence == end.sequence
    above = await answered(cell, build, end.sequence + 7)
    assert (above.state, above.terminal, above.sequence) == (BuildState.ACTIVE, True, end.sequence + 8)


async def test_a_delete_that_comes_again_while_it_is_under_way_is_announced_again(cell: Cell) -> None:
    build = cell.build(1)
    uuid = build.spec.instance_uuid
    await cell.around.bus.publish(build)
    await cell.around.until(lambda: bool(cell.around.ends(uuid)))
    cell.around.silent = True
    delete = CellDelete(instance_uuid=uuid, project_id="p", begun=True)
    sequences = []
    for _ in range(3):
        known = len(cell.around.events)
        await cell.around.bus.publish(delete)
        await cell.around.until(lambda known=known: len(cell.around.events) > known)  # type: ignore[misc]
        assert cell.around.events[-1].state is BuildState.DELETING
        sequences.append(cell.around.events[-1].sequence)
    assert sequences == sorted(set(sequences))
    assert not cell.around.destroys


async def test_a_delete_that_came_before_its_build_is_carried_out_when_it_comes_again(cell: Cell) -> None:
    """Its build never comes: the cell has forgotten it. A tombstone would wait for it for ever."""
    build = cell.build(1)
    uuid = build.spec.instance_uuid
    await cell.around.bus.publish(CellDelete(instance_uuid=uuid, project_id="p"))
    await cell.around.bus.publish(CellDelete(instance_uuid=uuid, project_id="p", begun=True))
    await cell.around.until(lambda: cell.around.ends(uuid) == [BuildState.DELETED])
    assert uuid not in cell.around.held


async def test_a_query_of_a_build_that_is_deleted_here_ends_with_the_delete(cell: Cell) -> None:
    build = cell.build(1)
    uuid = build.spec.instance_uuid
    await cell.around.bus.publish(CellDelete(instance_uuid=uuid, project_id="p"))
    await ask(cell, build)
    await cell.around.until(lambda: cell.around.ends(uuid) == [BuildState.DELETED])
    assert uuid not in cell.around.held
