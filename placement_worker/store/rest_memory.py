"""The book in memory as the REST API uses it: the decisions and the order of locks are those of PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from msgspec.structs import replace

from bus.contracts.placement import Change
from bus.persistence.memory_database import MemoryDatabaseTransaction, MemorySession
from placement_worker.domain.allocations import (
    AllocationOutcome,
    AllocationWrite,
    decide,
    expect,
    expected_rows,
    providers_held,
    touched,
)
from placement_worker.domain.causes import caused
from placement_worker.domain.claim_verdict import Decision
from placement_worker.domain.claims import changes_of as changes_of_usage
from placement_worker.domain.names import STANDARD_CLASSES
from placement_worker.domain.refusal import WriteRefusal
from placement_worker.domain.reports import changes_of
from placement_worker.domain.reshape import Reshape, Reshaped, reshape
from placement_worker.domain.trees import (
    CreateProvider,
    DeleteProvider,
    DeleteTree,
    ProviderTrees,
    TreeOutcome,
    TreeWrite,
    UpdateProvider,
    deleted_trees,
)
from placement_worker.domain.units import is_allowed_amount
from placement_worker.domain.values import ClaimedProvider, ConsumerState, Provider
from placement_worker.store.memory_table import TREES, ConsumerRow, MemoryBookTable, provider_key, renamed_key
from placement_worker.store.rest_port import (
    AllocationRow,
    InventoryRecord,
    Listing,
    NameInUse,
    NameKind,
    NameRow,
    Unstorable,
    UsageRow,
)


class MemoryTransactions(Protocol):
    """The transactions of a MemoryBook, for each of its callers."""

    session: MemorySession
    table: MemoryBookTable

    async def lock_providers(
        self, transaction: MemoryDatabaseTransaction, wanted: Sequence[str]
    ) -> dict[str, ClaimedProvider]:
        """Lock these providers in the order of their numbers. Returns those that exist, as a claim sees them."""

    def write(self, transaction: MemoryDatabaseTransaction, decision: Decision) -> None:
        """Write a decision about the locked rows at the commit."""

    async def append(self, transaction: MemoryDatabaseTransaction, changes: Sequence[Change]) -> int:
        """Number the changes, as the last statement of a transaction."""


class MemoryRest:
    """`RestStore` over the table of a MemoryBook."""

    def __init__(self, book: MemoryTransactions) -> None:
        self._book = book
        self._session = book.session
        self._table = book.table

    # --- writes of providers

    async def write_trees(self, writes: Sequence[TreeWrite]) -> list[TreeOutcome]:
        """A group of writes of providers, in order, each with its own outcome."""
        _check(*(getattr(write, "name", "") for write in writes))
        table = self._table
        async with self._session.transaction() as transaction:
            await transaction.lock([TREES])
            await transaction.statement()
            before = await self._lock(transaction, _named_by(table, writes))
            trees = ProviderTrees(before, table.classes, table.traits, shape=table.next_shape())
            outcomes = [trees.apply(write) for write in writes]
            after = {uuid: _with_lasting(before.get(uuid), new) for uuid, new in trees.providers.items()}
            if changes := changes_of(before, after):
                done = (write for write, each in zip(writes, outcomes, strict=True) if isinstance(each, Provider))
                transaction.will(lambda: table.put_trees(before, after, deleted_trees(writes, outcomes)))
                await self._book.append(transaction, caused(changes, ((write.cause, (write.uuid,)) for write in done)))
        return outcomes

    async def _lock(self, transaction: MemoryDatabaseTransaction, wanted: Iterable[str]) -> dict[str, Provider]:
        """Lock these providers and return those that exist, as they are under the lock."""
        found = self._table.by_number(list(wanted))
        await transaction.lock([provider_key(uuid) for uuid in found])
        await transaction.statement()
        return {uuid: self._table.providers[uuid] for uuid in found if uuid in self._table.providers}

    # --- writes of allocations

    async def write_allocations(self, items: Sequence[AllocationWrite]) -> list[AllocationOutcome]:
        """A group of writes of allocations, in order, each with its own outcome."""
        expected, wanted = expected_rows(items)
        _check(*(text for each in expected.values() for text in (each.project_id, each.user_id, each.consumer_type)))
        async with self._session.transaction() as transaction:
            consumers = await self._lock_consumers(transaction, expected)
            providers = await self._book.lock_providers(transaction, sorted(wanted | providers_held(consumers)))
            outcomes, decision = decide(items, consumers, providers, self._table.classes)
            await transaction.statement()
            self._book.write(transaction, decision)
            changes = caused(changes_of_usage(decision), touched(items, outcomes, consumers))
            await self._book.append(transaction, changes)
        return outcomes

    async def reshape(self, item: Reshape) -> WriteRefusal | None:
        """Apply one reshape."""
        expected: dict[str, ConsumerState] = {}
        wanted = set(item.inventories)
        expect(item.writes, expected, wanted)
        table = self._table
        async with self._session.transaction() as transaction:
            await transaction.lock([TREES])
            consumers = await self._lock_consumers(transaction, expected)
            before = await self._lock(transaction, wanted | providers_held(consumers))
            outcome = reshape(item, consumers, before, table.classes, shape=table.next_shape())
            if isinstance(outcome, WriteRefusal):
                return outcome
            old = {uuid: before[uuid] for uuid in outcome.interim}
            usage = [each for each in changes_of_usage(outcome.decision) if each.provider not in outcome.final]
            transaction.will(lambda: _write_reshaped(table, old, outcome))
            changes = [*changes_of(old, outcome.final), *usage]
            await self._book.append(transaction, caused(changes, ((item.cause, ()),)))
        return None

    async def _lock_consumers(
        self, transaction: MemoryDatabaseTransaction, named: Iterable[str]
    ) -> dict[str, ConsumerState]:
        await transaction.statement()
        uuids = sorted(named)
        await transaction.lock([("consumer", uuid) for uuid in uuids])
        return {uuid: self._table.consumers[uuid].consumer for uuid in uuids if uuid in self._table.consumers}

    # --- names

    async def unknown_classes(self, named: Iterable[str]) -> list[str]:
        """The names among these that are no class of the book, in order."""
        return [name for name in dict.fromkeys(named) if name not in self._table.classes]

    async def unknown_traits(self, named: Iterable[str]) -> list[str]:
        """The names among these that are no trait of the book, in order."""
        return [name for name in dict.fromkeys(named) if name not in self._table.traits]

    async def refresh_names(self) -> None:
        """Do nothing: there is no cache of names."""

    async def name(self, kind: NameKind, name: str) -> NameRow | None:
        """A class or trait by name."""
        async with self._session.transaction():
            return NameRow(name, self._table.made[kind, name]) if name in self._table.names(kind) else None

    async def create_name(self, kind: NameKind, name: str) -> bool:
        """Create a class or trait. Returns False when it exists."""
        async with self._session.transaction() as transaction:
            await transaction.lock([("name", name)])
            if name in self._table.names(kind):
                return False
            names = {name: None}
            classes, traits = (names, {}) if kind is NameKind.CLASS else ({}, names)
            transaction.will(lambda: self._table.add_names(classes, traits))
        return True

    async def delete_name(self, kind: NameKind, name: str) -> bool:
        """Remove a class or trait. Returns False when it does not exist. Raises NameInUse."""
        table = self._table
        async with self._session.transaction() as transaction:
            await transaction.lock([TREES, ("name", name)])
            if name not in table.names(kind):
                return False
            if any(name in (p.inventories if kind is NameKind.CLASS else p.traits) for p in table.providers.values()):
                raise NameInUse(name)
            transaction.will(lambda: table.remove_name(kind, name))
        return True

    async def rename_class(self, old: str, new: str) -> bool | None:
        """Give a class another name. Returns False when the class does not exist, None when the name is taken."""
        table = self._table
        async with self._session.transaction() as transaction:
            await transaction.lock([TREES, *(("name", name) for name in sorted({old, new}))])
            await transaction.statement()
            before = await self._lock(transaction, [p.uuid for p in table.providers.values() if old in p.inventories])
            if old not in table.classes:
                return False
            if new in table.classes:
                return None
            after = {uuid: _renamed(provider, old, new) for uuid, provider in before.items()}
            transaction.will(lambda: table.rename_class(old, new, after))
            await self._book.append(transaction, changes_of({}, after))
        return True

    async def resource_classes(self) -> list[NameRow]:
        """All classes, standard ones first."""
        async with self._session.transaction():
            rows = [NameRow(name, self._table.made[NameKind.CLASS, name]) for name in self._table.classes]
            return sorted(rows, key=lambda row: row.name not in STANDARD_CLASSES)

    async def trait_names(self, names: list[str] | None, prefix: str | None, associated: bool | None) -> list[NameRow]:
        """All traits with one of these names, with this prefix, that some provider has, or that none has."""
        _check(prefix, *(names or ()))
        async with self._session.transaction():
            held = {trait for provider in self._table.providers.values() for trait in provider.traits}
            return [
                NameRow(name, self._table.made[NameKind.TRAIT, name])
                for name in self._table.traits
                if (names is None or name in names)
                and (prefix is None or name.startswith(prefix))
                and (associated is None or (name in held) is associated)
            ]

    # --- reads

    async def providers(self, listing: Listing) -> Sequence[Sequence[Any]]:
        """Return the providers that meet the conditions, oldest first. Each is a sequence of the fields of
        ProviderRow.
        """
        _check(listing.name)
        table = self._table
        async with self._session.transaction():
            top = table.providers.get(listing.in_tree or "")
            rows = [table.providers[uuid] for uuid in table.by_number(list(table.providers))]
            return [
                (p.uuid, p.name, p.generation, p.parent, p.root, table.written[provider_key(p.uuid)])
                for p in rows
                if (listing.in_tree is None or (top is not None and p.root == top.root)) and _is_listed(p, listing)
            ]

    async def inventories(self, uuid: str) -> tuple[int, list[InventoryRecord]] | None:
        """(generation, inventories by class) of a provider, None when there is none."""
        table = self._table
        async with self._session.transaction():
            if (provider := table.providers.get(uuid)) is None:
                return None
            return provider.generation, [
                InventoryRecord(
                    name,
                    inventory.total,
                    inventory.reserved,
                    inventory.min_unit,
                    inventory.max_unit,
                    inventory.step_size,
                    inventory.allocation_ratio,
                    table.written["inventory", uuid, name],
                )
                for name, inventory in sorted(provider.inventories.items())
            ]

    async def usages(self, uuid: str) -> tuple[int, dict[str, int]] | None:
        """(generation, {class: used}) of a provider, None when there is none."""
        async with self._session.transaction():
            provider = self._table.providers.get(uuid)
            used = (
                {} if provider is None else {name: provider.used.get(name, 0) for name in sorted(provider.inventories)}
            )
            return None if provider is None else (provider.generation, used)

    async def traits(self, uuid: str) -> tuple[int, dict[str, float]] | None:
        """(generation, {trait: when it was made}) of a provider, None when there is none."""
        async with self._session.transaction():
            if (provider := self._table.providers.get(uuid)) is None:
                return None
            return provider.generation, {name: self._table.made[NameKind.TRAIT, name] for name in provider.traits}

    async def aggregates(self, uuid: str) -> tuple[int, list[str]] | None:
        """(generation, aggregates) of a provider, None when there is none."""
        async with self._session.transaction():
            provider = self._table.providers.get(uuid)
            return None if provider is None else (provider.generation, sorted(provider.aggregates))

    async def allocations_of_consumer(self, uuid: str) -> list[AllocationRow]:
        """The allocations of a consumer, by provider and class."""
        table = self._table
        async with self._session.transaction():
            row = table.consumers.get(uuid)
            held = table.by_number(list(row.consumer.holding)) if row is not None else []
            return [each for provider in held if row is not None for each in self._allocations(uuid, row, provider)]

    async def allocations_of_provider(self, uuid: str) -> tuple[int, list[AllocationRow]] | None:
        """(generation, allocations of a provider, by consumer and class), None when it does not exist."""
        table = self._table
        async with self._session.transaction():
            if (provider := table.providers.get(uuid)) is None:
                return None
            held = [(name, row) for name, row in sorted(table.consumers.items()) if uuid in row.consumer.holding]
            return provider.generation, [each for name, row in held for each in self._allocations(name, row, uuid)]

    def _allocations(self, consumer: str, row: ConsumerRow, provider: str) -> list[AllocationRow]:
        state = row.consumer
        return [
            AllocationRow(
                consumer,
                provider,
                self._table.providers[provider].generation,
                name,
                amount,
                state.generation,
                state.project_id,
                state.user_id,
                state.consumer_type,
                row.updated_at,
            )
            for name, amount in sorted(state.holding[provider].items())
        ]

    async def totals(self, project_id: str, user_id: str | None, consumer_type: str | None) -> Sequence[UsageRow]:
        """The amounts that a project's (and user's, and type's) consumers hold, by type and class.

        "" is the unknown type.
        """
        _check(project_id, user_id, consumer_type)
        async with self._session.transaction():
            amounts: dict[tuple[str, str], int] = {}
            counts: dict[str, int] = {}
            for row in self._table.consumers.values():
                held = row.consumer
                wanted = held.project_id == project_id and user_id in (None, held.user_id)
                if not held.holding or not wanted or consumer_type not in (None, held.consumer_type):
                    continue
                counts[held.consumer_type] = counts.get(held.consumer_type, 0) + 1
                for resources in held.holding.values():
                    for name, amount in resources.items():
                        key = (held.consumer_type, name)
                        amounts[key] = amounts.get(key, 0) + amount
            return [UsageRow(kind, name, amount, counts[kind]) for (kind, name), amount in sorted(amounts.items())]


def _check(*texts: str | None) -> None:
    """Raise Unstorable for a text with a NUL, as PostgreSQL cannot store one."""
    if any(text is not None and "\x00" in text for text in texts):
        raise Unstorable("a text has a NUL in it")


def _named_by(table: MemoryBookTable, writes: Sequence[TreeWrite]) -> set[str]:
    """The providers to lock: those that the writes name by uuid or name, and the whole tree of a provider that is
    updated or deleted.
    """
    uuids: set[str] = set()
    names: set[str] = set()
    trees: set[str] = set()
    for write in writes:
        uuids.add(write.uuid)
        if isinstance(write, CreateProvider | UpdateProvider):
            names.add(write.name)
            if isinstance(write.parent, str):
                uuids.add(write.parent)
        if isinstance(write, UpdateProvider | DeleteProvider | DeleteTree):
            trees.add(write.uuid)
            if isinstance(write, UpdateProvider) and isinstance(write.parent, str):
                trees.add(write.parent)
    roots = {table.providers[uuid].root for uuid in trees if uuid in table.providers}
    return {p.uuid for p in table.providers.values() if p.uuid in uuids or p.name in names or p.root in roots}


def _with_lasting(old: Provider | None, new: Provider) -> Provider:
    """Mark new traits as lasting: they were set through the API, and reports do not remove them. Other traits keep
    their mark.
    """
    if old is new or (old is not None and old.traits == new.traits):
        return new
    known = old.traits if old is not None else ()
    kept = old.lasting if old is not None else ()
    return replace(new, lasting=tuple(trait for trait in new.traits if trait in kept or trait not in known))


def _write_reshaped(table: MemoryBookTable, old: Mapping[str, Provider], outcome: Reshaped) -> None:
    table.keep(outcome.decision.consumers)
    others = {u: number for u, number in outcome.decision.generations.items() if u not in outcome.final}
    table.put_usage(others, outcome.decision.used)
    table.put_trees(old, outcome.final)


def _renamed(provider: Provider, old: str, new: str) -> Provider:
    inventories = renamed_key(provider.inventories, old, new)
    return replace(provider, inventories=inventories, used=renamed_key(provider.used, old, new))


def _is_listed(p: Provider, listing: Listing) -> bool:
    traits, aggregates = set(p.traits), set(p.aggregates)
    return (
        listing.uuid in (None, p.uuid)
        and listing.name in (None, p.name)
        and all(traits.intersection(group) for group in listing.required)
        and not traits.intersection(listing.forbidden)
        and all(aggregates.intersection(group) for group in listing.member_of)
        and not aggregates.intersection(listing.forbidden_aggregates)
        and all(_has_left(p, name, amount) for name, amount in listing.resources)
    )


def _has_left(provider: Provider, name: str, amount: int) -> bool:
    inventory = provider.inventories.get(name)
    return (
        inventory is not None
        and inventory.capacity - provider.used.get(name, 0) >= amount
        and is_allowed_amount(amount, inventory)
    )
