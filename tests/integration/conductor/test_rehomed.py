"""A host changes its compute service while one of its machines is to be deleted."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from bus.consuming.outcome import Received
from bus.contracts.base import Meta
from bus.contracts.build import BuildState
from bus.contracts.cell import (
    CellDelete,
    ComputeHosts,
    ComputeOutcome,
    ComputeResult,
    HostReport,
    Running,
)
from cell_conductor.domain.instance import State
from tests.integration.conductor.neighbours import CELL, Cell, opened


@pytest.fixture
async def cell(postgres_url: str) -> AsyncIterator[Cell]:
    async with opened(postgres_url) as made:
        yield made


async def test_a_delete_sent_to_a_dead_service_is_sent_to_its_heir(cell: Cell) -> None:
    """The order lies in a queue that nobody reads any more; the heir, s1, reports the machine."""
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
