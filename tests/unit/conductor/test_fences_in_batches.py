"""A fence and its lift that wait in one queue, and a fence that is published again while it is lifted."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.contracts.operations import CellFence, EvacuationPolicy, FenceState
from cell_conductor.config import ConductorConfig
from cell_conductor.domain.fences import Fence, Loss
from cell_conductor.domain.instance import State
from cell_conductor.fences import FenceKeeper
from cell_conductor.store.safety import FenceStore
from tests.unit.conductor.move_scenario import active
from tests.unit.conductor.scenario import SPEC, UUID, host
from tests.unit.conductor.world import Queried, Relay, engine_of, insert, opened_store


class Taking(Queried):
    def __init__(self) -> None:
        self.published: list[Any] = []

    async def publish(self, message: object, **_: Any) -> None:
        self.published.append(message)


async def made(*instances: Any) -> tuple[Any, FenceKeeper, Any]:
    clock, store, bus = SystemClock(), await opened_store(), Taking()
    keeper = FenceKeeper(store, bus, clock=clock, config=ConductorConfig(), cell="c1")  # type: ignore[arg-type]
    engine = engine_of(
        store=store,
        bus=bus,
        relay=Relay(),
        clock=clock,
        config=ConductorConfig(claim_timeout_s=0.05),
        cell="c1",
        fences=keeper,
    )
    await insert(store, *instances)
    return store, keeper, engine


@pytest.mark.xfail(strict=True, reason="Found A4")
async def test_a_fence_that_was_taken_back_before_its_cell_had_it_ends_no_machine() -> None:
    runs = active()
    runs = replace(runs, spec=replace(SPEC, on_host_failure=EvacuationPolicy.FAIL))
    store, keeper, engine = await made(runs)
    fence = CellFence(host_uuid=host(1), host="h1", version=5)
    lift = CellFence(host_uuid=host(1), host="h1", version=6, lift=True)
    await keeper.take([fence, lift], engine)  # both waited in the queue: the cell's conductors were away
    now = store._table.instances[UUID]
    losses = await store.fences.losses()
    assert now.state is State.ACTIVE and not losses, (now.phase, now.code, losses)


@pytest.mark.xfail(strict=True, reason="Found A4")
async def test_a_fence_that_is_on_record_costs_no_scan_of_all_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    store, keeper, engine = await made(active())
    await store.fences.put(Fence(host_uuid=host(1), host="h1", version=5))
    async with store.transaction() as transaction:
        await transaction.lose(
            [host(1)], [Loss(host_uuid=host(1), instance_uuid="a" + UUID[1:], attempt=1, service="s1", at=1.0)]
        )
    await store.fences.put(Fence(host_uuid=host(1), host="h1", version=6, state=FenceState.LIFTING, at=1.0))

    scans, reads = 0, 0
    touching, losses = FenceStore.touching, FenceStore.losses

    async def count_scan(self: Any, *given: Any) -> Any:
        nonlocal scans
        scans += 1
        return await touching(self, *given)

    async def count_read(self: Any) -> Any:
        nonlocal reads
        reads += 1
        return await losses(self)

    monkeypatch.setattr(FenceStore, "touching", count_scan)
    monkeypatch.setattr(FenceStore, "losses", count_read)
    again = CellFence(host_uuid=host(1), host="h1", version=6, lift=True)
    for _ in range(24):  # 40 hosts, 3 schedulers: in one second
        await keeper.take([again], engine)
    assert (scans, reads) == (0, 0), f"{scans} scans of the table of instances, {reads} reads of all losses"
