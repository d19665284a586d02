"""Which cells an audit can read: of the others it names the reason, and judges the rest."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

import msgspec

from berth.audit.facts import read_database_id
from berth.config.settings import CellSettings
from berth.config.site import Site, added_cells, process_name, url_of
from bus.contracts.objects import CellBus
from bus.faults import Fault
from bus.transport import BusError, BusUnavailable

# A bus that is away is waited for as a worker does; whoever judges does not.
OPEN_TIMEOUT_S = 10.0


async def unreadable(site: Site) -> dict[str, Exception]:
    """{cell: why its bus or its database cannot be read}, of the cells of the settings and of those that were added."""
    added = await added_cells(site)
    names = [*site.cells, *added]
    found = await asyncio.gather(*(_why_unreadable(site, name, added) for name in names))
    return {name: why for name, why in zip(names, found, strict=True) if why is not None}


async def _why_unreadable(site: Site, cell: str, added: Mapping[str, CellBus]) -> Exception | None:
    try:
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            await _open(_with(site, cell, added.get(cell)), cell)
    except (Fault, BusError) as why:
        return why
    except TimeoutError:
        return BusUnavailable(f"no answer within {OPEN_TIMEOUT_S:g} s")
    return None


def _with(site: Site, cell: str, where: CellBus | None) -> Site:
    if where is None:
        return site
    url = url_of(where, site.settings.cells_dir, os.environ)
    settings = msgspec.structs.replace(site.settings, cells={cell: CellSettings(url=url, prefix=where.prefix)})
    return Site(settings, brokers=site.brokers, database_url=site.database_url, clock=site.clock)


async def _open(site: Site, cell: str) -> None:
    """Open what gathering opens. Raises what it would raise."""
    database = site.environment("check").database(f"cell_{cell}", pool_size=1)
    try:
        await read_database_id(database)
    finally:
        await database.close()
    bus = site.bus(process_name("check"), cell)
    try:
        await bus.open()
    finally:
        await bus.close()
