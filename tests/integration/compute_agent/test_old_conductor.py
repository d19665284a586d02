"""A conductor that lives on with an old copy of the cell's database, and what a backup has in its outbox, command
nothing once a later incarnation has.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from berth.config.settings import ComputeSettings
from bus.bus import Bus
from bus.consuming.dead_letters import list_dead
from bus.contracts.base import ORDER_OUTDATED, DatabaseMark
from bus.contracts.cell import Destroy, LookUpMachines, MachineLookupResult
from bus.faults import RequestRefused
from bus.persistence.memory_database import MemoryDatabase, MemoryRows
from bus.persistence.outbox import OutboxMessage
from bus.persistence.relay import Relay
from compute_sim.config import SimulatedConfig
from tests.integration.compute_agent.harness import CELL, DATABASE_ID, SERVICE, Cell, planned, spawn
from tests.kit.waiting import PATIENCE_S, until


async def _conductor(cell: Cell, incarnation: int) -> Bus:
    made = Bus(CELL, cell.transports(CELL), process=f"conductor-{incarnation}", clock=cell.clock, rng=random.Random(1))
    made.states_mark(lambda: DatabaseMark(incarnation))
    await made.open()
    return made


@pytest.mark.parametrize("restarts", [False, True])
async def test_nothing_is_built_or_destroyed_by_an_old_conductor_or_the_outbox_of_a_backup(
    cell: Cell, *, restarts: bool
) -> None:
    settings = ComputeSettings(simulated=SimulatedConfig(hosts=2), heartbeat_interval_s=0.05)
    fleet = planned(settings)
    life = await cell.compute(settings, fleet)
    first, second = (one.plan.uuid for one in fleet.hosts)
    kept, wanted = cell.instance(), cell.instance()
    old, new = await _conductor(cell, 1), await _conductor(cell, 2)
    try:
        await old.publish(spawn(first, kept))
        await cell.outcome(kept, 1)
        query = LookUpMachines(service=SERVICE, database_id=DATABASE_ID, instance_uuids=(kept,), on_hosts=(first,))
        assert (await new.request(query, MachineLookupResult, timeout_s=PATIENCE_S)).machines
        if restarts:
            await life.stop()
            life = await cell.compute(settings, fleet)
        await until(lambda: cell.heartbeats()[-1].mark.database_incarnation == 2)
        command = Destroy(service=SERVICE, instance_uuid=kept, attempt=1, host_uuid=first, database_id=DATABASE_ID)
        session = MemoryDatabase(cell.clock).session()
        async with session.transaction() as transaction:
            row = await transaction.send_later([OutboxMessage(CELL, command, database_incarnation=1)])
        assert row
        relay = Relay(MemoryRows(session), {CELL: new}, clock=cell.clock)
        relay._resend(*next((one, body.body) for one, body in session.database.outbox.items()))
        await old.publish(spawn(second, wanted))
        with pytest.raises(RequestRefused) as refused:
            await old.request(query, MachineLookupResult, timeout_s=PATIENCE_S)
        assert refused.value.code == ORDER_OUTDATED
        async with asyncio.timeout(PATIENCE_S):
            while len(dead_letters := await list_dead(cell.bus.transport, f"compute.{SERVICE}")) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert {one.code for one in dead_letters} == {ORDER_OUTDATED}
        assert fleet.machine(first, kept) is not None and fleet.machine(second, wanted) is None
        await new.publish(spawn(second, wanted))
        await until(lambda: fleet.machine(second, wanted) is not None)
    finally:
        await old.close()
        await new.close()
