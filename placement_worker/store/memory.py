"""The book in memory: for simulation and tests. It passes the same suite as PostgreSQL (tests/contract).

The decisions are the same pure functions; this module has only rows, locks and commits. The order of locks is that of
PostgreSQL (writers of trees, server groups, consumers by uuid, providers by number, the feed's counter last), except
that projects with limits are locked, exclusively, before consumers.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from msgspec.structs import replace

from bus.contracts.book import (
    MAX_TREE,
    GroupMembersPage,
    GroupMembersQuery,
    HostTree,
    HostTreeQuery,
    ProjectUsagePage,
    ProjectUsageQuery,
    ServiceHostsPage,
    ServiceHostsQuery,
    TreeHolder,
)
from bus.contracts.placement import (
    COMPUTE_SOURCE,
    MAX_LOCATED_HOSTS,
    Change,
    ChangesPage,
    FeedChanges,
    FeedHead,
    InventoryResult,
    InventoryUpdate,
    LocatePage,
    LocateRequest,
    SnapshotPage,
)
from bus.faults import BrokenInvariant
from bus.persistence.memory_database import MemoryDatabaseTransaction, MemorySession
from placement_worker.domain.allocation_migration import migrating_classes
from placement_worker.domain.claim_items import (
    ClaimReply,
    consumers_of,
    dated_consumers,
    groups_of,
    lost_claims,
    projects_of,
    providers_of,
    reply,
    with_holders,
)
from placement_worker.domain.claim_verdict import ClaimVerdict, Decision
from placement_worker.domain.claims import ClaimItem, changes_of, decide
from placement_worker.domain.names import is_class, is_custom
from placement_worker.domain.report_group import Key, ReportGroup
from placement_worker.domain.reports import ReportRefusal, flaw, plan
from placement_worker.domain.reports import changes_of as changes_of_reports
from placement_worker.domain.retired_trees import is_retired
from placement_worker.domain.values import (
    ABOVE_CELLS,
    ClaimedProvider,
    GroupKey,
    Provider,
    claimed_provider,
    is_closed,
    state_of,
)
from placement_worker.store import publishing
from placement_worker.store.allocation_migration import HoldersBusy, Leaving
from placement_worker.store.memory_table import TREES, MemoryBookTable, provider_key
from placement_worker.store.port import NewestHead, Published
from placement_worker.store.rest_memory import MemoryRest

__all__ = ["MemoryBook", "MemoryBookTable"]

HEAD, POSITION = ("feed head",), ("feed position",)


class MemoryBook:
    """`PlacementStore` over a MemoryBookTable: one process's view of it."""

    def __init__(self, session: MemorySession) -> None:
        assert isinstance(session.database, MemoryBookTable)
        self.table = session.database
        self.session = session
        self.deployment = session.database.deployment
        self._lease: float | None = None  # the end of the last turn's lease, until the turn has succeeded
        self._seen: FeedHead | None = None  # the last head that `newest` has looked at
        self.ready = False

    @property
    def rest(self) -> MemoryRest:
        """The same book as the REST API uses it."""
        return MemoryRest(self)

    async def open(self) -> None:
        """Open the book. There is nothing to migrate; the history gets a new id when the table was set back."""
        await self.newest()
        self.ready = True

    async def close(self) -> None:
        """Close the connections; the rows stay."""
        self.ready = False
        self.session.cut()

    # --- claims

    async def apply(self, items: Sequence[ClaimItem], *, bus: str = ABOVE_CELLS) -> list[ClaimReply]:
        """Apply claims, releases, reverts and swaps as one group, in order, each with its own outcome. Raises
        Transient.
        """
        if not items:
            return []
        table = self.table
        async with self.session.transaction() as transaction:
            await transaction.statement()
            await transaction.lock([("group", *key) for key in groups_of(items)])
            await transaction.lock([("project", project) for project in projects_of(items)])
            await transaction.lock([("consumer", uuid) for uuid in sorted(consumers_of(items))])
            consumers = {
                uuid: table.consumers[uuid].consumer for uuid in consumers_of(items) if uuid in table.consumers
            }
            providers = await self.lock_providers(transaction, sorted(providers_of(items, consumers)))
            cells = {uuid: cell for uuid in providers if (cell := table.cell(uuid)) is not None}
            foreign = frozenset(uuid for uuid in providers if is_closed(cells.get(uuid), bus))
            groups = {key: table.alive(key) for key in groups_of(items)}
            projects = {project: table.held_by(project) for project in projects_of(items)}
            ages_s = {uuid: table.age_s(uuid) for uuid in dated_consumers(items) if uuid in consumers}
            decision = decide(
                items, consumers, providers, table.classes, foreign, groups=groups, projects=projects, ages_s=ages_s
            )
            await transaction.statement()
            self.write(transaction, decision)
            sequence = await self.append(transaction, changes_of(decision))
        verdicts: Sequence[ClaimVerdict] = decision.verdicts
        if bus == ABOVE_CELLS:  # a cell learns nothing of other cells' consumers
            found = {
                place: table.newest_holders(decision.consumers, lacking, consumer)
                for place, (consumer, lacking) in lost_claims(items, verdicts).items()
            }
            verdicts = with_holders(verdicts, found)
        return [reply(item, verdict, sequence, bus, cells) for item, verdict in zip(items, verdicts, strict=True)]

    async def lock_providers(
        self, transaction: MemoryDatabaseTransaction, wanted: Sequence[str]
    ) -> dict[str, ClaimedProvider]:
        """Lock these providers in the order of their numbers. Returns those that exist, as a claim sees them."""
        await transaction.statement()
        await transaction.lock([provider_key(uuid) for uuid in self.table.by_number(wanted)])
        await transaction.statement()
        return {uuid: claimed_provider(self.table.providers[uuid]) for uuid in self.table.by_number(wanted)}

    def write(self, transaction: MemoryDatabaseTransaction, decision: Decision) -> None:
        """Write a decision about the locked rows at the commit. Raises BrokenInvariant when it exceeds a capacity."""
        table = self.table
        for uuid, used in decision.used.items():
            for name, amount in used.items():
                inventory = table.providers[uuid].inventories.get(name)
                before = table.providers[uuid].used.get(name, 0)
                # The database's own check: usage neither rises above the capacity nor falls below zero.
                if inventory is None or amount < 0 or (amount > inventory.capacity and amount > before):
                    raise BrokenInvariant(f"usage past capacity, or an inventory is gone: {uuid} {name} {amount}")

        def write() -> None:
            table.keep(decision.consumers)
            for key, joined in decision.joined.items():
                table.members.setdefault(key, {}).update(dict.fromkeys(joined))
            table.put_usage(decision.generations, decision.used)

        transaction.will(write)

    # --- inventory

    async def report(
        self, updates: Sequence[InventoryUpdate], *, bus: str = ABOVE_CELLS
    ) -> list[InventoryResult | ReportRefusal]:
        """Apply inventory updates as one group, in order, each with its own outcome. Raises Transient."""
        if not updates:
            return []
        table = self.table
        await self._know_names(updates)
        async with self.session.transaction() as transaction:
            await transaction.lock([TREES])
            await transaction.statement()
            roots = {update.root_uuid for update in updates}
            sources = {key: source for key, source in table.sources.items() if key[0] in roots}
            cells = {update.root_uuid: table.cell(update.root_uuid) for update in updates}
            group = ReportGroup(updates, sources, cells=cells, bus=bus)
            group.refuse_flawed(table.traits)
            group.refuse_foreign()
            group.refuse_owned()
            group.sort_out_stale()
            sequence = await self._apply_reports(transaction, group)
        return group.answers(sequence)

    async def release_roots(self, source: str, roots: Sequence[str], *, bus: str) -> None:
        """Release the roots of a source that belong to the cell of `bus`: another compute service may take them
        over.
        """
        async with self.session.transaction() as transaction:
            await transaction.lock([TREES])
            await transaction.statement()
            keys = [(root, source) for root in roots if self.table.cell(root) == bus]
            transaction.will(lambda: self.table.free_roots(keys))

    async def _apply_reports(self, transaction: MemoryDatabaseTransaction, group: ReportGroup) -> int:
        """Plan the fresh updates and write the result."""
        table = self.table
        fresh = group.fresh()
        planned = [group.updates[number] for number in fresh]
        leaving = [pair for update in planned for pair in migrating_classes(update.providers)]
        locked = await self._lock_holders(transaction, leaving)
        before = await self._lock_trees(transaction, planned)
        await self._lock_late_holders(transaction, leaving, locked)
        holdings = {uuid: table.consumers[uuid].consumer.holding for uuid in table.holders(leaving)}
        earlier = [group.earlier(number) for number in fresh]
        outcome = plan(planned, earlier, before, holdings, group.bus, shape=table.next_shape())
        group.settle(fresh, outcome.results)
        await transaction.statement()
        transaction.will(lambda: table.write_trees(before, outcome, group))
        return await self.append(transaction, changes_of_reports(before, outcome.after))

    async def remove_retired_trees(self, limit: int) -> list[str]:
        """Remove retired trees that are no longer used, at most `limit`. Returns their roots."""
        table = self.table
        async with self.session.transaction() as transaction:
            await transaction.lock([TREES])
            await transaction.statement()
            sources = {key: table.sources[key] for key in sorted(table.sources) if table.is_taken_out(key)}
            keys = [key for key in sources if is_retired(table.tree(key[0]))][:limit]
            updates = [
                InventoryUpdate(source=source, version=sources[root, source].version, root_uuid=root)
                for root, source in keys
            ]
            await self._lock_trees(transaction, updates)
            empty = [update for update in updates if is_retired(table.tree(update.root_uuid))]
            await self._apply_reports(transaction, ReportGroup(empty, sources, cells={}, bus=ABOVE_CELLS))
        return list(dict.fromkeys(update.root_uuid for update in empty))

    async def _lock_holders(self, transaction: MemoryDatabaseTransaction, leaving: Sequence[Leaving]) -> list[str]:
        """Lock and return all consumers that hold allocations of these classes of these providers."""
        if not leaving:
            return []
        await transaction.statement()
        holders = self.table.holders(leaving)
        await transaction.lock([("consumer", uuid) for uuid in holders])
        return holders

    async def _lock_late_holders(
        self, transaction: MemoryDatabaseTransaction, leaving: Sequence[Leaving], locked: Sequence[str]
    ) -> None:
        """Lock the holders that appeared before the providers were locked, without waiting. Raises HoldersBusy, so that
        the group is retried.
        """
        late = [("consumer", uuid) for uuid in self.table.holders(leaving) if uuid not in locked]
        if not all(transaction.is_free(key) for key in late):
            raise HoldersBusy("an allocation that is to be moved is being changed")
        await transaction.lock(late)

    async def _know_names(self, updates: Sequence[InventoryUpdate]) -> None:
        """Create the classes and CUSTOM_ traits that the updates name, ahead of their transaction."""
        table = self.table
        classes: dict[str, None] = {}
        traits: dict[str, None] = {}
        for update in updates:
            if flaw(update, table.traits) is None:
                for report in update.providers:
                    classes.update(dict.fromkeys(filter(is_class, report.inventories)))
                    traits.update(dict.fromkeys(filter(is_custom, report.traits)))
        if classes.keys() <= table.classes.keys() and traits.keys() <= table.traits.keys():
            return
        async with self.session.transaction() as transaction:
            transaction.will(partial(table.add_names, classes, traits))

    async def _lock_trees(
        self, transaction: MemoryDatabaseTransaction, updates: Sequence[InventoryUpdate]
    ) -> dict[str, Provider]:
        """Lock every tree that contains a root, a provider or a name of the updates, then read the trees."""
        if not updates:
            return {}
        await transaction.statement()
        providers = self.table.providers
        uuids = {update.root_uuid for update in updates} | {r.uuid for update in updates for r in update.providers}
        names = {r.name for update in updates for r in update.providers}
        roots = {p.root for p in providers.values() if p.uuid in uuids or p.name in names}
        found = self.table.by_number([p.uuid for p in providers.values() if p.root in roots])
        await transaction.lock([provider_key(uuid) for uuid in found])
        await transaction.statement()
        return {uuid: providers[uuid] for uuid in found if uuid in providers}

    # --- the feed

    async def append(self, transaction: MemoryDatabaseTransaction, changes: Sequence[Change]) -> int:
        """Number the changes, as the last statement of a transaction. Returns the last number, 0 when there are no
        changes.
        """
        if not changes:
            return 0
        await transaction.statement()
        await transaction.lock([HEAD])
        table = self.table
        numbered = [replace(change, sequence=table.head + at) for at, change in enumerate(changes, 1)]

        def write() -> None:
            table.changes += numbered
            table.head = numbered[-1].sequence

        transaction.will(write)
        return numbered[-1].sequence

    async def changes(self, after: int, limit: int, history: str = "") -> ChangesPage:
        """Committed changes after a number, in order."""
        table = self.table
        async with self.session.transaction():
            oldest = table.changes[0].sequence if table.changes else None
            too_old = after < table.head if oldest is None else after < oldest - 1
            if too_old or history not in ("", table.history):
                return ChangesPage(head=table.head, too_old=True, history=table.history)
            return ChangesPage(changes=tuple(self._after(after, limit)), head=table.head, history=table.history)

    async def snapshot(self, after: str | None, limit: int) -> SnapshotPage:
        """A page of whole providers by uuid, true at one feed number."""
        table = self.table
        async with self.session.transaction():
            uuids = sorted(uuid for uuid in table.providers if after is None or uuid > after)
            states = tuple(state_of(table.providers[uuid]) for uuid in uuids[:limit])
            more = len(uuids) > limit
            return SnapshotPage(sequence=table.head, providers=states, more=more, history=table.history)

    async def locate(self, requested: Sequence[LocateRequest]) -> list[LocatePage]:
        """Return, for each request, the hosts on which consumers of a project hold allocations, and the members of a
        group by host.
        """
        return [await self._locate(one) for one in requested]

    async def _locate(self, requested: LocateRequest) -> LocatePage:
        table = self.table
        async with self.session.transaction():
            key = (requested.project_id, requested.server_group or "")
            alive = table.alive(key)
            counted = Counter(host for uuid, hosts in alive.items() if uuid != requested.besides for host in hosts)
            hosts = {
                uuid: tuple(sorted({table.providers[provider].root for provider in kept.consumer.holding}))
                for uuid in sorted(set(requested.consumers))
                if (kept := table.consumers.get(uuid)) is not None
                and kept.consumer.holding
                and kept.consumer.project_id == requested.project_id
            }
            return LocatePage(members=dict(sorted(counted.items())[:MAX_LOCATED_HOSTS]), hosts=hosts)

    async def hosts_of_service(self, requested: ServiceHostsQuery) -> ServiceHostsPage:
        """Return the hosts that belong to a compute service by its reports."""
        table, mine = self.table, f"{COMPUTE_SOURCE}{requested.service}"
        async with self.session.transaction():
            roots = [
                root for (root, source), last in table.sources.items() if source == mine and root in last.providers
            ]
            found = [table.providers[root] for root in roots if root in table.providers]
            names = sorted(one.name for one in found if one.cell in (None, requested.cell))
            return ServiceHostsPage(hosts=tuple(names[: requested.limit]))

    async def tree(self, requested: HostTreeQuery) -> HostTree:
        """Return the tree that a provider is in, and its holders with their allocations, as of one moment."""
        table = self.table
        async with self.session.transaction():
            if (known := table.providers.get(requested.provider)) is None:
                return HostTree()
            every = sorted(uuid for uuid, one in table.providers.items() if one.root == known.root)
            shown = every[:MAX_TREE]
            holders = [
                TreeHolder(
                    consumer=uuid,
                    project_id=state.project_id,
                    user_id=state.user_id,
                    consumer_type=state.consumer_type,
                    attempt=state.attempt,
                    holding=held,
                )
                for uuid, row in sorted(table.consumers.items())
                if (state := row.consumer)
                and (held := {one: dict(state.holding[one]) for one in every if one in state.holding})
                and (requested.after is None or uuid > requested.after)
            ]
            return HostTree(
                providers=tuple(state_of(table.providers[uuid]) for uuid in shown),
                holders=tuple(holders[: requested.limit]),
                more=len(every) > MAX_TREE or len(holders) > requested.limit,
            )

    async def members(self, requested: GroupMembersQuery) -> GroupMembersPage:
        """The members of a server group, and their hosts."""
        table = self.table
        async with self.session.transaction():
            alive = table.alive((requested.project_id, requested.server_group))
            found = [uuid for uuid in sorted(alive) if requested.after is None or uuid > requested.after]
            members = {
                uuid: tuple(sorted(table.providers[host].name for host in alive[uuid]))
                for uuid in found[: requested.limit]
            }
            return GroupMembersPage(members=members, more=len(found) > requested.limit)

    async def usage(self, requested: ProjectUsageQuery) -> ProjectUsagePage:
        """The usage of projects, as of one moment."""
        async with self.session.transaction():
            usage: dict[str, dict[str, int]] = {}
            for project, held in sorted(self.table.project_usage.items()):
                if requested.projects and project not in requested.projects:
                    continue
                if (requested.after is None or project > requested.after) and any(held.values()):
                    usage[project] = {name: amount for name, amount in sorted(held.items()) if amount}
            shown = dict(list(usage.items())[: requested.limit])
            return ProjectUsagePage(usage=shown, more=len(usage) > requested.limit)

    async def head(self) -> FeedHead:
        """The number of the newest committed change, and the id of its history."""
        async with self.session.transaction():
            return self.table.newest

    async def newest(self) -> NewestHead:
        """Return the head. The history gets a new id when the table was replaced, or is behind the head that this
        process has read before.
        """
        seen = self._seen
        async with self.session.transaction() as transaction:
            await transaction.lock([HEAD])
            newest = self.table.newest
            is_behind = seen is not None and seen.history == newest.history and newest.sequence < seen.sequence
            is_another = is_behind or self.table.origin != self.table.place
            if is_another:
                transaction.will(self.table.renew_history)
        self._seen = newest = self.table.newest
        return NewestHead(newest, is_another, newest.sequence > self.table.position)

    async def publish(self, send: Callable[[FeedChanges], Awaitable[None]], limit: int) -> Published:
        """Pass the next unpublished changes to `send`, and record them as published when it returns."""
        table = self.table
        async with self.session.transaction() as transaction:
            position, changes, history = table.position, self._after(table.position, limit), table.history
            if not changes:
                return Published(0, False)
            await transaction.lock([POSITION])
            now = table.clock.time()
            is_taken = table.taken_until != self._lease and now <= table.taken_until <= now + publishing.LEASE_S
            if table.position != position or is_taken:
                return Published(0, True, taken=True)
            until = now + publishing.LEASE_S
            transaction.durable = False  # if a crash loses this, the changes are published again
            transaction.will(lambda: setattr(table, "taken_until", until))
        self._lease = until
        await send(FeedChanges(changes=tuple(changes), history=history))
        async with self.session.transaction() as transaction:
            await transaction.lock([POSITION])
            transaction.durable = False
            transaction.will(lambda: table.mark_published(changes[-1].sequence, until))
        self._lease = None
        return Published(len(changes), len(changes) >= limit)

    async def trim(self, *, keep_changes: int, keep_fences_s: float, keep_sources_s: float, limit: int) -> bool:
        """Purge rows that are not needed any more."""
        table = self.table
        async with self.session.transaction() as transaction:
            until = min(table.head - keep_changes, table.position)
            before = table.clock.time() - keep_fences_s
            old = [uuid for uuid, kept in table.consumers.items() if kept.is_over(before)][:limit]
            sources = table.silent(table.clock.time() - keep_sources_s)[:limit]
            changes = [change.sequence for change in table.changes if change.sequence <= until][:limit]
            until = changes[-1] if changes else 0
            await transaction.lock([("consumer", uuid) for uuid in sorted(old)])
            # A consumer that holds nothing for a while (on its way between cells) is a member again after a revert.
            gone = [
                (key, uuid) for key, mates in table.members.items() for uuid in mates if uuid not in table.consumers
            ]
            transaction.will(lambda: table.purge(until, before, old, sources))
            transaction.will(lambda: _purge_members(table, gone[:limit]))
        return max(len(old), len(sources), len(changes), len(gone)) >= limit

    def _after(self, after: int, limit: int) -> list[Change]:
        start = bisect.bisect_right(self.table.changes, after, key=lambda change: change.sequence)
        return self.table.changes[start : start + limit]


def _purge_members(table: MemoryBookTable, gone: Sequence[tuple[GroupKey, str]]) -> None:
    for key, uuid in gone:
        if uuid not in table.consumers:
            table.members[key].pop(uuid, None)


def _keys(updates: Sequence[InventoryUpdate]) -> list[Key]:
    return list(dict.fromkeys((update.root_uuid, update.source) for update in updates))
