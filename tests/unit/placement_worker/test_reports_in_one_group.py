"""Two sources hand a child provider over in one batch."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.consuming.outcome import Received
from bus.contracts.base import Meta
from bus.contracts.placement import Inventory, InventoryReleased, InventoryResult, InventoryUpdate, ProviderReport
from placement_worker.handlers import PlacementHandlers
from placement_worker.service import PlacementService
from placement_worker.store.memory_rows import MemoryPlacementRows
from placement_worker.store.memory_table import MemoryPlacementTable

ROOT, CHILD = "aaaaaaaa-0000-4000-8000-000000000000", "bbbbbbbb-0000-4000-8000-000000000000"
HOST = ProviderReport(uuid=ROOT, name="host", inventories={"VCPU": Inventory(total=8)})
DEVICE = ProviderReport(uuid=CHILD, name="device", parent_uuid=ROOT, inventories={"VGPU": Inventory(total=2)})
CELL = "cell1"


async def _service() -> PlacementService:
    service = PlacementService(MemoryPlacementRows(MemoryPlacementTable(SystemClock()).session()))
    await service.open()
    return service


def of_compute(version: int, *providers: ProviderReport, reporter: str = "compute-a", **more: str) -> InventoryUpdate:
    return InventoryUpdate(reporter=reporter, version=version, root_uuid=ROOT, providers=providers, **more)


AGENT = InventoryUpdate(
    reporter="agent",
    version=1,
    root_uuid=ROOT,
    providers=(ProviderReport(uuid=ROOT, name="host", is_reference=True), DEVICE),
)


async def _children(groups: list[list[InventoryUpdate]]) -> list[str]:
    service = await _service()
    await service.apply_reports([of_compute(1, HOST, DEVICE)], bus=CELL)
    for group in groups:
        for one in await service.apply_reports(group, bus=CELL):
            assert isinstance(one, InventoryResult) and one.outcome in ("applied", "unchanged"), one
    return [state.uuid for state in (await service.snapshot(None, 10)).providers]


@pytest.mark.parametrize("together", [False, True])
def test_a_child_that_passes_from_one_source_to_another_stays(together: bool) -> None:
    updates = [AGENT, of_compute(2, HOST)]
    found = asyncio.run(_children([updates] if together else [[one] for one in updates]))
    assert CHILD in found, "the agent was told `applied`, and its provider is gone"


async def _taken_over(together: bool) -> str:
    service = await _service()
    handlers = PlacementHandlers(service, clock=SystemClock(), committed=lambda: None, claimed=lambda: None)
    await service.apply_reports([of_compute(1, HOST)], bus=CELL)
    more = replace(HOST, inventories={"VCPU": Inventory(total=9)})
    messages = [of_compute(2, more), InventoryReleased(reporter="compute-a", roots=(ROOT,))]
    received = [Received(one, Meta(id=str(at)), CELL, "placement.inventory") for at, one in enumerate(messages)]
    for batch in [received] if together else [[one] for one in received]:
        await handlers.inventory(batch)
    (result,) = await service.apply_reports(
        [of_compute(1, HOST, reporter="compute-b", former_reporter="compute-a")], bus=CELL
    )
    assert isinstance(result, InventoryResult)
    return result.outcome


@pytest.mark.parametrize("together", [False, True])
def test_a_root_released_after_its_last_report_can_be_taken_over(together: bool) -> None:
    assert asyncio.run(_taken_over(together)) == "applied"
