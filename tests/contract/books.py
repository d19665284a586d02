"""The book in memory and in PostgreSQL, for the suites that both pass."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bus.clock import Clock, SystemClock
from bus.contracts.placement import Inventory, InventoryUpdate, ProviderReport
from bus.persistence.database import Database
from placement_worker.book import ResourceBook
from placement_worker.store.memory_rows import MemoryBookRows
from placement_worker.store.memory_table import MemoryBookTable
from placement_worker.store.postgres_rows import PostgresBookRows

KINDS = ["memory", pytest.param("postgres", marks=pytest.mark.postgres)]
HOSTS = [f"{n}0000000-0000-4000-8000-000000000000" for n in range(1, 6)]
VMS = [f"c00000{n:02d}-0000-4000-8000-000000000000" for n in range(40)]


class Books:
    """Called, it makes another store on the same book, as another process has it."""

    def __init__(self, url: str, clock: Clock) -> None:
        self.made: list[ResourceBook] = []
        self._url = url
        self._table = MemoryBookTable(clock)

    def __call__(self) -> ResourceBook:
        url, table = self._url, self._table
        self.made.append(
            ResourceBook(PostgresBookRows(Database(url, "placement")))
            if url
            else ResourceBook(MemoryBookRows(table.session()))
        )
        return self.made[-1]


@asynccontextmanager
async def books(request: pytest.FixtureRequest, clock: Clock | None = None) -> AsyncIterator[Books]:
    """A book of the kind that the fixture's parameter names; what is made on it is closed at the end."""
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else ""
    found = Books(url, clock or SystemClock())
    yield found
    for store in found.made:
        await store.close()


def roomy_host(uuid: str) -> InventoryUpdate:
    """A host with plenty of room."""
    inventory = {name: Inventory(total=100) for name in ("VCPU", "DISK_GB")}
    root = ProviderReport(uuid=uuid, name=f"host-{uuid[0]}", inventories=inventory)
    return InventoryUpdate(source="s", version=1, root_uuid=uuid, providers=(root,))
