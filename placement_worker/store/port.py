"""The port to the rows of placement, below `placement_worker.service`. Its adapters are `store.postgres_rows` and
`store.memory_rows`; they lock, read and write rows, and decide nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from typing import Any, Protocol

from msgspec import Struct

from bus.contracts import placement_queries as queries
from bus.contracts.base import DatabaseMark
from bus.contracts.feed import Change, FeedHead, FeedRow
from bus.contracts.placement import ConflictingConsumer, LocatePage, LocateRequest
from placement_worker.domain.claim_group import MembersToLock
from placement_worker.domain.claim_ledger import Decision, Lacking
from placement_worker.domain.report_group import Key, LastReports
from placement_worker.domain.trees import TreesToLock
from placement_worker.domain.values import ClaimedProvider, ConsumerState, GroupKey, Members, Provider
from placement_worker.store.names import NameRows, NameTable

Leaving = tuple[str, str]  # (provider, class) whose allocations move to another provider
Named = Mapping[str, int]  # numbers by name
Limits = Mapping[tuple[str, str], int]  # by project and class

MAX_EXAMINED = 5_000  # consumers of one page of those of a cell


class LimitExceeded(Exception):
    """The claims would exceed a limit, because concurrent claims have added to the project's usage since the decision.

    Nothing was written.
    """


class NameKind(StrEnum):
    """The kind of a name. The value is the name of its table."""

    CLASS = "resource_classes"
    TRAIT = "traits"


class NameInUse(Exception):
    """A class or trait cannot be removed while a provider has it."""


class NameExists(Exception):
    """There is a class of this name."""


class Unstorable(Exception):
    """Placement cannot store a value, such as a text with a NUL."""


class NameRow(Struct, frozen=True):
    """A class or trait. updated_at: seconds since the epoch."""

    name: str
    updated_at: float


class ProviderRow(Struct, frozen=True):
    """A provider as the API lists it. updated_at: seconds since the epoch."""

    uuid: str
    name: str
    generation: int
    parent: str | None
    root: str
    updated_at: float


class AllocationRow(Struct, frozen=True):
    """One allocation, its provider and its consumer. updated_at: of the consumer, seconds since the epoch."""

    consumer: str
    provider: str
    provider_generation: int
    resource_class: str
    amount: int
    consumer_generation: int
    project_id: str
    user_id: str
    consumer_type: str
    updated_at: float


class UsageRow(Struct, frozen=True):
    """The amounts that consumers of one type hold of one class; count: how many consumers of that
    type hold anything.
    """

    consumer_type: str
    resource_class: str
    amount: int
    count: int


class Listing(Struct, frozen=True):
    """The conditions of a list of providers. A condition that is None or empty does not apply. Every uuid is in
    canonical form.

    required: the provider has at least one trait of each group; member_of: it is in at least one aggregate of each
    group. resources: each amount is free and satisfies the inventory's unit constraints.
    """

    uuid: str | None = None
    name: str | None = None
    in_tree: str | None = None
    required: tuple[tuple[str, ...], ...] = ()
    forbidden: tuple[str, ...] = ()
    member_of: tuple[tuple[str, ...], ...] = ()
    forbidden_aggregates: tuple[str, ...] = ()
    resources: tuple[tuple[str, int], ...] = ()  # (class, amount)


class LeasedChanges(Struct, frozen=True):
    """Changes that a process has taken to publish. lease: ends with the publishing; None: another process holds it, and
    there are no rows.
    """

    rows: Sequence[FeedRow]
    more: bool
    incarnation: str
    lease: Any


class NewestHead(Struct, frozen=True):
    """The newest head. renewed: this call has given the incarnation a new id. unpublished: there are changes to
    publish.
    """

    head: FeedHead
    renewed: bool
    unpublished: bool


class ClaimsToLock(Struct, frozen=True):
    """The rows that a group of claims locks. expected: the row that each consumer most likely gets if it is new.

    providers: the wanted ones by uuid; None: lock none. limited: projects whose claims have limits. alone: lock them
    exclusively, so that no other transaction adds to their usage. cell: that requests them (None: it is none).
    """

    expected: Mapping[str, ConsumerState]
    providers: Collection[str] | None
    limited: Sequence[str] = ()
    alone: bool = False
    cell: str | None = None


class Locked(Struct, frozen=True):
    """The rows that a group has locked, read after the locks were granted.

    inserted: new consumers, as they are expected to be written. found: consumers that existed. cells: the cell of each
    provider's root, where it has one. usage: what projects with limits hold, by class. incarnation: of the cell's
    database that requests them, as by `raise_mark`.
    """

    inserted: Mapping[str, ConsumerState]
    found: Mapping[str, ConsumerState]
    providers: Mapping[str, ClaimedProvider] = {}
    cells: Mapping[str, str] = {}
    usage: Mapping[str, Mapping[str, int]] = {}
    incarnation: int = 0


class ClaimWrites(Struct, frozen=True):
    """A decision about locked rows, and the changes of the feed. most: {(project, class): limit}."""

    decision: Decision
    locked: Locked
    changes: Sequence[Change] = ()
    most: Limits = {}


class TreeWrites(Struct, frozen=True):
    """The differences between `before` and `after` (a provider that is the same object in both is skipped), without the
    usage, and the changes of the feed. last_reports: the last reports to write. disowned: roots that were deleted, and
    for which no reporter answers any more.
    """

    before: Mapping[str, Provider]
    after: Mapping[str, Provider]
    changes: Sequence[Change] = ()
    last_reports: LastReports = {}
    disowned: Sequence[str] = ()


class PlacementTransaction(NameRows, Protocol):
    """The operations on rows within one transaction, which commits when its context ends without an exception.

    Every writer takes locks in one order, so that no two can deadlock: cells, writers of trees, server groups,
    consumers by uuid, providers by number, projects with limits, the usage of projects by project and class, and the
    feed's counter last. Each operation may raise Transient.
    """

    @property
    def names(self) -> NameTable:
        """The names that this process knows."""

    # --- claims

    async def raise_mark(self, cell: str, mark: DatabaseMark) -> int:
        """Record what of the mark of a cell's database is above the one on record. Returns the highest incarnation."""

    async def lock_groups(self, keys: Sequence[GroupKey]) -> None:
        """Lock server groups, so that claims of one group are decided one after the other."""

    async def lock_claims(self, wanted: ClaimsToLock) -> Locked:
        """Lock and read consumers by uuid, then providers by number: the wanted ones, and those of the consumers'
        allocations. A consumer in `inserted` that the transaction does not write must be passed to `write_claims`,
        which deletes its row.
        """

    async def members(self, wanted: MembersToLock) -> Mapping[GroupKey, Members]:
        """Return {consumer: hosts} of the members that a decision needs, for each group that has any. The hosts are
        locked before: writes that move a member there without the group's lock have either committed or wait.
        """

    async def enroll(self, enrolled: Mapping[GroupKey, Collection[str]]) -> None:
        """Insert those of these members of server groups that hold something and are missing. Later reads of this
        transaction see them.
        """

    async def newest_consumers(
        self, lost: Mapping[int, tuple[str, Lacking]]
    ) -> Mapping[int, tuple[ConflictingConsumer, ...]]:
        """Return, by place, the newest consumers, without the claimant, that hold what a claim lacked. lost: by place,
        (claimant, what it lacked).
        """

    async def join(self, joined: Mapping[GroupKey, Collection[str]]) -> None:
        """Insert the new members of server groups."""

    async def write_claims(self, writes: ClaimWrites) -> int:
        """Write a decision, with the usage of the projects, and append the changes. Returns the number of the last
        change, 0 without changes. Raises LimitExceeded when the new usage would exceed a limit, and BrokenInvariant
        when it would exceed a capacity.
        """

    # --- trees

    async def lock_reporters(self, roots: Collection[str]) -> tuple[LastReports, Mapping[str, str | None]]:
        """Become the only writer of trees until the commit. Returns (the last reports of the reporters of these roots,
        the cell of each of these roots that was ever reported).
        """

    async def retired_reporters(self, limit: int, keep_given_s: float) -> LastReports:
        """The reporters that have removed a tree which is not in use any more, if no reporter has reported it since
        (`is_retired`). keep_given_s: how long ago is long ago.
        """

    async def release_reporters(self, reporter: str, roots: Sequence[str], cell: str) -> None:
        """Record that another compute service may take over these roots of a reporter, those of the cell."""

    async def repeat_reports(self, versions: Mapping[Key, int]) -> None:
        """Record newer versions of the last reports of these reporters, which are otherwise the same."""

    async def consumers_of(self, leaving: Sequence[Leaving]) -> list[str]:
        """The consumers that hold allocations of these classes of these providers."""

    async def lock_trees(self, wanted: TreesToLock) -> tuple[int, dict[str, Provider]]:
        """Become the only writer of trees, and lock and read providers, by number. Returns (a spec generation that no
        provider has ever had, the providers).
        """

    async def write_trees(self, writes: TreeWrites) -> int:
        """Write the differences, and append the changes. Returns the number of the last one, 0 without changes. The
        last reports that are not written, of the other reporters of a changed tree, no longer prove what placement
        holds.
        """

    async def append(self, changes: Sequence[Change]) -> int:
        """Number the changes, as the last step of the transaction. Returns the last number, 0 without changes."""

    # --- names

    async def delete_name(self, kind: NameKind, name: str) -> bool:
        """Remove a class or trait. Returns False when it does not exist. Raises NameInUse."""

    async def rename_class(self, old: str, new: str) -> dict[str, Provider] | None:
        """Give a class another name. Returns the providers that have it; None when it does not exist. Raises
        NameExists. The caller is the only writer of trees. The last reports of the reporters of these trees no longer
        prove what placement holds.
        """

    # --- the feed

    async def head(self) -> FeedHead:
        """The number of the newest committed change, and the id of its incarnation."""

    async def oldest(self) -> int | None:
        """The number of the oldest change that is kept."""

    async def changes(self, after: int, limit: int) -> Sequence[FeedRow]:
        """The rows of the changes after a number, in order; fewer than the limit when they are large."""

    async def providers_after(self, after: str | None, limit: int) -> list[Provider]:
        """Whole providers in the order of their uuids."""


class PlacementReads(Protocol):
    """The reads of placement that no decision follows. Each is of one moment. Every method raises Transient and
    Unstorable.
    """

    async def locate(self, requested: Sequence[LocateRequest]) -> list[LocatePage]:
        """Return, for each request, the hosts on which consumers of a project hold allocations, and the members of a
        group by host.
        """

    async def allocations(self, named: Sequence[str]) -> list[queries.ConsumerRecord]:
        """Return what each of these consumers holds, and whose it is, in the order of their uuids."""

    async def consumers_in_cell(self, requested: queries.CellConsumersQuery) -> queries.CellConsumersPage:
        """Return a page of the consumers that hold something on hosts of a cell, or of none. At most MAX_EXAMINED are
        looked at.
        """

    async def tree(self, requested: queries.HostTreeQuery) -> queries.HostTree:
        """Return the tree that a provider is in, and its holders with their allocations."""

    async def hosts_of_service(self, requested: queries.ServiceHostsQuery) -> queries.ServiceHostsPage:
        """Return the hosts that belong to a compute service by its reports."""

    async def members(self, requested: queries.GroupMembersQuery) -> queries.GroupMembersPage:
        """Return a page of the members of a server group, with their hosts."""

    async def usage(self, requested: queries.ProjectUsageQuery) -> queries.ProjectUsagePage:
        """Return the usage of projects."""

    async def names(
        self, kind: NameKind, named: Sequence[str] | None = None, prefix: str = "", associated: bool | None = None
    ) -> list[NameRow]:
        """Return the classes or traits with one of these names and with this prefix, oldest first. associated: only
        the traits that a provider has (True) or none has (False). None: the condition does not apply.
        """

    async def providers(self, listing: Listing) -> Sequence[Sequence[Any]]:
        """Return the providers that meet the conditions, oldest first. Each is a sequence of the fields of ProviderRow.
        There may be very many.
        """

    async def provider(self, uuid: str) -> tuple[Provider, float] | None:
        """Return a provider and when it was last written (seconds since the epoch), None when it does not exist."""

    async def allocations_of_consumer(self, uuid: str) -> list[AllocationRow]:
        """The allocations of a consumer, by provider and class."""

    async def allocations_of_provider(self, uuid: str) -> tuple[int, list[AllocationRow]] | None:
        """(generation, allocations of a provider, by consumer and class), None when it does not exist."""

    async def totals(self, project_id: str, user_id: str | None, consumer_type: str | None) -> Sequence[UsageRow]:
        """The amounts that a project's (and user's, and type's) consumers hold, by type and class.

        "" is the unknown type.
        """


class PlacementRows(Protocol):
    """The rows of one placement, as one process has them."""

    @property
    def ready(self) -> bool:
        """Whether the rows are open (for /readyz)."""

    @property
    def database_id(self) -> str:
        """The identity of the database, a uuid that was created with its schema. It is known after `open`."""

    @property
    def reads(self) -> PlacementReads:
        """The reads that no decision follows."""

    @property
    def names(self) -> NameTable:
        """The names that this process knows."""

    async def open(self) -> None:
        """Connect and migrate. Waits while the database is unavailable."""

    async def close(self) -> None:
        """Disconnect."""

    def transaction(self) -> AbstractAsyncContextManager[PlacementTransaction]:
        """A transaction that commits at the end and rolls back on an exception. Raises Unstorable, and StaleNames when
        it has written a name's number that placement does not have.
        """

    async def take_new(
        self, consumers: Mapping[str, ConsumerState], spec_generations: Mapping[str, int | None], most: Limits
    ) -> tuple[int, Sequence[int]] | None:
        """Write new consumers with what they hold, in a transaction of their own, or nothing (None) where a row is not
        as that needs it. Returns (the number of the last change, the new generations in the order of
        `spec_generations`).

        spec_generations: of the providers that they hold, which no two of them share; None: any. most: limits of their
        projects.
        """

    def snapshot(self) -> AbstractAsyncContextManager[PlacementTransaction]:
        """A transaction whose reads are all of one moment."""

    async def head(self) -> FeedHead:
        """The number of the newest committed change, and the id of its incarnation."""

    async def newest(self, seen: FeedHead | None) -> NewestHead:
        """Return the newest head. The incarnation gets a new id when the database was restored or its standby promoted,
        or when its head is behind one of the same incarnation that was seen before.
        """

    async def take_changes(self, limit: int, lease_s: float, lease: Any) -> LeasedChanges | None:
        """Take the next unpublished changes for so many seconds. lease: of a former turn that has failed. None: there
        are no changes.
        """

    async def advance_position(self, number: int, lease: Any) -> None:
        """Record that the changes up to this number are published, and end the lease."""

    async def trim(
        self, *, keep_changes: int, keep_ended_attempts_s: float, keep_reporters_s: float, limit: int
    ) -> bool:
        """Delete published changes, ended attempts and reporters that are no longer needed, at most `limit` rows of
        each. Returns whether there may be more.

        keep_changes: the newest changes to keep. keep_ended_attempts_s: seconds after the release. keep_reporters_s:
        seconds after the last report; a reporter is deleted if its root no longer exists, or if it answers for no
        provider.
        """
