"""The one way into the database: a transaction on an asyncpg connection, its faults translated."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

from bus.faults import DatabaseUnavailable
from bus.service.database import Database


@asynccontextmanager
async def transaction(database: Database) -> AsyncIterator[asyncpg.Connection]:
    """Commits at the end, rolls back on an exception."""
    try:
        async with database.raw() as connection:
            yield connection
    except asyncpg.InternalClientError as error:
        # What asyncpg says when the server ends the session in the very moment of our next statement: its last word
        # arrives where no answer is expected. To us that is a server that went away.
        raise DatabaseUnavailable(str(error)) from error
