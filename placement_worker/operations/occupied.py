"""Claims a bare-metal node for the instance that already runs there. The node is reserved as a whole, so no other claim
can take it meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import asyncpg

from bus.contracts.placement import Swap
from placement_worker.book import claim
from placement_worker.domain.claim_group import ClaimGroup, ClaimReply
from placement_worker.domain.values import ABOVE_CELLS
from placement_worker.operations.repair import HOLD_CONSUMERS
from placement_worker.store.postgres_transaction import PostgresBookTransaction
from placement_worker.store.trees import ONE_WRITER_OF_TREES

LOCK = "SELECT id FROM providers WHERE uuid = ANY($1::uuid[]) ORDER BY id FOR NO KEY UPDATE"
# This applies to nodes with one unit of a class alone; on other hosts the reserved amount is not meant for instances.
OPEN = """
UPDATE inventories SET reserved = 0, capacity = total
WHERE provider_id = ANY($1::bigint[]) AND total = 1 AND reserved = 1 AND used = 0 AND NOT stranded
RETURNING provider_id, class_id
"""
CLOSE = """
UPDATE inventories i SET reserved = total, capacity = 0
FROM unnest($1::bigint[], $2::int[]) AS n (provider_id, class_id)
WHERE i.provider_id = n.provider_id AND i.class_id = n.class_id
"""


async def claim_occupied(transaction: PostgresBookTransaction, swap: Swap) -> ClaimReply:
    """Apply a swap as if the named nodes were not reserved, inside the caller's transaction.

    They are reserved again at the commit, so neither a claim nor a replica ever sees them free. The caller has verified
    by the cell's records that the consumer runs there.
    """
    connection = transaction.connection
    await connection.execute(ONE_WRITER_OF_TREES)
    await connection.execute(HOLD_CONSUMERS)
    named = sorted({uuid for entry in swap.consumers for uuid in entry.allocations})
    locked = [row[0] for row in await connection.fetch(LOCK, named)]
    opened: Sequence[asyncpg.Record] = await connection.fetch(OPEN, locked)
    [reply] = await claim(transaction, ClaimGroup([swap]), ABOVE_CELLS)
    await connection.execute(CLOSE, [row[0] for row in opened], [row[1] for row in opened])
    return reply
