"""A cell's database that dies and has forgotten its last commits: what a conductor has had on disk before."""

from __future__ import annotations

from typing import Any

import pytest

from bus.clock import SystemClock
from cell_conductor.config import ConductorConfig
from cell_conductor.domain.events import Event, InstanceEvent
from cell_conductor.domain.instance import Instance, State
from cell_conductor.engine import Engine
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable
from tests.kit.virtual_time import on_virtual_time
from tests.unit.conductor.scenario import TIMED_OUT, UUID, queried, run, spawned
from tests.unit.conductor.world import Queried, Relay


async def after_crash(building: Instance, event: Event) -> Instance:
    """The record, when this has happened and the database has died at once."""
    table, bus, relay = MemoryInstanceTable(clock := SystemClock()), Queried(), Relay()
    store = MemoryInstances(table.session())
    await store.open()
    async with store.transaction() as transaction:
        await transaction.insert([building])
    made: dict[str, Any] = {"store": store, "bus": bus, "relay": relay, "config": ConductorConfig()}
    engine = Engine(**made, clock=clock, cell="c1")
    await engine._apply([InstanceEvent(UUID, event)])
    assert relay.sent, "the client is informed"
    assert table.instances[UUID].state is State.ACTIVE
    table.crash()
    return table.instances[UUID]


@pytest.mark.parametrize(("late", "kept"), [(False, State.BUILDING), (True, State.ACTIVE)])
@on_virtual_time
async def test_the_answer_of_a_host_that_was_queried_in_vain_is_on_disk(late: bool, kept: State) -> None:
    """The message of a result comes again, and a build has time for that. One whose host was queried because it was
    late was given up before, and its machine, of which the client was informed, destroyed (seed 41019 of 2026-11-22).
    """
    building = run(queried(), *([TIMED_OUT] if late else [])).instance
    assert building.queried is late
    assert (await after_crash(building, spawned())).state is kept
