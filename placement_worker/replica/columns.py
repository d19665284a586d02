"""The parts of a replica: numbered distinct values, the columns of one class, the log of changed rows; and the claims
in
flight: allocations that were requested of placement and that the feed does not contain yet.

A provider shares nearly all its static values with many others: its traits, its aggregates, the numbers of its
inventories. Such values are stored once and numbered, and a row holds the number. A predicate about traits is so
evaluated once for each distinct set of traits, and one gather answers it for a million rows.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from placement_worker.domain.values import MAX_CAPACITY

Rows = NDArray[np.intp]
Amounts = NDArray[np.int64]
Ids = NDArray[np.int32]
Flags = NDArray[np.bool_]

T = TypeVar("T", bound=Hashable)
K = TypeVar("K")
V = TypeVar("V")

# The number of changes in the log. A search whose last refresh is older evaluates every row again.
CHANGES_KEPT = 1 << 15


class Recent(OrderedDict[K, V]):
    """Values by key, at most `MOST`; the least recently used one is dropped first."""

    MOST = 64

    def value(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of a key, which is made at its first use."""
        found = self.get(key)
        if found is None:
            found = self[key] = make()
            while len(self) > self.MOST:
                self.popitem(last=False)
        else:
            self.move_to_end(key)
        return found


class Distinct(Generic[T]):
    """Distinct values, numbered from 0 in the order of their first use; 0 is the empty value. Numbers are not reused
    until `keep` deals new ones.
    """

    def __init__(self, empty: T) -> None:
        self.values: list[T] = [empty]
        self._ids: dict[T, int] = {empty: 0}

    def __len__(self) -> int:
        return len(self.values)

    def id_of(self, value: T) -> int:
        """Return the number of a value; a new value gets the next number."""
        found = self._ids.get(value)
        if found is None:
            found = self._ids[value] = len(self.values)
            self.values.append(value)
        return found

    def replace_values(self, replaced: Callable[[T], T]) -> None:
        """Replace every value by another one, which gets its number. Distinct values must stay distinct."""
        self.values = [replaced(value) for value in self.values]
        self._ids = {value: number for number, value in enumerate(self.values)}

    def keep(self, used: NDArray[np.int32]) -> Ids:
        """Remove the values whose number is not in `used`. Returns the new numbers by old number."""
        survivors = sorted({0, *used.tolist()})
        moved = np.zeros(len(self.values), dtype=np.int32)
        moved[survivors] = np.arange(len(survivors), dtype=np.int32)
        self.values = [self.values[old] for old in survivors]
        self._ids = {value: number for number, value in enumerate(self.values)}
        return moved


class LookupTable:
    """A function of distinct values, evaluated once for each value and read by number.

    answers: a function that returns, for a number, the answers of all values from that number on.
    """

    def __init__(self, values: Distinct[T], answers: Callable[[int], NDArray[np.int64]]) -> None:
        self._values: Sized = values
        self._answers_from = answers
        self._answers: NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def __call__(self, numbers: Ids) -> NDArray[np.int64]:
        """Return the answers for rows with these numbers."""
        known = self._answers.size
        if known < len(self._values):
            self._answers = np.concatenate([self._answers, self._answers_from(known)])
        return self._answers[numbers]


def lookup_table(values: Distinct[T], answer: Callable[[T], int]) -> LookupTable:
    """Return the lookup table of a function that is called for each value."""
    return LookupTable(
        values, lambda known: np.array([answer(value) for value in values.values[known:]], dtype=np.int64)
    )


class InventoryNumbers(NamedTuple):
    """The numbers of one inventory. capacity: as placement computed it when the inventory was written."""

    capacity: int
    min_unit: int
    max_unit: int
    step_size: int
    total: int
    reserved: int
    allocation_ratio: float


NO_INVENTORY = InventoryNumbers(0, 1, 0, 1, 0, 0, 1.0)

# The columns of DistinctInventories.
CAPACITY, MIN_UNIT, MAX_UNIT, STEP_SIZE, TOTAL, UNRESERVED = range(6)


class DistinctInventories(Distinct[InventoryNumbers]):
    """The distinct inventories of one class, whose numbers are also kept as columns: requested amounts vary, and a site
    may have as many distinct inventories as hosts.
    """

    def __init__(self) -> None:
        super().__init__(NO_INVENTORY)
        self._columns: NDArray[np.int64] = np.zeros((6, 16), dtype=np.int64)
        self._filled = 0

    def columns(self) -> NDArray[np.int64]:
        """The columns by number: CAPACITY, MIN_UNIT, MAX_UNIT, STEP_SIZE, TOTAL and UNRESERVED, the capacity if nothing
        were reserved.
        """
        many = len(self.values)
        if self._filled < many:
            if self._columns.shape[1] < many:
                wider = np.zeros((6, 2 * many), dtype=np.int64)
                wider[:, : self._filled] = self._columns[:, : self._filled]
                self._columns = wider
            capacity, low, high, step, total, _, ratio = zip(*self.values[self._filled :], strict=True)
            for number, column in enumerate((capacity, low, high, step, total)):
                self._columns[number, self._filled : many] = column
            unreserved = np.minimum(np.array(total) * np.array(ratio), float(MAX_CAPACITY))
            self._columns[UNRESERVED, self._filled : many] = unreserved.astype(np.int64)
            self._filled = many
        return self._columns[:, :many]

    def keep(self, used: NDArray[np.int32]) -> Ids:
        """Remove the values whose number is not in `used`. Returns the new numbers by old number."""
        columns = self.columns()
        moved = super().keep(used)
        self._columns = columns[:, [0, *np.flatnonzero(moved).tolist()]]  # the empty value, 0, is always kept
        self._filled = len(self.values)
        return moved


class ClassColumns:
    """One resource class over all rows. The arrays start as untouched zero pages, so a rare class takes little memory.

    kind: the number of the distinct inventory (0: none). free: capacity - used - assumed, which may be negative.
    root_free: at the row of a root, the sum of the positive free amounts in its tree.
    """

    __slots__ = ("free", "kind", "kinds", "name", "number", "root_free", "used")

    def __init__(self, name: str, number: int, size: int) -> None:
        self.name = name
        self.number = number
        self.kinds = DistinctInventories()
        self.kind: Ids = np.zeros(size, dtype=np.int32)
        self.used: Amounts = np.zeros(size, dtype=np.int64)
        self.free: Amounts = np.zeros(size, dtype=np.int64)
        self.root_free: Amounts = np.zeros(size, dtype=np.int64)

    def grow(self, size: int) -> None:
        """Make room for `size` rows."""
        for column in ("kind", "used", "free", "root_free"):
            setattr(self, column, grown(getattr(self, column), size))


class ChangedRows:
    """The log of the last changed rows, in order. A position is the number of changes before it."""

    __slots__ = ("_rows", "end")

    def __init__(self, end: int = 0) -> None:
        self._rows: deque[int] = deque(maxlen=CHANGES_KEPT)
        self.end = end

    def add(self, row: int) -> None:
        """Record that a row has changed."""
        self._rows.append(row)
        self.end += 1

    def since(self, position: int) -> Rows | None:
        """The distinct rows that have changed at or after `position`, ascending; None when the log does not reach back
        that far.
        """
        many = self.end - position
        if many > len(self._rows):
            return None
        return np.array(sorted(set(islice(reversed(self._rows), many))), dtype=np.intp)


def grown(column: NDArray[np.generic], size: int, fill: int = 0) -> NDArray[np.generic]:
    """Return a longer copy of a column, filled up with `fill`."""
    longer = np.zeros(size, dtype=column.dtype)
    if fill:
        longer[column.size :] = fill
    longer[: column.size] = column
    return longer


# {class: amount} of one claim on one provider.
Share = dict[str, int]

NOTHING: Mapping[str, int] = {}


class Assumptions:
    """The amounts by key and provider, and their sums by provider. Every method that changes amounts returns the sums
    that have changed.
    """

    def __init__(self) -> None:
        self._by_key: dict[str, dict[str, Share]] = {}
        self._sums: dict[str, Share] = {}
        # Provider -> {key: generation and feed number at which that key's share there is counted by the feed}.
        self._awaited: dict[str, dict[str, tuple[int, int]]] = {}
        self._unconfirmed: set[str] = set()  # keys that were in flight when another incarnation began

    def keys(self) -> Iterator[str]:
        """The keys that have assumed amounts."""
        return iter(self._by_key)

    def providers(self) -> list[str]:
        """The providers that have assumed amounts."""
        return list(self._sums)

    def providers_of(self, key: str) -> list[str]:
        """The providers of which the key assumes amounts."""
        return list(self._by_key.get(key, ()))

    def amount(self, uuid: str, resource_class: str) -> int:
        """The assumed amount of one class of one provider, over all keys."""
        sums = self._sums.get(uuid)
        return 0 if sums is None else sums.get(resource_class, 0)

    def sums_of(self, uuid: str) -> Mapping[str, int]:
        """The assumed amounts of one provider, by class."""
        return self._sums.get(uuid, NOTHING)

    def add(self, key: str, allocations: Mapping[str, Mapping[str, int]]) -> Mapping[str, Sequence[str]]:
        """Add a key. The caller has dropped an earlier key of this name."""
        assert key not in self._by_key, key
        if allocations:
            self._by_key[key] = {uuid: dict(share) for uuid, share in allocations.items()}
        for uuid, share in allocations.items():
            sums = self._sums.setdefault(uuid, {})
            for name, amount in share.items():
                sums[name] = sums.get(name, 0) + amount
        return {uuid: list(share) for uuid, share in allocations.items()}

    def drop(self, key: str) -> Mapping[str, Sequence[str]]:
        """Drop a key with all its amounts."""
        return self._drop(key, self.providers_of(key))

    def confirm(
        self, key: str, generations: Mapping[str, int], reached: Sequence[str], sequence: int
    ) -> Mapping[str, Sequence[str]]:
        """Record that the claim of this key has succeeded. Its shares on the providers in `reached` are dropped now,
        the others when their provider reaches the given generation or a snapshot this feed number. All are dropped if
        another incarnation has begun since the key was added: the claim may have been lost with the former one,
        and then nothing comes that counts it.
        """
        if key in self._unconfirmed:
            return self.drop(key)
        touched = self._drop(key, reached)
        for uuid in self.providers_of(key):
            self._awaited.setdefault(uuid, {})[key] = (generations[uuid], sequence)
        return touched

    def mark_unconfirmed(self) -> None:
        """Record that another incarnation begins: what is in flight may have been claimed in the former one."""
        self._unconfirmed.update(self._by_key)

    def is_awaited(self, uuid: str) -> bool:
        """Whether a confirmed share waits for changes of this provider."""
        return uuid in self._awaited

    def awaited(self) -> list[str]:
        """The providers for whose changes confirmed shares wait."""
        return list(self._awaited)

    def reached(self, uuid: str, generation: int | None, snapshot: int = -1) -> dict[str, list[str]]:
        """Record that the provider has this generation (None: it was removed), and drop the confirmed shares that
        waited for it.

        snapshot: the feed number of the snapshot that contains the provider. The snapshot counts all claims up to this
        number, even if the generation is lower than the awaited one because the provider was deleted and created again.
        """
        touched: dict[str, list[str]] = {}
        for key, (wanted, sequence) in list(self._awaited.get(uuid, {}).items()):
            if generation is None or generation >= wanted or sequence <= snapshot:
                for provider, names in self._drop(key, [uuid]).items():
                    touched.setdefault(provider, []).extend(names)
        return touched

    def _drop(self, key: str, providers: Sequence[str]) -> dict[str, list[str]]:
        shares = self._by_key.get(key)
        touched: dict[str, list[str]] = {}
        if shares is None:
            return touched
        for uuid in providers:
            share = shares.pop(uuid)
            touched[uuid] = list(share)
            self._subtract(uuid, share)
            waiting = self._awaited.get(uuid)
            if waiting is not None and waiting.pop(key, None) is not None and not waiting:
                del self._awaited[uuid]
        if not shares:
            del self._by_key[key]
            self._unconfirmed.discard(key)
        return touched

    def _subtract(self, uuid: str, share: Share) -> None:
        sums = self._sums[uuid]
        for name, amount in share.items():
            left = sums[name] - amount
            assert left >= 0, (uuid, name, left)
            if left:
                sums[name] = left
            else:
                del sums[name]
        if not sums:
            del self._sums[uuid]
