"""One suite for both keepers of a cell's fences and losses."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.contracts.cell import InstanceSpec, Selection
from bus.persistence.conflict import Conflict
from bus.persistence.database import Database
from cell_conductor.domain.fences import Fence, Loss
from cell_conductor.domain.instance import Instance, State
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable
from cell_conductor.store.port import InstanceStore
from cell_conductor.store.postgres import PostgresInstances

A, B, C = (f"{n}0000000-0000-4000-8000-000000000000" for n in "abc")
HOST, OTHER = (f"{n}0000000-0000-4000-8000-000000000000" for n in "12")
FENCE = Fence(host_uuid=HOST, host="h1", version=3, reason="PSU", by="ann", at=5.0)


@pytest.fixture(params=["memory", pytest.param("postgres", marks=pytest.mark.postgres)])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[InstanceStore]:
    made: InstanceStore
    if request.param == "memory":
        made = MemoryInstances(MemoryInstanceTable(SystemClock()).session())
    else:
        made = PostgresInstances(Database(request.getfixturevalue("postgres_url"), "cell_c1"))
    await made.open()
    yield made
    await made.close()


def loss(uuid: str, attempt: int = 1, host: str = HOST) -> Loss:
    return Loss(host_uuid=host, instance_uuid=uuid, attempt=attempt, service="s", at=7.0)


async def lose(store: InstanceStore, *losses: Loss, hosts: tuple[str, ...] = (HOST,)) -> bool:
    async with store.transaction() as transaction:
        return await transaction.lose(hosts, losses)


async def test_of_decisions_about_a_host_the_newest_counts(store: InstanceStore) -> None:
    assert await store.fences.put(FENCE)
    assert not await store.fences.put(FENCE)
    assert not await store.fences.put(replace(FENCE, version=2, lifting=True))
    assert await store.fences.fences() == [FENCE]
    newer = replace(FENCE, version=4, lifting=True, by="bob")
    assert await store.fences.put(newer)
    assert await store.fences.fences() == [newer]


async def test_losses_are_recorded_under_a_fence_alone(store: InstanceStore) -> None:
    assert not await lose(store, loss(A))
    assert await store.fences.losses() == []
    await store.fences.put(FENCE)
    assert await lose(store, loss(A), loss(B, 2))
    assert not await lose(store, loss(C), hosts=(HOST, OTHER))
    assert await store.fences.losses() == [loss(A), loss(B, 2)]
    with pytest.raises(Conflict):
        async with store.optimistic(()) as transaction:
            await transaction.lose([HOST], [loss(C)])


async def test_a_loss_is_forgotten_up_to_the_attempt_that_was_destroyed(store: InstanceStore) -> None:
    await store.fences.put(FENCE)
    await lose(store, loss(A, 3))
    await lose(store, loss(A, 2))
    await store.fences.forget([loss(A, 2), loss(B)])
    assert [one.attempt for one in await store.fences.losses()] == [3]
    await store.fences.forget([loss(A, 3)])
    assert await store.fences.losses() == []


async def test_a_fence_is_lifted_by_its_newest_decision_once_nothing_is_lost(store: InstanceStore) -> None:
    await store.fences.put(FENCE)
    assert not await store.fences.lift(HOST, 3)  # no decision lifts it
    await lose(store, loss(A))
    await store.fences.put(replace(FENCE, version=4, lifting=True))
    assert not await store.fences.lift(HOST, 4)
    await store.fences.forget([loss(A)])
    assert not await store.fences.lift(HOST, 3)
    assert await store.fences.lift(HOST, 4)
    assert await store.fences.fences() == []
    assert not await store.fences.lift(HOST, 4)


async def test_what_touches_a_host_is_found_in_pages(store: InstanceStore) -> None:
    def instance(uuid: str, state: State, host: str = HOST) -> Instance:
        here = Selection(host_uuid=host, host="h", service="s", allocations={host: {"VCPU": 1}})
        spec = InstanceSpec(instance_uuid=uuid, project_id="p")
        return Instance(uuid=uuid, state=state, spec=spec, selections=(here,), attempt=1)

    async with store.transaction() as transaction:
        await transaction.insert(
            [
                instance(A, State.ACTIVE),
                instance(B, State.DELETING),
                instance(C, State.ACTIVE, OTHER),
                instance(C.replace("c", "d"), State.FAILED),
            ]
        )
    nothing = "00000000-0000-0000-0000-000000000000"
    assert await store.fences.touching(HOST, nothing, 10) == [A, B]
    assert await store.fences.touching(HOST, nothing, 1) == [A]
    assert await store.fences.touching(HOST, A, 1) == [B]
