"""The replica in columns: every provider's inventory, usage, and claims in flight.

There is one writer, and no method awaits, so a reader sees a consistent state between two calls. Each provider has one
row; the rows of removed providers are used again. The only Python objects for each provider are strings, which the
cyclic garbage collector does not visit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from bus.contracts.feed import Change
from bus.contracts.placement import ProviderState
from placement_worker.replica.columns import (
    CAPACITY,
    TOTAL,
    Amounts,
    Assumptions,
    ChangedRows,
    ClassColumns,
    Distinct,
    InventoryNumbers,
    Rows,
)
from placement_worker.replica.trees import NO_ROW, Trees

Cache = TypeVar("Cache")

# Unused distinct values are swept when there are this many values, and again whenever their number has doubled.
SWEEP_FROM = 4096
# A resource class counts as this many distinct values, because its columns take 28 bytes of every row.
CLASS_WEIGHS = 128


# The state of a replica that a snapshot does not replace.
_KEPT_ON_LOAD = frozenset({"_caches", "assumptions", "epoch", "changes", "spec_changes"})


class Gap(Struct, frozen=True):
    """A hole in the feed: the next change should have had the number `expected`, and has the number `got`."""

    expected: int
    got: int


class Replica(Trees):
    """All providers as of one number of the feed (`sequence`), and the claims in flight. The row of a provider does not
    change while the provider exists. The returned arrays are read-only views or copies, and are indexed by row.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sequence = 0
        self.incarnation = ""  # the incarnation that the sequence is a number of
        self.changes = ChangedRows()  # roots whose tree has changed in any way
        self.spec_changes = ChangedRows()  # roots whose tree has changed in more than usage
        self.epoch = 0  # incremented when a class or a distinct value may have another number, or its first one
        self._caches: dict[type, Any] = {}  # of one epoch: see `cache`
        self.assumptions = Assumptions()
        self._stamps = 0
        size = self.size
        self.generation = np.zeros(size, dtype=np.int64)
        self.stamp = np.zeros(size, dtype=np.int64)  # changes whenever a row's content changes
        self.spec_generation = np.zeros(size, dtype=np.int64)
        self.traits = np.zeros(size, dtype=np.int32)
        self.aggregates = np.zeros(size, dtype=np.int32)
        self.classes = np.zeros(size, dtype=np.int32)
        self._made()
        self.trait_sets: Distinct[tuple[str, ...]] = Distinct(())
        self.aggregate_sets: Distinct[tuple[str, ...]] = Distinct(())
        self.class_sets: Distinct[tuple[int, ...]] = Distinct(())
        self._columns: dict[str, ClassColumns] = {}
        self._by_number: list[ClassColumns] = []
        self._sweep_at = SWEEP_FROM

    # --- changes of the feed, and claims

    def load(self, providers: Sequence[ProviderState], sequence: int, incarnation: str = "") -> None:
        """Replace all providers by a snapshot of one feed number and incarnation, without a pause. `CatchUp` does the
        same with turns of the event loop in between.
        """
        loaded = Replica()
        loaded.sequence, loaded.incarnation = sequence, incarnation
        loaded.add(providers)
        self.apply_snapshot(loaded)

    def add(self, providers: Sequence[ProviderState]) -> None:
        """Add a part of a snapshot to this replica, before another replica adopts it."""
        self._reserve_rows(len(providers))
        for state in providers:
            self._put(state)
        for column in self._by_number:
            column.kinds.columns()  # computed for each part, so that the first search need not compute all

    def apply_snapshot(self, loaded: Replica) -> None:
        """Replace all providers, the feed number and the incarnation by those of a replica that was made from a
        snapshot and is not used any more. Claims in flight are kept, except confirmed ones that wait for changes of
        another incarnation, which will not come.
        """
        is_other = loaded.incarnation != self.incarnation
        for name, value in vars(loaded).items():
            if name not in _KEPT_ON_LOAD:
                setattr(self, name, value)
        self._drop_cached()
        for uuid in self.assumptions.providers():
            self._restore({uuid: list(self.assumptions.sums_of(uuid))})
        self._confirm_all(nothing_comes=is_other)
        if is_other:
            self.assumptions.mark_unconfirmed()

    def apply(self, changes: Sequence[Change]) -> Gap | None:
        """Apply changes in order. Known changes are ignored. At a hole the method stops and returns the hole."""
        for change in changes:
            if change.sequence <= self.sequence:
                continue
            if change.sequence != self.sequence + 1:
                return Gap(self.sequence + 1, change.sequence)
            self._fold(change)
            self.sequence = change.sequence
        self._sweep()
        return None

    def assume(self, key: str, allocations: Mapping[str, Mapping[str, int]]) -> None:
        """Count a claim in flight as usage from now on. An earlier assumption under the same key is replaced."""
        self._restore(self.assumptions.drop(key))
        self._restore(self.assumptions.add(key, allocations))

    def drop_assumed(self, key: str) -> None:
        """Drop the assumption under this key: its claim has failed, will not be made, or was released."""
        self._restore(self.assumptions.drop(key))

    def confirm(self, key: str, generations: Mapping[str, int], sequence: int = 0) -> None:
        """Record that the claim has succeeded. generations: {provider: the generation that the claim gave it}.

        The share on each provider is dropped when the feed has brought the provider to the given generation and so
        counts the amount as usage. A share on a provider that is not named is dropped now. sequence: the feed number of
        the claim's changes; a replica that has reached it counts the amounts already. It is 0 in the answer to a
        repeated claim. All shares are dropped now if another incarnation has begun since the claim was assumed.
        """
        reached = [
            uuid
            for uuid in self.assumptions.providers_of(key)
            if uuid not in generations
            or 0 < sequence <= self.sequence
            or (row := self.row_of(uuid)) is None
            or self.generation[row] >= generations[uuid]
        ]
        self._restore(self.assumptions.confirm(key, generations, reached, sequence))

    # --- reading

    def cache(self, kind: type[Cache]) -> Cache:
        """The cache of this type. Each reader caches values in a type of its own, which is created at its first use in
        an epoch.
        """
        kept: Cache | None = self._caches.get(kind)
        if kept is None:
            kept = self._caches[kind] = kind()
        return kept

    def spec_generation_of(self, row: int) -> int:
        """The provider's spec generation: inventory, traits, aggregates, parentage."""
        return int(self.spec_generation[row])

    def traits_of(self, row: int) -> tuple[str, ...]:
        """The provider's traits, sorted."""
        return self.trait_sets.values[int(self.traits[row])]

    def with_trait(self, trait: str, rows: Rows) -> NDArray[np.bool_]:
        """Per row, whether the provider itself has the trait."""
        has = np.array([trait in traits for traits in self.trait_sets.values], dtype=np.bool_)
        return has[self.traits[rows]]

    def aggregates_of(self, row: int) -> tuple[str, ...]:
        """The provider's own aggregates, sorted."""
        return self.aggregate_sets.values[int(self.aggregates[row])]

    def in_aggregate(self, aggregate: str, rows: Rows) -> NDArray[np.bool_]:
        """Per row, whether the provider itself is in the aggregate."""
        has = np.array([aggregate in aggregates for aggregates in self.aggregate_sets.values], dtype=np.bool_)
        return has[self.aggregates[rows]]

    def resource_classes(self) -> list[str]:
        """The classes that a provider has or had, sorted."""
        return sorted(self._columns)

    def column(self, resource_class: str) -> ClassColumns | None:
        """One class's columns (for search); None while no provider has it."""
        return self._columns.get(resource_class)

    def free(self, resource_class: str, roots: Rows) -> Amounts:
        """Per root, the sum of the positive free amounts in its tree."""
        column = self._columns.get(resource_class)
        return np.zeros(len(roots), dtype=np.int64) if column is None else column.root_free[roots]

    def totals(self, resource_class: str, roots: Rows) -> Amounts:
        """Per root, the capacity of its tree."""
        column = self._columns.get(resource_class)
        if column is None:
            return np.zeros(len(roots), dtype=np.int64)
        return self._sum_over_trees(self._capacity(column), roots)

    def capacities_in_use(self, resource_class: str, roots: Rows) -> Amounts:
        """As `totals`, and of what is reserved as much as is used: bare metal is reserved while it is used."""
        column = self._columns.get(resource_class)
        if column is None:
            return np.zeros(len(roots), dtype=np.int64)
        capacity, whole = self._capacity(column), column.kinds.columns()[TOTAL][column.kind[: self.top]]
        used = np.minimum(capacity - column.free[: self.top], whole)
        return self._sum_over_trees(np.maximum(capacity, used), roots)

    def usage(self, resource_class: str, roots: Rows) -> Amounts:
        """Per root, the usage of its tree, including the claims in flight."""
        column = self._columns.get(resource_class)
        if column is None:
            return np.zeros(len(roots), dtype=np.int64)
        return self._sum_over_trees(self._capacity(column) - column.free[: self.top], roots)

    def _capacity(self, column: ClassColumns) -> Amounts:
        capacity: Amounts = column.kinds.columns()[CAPACITY][column.kind[: self.top]]
        return capacity

    def inventory_of(self, row: int) -> dict[str, tuple[InventoryNumbers, int, int]]:
        """The provider's inventories by class: their numbers, usage, and free amounts, which take the claims in flight
        into account.
        """
        found = {}
        for number in self.class_sets.values[self.classes[row]]:
            column = self._by_number[number]
            if kind := column.kind[row]:
                found[column.name] = (column.kinds.values[kind], int(column.used[row]), int(column.free[row]))
        return dict(sorted(found.items()))

    # --- writing

    def _fold(self, change: Change) -> None:
        if change.state is not None:
            self._put(change.state)
        elif change.used is not None:
            self._use(change.provider, change.generation, change.used)
        elif change.removed:
            # The generation is not compared: a provider that was created again starts at 0, and its later changes
            # follow in the feed.
            self._remove(change.provider)

    def _put(self, state: ProviderState) -> None:
        """Write a whole provider, unless the known generation is newer."""
        row = self._named(state.uuid)
        if self.live[row] and self.generation[row] > state.generation:
            return
        if not self.live[row]:
            self.live[row] = True
            self._providers += 1
        old_root = int(self.root[row])
        classes = self.class_sets.values[self.classes[row]]
        for number in classes:
            self._set_free(self._by_number[number], row, 0)
        self._link(row, state)
        self._names[row] = state.name
        self._mark(row)
        self.generation[row] = state.generation
        self.spec_generation[row] = state.spec_generation
        self.traits[row] = self.trait_sets.id_of(tuple(sorted(state.traits)))
        self.aggregates[row] = self.aggregate_sets.id_of(tuple(sorted(state.aggregates)))
        self._set_inventories(row, classes, state)
        if old_root not in {NO_ROW, self.root[row]}:
            self._moved(old_root, spec_generation=True)
        self._moved(int(self.root[row]), spec_generation=True)
        self._reached(state.uuid, state.generation)

    def _set_inventories(self, row: int, before: tuple[int, ...], state: ProviderState) -> None:
        """Set the inventories and usage of a row, and clear the classes that the provider no longer has."""
        names = {**state.inventories, **state.used, **self.assumptions.sums_of(state.uuid)}
        numbers = [self._column(name).number for name in names]
        for number in before:
            column = self._by_number[number]
            column.kind[row] = 0
            column.used[row] = 0
        for name, inventory in state.inventories.items():
            column = self._columns[name]
            column.kind[row] = column.kinds.id_of(InventoryNumbers(int(inventory[0]), *inventory[1:]))
        for name, amount in state.used.items():
            self._columns[name].used[row] = amount
        self.classes[row] = self.class_sets.id_of(tuple(sorted(numbers)))
        for number in numbers:
            self._recount(self._by_number[number], row, state.uuid)

    def _use(self, uuid: str, generation: int, used: Mapping[str, int]) -> None:
        """Apply a change of usage alone. A provider that is not known was removed while the snapshot was read: ignore
        it.
        """
        row = self.row_of(uuid)
        if row is None or self.generation[row] > generation:
            return
        for name, amount in used.items():
            column = self._column(name)
            if not column.kind[row] and not column.used[row]:
                self._add_class(row, column)
            column.used[row] = amount
            self._recount(column, row, uuid)
        self.generation[row] = generation
        self._mark(row)
        self._moved(int(self.root[row]))
        self._reached(uuid, generation)

    def _mark(self, row: int) -> None:
        self._stamps += 1
        self.stamp[row] = self._stamps

    def _remove(self, uuid: str) -> None:
        row = self.row_of(uuid)
        if row is None:
            return
        for number in self.class_sets.values[self.classes[row]]:
            column = self._by_number[number]
            self._set_free(column, row, 0)
            column.kind[row] = 0
            column.used[row] = 0
        root = int(self.root[row])
        self._unlink(row)
        for column_of_row in (self.classes, self.traits, self.aggregates, self.generation, self.spec_generation):
            column_of_row[row] = 0
        self.live[row] = False
        self._providers -= 1
        self._names[row] = ""
        self._moved(root, spec_generation=True)
        # The feed will not report claims on it any more: drop the confirmed ones. The others are dropped when they are
        # confirmed or lost.
        self.assumptions.reached(uuid, None)
        self._drop_row_if_unnamed(row)

    def _restore(self, touched: Mapping[str, Sequence[str]]) -> None:
        """Compute the free amounts again where assumptions have changed. touched: {provider: classes}."""
        for uuid, names in touched.items():
            row = self.row_of(uuid)
            if row is None:
                continue
            for name in names:
                column = self._column(name)
                if not column.kind[row] and not column.used[row]:
                    self._add_class(row, column)
                self._recount(column, row, uuid)
            self._moved(int(self.root[row]))

    def _reached(self, uuid: str, generation: int) -> None:
        if self.assumptions.is_awaited(uuid):
            self._restore(self.assumptions.reached(uuid, generation))

    def _confirm_all(self, *, nothing_comes: bool) -> None:
        """After a snapshot, drop the confirmed assumptions that the snapshot counts, or whose provider or incarnation
        no longer exists.
        """
        for uuid in self.assumptions.awaited():
            row = self.row_of(uuid)
            generation = None if row is None or nothing_comes else int(self.generation[row])
            self._restore(self.assumptions.reached(uuid, generation, self.sequence))

    def _recount(self, column: ClassColumns, row: int, uuid: str) -> None:
        capacity = column.kinds.values[column.kind[row]].capacity
        assumed = self.assumptions.amount(uuid, column.name)
        self._set_free(column, row, capacity - int(column.used[row]) - assumed)

    def _set_free(self, column: ClassColumns, row: int, free: int) -> None:
        before = int(column.free[row])
        column.free[row] = free
        if step := max(0, free) - max(0, before):
            column.root_free[self.root[row]] += step

    def _moved(self, root: int, *, spec_generation: bool = False) -> None:
        self.changes.add(root)
        if spec_generation:
            self.spec_changes.add(root)

    # --- classes and distinct values

    def _grown(self, size: int) -> None:
        for column in self._by_number:
            column.grow(size)

    def _drop_cached(self) -> None:
        """Drop what readers have cached by number."""
        self.epoch += 1
        self._caches.clear()

    def _emptied(self, row: int) -> None:
        for column in self._by_number:
            column.root_free[row] = 0

    def _column(self, name: str) -> ClassColumns:
        column = self._columns.get(name)
        if column is None:
            column = self._columns[name] = ClassColumns(name, len(self._by_number), self.size)
            self._by_number.append(column)
            self._drop_cached()
        return column

    def _add_class(self, row: int, column: ClassColumns) -> None:
        classes = self.class_sets.values[self.classes[row]]
        if column.number not in classes:
            self.classes[row] = self.class_sets.id_of(tuple(sorted((*classes, column.number))))

    def _sweep(self) -> None:
        """Remove distinct values and classes that no row has any more, once there are enough of them."""
        gathered = len(self.trait_sets) + len(self.aggregate_sets) + len(self.class_sets)
        gathered += sum(len(column.kinds) + CLASS_WEIGHS for column in self._by_number)
        if gathered < self._sweep_at:
            return
        for values, numbers in self._numbered():
            numbers[: self.top] = values.keep(np.unique(numbers[: self.top]))[numbers[: self.top]]
        self._keep_columns()
        left = sum(len(values) for values, _ in self._numbered()) + CLASS_WEIGHS * len(self._by_number)
        self._sweep_at = max(SWEEP_FROM, 2 * left)
        self._drop_cached()

    def _keep_columns(self) -> None:
        """Free the columns of classes that no row has, and number the distinct inventories of the others anew."""
        left = sorted({number for classes in self.class_sets.values for number in classes})
        self._by_number = [self._by_number[number] for number in left]
        moved = {old: new for new, old in enumerate(left)}
        for number, column in enumerate(self._by_number):
            column.number = number
        self.class_sets.replace_values(lambda classes: tuple(moved[number] for number in classes))
        self._columns = {column.name: column for column in self._by_number}

    def _numbered(
        self,
    ) -> Iterator[
        tuple[Distinct[tuple[str, ...]] | Distinct[tuple[int, ...]] | Distinct[InventoryNumbers], NDArray[np.int32]]
    ]:
        yield self.trait_sets, self.traits
        yield self.aggregate_sets, self.aggregates
        yield self.class_sets, self.classes
        for column in self._by_number:
            yield column.kinds, column.kind
