"""Connections of a database: guarded statements, and a primary that is read-only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files

import asyncpg
import pytest
import structlog

from bus.contracts.build import BuildRequest, BuildState
from bus.faults import DatabaseUnavailable
from bus.persistence import database as database_module
from bus.persistence import group_flush
from bus.persistence.database import Database
from bus.persistence.guarded_statement import Conflict, GuardedStatement, PreconditionFailed
from scheduler_worker.records.build_record import NewBuild, RecordedBuild
from scheduler_worker.store.postgres import PostgresBuilds
from tests.contract.rig import Proxy
from tests.kit.lent import DatabasePair, database_pair
from tests.kit.sent import Sent

pytestmark = pytest.mark.postgres

# --- A guarded statement on a real PostgreSQL: it writes everything or nothing, and says so without an error.


FIRST, SECOND, THIRD = (f"00000000-0000-4000-8000-00000000000{number}" for number in (1, 2, 3))
INSERT = """
INSERT INTO things SELECT unnest({}::uuid[]), 0 WHERE {met} ON CONFLICT DO NOTHING RETURNING 1
"""
UPDATE = "UPDATE things SET n = n + 1 WHERE key = ANY({}::uuid[]) AND {met}"
VERSIONS = "SELECT key::text, xmin FROM things"
ROWS = "SELECT count(*), coalesce(sum(n), 0) FROM things"


ROLLS_BACK = files("bus.persistence").joinpath("guarded_statement.sql").read_text(encoding="utf-8")


@pytest.fixture
async def connection(empty_database: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(empty_database)
    await connection.set_type_codec("xid", schema="pg_catalog", encoder=int.__str__, decoder=int, format="text")
    await connection.execute(ROLLS_BACK)
    await connection.execute("CREATE TABLE things (key uuid PRIMARY KEY, n integer NOT NULL)")
    await connection.execute("INSERT INTO things VALUES ($1, 0), ($2, 0)", FIRST, SECOND)
    yield connection
    await connection.close()


async def refused(connection: asyncpg.Connection, statement: GuardedStatement) -> BaseException | None:
    """The error of the server with which the statement was rolled back, None where it wrote nothing of itself."""
    before = tuple(await connection.fetchrow(ROWS))
    with pytest.raises(PreconditionFailed) as caught:
        await statement.execute(connection)
    assert tuple(await connection.fetchrow(ROWS)) == before
    return caught.value.__cause__


@pytest.mark.parametrize("keys", [[FIRST], [FIRST, SECOND]])
async def test_rows_that_another_has_written_are_refused_without_an_error(
    connection: asyncpg.Connection, keys: Sequence[str]
) -> None:
    versions = {key: version for key, version in await connection.fetch(VERSIONS) if key in keys}
    await connection.execute("UPDATE things SET n = 5 WHERE key = $1", FIRST)
    statement = GuardedStatement()
    guard = statement.hold("things", "key", versions, updates=len(keys))
    statement.add("updated", f"{UPDATE} AND {guard} RETURNING 1", keys, rows=len(keys))
    statement.add("more", INSERT, [THIRD])
    assert await refused(connection, statement) is None


async def test_a_row_that_exists_is_refused_without_an_error(connection: asyncpg.Connection) -> None:
    statement = GuardedStatement()
    statement.add("inserted", INSERT, [FIRST], rows=1)
    statement.add("more", INSERT, [THIRD])
    assert await refused(connection, statement) is None


async def test_an_unmet_condition_is_refused_without_an_error(connection: asyncpg.Connection) -> None:
    statement = GuardedStatement()
    statement.expect("NOT EXISTS (SELECT FROM things WHERE key = ANY({}::uuid[]))", [FIRST, THIRD])
    statement.add("inserted", INSERT, [FIRST, THIRD], rows=2)
    assert await refused(connection, statement) is None


async def test_what_was_written_in_part_is_rolled_back(connection: asyncpg.Connection) -> None:
    statement = GuardedStatement()
    statement.add("inserted", INSERT, [FIRST, THIRD], rows=2)
    assert isinstance(await refused(connection, statement), asyncpg.SerializationError), "the server's log has why"


async def test_expected_rows_are_written_whole(connection: asyncpg.Connection) -> None:
    versions = dict(await connection.fetch(VERSIONS))
    statement = GuardedStatement()
    statement.hold("things", "key", versions, updates=2)
    statement.add("updated", f"{UPDATE} RETURNING 1", [FIRST, SECOND], rows=2)
    statement.add("inserted", INSERT, [THIRD], rows=1)
    statement.column("7 AS seven")
    assert (await statement.execute(connection))["seven"] == 7
    assert tuple(await connection.fetchrow(ROWS)) == (3, 2)


# --- A primary that was made read-only is left also by what uses `raw` and `single`, as all workers do.


SOON_S = 10.0
PID = "SELECT pg_backend_pid()"
UUID = "0b2d1c9e-6f7a-4d53-9a40-2f1a3b4c5d6e"
NEW = NewBuild(
    request=BuildRequest(instance_uuid=UUID, flavor="f", project_id="p", name="n"),
    build=RecordedBuild(instance_uuid=UUID, project_id="p", state=BuildState.ACCEPTED, sequence=1),
    timeline=(),
)


@pytest.mark.parametrize("way", ["raw", "single"])
async def test_a_primary_that_was_made_read_only_is_left_for_the_promoted_stand_by(way: str) -> None:
    manager = database_pair()
    pair = await asyncio.to_thread(manager.__enter__)
    database = Database(pair.url, "fenced")
    try:
        await database.open()
        async with database.raw() as connection:
            await connection.execute("CREATE TABLE written (n int)")
        assert await _written_at(database, way) == pair.primary.port
        admin = await asyncpg.connect(pair.primary.url())
        await admin.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        await admin.execute("SELECT pg_reload_conf()")
        await admin.close()
        await asyncio.to_thread(pair.stand_by.promote)
        tries = 0
        try:
            async with asyncio.timeout(SOON_S):
                while await _written_at(database, way) != pair.stand_by.port:
                    tries += 1
                    await asyncio.sleep(0.05)
        except TimeoutError:
            pytest.fail(f"{way}: after {tries} failed transactions in {SOON_S} s it still uses the read-only primary")
    finally:
        await database.close()
        await asyncio.to_thread(manager.__exit__, None, None, None)


async def _written_at(database: Database, way: str) -> int:
    """The port of the server that took a write; 0: none did."""
    try:
        return await _scalar(database, way, "INSERT INTO written VALUES (1) RETURNING inet_server_port()")
    except DatabaseUnavailable:
        return 0


@pytest.mark.parametrize("way", ["raw", "single"])
async def test_a_connection_that_takes_no_writes_is_dropped(empty_database: str, way: str) -> None:
    """The reason, without a pair: the session that has met 25006 is not used again."""
    database = Database(empty_database, "owner", pool_size=1)
    await database.open()
    try:
        await _execute(database, way, "CREATE TABLE written (pid int)")
        before = await _scalar(database, way, PID)
        await _execute(database, way, "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY")
        with pytest.raises(DatabaseUnavailable):
            await _execute(database, way, "INSERT INTO written VALUES (1)")
        await _execute(database, way, "INSERT INTO written VALUES (1)")
        assert await _scalar(database, way, PID) != before
    finally:
        await database.close()


async def _scalar(database: Database, way: str, statement: str) -> int:
    async with getattr(database, way)() as connection:
        return int(await connection.fetchval(statement))


async def _execute(database: Database, way: str, statement: str) -> None:
    async with getattr(database, way)() as connection:
        await connection.execute(statement)


async def test_idle_connections_to_a_server_that_takes_no_writes_are_dropped_and_count_as_lost(
    empty_database: str,
) -> None:
    """Each of them would have failed one more transaction. Commits that were not on disk may be lost."""
    database = Database(empty_database, "owner", pool_size=3)
    await database.open()
    try:
        async with database.raw() as one, database.raw() as two, database.raw() as three:
            await one.execute("CREATE TABLE written (n int)")
            before = {await each.fetchval(PID) for each in (one, two, three)}
            for each in (one, two, three):
                await each.execute("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY")
        losses = database.connection_losses
        with pytest.raises(DatabaseUnavailable):
            async with database.single() as connection:
                await connection.execute("INSERT INTO written VALUES (1)")
        assert database.connection_losses > losses
        async with database.raw() as one, database.raw() as two, database.raw() as three:
            after = {await each.fetchval(PID) for each in (one, two, three)}
            for each in (one, two, three):
                await each.execute("INSERT INTO written VALUES (1)")
        assert len(after) == 3 and not before & after
    finally:
        await database.close()


async def test_a_connection_in_use_when_its_server_is_left_is_not_used_again(empty_database: str) -> None:
    """A reader's connection came back, and was taken first: reads saw the state of the former primary."""
    database = Database(empty_database, "owner", pool_size=2)
    await database.open()
    try:
        async with database.raw() as reader:
            former = await reader.fetchval(PID)
            with pytest.raises(DatabaseUnavailable):
                async with database.raw() as writer:
                    await writer.execute("CREATE TABLE written (n int)")
                    await writer.execute("SET TRANSACTION READ ONLY")
                    await writer.execute("INSERT INTO written VALUES (1)")
        async with database.raw() as reader:
            assert await reader.fetchval(PID) != former
    finally:
        await database.close()


@asynccontextmanager
async def _two_servers() -> AsyncIterator[tuple[DatabasePair, Proxy, str]]:
    """A pair, a door to the primary, and a URL whose servers are the door and then the stand-by."""
    manager = database_pair()
    pair = await asyncio.to_thread(manager.__enter__)
    door = Proxy("127.0.0.1", pair.primary.port)
    await door.open()
    try:
        yield pair, door, pair.url.replace(f":{pair.primary.port},", f":{door.port},")
    finally:
        await door.close()
        await asyncio.to_thread(manager.__exit__, None, None, None)


async def _promote(pair: DatabasePair, door: Proxy) -> None:
    """From now on new connections lead to the stand-by, and those before stay at the primary, which takes writes."""
    await asyncio.to_thread(pair.stand_by.promote)
    door._server.close()  # type: ignore[union-attr]  (nobody else can come in, and nobody is put out)


async def test_a_flush_on_a_promoted_stand_by_vouches_for_no_commit_on_the_primary_before() -> None:
    """Found by reading: what is not on the stand-by was acknowledged as if it were on disk."""
    async with _two_servers() as (pair, door, url):
        database = Database(url, "fenced", pool_size=3)
        try:
            await database.open()
            async with database.raw() as one, database.raw() as two:  # one connection more will be needed
                losses = database.connection_losses
                assert await one.fetchval("SELECT inet_server_port()") == pair.primary.port
                await _promote(pair, door)
                with pytest.raises(DatabaseUnavailable):
                    await database.flushed(losses)
                assert await two.fetchval("SELECT inet_server_port()") == pair.primary.port
        finally:
            await database.close()


async def test_versions_of_the_former_primary_are_not_compared_with_rows_of_the_stand_by() -> None:
    """Found by reading: the unit takes its connection with its write, and numbers of transactions are given again."""
    async with _two_servers() as (pair, door, url):
        builds = PostgresBuilds(database := Database(url, "scheduler"))
        builds.publish_through(Sent())  # type: ignore[arg-type]
        try:
            await builds.open()
            async with builds.unit(optimistic=True) as unit:
                assert await unit.insert([NEW], 1.0) == {UUID}
            with pytest.raises(Conflict):
                async with builds.unit(optimistic=True) as unit:
                    assert (await unit.lock([UUID])).keys() == {UUID}, "from the cache"
                    await _promote(pair, door)
                    async with database.raw(), database.single() as there:  # one connection more is needed
                        assert await there.fetchval("SELECT inet_server_port()") == pair.stand_by.port
        finally:
            await builds.close()


async def test_a_commit_on_the_former_primary_flushes_nothing_of_the_stand_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by reading: its connection was taken before another task had connected to the stand-by."""
    monkeypatch.setattr(group_flush, "BATCH_S", 1_000.0)  # no flush but by a commit
    async with _two_servers() as (pair, door, url):
        builds = PostgresBuilds(database := Database(url, "scheduler"))
        builds.publish_through(Sent())  # type: ignore[arg-type]
        try:
            await builds.open()
            await _make_asynchronous(pair.primary.url())
            async with builds.unit(optimistic=False) as unit:  # its connection is taken
                await _promote(pair, door)
                async with database.single() as there:
                    assert await there.fetchval("SELECT inet_server_port()") == pair.stand_by.port
                flushed = builds.flushed(builds.connection_losses)  # what was committed on the stand-by
                assert await unit.insert([NEW], 1.0) == {UUID}
            assert not flushed.done(), "the former primary has flushed, not the stand-by"
            async with builds.unit(optimistic=True) as unit:
                assert await unit.insert([NEW], 1.0) == {UUID}, "it is not on the stand-by"
            assert flushed.done() and flushed.exception() is None
        finally:
            await builds.close()


async def _make_asynchronous(url: str) -> None:
    admin = await asyncpg.connect(url)
    await admin.execute("ALTER SYSTEM SET synchronous_standby_names = ''")
    await admin.execute("SELECT pg_reload_conf()")
    await admin.close()


async def test_a_connection_is_not_used_again_once_its_server_is_left() -> None:
    """It was in use when another one met the read-only server, so that it came back later."""
    async with _two_servers() as (pair, door, url):
        database = Database(url, "fenced")
        try:
            await database.open()
            async with database.raw() as held:
                assert await held.fetchval("SELECT inet_server_port()") == pair.primary.port
                await _promote(pair, door)
                with pytest.raises(DatabaseUnavailable):
                    async with database.raw() as connection:
                        await connection.execute("SET TRANSACTION READ ONLY")
                        await connection.execute("CREATE TABLE written (n int)")
            async with database.raw() as connection:
                assert await connection.fetchval("SELECT inet_server_port()") == pair.stand_by.port
        finally:
            await database.close()


async def test_each_change_between_two_servers_that_take_writes_is_logged() -> None:
    """Found by reading: the pools went from one to the other and back without a line."""
    async with _two_servers() as (pair, door, url):
        database = Database(url, "fenced")
        try:
            await database.open()
            with structlog.testing.capture_logs() as lines:
                for port in (pair.stand_by.port, pair.primary.port):
                    async with database.raw():
                        await (_promote(pair, door) if port == pair.stand_by.port else door.open())
                        async with database.raw() as other:
                            assert await other.fetchval("SELECT inet_server_port()") == port
            assert [line["event"] for line in lines] == ["database.other_server"] * 2
        finally:
            await database.close()


async def test_a_statement_without_an_answer_counts_as_a_loss(
    empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may have gone without a word, and its successor not have what was committed there."""
    monkeypatch.setattr(database_module, "COMMAND_TIMEOUT_S", 0.2)
    database = Database(empty_database, "owner", pool_size=1)
    await database.open()
    try:
        losses = database.connection_losses
        with pytest.raises(DatabaseUnavailable):
            await _execute(database, "single", "SELECT pg_sleep(30)")
        assert database.connection_losses > losses
    finally:
        await database.close()
