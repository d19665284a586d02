"""A database of another service, MariaDB's or PostgreSQL's, which is read and never written: its address as SQLAlchemy
has it, one read in one transaction, and what a driver says of a fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import sqlalchemy
from sqlalchemy import URL
from sqlalchemy.exc import ArgumentError, InvalidRequestError, NoSuchModuleError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from bus.faults import Fault

MAX_SAID = 200  # characters of what a driver says of a fault
READ_ONLY: Final = sqlalchemy.text("SET TRANSACTION READ ONLY")

Engine = TypeVar("Engine")


class UnusableAddress(ValueError):
    """No database can be opened by it."""


class TooManyRows(Exception):
    """A table has more rows than its reader takes."""


def engine_of(url: str, make: Callable[[str], Engine]) -> Engine:
    """What makes an engine of an address. Raises UnusableAddress."""
    try:
        return make(url)
    except (ArgumentError, InvalidRequestError, NoSuchModuleError, ModuleNotFoundError) as error:
        raise UnusableAddress(str(error)) from error
    except ValueError as error:  # it names what is no number, of which a part of the password may be
        raise UnusableAddress("its port, or an option in it, is no number") from error


def snapshot_engine_of(url: str) -> AsyncEngine:
    """An engine whose connections are made for one read each. Raises UnusableAddress."""
    return engine_of(
        url, lambda at: create_async_engine(at, poolclass=sqlalchemy.NullPool, isolation_level="REPEATABLE READ")
    )


class Snapshot:
    """A database as of one moment; each statement is waited for `statement_s`."""

    def __init__(self, connection: AsyncConnection, limit: asyncio.Timeout, statement_s: float) -> None:
        self._connection = connection
        self._limit = limit
        self._statement_s = statement_s

    async def rows(self, statement: sqlalchemy.TextClause, **values: Any) -> Sequence[tuple[Any, ...]]:
        """What one statement finds."""
        self._limit.reschedule(asyncio.get_running_loop().time() + self._statement_s)
        return [tuple(row) for row in await self._connection.execute(statement, values)]

    async def pages(
        self, statement: sqlalchemy.TextClause, page: int, most: int, **values: Any
    ) -> AsyncIterator[Sequence[tuple[Any, ...]]]:
        """Page by page, by a statement that takes rows from an id (`:after`) on, their first column, in its order, at
        most `page` of them. Raises TooManyRows: there are more than `most`.
        """
        after, seen = 0, 0
        while True:
            rows = await self.rows(statement, after=after, **values)
            seen += len(rows)
            if seen > most:
                raise TooManyRows(f"more than {most} rows")
            yield rows
            if len(rows) < page:
                return
            after = rows[-1][0]


@asynccontextmanager
async def snapshot_of(engine: AsyncEngine, statement_s: float) -> AsyncIterator[Snapshot]:
    """Read in one transaction that cannot write. Raises TimeoutError, and what the driver raises."""
    async with asyncio.timeout(statement_s) as limit, engine.connect() as connection:
        await connection.execute(READ_ONLY)
        yield Snapshot(connection, limit, statement_s)


def fault_of(error: Exception, url: URL, limit_s: float) -> str:
    """The first line of the driver's own text, without the password, which some drivers repeat."""
    if isinstance(error, TimeoutError):
        return f"no answer within {limit_s:g} s"
    if isinstance(error, Fault | TooManyRows):
        return str(error)
    said = str(getattr(error, "orig", None) or "").partition("\n")[0]
    return (said.replace(str(url.password), "***") if url.password else said)[:MAX_SAID]
