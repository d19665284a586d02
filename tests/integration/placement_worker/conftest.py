from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from bus.clock import new_uuid
from bus.contracts.placement import Claim, ClaimOption, Inventory, InventoryUpdate, ProviderReport
from bus.persistence.database import Database
from placement_worker.operations import audit
from placement_worker.operations.audit import OverCapacity, find_over_capacity
from placement_worker.service import PlacementService
from placement_worker.store.postgres_rows import PostgresPlacementRows

Hold = Mapping[str, Mapping[str, int]]


class PlacementDatabase:
    """A store on its own database, with words for what tests do to it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.database = Database(url, "placement")
        self.rows = PostgresPlacementRows(self.database)
        self.store = PlacementService(self.rows)
        self.versions = 0
        self._others: list[PlacementService] = []

    async def open(self) -> None:
        await self.store.open()

    async def another(self) -> PlacementService:
        """Another process on the same book."""
        store = PlacementService(PostgresPlacementRows(Database(self.url, "placement")))
        await store.open()
        self._others.append(store)
        return store

    async def close(self) -> None:
        for store in (*self._others, self.store):
            await store.close()

    async def hosts(self, count: int, rng: random.Random, **amounts: int) -> list[str]:
        """Flat hosts with these inventories, in placement."""
        uuids = [new_uuid(rng) for _ in range(count)]
        results = await self.store.apply_reports([self.host(uuid, **amounts) for uuid in uuids])
        assert all(getattr(result, "outcome", None) == "applied" for result in results), results
        return uuids

    def host(self, uuid: str, *, reporter: str = "test", version: int | None = None, **amounts: int) -> InventoryUpdate:
        self.versions += 1
        inventories = {name: Inventory(total=total) for name, total in amounts.items()}
        report = ProviderReport(uuid=uuid, name=f"host-{uuid}", inventories=inventories)
        return InventoryUpdate(
            reporter=reporter,
            version=self.versions if version is None else version,
            root_uuid=uuid,
            providers=(report,),
        )

    async def findings(self) -> list[str]:
        async with self.database.raw() as connection:
            return await audit.findings(connection)

    async def over_capacity(self) -> list[OverCapacity]:
        async with self.database.raw() as connection:
            return await find_over_capacity(connection)

    async def allocations(self) -> dict[str, dict[str, dict[str, int]]]:
        async with self.database.raw() as connection:
            return await audit.allocations(connection)


def claim(consumer: str, *holds: Hold, **fields: Any) -> Claim:
    options = tuple(ClaimOption(allocations={p: dict(r) for p, r in hold.items()}) for hold in holds)
    return Claim(consumer=consumer, options=options, project_id="p", **fields)


@pytest.fixture
async def placement(postgres_url: str) -> AsyncIterator[PlacementDatabase]:
    made = PlacementDatabase(postgres_url)
    await made.open()
    yield made
    await made.close()


@pytest.fixture
def rng() -> random.Random:
    return random.Random(20)
