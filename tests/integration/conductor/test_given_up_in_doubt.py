"""A build under attempt 1 that was given up after a set-back is doubted as one under attempt 2 is."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from bus.contracts.base import Refusal
from bus.contracts.build import BuildState
from cell_conductor.domain.instance import Instance, State
from cell_conductor.domain.proof import is_over
from cell_conductor.domain.report import differences
from scheduler_worker.domain.builds import RecordedBuild
from tests.integration.conductor.neighbours import Cell, opened
from tests.integration.conductor.test_given_up import hand_over_as_given_up
from tests.unit.conductor.scenario import DEPLOYMENT, RELEASED, UUID, announced, host, spawned
from tests.unit.conductor.test_doubted import SET_BACK_AT, announced_to, brief, report_of, requested, run

WHY = Refusal(code="broker.delivery_limit", reason="r")


def known_at_the_top() -> tuple[RecordedBuild, Instance]:
    """The schedulers' record once the build was active, and the cell's record of then."""
    building = run(requested(SET_BACK_AT + 100.0))  # no set-back was known then: numbered from 10 on
    up = run(spawned(), start=building.instance)
    top = RecordedBuild(instance_uuid=UUID, project_id="p", state=BuildState.SCHEDULED, sequence=2, cell="c1")
    return announced_to(top, building, up), up.instance


@pytest.mark.parametrize("attempt", [1, 2])
def test_its_machine_is_kept_and_not_destroyed(attempt: int) -> None:
    over = run(replace(requested(SET_BACK_AT - 10.0), given_up=WHY, attempt=attempt))
    for record in (over.instance, run(RELEASED, start=over.instance).instance):
        known = replace(brief(record), first_not_tried=record.first_not_tried)
        found = differences(report_of(attempt), [known], now=9e3, grace_s=30.0, deployment=DEPLOYMENT)
        kinds = [one.kind.value for one in found.unexplained]
        assert not is_over(record, attempt, host(1)), f"{record.state.value}: over; {kinds}; harmful: {found.harmful}"
        assert kinds == ["quarantined"] and not found.harmful


@pytest.mark.parametrize("attempt", [1, 2])
def test_its_end_reaches_schedulers_that_have_it_as_active(attempt: int) -> None:
    top, _ = known_at_the_top()
    assert (top.state, top.terminal) == (BuildState.ACTIVE, True)
    over = run(replace(requested(SET_BACK_AT - 10.0), given_up=WHY, attempt=attempt))
    ended = run(RELEASED, start=over.instance)
    (event,) = announced(ended)
    after = announced_to(top, ended)
    assert after.state is BuildState.FAILED, (
        f"the cell has it {ended.instance.state.value} and announced {event.state.value} as number {event.sequence};"
        f" the schedulers have it {after.state.value} under number {after.sequence}"
    )


@pytest.fixture
async def cell(postgres_url: str) -> AsyncIterator[Cell]:
    async with opened(postgres_url) as made:
        yield made


@pytest.mark.postgres
@pytest.mark.parametrize("is_given_up", [False, True], ids=["delivered again", "given up"])
async def test_a_running_machine_keeps_its_allocation(cell: Cell, *, is_given_up: bool) -> None:
    """The build was carried out and its delivery never acknowledged; then the cell's database was set back."""
    build = replace(cell.build(1, 2), requested_at=cell.clock.time())
    uuid = build.spec.instance_uuid
    await cell.around.bus.publish(build)
    await cell.around.until(lambda: cell.around.ends(uuid) == [BuildState.ACTIVE])
    async with cell.database.raw() as connection:
        await connection.execute("DELETE FROM instances")
        await connection.execute("DELETE FROM handled")
        await connection.execute("UPDATE identity SET origin = 'another cluster'")
    await cell.engine.sweep()  # notices it
    if is_given_up:
        await hand_over_as_given_up(cell, build)
    else:
        await cell.around.bus.publish(build)
    await cell.around.until(lambda: len(cell.around.ends(uuid)) == 2)
    await cell.drain()
    state = await cell.state(uuid)
    assert (state, cell.around.running, set(cell.around.held)) == (State.ACTIVE, {(cell.host(1), uuid): 1}, {uuid}), (
        f"the cell has it {state.value}; running: {cell.around.running}; held: {cell.around.held}; announced:"
        f" {[(one.state.value, one.sequence, one.code) for one in cell.around.events]}"
    )
