"""A connection's look-ups of types in the catalogue."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import UUID

import asyncpg
import pytest

from bus.persistence import known_types
from bus.persistence.address import parse_database_url

pytestmark = pytest.mark.postgres

ARRAYS = "SELECT $1::bigint[], $2::text[], $3::uuid[], $4::bytea[], $5::timestamptz[]"
GIVEN = ([1, 2], ["a", None], [UUID(int=7)], [b"\x00\xff"], [])


@asynccontextmanager
async def connected(url: str, queries: list[str]) -> AsyncIterator[asyncpg.Connection]:
    """A connection as workers have it; the queries that it makes are appended."""
    connection = await parse_database_url(url).connect(timeout_s=60, command_timeout_s=60, settings={})
    connection.add_query_logger(lambda record: queries.append(record.query))
    try:
        yield connection
    finally:
        await connection.close()


async def test_arrays_are_looked_up_once_in_a_process(postgres_url: str) -> None:
    for first in (True, False):
        queries: list[str] = []
        async with connected(postgres_url, queries) as connection:
            assert tuple(await connection.fetchrow(ARRAYS, *GIVEN)) == GIVEN
            assert tuple(await connection.fetchrow(ARRAYS + ", 1", *GIVEN)) == (*GIVEN, 1)
        assert first or queries == [ARRAYS, ARRAYS + ", 1"]


async def test_an_array_is_of_what_the_connection_makes_of_its_elements(postgres_url: str) -> None:
    for decoder in (str, len):
        async with connected(postgres_url, []) as connection:
            await connection.set_type_codec("uuid", schema="pg_catalog", encoder=UUID, decoder=decoder, format="text")
            value = str(UUID(int=7))
            assert await connection.fetchval("SELECT $1::text[]::uuid[]", [value]) == [decoder(value)]


async def test_a_type_of_the_database_itself_is_looked_up_by_each_connection(empty_database: str) -> None:
    """Another database, or the same one after a restore, has another type under its number."""
    for values in (("small", "large"), ("red", "green")):
        async with connected(empty_database, []) as connection:
            await connection.execute(f"DROP TYPE IF EXISTS kind; CREATE TYPE kind AS ENUM {values}")
            assert await connection.fetchval("SELECT enum_range(NULL::kind)") == list(values)
    assert [number for number in known_types._known if number >= known_types.FIRST_ASSIGNED] == []
