"""The port to the book: the operations of a store. Adapters: `store.postgres`, `store.memory`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from msgspec import Struct

from bus.contracts.book import (
    GroupMembersPage,
    GroupMembersQuery,
    HostTree,
    HostTreeQuery,
    ProjectUsagePage,
    ProjectUsageQuery,
)
from bus.contracts.placement import (
    ChangesPage,
    FeedChanges,
    FeedHead,
    InventoryResult,
    InventoryUpdate,
    LocatePage,
    LocateRequest,
    SnapshotPage,
)
from placement_worker.domain.claim_items import ClaimReply
from placement_worker.domain.claims import ClaimItem
from placement_worker.domain.reports import ReportRefusal
from placement_worker.domain.values import ABOVE_CELLS
from placement_worker.store.rest_port import RestStore


class Published(Struct, frozen=True):
    """The result of one turn of publishing; `more`: there may be changes left. taken: another process is at it."""

    count: int
    more: bool
    taken: bool = False


class NewestHead(Struct, frozen=True):
    """The newest head. renewed: its history id has changed since this look. unpublished: changes up to it wait."""

    head: FeedHead
    renewed: bool
    unpublished: bool


class PlacementStore(Protocol):
    """The book. Every write is one transaction together with its numbered changes."""

    @property
    def ready(self) -> bool:
        """Whether it is open (for /readyz)."""

    @property
    def rest(self) -> RestStore:
        """The same book as the REST API uses it."""

    @property
    def deployment(self) -> str:
        """The identity of this database: a uuid made once with its schema. Known once it has been open."""

    async def open(self) -> None:
        """Connect and migrate; waits while the database is unavailable."""

    async def close(self) -> None:
        """Disconnect."""

    async def apply(self, items: Sequence[ClaimItem], *, bus: str = ABOVE_CELLS) -> list[ClaimReply]:
        """Claims, releases and swaps as one group, in order, each with its own outcome. Raises Transient.

        bus: where they came from. On a cell's bus what belongs to another cell is gone, or another's.
        """

    async def report(
        self, updates: Sequence[InventoryUpdate], *, bus: str = ABOVE_CELLS
    ) -> list[InventoryResult | ReportRefusal]:
        """Inventory updates as one group, in order, each with its own outcome. Raises Transient.

        bus: where they came from. A new root belongs to it; a cell's bus may report nothing of another cell's.
        """

    async def release_roots(self, source: str, roots: Sequence[str], *, bus: str) -> None:
        """Another compute service may take over these roots of a source, those of the cell of `bus`."""

    async def changes(self, after: int, limit: int, history: str = "") -> ChangesPage:
        """Committed changes after a number, in order. history: whose number it is; of another the page is too old."""

    async def snapshot(self, after: str | None, limit: int) -> SnapshotPage:
        """A page of whole providers by uuid, true at one feed number."""

    async def locate(self, requested: Sequence[LocateRequest]) -> list[LocatePage]:
        """For each: on which hosts consumers of a project hold something, and the members of one of its groups."""

    async def tree(self, requested: HostTreeQuery) -> HostTree:
        """The tree that a provider is in, and who holds what of it, true at one moment."""

    async def members(self, requested: GroupMembersQuery) -> GroupMembersPage:
        """The members of a server group, and their hosts."""

    async def usage(self, requested: ProjectUsageQuery) -> ProjectUsagePage:
        """The totals of projects, true at one moment."""

    async def head(self) -> FeedHead:
        """The newest committed change's number, and the history that it is of."""

    async def newest(self) -> NewestHead:
        """The newest head, in one look; of another history id if the book was restored, or its stand-by promoted.

        It is recognised by the part of its state that a backup does not contain, and by a head that is behind one that
        was seen before.
        """

    async def publish(self, send: Callable[[FeedChanges], Awaitable[None]], limit: int) -> Published:
        """Hand the next unpublished changes to `send`, and remember them as published once it returns.

        One publisher at a time among all processes; the others find it taken. One that dies or hangs keeps it for
        `publishing.LEASE_S`; its changes are repeated. Not to be called twice at once.
        """

    async def trim(self, *, keep_changes: int, keep_fences_s: float, keep_sources_s: float, limit: int) -> bool:
        """Delete published changes, fences and sources that are not needed any more, up to a bound of rows of each.

        A source: silent for this long, and its root is gone, or a source that has reported since covers all that it
        did. Returns whether there may be more.
        """

    async def remove_retired_trees(self, limit: int) -> list[str]:
        """Remove trees that were taken out while in use and are no longer used, up to a bound; their roots.

        Their sources may have left for good; one that reports again removes them itself.
        """
