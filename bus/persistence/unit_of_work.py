"""The optimistic unit of work: decides on cached rows, and writes everything at the end if no row that it read has
changed; otherwise it raises `Conflict`, writes nothing, and the work is repeated with locks (`OptimisticFirst`). A
worker subclasses `WriteSet` and `OptimisticUnitOfWork`, and writes a `RowStore` for each adapter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from msgspec import Struct

from bus.persistence.group_flush import FlushedDatabase
from bus.persistence.guarded_statement import Conflict
from bus.persistence.outbox import OutboxMessage
from bus.persistence.relay import Relay

Row = TypeVar("Row")
Row_co = TypeVar("Row_co", covariant=True)
Writes = TypeVar("Writes", bound="WriteSet")
Writes_contra = TypeVar("Writes_contra", bound="WriteSet", contravariant=True)
Unit = TypeVar("Unit")
Emitting = TypeVar("Emitting", bound="EmittingUnit")


# The bound of cached rows: more than are in use at once, and few enough to take little memory.
MAX_CACHED = 5_000


class WriteSet(Struct, kw_only=True):
    """Everything that one unit writes."""

    # the versions of all rows that it has read, before which the database had had so many `losses`: on another server
    # they prove nothing
    versions: dict[str, int] = {}
    connection_losses: int = 0
    outbox: list[OutboxMessage] = []  # messages to publish afterwards
    durable: bool = True  # whether the commit waits for the disk

    def is_empty(self) -> bool:
        """Whether there is nothing to write and nothing to compare."""
        return not (self.versions or self.outbox)


class Committed(Struct, frozen=True):
    """A committed write set: the version of the written rows, and the outbox rows as `outbox.add` returns them."""

    version: int
    outbox_rows: Sequence[int]


class RowStore(Protocol[Row_co, Writes_contra]):
    """The rows below a unit of work. Adapters: each worker's `store.postgres` and `store.memory`."""

    async def read(self, keys: Collection[str]) -> Mapping[str, tuple[int, Row_co]]:
        """Rows with their versions, without locks."""

    async def write(self, writes: Writes_contra) -> Committed:
        """Write the whole set or nothing. Raises PreconditionFailed."""


class EmittingUnit(Protocol):
    """A unit of work that emits messages. rows: the outbox rows that hold them, once it has committed."""

    @property
    def rows(self) -> Sequence[int]:
        """The ids of the outbox rows, as `outbox.add` returns them."""

    @property
    def outbox(self) -> Sequence[OutboxMessage]:
        """The messages, in order."""


class VersionCache(Generic[Row]):
    """Rows by key with their versions. The oldest rows are evicted first, and all of them when a connection is lost. A
    server that has crashed may have lost its last commits and gives their transaction numbers again, so a row that
    another process has written since may have the version of a lost row.
    """

    def __init__(self, database: FlushedDatabase) -> None:
        self._database = database
        self._connection_losses = database.connection_losses
        self._rows: OrderedDict[str, tuple[int, Row]] = OrderedDict()

    @property
    def connection_losses(self) -> int:
        """The number of connections that the database has lost."""
        return self._database.connection_losses

    def get(self, key: str) -> tuple[int, Row] | None:
        """The version and the row, or None."""
        self._clear_after_loss()
        return self._rows.get(key)

    def put(self, version: int, rows: Mapping[str, Row]) -> None:
        """Keep rows that one transaction has written."""
        self._clear_after_loss()
        for key, row in rows.items():
            self._rows[key] = version, row
            self._rows.move_to_end(key)
        while len(self._rows) > MAX_CACHED:
            self._rows.popitem(last=False)

    def invalidate(self, keys: Collection[str]) -> None:
        """Drop rows that may have changed."""
        for key in keys:
            self._rows.pop(key, None)

    def _clear_after_loss(self) -> None:
        if self._connection_losses != self._database.connection_losses:
            self._connection_losses = self._database.connection_losses
            self._rows.clear()


class OptimisticUnitOfWork(Generic[Row, Writes]):
    """Reads from the cache, collects a write set, and writes it at the end of its `async with` block."""

    # The cache is nearly always right, because one process handles all messages of an instance: a unit costs one round
    # trip instead of five.

    def __init__(self, rows: RowStore[Row, Writes], cache: VersionCache[Row], writes: Writes) -> None:
        self._rows = rows
        self._cache = cache
        self._after: dict[str, Row] = {}
        self.writes = writes
        self.writes.connection_losses = cache.connection_losses
        self.rows: Sequence[int] = ()  # of the outbox, once committed

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # Before the write, which may be cancelled or lose its connection; and after an error, which an outdated row may
        # have led to: no commit compares it, and the next unit would fail by the same row.
        self.invalidate()
        if error is None:
            await self.commit()

    async def _read(self, keys: Collection[str], *, absent: Collection[str] = ()) -> dict[str, Row]:
        """Return rows from the cache. Rows that are not cached are read, unless they are expected to be absent."""
        found: dict[str, Row] = {}
        missing: list[str] = []
        for key in dict.fromkeys(keys):
            cached = self._cache.get(key)
            if cached is not None:
                self.writes.versions[key], found[key] = cached
            elif key not in absent:
                missing.append(key)
        if missing:
            for key, (version, row) in (await self._rows.read(missing)).items():
                self.writes.versions[key], found[key] = version, row
        return found

    @property
    def outbox(self) -> Sequence[OutboxMessage]:
        """The messages to publish after the commit."""
        return self.writes.outbox

    def invalidate(self) -> None:
        """Drop every row of this unit from the cache: another process may have written it."""
        self._cache.invalidate({*self.writes.versions, *self._after})

    async def commit(self) -> None:
        """Write the whole set. Raises Conflict."""
        if self.writes.is_empty():
            return
        committed = await self._rows.write(self.writes)
        self.rows = committed.outbox_rows
        if (
            self.writes.connection_losses == self._cache.connection_losses
        ):  # a server that was lost since may give this version again
            self._cache.put(committed.version, self._after)


@asynccontextmanager
async def published(relay: Relay | None, unit: AbstractAsyncContextManager[Emitting]) -> AsyncIterator[Emitting]:
    """Run a unit, and pass its messages to the relay after the commit."""
    assert relay is not None, "publish_through() first"
    async with unit as begun:
        yield begun
    relay.send(begun.rows, begun.outbox)


class OptimisticFirst(Generic[Unit]):
    """The units of one piece of work: an optimistic one and, after a conflict, one more that locks."""

    def __init__(self, begin: Callable[[bool], AbstractAsyncContextManager[Unit]]) -> None:
        # makes a unit, optimistic or not. The caller loops `while units.has_next_try(): async with units as unit: ...`.
        self._begin = begin
        self._unit: AbstractAsyncContextManager[Unit] | None = None
        self._left = [False, True]  # the last is the next

    def has_next_try(self) -> bool:
        """Whether the work is to be done, or to be done once more."""
        return bool(self._left)

    async def __aenter__(self) -> Unit:
        self._unit = self._begin(self._left.pop())
        return await self._unit.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        assert self._unit is not None
        try:
            await self._unit.__aexit__(kind, error, trace)
        except Conflict:
            if not self._left:
                raise
            return True
        if isinstance(error, Conflict):
            return bool(self._left)
        self._left.clear()
        return False
