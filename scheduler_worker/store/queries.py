"""What operators and users ask of the scheduler's tables: statements that are not hot, by SQLAlchemy Core.

A condition that a query does not name is no part of its statement, so that PostgreSQL plans for those that it has.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    ARRAY,
    ColumnElement,
    Select,
    Text,
    and_,
    any_,
    cast,
    func,
    literal,
    or_,
    select,
    tuple_,
    union_all,
)
from sqlalchemy.dialects.postgresql import JSON

from bus.contracts.moves import MoveQuery
from bus.contracts.objects import ObjectLogQuery
from scheduler_worker.store.objects import BUILDS_WITH_A_MACHINE
from scheduler_worker.store.port import ProjectsGroup
from scheduler_worker.store.rows import clean
from scheduler_worker.store.tables import build_requests, instances, moves, object_log


def machines(limit: int, flavor: str | None, group: ProjectsGroup | None, cell: str | None) -> Select[int]:
    """How many builds may have a machine, and how many machines a cell has kept for instances that left it."""
    columns = build_requests.c
    found: Any = select(literal(1)).where(columns.state == any_(literal(list(BUILDS_WITH_A_MACHINE), ARRAY(Text))))
    if flavor is not None:
        found = found.where(columns.flavor == flavor)
    if group is not None:
        named = cast(columns.request, JSON)[("server_group", "uuid")].astext
        found = found.where(columns.project_id == group[0], named == group[1])
    if cell is not None:
        kept = cast(instances.c.handed, JSON)[("kept", "cell")].astext == cell
        found = union_all(found.where(columns.cell == cell), select(literal(1)).where(kept))
    return select(func.count()).select_from(found.limit(limit).subquery())


def moves_of(query: MoveQuery) -> Select[Any]:
    """The requests that a query names, newest first: along the index that suits it."""
    found = select(moves)
    for column in (moves.c.request_id, moves.c.instance_uuid, moves.c.project_id):
        if (wanted := getattr(query, column.name)) is not None:
            found = found.where(column == wanted)
    if query.under_way is not None:
        found = found.where(moves.c.terminal != query.under_way)
    return found.order_by(moves.c.created_at.desc()).limit(query.limit)


def log_of(query: ObjectLogQuery) -> Select[Any]:
    """Entries of the log of changes, newest first: along the primary key."""
    columns = object_log.c
    found = select(object_log)
    if query.kind is not None:
        found = found.where(columns.kind == query.kind.value)
    if query.name is not None:
        found = found.where(columns.name == clean(query.name))
    if query.before is not None:
        earlier: ColumnElement[bool] = columns.revision < query.before
        if query.before_object:
            last = tuple_(*(literal(clean(word)) for word in query.before_object))
            earlier = or_(earlier, and_(columns.revision == query.before, tuple_(columns.kind, columns.name) > last))
        found = found.where(earlier)
    return found.order_by(columns.revision.desc(), columns.kind, columns.name).limit(query.limit)
