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
)
from sqlalchemy.dialects.postgresql import JSON

from bus.contracts.moves import MoveQuery
from bus.contracts.objects import ObjectLogQuery
from scheduler_worker.store.objects import BUILDS_WITH_A_MACHINE
from scheduler_worker.store.rows import clean
from scheduler_worker.store.tables import build_requests, moves, object_log


def builds_of(flavor: str, limit: int) -> Select[int]:
    """How many builds of a flavor may have a machine: a scan that ends at the limit."""
    return _count(_builds(build_requests.c.flavor == flavor).limit(limit))


def builds_of_group(project: str, group: str, limit: int) -> Select[int]:
    """The same of a server group: a scan of the project's builds that ends at the limit."""
    named = cast(build_requests.c.request, JSON)[("server_group", "uuid")].astext == group
    return _count(_builds(build_requests.c.project_id == project, named).limit(limit))


def builds_in_cell(cell: str, limit: int) -> Select[int]:
    """The same of a cell."""
    return _count(_builds(build_requests.c.cell == cell).limit(limit))


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


def _builds(*conditions: ColumnElement[bool]) -> Select[int]:
    has_machine = build_requests.c.state == any_(literal(list(BUILDS_WITH_A_MACHINE), ARRAY(Text)))
    return select(literal(1)).where(has_machine, *conditions)


def _count(found: Any) -> Select[int]:
    return select(func.count()).select_from(found.subquery())
