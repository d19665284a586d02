"""Names of classes and traits on a real PostgreSQL: what one reader has seen another does not make forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import asyncpg
import pytest

from placement_worker.store.names import NameTable

from .conftest import Book

pytestmark = pytest.mark.postgres

PATIENCE_S = 20.0


class Slow:
    """A connection whose rows arrive late."""

    def __init__(self, connection: asyncpg.Connection, arrive: asyncio.Event) -> None:
        self._connection = connection
        self._arrive = arrive
        self.requested = asyncio.Event()

    async def fetch(self, statement: str) -> Sequence[asyncpg.Record]:
        rows: Sequence[asyncpg.Record] = await self._connection.fetch(statement)
        self.requested.set()
        await self._arrive.wait()
        return rows


@pytest.fixture
async def names(book: Book) -> NameTable:
    made = NameTable(book.rows.transaction, book.rows.clock)
    await made.open()
    return made


async def test_a_read_that_began_before_a_name_was_made_and_ends_after_does_not_forget_it(
    book: Book, names: NameTable
) -> None:
    """Four cells' first reports make names at once; whose had gone again when it was written ended as dead letters."""
    arrive = asyncio.Event()
    async with book.database.raw() as connection, asyncio.timeout(PATIENCE_S):
        slow = Slow(connection, arrive)
        late = asyncio.create_task(names._read(book.rows.on(slow)))  # type: ignore[arg-type]
        await slow.requested.wait()
        await names.ensure(["CUSTOM_GOLD"], ["CUSTOM_BLUE"])
        arrive.set()
        await late
    assert names.class_ids["CUSTOM_GOLD"] and names.trait_ids["CUSTOM_BLUE"]


async def test_a_snapshot_that_is_older_than_a_name_does_not_forget_it(book: Book, names: NameTable) -> None:
    """A scheduler reads the book in one transaction while hosts report classes that no host had before."""
    async with book.database.raw() as connection:
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        await connection.fetch("SELECT 1 FROM resource_classes LIMIT 1")
        await names.ensure(["CUSTOM_GOLD"], [])
        number = names.class_ids["CUSTOM_GOLD"]
        unknown = max(names.class_names) + 1
        assert unknown not in await names.names_of(book.rows.on(connection), {unknown})
    assert (names.class_ids["CUSTOM_GOLD"], names.class_names[number]) == (number, "CUSTOM_GOLD")


async def test_what_another_process_made_is_learnt_by_its_number(book: Book, names: NameTable) -> None:
    other = NameTable(book.rows.transaction, book.rows.clock)
    await other.open()
    await other.ensure(["CUSTOM_GOLD"], [])
    number = other.class_ids["CUSTOM_GOLD"]
    async with book.database.raw() as connection:
        assert (await names.names_of(book.rows.on(connection), {number}))[number] == "CUSTOM_GOLD"
    assert names.class_ids["CUSTOM_GOLD"] == number
