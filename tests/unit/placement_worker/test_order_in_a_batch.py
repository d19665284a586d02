"""A batch of placement.inventory is handled in the order of its messages."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bus.clock import SystemClock
from bus.consuming.outcome import Received
from bus.contracts.base import Meta
from bus.contracts.placement import (
    AggregateMembers,
    Inventory,
    InventoryReleased,
    InventoryUpdate,
    ProviderReport,
    ProviderTreeDelete,
)
from placement_worker.handlers import PlacementHandlers
from placement_worker.service import PlacementService
from placement_worker.store.memory_rows import MemoryPlacementRows
from placement_worker.store.memory_table import MemoryPlacementTable

ROOT = "aaaaaaaa-0000-4000-8000-000000000000"


async def _service() -> PlacementService:
    service = PlacementService(MemoryPlacementRows(MemoryPlacementTable(SystemClock()).session()))
    await service.open()
    return service


ROOTS = (ROOT, "cccccccc-0000-4000-8000-000000000000")
CHILDREN = tuple(f"{letter * 8}-0000-4000-8000-000000000000" for letter in "de")
SOURCES = ("compute-a", "compute-b", "agent")
OTHERS = (ProviderTreeDelete, AggregateMembers)
POOL = "ffffffff-0000-4000-8000-000000000000"


@st.composite
def _messages(draw: st.DrawFn) -> Any:
    root, reporter = draw(st.sampled_from(ROOTS)), draw(st.sampled_from(SOURCES))
    kind = draw(st.sampled_from((InventoryUpdate, InventoryUpdate, InventoryUpdate, InventoryReleased, *OTHERS)))
    if kind is InventoryReleased:
        return kind(reporter=reporter, roots=(root,))
    if kind is ProviderTreeDelete:
        return kind(root_uuid=root)
    if kind is AggregateMembers:
        return kind(aggregate=POOL, joins=(root,))
    host = ProviderReport(
        uuid=root,
        name=root,  # hosts that exchange their names are applied together alone
        inventories={"VCPU": Inventory(total=draw(st.integers(1, 2)))},
        is_reference=reporter == "agent",
    )
    below = draw(st.lists(st.sampled_from(CHILDREN), unique=True))
    devices = [ProviderReport(uuid=uuid, name=uuid, parent_uuid=root) for uuid in below]
    named = {"former_reporter": draw(st.sampled_from((None, *SOURCES[:2])))}
    return kind(reporter=reporter, version=draw(st.integers(1, 9)), root_uuid=root, providers=(host, *devices), **named)


async def _left(messages: list[Any], together: bool) -> Any:
    """The outcomes, and what is in placement then."""
    service = await _service()
    handlers = PlacementHandlers(service, clock=SystemClock(), committed=lambda: None, claimed=lambda: None)
    received = [Received(one, Meta(id=str(at)), "api", "placement.inventory") for at, one in enumerate(messages)]
    outcomes = []
    for batch in [received] if together else [[one] for one in received]:
        outcomes += await handlers.inventory(batch)
    states = (await service.snapshot(None, 10)).providers
    return [getattr(getattr(one, "reply", one), "outcome", type(one)) for one in outcomes], {
        state.uuid: (state.name, state.parent_uuid, state.inventories, state.aggregates) for state in states
    }


@given(st.lists(_messages(), max_size=6))
def test_a_batch_leaves_what_its_messages_leave_one_by_one(messages: list[Any]) -> None:
    assert asyncio.run(_left(messages, True)) == asyncio.run(_left(messages, False))
