"""The recoveries of cells, and an operator's word on what they would lose. They are in the cells' schemas."""

from __future__ import annotations

from functools import partial

import msgspec

from berth.audit.quarantine import CellNeverStarted, named_cells, on_database
from berth.audit.repair import enter
from berth.client.repair_types import Recovery
from bus.contracts.base import MAX_REASON
from bus.contracts.objects import AuditRepair
from bus.contracts.operations import Losses
from bus.persistence.database import Database
from bus.service.environment import Environment
from cell_conductor.state.lease import LeaseState
from cell_conductor.store.fence_rows import LeaseStore
from cell_conductor.store.postgres import ACCEPT_LOSSES, RECOVERY, STATE_WITHOUT
from cell_conductor.store.postgres_keyed import PostgresKeyed


async def read(env: Environment, cell: str | None = None) -> list[Recovery]:
    """Of every cell that was ever started, or of one. Raises as `quarantine.read`."""
    found: list[Recovery] = []
    for name in await named_cells(env, cell):
        try:
            found.append(await on_database(env, name, partial(of_cell, name)))
        except CellNeverStarted:
            if cell is not None:
                raise
            continue
    return found


async def accept(env: Environment, recovery: Recovery, actor: str, reason: str) -> bool:
    """Accept the losses of one, as they were read; that is in the log of changes after. False: it waits for the word on
    others, or for none.
    """

    async def accepted(database: Database) -> bool:
        async with database.raw() as connection:
            losses = msgspec.json.encode(recovery.losses).decode()
            done: str = await connection.execute(ACCEPT_LOSSES, losses, recovery.database_incarnation)
            return done == "UPDATE 1"

    if not await on_database(env, recovery.cell, accepted):
        return False
    lost = recovery.losses
    found = f"a recovery would end {lost.count} instances and {lost.builds} builds: {', '.join(lost.instances)}"
    await enter(env, {recovery.cell: _entry("losses accepted", found)}, actor, reason)
    return True


async def state_without(env: Environment, cell: str, service: str, actor: str, reason: str) -> bool:
    """State that a compute service of a cell has nothing; that is in the log of changes after. False: it is up, or
    there are too many such words. Raises as `quarantine.read`.
    """

    async def stated(database: Database) -> bool:
        leases = await LeaseStore(PostgresKeyed(database)).leases()
        if any(one.service == service and one.state is LeaseState.UP for one in leases):
            return False
        async with database.raw() as connection:
            done: str = await connection.execute(STATE_WITHOUT, service)
            return done == "UPDATE 1"

    (name,) = await named_cells(env, cell)
    if not await on_database(env, name, stated):
        return False
    await enter(env, {name: _entry("goes on without", f"the compute service {service} has not listed")}, actor, reason)
    return True


def _entry(finding: str, found: str) -> AuditRepair:
    return AuditRepair(finding=finding, found=found[:MAX_REASON], proof="by an operator's word")


async def of_cell(cell: str, database: Database) -> Recovery:
    """The recovery of a cell, by its schema."""
    async with database.raw() as connection:
        state, incarnation, losses, absent = await connection.fetchrow(RECOVERY)
    lost = msgspec.json.decode(losses, type=Losses)
    return Recovery(cell, state, incarnation, lost, msgspec.json.decode(absent, type=dict[str, bool]))
