"""The book in PostgreSQL: transactions around the statements of `claims`, `inventory`, `feed` and `snapshot`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from bus.contracts.book import (
    GroupMembersPage,
    GroupMembersQuery,
    HostTree,
    HostTreeQuery,
    ProjectUsagePage,
    ProjectUsageQuery,
    ServiceHostsPage,
    ServiceHostsQuery,
)
from bus.contracts.placement import (
    ChangesPage,
    Claim,
    FeedChanges,
    FeedHead,
    InventoryResult,
    InventoryUpdate,
    LocatePage,
    LocateRequest,
    Release,
    Revert,
    SnapshotPage,
)
from bus.persistence.database import Database
from bus.persistence.identity import read_identity
from placement_worker.domain.claim_items import ClaimReply, single_items
from placement_worker.domain.claims import ClaimItem
from placement_worker.domain.reports import ReportRefusal
from placement_worker.domain.values import ABOVE_CELLS
from placement_worker.store import claims, fast_path, feed, inventory, limits, members, operator_reads, snapshot
from placement_worker.store.names import NameTable
from placement_worker.store.port import NewestHead, Published
from placement_worker.store.publishing import Publishing
from placement_worker.store.rest_postgres import PostgresRest

MIGRATIONS = "placement_worker.store.migrations"
REPEATABLE = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"
PURGE_FENCES = """
DELETE FROM consumers WHERE uuid IN (
    SELECT uuid FROM consumers WHERE released_at < now() - make_interval(secs => $1)
    ORDER BY released_at LIMIT $2 FOR UPDATE SKIP LOCKED)
"""
# A source's row holds the version that later reports are compared with and the providers that the source may remove. So
# a row is deleted only if its root no longer exists, or if a newer report of another source covers these providers.
PURGE_SOURCES = """
DELETE FROM sources WHERE ctid = ANY(ARRAY(
    SELECT s.ctid FROM sources s WHERE s.updated_at < now() - make_interval(secs => $1) AND (
        NOT EXISTS (SELECT FROM providers p WHERE p.uuid = s.root)
        OR EXISTS (SELECT FROM sources n WHERE n.root = s.root AND n.updated_at > s.updated_at
            AND n.providers @> s.providers))
    LIMIT $2 FOR UPDATE SKIP LOCKED))
"""


class PostgresStore:
    """`PlacementStore` on one PostgreSQL schema, which any number of processes may use."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._names = NameTable(database)
        self._publishing = Publishing(database)
        self._rest = PostgresRest(database, self._names)
        self.deployment = ""
        self._seen: FeedHead | None = None  # the last head that `newest` has looked at

    @property
    def database(self) -> Database:
        """The database of the book, for the statements of the REST API."""
        return self._database

    @property
    def names(self) -> NameTable:
        """The class and trait names that this process has cached."""
        return self._names

    @property
    def rest(self) -> PostgresRest:
        """The same book as the REST API uses it."""
        return self._rest

    @property
    def ready(self) -> bool:
        """Whether it is open."""
        return self._database.ready

    async def open(self) -> None:
        """Migrate, and insert the standard names. Waits while the database is unavailable."""
        await self._database.open(MIGRATIONS)
        self.deployment = await read_identity(self._database)
        await self._names.open()
        await self.newest()

    async def close(self) -> None:
        """Close the pool."""
        await self._database.close()

    async def apply(self, items: Sequence[ClaimItem], *, bus: str = ABOVE_CELLS) -> list[ClaimReply]:
        """Claims, releases and swaps as one group, in order, each with its own outcome. Raises Transient."""
        if not items:
            return []
        await self._know_classes(items)
        if bus == ABOVE_CELLS and fast_path.is_small(items):
            async with self._database.single() as connection:
                replies = await fast_path.apply(connection, items, self._names)
            if replies is not None:
                return replies
        try:
            return await self._names.write(lambda connection: claims.apply(connection, items, self._names, bus))
        except limits.PassedMeanwhile:
            return await self._names.write(
                lambda connection: claims.apply(connection, items, self._names, bus, alone=True)
            )

    async def report(
        self, updates: Sequence[InventoryUpdate], *, bus: str = ABOVE_CELLS
    ) -> list[InventoryResult | ReportRefusal]:
        """Inventory updates as one group, in order, each with its own outcome. Raises Transient."""
        if not updates:
            return []
        return await self._names.write(
            lambda connection: inventory.report(connection, updates, self._names, bus),
            ahead=lambda: inventory.know_names(updates, self._names),  # names that were removed are created again
        )

    async def release_roots(self, source: str, roots: Sequence[str], *, bus: str) -> None:
        """Another compute service may take over these roots of a source, those of the cell of `bus`."""
        await self._names.write(lambda connection: inventory.release_roots(connection, source, roots, bus))

    async def changes(self, after: int, limit: int, history: str = "") -> ChangesPage:
        """Committed changes after a number, in order."""
        async with self._database.raw() as connection:
            await connection.execute(REPEATABLE)
            newest = await feed.head(connection)
            number = newest.sequence
            if history not in ("", newest.history) or await feed.too_old(connection, after, number):
                return ChangesPage(head=number, too_old=True, history=newest.history)
            changes, _ = await feed.read(connection, after, limit)
            return ChangesPage(changes=tuple(changes), head=number, history=newest.history)

    async def snapshot(self, after: str | None, limit: int) -> SnapshotPage:
        """A page of whole providers by uuid, true at one feed number."""
        await self._names.refresh()
        async with self._database.raw() as connection:
            await connection.execute(REPEATABLE)
            return await snapshot.page(connection, after, limit)

    async def locate(self, requested: Sequence[LocateRequest]) -> list[LocatePage]:
        """For each: on which hosts consumers are, and the members of a server group."""
        async with self._database.raw() as connection:
            return await members.where(connection, requested)

    async def tree(self, requested: HostTreeQuery) -> HostTree:
        """The tree that a provider is in, and who holds what of it, true at one moment."""
        await self._names.refresh()
        async with self._database.raw() as connection:
            await connection.execute(REPEATABLE)
            return await operator_reads.tree(connection, requested)

    async def hosts_of_service(self, requested: ServiceHostsQuery) -> ServiceHostsPage:
        """The hosts that belong to a compute service by its reports."""
        async with self._database.single() as connection:
            return await operator_reads.hosts_of_service(connection, requested)

    async def members(self, requested: GroupMembersQuery) -> GroupMembersPage:
        """The members of a server group, and their hosts."""
        async with self._database.single() as connection:
            return await members.page(connection, requested)

    async def usage(self, requested: ProjectUsageQuery) -> ProjectUsagePage:
        """The totals of projects, true at one moment."""
        async with self._database.raw() as connection:
            await connection.execute(REPEATABLE)
            return await operator_reads.usage(connection, requested, self._names)

    async def head(self) -> FeedHead:
        """The newest committed change's number, and the history that it is of."""
        async with self._database.single() as connection:
            return await feed.head(connection)

    async def newest(self) -> NewestHead:
        """Return the head. The history gets a new id when the database was restored or promoted, or is behind the head
        that this process has read before.
        """
        async with self._database.single() as connection:
            newest = await feed.newest(connection, self._seen)
        self._seen = newest.head
        return newest

    async def publish(self, send: Callable[[FeedChanges], Awaitable[None]], limit: int) -> Published:
        """Pass the next unpublished changes to `send` (see `publishing`)."""
        return await self._publishing.publish(send, limit)

    async def trim(self, *, keep_changes: int, keep_fences_s: float, keep_sources_s: float, limit: int) -> bool:
        """Purge rows that are no longer needed, with one bounded transaction for each kind."""
        more = False
        for statement, keep in (
            (feed.TRIM, keep_changes),
            (PURGE_FENCES, keep_fences_s),
            (PURGE_SOURCES, keep_sources_s),
            (limits.PURGE_EMPTY, 0.0),
        ):
            async with self._database.raw() as connection:
                tag: str = await connection.execute(statement, keep, limit)
            more |= int(tag.rpartition(" ")[2]) >= limit
        async with self._database.raw() as connection:
            more |= await members.purge(connection, limit) >= limit
        return more

    async def remove_retired_trees(self, limit: int) -> list[str]:
        """Remove trees that were taken out while in use and are used no more; their roots."""
        return await self._names.write(
            lambda connection: inventory.remove_retired_trees(connection, self._names, limit)
        )

    async def _know_classes(self, items: Sequence[ClaimItem]) -> None:
        """Refresh the names when the items name a class that is not cached: another process may have created it."""
        known = self._names.class_ids
        for item in single_items(items):
            if isinstance(item, Claim):
                holdings = [option.allocations for option in item.options]
            elif isinstance(item, Release):
                continue
            elif isinstance(item, Revert):
                holdings = [item.migration.source]
            else:
                holdings = [entry.allocations for entry in item.consumers]
            for holding in holdings:
                for resources in holding.values():
                    if not known.keys() >= resources.keys():
                        await self._names.refresh()
                        return
