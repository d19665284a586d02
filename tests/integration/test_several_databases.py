"""Which of several PostgreSQL servers a worker uses: the first that answers in time and takes writes."""

from __future__ import annotations

import asyncio
import socket

import asyncpg
import pytest
from sqlalchemy import text

from berth.trial.embedded.postgres import Postgres
from bus.faults import DatabaseUnavailable
from bus.persistence import database as module
from bus.persistence.database import Database
from tests.kit.clusters import database_pair

PATIENCE_S = 60.0

pytestmark = pytest.mark.postgres


async def test_a_primary_that_was_made_read_only_is_left_for_the_promoted_stand_by() -> None:
    manager = database_pair()
    pair = await asyncio.to_thread(manager.__enter__)
    database = Database(pair.url, "fenced")
    try:
        await database.open()
        assert await _port(database) == pair.primary.port
        admin = await asyncpg.connect(pair.primary.url())
        await admin.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        await admin.execute("SELECT pg_reload_conf()")
        await admin.close()
        await asyncio.to_thread(pair.stand_by.promote)
        async with asyncio.timeout(PATIENCE_S):
            while await _written_at(database) != pair.stand_by.port:  # noqa: ASYNC110  (nothing announces it)
                await asyncio.sleep(0.05)
    finally:
        await database.close()
        await asyncio.to_thread(manager.__exit__, None, None, None)


async def test_a_server_that_never_answers_does_not_hide_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECT_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as deaf, Postgres(tcp=True) as server:
        url = server.tcp_url().replace("127.0.0.1", f"127.0.0.1:{deaf.getsockname()[1]},127.0.0.1")
        database = Database(url, "deaf")
        async with asyncio.timeout(PATIENCE_S):
            await database.open()
        try:
            assert await _port(database) == server.port
        finally:
            await database.close()


async def _port(database: Database) -> int:
    async with database.transaction() as connection:
        return int(await connection.scalar(text("SELECT inet_server_port()")))


async def _written_at(database: Database) -> int:
    """The port of the server that took a write; 0: none did."""
    try:
        async with database.transaction() as connection:
            await connection.execute(text("CREATE TABLE IF NOT EXISTS written (n int)"))
            return int(await connection.scalar(text("SELECT inet_server_port()")))
    except DatabaseUnavailable:
        return 0
