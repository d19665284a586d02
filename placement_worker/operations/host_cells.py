"""Reads the cell that a host belongs to, and moves a host to another cell for an operator."""

from __future__ import annotations

import asyncpg
from msgspec import Struct

from placement_worker.store.trees import ONE_WRITER_OF_TREES

# The whole tree is locked, so that claims of its providers are decided before or after the move.
LOCK_TREE = """
SELECT p.id, root.id, root.uuid, root.cell FROM providers p JOIN providers root ON root.id = p.root_id
WHERE p.root_id = (SELECT root_id FROM providers WHERE uuid::text = $1 OR name = $1 LIMIT 1)
ORDER BY p.id FOR NO KEY UPDATE OF p
"""
HOLDERS = "SELECT count(DISTINCT consumer) FROM allocations WHERE provider_id = ANY($1::bigint[])"
MOVE = "UPDATE providers SET cell = $2, updated_at = now() WHERE id = $1"
# The sources are deleted, because versions of the new cell's reports do not compare with those of the old cell.
DELETE_SOURCES = "DELETE FROM sources WHERE root = $1"


class Moved(Struct, frozen=True, kw_only=True):
    """The result of a move. outcome: moved | unchanged | unknown | in_use (holders: how many hold something there)."""

    outcome: str
    root: str = ""
    before: str | None = None
    holders: int = 0


async def move_host(connection: asyncpg.Connection, host: str, cell: str) -> Moved:
    """Move the tree of this provider (a uuid or a name) to another cell, inside the caller's transaction.

    The move is refused while a consumer holds allocations there: its instances belong to the old cell, which could no
    longer release them.
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
