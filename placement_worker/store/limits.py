"""The usage of projects, one row for each project and class, and the limits that claims state for it.

Every transaction that changes allocations adds the difference to these rows at its end (`rows_of`), with or without
limits, so that a claim with limits need not sum up allocations. Claims with limits take a shared lock on their projects
and decide concurrently. The write compares the new usage with the limit once more; a group that would exceed it is
rolled back (PassedMeanwhile) and repeated under an exclusive lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.sql.dml import ReturningDelete

from bus.contracts.placement import INSTANCES
from placement_worker.domain.moves import MIGRATION_TYPE
from placement_worker.domain.server_groups import usage_changes
from placement_worker.domain.values import ConsumerState
from placement_worker.store.tables import allocations, consumers, project_usage

INSTANCES_ID = -1  # the class id of the row that counts the consumers with allocations

_EMPTY = project_usage.alias("empty")


def purge_empty(limit: int) -> ReturningDelete[Any]:
    """Delete rows whose amount is 0. Rows that another transaction has locked are skipped."""
    keys = sa.tuple_(project_usage.c.project_id, project_usage.c.class_id)
    empty = sa.select(_EMPTY.c.project_id, _EMPTY.c.class_id).where(_EMPTY.c.amount == 0).limit(limit)
    return (
        sa.delete(project_usage)
        .where(project_usage.c.amount == 0, keys.in_(empty.with_for_update(skip_locked=True)))
        .returning(project_usage.c.class_id)
    )


def _wrong() -> sa.Select[Any]:
    """(project, class id, recorded amount, correct amount) where the amounts differ."""
    usage, held = project_usage.c, allocations.c
    counts = sa.and_(consumers.c.released_at.is_(None), consumers.c.consumer_type != MIGRATION_TYPE)
    by_class = (
        sa.select(
            consumers.c.project_id, held.class_id, sa.cast(sa.func.sum(held.amount), sa.BigInteger).label("amount")
        )
        .select_from(consumers.join(allocations, held.consumer == consumers.c.uuid))
        .where(counts)
        .group_by(consumers.c.project_id, held.class_id)
    )
    instances = (
        sa.select(consumers.c.project_id, sa.literal(INSTANCES_ID, sa.Integer), sa.func.count())
        .where(counts, sa.exists().where(held.consumer == consumers.c.uuid))
        .group_by(consumers.c.project_id)
    )
    right = by_class.union_all(instances).subquery()
    same = sa.and_(right.c.project_id == usage.project_id, right.c.class_id == usage.class_id)
    recorded, correct = sa.func.coalesce(usage.amount, 0), sa.func.coalesce(right.c.amount, 0)
    return (
        sa.select(
            sa.func.coalesce(usage.project_id, right.c.project_id).label("project_id"),
            sa.func.coalesce(usage.class_id, right.c.class_id).label("class_id"),
            recorded.label("amount"),
            correct.label("held"),
        )
        .select_from(project_usage.join(right, same, full=True))
        .where(recorded != correct)
    )


WRONG = _wrong().subquery("wrong")
_ANEW = insert(project_usage).from_select(
    ["project_id", "class_id", "amount"], sa.select(WRONG.c.project_id, WRONG.c.class_id, WRONG.c.held)
)
# Correct the wrong rows. The caller ensures that no consumer changes meanwhile.
COUNT_ANEW = _ANEW.on_conflict_do_update(
    index_elements=["project_id", "class_id"], set_={"amount": _ANEW.excluded.amount}
).returning(project_usage.c.project_id)


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
        (project, INSTANCES_ID if name == INSTANCES else class_ids[name], more, most.get((project, name)))
        for (project, name), more in usage_changes(before, after).items()
    ]
