"""Which cell a host belongs to, and the operator's way to give it to another."""

from __future__ import annotations

import asyncpg
from msgspec import Struct

from placement_worker.store.inventory import ONE_WRITER_OF_TREES

# The whole tree is locked: a claim of any of its providers is before or after, never beside.
LOCK_TREE = """
SELECT p.id, root.id, root.uuid, root.cell FROM providers p JOIN providers root ON root.id = p.root_id
WHERE p.root_id = (SELECT root_id FROM providers WHERE uuid::text = $1 OR name = $1 LIMIT 1)
ORDER BY p.id FOR NO KEY UPDATE OF p
"""
HOLDERS = "SELECT count(DISTINCT consumer) FROM allocations WHERE provider_id = ANY($1::bigint[])"
MOVE = "UPDATE providers SET cell = $2, updated_at = now() WHERE id = $1"
# The next cell's reports begin anew: their versions are not to be compared with another cell's.
DELETE_SOURCES = "DELETE FROM sources WHERE root = $1"


class Moved(Struct, frozen=True, kw_only=True):
    """The result of a move. outcome: moved | unchanged | unknown | in_use (holders: how many hold something there)."""

    outcome: str
    root: str = ""
    before: str | None = None
    holders: int = 0


async def move_host(connection: asyncpg.Connection, host: str, cell: str) -> Moved:
    """Give the tree of this provider (a uuid or a name) to another cell, inside the caller's transaction.

    Not while a consumer holds something there: the instances are the old cell's, and it could not release them any
    more.
    """
    await connection.execute(ONE_WRITER_OF_TREES)
    rows = await connection.fetch(LOCK_TREE, host)
    if not rows:
        return Moved(outcome="unknown")
    _, root_id, root, before = rows[0]
    if before == cell:
        return Moved(outcome="unchanged", root=root, before=before)
    holders: int = await connection.fetchval(HOLDERS, [row[0] for row in rows])
    if holders:
        return Moved(outcome="in_use", root=root, before=before, holders=holders)
    await connection.execute(MOVE, root_id, cell)
    await connection.execute(DELETE_SOURCES, root)
    return Moved(outcome="moved", root=root, before=before)
