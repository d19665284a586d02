"""Announcements of many hosts at once, and the event loop that takes them."""

from __future__ import annotations

import asyncio
import random

from bus.bus import Bus
from bus.clock import SystemClock, new_uuid
from bus.consuming.outcome import Done, Received
from bus.contracts.base import Meta
from bus.contracts.cell import ComputeHosts, HostReport
from bus.memory import MemoryBroker, MemoryTransport
from scheduler_worker.domain.fleet import WaitingTable, WorkerTable
from scheduler_worker.domain.hosts import HostTable
from scheduler_worker.fleet import HOSTS_AT_ONCE, HostsListener

SERVICES, HOSTS = 12, 1_000


async def test_item_16_announcements_of_very_many_hosts_are_not_taken_in_one_turn_of_the_loop() -> None:
    """The services of 100,000 hosts that answered a scheduler at once were 150 to 250 ms of its loop."""
    clock, rng = SystemClock(), random.Random(1)
    bus = Bus("c1", MemoryTransport(MemoryBroker(clock), "s"), process="s", clock=clock, rng=rng)
    table = HostTable()
    listener = HostsListener(bus, table, WorkerTable(), WaitingTable(), clock=clock, rng=rng, again_s=60.0)
    batch = [
        Received(
            ComputeHosts(
                service=f"s{service}",
                cell="c1",
                epoch=1,
                sequence=1,
                complete=True,
                hosts=tuple(HostReport(uuid=new_uuid(rng), name=f"h{service}-{host}") for host in range(HOSTS)),
            ),
            Meta(id=str(service)),
            "c1",
            "scheduler.hosts.s",
        )
        for service in range(SERVICES)
    ]
    known: list[int] = []
    taking = asyncio.create_task(listener(batch))
    while not taking.done():
        await asyncio.sleep(0)
        known.append(len(table))
    assert await taking == [Done()] * SERVICES and len(table) == SERVICES * HOSTS
    assert max(later - before for before, later in zip([0, *known], known, strict=False)) <= HOSTS_AT_ONCE
