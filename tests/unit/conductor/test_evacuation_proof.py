"""A conductor whose copy of the fences may be old does not undo an evacuation: it reads the record first."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from bus.bus import Bus
from bus.clock import SystemClock
from bus.contracts.moves import MoveKind
from bus.faults import Transient
from bus.memory import MemoryBroker, MemoryTransport
from bus.persistence.outbox import OutboxMessage
from cell_conductor.config import ConductorConfig
from cell_conductor.domain.events import InstanceEvent
from cell_conductor.domain.fences import Fence
from cell_conductor.domain.instance import Instance, State
from cell_conductor.engine import Engine
from cell_conductor.fences import FenceKeeper
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable
from tests.unit.conductor.move_scenario import Scenario, active, claimed, ended, request
from tests.unit.conductor.scenario import PATIENCE, UUID, host
from tests.unit.conductor.test_table_fences import fenced

SECOND = "00000000-0000-4000-8000-0000000000ff"


class Relay:
    def send(self, row_id: int | None, outgoing: Sequence[OutboxMessage]) -> None:
        """Nothing."""


def evacuated(uuid: str, source: int) -> Instance:
    """Its destination was claimed, and is checked."""
    made = Scenario(active(), replace(PATIENCE, fences=fenced(1)))
    made.apply(request(MoveKind.EVACUATE, 2, 3), claimed())
    one = made.instance
    assert one.move is not None and one.move.source is not None and one.spec is not None
    where = replace(one.move.source, host_uuid=host(source), allocations={host(source): {"VCPU": 1}})
    return replace(
        one,
        uuid=uuid,
        spec=replace(one.spec, instance_uuid=uuid),
        selections=(where, *one.selections[1:]),
        move=replace(one.move, source=where, request_id=uuid.replace("0", "d", 1)),
    )


async def test_another_hosts_lifted_fence_does_not_undo_an_evacuation_whose_fence_stands() -> None:
    clock = SystemClock()
    bus = Bus("c1", MemoryTransport(MemoryBroker(clock), "c1"), process="conductor", clock=clock, rng=random.Random(1))
    store = MemoryInstances(MemoryInstanceTable(clock).session())
    await store.open()
    keeper = FenceKeeper(store, bus, clock=clock, config=ConductorConfig(), cell="c1")
    for number in (1, 5):
        await store.fences.put(Fence(host_uuid=host(number), host=f"h{number}", version=1))
    await keeper.load()
    config = ConductorConfig(claim_timeout_s=0.05)
    engine = Engine(store=store, bus=bus, relay=Relay(), clock=clock, config=config, cell="c1", fences=keeper)
    first, second = evacuated(UUID, 1), evacuated(SECOND, 5)
    async with store.transaction() as transaction:
        await transaction.insert([first, second])
    await store.fences.put(Fence(host_uuid=host(1), host="h1", version=2, lifting=True))
    assert await store.fences.lift(host(1), 2)  # by another conductor
    with pytest.raises(Transient, match="lifted meanwhile"):
        await engine.take([InstanceEvent(UUID, ended(first, 2, 2))], source="results")
    for uuid, one in ((SECOND, second), (UUID, first)):
        with pytest.raises(Transient, match="not read yet"):
            await engine.take([InstanceEvent(uuid, ended(one, 2, 2))], source="results")
    await keeper.load()
    for uuid, one in ((SECOND, second), (UUID, first)):
        await engine.take([InstanceEvent(uuid, ended(one, 2, 2))], source="results")
    async with store.transaction() as transaction:
        states = {uuid: one.state for uuid, one in (await transaction.lock([UUID, SECOND])).items()}
    assert states == {UUID: State.REVERTING, SECOND: State.FINISHING}


def test_a_fence_that_is_being_lifted_proves_nothing() -> None:
    """The host is on then, to destroy its losses."""
    lifting = {uuid: replace(fence, lifting=True) for uuid, fence in fenced(1).items()}
    made = Scenario(active(), replace(PATIENCE, fences=fenced(1)))
    made.apply(request(MoveKind.EVACUATE, 2, 3), claimed())
    made.context = replace(PATIENCE, fences=lifting)
    made.end(2, 2)
    assert made.instance.state is State.REVERTING
    assert not made.spawns
    late = Scenario(active(), replace(PATIENCE, fences=lifting))
    late.apply(request(MoveKind.EVACUATE, 2))
    assert late.instance.state is State.ACTIVE
