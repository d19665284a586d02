"""The identity of a worker's database: a uuid made once with its schema.

A backup takes it along, so a restored database is the same one; an empty or another database is not.
"""

from __future__ import annotations

from bus.persistence.database import Database

# Every worker's schema has this table of one row.
READ = "SELECT deployment::text FROM identity"


async def read_identity(database: Database) -> str:
    """The identity of an open database."""
    async with database.raw() as connection:
        return str(await connection.fetchval(READ))
