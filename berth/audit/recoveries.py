"""The recoveries of cells, and an operator's word on what they would lose. They are in the cells' schemas."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from bus.persistence.database import Database
from bus.service.environment import Environment
from cell_conductor.store.keyed import Losses
from cell_conductor.store.postgres import ACCEPT_LOSSES, RECOVERY

from .quarantine import CellNeverStarted, named_cells, on_database


class Recovery(Struct, frozen=True):
    """Of one cell. state: open, recovering or accepted. losses: that it waits for, or that were accepted."""

    cell: str
    state: str
    database_incarnation: int
    losses: Losses

    @property
    def is_waiting(self) -> bool:
        """Whether it goes no further without an operator."""
        return self.state == "recovering" and self.losses.count > 0


async def read(env: Environment, cell: str | None = None) -> list[Recovery]:
    """Of every cell that was ever started, or of one. Raises as `quarantine.read`."""
    found: list[Recovery] = []
    for name in await named_cells(env, cell):
        try:
            state, incarnation, losses = await on_database(env, name, _row)
        except CellNeverStarted:
            if cell is not None:
                raise
            continue
        found.append(Recovery(name, state, incarnation, msgspec.json.decode(losses, type=Losses)))
    return found


async def accept(env: Environment, recovery: Recovery) -> bool:
    """Accept the losses of one, as they were read. False: it waits for the word on others, or for none."""

    async def accepted(database: Database) -> bool:
        async with database.raw() as connection:
            losses = msgspec.json.encode(recovery.losses).decode()
            done: str = await connection.execute(ACCEPT_LOSSES, losses, recovery.database_incarnation)
            return done == "UPDATE 1"

    return await on_database(env, recovery.cell, accepted)


async def _row(database: Database) -> tuple[str, int, str]:
    async with database.raw() as connection:
        state, incarnation, losses = await connection.fetchrow(RECOVERY)
        return state, incarnation, losses
