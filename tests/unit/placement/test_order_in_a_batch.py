"""A batch of placement.inventory is handled in the order of its messages."""

from __future__ import annotations

import asyncio

import pytest

from bus.clock import SystemClock
from bus.consuming.outcome import Received
from bus.contracts.base import Meta
from bus.contracts.placement import Inventory, InventoryForget, InventoryUpdate, ProviderReport
from placement_worker.book import ResourceBook
from placement_worker.handlers import PlacementHandlers
from placement_worker.store.memory_rows import MemoryBookRows
from placement_worker.store.memory_table import MemoryBookTable

ROOT = "aaaaaaaa-0000-4000-8000-000000000000"
METAL = ProviderReport(uuid=ROOT, name="node", inventories={"CUSTOM_GOLD": Inventory(total=1)})


async def _book() -> ResourceBook:
    book = ResourceBook(MemoryBookRows(MemoryBookTable(SystemClock()).session()))
    await book.open()
    return book


def report(version: int) -> InventoryUpdate:
    return InventoryUpdate(source="ironic", version=version, root_uuid=ROOT, providers=(METAL,))


async def _hosts(together: bool) -> list[str]:
    book = await _book()
    handlers = PlacementHandlers(book, clock=SystemClock(), committed=lambda: None, claimed=lambda: None)
    await book.report([report(1)], bus="api")
    messages = [InventoryForget(root_uuid=ROOT), report(2)]
    received = [Received(one, Meta(id=str(at)), "api", "placement.inventory") for at, one in enumerate(messages)]
    for batch in [received] if together else [[one] for one in received]:
        await handlers.inventory(batch)
    return [state.uuid for state in (await book.snapshot(None, 10)).providers]


@pytest.mark.parametrize(
    "together", [False, pytest.param(True, marks=pytest.mark.xfail(strict=True, reason="Found B18"))]
)
def test_a_host_that_is_reported_after_it_was_forgotten_is_there(together: bool) -> None:
    assert asyncio.run(_hosts(together)) == [ROOT]


async def _classes() -> list[str]:
    book = await _book()
    await book.report([report(1)], bus="api")
    await book.rename_class("CUSTOM_GOLD", "CUSTOM_SILVER")
    (_result,) = await book.report([report(2)], bus="api")
    (state,) = (await book.snapshot(None, 10)).providers
    return sorted(state.inventories)


@pytest.mark.xfail(strict=True, reason="Found B18")
def test_a_report_after_a_rename_counts() -> None:
    assert asyncio.run(_classes()) == ["CUSTOM_GOLD"]
