"""Builds of a cell that are given up, or queried: each ends with one event."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from bus.contracts.base import Message, encode
from bus.contracts.build import BuildState
from bus.contracts.cell import CellBuild, CellBuildQuery, CellDelete
from bus.contracts.queues import DEAD
from bus.published_key import CODE
from bus.transport import Outgoing
from cell_conductor.engine import Engine
from cell_conductor.state.events import InstanceEvent
from cell_conductor.state.instance import State
from tests.integration.cell_conductor.neighbours import Cell
from tests.kit.waiting import until

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
    assert (failed.state, failed.code) == (BuildState.FAILED, "delivery.dead_lettered")
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


# --- A request that comes again, or is given up, after the cell was restored and has recovered.


@pytest.mark.parametrize("is_given_up", [False, True], ids=["delivered again", "given up"])
async def test_a_running_machine_keeps_its_allocation(cell: Cell, *, is_given_up: bool) -> None:
    """The build was carried out and its delivery never acknowledged; then the cell's database was restored."""
    build = replace(cell.build(1, 2), requested_at=cell.clock.time())
    uuid = build.spec.instance_uuid
    await cell.around.bus.publish(build)
    await until(lambda: cell.around.ends(uuid) == [BuildState.ACTIVE])
    await cell.sql("DELETE FROM instances", "DELETE FROM handled", "UPDATE identity SET origin = 'another cluster'")
    await cell.recover()
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


@pytest.mark.parametrize("asked", ["query", "build", "delete"])
async def test_nothing_is_released_or_ended_while_a_service_is_down(cell: Cell, asked: str) -> None:
    """A delete is on record, and everything else waits: its machine may run there."""
    build = replace(cell.build(1, 2), requested_at=cell.clock.time())
    uuid = build.spec.instance_uuid
    await cell.around.bus.publish(build)
    await until(lambda: cell.around.ends(uuid) == [BuildState.ACTIVE])
    cell.leases.is_down = True
    await cell.sql("DELETE FROM instances", "DELETE FROM handled", "UPDATE identity SET origin = 'another cluster'")
    await cell.recover()
    if asked == "delete":
        await cell.around.bus.publish(CellDelete(instance_uuid=uuid, project_id="p", may_have_started=True, attempt=1))
    elif asked == "query":
        await ask(cell, build, 10)
    else:
        await cell.around.bus.publish(build)
    told = BuildState.DELETING if asked == "delete" else BuildState.ACTIVE
    await until(lambda: told in [one.state for one in cell.around.events[1:]])
    async with cell.store.transaction() as transaction:
        (record,) = (await transaction.lock([uuid])).values()
    assert record.blocked_reason == "host_absent" and (record.next_state is State.DELETED) is (asked == "delete")
    assert cell.around.held[uuid][:2] == (1, cell.host(1)) and cell.around.running and not cell.around.destroys
    assert BuildState.FAILED not in cell.around.ends(uuid)
    cell.leases.is_down = False
    await cell.sql("UPDATE instances SET deadline = 0")
    await cell.engine.sweep()
    await cell.recovery.look()
    if asked == "delete":
        await until(lambda: cell.around.ends(uuid)[-1:] == [BuildState.DELETED])
        assert not cell.around.held
    else:
        assert await cell.state(uuid) is State.ACTIVE
    await cell.check_at_rest()


# --- The schedulers query a build that has had no event: it is answered from the record, or ends if there is
# nothing.


async def ask(cell: Cell, build: CellBuild, sequence: int = 0) -> None:
    query = CellBuildQuery(spec=build.spec, sequence=sequence, requested_at=cell.clock.time())
    await cell.around.bus.publish(query)


async def test_a_query_releases_no_later_attempt_than_the_next_of_the_one_it_names(cell: Cell) -> None:
    """A record of it in another cell may have claimed since: only the query's own attempt is known to be over."""
    build = cell.build(1, 2)
    uuid = build.spec.instance_uuid
    cell.around.held[uuid] = (7, cell.host(2), 3)
    await ask(cell, build, 10)
    await until(lambda: cell.around.ends(uuid) == [BuildState.FAILED])
    assert cell.around.held[uuid] == (7, cell.host(2), 3)
