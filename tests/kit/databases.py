"""Migrated databases without rows, lent to one test after the other.

To make one and drop it takes a hundred milliseconds of processor, to delete what a test wrote ten. A database whose
schemas a test changed is not lent again.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import asyncpg

from bus.persistence import tables
from bus.persistence.address import TypedConnection
from bus.persistence.database import Database
from bus.persistence.revision import REVISION_TABLES, tables_of
from tests.kit.servers import administer, named, plain

# How many sessions wait for a lock, in this database: other tests' databases are on the same server.
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"

# The schemas that are there, and the package that owns each.
SCHEMAS = {
    "placement": "placement_worker",
    "scheduler": "scheduler_worker",
    "cell_c1": "cell_conductor",
    "ironic_sync": "ironic_sync",
}
# A table that has grown beyond this is made anew: its dead rows would be read by every test that follows.
MAX_TABLE_BYTES = 256 * 1024
GOODBYE_MS = 10_000

# Whatever a statement that changes a schema writes to the catalogue has another xmin afterwards.
_STRUCTURE = """
SELECT md5(string_agg(row, ' ' ORDER BY row)) FROM (
    SELECT c.oid::text || ':' || c.xmin::text || ':' || c.relname AS row
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = ANY($1)
    UNION ALL
    SELECT a.attrelid::text || '.' || a.attnum::text || ':' || a.xmin::text
    FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = ANY($1) AND a.attnum > 0
    UNION ALL
    SELECT p.oid::text || ':' || p.xmin::text
    FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = ANY($1)
    UNION ALL
    SELECT o.oid::text || ':' || o.xmin::text
    FROM pg_constraint o JOIN pg_namespace n ON n.oid = o.connamespace WHERE n.nspname = ANY($1)
    UNION ALL
    SELECT t.oid::text || ':' || t.xmin::text
    FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = ANY($1)
    UNION ALL
    SELECT nspname || ':' || xmin::text FROM pg_namespace WHERE nspname = ANY($1)
    UNION ALL
    SELECT setrole::text || setconfig::text FROM pg_db_role_setting
    WHERE setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database())
) AS every
"""
_OTHERS = """
SELECT pg_terminate_backend(pid, $1) FROM pg_stat_activity WHERE datname = current_database()
AND pid <> pg_backend_pid()
"""
_TABLES = """
SELECT n.nspname, c.relname, pg_relation_size(c.oid) AS bytes
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = ANY($1) AND c.relkind IN ('r', 'p') AND NOT c.relname = ANY($2) ORDER BY 1, 2
"""
_SEQUENCES = """
SELECT setval(format('%I.%I', schemaname, sequencename)::regclass, start_value, false)
FROM pg_sequences WHERE schemaname = ANY($1) AND last_value IS NOT NULL
"""
_FOREIGN = """
SELECT nspname FROM pg_namespace
WHERE NOT nspname = ANY($1) AND nspname <> 'information_schema' AND nspname !~ '^pg_' AND nspname <> 'public'
"""
_PUBLIC = "SELECT EXISTS (SELECT FROM pg_class WHERE relnamespace = 'public'::regnamespace)"


class Changed(Exception):
    """A test has changed the schemas themselves."""


class LentDatabases:
    """Databases on one server."""

    def __init__(self, admin_url: str) -> None:
        self._admin_url = admin_url
        self._free: list[str] = []
        self._structure: dict[str, str] = {}
        # One for each database. A new one costs a process of the server, which reads the catalogue of 50 tables anew.
        self._cleaners: dict[str, asyncpg.Connection] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextmanager
    def lend(self) -> Iterator[str]:
        """The URL of a database whose schemas are as they were migrated, for the block alone."""
        name = self._free.pop() if self._free else self._made()
        clean = False
        try:
            yield named(self._admin_url, name)
            clean = self._cleaned(name)
        finally:
            if clean:
                self._free.append(name)
            else:
                self._drop(name)

    def close(self) -> None:
        """Drop them."""
        while self._free:
            self._drop(self._free.pop())
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        self._loop = None

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """To its end, on a loop in a thread of its own: the connections stay open between two tests."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="test-databases", daemon=True)
            self._thread.start()
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _made(self) -> str:
        name = f"berth_test_{uuid.uuid4().hex[:16]}"
        administer(self._admin_url, f'CREATE DATABASE "{name}" TEMPLATE template0 STRATEGY FILE_COPY')
        self._run(self._migrate(name))
        return name

    def _drop(self, name: str) -> None:
        self._structure.pop(name, None)
        if (cleaner := self._cleaners.pop(name, None)) is not None:
            self._run(_closed(cleaner))
        administer(self._admin_url, f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def _cleaned(self, name: str) -> bool:
        try:
            self._run(self._clean(name))
        except (Changed, asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
            return False
        return True

    async def _migrate(self, name: str) -> None:
        for schema, package in SCHEMAS.items():
            database = Database(named(self._admin_url, name), schema, pool_size=1)
            await database.open(f"{package}.store.migrations")
            await database.close()
        connection = await asyncpg.connect(
            plain(named(self._admin_url, name)),
            connection_class=TypedConnection,
            server_settings={"plan_cache_mode": "force_generic_plan"},  # the same few statements after each test
        )
        self._cleaners[name] = connection
        self._structure[name] = await connection.fetchval(_STRUCTURE, list(SCHEMAS))

    async def _clean(self, name: str) -> None:
        connection = self._cleaners[name]
        await connection.fetch(_OTHERS, GOODBYE_MS)
        schemas = list(SCHEMAS)
        if await connection.fetchval(_STRUCTURE, schemas) != self._structure[name]:
            raise Changed(name)
        if await connection.fetchval(_PUBLIC):
            raise Changed(name)
        for (foreign,) in await connection.fetch(_FOREIGN, schemas):
            await connection.execute(f'DROP SCHEMA "{foreign}" CASCADE')
        await self._empty(connection, name)

    async def _empty(self, connection: asyncpg.Connection, name: str) -> None:
        """Delete every row, and insert what a migrated schema begins with."""
        schemas = list(SCHEMAS)
        tables = await connection.fetch(_TABLES, schemas, REVISION_TABLES)
        known = [f'"{schema}"."{table}"' for schema, table, _ in tables]
        grown = any(size > MAX_TABLE_BYTES for _, _, size in tables)
        async with connection.transaction():
            await connection.execute(
                "SET LOCAL session_replication_role = replica"
            )  # the order of keys does not matter
            deleting = [f"TRUNCATE {', '.join(known)}"] if grown else [f"DELETE FROM {table}" for table in known]
            await connection.execute("; ".join(deleting))
            await connection.fetch(_SEQUENCES, schemas)
            for schema, package in SCHEMAS.items():
                await connection.execute(f'SET LOCAL search_path TO "{schema}"; {first_rows(package)}')
        # This connection's own statistics go too, and not to the next test.
        await connection.execute("SELECT pg_stat_force_next_flush()")
        await connection.execute("SELECT pg_stat_reset()")
        if grown:
            self._structure[name] = await connection.fetchval(_STRUCTURE, schemas)


async def _closed(connection: asyncpg.Connection) -> None:
    connection.terminate()


@cache
def first_rows(package: str) -> str:
    """The statements of a package's schema that insert rows."""
    return "; ".join(tables.first_rows(tables_of(f"{package}.store.migrations")))
