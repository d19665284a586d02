"""A fence and its lift that wait in one queue, and a fence that is published again while it is ended."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.consuming.outcome import Received
from bus.contracts.actions import ActionKind, CellAction
from bus.contracts.base import Meta
from bus.contracts.operations import CellFence, EvacuationPolicy, FenceState
from bus.faults import Transient
from cell_conductor.config import ConductorConfig
from cell_conductor.hosts.fence_cache import FenceCache
from cell_conductor.hosts.fence_controller import FenceController
from cell_conductor.state.fence import Fence
from cell_conductor.state.instance import State
from cell_conductor.store.fence_rows import FenceStore
from tests.unit.cell_conductor.move_scenario import ACTION, active
from tests.unit.cell_conductor.scenario import SPEC, UUID, host
from tests.unit.cell_conductor.world import Queried, Relay, engine_of, insert, opened_store, requests_of


class Taking(Queried):
    def __init__(self) -> None:
        self.published: list[Any] = []

    async def publish(self, message: object, **_: Any) -> None:
        self.published.append(message)


async def made(*instances: Any) -> tuple[Any, FenceController, Any]:
    clock, store, bus = SystemClock(), await opened_store(), Taking()
    fences = FenceCache(store, clock)
    controller = FenceController(store, fences, bus, clock=clock, config=ConductorConfig(), cell="c1")  # type: ignore[arg-type]
    engine = engine_of(
        store=store,
        bus=bus,
        relay=Relay(),
        clock=clock,
        config=ConductorConfig(claim_timeout_s=0.05),
        cell="c1",
        fences=fences,
    )
    await insert(store, *instances)
    return store, controller, engine


async def test_a_fence_that_was_taken_back_before_its_cell_had_it_ends_no_machine() -> None:
    runs = active()
    runs = replace(runs, spec=replace(SPEC, on_host_failure=EvacuationPolicy.FAIL))
    store, controller, engine = await made(runs)
    fence = CellFence(host_uuid=host(1), host="h1", version=5)
    lift = CellFence(host_uuid=host(1), host="h1", version=6, unfence=True)
    await controller.take([fence, lift], engine)  # both waited in the queue: the cell's conductors were away
    now = store._table.instances[UUID]
    stale_machines = sum(one.stale_machines for one in await store.fences.fences())
    assert now.state is State.ACTIVE and not stale_machines, (now.phase, now.code, stale_machines)


@pytest.mark.parametrize("lift", [False, True])
async def test_a_fence_that_is_on_record_costs_no_scan_of_all_instances(
    monkeypatch: pytest.MonkeyPatch, *, lift: bool
) -> None:
    store, controller, engine = await made(active())
    await controller.take([CellFence(host_uuid=host(1), host="h1", version=5)], engine)
    async with store.transaction() as transaction:
        await transaction.rely_on([host(1)], {host(1): ["s1"]}, 1.0)
    again = CellFence(host_uuid=host(1), host="h1", version=6, unfence=lift)
    await controller.take([again], engine)

    scans, reads = 0, 0
    touching, fences = FenceStore.touching, FenceStore.fences

    async def count_scan(self: Any, *given: Any) -> Any:
        nonlocal scans
        scans += 1
        return await touching(self, *given)

    async def count_read(self: Any) -> Any:
        nonlocal reads
        reads += 1
        return await fences(self)

    monkeypatch.setattr(FenceStore, "touching", count_scan)
    monkeypatch.setattr(FenceStore, "fences", count_read)
    published = len(controller._bus.published)  # type: ignore[attr-defined]
    for _ in range(24):  # 40 hosts, 3 schedulers: in one second
        await controller.take([again], engine)
    assert (scans, reads) == (0, 0), f"{scans} scans of the table of instances, {reads} reads of all fences"
    await controller.look(engine)
    sent = controller._bus.published[published:]  # type: ignore[attr-defined]
    state = FenceState.UNFENCING if lift else FenceState.FENCED
    assert [(one.version, one.state, one.stale_machines) for one in sent] == [(6, state, 1)], (
        "one answer to all of them"
    )
    assert (scans, reads) == (0, 0)


async def test_what_one_conductor_stepped_before_it_knew_of_a_fence_is_ended_by_its_own_look() -> None:
    """The scan of the one that took the fence came before. Each scans once for each fence that it learns of."""
    store, controller, engine = await made()
    await store.fences.put(Fence(host_uuid=host(1), host="h1", version=5))
    runs = active()
    await insert(store, replace(runs, spec=replace(SPEC, on_host_failure=EvacuationPolicy.FAIL)))
    controller._repeated[host(1)] = Fence(host_uuid=host(1), host="h1", version=5)
    await controller.look(engine)
    assert store._table.instances[UUID].phase == (State.RELEASING, State.FAILED)


async def test_a_fence_that_is_taken_back_during_its_scan_ends_nothing_more() -> None:
    """The conductor that scans has not read the lift yet, which another one has recorded."""
    runs = active()
    store, controller, engine = await made(replace(runs, spec=replace(SPEC, on_host_failure=EvacuationPolicy.FAIL)))
    fence = CellFence(host_uuid=host(1), host="h1", version=5)
    load, loads = controller._fences.load, 0

    async def lifted_after() -> None:
        nonlocal loads
        await load()
        loads += 1
        if loads == 1:
            await store.fences.put(Fence(host_uuid=host(1), host="h1", version=6, state=FenceState.UNFENCING, at=1.0))

    controller._fences.load = lifted_after  # type: ignore[method-assign]
    with pytest.raises(Transient):
        await controller.take([fence], engine)
    await controller.take([fence], engine)  # the consumer calls again with the same batch
    assert store._table.instances[UUID].state is State.ACTIVE
    assert not any(one.stale_machines for one in await store.fences.fences())


async def test_an_evacuation_beside_a_fence_that_has_come_before_reads_what_is_on_record() -> None:
    """It was refused as not fenced: another conductor had taken the fence."""
    store, controller, engine = await made(active())
    fences, fence = controller._fences, CellFence(host_uuid=host(1), host="h1", version=5)
    await fences.load()
    await controller.take([fence], engine)
    await store.fences.put(Fence(host_uuid=host(2), host="h2", version=6))
    requests = requests_of(engine, SystemClock(), fences=fences, fence_controller=controller)
    evacuate = CellAction(request_id=ACTION, instance_uuid=UUID, kind=ActionKind.EVACUATE, project_id="p")
    await requests.requests([Received(one, Meta(id="m"), "c1", "conductor.requests") for one in (fence, evacuate)])
    assert host(2) in fences.fences
