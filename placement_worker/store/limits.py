"""What projects hold together, where claims have limits: locked, so that two claims never pass one at once."""

from __future__ import annotations

from collections.abc import Sequence

import asyncpg

from bus.contracts.placement import INSTANCES, Claim
from placement_worker.store.members import HASHED, LOCK
from placement_worker.store.names import Names
from placement_worker.store.port import ClaimItem

HELD = """
SELECT c.project_id, a.class_id, sum(a.amount)::bigint FROM consumers c JOIN allocations a ON a.consumer = c.uuid
WHERE c.project_id = ANY($1::text[]) GROUP BY c.project_id, a.class_id
"""
COUNTED = """
SELECT c.project_id, count(*) FROM consumers c
WHERE c.project_id = ANY($1::text[]) AND EXISTS (SELECT FROM allocations a WHERE a.consumer = c.uuid)
GROUP BY c.project_id
"""


def projects_of(items: Sequence[ClaimItem]) -> list[str]:
    """The projects whose claims have limits, in the order of their locks."""
    return sorted({item.project_id for item in items if isinstance(item, Claim) and item.limits})


async def lock(connection: asyncpg.Connection, items: Sequence[ClaimItem], names: Names) -> dict[str, dict[str, int]]:
    """{project: {class: amount}} of those with limits, and how many consumers, as the locks' last holders left it."""
    projects = projects_of(items)
    if not projects:
        return {}
    hashed = await connection.fetch(HASHED, [f"project {project}" for project in projects])
    await connection.execute(LOCK, [row["key"] for row in hashed])
    held: dict[str, dict[str, int]] = {project: {} for project in projects}
    rows = await connection.fetch(HELD, projects)
    class_names = await names.names_of(connection, {row[1] for row in rows})
    for project, class_id, amount in rows:
        held[project][class_names[class_id]] = amount
    for project, count in await connection.fetch(COUNTED, projects):
        held[project][INSTANCES] = count
    return held
