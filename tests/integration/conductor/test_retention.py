"""The purged records, and the limits of an old report's proof."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from bus.clock import new_uuid
from bus.consuming.outcome import Received
from bus.contracts.base import Meta
from bus.contracts.build import BuildState
from bus.contracts.cell import CellDelete, ComputeHosts, HostReport
from cell_conductor.domain.events import DeleteRequested, InstanceEvent
from cell_conductor.domain.instance import State
from cell_conductor.domain.proof import rescan_id
from tests.integration.conductor.neighbours import CELL, Cell, opened


@pytest.fixture
async def cell(postgres_url: str) -> AsyncIterator[Cell]:
    async with opened(postgres_url) as made:
        yield made


async def test_deleted_instances_are_forgotten_after_their_time_and_no_others(cell: Cell) -> None:
    cell.around.fails = {cell.host(3)}
    gone, kept, failed = cell.build(1), cell.build(2), cell.build(3)
    uuids = [build.spec.instance_uuid for build in (gone, kept, failed)]
    tombstone = new_uuid(cell.rng)
    await cell.around.bus.publish_all([(build, "") for build in (gone, kept, failed)])
    await cell.around.until(lambda: all(cell.around.ends(uuid) for uuid in uuids))
    await cell.around.bus.publish(CellDelete(instance_uuid=uuids[0], project_id="p"))
    await cell.around.until(lambda: BuildState.DELETED in cell.around.ends(uuids[0]))
    await cell.engine.take([InstanceEvent(tombstone, DeleteRequested(at=cell.clock.time()))], source="test")
    day_s = cell.config.deleted_retention_s
    assert await cell.store.purge_deleted(cell.clock.time() - day_s, 10) == 0
    cell.clock.offset += day_s + 1.0
    assert await cell.store.purge_deleted(cell.clock.time() - day_s, 1) == 1
    assert await cell.store.purge_deleted(cell.clock.time() - day_s, 10) == 1
    assert await cell.store.purge_deleted(cell.clock.time() - day_s, 10) == 0
    states = [await cell.state(uuid) for uuid in (*uuids, tombstone)]
    assert states == [State.ABSENT, State.ACTIVE, State.FAILED, State.ABSENT]


async def test_only_a_scan_that_was_requested_proves_a_machine_missing(cell: Cell) -> None:
    """A driver that lists for a minute: the machine came to be after its host was looked at. Seed 59: the report waited
    for a conductor that was paused, and by the host's clock it was the later word.
    """
    build = cell.build(1)
    uuid, host = build.spec.instance_uuid, cell.host(1)
    await cell.around.bus.publish(build)
    await cell.around.until(lambda: bool(cell.around.ends(uuid)))
    cell.clock.offset += 60.0
    hosts = (HostReport(uuid=host, name="host-1", running=()),)
    before = ComputeHosts(service="s1", cell=CELL, epoch=1, sequence=1, hosts=hosts, seen_at=cell.clock.time())
    await _receive(cell, before)
    assert await cell.state(uuid) is State.ACTIVE
    assert cell.around.running
    del cell.around.running[host, uuid]
    (record,) = await cell.store.briefs([], [uuid])
    await _receive(cell, replace(before, sequence=2, rescans=(rescan_id(record),)))
    await cell.around.until(lambda: cell.around.events[-1].state is BuildState.FAILED)


async def _receive(cell: Cell, report: ComputeHosts) -> None:
    meta = Meta(id="1", sent_at=cell.clock.time())
    await cell.hosts.hosts([Received(report, meta, CELL, "conductor.hosts.conductor")])
