"""A message that a cell's queue of requests gives up ends with one event: its client does not wait for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from bus.contracts.base import Message, encode
from bus.contracts.build import BuildState
from bus.contracts.catalogue import DEAD
from bus.contracts.cell import CellDelete
from bus.contracts.moves import CellMove, MoveKind, MoveState
from bus.key_trust import CODE
from bus.port import Outgoing
from cell_conductor.domain.events import InstanceEvent
from cell_conductor.domain.instance import State
from cell_conductor.engine import Engine
from tests.integration.conductor.neighbours import Cell, opened

REQUEST = "90000000-0000-4000-8000-000000000001"


@pytest.fixture
async def cell(postgres_url: str) -> AsyncIterator[Cell]:
    async with opened(postgres_url) as made:
        yield made


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
    await cell.around.until(lambda: bool(cell.around.ends(uuid)) and bool(cell.around.ends(good.spec.instance_uuid)))
    (failed,) = [event for event in cell.around.events if event.instance_uuid == uuid and event.terminal]
    assert (failed.state, failed.code) == (BuildState.FAILED, "delivery.given_up")
    assert "handler.crashed" in failed.reason
    assert cell.around.ends(good.spec.instance_uuid) == [BuildState.ACTIVE]
    assert uuid not in cell.around.held, "the claim is released"
    assert not [spawn for spawn in cell.around.spawns if spawn.spec.instance_uuid == uuid]
    monkeypatch.undo()
    await cell.around.bus.publish(bad)  # an operator sends the letter back: it has ended
    delete = CellDelete(instance_uuid=uuid, project_id="p")
    await cell.around.bus.publish(delete)
    await cell.around.until(lambda: cell.around.ends(uuid)[-1:] == [BuildState.DELETED])
    first, again, _deleted = [event for event in cell.around.events if event.instance_uuid == uuid and event.terminal]
    assert (again.state, again.sequence) == (BuildState.FAILED, first.sequence), "the same end, under its number"
    await cell.check_at_rest()


async def test_a_build_that_was_begun_before_its_message_was_given_up_goes_on(cell: Cell) -> None:
    build = cell.build(1)
    uuid = build.spec.instance_uuid
    await cell.around.bus.publish(build)
    await cell.around.until(lambda: cell.around.ends(uuid) == [BuildState.ACTIVE])
    await hand_over_as_given_up(cell, build)
    await cell.around.until(lambda: len(cell.around.ends(uuid)) > 1)
    await cell.drain()
    assert await cell.state(uuid) is State.ACTIVE
    ends = [event for event in cell.around.events if event.instance_uuid == uuid and event.terminal]
    assert {(event.state, event.sequence) for event in ends} == {(BuildState.ACTIVE, ends[0].sequence)}, "the same end"
    assert len([spawn for spawn in cell.around.spawns if spawn.spec.instance_uuid == uuid]) == 1
    await cell.check_at_rest()


async def test_a_delete_that_a_conductor_gave_up_is_tried_once_more(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = cell.build(1)
    uuid = build.spec.instance_uuid
    await cell.around.bus.publish(build)
    await cell.around.until(lambda: cell.around.ends(uuid) == [BuildState.ACTIVE])
    crash(monkeypatch, uuid)
    await cell.around.bus.publish(CellDelete(instance_uuid=uuid, project_id="p"))
    await cell.around.until(lambda: cell.around.ends(uuid) == [BuildState.ACTIVE, BuildState.DELETED])
    await cell.check_at_rest()


async def test_a_move_that_a_conductor_gave_up_is_refused(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    build = cell.build(1)
    uuid = build.spec.instance_uuid
    await cell.around.bus.publish(build)
    await cell.around.until(lambda: cell.around.ends(uuid) == [BuildState.ACTIVE])
    crash(monkeypatch, uuid)
    for _ in range(2):  # and again: it is answered as it was
        await cell.around.bus.publish(
            CellMove(request_id=REQUEST, instance_uuid=uuid, project_id="p", kind=MoveKind.STOP)
        )
    await cell.around.until(lambda: len(cell.around.moves) == 2)
    for event in cell.around.moves:
        assert (event.state, event.code, event.terminal) == (MoveState.REFUSED, "delivery.given_up", True)
    assert await cell.state(uuid) is State.ACTIVE


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
