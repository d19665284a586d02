"""The consumers that hold the amounts that a full claim lacked, read after the group was decided."""

from __future__ import annotations

from collections.abc import Sequence

import asyncpg

from bus.contracts.placement import MAX_HOLDERS, ClaimHolder
from placement_worker.domain.claim_items import lost_claims, with_holders
from placement_worker.domain.claim_verdict import ClaimVerdict
from placement_worker.domain.claims import ClaimItem
from placement_worker.store.names import NameTable

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


async def named(
    connection: asyncpg.Connection, items: Sequence[ClaimItem], verdicts: Sequence[ClaimVerdict], names: NameTable
) -> Sequence[ClaimVerdict]:
    """Return the verdicts; the first full claims name the newest holders of the amounts that they lacked, those of a
    gang as well.
    """
    rows = [
        (place, consumer, provider, names.class_ids[name])
        for place, (consumer, lacking) in lost_claims(items, verdicts).items()
        for provider, name in lacking
    ]
    if not rows:
        return verdicts
    columns = [list(column) for column in zip(*rows, strict=True)]
    found: dict[int, list[ClaimHolder]] = {}
    for place, consumer, project in await connection.fetch(NEWEST, *columns, MAX_ALLOCATIONS, MAX_HOLDERS):
        found.setdefault(place, []).append(ClaimHolder(consumer=consumer, project_id=project))
    return with_holders(verdicts, {place: tuple(holders) for place, holders in found.items()})
