"""Builds of a cell that are given up, or queried: each ends with one event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from bus.contracts.base import Message, Refusal, encode
from bus.contracts.build import BuildState
from bus.contracts.cell import CellBuild, CellBuildQuery, CellDelete, ComputeHosts, HostReport, Running
from bus.contracts.queues import DEAD
from bus.port import Outgoing
from bus.published_key import CODE
from cell_conductor.domain.events import InstanceEvent
from cell_conductor.domain.instance import Brief, Instance, State
from cell_conductor.domain.report import differences, is_over
from cell_conductor.domain.steps import Step
from cell_conductor.engine import Engine
from scheduler_worker.domain.builds import RecordedBuild, announced_build
from tests.integration.conductor.neighbours import Cell, opened
from tests.kit.waiting import until
from tests.unit.conductor.scenario import (
    DEPLOYMENT,
    RELEASED,
    SET_BACK_AT,
    UUID,
    announced,
    host,
    requested,
    run_after,
    spawned,
)

# --- A message that a cell's queue of requests gives up ends with one event: its client does not wait for ever.


pytestmark = pytest.mark.postgres


def crash(monkeypatch: pytest.MonkeyPatch, bad: str) -> None:
    """A conductor's handling of this instance's requests ends with an exception."""
    take = Engine.take

    async def crashes(engine: Engine, incoming: Sequence[InstanceEvent], *, source: str) -> asyncio.Future[None] | None:
        if source == "requests" and any(one.uuid == bad for one in incoming):
            raise RuntimeError("planted")
        return await take(engine, incoming, source=source)

    monkeypatch.setattr(Engine, "take", crashes)


async def test_a_build_that_a_conductor_gave_up_ends_with_one_event(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client waited for ever, and its claim was held for ever."""
    bad, good = cell.build(1, 2), cell.build(3)
    uuid = bad.spec.instance_uuid
    crash(monkeypatch, uuid)
    await cell.around.bus.publish_all([(bad, ""), (good, "")])
    await until(lambda: bool(cell.around.ends(uuid)) and bool(cell.around.ends(good.spec.instance_uuid)))
    (failed,) = [event for event in cell.around.events if event.instance_uuid == uuid and event.terminal]
    assert (failed.state, failed.code) == (BuildState.FAILED, "delivery.given_up")
    assert "handler.crashed" in failed.reason
    assert cell.around.ends(good.spec.instance_uuid) == [BuildState.ACTIVE]
    assert uuid not in cell.around.held, "the claim is released"
    assert not [spawn for spawn in cell.around.spawns if spawn.spec.instance_uuid == uuid]
    monkeypatch.undo()
    await cell.around.bus.publish(bad)  # an operator sends the letter back: it has ended
    await until(lambda: len(cell.around.ends(uuid)) == 2)  # a delete beside it may overtake it
    delete = CellDelete(instance_uuid=uuid, project_id="p")
    await cell.around.bus.publish(delete)
    await until(lambda: cell.around.ends(uuid)[-1:] == [BuildState.DELETED])
    first, again, _deleted = [event for event in cell.around.events if event.instance_uuid == uuid and event.terminal]
    assert (again.state, again.sequence) == (BuildState.FAILED, first.sequence), "the same end, under its number"
    await cell.check_at_rest()


async def hand_over_as_given_up(cell: Cell, message: Message) -> None:
    """A letter of the broker's: its queue had delivered it too often."""
    await cell.around.bus.transport.publish(
        Outgoing(
            exchange=DEAD,
            routing_key="conductor.requests",
            body=encode(message),
            message_id="again",
            type="cell.build.v1",
            headers={CODE: "broker.delivery_limit"},
        )
    )


# --- A build under attempt 1 that was given up after a set-back is doubted as one under attempt 2 is.


WHY = Refusal(code="broker.delivery_limit", reason="r")


def brief(record: Instance) -> Brief:
    return Brief(
        record.uuid,
        record.state,
        record.host_uuid,
        "s1",
        record.attempt,
        record.since,
        newest=record.newest,
        doubted=record.doubted,
        reused_from=record.reused_from,
        code=record.code,
        then=record.then,
    )


def report_of(attempt: int, on: int = 1) -> ComputeHosts:
    machine = Running(instance_uuid=UUID, attempt=attempt, deployment=DEPLOYMENT)
    hosts = (HostReport(uuid=host(on), name=f"host-{on}", running=(machine,)),)
    return ComputeHosts(service="s1", cell="c1", epoch=1, sequence=1, hosts=hosts, complete=True)


def announced_to(build: RecordedBuild, *stepped: Step) -> RecordedBuild:
    for one in stepped:
        for event in announced(one):
            build = announced_build(build, event)[0]
    return build


def known_at_the_top() -> tuple[RecordedBuild, Instance]:
    """The schedulers' record once the build was active, and the cell's record of then."""
    building = run_after(requested(SET_BACK_AT + 100.0))  # no set-back was known then: numbered from 10 on
    up = run_after(spawned(), start=building.instance)
    top = RecordedBuild(instance_uuid=UUID, project_id="p", state=BuildState.SCHEDULED, sequence=2, cell="c1")
    return announced_to(top, building, up), up.instance


@pytest.mark.parametrize("attempt", [1, 2])
def test_its_machine_is_kept_and_not_destroyed(attempt: int) -> None:
    over = run_after(replace(requested(SET_BACK_AT - 10.0), given_up=WHY, attempt=attempt, found=()))
    for record in (over.instance, run_after(RELEASED, start=over.instance).instance):
        known = replace(brief(record), untried=record.untried)
        found = differences(report_of(attempt), [known], now=9e3, grace_s=30.0, deployment=DEPLOYMENT)
        kinds = [one.kind.value for one in found.unexplained]
        assert not is_over(record, attempt, host(1)), f"{record.state.value}: over; {kinds}; harmful: {found.harmful}"
        assert kinds == ["quarantined"] and not found.harmful


@pytest.mark.parametrize("attempt", [1, 2])
def test_its_end_reaches_schedulers_that_have_it_as_active(attempt: int) -> None:
    top, _ = known_at_the_top()
    assert (top.state, top.terminal) == (BuildState.ACTIVE, True)
    over = run_after(replace(requested(SET_BACK_AT - 10.0), given_up=WHY, attempt=attempt, found=()))
    ended = run_after(RELEASED, start=over.instance)
    (event,) = announced(ended)
    after = announced_to(top, ended)
    assert after.state is BuildState.FAILED, (
        f"the cell has it {ended.instance.state.value} and announced {event.state.value} as number {event.sequence};"
        f" the schedulers have it {after.state.value} under number {after.sequence}"
    )


@pytest.mark.parametrize("is_given_up", [False, True], ids=["delivered again", "given up"])
async def test_a_running_machine_keeps_its_allocation(cell: Cell, *, is_given_up: bool) -> None:
    """The build was carried out and its delivery never acknowledged; then the cell's database was set back."""
    build = replace(cell.build(1, 2), requested_at=cell.clock.time())
    uuid = build.spec.instance_uuid
    await cell.around.bus.publish(build)
    await until(lambda: cell.around.ends(uuid) == [BuildState.ACTIVE])
    await cell.sql("DELETE FROM instances", "DELETE FROM handled", "UPDATE identity SET origin = 'another cluster'")
    await cell.engine.sweep()  # notices it
    if is_given_up:
        await hand_over_as_given_up(cell, build)
    else:
        await cell.around.bus.publish(build)
    await until(lambda: len(cell.around.ends(uuid)) == 2)
    await cell.drain()
    state = await cell.state(uuid)
    assert (state, cell.around.running, set(cell.around.held)) == (State.ACTIVE, {(cell.host(1), uuid): 1}, {uuid}), (
        f"the cell has it {state.value}; running: {cell.around.running}; held: {cell.around.held}; announced:"
        f" {[(one.state.value, one.sequence, one.code) for one in cell.around.events]}"
    )


# --- The schedulers query a build that has had no event: it is answered from the record, or ends if there is
# nothing.


@pytest.fixture
async def finder(postgres_url: str) -> AsyncIterator[Cell]:
    async with opened(postgres_url) as made:
        made.around.names_amounts = True
        yield made


async def ask(finder: Cell, build: CellBuild, sequence: int = 0) -> None:
    query = CellBuildQuery(spec=build.spec, sequence=sequence, requested_at=finder.clock.time())
    await finder.around.bus.publish(query)


async def forget(finder: Cell, build: CellBuild) -> None:
    """The cell has taken the build, and its database is what it was before."""
    await finder.around.bus.publish(build)
    uuid = build.spec.instance_uuid
    await until(lambda: bool(finder.around.ends(uuid) or finder.around.spawns))
    await until(lambda: not sum(one.in_hand for one in finder.consumers))
    async with finder.database.raw() as connection:
        await connection.execute("DELETE FROM instances WHERE uuid = $1", uuid)
        await connection.execute("UPDATE identity SET origin = 'another cluster'")


async def test_nothing_is_released_while_a_service_does_not_answer(finder: Cell) -> None:
    build = finder.build(1, 2)
    uuid = build.spec.instance_uuid
    await forget(finder, build)
    events = len(finder.around.events)
    finder.around.silent = True
    with capture_logs() as logs:
        await ask(finder, build, 10)
        await until(lambda: any(line["event"] == "build.searched" for line in logs))
    assert await finder.state(uuid) is State.ABSENT and len(finder.around.events) == events
    assert finder.around.held[uuid][:2] == (1, finder.host(1)) and finder.around.running
    finder.around.silent = False
    await ask(finder, build, 10)
    await until(lambda: len(finder.around.ends(uuid)) == 2)
    await finder.check_at_rest()


async def test_a_query_releases_no_later_attempt_than_the_next_of_the_one_it_names(finder: Cell) -> None:
    """A record of it in another cell may have claimed since: only the query's own attempt is known to be over."""
    build = finder.build(1, 2)
    uuid = build.spec.instance_uuid
    finder.around.held[uuid] = (7, finder.host(2), 3)
    await ask(finder, build, 10)
    await until(lambda: finder.around.ends(uuid) == [BuildState.FAILED])
    assert finder.around.held[uuid] == (7, finder.host(2), 3)
