"""The rows of placement in memory: for simulation and tests. They pass the same suite as PostgreSQL (tests/contract).

This module has only rows, locks and commits; `placement_worker.service` decides. The order of locks is that of
PostgreSQL.
"""

from __future__ import annotations

import bisect
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from msgspec.structs import replace

from bus.contracts.base import DatabaseMark
from bus.contracts.feed import Change, FeedHead, FeedRow, feed_rows
from bus.contracts.placement import ConflictingConsumer
from bus.faults import BrokenInvariant
from bus.persistence.memory_database import MemoryDatabaseTransaction, MemorySession
from placement_worker.domain.claim_group import MembersToLock
from placement_worker.domain.claim_ledger import Decision, Lacking
from placement_worker.domain.report_group import RELEASED, WITHDRAWN, Key, LastReports, is_retired
from placement_worker.domain.server_groups import usage_changes
from placement_worker.domain.trees import TreesToLock
from placement_worker.domain.values import ClaimedProvider, ConsumerState, GroupKey, Members, Provider, claimed_provider
from placement_worker.store import port
from placement_worker.store.memory_reads import MemoryReads, check_storable
from placement_worker.store.memory_table import TREES, MemoryPlacementTable, provider_key, renamed_key
from placement_worker.store.names import NameTable, StaleNames

HEAD, POSITION = ("feed head",), ("feed position",)


class MemoryPlacementRows:
    """`PlacementRows` over a MemoryPlacementTable: one process's view of it."""

    def __init__(self, session: MemorySession) -> None:
        assert isinstance(session.database, MemoryPlacementTable)
        self.table = session.database
        self.session = session
        self.database_id = session.database.database_id
        self.reads = MemoryReads(session, self.table)
        self.names = NameTable(self.transaction, self.table.clock)
        self.ready = False

    async def open(self) -> None:
        """Open placement. There is nothing to migrate."""
        self.ready = True

    async def close(self) -> None:
        """Close the connections; the rows stay."""
        self.ready = False
        self.session.disconnect()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[MemoryPlacementTransaction]:
        """A transaction that commits at the end and rolls back on an exception."""
        async with self.session.transaction() as transaction:
            yield MemoryPlacementTransaction(self.table, transaction, self.names)

    async def take_new(
        self, consumers: Mapping[str, ConsumerState], spec_generations: Mapping[str, int | None], most: port.Limits
    ) -> None:
        """Nothing: here no round trip is spared."""

    snapshot = transaction  # reads without an await between them are of one moment

    async def head(self) -> FeedHead:
        """The number of the newest committed change, and the id of its incarnation."""
        async with self.session.transaction():
            return self.table.newest

    async def newest(self, seen: FeedHead | None) -> port.NewestHead:
        """Return the head. The incarnation gets a new id when the table was replaced, or is behind `seen`."""
        async with self.session.transaction() as transaction:
            await transaction.lock([HEAD])
            newest = self.table.newest
            is_behind = seen is not None and seen.incarnation == newest.incarnation and newest.sequence < seen.sequence
            is_another = is_behind or self.table.origin != self.table.place
            if is_another:
                transaction.will(self.table.renew_incarnation)
        newest = self.table.newest
        return port.NewestHead(newest, is_another, newest.sequence > self.table.position)

    async def take_changes(self, limit: int, lease_s: float, lease: Any) -> port.LeasedChanges | None:
        """Take the next unpublished changes."""
        table = self.table
        async with self.session.transaction() as transaction:
            position, changes = table.position, changes_after(table, table.position, limit)
            if not changes:
                return None
            await transaction.lock([POSITION])
            now = table.clock.time()
            is_taken = table.taken_until != lease and now <= table.taken_until <= now + lease_s
            if table.position != position or is_taken:
                return port.LeasedChanges((), True, table.incarnation, None)
            until = now + lease_s
            transaction.durable = False  # if a crash loses this, the changes are published again
            transaction.will(lambda: setattr(table, "taken_until", until))
            return port.LeasedChanges(feed_rows(changes), len(changes) >= limit, table.incarnation, until)

    async def advance_position(self, number: int, lease: Any) -> None:
        """Record that the changes up to this number are published, and end the lease."""
        async with self.session.transaction() as transaction:
            await transaction.lock([POSITION])
            transaction.durable = False
            transaction.will(lambda: self.table.mark_published(number, lease))

    async def trim(
        self, *, keep_changes: int, keep_ended_attempts_s: float, keep_reporters_s: float, limit: int
    ) -> bool:
        """Delete rows that are not needed any more."""
        table = self.table
        async with self.session.transaction() as transaction:
            await transaction.lock([TREES])  # a report that a writer has read is not trimmed under it
            until = min(table.head - keep_changes, table.position)
            before = table.clock.time() - keep_ended_attempts_s
            old = [uuid for uuid, kept in table.consumers.items() if kept.is_over(before)][:limit]
            reporters = table.silent(table.clock.time() - keep_reporters_s)[:limit]
            changes = [change.sequence for change in table.changes if change.sequence <= until][:limit]
            until = changes[-1] if changes else 0
            await transaction.lock([("consumer", uuid) for uuid in sorted(old)])
            # A consumer that holds nothing for a while (on its way between cells) is a member again after a revert.
            gone = [
                (key, uuid) for key, mates in table.members.items() for uuid in mates if uuid not in table.consumers
            ]
            transaction.will(lambda: table.purge(until, before, old, reporters, gone[:limit]))
        return max(len(old), len(reporters), len(changes), len(gone)) >= limit


class MemoryPlacementTransaction:
    """`PlacementTransaction` over the table. Rows that it writes are in the table from the commit on."""

    def __init__(self, table: MemoryPlacementTable, transaction: MemoryDatabaseTransaction, names: NameTable) -> None:
        self._table = table
        self._rows = transaction
        self.names = names
        self._changed: dict[str, ConsumerState | None] = {}
        self._written: dict[str, Provider] = {}
        self._enrolled: dict[GroupKey, list[str]] = {}
        self._mark = DatabaseMark()

    # --- claims

    async def raise_mark(self, cell: str, mark: DatabaseMark) -> int:
        """Record what is above the mark on record. Returns the highest incarnation."""
        await self._rows.statement()
        await self._rows.lock([("cell", cell)])
        self._mark = mark.joined(self._table.marks.get(cell, DatabaseMark()))
        self._rows.will(partial(self._table.marks.update, {cell: self._mark}))
        return self._mark.database_incarnation

    async def lock_groups(self, keys: Sequence[GroupKey]) -> None:
        """Lock server groups."""
        await self._rows.statement()
        await self._rows.lock([("group", *key) for key in sorted(keys)])

    async def lock_claims(self, wanted: port.ClaimsToLock) -> port.Locked:
        """Lock and read consumers, then providers. A new consumer has no row before the commit, but is locked."""
        table, expected = self._table, wanted.expected
        for each in expected.values():
            check_storable(each.project_id, each.user_id, each.consumer_type)
        await self._rows.statement()
        uuids = sorted(expected)
        await self._rows.lock([("consumer", uuid) for uuid in uuids])
        found = {uuid: table.consumers[uuid].consumer for uuid in uuids if uuid in table.consumers}
        providers: dict[str, ClaimedProvider] = {}
        if wanted.providers is not None:
            held = {provider for consumer in found.values() for provider in consumer.allocations}
            locked = await self._lock_providers({*wanted.providers, *held})
            providers = {uuid: claimed_provider(provider) for uuid, provider in locked.items()}
        if wanted.alone:
            await self._lock_usage(wanted.limited)
        return port.Locked(
            inserted={uuid: new for uuid, new in expected.items() if uuid not in found},
            found=found,
            providers=providers,
            cells={uuid: cell for uuid in providers if (cell := table.cell(uuid)) is not None},
            usage={project: table.usage_of(project) for project in wanted.limited},
            incarnation=self._mark.joined(table.marks.get(wanted.cell or "", DatabaseMark())).database_incarnation,
        )

    async def _lock_providers(self, wanted: Iterable[str]) -> dict[str, Provider]:
        """Lock these providers in the order of their numbers. Returns those that exist."""
        await self._rows.statement()
        found = self._table.by_number(set(wanted))
        await self._rows.lock([provider_key(uuid) for uuid in found])
        await self._rows.statement()
        return {uuid: self._table.providers[uuid] for uuid in found if uuid in self._table.providers}

    async def _lock_usage(self, projects: Iterable[str]) -> None:
        """Lock the usage of projects, which every transaction does that changes it."""
        await self._rows.lock([("usage", project) for project in sorted(set(projects))])

    async def members(self, wanted: MembersToLock) -> Mapping[GroupKey, Members]:
        """The members that a decision needs."""
        await self._rows.statement()
        table = self._table
        found: dict[GroupKey, dict[str, tuple[str, ...]]] = {}
        hosts, moved = set(wanted.hosts), set(wanted.moved)
        for key in sorted({(project, group) for project, group, *_ in (*hosts, *moved, *wanted.together)}):
            alive = table.alive(key, self._enrolled.get(key, ()))
            named = {
                uuid: alive.get(uuid, ()) for uuid in (*table.members.get(key, ()), *alive) if (*key, uuid) in moved
            }
            there = {
                uuid: its
                for uuid, its in alive.items()
                if any((*key, table.providers[one].root) in hosts for one in table.consumers[uuid].consumer.allocations)
            }
            some = dict(list(alive.items())[: wanted.most]) if key in wanted.together else {}
            found[key] = named | there | some
        return found

    async def enroll(self, enrolled: Mapping[GroupKey, Collection[str]]) -> None:
        """Insert the members that hold something and are missing."""
        await self._rows.statement()
        table = self._table
        for key, consumers in enrolled.items():
            holding = [uuid for uuid in sorted(consumers) if uuid in table.consumers]
            self._enrolled[key] = [uuid for uuid in holding if table.consumers[uuid].consumer.allocations]
        self._rows.will(partial(table.add_members, self._enrolled))

    async def newest_consumers(
        self, lost: Mapping[int, tuple[str, Lacking]]
    ) -> Mapping[int, tuple[ConflictingConsumer, ...]]:
        """The newest consumers that hold what claims lacked."""
        return {
            place: self._table.newest_consumers(self._changed, lacking, consumer)
            for place, (consumer, lacking) in lost.items()
        }

    async def join(self, joined: Mapping[GroupKey, Collection[str]]) -> None:
        """Insert the new members of server groups."""
        self._rows.will(partial(self._table.add_members, joined))

    async def write_claims(self, writes: port.ClaimWrites) -> int:
        """Write a decision about the locked rows. Raises LimitExceeded."""
        decision, most = writes.decision, writes.most
        if not decision.consumers and not decision.generations and not writes.changes:
            return 0
        table = self._table
        await self._rows.statement()
        self._guard_capacity(decision)
        more = usage_changes(writes.locked.found, decision.consumers)
        await self._lock_usage(project for project, _ in more)
        for key, amount in more.items():
            if key in most and amount > 0 and table.usage_of(key[0]).get(key[1], 0) + amount > most[key]:
                raise port.LimitExceeded
        self._changed.update(decision.consumers)
        self._rows.will(lambda: table.keep(decision.consumers))
        self._rows.will(lambda: table.put_usage(decision.generations, decision.used))
        return await self.append(writes.changes)

    def _guard_capacity(self, decision: Decision) -> None:
        """The database's own check: usage neither rises above the capacity nor falls below zero."""
        for uuid, used in decision.used.items():
            known = self._table.providers.get(uuid)
            inventories = (self._written.get(uuid) or self._table.providers[uuid]).inventories
            for name, amount in used.items():
                inventory = inventories.get(name)
                before = 0 if known is None else known.used.get(name, 0)
                may_rise = (uuid, name) in decision.above
                if (
                    inventory is None
                    or amount < 0
                    or (amount > inventory.capacity and amount > before and not may_rise)
                ):
                    raise BrokenInvariant(f"usage past capacity, or an inventory is gone: {uuid} {name} {amount}")

    # --- trees

    async def lock_reporters(self, roots: Collection[str]) -> tuple[LastReports, Mapping[str, str | None]]:
        """Become the only writer of trees, and read the last reports of the reporters of these roots."""
        await self._rows.statement()
        await self._rows.lock([TREES])
        reporters = {key: reporter for key, reporter in self._table.reporters.items() if key[0] in roots}
        return reporters, {root: self._table.cell(root) for root, _ in reporters}

    async def retired_reporters(self, limit: int, keep_given_s: float) -> LastReports:
        """The reporters that have removed a tree which is not in use any more."""
        table = self._table
        await self._rows.statement()
        before = table.clock.time() - keep_given_s
        out = [key for key in sorted(table.reporters) if table.is_withdrawn(key)]
        tree_of = {key: [one for one in table.providers.values() if one.root == key[0]] for key in out}
        keys = [key for key in out if is_retired(tree_of[key], long_ago=table.reported_at[key] < before)]
        return {key: table.reporters[key] for key in keys[:limit]}

    async def release_reporters(self, reporter: str, roots: Sequence[str], cell: str) -> None:
        """Record that another compute service may take over these roots of a reporter, those of the cell."""
        await self._rows.statement()
        table = self._table
        found = {(root, reporter): table.reporters.get((root, reporter)) for root in roots if table.cell(root) == cell}
        owned = {key: last for key, last in found.items() if last is not None and last.digest != WITHDRAWN}
        released = {key: replace(last, digest=RELEASED, complete=False) for key, last in owned.items()}
        self._rows.will(lambda: table.reporters.update(released))

    async def repeat_reports(self, versions: Mapping[Key, int]) -> None:
        """Record newer versions of the last reports of these reporters."""
        await self._rows.statement()
        reports = {key: replace(self._table.reporters[key], version=version) for key, version in versions.items()}
        self._rows.will(lambda: self._table.put_reporters(reports, ()))

    async def consumers_of(self, leaving: Sequence[port.Leaving]) -> list[str]:
        """The consumers that hold allocations of these classes of these providers."""
        await self._rows.statement()
        return self._table.consumers_of(leaving)

    async def lock_trees(self, wanted: TreesToLock) -> tuple[int, dict[str, Provider]]:
        """Become the only writer of trees, and lock and read providers."""
        table = self._table
        check_storable(*wanted.names)
        await self._rows.lock([TREES])
        named, whole = set(wanted.names), set(wanted.whole)
        roots = {p.root for p in table.providers.values() if p.uuid in whole or p.name in named}
        uuids = {p.uuid for p in table.providers.values() if p.root in roots}
        return table.next_spec_generation(), await self._lock_providers(uuids.union(wanted.uuids))

    async def write_trees(self, writes: port.TreeWrites) -> int:
        """Write the differences between `before` and `after`, and the last reports of reporters. Raises StaleNames."""
        table, before, after = self._table, writes.before, writes.after
        if before == after and not writes.last_reports and not writes.changes:
            return 0
        await self._rows.statement()
        for uuid, provider in after.items():
            if before.get(uuid) is not provider:
                # The database's foreign keys.
                if provider.inventories.keys() - table.classes.keys() or set(provider.traits) - table.traits.keys():
                    raise StaleNames(uuid)
                self._written[uuid] = provider
        self._rows.will(lambda: table.put_trees(before, after))
        self._rows.will(lambda: table.put_reporters(writes.last_reports, writes.disowned))
        return await self.append(writes.changes)

    async def append(self, changes: Sequence[Change]) -> int:
        """Number the changes, as the last step of the transaction."""
        if not changes:
            return 0
        await self._rows.statement()
        await self._rows.lock([HEAD])
        table = self._table
        numbered = [replace(change, sequence=table.head + at) for at, change in enumerate(changes, 1)]

        def write() -> None:
            table.changes += numbered
            table.head = numbered[-1].sequence

        self._rows.will(write)
        return numbered[-1].sequence

    # --- names

    async def read_names(self) -> tuple[port.Named, port.Named]:
        """The numbers of (all classes, all traits)."""
        await self._rows.statement()
        return dict(self._table.classes), dict(self._table.traits)

    async def add_names(self, classes: Sequence[str], traits: Sequence[str]) -> int:
        """Insert the names that are missing."""
        table, new = self._table, 0
        for kind, names in ((port.NameKind.CLASS, classes), (port.NameKind.TRAIT, traits)):
            wanted = [name for name in sorted(names) if name not in table.names(kind)]
            await self._rows.lock([("name", name) for name in wanted])
            missing = [name for name in wanted if name not in table.names(kind)]
            if missing:
                new += len(missing)
                self._rows.will(partial(table.add_names, kind, missing))
        return new

    async def delete_name(self, kind: port.NameKind, name: str) -> bool:
        """Remove a class or trait. Raises NameInUse."""
        table = self._table
        await self._rows.lock([TREES, ("name", name)])
        if name not in table.names(kind):
            return False
        if any(name in (p.inventories if kind is port.NameKind.CLASS else p.traits) for p in table.providers.values()):
            raise port.NameInUse(name)
        self._rows.will(lambda: table.remove_name(kind, name))
        return True

    async def rename_class(self, old: str, new: str) -> dict[str, Provider] | None:
        """Give a class another name. Returns the providers that have it. Raises NameExists."""
        table = self._table
        await self._rows.lock([("name", name) for name in sorted({old, new})])
        before = await self._lock_providers([p.uuid for p in table.providers.values() if old in p.inventories])
        if old not in table.classes:
            return None
        if new in table.classes:
            raise port.NameExists(new)
        after = {uuid: _renamed(provider, old, new) for uuid, provider in before.items()}
        self._rows.will(lambda: table.rename_class(old, new, after))
        return after

    # --- the feed

    async def head(self) -> FeedHead:
        """The number of the newest committed change, and the id of its incarnation."""
        return self._table.newest

    async def oldest(self) -> int | None:
        """The number of the oldest change that is kept."""
        return self._table.changes[0].sequence if self._table.changes else None

    async def changes(self, after: int, limit: int) -> tuple[FeedRow, ...]:
        """The rows of the changes after a number, in order."""
        return feed_rows(changes_after(self._table, after, limit))

    async def providers_after(self, after: str | None, limit: int) -> list[Provider]:
        """Whole providers in the order of their uuids."""
        uuids = sorted(uuid for uuid in self._table.providers if after is None or uuid > after)
        return [self._table.providers[uuid] for uuid in uuids[:limit]]


def changes_after(table: MemoryPlacementTable, after: int, limit: int) -> list[Change]:
    """The changes after a number, in order."""
    start = bisect.bisect_right(table.changes, after, key=lambda change: change.sequence)
    return table.changes[start : start + limit]


def _renamed(provider: Provider, old: str, new: str) -> Provider:
    inventories = renamed_key(provider.inventories, old, new)
    return replace(provider, inventories=inventories, used=renamed_key(provider.used, old, new))
