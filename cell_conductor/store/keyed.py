"""Rows that are one value under a key. `unknown_machines` and `fence_rows` decide what may replace which, from the
value on record and the one that is given; an adapter reads, locks and writes them in one transaction.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from enum import StrEnum
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

import msgspec
import structlog
from msgspec import DecodeError, Struct

from bus.contracts.base import DatabaseMark, reason_of
from bus.faults import DatabaseForbidden, Transient
from bus.persistence.guarded_statement import Conflict
from cell_conductor import metrics
from cell_conductor.state.database_marks import RecordedMarks, Stated, is_behind
from cell_conductor.state.lease import Leader, Lease

log = structlog.get_logger(__name__)

MAX_TRIES = 10  # of one transaction
MAX_LOSSES_NAMED = 1_000
MAX_ABSENT = 10_000  # services; one beyond them is looked at with the instances that wait for it

Key = TypeVar("Key", bound="str | tuple[str, ...]")
Value = TypeVar("Value", bound=Struct)
Given = ParamSpec("Given")
Result = TypeVar("Result")


class KeyedTable(Struct, Generic[Key, Value], frozen=True):
    """One table of values by key."""

    name: str
    columns: tuple[str, ...]  # the columns of the key
    type: type[Value]  # the type of a value
    key: Callable[[Value], Key]  # the key of a value
    # What a row counts as if its record cannot be read. It proves nothing, and the next write replaces it.
    unread: Callable[[Key], Value]

    def decoded(self, key: Key, record: str) -> Value:
        """The value of a row. One that cannot be read costs no other."""
        try:
            value = msgspec.json.decode(record, type=self.type)
            if self.key(value) == key:
                return value
            reason = "it has another key"
        except (DecodeError, ValueError) as error:
            reason = reason_of(error)
        named = key if isinstance(key, str) else " ".join(key)
        metrics.STEPS_FAILED.labels(self.name, "read").inc()
        log.error("keyed.unreadable", table=self.name, key=named, reason=reason, cause=named)
        return self.unread(key)


class Lock(StrEnum):
    """What others may do to the rows found until the end of the transaction, as SQL says it."""

    NONE = ""
    SHARE = "FOR SHARE OF t"  # lock them in the same way
    UPDATE = "FOR UPDATE OF t"  # only read them


class KeyedRows(Protocol):
    """The rows of a cell in one transaction. Each call takes its locks in the order of the keys."""

    async def read(self, table: KeyedTable[Key, Value], limit: int | None = None) -> list[Value]:
        """All values of a table, in the order of their keys; the first ones, where there is a limit."""

    async def find(
        self, table: KeyedTable[Key, Value], keys: Collection[Key], lock: Lock = Lock.NONE
    ) -> dict[Key, Value]:
        """The values on record under these keys."""

    async def put(self, table: KeyedTable[Key, Value], values: Iterable[Value], over: Mapping[Key, Value]) -> None:
        """Record these, each under its key. over: those on record, as they were found for update: another transaction
        may have inserted a value that was not found, which raises Conflict.
        """

    async def delete(self, table: KeyedTable[Key, Any], keys: Collection[Key]) -> None:
        """Delete what is on record under these keys, which were found for update."""

    async def expect_same_database(self) -> None:
        """Raises Unrecognised."""

    async def incarnation(self) -> int:
        """Of the database on record. Raises Unrecognised where it has been emptied."""

    async def is_needed(self, fence_of: str) -> bool:
        """Whether an evacuation from this host has commanded a destination."""

    async def touching(self, host_uuid: str, after: str, limit: int) -> list[str]:
        """The instances that have, or may have, a machine on this host: in order of uuids, above `after`."""


def absent_with(stated: Mapping[str, bool], silent: Collection[str], without: Collection[str] = ()) -> dict[str, bool]:
    """The services that have not listed. stated: what operators have stated of them meanwhile."""
    absent = sorted({*silent, *without})[:MAX_ABSENT]
    return {name: name in without or stated.get(name, False) for name in absent}


class DatabaseState(StrEnum):
    """What the database is, compared with what others state of it."""

    SAME = "same"
    TAKEN_OVER = "taken over"  # by another server, which lacks nothing
    BEHIND = "behind"  # it was restored


class DatabaseIdentity(Struct):
    """The state of its database that a conductor last saw."""

    database_id: str = ""
    incarnation: int = 1
    is_recovering: bool = False
    mark: DatabaseMark = DatabaseMark()  # the highest that it had, by what this process has read and committed
    read: RecordedMarks | None = None  # the marks on record on the server that it is on; None: not read yet

    @property
    def state(self) -> tuple[str, int]:
        """What a write is guarded by: its identity, and the incarnation of it."""
        return self.database_id, self.incarnation

    @property
    def recorded(self) -> RecordedMarks:
        """What the database has on record, as far as this process knows."""
        return self.read or RecordedMarks(DatabaseMark())

    def load(self, read: RecordedMarks) -> None:
        """This is on record. Of another incarnation nothing is known to be on disk."""
        self.read, self.incarnation = read, read.incarnation
        is_same = self.incarnation == self.mark.database_incarnation
        self.mark = (self.mark if is_same else DatabaseMark(self.incarnation)).joined(read.own)

    def record_sent(self, mark: DatabaseMark) -> None:
        """A commit is on disk."""
        if mark.database_incarnation == self.mark.database_incarnation:
            self.mark = self.mark.joined(mark)
            if self.read is not None:
                self.read = RecordedMarks(self.read.own.joined(mark), self.read.ended)


class Unrecognised(Transient):
    """The database was restored, and this process has not recognised that. A sweep will."""

    code = "cell.database_restored"

    def __init__(self) -> None:
        super().__init__("the database was restored, which has to be recognised first")


class Recovering(Transient):
    """The cell's database was restored, and what is true of its instances is not known yet. Nothing else is started:
    what comes meanwhile waits, and uses up no retry.
    """

    code = "cell.recovering"

    def __init__(self) -> None:
        super().__init__("the cell recovers from the set-back of its database")


class DatabaseOutdated(DatabaseForbidden):
    """Another conductor goes by a later incarnation of the cell's database than the one on record."""

    # This is an old copy of it, and whoever commands by the later one must not be commanded against. The process ends.

    code = "database.outdated"


def state_of(recorded: RecordedMarks, stated: Stated, own: DatabaseMark, *, is_on_other_server: bool) -> DatabaseState:
    """The state of a database with these marks on record. own: what this process knew before. is_on_other_server: on
    another server than recorded. Raises DatabaseOutdated, and Unrecognised: it is not known yet.
    """
    # Where a service is up and has not stated its mark, another server counts as behind.
    incarnation, is_outdated = recorded.incarnation, recorded.incarnation < stated.conductor
    if not is_on_other_server and is_outdated:
        raise DatabaseOutdated(
            f"it is incarnation {incarnation} of the cell's database, and incarnation {stated.conductor} commands"
        )
    is_old = is_outdated or any(is_behind(recorded, one) for one in (own, *stated.marks))
    if not is_old and not is_on_other_server:
        return DatabaseState.SAME
    if not stated.is_known:
        raise Unrecognised
    return DatabaseState.BEHIND if is_old or not stated.is_whole else DatabaseState.TAKEN_OVER


class RowsContended(Transient):
    """Others have inserted a row first each time that a transaction was tried."""

    code = "keyed.contended"

    def __init__(self) -> None:
        super().__init__(f"others have inserted its rows first, {MAX_TRIES} times")


class Keyed(Protocol):
    """An adapter. Each write of a leader of the leases is one statement, guarded by what `LeaseStore` has decided on,
    and by the state of the database, so a paused leader holds no lock for which the next one waits.
    """

    def transaction(self) -> AbstractAsyncContextManager[KeyedRows]:
        """Commits at the end, rolls back on an exception."""

    async def leader(self) -> tuple[Leader, float]:
        """The leader on record, and the time by the database's clock."""

    async def write_leader(self, before: Leader, after: Leader) -> bool:
        """Record the next leader. False: another one is on record meanwhile, or the database was restored, as below."""

    async def record(self, term: int, leases: Mapping[str, Lease], removed: Collection[str]) -> bool:
        """Record these leases, by service, and delete those of `removed`. False: there is a newer term, or the database
        was restored, which this process has not recognised: what it knows of the record is of another one.
        """


class KeyedStore:
    """Base of the stores of keyed values."""

    def __init__(self, keyed: Keyed) -> None:
        self.keyed = keyed


Store = TypeVar("Store", bound=KeyedStore)


def in_transaction(
    work: Callable[Concatenate[Store, KeyedRows, Given], Awaitable[Result]],
) -> Callable[Concatenate[Store, Given], Coroutine[Any, Any, Result]]:
    """A method that is given the rows of a transaction. It is done again when another has inserted a row first, which
    it finds then. Raises RowsContended.
    """

    @wraps(work)
    async def run(store: Store, /, *given: Given.args, **named: Given.kwargs) -> Result:
        for _ in range(MAX_TRIES):
            with suppress(Conflict):
                async with store.keyed.transaction() as rows:
                    return await work(store, rows, *given, **named)
        raise RowsContended

    return run
