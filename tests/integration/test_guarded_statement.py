"""A guarded statement on a real PostgreSQL: it writes everything or nothing, and says so without an error."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import asyncpg
import pytest

from bus.persistence.guarded_statement import GuardedStatement, PreconditionFailed

pytestmark = pytest.mark.postgres

FIRST, SECOND, THIRD = (f"00000000-0000-4000-8000-00000000000{number}" for number in (1, 2, 3))
INSERT = """
INSERT INTO things SELECT unnest({}::uuid[]), 0 WHERE {met} ON CONFLICT DO NOTHING RETURNING 1
"""
UPDATE = "UPDATE things SET n = n + 1 WHERE key = ANY({}::uuid[]) AND {met}"
VERSIONS = "SELECT key::text, xmin FROM things"
ROWS = "SELECT count(*), coalesce(sum(n), 0) FROM things"


@pytest.fixture
async def connection(empty_database: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(empty_database)
    await connection.set_type_codec("xid", schema="pg_catalog", encoder=int.__str__, decoder=int, format="text")
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
    assert isinstance(await refused(connection, statement), asyncpg.DivisionByZeroError)


async def test_expected_rows_are_written_whole(connection: asyncpg.Connection) -> None:
    versions = dict(await connection.fetch(VERSIONS))
    statement = GuardedStatement()
    statement.hold("things", "key", versions, updates=2)
    statement.add("updated", f"{UPDATE} RETURNING 1", [FIRST, SECOND], rows=2)
    statement.add("inserted", INSERT, [THIRD], rows=1)
    statement.column("7 AS seven")
    assert (await statement.execute(connection))["seven"] == 7
    assert tuple(await connection.fetchrow(ROWS)) == (3, 2)
