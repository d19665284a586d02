"""One schema of one PostgreSQL: a bounded pool, named time-outs, and faults divided by the reaction to them.

Cold statements go through SQLAlchemy Core (`transaction`), hot ones through asyncpg itself (`raw`): same pool, same
faults. Nothing here retries a transaction; the consumer does, because it alone knows the purpose of the transaction.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from functools import partial
from typing import Any, NoReturn
from uuid import UUID, uuid5
from weakref import WeakKeyDictionary

import asyncpg
import structlog
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError, InvalidatePoolError, InvalidRequestError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from bus.clock import SystemClock
from bus.faults import DatabaseForbidden, DatabaseUnavailable, DatabaseUnprepared, Transient
from bus.persistence.address import CONNECTION_LOST, ServerUntrusted, parse_database_url
from bus.persistence.group_flush import FlushingCommit, GroupFlush
from bus.persistence.revision import UnsupportedSchema, is_migrated
from bus.persistence.uses import Uses
from bus.retrying import DATABASE, Retrying
from bus.tracing.context import CURRENT

log = structlog.get_logger(__name__)

CONNECT_TIMEOUT_S = 10.0  # one attempt to connect to one server, the handshake included
STATEMENT_TIMEOUT_S = 25.0  # the server gives a statement up after this ...
COMMAND_TIMEOUT_S = 30.0  # ... and the client after this, when the server does not answer at all
IDLE_IN_TRANSACTION_S = 60.0  # a process that hangs in a transaction must not hold its locks for ever
POOL_TIMEOUT_S = 30.0  # the wait for a free connection; after it the process counts as overloaded
PROBE_CLOSE_S = 1.0  # the time that a closing process grants a probe under way

# A commit waits for the log up to its own record, and so for all before it; it needs something to commit.
FLUSH_LINGER_S = 0.002  # nothing waits for it but an acknowledgement
FLUSH = "SELECT pg_logical_emit_message(true, 'berth', '')"

# A plan made for every execution costs a tenth of a millisecond and more, which is most of a statement on one row.
# Statements that find their rows by key have one plan that is right whatever the sizes of the tables, if no other is
# allowed.
BY_KEY = (
    "SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off; SET enable_hashjoin = off; "
    "SET enable_mergejoin = off"
)
BY_SIZE = "RESET plan_cache_mode; RESET enable_seqscan; RESET enable_hashjoin; RESET enable_mergejoin"

PLACES = UUID("5d0e9f57-6f6a-4b7e-8c1c-3a1d2f5b8c12")  # so that these uuids equal no others

LOCK = "hashtextextended(:key, 0)"
SCHEMA_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_\-]{0,62}")

# SQLSTATE (or its class) -> code of the Transient that it becomes. A longer key wins.
_UNAVAILABLE = "database.unavailable"
READ_ONLY = "25006"
TRANSIENT_STATES = {
    "08": _UNAVAILABLE,  # connection exceptions
    "53": _UNAVAILABLE,  # out of connections, memory or disk
    "57P": _UNAVAILABLE,  # shut down, crashed, starting up, database dropped
    "58": _UNAVAILABLE,  # system errors of the server's machine
    READ_ONLY: _UNAVAILABLE,  # the server is a standby: a failover is in progress
    "25P03": _UNAVAILABLE,  # idle in transaction for too long: the connection is gone
    "40001": "database.serialization",
    "40P01": "database.deadlock",
    "55P03": "database.locked",
    "57014": "database.timeout",
}
# The errors by which a transaction fails, its own and those of its connection.
FAILED_IN_USE = (
    DBAPIError,
    InvalidRequestError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    ConnectionError,
    TimeoutError,
)
# undefined_table, undefined_column, undefined_function, invalid_schema_name: no message is at fault.
UNPREPARED_STATES = ("42P01", "42703", "42883", "3F000")
FORBIDDEN_STATES = ("28", "3D000", "42501")


class _Held:
    """A connection out of its pool: SQLAlchemy's, and the driver's below it. server: how many were left before it."""

    __slots__ = ("by_key", "connection", "driver", "server")

    def __init__(self, connection: AsyncConnection, driver: asyncpg.Connection, server: int) -> None:
        self.connection, self.driver, self.server = connection, driver, server
        self.by_key = False


class Database:
    """One schema of one PostgreSQL. `search_path` is the schema alone; uuid columns come back as canonical text."""

    def __init__(self, url: str, schema: str, *, pool_size: int = 8, application_name: str = "") -> None:
        if not SCHEMA_NAME.fullmatch(schema):
            raise DatabaseForbidden(f"not a schema name: {schema!r}", code="database.schema_name")
        self.schema = schema
        self._address = parse_database_url(url)
        self._application_name = application_name or schema
        self._engine = self._make_engine(
            pool_size=pool_size,
            max_overflow=0,
            pool_timeout=POOL_TIMEOUT_S,
            pool_use_lifo=True,  # the last used connection is used first, so that others stay idle
        )
        self._opened = self._closed = False
        # To check a connection out of SQLAlchemy's pool and in again costs more than BEGIN and COMMIT together, so
        # between two transactions connections stay checked out, in this list, the last used first.
        self._spare: list[_Held] = []
        self._slots = asyncio.Semaphore(pool_size)
        self._pool_size = pool_size
        self._open = self._losses = self._left_servers = 0
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
    def losses(self) -> int:
        """The number of connections that were lost; the server may have restarted then, or another one be the primary,
        without the commits that were not on disk.
        """
        return self._losses

    @property
    def ready(self) -> bool:
        """Whether it is open, the server takes writes, and something ends while something waits (for /readyz).

        The server is probed when a connection is lost or a write refused, and then until it takes writes again.
        """
        return self._opened and self._reachable and not self._uses.hang

    @property
    def engine(self) -> AsyncEngine:
        """The pool itself, for metrics and tests; statements belong in `transaction` or `raw`."""
        return self._engine

    async def open(self, migrations: str | None = None) -> None:
        """Create the schema or upgrade it to head. While the server is unavailable, the call logs that and waits.

        `migrations` is the package that holds `versions/`. Several processes may open at once: an advisory lock lets
        one migrate and the others find it done.
        """
        try:
            await self._retrying.call(lambda: self._prepare(migrations), on_failure=self._log_waiting)
        except BaseException:
            await self._engine.dispose()  # what could not be opened is not closed
            raise
        self._opened = True

    async def close(self) -> None:
        """Close every connection of the pool."""
        self._opened = False
        await self._group_flush.close()
        self._closed = True
        if (probing := self._probing) is not None:
            await asyncio.wait({probing}, timeout=PROBE_CLOSE_S)  # a connection attempt should not be cut off
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)
        while self._spare:
            await self._spare.pop().connection.close()
        await self._engine.dispose()

    def transaction(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """A SQLAlchemy Core transaction: commits at the end, rolls back on an exception."""
        return self._transaction()

    def raw(self) -> AbstractAsyncContextManager[asyncpg.Connection]:
        """An asyncpg connection inside a transaction: commits at the end, rolls back on an exception."""
        return self._raw()

    def single(self) -> AbstractAsyncContextManager[asyncpg.Connection]:
        """An asyncpg connection on which every statement is a transaction of its own and is planned once (BY_KEY). It
        is for statements that find their rows by key, whatever the sizes of the tables.
        """
        return self._raw(begin=False)

    async def flush(self) -> None:
        """Return when everything that was committed here before, without waiting for the disk too, is on disk.

        Messages that were published after these commits are sent first, because the broker's flush would otherwise wait
        for this one.
        """
        await asyncio.sleep(FLUSH_LINGER_S)
        async with self.single() as connection:
            await connection.execute(FLUSH)

    def flushed(self, losses: int) -> asyncio.Future[None]:
        """Done when everything that was committed here so far is on disk; see `GroupFlush.after`."""
        return self._group_flush.after(losses)

    def flush_by_commit(self) -> AbstractContextManager[FlushingCommit]:
        """Around a commit of this process: it may be the flush that `flushed` waits for; see `GroupFlush.by_commit`."""
        return self._group_flush.by_commit()

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[AsyncConnection]:
        async with self._uses.one(), self._checked_out() as held, held.connection.begin():
            yield held.connection

    @asynccontextmanager
    async def _raw(self, *, begin: bool = True) -> AsyncIterator[asyncpg.Connection]:
        async with self._uses.one(), self._checked_out(by_key=not begin) as held:
            if begin:
                async with held.driver.transaction():
                    yield held.driver
            else:
                yield held.driver

    # until: bus (asyncpg's own pools; the fault and the fate of a connection stay one decision)
    @asynccontextmanager
    async def _checked_out(self, *, by_key: bool = False) -> AsyncIterator[_Held]:
        """Check out a pooled connection, and raise the bus's own errors for those of the driver.

        A connection that was lost in use is discarded. This is decided here alone, because the fault that is raised
        does not show it any more.
        """
        scope = CURRENT.get()
        span = None if scope is None else scope.begin("transaction", **self._traced)
        await self._slot()
        unusable = is_read_only = False
        try:
            held = await self._take(by_key=by_key)
            try:
                yield held
            except FAILED_IN_USE as error:
                is_read_only = _sqlstate(error) == READ_ONLY
                unusable = is_read_only or _is_connection_error(error)  # no statement can follow on this session
                raise_fault(error, closed=held.driver.is_closed())
            finally:
                unusable = unusable or self._closed or held.server != self._left_servers
                if unusable or held.driver.is_closed() or held.driver.is_in_transaction():
                    # shield: a cancelled caller must not leak the connection
                    await asyncio.shield(self._leave_server(held) if is_read_only else self._drop(held))
                else:
                    self._spare.append(held)
        finally:
            self._slots.release()
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

    async def _take(self, *, by_key: bool) -> _Held:
        """The warmest connection that lives, or a new one. Connections that died with the server are discarded."""
        while (dead := next((held for held in self._spare if held.driver.is_closed()), None)) is not None:
            self._spare.remove(dead)
            await self._drop(dead)
        held = self._most_prepared(by_key=by_key) or await self._connect()
        if held.by_key is not by_key:
            await self._switch_plan(held, by_key=by_key)
        return held

    def _most_prepared(self, *, by_key: bool) -> _Held | None:
        """One that plans so; when no more may be opened, any."""
        for place in reversed(range(len(self._spare))):
            if self._spare[place].by_key is by_key:
                return self._spare.pop(place)
        return self._spare.pop() if self._spare and self._open >= self._pool_size else None

    async def _switch_plan(self, held: _Held, *, by_key: bool) -> None:
        """Switch the planning of the connection's statements."""
        try:
            await held.driver.execute(BY_KEY if by_key else BY_SIZE)
        except BaseException as error:
            await asyncio.shield(self._drop(held))
            if isinstance(error, (*CONNECTION_LOST, TimeoutError)):
                raise_fault(error, closed=True)
            raise
        held.by_key = by_key

    async def _connect(self) -> _Held:
        self._open += 1  # counted now, so that no other task takes the last place meanwhile
        server = self._left_servers
        try:
            connection = await self._engine.connect()
            driver = (await connection.get_raw_connection()).driver_connection
            assert driver is not None
            driver.add_termination_listener(self._connection_lost)
            return _Held(connection, driver, server)
        except BaseException as error:
            self._open -= 1
            if isinstance(error, (*CONNECTION_LOST, DBAPIError, PoolTimeout)):
                self._connection_lost()
                raise_fault(error, closed=True)
            raise

    def _connection_lost(self, _connection: object = None) -> None:
        """Handle a lost connection or a failed attempt: probe whether the server still answers."""
        if not self._closed and self._probing is None:
            self._probing = asyncio.get_running_loop().create_task(self._probe(), name=f"{self.schema} database probe")
            self._probing.add_done_callback(self._probed)

    async def _probe(self) -> None:
        """Probe the server until it takes writes. It counts as unavailable from the first failure on."""
        engine = self._make_engine(poolclass=NullPool)

        async def ask() -> None:
            try:
                async with engine.connect() as connection:
                    if await connection.scalar(text("SHOW transaction_read_only")) == "on":
                        raise DatabaseUnavailable("the server takes no writes")
            except (*CONNECTION_LOST, DBAPIError) as error:
                raise DatabaseUnavailable(_first_line(error)) from error

        try:
            await self._retrying.call(ask, on_failure=self._unreachable)
        finally:
            await engine.dispose()
        self._reachable = True

    def _probed(self, task: asyncio.Task[None]) -> None:
        self._probing = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("database.probe_failed", schema=self.schema, reason=str(error))

    def _unreachable(self, error: BaseException, failures: int) -> None:
        if self._reachable:
            self._log_waiting(error, failures)
        self._reachable = False

    async def _drop(self, held: _Held) -> None:
        self._open -= 1
        self._losses += held.driver.is_closed()
        await held.connection.invalidate()
        await held.connection.close()

    async def _leave_server(self, held: _Held) -> None:
        """Drop a connection to a server that was made read-only, the idle ones, and those in use when they are
        returned: the server is no longer the primary. Its successor may not have the commits that were not on disk.
        """
        self._connection_lost()
        self._losses += 1
        self._left_servers += held.server == self._left_servers
        idle, self._spare = self._spare, []
        for left in (held, *idle):
            await self._drop(left)

    async def _prepare(self, package: str | None) -> None:
        # Its own connection: a migration may take longer than any statement of the running system.
        engine = self._make_engine(poolclass=NullPool, patient=True)
        lock = {"key": lock_key(self.schema)}
        try:
            if not self._open and await self._found(package, lock):
                return
            async with engine.begin() as connection:
                await connection.execute(text(f"SELECT pg_advisory_xact_lock({LOCK})"), lock)
                await self._make(connection, package)
                self._place = await _place_of(connection)
        except (DBAPIError, *CONNECTION_LOST) as error:
            raise_fault(error, closed=isinstance(error, asyncpg.InterfaceError | asyncpg.InternalClientError))
        except UnsupportedSchema as error:
            raise DatabaseForbidden(str(error), code=error.code) from error
        finally:
            await engine.dispose()

    async def _found(self, package: str | None, lock: Mapping[str, str]) -> bool:
        """Whether nothing needs to be created, which is the usual case. The connection is kept for later use."""
        async with self._engine.begin() as connection:
            free = await connection.scalar(text(f"SELECT pg_try_advisory_xact_lock({LOCK})"), lock)
            if not free or not await self._is_made(connection, package):
                return False
            self._place = await _place_of(connection)
        return True

    async def _is_made(self, connection: AsyncConnection, package: str | None) -> bool:
        """Whether the schema is there and, of a package with migrations, can be used. Raises UnsupportedSchema."""
        if not await connection.scalar(text("SELECT to_regnamespace(:name)"), {"name": f'"{self.schema}"'}):
            return False
        return package is None or await is_migrated(connection, package, self.schema)

    async def _make(self, connection: AsyncConnection, package: str | None) -> None:
        # Not `IF NOT EXISTS`: that needs the right to create schemas, though this one exists.
        if not await connection.scalar(text("SELECT to_regnamespace(:name)"), {"name": f'"{self.schema}"'}):
            await connection.execute(text(f'CREATE SCHEMA "{self.schema}"'))
        if package is not None and not await is_migrated(connection, package, self.schema):
            async with _alembic():
                from bus.persistence import migrations  # noqa: PLC0415  (why: in bus.persistence.revision)

                await connection.run_sync(migrations.upgrade, package, self.schema)
            await is_migrated(connection, package, self.schema)  # raises when its tables are of another state

    def _log_waiting(self, error: BaseException, failures: int) -> None:
        log.warning(
            "database.waiting",
            database=str(self._address),
            attempt=failures,
            reason=str(error),
        )

    def _make_engine(self, *, patient: bool = False, **pool: Any) -> AsyncEngine:
        settings = {
            "search_path": f'"{self.schema}"',
            "application_name": self._application_name[:63],
            "idle_in_transaction_session_timeout": _ms(0 if patient else IDLE_IN_TRANSACTION_S),
            "statement_timeout": _ms(0 if patient else STATEMENT_TIMEOUT_S),
            # A plan made while a table was empty reads all of it for ever; ours are cheap to make for each group.
            "plan_cache_mode": "force_custom_plan",
            # Our tables are read by key and are in memory or on an SSD: a thousand keys of 100,000 are looked up.
            "random_page_cost": "1.1",
            "jit": "off",  # the statements are short; to compile one costs more than to run it
        }
        engine = create_async_engine(
            "postgresql+asyncpg://",
            async_creator=partial(
                self._address.connect,
                timeout_s=CONNECT_TIMEOUT_S,
                command_timeout_s=None if patient else COMMAND_TIMEOUT_S,
                settings=settings,
            ),
            **pool,
        )
        event.listen(engine.sync_engine, "connect", _on_connect)
        event.listen(engine.sync_engine, "checkout", _on_checkout)
        return engine


def lock_key(schema: str) -> str:
    """The advisory lock under which this schema is made, upgraded or restored, before it is hashed."""
    return f"berth.migrations.{schema}"


# Alembic keeps its state in globals of the process, and a migration waits for the database in the middle of it.
_MIGRATING: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


def _alembic() -> asyncio.Lock:
    """The lock of the one migration that may run in this process."""
    return _MIGRATING.setdefault(asyncio.get_running_loop(), asyncio.Lock())


async def _place_of(connection: AsyncConnection) -> str:
    cluster = ""
    if await connection.scalar(text("SELECT has_function_privilege('pg_control_system()', 'execute')")):
        cluster = await connection.scalar(text("SELECT system_identifier::text FROM pg_control_system()"))
    number = await connection.scalar(text("SELECT oid::text FROM pg_database WHERE datname = current_database()"))
    return str(uuid5(PLACES, f"{cluster}/{number}"))


def raise_fault(error: Exception, *, closed: bool = False) -> NoReturn:
    """Raise the bus's own error for a database error. An error of berth itself is raised unchanged."""
    state = _sqlstate(error)
    code = _transient_code(state)
    if isinstance(error, ServerUntrusted) and not closed:
        raise DatabaseForbidden(str(error), code="database.certificate") from error
    if isinstance(error, PoolTimeout):
        raise Transient("no free database connection", code="database.busy") from error
    if isinstance(error, asyncpg.InvalidCachedStatementError):
        raise Transient("the schema changed under a prepared statement", code="database.schema_changed") from error
    if code == _UNAVAILABLE or closed or (state is None and _is_connection_error(error)):
        raise DatabaseUnavailable(_first_line(error)) from error
    if code:
        raise Transient(_first_line(error), code=code) from error
    if state in UNPREPARED_STATES:
        reason = f"{_first_line(error)}: its schema was dropped or emptied, or no worker has prepared it yet"
        raise DatabaseUnprepared(reason) from error
    if state is not None and state.startswith(FORBIDDEN_STATES):
        raise DatabaseForbidden(_first_line(error)) from error
    raise error


def _transient_code(state: str | None) -> str:
    if state is None:
        return ""
    return next((TRANSIENT_STATES[state[:size]] for size in (5, 3, 2) if state[:size] in TRANSIENT_STATES), "")


def _sqlstate(error: BaseException) -> str | None:
    state = getattr(error, "sqlstate", None) or getattr(getattr(error, "orig", None), "sqlstate", None)
    return state if isinstance(state, str) else None


def _is_connection_error(error: Exception) -> bool:
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    cause: BaseException | None = error.orig if isinstance(error, DBAPIError) else error
    while cause is not None:
        if isinstance(cause, OSError | TimeoutError | asyncpg.InternalClientError):
            return True
        cause = cause.__cause__
    return False


def _first_line(error: Exception) -> str:
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    return (str(cause).splitlines() or [type(cause).__name__])[0][:500]


def _ms(seconds: float) -> str:
    return str(int(seconds * 1000))


def _on_connect(connection: Any, _record: object) -> None:
    connection.run_async(_set_uuid_codec)


async def _set_uuid_codec(connection: asyncpg.Connection) -> None:
    await connection.set_type_codec(
        "uuid", schema="pg_catalog", encoder=_uuid_bytes, decoder=_uuid_text, format="binary"
    )


def _uuid_bytes(value: str | UUID) -> bytes:
    raw = bytes.fromhex(value.replace("-", "")) if isinstance(value, str) else value.bytes
    if len(raw) != 16:
        raise ValueError(f"not a UUID: {value!r}")
    return raw


def _uuid_text(value: bytes) -> str:
    text = value.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _on_checkout(connection: Any, _record: object, _proxy: object) -> None:
    # After a restart of the server every pooled connection is dead; asyncpg has seen the close, so no ping is needed.
    is_closed: Callable[[], bool] = connection.driver_connection.is_closed
    if is_closed():
        raise InvalidatePoolError("the server closed the pooled connections")
