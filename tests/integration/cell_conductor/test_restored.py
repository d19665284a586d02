"""A cell whose database is restored or replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from bus.contracts.base import DatabaseMark
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.cell import CellBuild
from bus.faults import DatabaseReplaced
from bus.persistence.relay import Relay
from cell_conductor.state.database_marks import Stated
from cell_conductor.state.instance import State
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.records.build_record import NewBuild, RecordedBuild
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildTable
from scheduler_worker.upkeep.silent_requests import SilentRequests
from tests.integration.cell_conductor.neighbours import WAIT_S, Cell
from tests.kit.waiting import until

# --- A conductor's database is restored or replaced, also under conductors that go on running.


async def _active(cell: Cell) -> tuple[str, str]:
    """An active instance, and its record while it was building."""
    cell.around.hangs = {cell.host(1)}
    uuid = await cell.given(1, 2)
    await until(lambda: bool(cell.around.spawns))
    async with cell.database.raw() as connection:
        before: str = await connection.fetchval("SELECT record::text FROM instances")
    cell.around.hangs = set()
    await cell.around.bus.publish(cell.around.spawns[0])
    await until(lambda: cell.around.ends(uuid) == [BuildState.ACTIVE])
    return uuid, before


async def _set_back(cell: Cell, record: str, *, origin: bool) -> None:
    """To before the machine became active: on another server, or on this one, where a service states what it lacks."""
    async with cell.database.raw() as connection:
        await connection.execute(
            "UPDATE instances SET state = 'building', record = $1::text::json,"
            " deadline = ($1::text::json ->> 'deadline')::float",
            record,
        )
        if origin:
            await connection.execute("UPDATE identity SET origin = 'another cluster'")
            return
        sent = await connection.fetchval("SELECT array_agg(sequence ORDER BY slot) FROM sent")
        await connection.execute("UPDATE sent SET sequence = sequence - 1 WHERE slot = 0")
    cell.store._seen.mark = DatabaseMark(1)  # of the commits before its process has started
    cell.leases.stated = lambda: Stated((DatabaseMark(1, tuple(sent)),))


@pytest.mark.parametrize("origin", [True, False], ids=["restored elsewhere", "disk set back"])
async def test_a_machine_that_became_active_since_the_backup_is_kept_and_not_destroyed(
    cell: Cell, *, origin: bool
) -> None:
    """A copy of the volume that is put back under the running server is found by the next heartbeat."""
    uuid, record = await _active(cell)
    await _set_back(cell, record, origin=origin)
    cell.clock.offset += 61.0  # its deadline has passed
    with capture_logs() as logs:
        await cell.recover()
    assert [line["event"] for line in logs if line["log_level"] == "error"] == ["cell.database_restored"]
    assert await cell.state(uuid) is State.ACTIVE
    assert cell.around.running == {(cell.host(1), uuid): 1}
    await cell.check_at_rest()


async def test_a_service_that_was_away_begins_no_other_recovery_by_what_it_states(cell: Cell) -> None:
    uuid, record = await _active(cell)
    await _set_back(cell, record, origin=False)
    await cell.recover()
    marks = cell.leases.stated().marks
    assert await cell.engine.sweep() == 0 and not cell.store.is_recovering, "it is on record"
    recovered = cell.store.incarnation
    cell.leases.stated = lambda: Stated((*marks, DatabaseMark(1, (1_000,))))
    assert await cell.engine.sweep() == 0 and not cell.store.is_recovering
    assert cell.store.incarnation == recovered > 1
    assert await cell.state(uuid) is State.ACTIVE
    await cell.check_at_rest()


async def test_a_conductor_does_not_go_on_with_the_database_that_replaces_its_own(cell: Cell) -> None:
    before = cell.store.database_id
    await cell.sql("UPDATE identity SET database_id = gen_random_uuid()")
    with pytest.raises(DatabaseReplaced):
        await cell.engine.sweep()
    assert cell.store.database_id == before


# --- A cell whose database was restored to before a delete has it commanded once more by the schedulers' watch.


async def none_is_accepted(instances: Mapping[str, int]) -> set[str]:
    assert not instances
    return set()


@asynccontextmanager
async def the_schedulers(cell: Cell, build: CellBuild) -> AsyncIterator[SilentRequests]:
    """The task of a scheduler that has the delete on record, and waits for its end."""
    store = MemoryBuilds(MemoryBuildTable(cell.clock).session())
    buses = {cell.around.bus.name: cell.around.bus}
    relay = Relay(store.outbox, buses, clock=cell.clock)
    store.publish_through(relay)
    await store.open()
    publishing = asyncio.create_task(relay.run())
    uuid = build.spec.instance_uuid
    record = RecordedBuild(
        instance_uuid=uuid, project_id="p", state=BuildState.DELETING, sequence=12, cell=cell.around.bus.name
    )
    request = BuildRequest(instance_uuid=uuid, project_id="p", flavor="m1.small")
    async with store.unit() as unit:
        await unit.insert([NewBuild(request=request, build=record)], cell.clock.time())
    yield SilentRequests(
        store, buses, SchedulerConfig, clock=cell.clock, rng=cell.rng, after_s=0.01, resume=none_is_accepted
    )
    publishing.cancel()
    await asyncio.gather(publishing, return_exceptions=True)


@pytest.mark.postgres
async def test_a_delete_is_carried_out_though_the_cell_was_set_back_to_before_it(cell: Cell) -> None:
    build = cell.build(1, 2)
    uuid = build.spec.instance_uuid
    await cell.around.bus.publish(build)
    await until(lambda: cell.around.ends(uuid) == [BuildState.ACTIVE])
    async with cell.database.raw() as connection:
        before = await connection.fetchrow("SELECT state, deadline, record::text FROM instances")
    cell.around.silent = True  # the delete is on record and not carried out
    await cell.delete(uuid)
    async with asyncio.timeout(WAIT_S):
        while (  # noqa: ASYNC110  (nothing announces that it is acknowledged)
            await cell.state(uuid) is State.ACTIVE or sum(one.in_flight for one in cell.consumers)
        ):
            await asyncio.sleep(0.01)
    async with cell.database.raw() as connection:
        await connection.execute("UPDATE instances SET state = $1, deadline = $2, record = $3::text::json", *before)
        await connection.execute("UPDATE identity SET origin = 'another cluster'")
    cell.around.silent = False
    await cell.recover()
    before_it = len(cell.around.events)
    async with the_schedulers(cell, build) as watch:
        for _ in range(10):
            cell.clock.offset += 3_601.0
            await cell.engine.sweep()
            await watch.look()
            await asyncio.sleep(0.1)
    assert cell.around.ends(uuid)[-1:] == [BuildState.DELETED], (
        f"ten hours later it is {(await cell.state(uuid)).value}; announced since the set-back:"
        f" {[(one.state.value, one.sequence) for one in cell.around.events[before_it:]]}"
    )
