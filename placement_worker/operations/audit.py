"""Checks of the whole book, for `berth check` and for tests. They change nothing."""

from __future__ import annotations

from typing import Any

import asyncpg
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import aggregate_order_by

from bus.contracts.placement import INSTANCES
from bus.persistence.tables import fetch
from placement_worker.store import tables
from placement_worker.store.limits import WRONG
from placement_worker.store.rows import CLASSES, ROOT, SHARES, holdings_of

_STOCK, _HELD, _FEED = tables.inventories.c, tables.allocations.c, tables.changes.c


def _place(provider_id: sa.ColumnElement[int]) -> sa.ColumnElement[str]:
    return sa.func.coalesce(sa.cast(tables.providers.c.uuid, sa.Text), sa.func.concat("provider ", provider_id))


# Allocations of a provider that does not exist, too.
_ALLOCATIONS = (
    sa.select(_HELD.consumer, _place(_HELD.provider_id), CLASSES.name, _HELD.amount)
    .select_from(
        tables.allocations.outerjoin(tables.providers, tables.providers.c.id == _HELD.provider_id).join(
            tables.resource_classes, CLASSES.id == _HELD.class_id
        )
    )
    .order_by(_HELD.consumer, _HELD.provider_id, CLASSES.name)
)


_PROJECTS = (
    sa.select(WRONG.c.project_id, CLASSES.name, WRONG.c.amount, WRONG.c.held)
    .select_from(WRONG.outerjoin(tables.resource_classes, CLASSES.id == WRONG.c.class_id))
    .order_by(WRONG.c.project_id, CLASSES.name)
)


def _mismatches() -> sa.Select[Any]:
    """Inventories whose `used` is not the sum of their allocations, and allocations without an inventory."""
    counted = (
        sa.select(_HELD.provider_id, _HELD.class_id, sa.cast(sa.func.sum(_HELD.amount), sa.BigInteger).label("amount"))
        .group_by(_HELD.provider_id, _HELD.class_id)
        .subquery()
    )
    pair = sa.and_(counted.c.provider_id == _STOCK.provider_id, counted.c.class_id == _STOCK.class_id)
    provider, name = (sa.func.coalesce(_STOCK[one], counted.c[one]) for one in ("provider_id", "class_id"))
    allocated = sa.func.coalesce(counted.c.amount, 0)
    return (
        sa.select(_place(provider), CLASSES.name, _STOCK.used, allocated)
        .select_from(
            tables.inventories.join(counted, pair, full=True)
            .outerjoin(tables.providers, tables.providers.c.id == provider)
            .join(tables.resource_classes, CLASSES.id == name)
        )
        .where(_STOCK.used.is_distinct_from(allocated))
        .order_by(_place(provider), CLASSES.name)
    )


def _holes() -> sa.CompoundSelect[Any]:
    """Neighbouring rows of the feed whose numbers are not consecutive, and a last row whose number is not the head."""
    head = sa.select(tables.feed_head.c.number).scalar_subquery()
    rows = sa.select(sa.func.lag(_FEED.last).over(order_by=_FEED.last).label("before"), _FEED.first).subquery()
    between = sa.select(rows.c.before, rows.c.first).where(rows.c.first != rows.c.before + 1)
    newest = sa.func.max(_FEED.last)
    return between.union_all(sa.select(newest, head + 1).having(newest != head))


def _strays() -> sa.CompoundSelect[Any]:
    """Consumers without allocations that are no fence, and allocations whose consumer is unknown or only a fence."""
    consumers = tables.consumers.c
    held = sa.exists().where(_HELD.consumer == consumers.uuid)
    known = sa.exists().where(consumers.uuid == _HELD.consumer, consumers.released_at.is_(None))
    empty = sa.select(sa.func.concat("consumer ", consumers.uuid, " holds nothing")).where(
        consumers.released_at.is_(None), ~held
    )
    unknown = sa.func.concat("allocation of ", _HELD.consumer, ", whom the book does not know")
    return empty.union_all(sa.select(unknown).distinct().where(~known))


def _doubled() -> sa.Select[Any]:
    roots = sa.distinct(sa.cast(ROOT.c.uuid, sa.Text))
    return (
        sa.select(
            _HELD.consumer, CLASSES.name, sa.func.array_agg(aggregate_order_by(roots, sa.cast(ROOT.c.uuid, sa.Text)))
        )
        .select_from(
            tables.allocations.join(tables.providers, tables.providers.c.id == _HELD.provider_id)
            .join(ROOT, ROOT.c.id == tables.providers.c.root_id)
            .join(tables.resource_classes, CLASSES.id == _HELD.class_id)
        )
        .where(~SHARES)
        .group_by(_HELD.consumer, CLASSES.name)
        .having(sa.func.count(sa.distinct(tables.providers.c.root_id)) > 1)
        .order_by(_HELD.consumer, CLASSES.name)
    )


async def allocations(connection: asyncpg.Connection) -> dict[str, dict[str, dict[str, int]]]:
    """Return the allocations of every consumer: {consumer: {provider: {class: amount}}}."""
    return holdings_of(await fetch(connection, _ALLOCATIONS))


async def doubled(connection: asyncpg.Connection) -> list[str]:
    """Return consumers that hold one class of two trees, neither of which shares it; one line each."""
    rows = await fetch(connection, _doubled())
    return [f"{row[0]}: {row[1]} of {' and '.join(row[2])}" for row in rows]


async def findings(connection: asyncpg.Connection) -> list[str]:
    """Return all findings about the book, one line each; none when the book is consistent."""
    lines = [
        f"{provider} {name}: used {used}, allocated {allocated}"
        for provider, name, used, allocated in await fetch(connection, _mismatches())
    ]
    lines += [
        f"project {project} {INSTANCES if name is None else name}: {amount} counted, {held} held"
        for project, name, amount, held in await fetch(connection, _PROJECTS)
    ]
    lines += [row[0] for row in await fetch(connection, _strays())]
    lines += [f"feed: nothing between {after} and {before}" for after, before in await fetch(connection, _holes())]
    return lines
