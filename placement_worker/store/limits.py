"""The usage of projects, one row for each project and class, and the limits that claims state for it.

Every transaction that changes allocations adds the difference to these rows at its end (`rows_of`), with or without
limits, so that a claim with limits need not sum up allocations. Claims with limits take a shared lock on their projects
and decide concurrently. The write compares the new usage with the limit once more; a group that would exceed it is
rolled back (PassedMeanwhile) and repeated under an exclusive lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bus.contracts.placement import INSTANCES
from placement_worker.domain.moves import MIGRATION_TYPE
from placement_worker.domain.server_groups import usage_changes
from placement_worker.domain.values import ConsumerState

INSTANCES_ID = -1  # the class id of the row that counts the consumers with allocations

# Delete rows whose amount is 0. Rows that another transaction has locked are skipped.
PURGE_EMPTY = """
DELETE FROM project_usage u USING (
    SELECT project_id, class_id FROM project_usage WHERE amount = 0 AND $1::float8 >= 0
    LIMIT $2 FOR UPDATE SKIP LOCKED
) AS n WHERE u.project_id = n.project_id AND u.class_id = n.class_id AND u.amount = 0
"""
# (project, class id, recorded amount, correct amount) where the amounts differ.
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
# Correct the wrong rows. The caller ensures that no consumer changes meanwhile.
COUNT_ANEW = f"""
INSERT INTO project_usage (project_id, class_id, amount) SELECT project_id, class_id, held FROM ({WRONG}) AS wrong
ON CONFLICT (project_id, class_id) DO UPDATE SET amount = excluded.amount RETURNING project_id
"""


def by_project(rows: Iterable[Sequence[Any]], class_names: Mapping[int, str]) -> dict[str, dict[str, int]]:
    """Return rows of (project, class id, amount) as {project: {class: amount}}."""
    held: dict[str, dict[str, int]] = {}
    for project, class_id, amount in rows:
        name = INSTANCES if class_id == INSTANCES_ID else class_names[class_id]
        held.setdefault(project, {})[name] = amount
    return held


def rows_of(
    before: Mapping[str, ConsumerState],
    after: Mapping[str, ConsumerState | None],
    class_ids: Mapping[str, int],
    most: Mapping[tuple[str, str], int],
) -> list[tuple[str, int, int, int | None]]:
    """Return (project, class id, difference, limit) rows for the consumers that change, as the SQL function takes them.

    most: the limits to compare once more when the rows are written.
    """
    return [
        (project, class_number(name, class_ids), more, most.get((project, name)))
        for (project, name), more in usage_changes(before, after).items()
    ]


def class_number(name: str, class_ids: Mapping[str, int]) -> int:
    """The class id under which a project's usage of a class is stored."""
    return INSTANCES_ID if name == INSTANCES else class_ids[name]
