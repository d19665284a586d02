"""The port to the book. Its adapters are `store.postgres` and `store.memory`."""

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
    ServiceHostsPage,
    ServiceHostsQuery,
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
    """The result of one turn of publishing. count: the changes that were published. more: further changes may be
    unpublished. taken: another process is publishing.
    """

    count: int
    more: bool
    taken: bool = False


class NewestHead(Struct, frozen=True):
    """The newest head. renewed: this call has given the history a new id. unpublished: there are changes to publish."""

    head: FeedHead
    renewed: bool
    unpublished: bool


class PlacementStore(Protocol):
    """The book. Every write commits in one transaction together with its numbered changes."""

    @property
    def ready(self) -> bool:
        """Whether the store is open (for /readyz)."""

    @property
    def rest(self) -> RestStore:
        """The same book with the operations of the REST API."""

    @property
    def deployment(self) -> str:
        """The identity of this database, a uuid that was created with its schema. It is known after `open`."""

    async def open(self) -> None:
        """Connect and migrate. Waits while the database is unavailable."""

    async def close(self) -> None:
        """Disconnect."""

    async def apply(self, items: Sequence[ClaimItem], *, bus: str = ABOVE_CELLS) -> list[ClaimReply]:
        """Apply claims, releases, reverts and swaps as one group, in order, each with its own outcome. Raises
        Transient.

        bus: the bus on which they arrived. For items of a cell's bus, providers of another cell are `gone`, and a
        consumer that holds them is `consumer_changed`.
        """

    async def report(
        self, updates: Sequence[InventoryUpdate], *, bus: str = ABOVE_CELLS
    ) -> list[InventoryResult | ReportRefusal]:
        """Apply inventory updates as one group, in order, each with its own outcome. Raises Transient.

        bus: the bus on which they arrived. A new root belongs to the cell of that bus, and reports about roots of other
        cells are refused.
        """

    async def release_roots(self, source: str, roots: Sequence[str], *, bus: str) -> None:
        """Release the roots of a source that belong to the cell of `bus`: another compute service may take them
        over.
        """

    async def changes(self, after: int, limit: int, history: str = "") -> ChangesPage:
        """Return the committed changes after a number, in order. history: the history of the number; when the book has
        another one, the page is `too_old`.
        """

    async def snapshot(self, after: str | None, limit: int) -> SnapshotPage:
        """Return a page of whole providers in the order of their uuids, as of one number of the feed."""

    async def locate(self, requested: Sequence[LocateRequest]) -> list[LocatePage]:
        """Return, for each request, the hosts on which consumers of a project hold allocations, and the members of a
        group by host.
        """

    async def tree(self, requested: HostTreeQuery) -> HostTree:
        """Return the tree that a provider is in, and its holders with their allocations, as of one moment."""

    async def hosts_of_service(self, requested: ServiceHostsQuery) -> ServiceHostsPage:
        """Return the hosts that belong to a compute service by its reports."""

    async def members(self, requested: GroupMembersQuery) -> GroupMembersPage:
        """Return a page of the members of a server group, with their hosts."""

    async def usage(self, requested: ProjectUsageQuery) -> ProjectUsagePage:
        """Return the usage of projects, as of one moment."""

    async def head(self) -> FeedHead:
        """Return the number of the newest committed change, and the id of its history."""

    async def newest(self) -> NewestHead:
        """Return the newest head. The history gets a new id when the database was restored or its standby promoted.

        A restore is recognised by state of the database that a backup does not contain, and by a head that is behind
        one that this process has read before.
        """

    async def publish(self, send: Callable[[FeedChanges], Awaitable[None]], limit: int) -> Published:
        """Pass the next unpublished changes to `send`, and record them as published when it returns.

        One process publishes at a time; for the others the result is `taken`. A process that dies or hangs blocks the
        others for `publishing.LEASE_S`, and its changes are published again. A process must not call this method
        concurrently.
        """

    async def trim(self, *, keep_changes: int, keep_fences_s: float, keep_sources_s: float, limit: int) -> bool:
        """Delete published changes, fences and sources that are no longer needed, at most `limit` rows of each. Returns
        whether there may be more.

        keep_changes: the newest changes to keep. keep_fences_s: seconds after the release. keep_sources_s: seconds
        after the last report; a source is deleted if its root no longer exists, or if a newer report of another source
        covers all its providers.
        """

    async def remove_retired_trees(self, limit: int) -> list[str]:
        """Remove retired trees that are no longer used, at most `limit`. Returns their roots.

        Their sources may have ended for good. A source that still reports removes its retired trees with the next
        report.
        """
