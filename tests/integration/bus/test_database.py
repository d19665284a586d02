"""Database against a real PostgreSQL: schema, migrations, types, and what becomes of each kind of error."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
from sqlalchemy import make_url

from berth.up.embedded.postgres import Postgres
from bus.faults import DatabaseForbidden, DatabaseRightsMissing, DatabaseUnavailable, Transient
from bus.persistence import database as module
from bus.persistence.address import DatabaseAddress
from bus.persistence.database import Database
from bus.persistence.revision import lock_key
from tests.kit.waiting import until

pytestmark = pytest.mark.postgres

UUID = "0b2d1c9e-6f7a-4d53-9a40-2f1a3b4c5d6e"
PATIENCE_S = 60.0
FIRST = '''"""Things."""
from alembic import op
revision = "0001_things"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("CREATE TABLE thing (id uuid PRIMARY KEY, n integer NOT NULL)")
'''
TABLES = """
from sqlalchemy import Column, MetaData, Table
METADATA = MetaData()
Table("thing", METADATA, Column("id"), Column("n"))
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An importable package with one migration."""
    name = "kit_migrations_" + tmp_path.name.replace("-", "_")
    versions = tmp_path / name / "versions"
    versions.mkdir(parents=True)
    (tmp_path / name / "__init__.py").write_text(TABLES)
    (versions / "0001_things.py").write_text(FIRST)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


async def test_several_processes_open_at_once_and_migrate_once(empty_database: str, package: str) -> None:
    databases = [Database(empty_database, "cell_C-1") for _ in range(4)]
    await asyncio.gather(*(database.open(package) for database in databases))
    async with databases[0].raw() as connection:
        await connection.execute("INSERT INTO thing VALUES ($1, 1)", UUID)
        tables = await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'cell_C-1' ORDER BY 1")
    assert [row["tablename"] for row in tables] == ["alembic_version", "schema_revision", "thing"]
    await asyncio.gather(*(database.close() for database in databases))


WAITING = """
SELECT count(*) FROM pg_locks JOIN pg_database d ON d.oid = database AND d.datname = current_database()
WHERE locktype = 'advisory' AND NOT granted
"""


async def test_a_schema_at_head_is_opened_with_the_connection_that_then_works(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look for what there is to migrate cost a connection of its own."""
    made: list[object] = []
    connect = DatabaseAddress.connect

    async def counted(*arguments: Any, **options: Any) -> Any:
        made.append(connection := await connect(*arguments, **options))
        return connection

    monkeypatch.setattr(DatabaseAddress, "connect", counted)
    database = Database(postgres_url, "placement")
    await database.open("placement_worker.store.migrations")
    async with database.raw() as connection:
        assert await connection.fetchval("SELECT count(*) FROM providers") == 0
    await database.close()
    assert len(made) == 1 and database.place


async def test_a_schema_that_is_being_restored_is_opened_afterwards(postgres_url: str) -> None:
    restoring, opened = Database(postgres_url, "scheduler"), Database(postgres_url, "placement")
    await restoring.open()
    async with restoring.raw() as connection:
        await connection.execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", lock_key("placement"))
        opening = asyncio.create_task(opened.open("placement_worker.store.migrations"))
        await until(lambda: connection.fetchval(WAITING))
        assert not opening.done()
    await opening
    await opened.close()
    await restoring.close()


async def test_uuids_are_text_alone_and_in_arrays(empty_database: str) -> None:
    database = Database(empty_database, "types")
    await database.open()
    async with database.raw() as connection:
        row = await connection.fetchrow("SELECT $1::uuid AS one, $2::uuid[] AS many", UUID.upper(), [UUID, UUID])
        assert (row["one"], row["many"]) == (UUID, [UUID, UUID])
        rows = await connection.fetch("SELECT * FROM unnest($1::uuid[], $2::int[]) AS t(a, b)", [UUID], [3])
        assert [tuple(row) for row in rows] == [(UUID, 3)]
    await database.close()


async def test_an_exception_rolls_back_and_stays_what_it_is(empty_database: str) -> None:
    database = Database(empty_database, "rollback")
    await database.open()
    async with database.raw() as connection:
        await connection.execute("CREATE TABLE t (n integer UNIQUE)")
    with pytest.raises(KeyError):
        async with database.raw() as connection:
            await connection.execute("INSERT INTO t VALUES (1)")
            raise KeyError("mine")
    with pytest.raises(asyncpg.UniqueViolationError):
        async with database.raw() as connection:
            await connection.execute("INSERT INTO t VALUES (2), (2)")
    async with database.raw() as connection:
        assert await connection.fetchval("SELECT count(*) FROM t") == 0
    await database.close()


async def test_a_deadlock_is_transient_with_its_own_code(empty_database: str) -> None:
    database = Database(empty_database, "deadlock", pool_size=2)
    await database.open()
    async with database.raw() as connection:
        await connection.execute("CREATE TABLE t (n integer); INSERT INTO t VALUES (1), (2)")
    both_hold = asyncio.Barrier(2)

    async def lock(first: int, second: int) -> None:
        async with database.raw() as connection:
            await connection.execute("SET LOCAL deadlock_timeout = '50ms'")
            await connection.execute("SELECT FROM t WHERE n = $1 FOR UPDATE", first)
            await both_hold.wait()
            await connection.execute("SELECT FROM t WHERE n = $1 FOR UPDATE", second)

    results = await asyncio.gather(lock(1, 2), lock(2, 1), return_exceptions=True)
    faults = [result for result in results if result is not None]
    assert [getattr(fault, "code", fault) for fault in faults] == ["database.deadlock"]
    assert isinstance(faults[0], Transient)
    await database.close()


async def test_a_serialization_failure_is_transient_with_its_own_code(empty_database: str) -> None:
    database = Database(empty_database, "serialization")
    await database.open()
    async with database.raw() as connection:
        await connection.execute("CREATE TABLE t (n integer); INSERT INTO t VALUES (1)")
    with pytest.raises(Transient) as caught:
        async with database.raw() as slow:
            await slow.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            await slow.fetchval("SELECT n FROM t")
            async with database.raw() as quick:
                await quick.execute("UPDATE t SET n = 2")
            await slow.execute("UPDATE t SET n = 3")
    assert caught.value.code == "database.serialization"
    await database.close()


async def test_a_lost_connection_is_unavailable_and_the_pool_recovers(empty_database: str) -> None:
    database = Database(empty_database, "lost", pool_size=2)
    await database.open()
    with pytest.raises(DatabaseUnavailable):
        async with database.raw() as victim, database.raw() as killer:
            await killer.execute("SELECT pg_terminate_backend($1)", await victim.fetchval("SELECT pg_backend_pid()"))
            await victim.execute("SELECT 1")
    async with database.raw() as connection:
        assert await connection.fetchval("SELECT 1") == 1
    await database.close()


async def test_a_full_pool_is_transient(empty_database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POOL_TIMEOUT_S", 0.05)
    database = Database(empty_database, "busy", pool_size=1)
    await database.open()
    async with database.raw():
        with pytest.raises(Transient) as caught:
            async with database.raw():
                raise AssertionError("two connections from a pool of one")
    assert caught.value.code == "database.busy"
    await database.close()


async def test_open_waits_for_an_unavailable_server_and_survives_its_crash(tmp_path: Path) -> None:
    with Postgres() as server:
        server.shut_down()
        database = Database(server.url("postgres"), "patient")
        opening = asyncio.create_task(database.open())
        assert await asyncio.wait([opening], timeout=0.3) == (set(), {opening})
        await asyncio.to_thread(server.start)
        await opening
        async with database.raw() as connection:
            await connection.execute("CREATE TABLE t AS SELECT 1 AS n")
        async with database.raw(), database.raw():
            pass  # two connections are in the pool now
        server.kill()
        with pytest.raises(DatabaseUnavailable):
            async with database.raw() as connection:
                await connection.fetchval("SELECT n FROM t")
        await asyncio.to_thread(server.start)
        async with database.raw() as connection, database.raw() as other:  # neither is one that died with the server
            assert await connection.fetchval("SELECT n FROM t") == 1
            assert await other.fetchval("SELECT n FROM t") == 1
        await database.close()


async def test_readiness_follows_the_server_without_any_query() -> None:
    """Workers reported ready for as long as PostgreSQL was down."""
    with Postgres() as server:
        database = Database(server.url("postgres"), "ready")
        await database.open()
        async with database.raw():
            pass
        assert database.ready
        server.kill()
        await until(lambda: not database.ready)
        await asyncio.to_thread(server.start)
        await until(lambda: database.ready)
        await database.close()


async def test_a_server_that_takes_no_writes_is_not_ready(empty_database: str) -> None:
    """All of 75 s of a read-only primary the workers were ready."""
    database = Database(empty_database, "refused")
    await database.open()
    admin = await asyncpg.connect(empty_database)
    name = await admin.fetchval("SELECT quote_ident(current_database())")
    await admin.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    with pytest.raises(DatabaseUnavailable):
        async with database.single() as connection:
            await connection.execute("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY")
            await connection.execute("CREATE TABLE written (n int)")
    await until(lambda: not database.ready)
    await admin.execute("SET default_transaction_read_only = off")
    await admin.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
    await until(lambda: database.ready)
    await admin.close()
    await database.close()


async def test_a_server_on_which_nothing_ends_is_not_ready(
    empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that another session has locked, a server that hangs."""
    monkeypatch.setattr(module, "HUNG_S", 0.05)
    database = Database(empty_database, "locked")
    await database.open()
    locking = await asyncpg.connect(empty_database)
    async with locking.transaction():
        await locking.execute("SELECT pg_advisory_xact_lock(7)")
        assert database.ready, "nothing waits"

        async def wait() -> None:
            async with database.raw() as connection:
                await connection.execute("SELECT pg_advisory_xact_lock(7)")

        waiting = asyncio.create_task(wait())
        await until(lambda: not database.ready)
    await waiting
    assert database.ready
    await locking.close()
    await database.close()


async def test_one_lost_connection_does_not_make_the_process_unready(empty_database: str) -> None:
    database = Database(empty_database, "flap", pool_size=2)
    await database.open()
    with pytest.raises(DatabaseUnavailable):
        async with database.raw() as victim, database.raw() as killer:
            pid = await victim.fetchval("SELECT pg_backend_pid()")
            await killer.execute("SELECT pg_terminate_backend($1)", pid)
            await until(victim.is_closed)
            assert database.ready
    await until(lambda: database._probing is None)
    assert database.ready
    await database.close()


async def test_a_session_that_ends_while_a_connection_is_prepared_is_an_unavailable_server(
    empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncpg.InternalClientError ended the scheduler: it is neither a PostgresError nor an InterfaceError."""

    async def ended(*_: object, **__: object) -> None:
        raise asyncpg.InternalClientError("got result for unknown protocol state 3")

    database = Database(empty_database, "ended")
    await database.open()
    async with database.raw():
        pass
    with monkeypatch.context() as patched:
        patched.setattr(asyncpg.Connection, "execute", ended)
        with pytest.raises(DatabaseUnavailable):
            async with database.raw():
                raise AssertionError("a connection that could not be prepared was given out")
    async with database.single() as connection:
        assert await connection.fetchval("SELECT 1") == 1
    await database.close()


async def session(database: Database) -> int:
    """The process of the server that serves the next transaction."""
    async with database.raw() as connection:
        return int(await connection.fetchval("SELECT pg_backend_pid()"))


async def test_a_session_that_is_out_of_step_is_an_unavailable_server_and_is_not_used_again(
    empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended a placement worker whose database was killed."""

    async def out_of_step(*_: object, **__: object) -> None:
        raise asyncpg.InternalClientError("cannot switch to state 11; another operation (2) is in progress")

    database = Database(empty_database, "ended", pool_size=1)
    await database.open()
    before = await session(database)
    with monkeypatch.context() as patched:
        patched.setattr(asyncpg.Connection, "fetchval", out_of_step)
        with pytest.raises(DatabaseUnavailable):
            async with database.single() as connection:
                await connection.fetchval("SELECT 2")
    assert await session(database) != before
    await database.close()


async def test_a_wrong_database_is_refused_at_once(empty_database: str) -> None:
    database = Database(empty_database.replace("berth_test_", "berth_gone_"), "x")
    with pytest.raises(DatabaseForbidden):
        await database.open()


@pytest.mark.parametrize("granted", ["", "GRANT USAGE ON SCHEMA x TO {role}"])
async def test_a_schema_that_a_role_may_not_use_is_not_one_that_nobody_prepared(
    empty_database: str, package: str, granted: str
) -> None:
    role = f"berth_{uuid4().hex[:12]}"
    database = Database(empty_database, "x", pool_size=1)
    await database.open(package)
    await database.close()
    admin = await asyncpg.connect(empty_database)
    await admin.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'secret'; {granted.format(role=role)}")
    url = make_url(empty_database).set(username=role, password="secret").render_as_string(hide_password=False)
    database = Database(url, "x", pool_size=1)
    try:
        with pytest.raises(DatabaseRightsMissing) as refused:
            await database.open(package)
        assert refused.value.code == "database.forbidden"
        for using in (database.raw, database.single):  # a command reads without `open`
            with pytest.raises(DatabaseRightsMissing):
                async with using() as connection:
                    await connection.fetch("SELECT * FROM thing")
        await admin.execute(f"GRANT USAGE ON SCHEMA x TO {role}; GRANT ALL ON ALL TABLES IN SCHEMA x TO {role}")
        await database.open(package)
    finally:
        await database.close()
        await admin.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
        await admin.close()


@pytest.mark.parametrize("url", ["mysql://a@b/c", "nonsense", "sqlite://"])
def test_a_url_that_is_not_postgresql_is_refused(url: str) -> None:
    with pytest.raises(DatabaseForbidden):
        Database(url, "x")


@pytest.mark.parametrize("schema", ['a"b', "", "a b", "x" * 64, "1st"])
def test_a_schema_name_is_checked(schema: str) -> None:
    with pytest.raises(DatabaseForbidden):
        Database("postgresql://u@h/d", schema)


async def until_it_sleeps(url: str, pid: int) -> None:
    """A statement that is cancelled before the server has begun it runs on, up to the statements' time limit."""
    connection = await asyncpg.connect(url)
    sleeping = "SELECT wait_event = 'PgSleep' FROM pg_stat_activity WHERE pid = $1"
    await until(lambda: connection.fetchval(sleeping, pid))
    await connection.close()


async def test_connections_are_kept_between_transactions_and_clean(empty_database: str) -> None:
    database = Database(empty_database, "kept", pool_size=1)
    await database.open()
    async with database.raw() as connection:
        first = await connection.fetchval("SELECT pg_backend_pid()")
    started = asyncio.Event()

    async def interrupted() -> None:
        async with database.raw() as connection:
            await connection.execute("CREATE TABLE t (n integer)")
            started.set()
            await connection.execute("SELECT pg_sleep(30)")

    task = asyncio.create_task(interrupted())
    await started.wait()
    await until_it_sleeps(empty_database, first)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with database.raw() as connection:
        assert await connection.fetchval("SELECT to_regclass('t')") is None
        assert await connection.fetchval("SELECT pg_backend_pid()") == first
    async with database.raw() as connection:
        await connection.execute("COMMIT")  # a caller that does such a thing must not hand it on
        await connection.execute("BEGIN")
    async with database.raw() as connection:
        assert await connection.fetchval("SELECT 1") == 1
    await database.close()


async def test_a_connection_is_closed_if_its_caller_is_cancelled_before_it_has_it(
    empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(empty_database, "cancelled")
    await database.open()
    await database.close()
    made: list[asyncpg.Connection] = []
    connect = DatabaseAddress.connect

    async def interrupted(address: DatabaseAddress, **options: Any) -> asyncpg.Connection:
        made.append(await connect(address, **options))
        caller.cancel()
        return made[-1]

    monkeypatch.setattr(DatabaseAddress, "connect", interrupted)
    again = Database(empty_database, "cancelled")
    caller = asyncio.create_task(again.open())
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert [one.is_closed() for one in made] == [True]


async def planned(database: Database, *, single: bool) -> tuple[str, str]:
    async with database.single() if single else database.raw() as connection:
        return await connection.fetchval("SHOW plan_cache_mode"), await connection.fetchval("SHOW enable_seqscan")


@pytest.mark.parametrize("pool_size", [1, 4])
async def test_single_statements_are_planned_once_by_key_and_transactions_by_what_they_find(
    empty_database: str, pool_size: int
) -> None:
    database = Database(empty_database, "plans", pool_size=pool_size)
    await database.open()
    for _ in range(2):
        assert await planned(database, single=True) == ("force_generic_plan", "off")
        assert await planned(database, single=False) == ("force_custom_plan", "on")
    await database.close()


async def test_both_kinds_at_once_never_wait_for_more_connections_than_the_pool_has(empty_database: str) -> None:
    database = Database(empty_database, "plans", pool_size=2)
    await database.open()
    assert await planned(database, single=False) == ("force_custom_plan", "on")  # one of the two is there, of this kind
    async with asyncio.timeout(PATIENCE_S):
        both = await asyncio.gather(*(planned(database, single=True) for _ in range(6)))
    assert set(both) == {("force_generic_plan", "off")}
    async with database.single() as connection:
        count = await connection.fetchval(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'plans' AND state <> 'idle in transaction'"
            " AND datname = current_database()"  # another test's, beside this one on the same server, are its own
        )
    assert count <= 2
    await database.close()


async def test_a_lost_connection_is_noticed_whatever_kind_is_wanted_next(empty_database: str) -> None:
    database = Database(empty_database, "plans")
    await database.open()
    async with database.raw() as connection:
        pid = await connection.fetchval("SELECT pg_backend_pid()")
    killer = await asyncpg.connect(empty_database)
    await killer.execute("SELECT pg_terminate_backend($1)", pid)
    await killer.close()
    async with asyncio.timeout(PATIENCE_S):
        while not database.connection_losses:
            with suppress(DatabaseUnavailable):  # before the driver knows of it
                await planned(database, single=True)
    assert await planned(database, single=True) == ("force_generic_plan", "off")
    await database.close()
