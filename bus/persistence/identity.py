"""The identity of a worker's database: a uuid made once with its schema.

A backup takes it along, so a restored database is the same one; an empty or another database is not.
"""

from __future__ import annotations

from collections.abc import Callable

from bus.clock import Clock
from bus.faults import DatabaseReplaced, DatabaseUnprepared, Transient
from bus.persistence.database import Database

# Every worker's schema has this table of one row.
READ = "SELECT deployment::text FROM identity"
WATCH_S = 5.0  # the interval within which a worker notices that its schema was created anew


async def read_identity(database: Database) -> str:
    """The identity of an open database."""
    async with database.raw() as connection:
        return str(await connection.fetchval(READ))


async def watch_identity(database: Database, known: Callable[[], str], clock: Clock) -> None:
    """A side task: ends the worker when its schema is made anew while it runs. Until cancelled.

    Raises DatabaseReplaced, and DatabaseUnprepared where the schema is gone or has no identity. An unavailable database
    is compared later.
    """
    while True:
        await clock.sleep(WATCH_S)
        try:
            async with database.single() as connection:
                found = await connection.fetchval(READ)
        except Transient:
            continue
        check_identity(found, known())


def check_identity(found: str | None, known: str) -> None:
    """Raise unless the identity that was read is the one that this process knows."""
    if found is None:
        raise DatabaseUnprepared("its table identity is empty: restore the database")
    if found != known:
        raise DatabaseReplaced(
            f"its identity is {found} now and was {known}: the schema was made anew, or another database took its "
            "place; restore it, or start the workers again and see `berth bus owner`"
        )
