"""Repairs inconsistencies that `audit` finds in the book. Each repair is one transaction together with its changes of
the feed.
"""

from __future__ import annotations

import asyncpg

from placement_worker.domain.reports import changes_of
from placement_worker.store import feed, limits
from placement_worker.store.rows import READ_PROVIDERS_BY_ID, read_providers
from placement_worker.store.trees import ONE_WRITER_OF_TREES

# Writers of consumers wait, readers do not. The lock is taken after that of the writers of trees and before any
# provider's row, as everywhere.
HOLD_CONSUMERS = "LOCK TABLE consumers IN EXCLUSIVE MODE"
LOCK_ALL = "SELECT id FROM providers ORDER BY id FOR NO KEY UPDATE"
# Allocations without a consumer, a provider or an inventory, which no client can release.
DELETE_STRAYS = """
DELETE FROM allocations a WHERE NOT EXISTS (
    SELECT FROM consumers c WHERE c.uuid = a.consumer AND c.released_at IS NULL
) OR NOT EXISTS (SELECT FROM inventories i WHERE i.provider_id = a.provider_id AND i.class_id = a.class_id)
"""
DELETE_EMPTY = """
DELETE FROM consumers c WHERE c.released_at IS NULL AND NOT EXISTS (SELECT FROM allocations a WHERE a.consumer = c.uuid)
"""
# Usage is the sum of the allocations.
COUNT_USED = """
UPDATE inventories i SET used = coalesce(s.amount, 0)
FROM inventories j LEFT JOIN (
    SELECT provider_id, class_id, sum(amount)::bigint AS amount FROM allocations GROUP BY provider_id, class_id
) s ON s.provider_id = j.provider_id AND s.class_id = j.class_id
WHERE i.provider_id = j.provider_id AND i.class_id = j.class_id AND i.used <> coalesce(s.amount, 0)
RETURNING i.provider_id
"""
MOVE = "UPDATE providers SET generation = generation + 1, updated_at = now() WHERE id = ANY($1::bigint[])"


async def repair(connection: asyncpg.Connection) -> list[str]:
    """Remove stray allocations and consumers and recompute the usage, inside the caller's transaction. Returns a line
    for each repair.
    """
    await connection.execute(ONE_WRITER_OF_TREES)
    await connection.execute(HOLD_CONSUMERS)
    await connection.execute(LOCK_ALL)
    strays = _count(await connection.execute(DELETE_STRAYS))
    empty = _count(await connection.execute(DELETE_EMPTY))
    recounted = sorted({row[0] for row in await connection.fetch(COUNT_USED)})
    await connection.execute(MOVE, recounted)
    _, after = await read_providers(connection, READ_PROVIDERS_BY_ID, recounted)
    projects = sorted({row[0] for row in await connection.fetch(limits.COUNT_ANEW)})
    await feed.append(connection, changes_of({}, after))
    done = ((strays, "allocations of no consumer removed"), (empty, "consumers without allocations removed"))
    lines = [f"{count} {what}" for count, what in done if count]
    lines += [f"{uuid}: usage recounted" for uuid in after]
    return lines + [f"project {project}: its allocations recounted" for project in projects]


def _count(tag: str) -> int:
    return int(tag.rpartition(" ")[2])
