"""A placement worker beside a cell of the settings whose broker refuses it."""

from __future__ import annotations

import asyncio
import random

from bus.clock import SystemClock
from bus.memory import MemoryBroker, MemoryTransport
from bus.port import BusForbidden
from bus.service.environment import Environment
from placement_worker.app import build
from placement_worker.book import ResourceBook
from placement_worker.config import PlacementConfig
from placement_worker.store.memory_rows import MemoryBookRows, MemoryBookTable
from tests.kit.virtual_time import on_virtual_time


class Refusing(MemoryTransport):
    """A bus whose broker refuses every connection."""

    async def open(self) -> None:
        raise BusForbidden("vhost not found")


@on_virtual_time
async def test_a_cell_that_refuses_does_not_make_placement_unready() -> None:
    clock = SystemClock()
    broker = MemoryBroker(clock)
    env = Environment(
        "placement-1",
        transports=lambda name: (Refusing if name == "c1" else MemoryTransport)(broker, f"placement-1 {name}"),
        cell_transports=lambda name, _: MemoryTransport(broker, name),
        cells=("c1",),
        clock=clock,
        rng=random.Random(1),
    )
    store = ResourceBook(MemoryBookRows(MemoryBookTable(clock).session()))
    service = build(env, PlacementConfig(), ["c1"], store=store)
    stop = asyncio.Event()
    running = asyncio.create_task(service.run(stop))
    await asyncio.wait({running, asyncio.ensure_future(service.ready.wait())}, return_when="FIRST_COMPLETED")
    assert service.not_ready() == []
    stop.set()
    await running
