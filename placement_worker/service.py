"""Placement: every write, and the reads that replicas follow. Each write is one transaction over the operations
of `store.port`: lock rows, read them, decide (`domain/`), and write the result with its numbered changes.

The functions with a transaction as their first argument are the writes inside of a transaction that the caller has
opened; `PlacementService` opens one for each.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from bus.clock import Clock, SystemClock
from bus.contracts.base import DatabaseMark, Refusal
from bus.contracts.feed import ChangesPage, FeedChanges, FeedHead, SnapshotPage
from bus.contracts.placement import (
    ClaimOption,
    ClaimOutcome,
    ClaimResult,
    InventoryResult,
    InventoryUpdate,
    ProviderState,
)
from bus.persistence.marks import HeardMarks
from bus.yielding import yield_for
from placement_worker.domain import allocations, trees
from placement_worker.domain.allocation_migration import migrated, migrating_classes, old_and_new
from placement_worker.domain.allocations import AllocationOutcome, AllocationWrite, Reshape, reshape
from placement_worker.domain.claim_group import NOBODY, ClaimGroup, numbered, refuse_stale
from placement_worker.domain.claim_ledger import ClaimReply, Decision
from placement_worker.domain.claims import ClaimItem, decide
from placement_worker.domain.claims import changes_of as changes_of_usage
from placement_worker.domain.refusal import WriteRefusal, caused
from placement_worker.domain.report_group import (
    ReportGroup,
    is_retired,
    names_of_reports,
    split_by_root,
    trees_of_reports,
)
from placement_worker.domain.reports import CONSUMERS_BUSY, ReportRefusal, changes_of, plan
from placement_worker.domain.trees import TreeOutcome, TreeWrite
from placement_worker.domain.values import ABOVE_CELLS, ConsumerState, Provider, is_closed, state_of
from placement_worker.store import port
from placement_worker.store.names import StaleNames

Written = TypeVar("Written")

NOTHING_DECIDED = Decision([], {}, {}, {})
NEW_HOLDER = ConsumerState(0, 0, "", "", "")
STALE_NAMES = 2  # times that a write is repeated for names that other processes have removed or added

# A page of the snapshot ends before its reply exceeds the size of a bus message. The sizes are generous estimates of
# JSON bytes, not measurements.
MAX_PAGE_BYTES = 8 * 2**20
BYTES_A_PROVIDER = 600
BYTES_AN_INVENTORY = 400
BYTES_A_NAME = 300


# A consumer has claimed allocations that the report moves, after the holders were locked and before the providers were.
# To lock it now could deadlock with a transaction that has locked it and waits for the providers.
BUSY = ReportRefusal(CONSUMERS_BUSY, "a consumer has claimed what is to be moved")


# How long a process that has taken changes holds the position, by the database's clock. Much longer than a broker takes
# to confirm. Replicas that miss the changes of a dead publisher request them meanwhile.
LEASE_S = 2.0


class Published(Struct, frozen=True):
    """The result of one turn of publishing. count: the changes that were published. more: further changes may be
    unpublished. taken: another process is publishing.
    """

    count: int
    more: bool
    taken: bool = False


NO_DATABASE_MARK = DatabaseMark()


class PlacementService:
    """Placement over its rows. Every write commits in one transaction together with its numbered changes.

    reads: the reads that no decision follows. names: the class and trait names that this process has cached.
    """

    def __init__(self, rows: port.PlacementRows, clock: Clock | None = None) -> None:
        self.rows = rows
        self.names, self.reads = rows.names, rows.reads
        self.head, self.trim, self.close = rows.head, rows.trim, rows.close
        self._lease: Any = None  # of the last turn of publishing, until the turn has succeeded
        self._seen: FeedHead | None = None  # the last head that `newest` has looked at
        self._marks = HeardMarks(SystemClock() if clock is None else clock)

    async def open(self) -> None:
        """Connect and migrate, and insert the standard names. Waits while the database is unavailable."""
        await self.rows.open()
        await self.names.open()
        await self.newest()

    # --- claims and reports

    async def apply(
        self, items: Sequence[ClaimItem], *, bus: str = ABOVE_CELLS, marks: Sequence[DatabaseMark] = ()
    ) -> list[ClaimReply | Refusal]:
        """Apply claims, releases, reverts and swaps as one group, in order, each with its own outcome. Raises
        Transient.

        bus: the bus on which they arrived. For items of a cell's bus, providers of another cell are
        `provider_removed`, and a consumer that holds them is `consumer_conflict`. marks: of the cell's database, when
        each was decided; one of a lower incarnation than the highest is refused.
        """
        group, mark = ClaimGroup(items, [one.database_incarnation for one in marks]), self._marks.hear(bus, marks)
        await self._know(group.classes)
        if bus == ABOVE_CELLS and self.names.class_ids.keys() >= group.classes and (plain := group.plain):
            taken = await self._take_new(group, plain)
            if taken is not None:
                return taken
        try:
            replies = await self._write(partial(claim, group=group, bus=bus, mark=mark))
        except port.LimitExceeded:
            replies = await self._write(partial(claim, group=group, bus=bus, mark=mark, alone=True))
        self._marks.note_recorded(bus, mark, group.highest)
        return replies

    async def _take_new(self, group: ClaimGroup, plain: Mapping[str, ClaimOption]) -> list[ClaimReply | Refusal] | None:
        """Take plain claims in one round trip: three more are 3 % of a boot alone. None: the group is to be decided."""
        consumers = {uuid: replace(group.consumers[uuid], allocations=one.allocations) for uuid, one in plain.items()}
        spec_generations = {
            provider: one.spec_generations.get(provider) for one in plain.values() for provider in one.allocations
        }
        taken = await self.rows.take_new(consumers, spec_generations, group.limits)
        if taken is None:
            return None
        sequence, generations = taken[0], dict(zip(spec_generations, taken[1], strict=True))
        return [
            ClaimResult(
                outcome=ClaimOutcome.CLAIMED,
                option=0,
                outcomes=(ClaimOutcome.CLAIMED,),
                consumer_generation=1,
                generations={provider: generations[provider] for provider in one.allocations},
                sequence=sequence,
            )
            for one in plain.values()
        ]

    async def apply_reports(
        self, updates: Sequence[InventoryUpdate], *, bus: str = ABOVE_CELLS
    ) -> list[InventoryResult | ReportRefusal]:
        """Apply inventory updates in order, each with its own outcome: those of different roots in one transaction.
        Raises Transient.

        bus: the bus on which they arrived. A new root belongs to the cell of that bus, and reports about roots of other
        cells are refused.
        """
        results: list[InventoryResult | ReportRefusal] = []
        for part in split_by_root(updates):
            results += await self._write(partial(report, updates=part, bus=bus), partial(names_of_reports, part))
        return results

    async def release_roots(
        self, reporter: str, roots: Sequence[str], *, bus: str, mark: DatabaseMark = NO_DATABASE_MARK
    ) -> Refusal | None:
        """Release the roots of a reporter that belong to the cell of `bus`: another compute service may take them
        over. mark: of the cell's database, when that was decided; one of a lower incarnation is refused.
        """
        async with self.rows.transaction() as transaction:
            if (highest := await transaction.raise_mark(bus, mark)) > mark.database_incarnation:
                return refuse_stale(highest)
            await transaction.lock_reporters(())
            await transaction.release_reporters(reporter, roots, bus)
        return None

    async def remove_retired_trees(self, limit: int, *, keep_given_s: float) -> list[str]:
        """Remove retired trees that are no longer used, at most `limit`; what others gave to one is kept so long.
        Returns their roots.

        Their reporters may have ended for good. A reporter that still reports removes its retired trees with the next
        report.
        """
        return await self._write(lambda transaction: remove_retired_trees(transaction, limit, keep_given_s))

    # --- writes of the REST API

    async def write_trees(self, writes: Sequence[TreeWrite]) -> list[TreeOutcome]:
        """Apply a group of writes of providers, in order, each with its own outcome. Raises Unstorable."""
        await self._know(trees.classes_of_trees(writes), trees.traits_of_trees(writes))
        return await self._write(lambda transaction: write_trees(transaction, writes))

    async def write_allocations(self, items: Sequence[AllocationWrite]) -> list[AllocationOutcome]:
        """Apply a group of writes of allocations, in order, each with its own outcome. Raises Unstorable."""
        await self._know(allocations.classes_of_allocations(items))
        return await self._write(lambda transaction: write_allocations(transaction, items))

    async def reshape(self, item: Reshape) -> WriteRefusal | None:
        """Apply one reshape. Returns the refusal, None when it was applied."""
        await self._know(name for _, inventories in item.inventories.values() for name in inventories)
        return await self._write(lambda transaction: apply_reshape(transaction, item))

    async def _write(
        self,
        apply: Callable[[port.PlacementTransaction], Awaitable[Written]],
        named: Callable[[], tuple[set[str], set[str]]] = lambda: (set(), set()),
    ) -> Written:
        """Run one transaction. When it fails because of stale names, refresh them and run it again: another process
        may have created some, and again removed some.

        named: the (classes, traits) to create then, where they are missing.
        """
        for _ in range(STALE_NAMES):
            try:
                async with self.rows.transaction() as transaction:
                    return await apply(transaction)
            except StaleNames:
                await self.names.refresh()
                await self.names.ensure(*named())
        async with self.rows.transaction() as transaction:
            return await apply(transaction)

    # --- names

    async def _know(self, classes: Iterable[str], traits: Iterable[str] = ()) -> None:
        """Refresh the names when the writes name one that is not cached: another process may have created it."""
        if not (self.names.class_ids.keys() >= set(classes) and self.names.trait_ids.keys() >= set(traits)):
            await self.names.refresh()

    async def unknown_classes(self, named: Iterable[str]) -> list[str]:
        """Return those of these names that are not resource classes of placement, in order."""
        wanted = list(dict.fromkeys(named))
        await self.names.refresh_if_old()
        await self._know(wanted)
        return [name for name in wanted if name not in self.names.class_ids]

    async def unknown_traits(self, named: Iterable[str]) -> list[str]:
        """Return those of these names that are not traits of placement, in order."""
        wanted = list(dict.fromkeys(named))
        await self._know((), wanted)
        return [name for name in wanted if name not in self.names.trait_ids]

    async def create_name(self, kind: port.NameKind, name: str) -> bool:
        """Create a class or trait. Returns False when it exists."""
        classes, traits = ((name,), ()) if kind is port.NameKind.CLASS else ((), (name,))
        async with self.rows.transaction() as transaction:
            created = await transaction.add_names(classes, traits)
        if created:
            await self.names.refresh()
        return bool(created)

    async def delete_name(self, kind: port.NameKind, name: str) -> bool:
        """Remove a class or trait. Returns False when it does not exist. Raises NameInUse."""
        async with self.rows.transaction() as transaction:
            deleted = await transaction.delete_name(kind, name)
        await self.names.refresh()
        return deleted

    async def rename_class(self, old: str, new: str) -> bool | None:
        """Give a class another name (below 1.7), and append a change for every provider that has it. Returns False when
        the class does not exist, None when the name is taken.
        """
        try:
            async with self.rows.transaction() as transaction:
                await transaction.lock_reporters(())
                after = await transaction.rename_class(old, new)
                await transaction.append(changes_of({}, after or {}))
        except port.NameExists:
            return None
        await self.names.refresh()
        return after is not None

    # --- the feed

    async def changes(self, after: int, limit: int, incarnation: str = "") -> ChangesPage:
        """Return the committed changes after a number, in order. incarnation: the incarnation of the number; when
        placement has another one, the page is `too_old`.
        """
        async with self.rows.snapshot() as view:
            newest = await view.head()
            oldest = await view.oldest()
            too_old = after < newest.sequence if oldest is None else after < oldest - 1
            if too_old or incarnation not in ("", newest.incarnation):
                return ChangesPage(head=newest.sequence, too_old=True, incarnation=newest.incarnation)
            rows = await view.changes(after, limit)
            return ChangesPage(rows=tuple(rows), head=newest.sequence, incarnation=newest.incarnation)

    async def snapshot(self, after: str | None, limit: int) -> SnapshotPage:
        """Return a page of whole providers in the order of their uuids, as of one number of the feed."""
        async with self.rows.snapshot() as view:
            head = await view.head()
            providers = await view.providers_after(after, limit + 1)
        states: list[ProviderState] = []
        size = 0
        for provider in providers:
            size += _bytes_of(provider)
            if len(states) == limit or (states and size > MAX_PAGE_BYTES):
                break
            states.append(state_of(provider))
        more = len(states) < len(providers)
        return SnapshotPage(sequence=head.sequence, providers=tuple(states), more=more, incarnation=head.incarnation)

    async def newest(self) -> port.NewestHead:
        """Return the newest head. The incarnation gets a new id when the database was restored or its standby promoted.

        A restore is recognised by state of the database that a backup does not contain, and by a head that is behind
        one that this process has read before.
        """
        newest = await self.rows.newest(self._seen)
        self._seen = newest.head
        return newest

    async def publish(self, send: Callable[[FeedChanges], Awaitable[None]], limit: int) -> Published:
        """Pass the next unpublished changes to `send`, and record them as published when it returns.

        The broker has confirmed every change up to the position at least once. The position only moves forward, and
        only over changes that the moving process has just sent. This holds with any number of publishers, and also if a
        crash of the database loses the latest position: visible changes are on disk, and their numbers are never given
        again. So changes may be published twice, but none is skipped.

        A lease keeps two processes from sending the same changes, which would only be a waste: for the others the
        result is `taken`. A process that dies or hangs blocks the others for LEASE_S. A process must not call this
        method concurrently.
        """
        taken = await self.rows.take_changes(limit, LEASE_S, self._lease)
        if taken is None:
            return Published(0, False)
        if taken.lease is None:
            return Published(0, True, taken=True)
        self._lease = taken.lease
        last = taken.rows[-1].last
        # No connection is held while the broker confirms.
        await send(FeedChanges(rows=tuple(taken.rows), incarnation=taken.incarnation))
        await self.rows.advance_position(last, taken.lease)
        self._lease = None
        return Published(last - taken.rows[0].first + 1, taken.more)


def _bytes_of(provider: Provider) -> int:
    names = len(provider.traits) + len(provider.aggregates)
    return BYTES_A_PROVIDER + BYTES_AN_INVENTORY * len(provider.inventories) + BYTES_A_NAME * names


async def claim(
    transaction: port.PlacementTransaction,
    group: ClaimGroup,
    bus: str,
    *,
    mark: DatabaseMark | None = None,
    alone: bool = False,
) -> list[ClaimReply | Refusal]:
    """Decide and write one group of claims from one bus.

    mark: of the cell's database, to be recorded with it. alone: lock projects with limits exclusively instead of
    shared. Raises LimitExceeded when concurrent claims have used up a limit since the decision; with `alone` there
    are none.
    """
    limited, keys = group.projects, group.keys
    if mark is not None:
        await transaction.raise_mark(bus, mark)
    if keys:
        await transaction.lock_groups(keys)
    cell = None if bus == ABOVE_CELLS else bus
    locked = await transaction.lock_claims(port.ClaimsToLock(group.consumers, group.providers, limited, alone, cell))
    if bus == ABOVE_CELLS and group.enrolled:  # a cell does not decide about others' instances
        await transaction.enroll(group.enrolled)
    members = await transaction.members(group.members(locked.found)) if keys else {}
    decision = decide(
        group.items_of_incarnation(locked.incarnation),
        locked.found,
        locked.providers,
        transaction.names.class_ids,
        frozenset(uuid for uuid, cell in locked.cells.items() if is_closed(cell, bus)),
        groups={key: members.get(key, {}) for key in keys},
        projects={project: locked.usage.get(project, {}) for project in limited},
    )
    if decision.joined:
        await transaction.join(decision.joined)  # before `write_claims` locks the feed's counter
    most: port.Limits = {} if alone else group.limits
    sequence = await transaction.write_claims(port.ClaimWrites(decision, locked, changes_of_usage(decision), most))
    # A cell learns nothing of others' consumers.
    lost = decision.lost if bus == ABOVE_CELLS else {}
    holders = await transaction.newest_consumers(lost) if lost else NOBODY
    return group.with_stale(numbered(decision.replies, sequence, bus, holders))


async def report(
    transaction: port.PlacementTransaction, updates: Sequence[InventoryUpdate], bus: str
) -> list[InventoryResult | ReportRefusal]:
    """Decide and write a group of updates that came on one bus."""
    reporters, cells = await transaction.lock_reporters({update.root_uuid for update in updates})
    group = ReportGroup(updates, reporters, cells=cells, bus=bus)
    group.refuse_invalid(transaction.names.trait_ids)
    group.refuse_owned()
    group.refuse_stale()
    return group.answers(await _apply_reports(transaction, group))


async def remove_retired_trees(transaction: port.PlacementTransaction, limit: int, keep_given_s: float) -> list[str]:
    """Remove retired trees, as if their reporters had reported the removal again. Returns the roots.

    A reporter that has ended for good will not report again, so no report would remove them.
    """
    await transaction.lock_reporters(())
    reporters = await transaction.retired_reporters(limit, keep_given_s)
    if not reporters:
        return []
    _, locked = await transaction.lock_trees(trees.TreesToLock(whole={root for root, _ in reporters}))
    by_root: dict[str, list[Provider]] = {}
    for provider in locked.values():
        by_root.setdefault(provider.root, []).append(provider)
    # A claim or a write of the REST API may have changed the tree before it was locked.
    empty = [
        InventoryUpdate(reporter=reporter, version=known.version, root_uuid=root)
        for (root, reporter), known in reporters.items()
        if is_retired(by_root.get(root, ()), long_ago=True)
    ]
    await _apply_reports(transaction, ReportGroup(empty, reporters, cells={}, bus=ABOVE_CELLS), final=True)
    return list(dict.fromkeys(update.root_uuid for update in empty))


async def _apply_reports(transaction: port.PlacementTransaction, group: ReportGroup, *, final: bool = False) -> int:
    """Plan the fresh updates and write the result. final: see `plan`."""
    fresh = group.updates_to_plan()
    if group.repeated_versions:
        await transaction.repeat_reports(group.repeated_versions)
    if not fresh:
        return 0
    leaving = {number: pairs for number in fresh if (pairs := migrating_classes(group.updates[number].providers))}
    locked = port.Locked({}, {})
    every = [pair for pairs in leaving.values() for pair in pairs]
    if leaving:  # consumers are locked before providers, as everywhere
        holders = await transaction.consumers_of(every)
        locked = await transaction.lock_claims(port.ClaimsToLock(dict.fromkeys(holders, NEW_HOLDER), None))
    spec_generation, before = await transaction.lock_trees(
        trees_of_reports([group.updates[number] for number in fresh])
    )
    if leaving and not locked.found.keys() >= set(await transaction.consumers_of(every)):
        for number, pairs in leaving.items():
            if not locked.found.keys() >= set(await transaction.consumers_of(pairs)):
                group.results[number] = BUSY
    fresh = [number for number in fresh if number not in group.results]
    updates = [group.updates[number] for number in fresh]
    allocations = {uuid: consumer.allocations for uuid, consumer in locked.found.items() if consumer.allocations}
    earlier = [group.earlier(number) for number in fresh]
    outcome = plan(updates, earlier, before, allocations, group.bus, spec_generation=spec_generation, final=final)
    group.record_results(fresh, outcome.results)
    now = before
    if outcome.moved or locked.inserted:
        now = old_and_new(before, outcome.after)
        await transaction.write_trees(port.TreeWrites(before, now))
        decision = migrated(before, outcome.after, outcome.moved, locked.found)
        await transaction.write_claims(port.ClaimWrites(decision, locked))
    changes = changes_of(before, outcome.after)
    return await transaction.write_trees(port.TreeWrites(now, outcome.after, changes, group.written()))


async def write_trees(transaction: port.PlacementTransaction, writes: Sequence[TreeWrite]) -> list[TreeOutcome]:
    """Decide and write a group of writes of providers."""
    reported: set[str] = set()
    if adopted := trees.reparented_providers(writes):
        reporters, _ = await transaction.lock_reporters(adopted)
        reported = {root for (root, _), last in reporters.items() if root in last.providers}
    spec_generation, before = await transaction.lock_trees(trees.trees_to_lock(writes))
    draft = trees.ProviderTrees(
        before,
        transaction.names.class_ids,
        transaction.names.trait_ids,
        spec_generation=spec_generation,
        reported=reported,
    )
    outcomes = [draft.apply(write) for write in writes]
    done = (write for write, outcome in zip(writes, outcomes, strict=True) if isinstance(outcome, Provider))
    changes = caused(changes_of(before, draft.providers), ((write.cause, (write.uuid,)) for write in done))
    if changes:
        disowned = trees.deleted_trees(writes, outcomes)
        await transaction.write_trees(port.TreeWrites(before, draft.providers, changes, disowned=disowned))
    return outcomes


async def write_allocations(
    transaction: port.PlacementTransaction, items: Sequence[AllocationWrite]
) -> list[AllocationOutcome]:
    """Decide and write a group of writes of allocations."""
    expected, wanted = allocations.expected_rows(items)
    locked = await transaction.lock_claims(port.ClaimsToLock(expected, wanted))
    size = sum(map(allocations.entries_of_allocations, items)) + len(locked.found) + len(locked.providers)
    await yield_for(size)
    outcomes, decision = allocations.decide(items, locked.found, locked.providers, transaction.names.class_ids)
    await yield_for(size)
    changes = caused(changes_of_usage(decision), allocations.touched(items, outcomes, locked.found))
    await transaction.write_claims(port.ClaimWrites(decision, locked, changes))
    return outcomes


async def apply_reshape(transaction: port.PlacementTransaction, item: Reshape) -> WriteRefusal | None:
    """Decide and write one reshape. Reshapes are not grouped, because they are rare and large."""
    await transaction.lock_reporters(())
    expected: dict[str, ConsumerState] = {}
    wanted: set[str] = set(item.inventories)
    allocations.expect(item.writes, expected, wanted)
    locked = await transaction.lock_claims(port.ClaimsToLock(expected, None))
    spec_generation, before = await transaction.lock_trees(
        trees.TreesToLock(uuids=wanted | allocations.providers_held(locked.found))
    )
    await yield_for(len(before) + len(expected))
    outcome = reshape(item, locked.found, before, transaction.names.class_ids, spec_generation=spec_generation)
    if isinstance(outcome, WriteRefusal):
        await transaction.write_claims(port.ClaimWrites(NOTHING_DECIDED, locked))
        return outcome
    old = {uuid: before[uuid] for uuid in outcome.interim}
    usage = [each for each in changes_of_usage(outcome.decision) if each.provider not in outcome.final]
    changes = caused(changes_of(old, outcome.final) + usage, ((item.cause, ()),))
    await transaction.write_trees(port.TreeWrites(old, outcome.interim))
    await transaction.write_claims(port.ClaimWrites(outcome.decision, locked))
    await transaction.write_trees(port.TreeWrites(outcome.interim, outcome.final, changes))
    return None
