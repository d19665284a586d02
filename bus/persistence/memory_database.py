"""The base of the in-memory stores: transactions with row locks, an outbox, handled messages, planned faults. It
behaves as the stores need PostgreSQL to (READ COMMITTED, deadlock errors, no writes of a lost connection, lost commits
after a crash). One process, one event loop; several `MemorySession`s share a `MemoryDatabase`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial
from typing import Any
from uuid import uuid4

from msgspec import Struct, structs

from bus.clock import Clock
from bus.faults import DatabaseUnavailable, Transient
from bus.persistence.group_flush import FlushingCommit, GroupFlush
from bus.persistence.outbox import OutboxMessage, Sweep, by_bus, encode_row, traced

LOCK_TIMEOUT_S = 25.0  # as bus.persistence.database: the server gives a waiting statement up after this
# A commit that did not wait for the disk is on disk after this at the latest: three turns of PostgreSQL's WAL
# writer.
UNFLUSHED_S = 0.6

# Called at each statement ("statement"), before ("commit") and after ("committed") each commit: it may wait, and it may
# raise the errors of a database there.
Pause = Callable[[str], Awaitable[None]]


async def turn(_: str) -> None:
    """The quiet pause: one turn of the loop, so that what can interleave does."""
    await asyncio.sleep(0)


class Row(Struct, frozen=True):
    """One outbox row."""

    bus: str
    body: bytes
    taken_at: float


class _Image(Struct, frozen=True):
    """The rows as they are on disk, and since when those in memory are newer."""

    since: float
    rows: dict[str, Any]


class _Lock:
    __slots__ = ("owner", "waiting")

    def __init__(self, owner: MemoryDatabaseTransaction) -> None:
        self.owner = owner
        self.waiting: deque[tuple[MemoryDatabaseTransaction, asyncio.Future[None]]] = deque()


class MemoryDatabase:
    """The server's side of one schema: committed rows and locks. It outlives the processes that use it. ROWS: the
    attributes that hold rows; who derives adds its own.
    """

    # A server that crashes takes back commits that did not wait for the disk and are not on disk yet, and gives the
    # numbers of those transactions again.

    ROWS: tuple[str, ...] = ("outbox", "handled", "row_versions", "commits")

    def __init__(self, clock: Clock, *, database_id: str | None = None) -> None:
        self.clock = clock
        self.database_id = str(uuid4()) if database_id is None else database_id  # its identity
        self.outbox: dict[int, Row] = {}
        self.handled: dict[tuple[str, str], float] = {}
        self.row_versions: dict[Hashable, int] = {}  # who wrote a row last, as xmin
        self.deadlocks = 0
        self.commits = 0  # the number of the last transaction that wrote
        self.taken_back = 0  # commits that crashes have undone
        self.on_commit: list[Callable[[], None]] = []
        self._locks: dict[Hashable, _Lock] = {}
        self._last_row = 0
        self._image: _Image | None = None

    def session(self, pause: Pause = turn) -> MemorySession:
        """One process's connections to this database."""
        return MemorySession(self, pause)

    def next_row(self) -> int:
        """A new outbox row's id: rolled back it leaves a hole, and no crash gives it again (outbox.NEW_ID)."""
        self._last_row += 1
        return self._last_row

    def crash(self) -> None:
        """The server dies and comes back with the state on disk. Its sessions are to be cut first."""
        image, self._image = self._image, None
        if image is None or self.clock.monotonic() - image.since > UNFLUSHED_S:
            return
        self.taken_back += self.commits - int(image.rows["commits"])
        for name, before in image.rows.items():
            now = getattr(self, name)
            if isinstance(now, dict | set):
                now.clear()
                now.update(before)
            elif isinstance(now, list):
                now[:] = before
            else:
                setattr(self, name, before)

    def write(self, writes: Sequence[Callable[[], None]], keys: Iterable[Hashable], *, durable: bool) -> int:
        """Commit: all writes at once; returns the transaction's number. Durable: the log is flushed up to here."""
        now = self.clock.monotonic()
        if durable:
            self._image = None
        elif self._image is None or now - self._image.since > UNFLUSHED_S:
            self._image = _Image(now, {name: _copy(getattr(self, name)) for name in self.ROWS})
        for write in writes:
            write()
        self.commits += 1
        self.row_versions.update(dict.fromkeys(keys, self.commits))
        for listener in self.on_commit:
            listener()
        return self.commits

    def is_locked(self, key: Hashable) -> bool:
        """Whether a transaction holds this row."""
        return key in self._locks

    async def acquire(self, transaction: MemoryDatabaseTransaction, key: Hashable) -> None:
        """Lock a row for a transaction; raises Transient for a circle, and when it takes too long."""
        lock = self._locks.get(key)
        if lock is None:
            self._locks[key] = _Lock(transaction)
            return
        if lock.owner is transaction:
            return
        if self._is_circle(transaction, lock):
            self.deadlocks += 1
            raise Transient(f"deadlock at {key}", code="database.deadlock")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        lock.waiting.append((transaction, future))
        transaction.waits_for = lock
        try:
            async with asyncio.timeout(LOCK_TIMEOUT_S):
                await future
        except TimeoutError:
            raise Transient(f"waited too long for {key}", code="database.timeout") from None
        finally:
            transaction.waits_for = None
            lock.waiting = deque(waiter for waiter in lock.waiting if waiter[1] is not future)

    def release(self, transaction: MemoryDatabaseTransaction, keys: Iterable[Hashable]) -> None:
        """Hand rows on to the transaction that has waited longest."""
        for key in keys:
            lock = self._locks.get(key)
            if lock is None or lock.owner is not transaction:
                continue
            while lock.waiting and (lock.waiting[0][1].done() or lock.waiting[0][0].ended):
                lock.waiting.popleft()
            if lock.waiting:
                lock.owner, future = lock.waiting.popleft()
                lock.owner.held[key] = None
                lock.owner.waits_for = None  # now, not when it runs again: until then it would wait for itself
                future.set_result(None)
            else:
                del self._locks[key]

    @staticmethod
    def _is_circle(waiting_transaction: MemoryDatabaseTransaction, lock: _Lock) -> bool:
        seen: _Lock | None = lock
        while seen is not None:
            if seen.owner is waiting_transaction:
                return True
            seen = seen.owner.waits_for
        return False


class MemoryDatabaseTransaction:
    """One transaction: it locks, promises writes, and all of them happen at its commit or none."""

    def __init__(self, session: MemorySession) -> None:
        self._session = session
        self._database = session.database
        self._writes: list[Callable[[], None]] = []
        self._written: dict[Hashable, None] = {}
        self.durable = True  # False: a crash of the server may take it back
        self.number = 0  # once it has written
        self.held: dict[Hashable, None] = {}
        self.waits_for: _Lock | None = None
        self.ended = False

    async def statement(self) -> None:
        """One round trip to the server, in which others get on."""
        await self._session.pause("statement")
        self._check()

    async def lock(self, keys: Iterable[Hashable]) -> None:
        """Lock rows in the order given, each until the end."""
        for key in keys:
            await self._database.acquire(self, key)
            self._check()
            self.held[key] = None

    def will(self, write: Callable[[], None], *keys: Hashable) -> None:
        """Do this at the commit. keys: of the rows that are written, for who wants to know their versions."""
        self._writes.append(write)
        self._written.update(dict.fromkeys(keys))

    def is_free(self, key: Hashable) -> bool:
        """Whether no other transaction holds this row (for SKIP LOCKED)."""
        return key in self.held or not self._database.is_locked(key)

    async def first_time(self, handler: str, message_ids: Iterable[str]) -> set[str]:
        """Record message ids as handled by this transaction; returns those not seen before."""
        await self.statement()
        ids = sorted(set(message_ids))
        # Also those on record: a transaction that inserts a row which another one is inserting waits for its end.
        await self.lock([("handled", handler, one) for one in ids])
        handled, now = self._database.handled, self._database.clock.time()
        fresh = {one for one in ids if (handler, one) not in handled}
        self.will(lambda: handled.update({(handler, one): now for one in sorted(fresh)}))
        return fresh

    async def is_handled(self, handler: str, message_id: str) -> bool:
        """Whether a message is on record as handled."""
        await self.statement()
        return (handler, message_id) in self._database.handled

    async def send_later(self, outgoing: Sequence[OutboxMessage]) -> list[int]:
        """Put messages into the outbox; returns the rows' ids."""
        if not outgoing:
            return []
        await self.statement()
        rows = {
            self._database.next_row(): Row(bus, encode_row(messages), self._database.clock.time())
            for bus, messages in by_bus(traced(outgoing)).items()
        }
        self.will(lambda: self._database.outbox.update(rows))
        return list(rows)

    async def commit(self) -> None:
        """All writes at once. Raises DatabaseUnavailable when the connection is lost before or after it."""
        await self._session.pause("commit")
        self._check()
        if self._writes:
            self.number = self._database.write(self._writes, self._written, durable=self.durable)
        self.end()
        await self._session.pause("committed")

    def end(self) -> None:
        """Give the rows back; reservations without a commit are dropped."""
        if self.ended:
            return
        self.ended = True
        self._writes = []
        self._session.transactions.pop(self, None)
        self._database.release(self, list(self.held))

    def _check(self) -> None:
        if self.ended:
            raise DatabaseUnavailable("the connection was lost")


class MemorySession:
    """One process's connections."""

    def __init__(self, database: MemoryDatabase, pause: Pause) -> None:
        self.database = database
        self.pause = pause
        self.transactions: dict[MemoryDatabaseTransaction, None] = {}
        self._group_flush = GroupFlush(self)
        self.connection_losses = 0  # connections that ended by themselves, as bus.persistence.database counts them
        self.servers = 0

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[MemoryDatabaseTransaction]:
        """Commits at the end, rolls back on an exception."""
        transaction = MemoryDatabaseTransaction(self)
        self.transactions[transaction] = None
        try:
            await transaction.statement()  # BEGIN; a pool that has no connection is found out here
            yield transaction
            await transaction.commit()
        except DatabaseUnavailable:
            self.connection_losses += 1
            raise
        finally:
            transaction.end()

    async def flush(self) -> None:
        """Return when all that was committed is on disk: one more commit, which waits for it."""
        async with self.transaction() as transaction:
            transaction.will(lambda: None)

    def flushed(self, losses: int) -> asyncio.Future[None]:
        """Done when all that was committed so far is on disk; see `GroupFlush.after`."""
        return self._group_flush.after(losses)

    def flush_by_commit(self) -> AbstractContextManager[FlushingCommit]:
        """Around a commit of this process: it may be the flush that `flushed` waits for; see `GroupFlush.by_commit`."""
        return self._group_flush.by_commit()

    def disconnect(self) -> None:
        """The connections are lost: a transaction that has not committed never happened."""
        self.connection_losses += 1
        self.servers += 1
        for transaction in list(self.transactions):
            transaction.end()


class MemoryRows:
    """The outbox of a MemoryDatabase, for a relay."""

    def __init__(self, session: MemorySession) -> None:
        self._session = session

    async def delete(self, row_ids: Sequence[int]) -> None:
        """Delete rows whose messages are confirmed."""
        outbox, gone = self._session.database.outbox, list(row_ids)
        with self._session.flush_by_commit() as commit:
            async with self._session.transaction() as transaction:
                transaction.durable = commit.wanted  # forgotten in a crash, a sweep repeats them
                transaction.will(lambda: _drop(outbox, gone))
            if commit.wanted:
                commit.is_done = True

    async def claim_stale(self, sweep: Sweep) -> list[tuple[int, bytes]]:
        """Rows older than this, by id, at most `limit` for each bus, and these; taking one makes it young again."""
        database = self._session.database
        with self._session.flush_by_commit() as commit:
            async with self._session.transaction() as transaction:
                if sweep.confirmed:
                    transaction.will(lambda: _drop(database.outbox, sorted(sweep.confirmed)))
                now = database.clock.time()
                taken: Counter[str] = Counter()
                old: list[int] = []
                for one, row in sorted(database.outbox.items(), key=lambda item: (item[1].taken_at, item[0])):
                    if row.taken_at >= now - sweep.age_s and one not in sweep.restored:
                        continue
                    if one not in sweep.confirmed and taken[row.bus] < sweep.limit and row.bus not in sweep.closed:
                        taken[row.bus] += 1
                        old.append(one)
                old = sorted(one for one in old if transaction.is_free(("outbox", one)))
                await transaction.lock([("outbox", one) for one in old])
                for one in old:
                    transaction.will(partial(_renew, database.outbox, one, now))
                # As with SKIP LOCKED: a row that another transaction has deleted by then is not returned.
                stale = [(one, found.body) for one in old if (found := database.outbox.get(one)) is not None]
            if sweep.confirmed:
                commit.is_done = True
        return stale

    async def purge_handled(self, keep_s: float, limit: int) -> None:
        """Drop old records of handled messages."""
        database = self._session.database
        async with self._session.transaction() as transaction:
            before = database.clock.time() - keep_s
            old = [key for key, at in database.handled.items() if at < before][:limit]
            transaction.will(lambda: _drop(database.handled, old))


def _drop(rows: dict[Any, Any], keys: Iterable[Hashable]) -> None:
    for key in keys:
        rows.pop(key, None)


def _renew(outbox: dict[int, Row], row_id: int, now: float) -> None:
    row = outbox.get(row_id)
    if row is not None:
        outbox[row_id] = structs.replace(row, taken_at=now)


def _copy(rows: Any) -> Any:
    return rows.copy() if isinstance(rows, dict | set | list) else rows
