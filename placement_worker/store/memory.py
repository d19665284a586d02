"""The book in memory: for simulation and tests. It passes the same suite as PostgreSQL (tests/contract).

The decisions are the same pure functions; only rows, locks and commits are here. The order of locks is PostgreSQL's:
one writer of trees, consumers by uuid, providers by number, the feed's counter last.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial

import os_traits
from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.placement import (
    MAX_HOSTS_TOLD,
    Change,
    ChangesPage,
    Claim,
    InventoryResult,
    InventoryUpdate,
    Release,
    SnapshotPage,
    WherePage,
    WhereRequest,
)
from bus.faults import BrokenInvariant
from bus.service.memory_database import MemoryDatabase, Session, Transaction
from placement_worker.domain.claims import Decision, changes_of, decide
from placement_worker.domain.company import together
from placement_worker.domain.handover import taken
from placement_worker.domain.names import STANDARD_CLASSES, class_name, is_custom
from placement_worker.domain.reports import Plan, flaw, plan
from placement_worker.domain.reports import changes_of as changes_of_reports
from placement_worker.domain.shells import is_empty_shell
from placement_worker.domain.values import (
    ABOVE_CELLS,
    ClaimedProvider,
    Consumer,
    GroupKey,
    Provider,
    Room,
    is_closed,
    state_of,
)
from placement_worker.store import publishing
from placement_worker.store.claims import providers_of, reply
from placement_worker.store.group import TAKEN_OUT, Group, Key, Source
from placement_worker.store.handover import HoldersBusy, Leaving
from placement_worker.store.limits import projects_of
from placement_worker.store.members import keys_of
from placement_worker.store.port import ClaimItem, ClaimReply, Published, Refused

TREES, HEAD, POSITION = ("trees",), ("feed head",), ("feed position",)


class Kept(Struct):
    """A consumer's row; `released_at` when it is only a fence."""

    consumer: Consumer
    released_at: float | None


class MemoryBookTable(MemoryDatabase):
    """The committed book; it outlives the placement workers. `numbers` give providers their place in lock order."""

    ROWS = (*MemoryDatabase.ROWS, "position", "taken_until")  # all else is flushed by its commit

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self.providers: dict[str, Provider] = {}
        self.numbers: dict[str, int] = {}
        self.consumers: dict[str, Kept] = {}
        self.members: dict[GroupKey, dict[str, str]] = {}
        self.sources: dict[Key, Source] = {}
        self.heard: dict[Key, float] = {}  # when each source said its last
        self.classes: dict[str, int] = {name: number for number, name in enumerate(sorted(STANDARD_CLASSES))}
        self.traits: dict[str, None] = dict.fromkeys(sorted(os_traits.get_traits()))
        self.changes: list[Change] = []  # kept ones, in order
        self.head = 0
        self.position = 0
        self.taken_until = -math.inf  # by whoever publishes
        self._next_number = 0

    def number(self, uuid: str) -> int:
        """The number of a provider, given when it is first seen."""
        if uuid not in self.numbers:
            self._next_number += 1
            self.numbers[uuid] = self._next_number
        return self.numbers[uuid]

    def alive(self, key: GroupKey) -> dict[str, str]:
        """A server group's members that hold something."""
        return {
            uuid: host
            for uuid, host in self.members.get(key, {}).items()
            if uuid in self.consumers and self.consumers[uuid].consumer.holding
        }

    def held_by(self, project: str) -> dict[str, int]:
        """What a project's consumers hold together, and how many they are."""
        total: Counter[str] = Counter()
        for kept in self.consumers.values():
            if kept.consumer.project_id == project:
                total.update(together(kept.consumer.holding))
        return dict(total)

    def cell(self, uuid: str) -> str | None:
        """The cell of a provider: its root's."""
        provider = self.providers.get(uuid)
        return self.providers[provider.root].cell if provider is not None else None

    def by_number(self, uuids: Sequence[str]) -> list[str]:
        """Those that exist, in lock order."""
        return sorted((uuid for uuid in uuids if uuid in self.providers), key=self.numbers.__getitem__)


class MemoryBook:
    """`PlacementStore` over a MemoryBookTable: one process's view of it."""

    def __init__(self, session: Session) -> None:
        assert isinstance(session.database, MemoryBookTable)
        self._table = session.database
        self._session = session
        self._lease: float | None = None  # the end of the last turn of publishing, until it has ended well
        self.ready = False

    async def open(self) -> None:
        """Nothing to migrate."""
        self.ready = True

    async def close(self) -> None:
        """The connections go; the rows stay."""
        self.ready = False
        self._session.cut()

    # --- claims

    async def apply(self, items: Sequence[ClaimItem], *, bus: str = ABOVE_CELLS) -> list[ClaimReply]:
        """Claims, releases and swaps as one group, in order, each with its own outcome. Raises Transient."""
        if not items:
            return []
        table = self._table
        async with self._session.transaction() as transaction:
            await transaction.statement()
            await transaction.lock([("group", *key) for key in keys_of(items)])
            await transaction.lock([("project", project) for project in projects_of(items)])
            await transaction.lock([("consumer", uuid) for uuid in sorted(_consumers_of(items))])
            consumers = {
                uuid: table.consumers[uuid].consumer for uuid in _consumers_of(items) if uuid in table.consumers
            }
            providers = await self._lock_providers(transaction, sorted(providers_of(items, consumers)))
            foreign = frozenset(uuid for uuid in providers if is_closed(table.cell(uuid), bus))
            groups = {key: table.alive(key) for key in keys_of(items)}
            projects = {project: table.held_by(project) for project in projects_of(items)}
            decision = decide(items, consumers, providers, table.classes, foreign, groups=groups, projects=projects)
            await transaction.statement()
            self._write(transaction, decision, table.clock.time())
            sequence = await self._append(transaction, changes_of(decision))
        return [reply(item, verdict, sequence, bus) for item, verdict in zip(items, decision.verdicts, strict=True)]

    async def _lock_providers(self, transaction: Transaction, wanted: Sequence[str]) -> dict[str, ClaimedProvider]:
        await transaction.statement()
        await transaction.lock([("provider", uuid) for uuid in self._table.by_number(wanted)])
        await transaction.statement()
        return {uuid: _claimed(self._table.providers[uuid]) for uuid in self._table.by_number(wanted)}

    def _write(self, transaction: Transaction, decision: Decision, now: float) -> None:
        table = self._table
        for uuid, used in decision.used.items():
            for name, amount in used.items():
                stock = table.providers[uuid].stocks.get(name)
                before = table.providers[uuid].used.get(name, 0)
                # The database's own guard (invariant 1): usage may not rise past capacity, whatever was decided.
                if stock is None or (amount > stock.capacity and amount > before):
                    raise BrokenInvariant(f"usage past capacity, or an inventory is gone: {uuid} {name} {amount}")

        def write() -> None:
            for uuid, consumer in decision.consumers.items():
                if consumer is None:
                    table.consumers.pop(uuid, None)
                else:
                    table.consumers[uuid] = Kept(consumer, None if consumer.holding else now)
            for key, joined in decision.joined.items():
                table.members.setdefault(key, {}).update(joined)
            for uuid, generation in decision.generations.items():
                provider = table.providers[uuid]
                used = {**provider.used, **decision.used[uuid]}
                table.providers[uuid] = replace(
                    provider, generation=generation, used={name: amount for name, amount in used.items() if amount}
                )

        transaction.will(write)

    # --- inventory

    async def report(
        self, updates: Sequence[InventoryUpdate], *, bus: str = ABOVE_CELLS
    ) -> list[InventoryResult | Refused]:
        """Inventory updates as one group, in order, each with its own outcome. Raises Transient."""
        if not updates:
            return []
        table = self._table
        await self._know_names(updates)
        async with self._session.transaction() as transaction:
            await transaction.lock([TREES])
            await transaction.statement()
            sources = {key: table.sources[key] for key in _keys(updates) if key in table.sources}
            cells = {update.root_uuid: table.cell(update.root_uuid) for update in updates}
            group = Group(updates, sources, cells=cells, bus=bus)
            group.refuse_flawed(table.traits)
            group.refuse_foreign()
            group.sort_out_stale()
            sequence = await self._apply_reports(transaction, group)
        return group.answers(sequence)

    async def _apply_reports(self, transaction: Transaction, group: Group) -> int:
        """Plan what is new and write what it comes to."""
        table = self._table
        fresh = group.fresh()
        planned = [group.updates[number] for number in fresh]
        leaving = [pair for update in planned for pair in taken(update.providers)]
        locked = await self._lock_holders(transaction, leaving)
        before = await self._lock_trees(transaction, planned)
        await self._lock_late_holders(transaction, leaving, locked)
        holdings = {uuid: table.consumers[uuid].consumer.holding for uuid in _holders(table, leaving)}
        outcome = plan(planned, [group.source(number).providers for number in fresh], before, holdings, group.bus)
        group.settle(fresh, outcome.results)
        await transaction.statement()
        transaction.will(lambda: _write_trees(table, before, outcome, group))
        return await self._append(transaction, changes_of_reports(before, outcome.after))

    async def remove_shells(self, limit: int) -> list[str]:
        """Remove trees that were taken out while in use and are used no more; their roots."""
        table = self._table
        async with self._session.transaction() as transaction:
            await transaction.lock([TREES])
            await transaction.statement()
            sources = {key: table.sources[key] for key in sorted(table.sources) if _is_taken_out(table, key)}
            keys = [key for key in sources if is_empty_shell(_tree(table, key[0]))][:limit]
            said = [
                InventoryUpdate(source=source, version=sources[root, source].version, root_uuid=root)
                for root, source in keys
            ]
            await self._lock_trees(transaction, said)
            empty = [update for update in said if is_empty_shell(_tree(table, update.root_uuid))]
            await self._apply_reports(transaction, Group(empty, sources, cells={}, bus=ABOVE_CELLS))
        return list(dict.fromkeys(update.root_uuid for update in empty))

    async def _lock_holders(self, transaction: Transaction, leaving: Sequence[Leaving]) -> list[str]:
        """Everybody who holds something of these classes of these providers."""
        if not leaving:
            return []
        await transaction.statement()
        holders = _holders(self._table, leaving)
        await transaction.lock([("consumer", uuid) for uuid in holders])
        return holders

    async def _lock_late_holders(
        self, transaction: Transaction, leaving: Sequence[Leaving], locked: Sequence[str]
    ) -> None:
        """Those who came before the providers were locked: without waiting, or the group is tried again."""
        late = [("consumer", uuid) for uuid in _holders(self._table, leaving) if uuid not in locked]
        if not all(transaction.is_free(key) for key in late):
            raise HoldersBusy("an allocation that is to be moved is being changed")
        await transaction.lock(late)

    async def _know_names(self, updates: Sequence[InventoryUpdate]) -> None:
        """Create the classes and CUSTOM_ traits that the updates name, ahead of their transaction."""
        table = self._table
        classes: dict[str, None] = {}
        traits: dict[str, None] = {}
        for update in updates:
            if flaw(update, table.traits) is None:
                for report in update.providers:
                    classes.update(dict.fromkeys(map(class_name, report.inventories)))
                    traits.update(dict.fromkeys(filter(is_custom, report.traits)))
        if classes.keys() <= table.classes.keys() and traits.keys() <= table.traits.keys():
            return
        async with self._session.transaction() as transaction:
            transaction.will(partial(_know, table, classes, traits))

    async def _lock_trees(self, transaction: Transaction, updates: Sequence[InventoryUpdate]) -> dict[str, Provider]:
        """Lock every tree that an update touches by root, provider or name, then read it as it is now."""
        if not updates:
            return {}
        await transaction.statement()
        providers = self._table.providers
        uuids = {update.root_uuid for update in updates} | {r.uuid for update in updates for r in update.providers}
        names = {r.name for update in updates for r in update.providers}
        roots = {p.root for p in providers.values() if p.uuid in uuids or p.name in names}
        found = self._table.by_number([p.uuid for p in providers.values() if p.root in roots])
        await transaction.lock([("provider", uuid) for uuid in found])
        await transaction.statement()
        return {uuid: providers[uuid] for uuid in found if uuid in providers}

    # --- the feed

    async def _append(self, transaction: Transaction, changes: Sequence[Change]) -> int:
        """Number the changes, as the last act of a transaction."""
        if not changes:
            return 0
        await transaction.statement()
        await transaction.lock([HEAD])
        table = self._table
        numbered = [replace(change, sequence=table.head + at) for at, change in enumerate(changes, 1)]

        def write() -> None:
            table.changes += numbered
            table.head = numbered[-1].sequence

        transaction.will(write)
        return numbered[-1].sequence

    async def changes(self, after: int, limit: int) -> ChangesPage:
        """Committed changes after a number, in order."""
        table = self._table
        async with self._session.transaction():
            oldest = table.changes[0].sequence if table.changes else None
            if after < table.head if oldest is None else after < oldest - 1:
                return ChangesPage(head=table.head, too_old=True)
            return ChangesPage(changes=tuple(self._after(after, limit)), head=table.head)

    async def snapshot(self, after: str | None, limit: int) -> SnapshotPage:
        """A page of whole providers by uuid, true at one feed number."""
        table = self._table
        async with self._session.transaction():
            uuids = sorted(uuid for uuid in table.providers if after is None or uuid > after)
            states = tuple(state_of(table.providers[uuid]) for uuid in uuids[:limit])
            return SnapshotPage(sequence=table.head, providers=states, more=len(uuids) > limit)

    async def where(self, asked: WhereRequest) -> WherePage:
        """On which hosts consumers of a project hold something, and the members of one of its server groups."""
        table = self._table
        async with self._session.transaction():
            key = (asked.project_id, asked.server_group or "")
            counted = Counter(host for uuid, host in table.alive(key).items() if uuid != asked.besides)
            hosts = {
                uuid: tuple(sorted({table.providers[provider].root for provider in kept.consumer.holding}))
                for uuid in sorted(set(asked.consumers))
                if (kept := table.consumers.get(uuid)) is not None
                and kept.consumer.holding
                and kept.consumer.project_id == asked.project_id
            }
            return WherePage(members=dict(sorted(counted.items())[:MAX_HOSTS_TOLD]), hosts=hosts)

    async def head(self) -> int:
        """The newest committed change's number."""
        async with self._session.transaction():
            return self._table.head

    async def publish(self, send: Callable[[Sequence[Change]], Awaitable[None]], limit: int) -> Published:
        """Hand the next unpublished changes to `send`, and remember them as published once it returns."""
        table = self._table
        async with self._session.transaction() as transaction:
            position, changes = table.position, self._after(table.position, limit)
            if not changes:
                return Published(0, False)
            await transaction.lock([POSITION])
            now = table.clock.time()
            is_taken = table.taken_until != self._lease and now <= table.taken_until <= now + publishing.LEASE_S
            if table.position != position or is_taken:
                return Published(0, True, taken=True)
            until = now + publishing.LEASE_S
            transaction.durable = False  # forgotten in a crash, they are said once more
            transaction.will(lambda: setattr(table, "taken_until", until))
        self._lease = until
        await send(changes)
        async with self._session.transaction() as transaction:
            await transaction.lock([POSITION])
            transaction.durable = False
            transaction.will(lambda: _move(table, changes[-1].sequence, until))
        self._lease = None
        return Published(len(changes), len(changes) >= limit)

    async def trim(self, *, keep_changes: int, keep_fences_s: float, keep_sources_s: float, limit: int) -> bool:
        """Forget what nobody needs any more."""
        table = self._table
        async with self._session.transaction() as transaction:
            until = min(table.head - keep_changes, table.position)
            before = table.clock.time() - keep_fences_s
            old = [uuid for uuid, kept in table.consumers.items() if _is_over(kept, before)][:limit]
            sources = _silent(table, table.clock.time() - keep_sources_s)[:limit]
            changes = [change.sequence for change in table.changes if change.sequence <= until][:limit]
            until = changes[-1] if changes else 0
            await transaction.lock([("consumer", uuid) for uuid in sorted(old)])
            gone = [(key, uuid) for key in table.members for uuid in table.members[key] if uuid not in table.alive(key)]
            transaction.will(lambda: _forget(table, until, before, old, sources))
            transaction.will(lambda: _forget_members(table, gone[:limit]))
        return max(len(old), len(sources), len(changes), len(gone)) >= limit

    def _after(self, after: int, limit: int) -> list[Change]:
        start = bisect.bisect_right(self._table.changes, after, key=lambda change: change.sequence)
        return self._table.changes[start : start + limit]


def _move(table: MemoryBookTable, number: int, lease: float) -> None:
    table.position = max(table.position, number)
    if table.taken_until == lease:
        table.taken_until = -math.inf


def _forget_members(table: MemoryBookTable, gone: Sequence[tuple[GroupKey, str]]) -> None:
    for key, uuid in gone:
        if uuid not in table.alive(key):
            table.members[key].pop(uuid, None)


def _consumers_of(items: Sequence[ClaimItem]) -> list[str]:
    named: dict[str, None] = {}
    for item in items:
        if isinstance(item, Claim | Release):
            named[item.consumer] = None
        else:
            named.update(dict.fromkeys(entry.consumer for entry in item.consumers))
    return list(named)


def _keys(updates: Sequence[InventoryUpdate]) -> list[Key]:
    return list(dict.fromkeys((update.root_uuid, update.source) for update in updates))


def _claimed(provider: Provider) -> ClaimedProvider:
    rooms = {
        name: Room(stock.capacity, stock.min_unit, stock.max_unit, stock.step_size, provider.used.get(name, 0))
        for name, stock in provider.stocks.items()
    }
    return ClaimedProvider(provider.generation, provider.shape, rooms)


def _holders(table: MemoryBookTable, leaving: Sequence[Leaving]) -> list[str]:
    return sorted(
        uuid
        for uuid, kept in table.consumers.items()
        if any(name in kept.consumer.holding.get(provider, {}) for provider, name in leaving)
    )


def _write_trees(table: MemoryBookTable, before: Mapping[str, Provider], outcome: Plan, group: Group) -> None:
    after = outcome.after
    for uuid, holding in outcome.moved.items():
        table.consumers[uuid] = Kept(replace(table.consumers[uuid].consumer, holding=holding), None)
    for uuid in before:
        if uuid not in after:
            del table.providers[uuid]
    for uuid, provider in after.items():
        if before.get(uuid) is not provider:
            table.number(uuid)
            table.providers[uuid] = provider
    for root, source, version, digest, settled, providers in group.written:
        table.sources[root, source] = Source(version, digest, settled, providers.split(",") if providers else [])
        table.heard[root, source] = table.clock.time()
    for root, source in group.changed:
        for key, said in table.sources.items():
            if key[0] == root and key[1] != source and said.settled:
                table.sources[key] = replace(said, settled=False)


def _is_over(kept: Kept, before: float) -> bool:
    return kept.released_at is not None and kept.released_at < before


def _know(table: MemoryBookTable, classes: Iterable[str], traits: Mapping[str, None]) -> None:
    for name in classes:
        table.classes.setdefault(name, len(table.classes))
    table.traits.update(traits)


def _silent(table: MemoryBookTable, before: float) -> list[Key]:
    """Sources that said their last before, of roots that are gone or that another answers for since."""

    def is_of_no_use(key: Key) -> bool:
        mine = set(table.sources[key].providers)
        return key[0] not in table.providers or any(
            other[0] == key[0] and table.heard[other] > table.heard[key] and mine <= set(said.providers)
            for other, said in table.sources.items()
        )

    return [key for key in table.sources if table.heard[key] < before and is_of_no_use(key)]


def _is_taken_out(table: MemoryBookTable, key: Key) -> bool:
    """Whether a source's last word took its root out, is not carried out, and nobody has reported the root since."""
    said = table.sources[key]
    return (
        not said.settled
        and said.digest == TAKEN_OUT
        and not any(
            other[0] == key[0] and rival.digest != TAKEN_OUT and table.heard[other] >= table.heard[key]
            for other, rival in table.sources.items()
        )
    )


def _tree(table: MemoryBookTable, root: str) -> list[Provider]:
    return [provider for provider in table.providers.values() if provider.root == root]


def _forget(table: MemoryBookTable, until: int, before: float, fences: Sequence[str], sources: Sequence[Key]) -> None:
    for key in sources:
        table.sources.pop(key, None)
        table.heard.pop(key, None)
    table.changes = [change for change in table.changes if change.sequence > until]
    for uuid in fences:
        kept = table.consumers.get(uuid)
        if kept is not None and _is_over(kept, before):
            del table.consumers[uuid]
