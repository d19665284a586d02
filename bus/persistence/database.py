"""One schema of one PostgreSQL: its connections, and faults divided by the reaction to them. Nothing here retries a
transaction: only the consumer knows its purpose. Which statements use asyncpg and which SQLAlchemy Core:
docs/decisions/0026.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from datetime import datetime
from functools import partial
from uuid import UUID, uuid5
from weakref import WeakKeyDictionary, WeakSet

import asyncpg
import structlog

from bus.clock import Clock, SystemClock
from bus.faults import DatabaseForbidden, DatabaseReplaced, DatabaseUnavailable, DatabaseUnprepared, Transient
from bus.persistence.address import CONNECTION_LOST, parse_database_url
from bus.persistence.database_faults import (
    FAILED_IN_USE,
    READ_ONLY,
    UNPREPARED_STATES,
    first_line,
    is_unusable,
    raise_fault,
    sqlstate,
)
from bus.persistence.group_flush import FlushingCommit, GroupFlush
from bus.persistence.revision import UnsupportedSchema, is_migrated, lock_key, migrating
from bus.persistence.rights import act_as_owner, check_rights, check_usage
from bus.retrying import DATABASE, Retrying
from bus.tracing.context import CURRENT

log = structlog.get_logger(__name__)

CONNECT_TIMEOUT_S = 10.0  # one try to connect to one server, the handshake included
STATEMENT_TIMEOUT_S = 25.0  # the server gives a statement up after this ...
COMMAND_TIMEOUT_S = 30.0  # ... and the client after this, when the server does not answer at all
IDLE_IN_TRANSACTION_S = 60.0  # a process that hangs in a transaction must not hold its locks for ever
POOL_TIMEOUT_S = 30.0  # the wait for a free connection; after it the process counts as overloaded
HUNG_S = 5.0  # a server that has ended nothing well for so long, while something waits for it, does no work
PROBE_CLOSE_S = 1.0  # the time that a closing process grants a probe under way

# A commit waits for the log up to its own record, and so for all before it; it needs something to commit.
FLUSH_LINGER_S = 0.002  # nothing waits for it but an acknowledgement
FLUSH = "SELECT pg_logical_emit_message(true, 'berth', '')"

# A plan made for every execution costs a tenth of a millisecond and more, which is most of a statement on one row.
# Statements that find their rows by key have one plan that is right whatever the sizes of the tables, if no other is
# allowed: `single`. Those of a transaction find as many as they find.
BY_KEY = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}
# A plan made while a table was empty reads all of it for ever; ours are cheap to make for each group.
BY_SIZE = {
    "plan_cache_mode": "force_custom_plan",
    "enable_seqscan": "on",
    "enable_hashjoin": "on",
    "enable_mergejoin": "on",
}
BEGIN = "; ".join(["BEGIN", *(f"SET LOCAL {name} = {value}" for name, value in BY_SIZE.items())])

PLACES = UUID("5d0e9f57-6f6a-4b7e-8c1c-3a1d2f5b8c12")  # so that these uuids equal no others

TRY_LOCK = "SELECT pg_try_advisory_xact_lock(hashtextextended($1, 0))"
IS_THERE = "SELECT to_regnamespace($1) IS NOT NULL"
SCHEMA_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_\-]{0,62}")


# The identity of a worker's database: a uuid made once with its schema, in a table of one row. A backup takes it along,
# so a restored database is the same one; an empty or another database is not.
READ_IDENTITY = "SELECT database_id::text FROM identity"
WATCH_S = 5.0  # the interval within which a worker notices that its schema was created anew


class Uses:
    """How many are under way, and since when none has ended well (seconds of the event loop's clock)."""

    def __init__(self) -> None:
        self._under_way = 0
        self._since = 0.0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count a use from its wait for a connection to its end. One that times out shows nothing of the server."""
        if not self._under_way:
            self._since = asyncio.get_running_loop().time()
        self._under_way += 1
        try:
            yield
            self._since = asyncio.get_running_loop().time()
        finally:
            self._under_way -= 1

    @property
    def hang(self) -> bool:
        """Whether something waits, and nothing has ended well for HUNG_S: the server hangs, or all wait for a lock."""
        return self._under_way > 0 and asyncio.get_running_loop().time() - self._since > HUNG_S


class Database:
    """One schema of one PostgreSQL. `search_path` is the schema alone; uuid columns come back as canonical text."""

    def __init__(self, url: str, schema: str, *, pool_size: int = 8, application_name: str = "") -> None:
        if not SCHEMA_NAME.fullmatch(schema):
            raise DatabaseForbidden(f"not a schema name: {schema!r}", code="database.schema_name")
        self.schema = schema
        self._address = parse_database_url(url)
        self._application_name = application_name or schema
        self._opened = self._closed = False
        # The connections to the server that is used now, and the idle ones of them, the last used first. asyncpg's own
        # pool costs a task for each connection that is given back: docs/decisions/0026.
        self._usable: WeakSet[asyncpg.Connection] = WeakSet()
        self._idle: list[asyncpg.Connection] = []
        self._slots = asyncio.Semaphore(pool_size)
        self._connection_losses = 0
        self._server: datetime | None = None  # the one last connected to, by its start
        self._servers = 0
        self._reachable = True
        self._uses = Uses()
        self._probing: asyncio.Task[None] | None = None
        self._group_flush = GroupFlush(self)
        self._retrying = Retrying(DATABASE, SystemClock(), random.Random())
        self._place = ""
        self._traced: dict[str, str | int] = {"db.system.name": "postgresql", "db.namespace": schema}

    @property
    def place(self) -> str:
        """A uuid of the PostgreSQL database of the schema, which is the same for every schema in it. Unlike a schema's
        identity it changes when a dump is restored elsewhere. It is known after `open`.
        """
        return self._place

    @property
    def connection_losses(self) -> int:
        """How often a connection was lost or given up, or led to another server than the one before: it may have
        restarted then, or another one be the primary, without the commits that were not on disk.
        """
        return self._connection_losses

    @property
    def servers(self) -> int:
        """How often a connection led to another server than the one before, or to the same one started anew."""
        return self._servers

    @property
    def ready(self) -> bool:
        """Whether it is open, the server takes writes, and something ends while something waits (for /readyz).

        The server is probed when a connection is lost or a write refused, and then until it takes writes again.
        """
        return self._opened and self._reachable and not self._uses.hang

    async def open(self, migrations: str | None = None) -> None:
        """Create the schema or upgrade it to head by `migrations`, the package that holds `versions/`; wait, and log
        it, while the server is unavailable. Of several processes an advisory lock lets one migrate.
        """
        try:
            await self._retrying.call(lambda: self._prepare(migrations), on_failure=self._log_waiting)
        except BaseException:
            await self._disconnect()  # what could not be opened is not closed
            raise
        self._opened = True

    async def close(self) -> None:
        """Close every connection; one that is in use when it is given back."""
        self._opened = False
        await self._group_flush.close()
        self._closed = True
        if (probing := self._probing) is not None:
            await asyncio.wait({probing}, timeout=PROBE_CLOSE_S)  # a connection being made should not be cut off
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)
        await self._disconnect()

    def raw(self) -> AbstractAsyncContextManager[asyncpg.Connection]:
        """An asyncpg connection inside a transaction: commits at the end, rolls back on an exception. Savepoints are
        not for it: asyncpg's `Connection.transaction` refuses to begin one. A json column comes back as text.
        """
        return self._raw(begin=True)

    def single(self) -> AbstractAsyncContextManager[asyncpg.Connection]:
        """An asyncpg connection on which every statement is a transaction of its own and is planned once (BY_KEY). It
        is for statements that find their rows by key, whatever the sizes of the tables.
        """
        return self._raw(begin=False)

    async def flush(self) -> None:
        """Return when everything committed here before is on disk. Messages published after these commits are sent
        first: the broker's flush would otherwise wait for this one.
        """
        await asyncio.sleep(FLUSH_LINGER_S)
        async with self.single() as connection:
            await connection.execute(FLUSH)

    def flushed(self, losses: int) -> asyncio.Future[None]:
        """Done when everything that was committed here so far is on disk; see `GroupFlush.after`."""
        return self._group_flush.after(losses)

    def flush_by_commit(self, connection: asyncpg.Connection) -> AbstractContextManager[FlushingCommit]:
        """Around a commit on this connection: it may be the flush that `flushed` waits for; see `GroupFlush.by_commit`.
        On a server that was left since the connection was taken, it flushes nothing of what that waits for.
        """
        if connection not in self._usable:
            return nullcontext(FlushingCommit(wanted=False))
        return self._group_flush.by_commit()

    @asynccontextmanager
    async def _raw(self, *, begin: bool) -> AsyncIterator[asyncpg.Connection]:
        """One transaction in the trace and among the uses, from the wait for a connection to its end."""
        scope = CURRENT.get()
        span = None if scope is None else scope.start_span("transaction", **self._traced)
        try:
            with self._uses.one():
                await self._slot()
                try:
                    connection = await self._take()
                    try:
                        if begin:
                            await connection.execute(BEGIN)
                        yield connection
                        if begin:
                            await connection.execute("COMMIT")
                    except FAILED_IN_USE as error:
                        if is_unusable(error):
                            self._drop(connection)
                        self._failed(error)
                        if begin:
                            await self._roll_back(connection)
                        if sqlstate(error) in UNPREPARED_STATES and not connection.is_closed():
                            await check_usage(connection, self.schema)
                        raise_fault(error, closed=connection.is_closed())
                    except BaseException:
                        if begin:
                            await self._roll_back(connection)
                        raise
                    finally:
                        self._release(connection)
                finally:
                    self._slots.release()
        finally:
            if span is not None:
                span.end()

    async def _slot(self) -> None:
        if not self._slots.locked():
            await self._slots.acquire()
            return
        try:
            async with asyncio.timeout(POOL_TIMEOUT_S):
                await self._slots.acquire()
        except TimeoutError:
            raise Transient("no free database connection", code="database.busy") from None

    async def _take(self) -> asyncpg.Connection:
        """The last used connection that lives, or a new one: so the others stay idle."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                return connection
        try:
            connection = await self._connect()
        except (*CONNECTION_LOST, TimeoutError) as error:
            # Before it was ever reached, what is wrong with the address is told apart from what a wait helps against.
            closed = self._opened or isinstance(error, asyncpg.InterfaceError | asyncpg.InternalClientError)
            if self._opened:
                self._probe_server()
            raise_fault(error, closed=closed)
        connection.add_termination_listener(self._ended)
        return connection

    def _release(self, connection: asyncpg.Connection) -> None:
        if connection not in self._usable or self._closed or connection.is_closed() or connection.is_in_transaction():
            self._drop(connection)
        else:
            self._idle.append(connection)

    def _drop(self, connection: asyncpg.Connection) -> None:
        """End a session that nothing can follow on, or count it as lost where it has ended."""
        if connection.is_closed():
            self._ended(connection)
        self._usable.discard(connection)
        connection.terminate()

    async def _roll_back(self, connection: asyncpg.Connection) -> None:
        """Also where a BEGIN was cut off: the driver does not know yet that the server has carried it out."""
        if not connection.is_closed():
            try:
                await connection.execute("ROLLBACK")
            except FAILED_IN_USE:
                self._drop(connection)

    def _failed(self, error: Exception) -> None:
        """Probe the server after a connection that ended, or was given up because no answer came; leave a server that
        was made read-only: it is no longer the primary.
        """
        if not is_unusable(error):
            return
        self._probe_server()
        self._connection_losses += 1
        if sqlstate(error) == READ_ONLY:
            self._leave_server()

    def _leave_server(self) -> None:
        """Use none of its connections again. Those in use are dropped when they are given back."""
        self._usable.clear()
        while self._idle:
            self._drop(self._idle.pop())

    def _ended(self, connection: asyncpg.Connection) -> None:
        """The server has ended a session, or the network; a session that was ended here is not among the usable."""
        if connection in self._usable:
            self._usable.discard(connection)
            self._connection_losses += 1
            self._probe_server()

    async def _disconnect(self) -> None:
        while self._idle:
            connection = self._idle.pop()
            self._usable.discard(connection)
            await connection.close()

    async def _connect(self, *, patient: bool = False) -> asyncpg.Connection:
        """patient: for a migration, which may take longer than any statement of the running system."""
        settings = {
            "search_path": f'"{self.schema}"',
            "application_name": self._application_name[:63],
            "idle_in_transaction_session_timeout": _ms(0 if patient else IDLE_IN_TRANSACTION_S),
            "statement_timeout": _ms(0 if patient else STATEMENT_TIMEOUT_S),
            # Our tables are read by key and are in memory or on an SSD: a thousand keys of 100,000 are looked up.
            "random_page_cost": "1.1",
            "jit": "off",  # the statements are short; to compile one costs more than to run it
        }
        connection = await self._address.connect(
            timeout_s=CONNECT_TIMEOUT_S,
            command_timeout_s=None if patient else COMMAND_TIMEOUT_S,
            settings={**settings, **(BY_SIZE if patient else BY_KEY)},
        )
        try:
            await connection.set_type_codec(
                "uuid", schema="pg_catalog", encoder=_uuid_bytes, decoder=_uuid_text, format="binary"
            )
            self._note_server(await connection.fetchval("SELECT pg_postmaster_start_time()"))
            self._usable.add(connection)
        except BaseException:
            connection.terminate()  # nobody else has it yet: a cancelled caller must not leak it
            raise
        return connection

    def _note_server(self, started_at: datetime) -> None:
        """Leave the server before, if a new connection leads to another: that one flushes nothing of its commits."""
        if self._server not in {None, started_at}:
            log.warning("database.other_server", schema=self.schema, database=str(self._address))
            self._connection_losses += 1
            self._servers += 1
            self._leave_server()
        self._server = started_at

    def _probe_server(self) -> None:
        """Learn whether the server still answers."""
        if not self._closed and self._probing is None:
            self._probing = asyncio.get_running_loop().create_task(self._probe(), name=f"{self.schema} database probe")

    async def _probe(self) -> None:
        """Probe the server until it takes writes. It counts as unavailable from the first failure on."""

        async def ask() -> None:
            try:
                connection = await self._connect()
                try:
                    takes_writes = await connection.fetchval("SHOW transaction_read_only") == "off"
                finally:
                    connection.terminate()
            except CONNECTION_LOST as error:
                raise DatabaseUnavailable(first_line(error)) from error
            if not takes_writes:
                raise DatabaseUnavailable("the server takes no writes")

        try:
            await self._retrying.call(ask, on_failure=self._unreachable)
            self._reachable = True
        except Exception as error:  # nobody awaits the task
            log.error("database.probe_failed", schema=self.schema, reason=str(error))
        finally:
            self._probing = None

    def _unreachable(self, error: BaseException, failures: int) -> None:
        if self._reachable:
            self._log_waiting(error, failures)
        self._reachable = False

    async def _prepare(self, package: str | None) -> None:
        try:
            if self._idle or not await self._found(package):
                await self._make(package)
        except CONNECTION_LOST as error:
            raise_fault(error, closed=isinstance(error, asyncpg.InterfaceError | asyncpg.InternalClientError))
        except UnsupportedSchema as error:
            raise DatabaseForbidden(str(error), code=error.code) from error

    async def _found(self, package: str | None) -> bool:
        """Whether nothing needs to be created, which is the usual case. The connection is kept for later use."""
        async with self.raw() as connection:
            if not (
                await connection.fetchval(TRY_LOCK, lock_key(self.schema))
                and await connection.fetchval(IS_THERE, f'"{self.schema}"')
                and (package is None or await is_migrated(connection, package, self.schema))
            ):
                return False
            if package is not None:
                await check_rights(connection, self.schema)
            self._place = await _place_of(connection)
        return True

    async def _make(self, package: str | None) -> None:
        async with migrating(partial(self._connect, patient=True), self.schema) as (connection, driver):
            # Not `IF NOT EXISTS`: that needs the right to create schemas, though this one exists.
            if not await driver.fetchval(IS_THERE, f'"{self.schema}"'):
                await driver.execute(f'CREATE SCHEMA "{self.schema}"')
            if package is not None and not await is_migrated(driver, package, self.schema):
                await act_as_owner(driver, self.schema)
                async with _MIGRATING.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
                    from bus.persistence import migrations  # noqa: PLC0415  (why: in bus.persistence.revision)

                    await connection.run_sync(migrations.upgrade, package, self.schema)
                await is_migrated(driver, package, self.schema)  # raises when its tables are of another state
                await driver.execute("SET LOCAL ROLE NONE")
            if package is not None:
                await check_rights(driver, self.schema)
            self._place = await _place_of(driver)

    def _log_waiting(self, error: BaseException, failures: int) -> None:
        log.warning(
            "database.waiting",
            database=str(self._address),
            attempt=failures,
            reason=str(error),
        )


# The lock of the one migration that may run in this process: Alembic keeps its state in globals, and a migration waits
# for the database in the middle of it.
_MIGRATING: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


async def _place_of(connection: asyncpg.Connection) -> str:
    cluster = ""
    if await connection.fetchval("SELECT has_function_privilege('pg_control_system()', 'execute')"):
        cluster = await connection.fetchval("SELECT system_identifier::text FROM pg_control_system()")
    number = await connection.fetchval("SELECT oid::text FROM pg_database WHERE datname = current_database()")
    return str(uuid5(PLACES, f"{cluster}/{number}"))


async def read_identity(database: Database) -> str:
    """The identity of an open database."""
    async with database.raw() as connection:
        return str(await connection.fetchval(READ_IDENTITY))


async def watch_identity(database: Database, known: Callable[[], str], clock: Clock) -> None:
    """A side task, until cancelled: ends the worker when its schema is made anew while it runs. Raises
    DatabaseReplaced, and DatabaseUnprepared where the schema is gone or has no identity. An unavailable database is
    compared later.
    """
    while True:
        await clock.sleep(WATCH_S)
        try:
            async with database.single() as connection:
                found = await connection.fetchval(READ_IDENTITY)
        except Transient:
            continue
        check_identity(found, known())


def check_identity(found: str | None, known: str) -> None:
    """Raise unless the identity that was read is the one that this process knows."""
    if found is None:
        raise DatabaseUnprepared("its table identity is empty: restore the database")
    if found != known:
        raise DatabaseReplaced(
            f"its identity is {found} now and was {known}: the schema was made anew, or another database took its "
            "place; restore it, or start the workers again and see `berth bus list`"
        )


def _ms(seconds: float) -> str:
    return str(int(seconds * 1000))


def _uuid_bytes(value: str | UUID) -> bytes:
    raw = bytes.fromhex(value.replace("-", "")) if isinstance(value, str) else value.bytes
    if len(raw) != 16:
        raise ValueError(f"not a UUID: {value!r}")
    return raw


def _uuid_text(value: bytes) -> str:
    text = value.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
