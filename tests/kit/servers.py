"""The servers of one test session: started on first use, or those that AMQP_URL and DATABASE_URL name."""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import asyncpg
from sqlalchemy.engine import make_url

from berth.up.embedded.postgres import Postgres
from berth.up.embedded.rabbitmq import RabbitMQ

ADMIN_TIMEOUT_S = 60.0


@contextmanager
def postgres_server() -> Iterator[str]:
    """The URL of an administration database: DATABASE_URL's, or a private server's for as long as the block runs."""
    given = os.environ.get("DATABASE_URL")
    if given:
        yield given
        return
    with Postgres() as server:
        yield server.url("postgres")


@contextmanager
def amqp_server() -> Iterator[str]:
    """The URL of a broker that tests share: AMQP_URL's, or a private one for as long as the block runs."""
    given = os.environ.get("AMQP_URL")
    if given:
        yield given
        return
    with RabbitMQ() as broker:
        yield broker.url()


@contextmanager
def fresh_database(admin_url: str) -> Iterator[str]:
    """The URL of a new, empty database, dropped afterwards with every connection that is still there."""
    name = f"berth_test_{uuid.uuid4().hex[:16]}"
    administer(admin_url, f'CREATE DATABASE "{name}" TEMPLATE template0 STRATEGY FILE_COPY')
    try:
        yield named(admin_url, name)
    finally:
        administer(admin_url, f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


def named(url: str, database: str) -> str:
    """The URL of another database of the same server."""
    return make_url(url).set(database=database).render_as_string(hide_password=False)


def plain(url: str) -> str:
    """As asyncpg takes it."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def administer(url: str, statement: str) -> None:
    """Execute one statement on a connection of its own."""

    async def run() -> None:
        connection = await asyncpg.connect(plain(url), timeout=ADMIN_TIMEOUT_S, command_timeout=ADMIN_TIMEOUT_S)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    in_thread(run())


def in_thread(work: Coroutine[Any, Any, None]) -> None:
    """Run to the end on a loop of its own, away from the loop that the test may have in this thread."""
    failures: list[BaseException] = []

    def body() -> None:
        try:
            asyncio.run(work)
        except BaseException as error:  # handed to the caller below
            failures.append(error)

    thread = threading.Thread(target=body, name="test-administration")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
