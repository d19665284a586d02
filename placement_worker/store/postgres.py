"""The book in PostgreSQL: transactions around the statements of `claims`, `inventory`, `feed` and `snapshot`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from bus.contracts.placement import (
    Change,
    ChangesPage,
    Claim,
    InventoryResult,
    InventoryUpdate,
    Release,
    SnapshotPage,
)
from bus.service.database import Database
from placement_worker.domain.values import ABOVE_CELLS
from placement_worker.store import claims, feed, inventory, snapshot
from placement_worker.store.names import Names
from placement_worker.store.port import ClaimItem, ClaimReply, Published, Refused

MIGRATIONS = "placement_worker.store.migrations"
REPEATABLE = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"
FORGET_FENCES = "DELETE FROM consumers WHERE released_at < now() - make_interval(secs => $1)"


class PostgresStore:
    """`PlacementStore` on one PostgreSQL schema. Any number of processes may work on the same one."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._names = Names(database)

    @property
    def database(self) -> Database:
        """Where the book is, for the REST API's own statements."""
        return self._database

    @property
    def names(self) -> Names:
        """What this process knows of class and trait names."""
        return self._names

    @property
    def ready(self) -> bool:
        """Whether it is open."""
        return self._database.ready

    async def open(self) -> None:
        """Migrate, and write down the standard names. Waits for a database that is away."""
        await self._database.open(MIGRATIONS)
        await self._names.open()

    async def close(self) -> None:
        """Close the pool."""
        await self._database.close()

    async def apply(self, items: Sequence[ClaimItem], *, bus: str = ABOVE_CELLS) -> list[ClaimReply]:
        """Claims, releases and swaps as one group, in order, each with its own outcome. Raises Transient."""
        if not items:
            return []
        await self._know_classes(items)
        async with self._database.raw() as connection:
            return await claims.apply(connection, items, self._names, bus)

    async def report(
        self, updates: Sequence[InventoryUpdate], *, bus: str = ABOVE_CELLS
    ) -> list[InventoryResult | Refused]:
        """Inventory updates as one group, in order, each with its own outcome. Raises Transient."""
        if not updates:
            return []
        await inventory.know_names(updates, self._names)
        async with self._database.raw() as connection:
            return await inventory.report(connection, updates, self._names, bus)

    async def changes(self, after: int, limit: int) -> ChangesPage:
        """Committed changes after a number, in order."""
        async with self._database.raw() as connection:
            await connection.execute(REPEATABLE)
            newest = await feed.head(connection)
            if await feed.too_old(connection, after, newest):
                return ChangesPage(head=newest, too_old=True)
            changes, _ = await feed.read(connection, after, limit)
            return ChangesPage(changes=tuple(changes), head=newest)

    async def snapshot(self, after: str | None, limit: int) -> SnapshotPage:
        """A page of whole providers by uuid, true at one feed number."""
        await self._names.refresh()
        async with self._database.raw() as connection:
            await connection.execute(REPEATABLE)
            return await snapshot.page(connection, after, limit)

    async def head(self) -> int:
        """The newest committed change's number."""
        async with self._database.raw() as connection:
            return await feed.head(connection)

    async def publish(self, send: Callable[[Sequence[Change]], Awaitable[None]], limit: int) -> Published:
        """Hand the next unpublished changes to `send`; see `feed.publish`."""
        async with self._database.raw() as connection:
            return await feed.publish(connection, send, limit)

    async def trim(self, *, keep_changes: int, keep_fences_s: float) -> None:
        """Forget published changes and fences that nobody needs any more."""
        async with self._database.raw() as connection:
            await connection.execute(feed.TRIM, keep_changes)
        async with self._database.raw() as connection:
            await connection.execute(FORGET_FENCES, keep_fences_s)

    async def _know_classes(self, items: Sequence[ClaimItem]) -> None:
        """A class that another process has just created is not unknown."""
        known = self._names.class_ids
        for item in items:
            if isinstance(item, Claim):
                holdings = [option.allocations for option in item.options]
            elif isinstance(item, Release):
                continue
            else:
                holdings = [entry.allocations for entry in item.consumers]
            for holding in holdings:
                for resources in holding.values():
                    if not known.keys() >= resources.keys():
                        await self._names.refresh()
                        return
