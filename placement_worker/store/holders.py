"""The consumers that hold the amounts that a full claim lacked, read after the group was decided."""

from __future__ import annotations

from collections.abc import Mapping

import asyncpg

from bus.contracts.placement import MAX_HOLDERS, ClaimHolder
from placement_worker.domain.claim_ledger import Lacking
from placement_worker.store.rows import transposed

# Allocations of one provider that are searched. For a provider with more, the newest holders are not looked up, because
# that would cost too much.
MAX_ALLOCATIONS = 1000

NEWEST = """
WITH lacking AS (
    SELECT n.claim, n.claimant, p.id, n.class_id
    FROM unnest($1::int[], $2::uuid[], $3::uuid[], $4::int[]) AS n (claim, claimant, provider, class_id)
    JOIN providers p ON p.uuid = n.provider
), held AS (
    SELECT DISTINCT l.claim, a.consumer FROM lacking l CROSS JOIN LATERAL (
        SELECT s.consumer, s.class_id, count(*) OVER () AS every
        FROM (SELECT consumer, class_id FROM allocations WHERE provider_id = l.id LIMIT $5 + 1) s
    ) a WHERE a.every <= $5 AND a.class_id = l.class_id AND a.consumer <> l.claimant
), ranked AS (
    SELECT h.claim, c.uuid, c.project_id,
        row_number() OVER (PARTITION BY h.claim ORDER BY c.updated_at DESC, c.uuid) AS place
    FROM held h JOIN consumers c ON c.uuid = h.consumer
)
SELECT claim, uuid::text, project_id FROM ranked WHERE place <= $6 ORDER BY claim, place
"""


async def newest(
    connection: asyncpg.Connection, lost: Mapping[int, tuple[str, Lacking]], class_ids: Mapping[str, int]
) -> dict[int, tuple[ClaimHolder, ...]]:
    """Return, by place, the newest holders of the amounts that claims lacked."""
    rows = [
        (place, consumer, provider, class_ids[name])
        for place, (consumer, lacking) in lost.items()
        for provider, name in lacking
    ]
    found: dict[int, tuple[ClaimHolder, ...]] = {}
    for place, consumer, project in await connection.fetch(NEWEST, *transposed(rows, 4), MAX_ALLOCATIONS, MAX_HOLDERS):
        found[place] = (*found.get(place, ()), ClaimHolder(consumer=consumer, project_id=project))
    return found
