"""A book that was set back is recognised, and its feed gets another history id."""

from __future__ import annotations

import asyncio
import random

import asyncpg
import pytest
from sqlalchemy.engine import make_url

from berth.trial.embedded.postgres import Postgres
from bus.contracts.feed import FeedChanges
from bus.persistence.database import Database
from placement_worker.book import ResourceBook
from placement_worker.operations import export, export_store
from placement_worker.replica.local import LocalReplica
from placement_worker.store.postgres_rows import PostgresBookRows
from tests.kit.servers import fresh_database

from .conftest import Book

pytestmark = pytest.mark.postgres

# As a restore of files does it: the book's rows are what they were some changes ago, and nothing else has changed.
SET_BACK = """
UPDATE placement.feed_head SET number = $1; DELETE FROM placement.changes WHERE last > $1;
"""
END_SESSIONS = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = $1"


async def set_back(book: Book, number: int) -> None:
    connection = await asyncpg.connect(book.url)
    for statement in SET_BACK.replace("$1", str(number)).strip().split("; "):
        await connection.execute(statement)
    await connection.close()


async def test_a_database_that_was_restored_elsewhere_begins_another_history(
    book: Book, rng: random.Random, postgres_server: str
) -> None:
    """As CREATE DATABASE makes it from a copy: every row, the table's own number and the cluster are the same."""
    await book.hosts(3, rng, VCPU=4)
    first = await book.store.head()
    await book.store.close()
    with fresh_database(postgres_server) as url:
        target = make_url(url).database
        admin = await asyncpg.connect(make_url(postgres_server).set(drivername="postgresql").render_as_string(False))
        await admin.execute(f'DROP DATABASE "{target}"')
        # No other session may use the one that is copied; the lender of databases keeps one.
        await admin.fetch(END_SESSIONS, make_url(book.url).database)
        await admin.execute(f'CREATE DATABASE "{target}" TEMPLATE "{make_url(book.url).database}"')
        await admin.close()
        restored = ResourceBook(PostgresBookRows(Database(url, "placement")))
        await restored.open()
        second = await restored.head()
        assert second.sequence == first.sequence
        assert second.history != first.history
        page = await restored.changes(1, 10, first.history)
        assert (page.too_old, page.changes, page.history) == (True, (), second.history)
        assert not (await restored.changes(1, 10, second.history)).too_old
        await restored.close()


async def test_a_book_that_opens_again_goes_on_in_its_history(book: Book, rng: random.Random) -> None:
    await book.hosts(1, rng, VCPU=4)
    first = await book.store.head()
    again = ResourceBook(PostgresBookRows(Database(book.url, "placement")))
    await again.open()
    assert await again.head() == first
    assert not (await again.newest()).renewed
    await again.close()


async def test_another_timeline_is_another_history_found_by_one_of_many(book: Book) -> None:
    """The promotion of a stand-by, and a recovery to a point in time, begin a new timeline."""
    first = await book.store.head()
    connection = await asyncpg.connect(book.url)
    await connection.execute("SET search_path TO placement")
    origin = await connection.fetchval("SELECT origin FROM feed_head")
    cluster, timeline, *rest = origin.split("/")
    assert cluster and len(timeline) == 8 and int(timeline, 16) >= 1 and len(rest) == 2
    before = "/".join((cluster, f"{int(timeline, 16) - 1:08X}", *rest))
    await connection.execute("UPDATE feed_head SET origin = $1", before)
    await connection.close()
    others = [ResourceBook(PostgresBookRows(Database(book.url, "placement"))) for _ in range(3)]
    renewed = await asyncio.gather(*(store.newest() for store in (book.store, *others)))
    assert sorted(one.renewed for one in renewed) == [False, False, False, True]
    assert (await book.store.head()).history != first.history
    for store in others:
        await store.close()


async def test_a_head_behind_the_one_that_was_seen_is_another_history(book: Book, rng: random.Random) -> None:
    await book.hosts(5, rng, VCPU=4)
    assert not (await book.store.newest()).renewed
    first = await book.store.head()
    await set_back(book, first.sequence - 2)
    assert (await book.store.newest()).renewed
    assert not (await book.store.newest()).renewed
    assert (await book.store.head()).history != first.history


async def test_an_import_is_another_history_and_the_feed_carries_it(book: Book, rng: random.Random) -> None:
    await book.hosts(2, rng, VCPU=4)
    first = await book.store.head()
    async with book.database.raw() as connection:
        found = await export_store.read(connection, book.store.names)
    async with book.rows.transaction() as transaction:
        assert await export_store.assign(transaction, found, book.store.names) == 0
    assert await book.store.head() == first, "nothing has changed"
    async with book.rows.transaction() as transaction:
        providers = dict(list(found.providers.items())[:1])
        await export_store.assign(
            transaction, export.BookExport(found.classes, found.traits, providers, {}), book.store.names
        )
    second = await book.store.head()
    assert second.history != first.history
    published: list[FeedChanges] = []

    async def send(changes: FeedChanges) -> None:
        published.append(changes)

    await book.store.publish(send, 100)
    assert {one.history for one in published} == {second.history}
    assert (await book.store.snapshot(None, 10)).history == second.history


@pytest.mark.parametrize("more", [0, 2, 4], ids=["behind", "as far", "further"])
async def test_the_rest_apis_replica_notices_a_book_that_was_set_back(
    book: Book, rng: random.Random, more: int
) -> None:
    """It compared numbers alone: at the same number it kept the old book, and further on it dropped reused numbers."""
    await book.hosts(4, rng, VCPU=4)
    replica = LocalReplica(book.store)
    assert len(await replica.fresh()) == 4
    assert not (await book.store.newest()).renewed
    connection = await asyncpg.connect(book.url)
    await connection.execute("DELETE FROM placement.inventories; DELETE FROM placement.providers")
    await connection.close()
    await set_back(book, 2)
    assert (await book.store.newest()).renewed
    if more:
        await book.hosts(more, rng, VCPU=4)
    assert len(await replica.fresh()) == more


async def test_a_recovery_from_the_archive_begins_another_history() -> None:
    """As a recovery to a point in time, and the promotion of a stand-by: PostgreSQL begins a new timeline."""
    server = Postgres()
    histories = []
    try:
        for recovers in (False, False, True):
            if recovers:
                data = server._data
                (data / "recovery.signal").touch()
                with (data / "postgresql.conf").open("a") as settings:
                    settings.write("restore_command = 'false'\n")
            server.start()
            store = ResourceBook(PostgresBookRows(Database(server.url(), "placement")))
            await store.open()
            histories.append((await store.head()).history)
            await store.close()
            server.shut_down()
    finally:
        server.stop()
    first, restarted, recovered = histories
    assert restarted == first, "a restart alone is none"
    assert recovered != first
