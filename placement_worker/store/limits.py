"""The totals of projects, as a row for each project and class, and the limits that claims put to them.

Each transaction that changes consumers' allocations adds the difference to these rows in the end (`rows_of`), whatever
the claims' limits: so nothing is added up when a claim has one. Claims with limits lock their project before that, and
two of them never pass one at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import asyncpg

from bus.contracts.placement import INSTANCES
from placement_worker.domain.claim_items import claims_of, projects_of
from placement_worker.domain.claims import ClaimItem
from placement_worker.domain.moves import MIGRATION_TYPE
from placement_worker.domain.server_groups import usage_changes
from placement_worker.domain.values import ConsumerState
from placement_worker.store.names import NameTable

INSTANCES_ID = -1  # instead of a class's number: how many consumers hold something

LOCK = "SELECT lock_projects($1::text[], true)"
# Rows of projects that hold nothing any more. One that is being written is left alone.
PURGE_EMPTY = """
DELETE FROM project_usage u USING (
    SELECT project_id, class_id FROM project_usage WHERE amount = 0 AND $1::float8 >= 0
    LIMIT $2 FOR UPDATE SKIP LOCKED
) AS n WHERE u.project_id = n.project_id AND u.class_id = n.class_id AND u.amount = 0
"""
# (project, class's number, amount, correct amount) where these differ.
WRONG = f"""
SELECT coalesce(u.project_id, s.project_id) AS project_id, coalesce(u.class_id, s.class_id) AS class_id,
    coalesce(u.amount, 0) AS amount, coalesce(s.amount, 0) AS held
FROM project_usage u FULL JOIN (
    SELECT c.project_id, a.class_id, sum(a.amount)::bigint AS amount
    FROM consumers c JOIN allocations a ON a.consumer = c.uuid
    WHERE c.released_at IS NULL AND c.consumer_type <> '{MIGRATION_TYPE}' GROUP BY c.project_id, a.class_id
    UNION ALL
    SELECT c.project_id, {INSTANCES_ID}, count(*) FROM consumers c
    WHERE c.released_at IS NULL AND c.consumer_type <> '{MIGRATION_TYPE}'
        AND EXISTS (SELECT FROM allocations a WHERE a.consumer = c.uuid) GROUP BY c.project_id
) s ON s.project_id = u.project_id AND s.class_id = u.class_id
WHERE coalesce(u.amount, 0) <> coalesce(s.amount, 0)
"""
# Where no consumer changes meanwhile.
COUNT_ANEW = f"""
INSERT INTO project_usage (project_id, class_id, amount) SELECT project_id, class_id, held FROM ({WRONG}) AS wrong
ON CONFLICT (project_id, class_id) DO UPDATE SET amount = excluded.amount RETURNING project_id
"""


class PassedMeanwhile(Exception):
    """The claims would pass a limit, because of amounts that others have added since the decision.

    Nothing was written.
    """


async def lock(connection: asyncpg.Connection, items: Sequence[ClaimItem]) -> None:
    """Lock the projects whose claims have limits, alone, as `claims.lock` does for a group that was passed."""
    projects = projects_of(items)
    if projects:
        await connection.execute(LOCK, projects)


def lowest(items: Sequence[ClaimItem]) -> dict[tuple[str, str], int]:
    """{(project, class): the lowest of the limits that claims put to it}."""
    found: dict[tuple[str, str], int] = {}
    for claim in claims_of(items):
        for name, limit in claim.limits.items():
            key = (claim.project_id, name)
            found[key] = min(found.get(key, limit), limit)
    return found


async def by_project(
    connection: asyncpg.Connection, rows: Iterable[Sequence[Any]], names: NameTable
) -> dict[str, dict[str, int]]:
    """Rows of (project, class's number, amount) as {project: {class: amount}}."""
    rows = list(rows)
    held: dict[str, dict[str, int]] = {}
    class_names = await names.names_of(connection, {row[1] for row in rows if row[1] != INSTANCES_ID})
    for project, class_id, amount in rows:
        name = INSTANCES if class_id == INSTANCES_ID else class_names[class_id]
        held.setdefault(project, {})[name] = amount
    return held


def rows_of(
    before: Mapping[str, ConsumerState],
    after: Mapping[str, ConsumerState | None],
    names: NameTable,
    most: Mapping[tuple[str, str], int],
) -> list[tuple[str, int, int, int | None]]:
    """(project, class's number, how much more, its limit) of consumers that change, as the schema's function takes it.

    most: the limits to look at once more when it is written.
    """
    return [
        (project, class_number(name, names), more, most.get((project, name)))
        for (project, name), more in usage_changes(before, after).items()
    ]


def class_number(name: str, names: NameTable) -> int:
    """The number under which a project's amount of a class is kept."""
    return INSTANCES_ID if name == INSTANCES else names.class_ids[name]
