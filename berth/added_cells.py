"""Cells that operators have added at run time, for commands that read every cell: instances in cells that they do not
read look wrong.
"""

from __future__ import annotations

import os

import asyncpg
import msgspec
from msgspec.structs import replace

from berth.settings import CellSettings
from berth.site import Site, url_of
from bus.contracts.objects import CellDecision, CellState, ObjectKind
from bus.faults import DatabaseUnprepared

_DECISIONS = "SELECT name, body FROM objects WHERE kind = $1 ORDER BY name"


async def with_added_cells(site: Site) -> Site:
    """The same place, with every cell that an operator has added and not removed.

    Raises CellAddressInvalid: this process finds no URL where a cell's is to be.
    """
    added = {
        name: CellSettings(url=url_of(decision.bus, site.settings.cells_dir, os.environ), prefix=decision.bus.prefix)
        for name, decision in (await _decisions(site)).items()
        if name not in site.settings.cells and decision.bus is not None and decision.state is not CellState.REMOVED
    }
    if not added:
        return site
    settings = replace(site.settings, cells={**site.settings.cells, **added})
    return Site(settings, brokers=site.brokers, database_url=site.database_url, clock=site.clock)


async def _decisions(site: Site) -> dict[str, CellDecision]:
    database = site.environment("cells").database("scheduler", pool_size=1)
    try:
        async with database.raw() as connection:
            rows = await connection.fetch(_DECISIONS, ObjectKind.CELL.value)
    except (asyncpg.UndefinedTableError, DatabaseUnprepared):  # no scheduler was ever started: no operator added one
        return {}
    finally:
        await database.close()
    return {name: msgspec.json.decode(body, type=CellDecision) for name, body in rows}
