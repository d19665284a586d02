"""One suite for both keepers of a cell's fences and losses."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.cell import InstanceSpec, Selection
from bus.contracts.moves import MoveKind
from bus.persistence.guarded_statement import Conflict
from cell_conductor.domain.fences import Fence, Loss
from cell_conductor.domain.instance import Instance, Move, State
from cell_conductor.store.port import InstanceStore

A, B, C = (f"{n}0000000-0000-4000-8000-000000000000" for n in "abc")
HOST, OTHER = (f"{n}0000000-0000-4000-8000-000000000000" for n in "12")
FENCE = Fence(host_uuid=HOST, host="h1", version=3, reason="PSU", by="ann", at=5.0)


def loss(uuid: str, attempt: int = 1, host: str = HOST) -> Loss:
    return Loss(host_uuid=host, instance_uuid=uuid, attempt=attempt, service="s", at=7.0)


async def lose(instances: InstanceStore, *losses: Loss, hosts: tuple[str, ...] = (HOST,)) -> bool:
    async with instances.transaction() as transaction:
        return await transaction.lose(hosts, losses)


async def test_of_decisions_about_a_host_the_newest_counts(instances: InstanceStore) -> None:
    assert await instances.fences.put(FENCE)
    assert not await instances.fences.put(FENCE)
    assert not await instances.fences.put(replace(FENCE, version=2, lifting=True))
    assert await instances.fences.fences() == [FENCE]
    newer = replace(FENCE, version=4, lifting=True, by="bob")
    assert await instances.fences.put(newer)
    assert await instances.fences.fences() == [newer]


async def test_losses_are_recorded_under_a_fence_alone(instances: InstanceStore) -> None:
    assert not await lose(instances, loss(A))
    assert await instances.fences.losses() == []
    await instances.fences.put(FENCE)
    assert await lose(instances, loss(A), loss(B, 2))
    assert not await lose(instances, loss(C), hosts=(HOST, OTHER))
    assert await instances.fences.losses() == [loss(A), loss(B, 2)]
    with pytest.raises(Conflict):
        async with instances.optimistic(()) as transaction:
            await transaction.lose([HOST], [loss(C)])


async def test_a_loss_is_forgotten_up_to_the_attempt_that_was_destroyed(instances: InstanceStore) -> None:
    await instances.fences.put(FENCE)
    await lose(instances, loss(A, 3))
    await lose(instances, loss(A, 2))
    await instances.fences.delete_losses([loss(A, 2), loss(B)])
    assert [one.attempt for one in await instances.fences.losses()] == [3]
    await instances.fences.delete_losses([loss(A, 3)])
    assert await instances.fences.losses() == []


async def test_a_fence_is_lifted_by_its_newest_decision_once_nothing_is_lost(instances: InstanceStore) -> None:
    await instances.fences.put(FENCE)
    assert not await instances.fences.lift(HOST, 3)  # no decision lifts it
    await lose(instances, loss(A))
    await instances.fences.put(replace(FENCE, version=4, lifting=True))
    assert not await instances.fences.lift(HOST, 4)
    await instances.fences.delete_losses([loss(A)])
    assert not await instances.fences.lift(HOST, 3)
    assert await instances.fences.lift(HOST, 4)
    assert await instances.fences.fences() == []
    assert not await instances.fences.lift(HOST, 4)


async def test_a_fence_stays_while_an_evacuation_from_its_host_may_run_elsewhere(instances: InstanceStore) -> None:
    """It is the proof that the machine does not run twice. Other moves need no such proof."""

    def moved(uuid: str, kind: MoveKind, source: str = HOST) -> Instance:
        spec = InstanceSpec(instance_uuid=uuid, project_id="p")
        there, here = (
            Selection(host_uuid=one, host="h", service="s", allocations={one: {"VCPU": 1}}) for one in (source, OTHER)
        )
        move = Move(request_id=uuid, kind=kind, source=there, source_attempt=1, spec=spec)
        selections = (there, here)
        return Instance(
            uuid=uuid, state=State.FINISHING, spec=spec, selections=selections, position=1, attempt=2, move=move
        )

    evacuated = moved(A, MoveKind.EVACUATE)
    others = [moved(B, MoveKind.EVACUATE, C), moved(C, MoveKind.MIGRATE)]
    async with instances.transaction() as transaction:
        await transaction.insert([evacuated, *others])
    await instances.fences.put(replace(FENCE, lifting=True))
    assert not await instances.fences.lift(HOST, 3)
    undone = (State.DESTROYING, State.REVERTING)
    for (state, then), doubted in ((undone, False), ((State.PREPARING, None), True), ((State.REVERTING, None), False)):
        async with instances.transaction() as transaction:
            await transaction.lock([A])
            await transaction.update([replace(evacuated, state=state, then=then, doubted=doubted)])
        assert await instances.fences.lift(HOST, 3) is (state is State.REVERTING), state


async def test_a_fence_that_is_to_be_lifted_is_no_proof_and_takes_losses(instances: InstanceStore) -> None:
    await instances.fences.put(FENCE)
    async with instances.transaction() as transaction:
        assert await transaction.lose([HOST], [], [HOST])
    await instances.fences.put(replace(FENCE, version=4, lifting=True))
    async with instances.transaction() as transaction:
        assert not await transaction.lose([HOST], [], [HOST])
    assert await lose(instances, loss(A))


async def test_what_touches_a_host_is_found_in_pages(instances: InstanceStore) -> None:
    def instance(uuid: str, state: State, host: str = HOST, then: State | None = None) -> Instance:
        here = Selection(host_uuid=host, host="h", service="s", allocations={host: {"VCPU": 1}})
        spec = InstanceSpec(instance_uuid=uuid, project_id="p")
        return Instance(uuid=uuid, state=state, then=then, spec=spec, selections=(here,), attempt=1)

    async with instances.transaction() as transaction:
        await transaction.insert(
            [
                instance(A, State.ACTIVE),
                instance(B, State.DESTROYING, then=State.DELETED),
                instance(C, State.ACTIVE, OTHER),
                instance(C.replace("c", "d"), State.FAILED),
            ]
        )
    nothing = "00000000-0000-0000-0000-000000000000"
    assert await instances.fences.touching(HOST, nothing, 10) == [A, B]
    assert await instances.fences.touching(HOST, nothing, 1) == [A]
    assert await instances.fences.touching(HOST, A, 1) == [B]


async def test_after_a_fence_is_lifted_an_older_decision_fences_nothing(instances: InstanceStore) -> None:
    """Its message may be delivered again, after a conductor has died."""
    await instances.fences.put(FENCE)
    await instances.fences.put(replace(FENCE, version=4, lifting=True))
    assert await instances.fences.lifted(HOST) == 0
    assert await instances.fences.lift(HOST, 4)
    assert not await instances.fences.lift(HOST, 4)
    assert not await instances.fences.put(FENCE) and not await instances.fences.put(replace(FENCE, version=4))
    assert await instances.fences.fences() == [] and await instances.fences.lifted(HOST) == 4
    assert not await lose(instances, loss(A))
    await instances.fences.lift_unknown(replace(FENCE, version=3))
    assert await instances.fences.lifted(HOST) == 4
    assert await instances.fences.put(replace(FENCE, version=5))
    assert await instances.fences.lifted(HOST) == 0 and await lose(instances, loss(A))


async def test_a_lift_that_overtakes_its_fence_is_kept(instances: InstanceStore) -> None:
    await instances.fences.lift_unknown(replace(FENCE, version=4, lifting=True))
    assert not await instances.fences.put(FENCE)
    assert await instances.fences.fences() == [] and await instances.fences.lifted(HOST) == 4
    await instances.fences.put(replace(FENCE, version=5))
    await instances.fences.lift_unknown(replace(FENCE, version=6, lifting=True))
    assert [one.version for one in await instances.fences.fences()] == [5], (
        "a fence that is on record is lifted by `lift`"
    )
