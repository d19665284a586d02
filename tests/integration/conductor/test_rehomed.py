"""A host changes its compute service while one of its machines is to be deleted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from msgspec.structs import replace

from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.base import Meta
from bus.contracts.build import BuildState
from bus.contracts.cell import (
    CellDelete,
    ComputeHosts,
    ComputeOutcome,
    ComputeResult,
    HostReport,
    RescanHosts,
    Running,
)
from cell_conductor.domain.instance import State
from tests.integration.conductor.neighbours import CELL, Cell, opened


@pytest.fixture
async def cell(postgres_url: str) -> AsyncIterator[Cell]:
    async with opened(postgres_url) as made:
        yield made


async def test_a_delete_sent_to_a_dead_service_is_sent_to_its_heir(cell: Cell) -> None:
    """The order lies in a queue without a consumer; the heir, s1, reports the machine."""
    around, host = cell.around, cell.host(1)
    await cell.bus.declare("compute.{service}", service="dead")
    build = cell.build(1)
    uuid = build.spec.instance_uuid
    at_dead = replace(build, selections=tuple(replace(s, service="dead") for s in build.selections))
    await around.bus.publish(at_dead)
    await around.until(lambda: bool(around.events))
    around.running[host, uuid] = 1
    built = ComputeResult(instance_uuid=uuid, attempt=1, host_uuid=host, service="dead", outcome=ComputeOutcome.ACTIVE)
    await around.bus.publish(built)
    await around.until(lambda: bool(around.ends(uuid)))
    await around.bus.publish(CellDelete(instance_uuid=uuid, project_id="p"))
    await around.until(lambda: around.events[-1].state is BuildState.DELETING)
    still = Running(instance_uuid=uuid, attempt=1, deployment=cell.store.deployment)
    report = ComputeHosts(
        service="s1",
        cell=CELL,
        epoch=1,
        sequence=1,
        hosts=(HostReport(uuid=host, name="host-1", running=(still,)),),
    )
    meta = Meta(id="1", sent_at=cell.clock.time())
    await cell.hosts.hosts([Received(report, meta, CELL, "conductor.hosts.conductor")])
    await around.until(lambda: around.events[-1].state is BuildState.DELETED)
    assert [order.service for order in around.destroys] == ["s1"]
    assert await cell.state(uuid) is State.DELETED
    await cell.check_at_rest()


async def test_what_an_heir_misses_is_lost_by_the_scan_that_was_requested_and_by_none_before(cell: Cell) -> None:
    """Seed 61245 at d0562af: by the heir's clock, which was ahead, a scan of before the build was long after it."""
    around, host = cell.around, cell.host(1)
    looks: asyncio.Queue[RescanHosts] = asyncio.Queue()

    async def heir(batch: Sequence[Received]) -> Sequence[Outcome]:
        for received in batch:
            if isinstance(received.message, RescanHosts):
                looks.put_nowait(received.message)
        return [Done()] * len(batch)

    listening = around.bus.consumer("compute.control.{service}", heir, service="heir", source="heir")
    await listening.start()
    running = asyncio.create_task(listening.run())
    build = cell.build(1)
    uuid = build.spec.instance_uuid
    await around.bus.publish(build)
    await around.until(lambda: bool(around.ends(uuid)))
    assert await cell.state(uuid) is State.ACTIVE
    cell.clock.offset += 60.0
    ahead = cell.clock.time() + 3600.0
    report = ComputeHosts(
        service="heir", cell=CELL, epoch=1, sequence=1, seen_at=ahead, scan=1,
        hosts=(HostReport(uuid=host, name="host-1", running=()),),
    )  # fmt: skip
    meta = Meta(id="1", sent_at=ahead)
    await cell.hosts.hosts([Received(report, meta, CELL, "conductor.hosts.conductor")])
    assert await cell.state(uuid) is State.ACTIVE
    async with asyncio.timeout(60):
        order = await looks.get()
    assert (order.hosts, len(order.rescans)) == ((host,), 1)
    del around.running[host, uuid]  # it is really gone, and the heir looks again
    again = replace(report, sequence=2, scan=2, rescans=order.rescans)
    await cell.hosts.hosts([Received(again, meta, CELL, "conductor.hosts.conductor")])
    await around.until(lambda: BuildState.FAILED in [event.state for event in around.events])
    await listening.drain(5.0)
    await running
