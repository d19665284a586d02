"""Operators' commands that were refused: what is repeated, replayed, or handled once more."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bus.bus import API
from bus.consuming.dead_letters import list_dead, replay
from bus.consuming.outcome import Outcome, Received
from bus.contracts.objects import ObjectChange, ObjectKind, ObjectsChange, ObjectsChanged
from bus.faults import DatabaseUnavailable, RequestRefused
from scheduler_worker.changes import ChangeHandler
from tests.contract.rig import until
from tests.integration.scheduler.test_objects import change, flavor
from tests.integration.scheduler.world import PATIENCE_S, World

pytestmark = pytest.mark.postgres

UNKNOWN = ObjectsChange(who="ann", why="", changes=(ObjectChange(kind=ObjectKind.FLAVOR, name="small"),))


async def test_a_refused_command_without_a_requester_is_carried_out_when_it_is_replayed(world: World) -> None:
    """Its operator mends the cause and replays it; no requester has its refusal."""
    await world.scheduler()
    await world.ask(UNKNOWN)
    transport = world.buses[API].transport
    await until(lambda: list_dead(transport))
    assert [letter.code for letter in await list_dead(transport)] == ["object.unknown"]
    await change(world, flavor("small", vcpus=1))
    await replay(transport, "scheduler.changes")
    made = flavor("small", vcpus=2)
    await until(lambda: _is_gone(world, made))
    assert await list_dead(transport) == []


async def _is_gone(world: World, made: ObjectChange) -> bool:
    """Whether this object is made anew: there is none of its name."""
    anew = ObjectChange(kind=made.kind, name=made.name, body=made.body, if_version=0)
    try:
        await change(world, anew)
    except RequestRefused:
        return False
    return True


async def test_a_refusal_keeps_its_reason_when_its_batch_is_handled_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another command of the batch met a transient fault."""
    await world.scheduler()
    call, has_failed = ChangeHandler.__call__, False

    async def fails_once(handler: ChangeHandler, batch: Sequence[Received]) -> Sequence[Outcome]:
        nonlocal has_failed
        outcomes = await call(handler, batch)
        if not has_failed:
            has_failed = True
            raise DatabaseUnavailable("planted")
        return outcomes

    monkeypatch.setattr(ChangeHandler, "__call__", fails_once)
    with pytest.raises(RequestRefused) as refused:
        await world.buses[API].request(UNKNOWN, ObjectsChanged, timeout_s=PATIENCE_S)
    assert refused.value.code == "object.unknown"
