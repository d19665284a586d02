"""The statements with which the REST API creates, renames and removes resource classes and traits."""

from __future__ import annotations

import asyncpg

from placement_worker.domain.names import STANDARD_CLASSES
from placement_worker.domain.reports import changes_of
from placement_worker.store import feed
from placement_worker.store.inventory import ONE_WRITER_OF_TREES
from placement_worker.store.rest_port import NameRow
from placement_worker.store.rows import READ_PROVIDERS_BY_ID, read_providers

_NAME = "name, extract(epoch FROM updated_at)::float8"
CREATE = "INSERT INTO {table} (name) VALUES ($1) ON CONFLICT (name) DO NOTHING RETURNING id"
# The renamed class gets a new id, because other processes cache names by id and an id must always mean the same name.
# They can no longer write the old id, and they look up the new one, which they have not cached.
RENAME = "INSERT INTO resource_classes (name) SELECT $2 FROM resource_classes WHERE name = $1 RETURNING id"
MOVE_INVENTORIES = """
UPDATE inventories SET class_id = $2 WHERE class_id = (SELECT id FROM resource_classes WHERE name = $1)
"""
MOVE_ALLOCATIONS = """
UPDATE allocations SET class_id = $2 WHERE class_id = (SELECT id FROM resource_classes WHERE name = $1)
"""
MOVE_PROJECT_USAGE = """
UPDATE project_usage SET class_id = $2 WHERE class_id = (SELECT id FROM resource_classes WHERE name = $1)
"""
# A foreign key refuses the delete while a provider has the class or trait.
DELETE = "DELETE FROM {table} WHERE name = $1"
HOLDERS = """
SELECT p.id FROM providers p JOIN inventories i ON i.provider_id = p.id JOIN resource_classes c ON c.id = i.class_id
WHERE c.name = $1 ORDER BY p.id FOR NO KEY UPDATE OF p
"""
ASSOCIATED = "EXISTS (SELECT FROM provider_traits pt WHERE pt.trait_id = traits.id)"


async def one(connection: asyncpg.Connection, table: str, name: str) -> NameRow | None:
    """A class or trait by name."""
    row = await connection.fetchrow(f"SELECT {_NAME} FROM {table} WHERE name = $1", name)
    return None if row is None else NameRow(*row)


async def classes(connection: asyncpg.Connection) -> list[NameRow]:
    """All classes, standard ones first."""
    rows = await connection.fetch(f"SELECT {_NAME} FROM resource_classes ORDER BY id")
    return sorted((NameRow(*row) for row in rows), key=lambda row: row.name not in STANDARD_CLASSES)


async def traits(
    connection: asyncpg.Connection, names: list[str] | None, prefix: str | None, associated: bool | None
) -> list[NameRow]:
    """All traits with one of these names, with this prefix, that some provider has, or that none has."""
    held = "" if associated is None else f"AND {ASSOCIATED}" if associated else f"AND NOT {ASSOCIATED}"
    statement = f"""
        SELECT {_NAME} FROM traits WHERE ($1::text[] IS NULL OR name = ANY($1))
        AND ($2::text IS NULL OR starts_with(name, $2)) {held} ORDER BY id
    """
    return [NameRow(*row) for row in await connection.fetch(statement, names, prefix)]


async def create(connection: asyncpg.Connection, table: str, name: str) -> bool:
    """Create a class or trait. Returns False when it exists."""
    return await connection.fetchval(CREATE.format(table=table), name) is not None


async def delete(connection: asyncpg.Connection, table: str, name: str) -> bool:
    """Remove a class or trait. Returns False when it does not exist. Raises asyncpg's ForeignKeyViolationError while a
    provider has it.
    """
    tag: str = await connection.execute(DELETE.format(table=table), name)
    return tag != "DELETE 0"


async def rename_class(connection: asyncpg.Connection, old: str, new: str) -> bool:
    """Give a class another name (below 1.7), and append a change for every provider that has it. Returns False when the
    class does not exist.
    """
    await connection.execute(ONE_WRITER_OF_TREES)
    holders = [row[0] for row in await connection.fetch(HOLDERS, old)]
    number = await connection.fetchval(RENAME, old, new)
    if number is None:
        return False
    await connection.execute(MOVE_INVENTORIES, old, number)
    await connection.execute(MOVE_ALLOCATIONS, old, number)
    await connection.execute(MOVE_PROJECT_USAGE, old, number)
    await delete(connection, "resource_classes", old)
    _, after = await read_providers(connection, READ_PROVIDERS_BY_ID, holders)
    await feed.append(connection, changes_of({}, after))
    return True
