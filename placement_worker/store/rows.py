"""Selects of the book's tables by SQLAlchemy Core, which are not hot, and whole providers in four statements, however
many providers there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import asyncpg
from sqlalchemy import (
    ARRAY,
    BigInteger,
    Column,
    ColumnElement,
    Double,
    Select,
    Table,
    Text,
    any_,
    bindparam,
    cast,
    extract,
    select,
)
from sqlalchemy.sql.selectable import FromClause

from bus.persistence.tables import UUID, fetch
from placement_worker.domain.values import Provider, StoredInventory
from placement_worker.store.port import NameKind
from placement_worker.store.tables import (
    allocations,
    consumers,
    inventories,
    provider_aggregates,
    provider_traits,
    providers,
    resource_classes,
    traits,
)

PARENT, ROOT = providers.alias("parent"), providers.alias("root")
CLASSES: Any = resource_classes.c
PROVIDERS: FromClause = providers.outerjoin(PARENT, PARENT.c.id == providers.c.parent_id).join(
    ROOT, ROOT.c.id == providers.c.root_id
)
STOCKS: FromClause = inventories.join(resource_classes)
# Allocations with their providers, consumers and classes.
HELD: FromClause = (
    allocations.join(providers, providers.c.id == allocations.c.provider_id)
    .join(consumers, consumers.c.uuid == allocations.c.consumer)
    .join(resource_classes, resource_classes.c.id == allocations.c.class_id)
)
NAMES = {NameKind.CLASS: resource_classes, NameKind.TRAIT: traits}

_PROVIDER: Select[Any] = select(
    providers.c.id,
    providers.c.uuid,
    providers.c.name,
    PARENT.c.uuid,
    ROOT.c.uuid,
    providers.c.generation,
    providers.c.shape,
    providers.c.cell,
).select_from(PROVIDERS)


def columns_of(table: Table, *names: str) -> list[Column[Any]]:
    """These columns of a table."""
    return [table.c[name] for name in names]


def seconds(table: Table) -> ColumnElement[float]:
    """When a row was last written, in seconds since the epoch."""
    return cast(extract("epoch", table.c.updated_at), Double)


def ids(column: ColumnElement[int], name: str = "ids") -> ColumnElement[bool]:
    """Whether the column has one of the numbers of this parameter."""
    return column == any_(bindparam(name, type_=ARRAY(BigInteger)))


def uuids(column: ColumnElement[str], name: str = "uuids") -> ColumnElement[bool]:
    """Whether the column has one of the uuids of this parameter."""
    return column == any_(bindparam(name, type_=ARRAY(UUID)))


def texts(column: ColumnElement[str], name: str) -> ColumnElement[bool]:
    """Whether the column has one of the texts of this parameter."""
    return column == any_(bindparam(name, type_=ARRAY(Text)))


PROVIDERS_BY_ID = _PROVIDER.where(ids(providers.c.id)).order_by(providers.c.id)
_STOCKS = (
    select(
        inventories.c.provider_id,
        CLASSES.name,
        inventories.c.total,
        inventories.c.reserved,
        inventories.c.min_unit,
        inventories.c.max_unit,
        inventories.c.step_size,
        inventories.c.allocation_ratio,
        inventories.c.capacity,
        inventories.c.stranded,
        inventories.c.used,
    )
    .select_from(STOCKS)
    .where(ids(inventories.c.provider_id))
    .order_by(inventories.c.provider_id, CLASSES.name)
)
_TRAITS = (
    select(provider_traits.c.provider_id, traits.c.name, provider_traits.c.lasting)
    .select_from(provider_traits.join(traits))
    .where(ids(provider_traits.c.provider_id))
    .order_by(provider_traits.c.provider_id, traits.c.name)
)
_AGGREGATES = (
    select(provider_aggregates.c.provider_id, provider_aggregates.c.aggregate)
    .where(ids(provider_aggregates.c.provider_id))
    .order_by(provider_aggregates.c.provider_id, provider_aggregates.c.aggregate)
)


def providers_after(after: str | None, limit: int) -> Select[Any]:
    """Providers in the order of their uuids."""
    found = _PROVIDER.order_by(providers.c.uuid).limit(limit)
    return found if after is None else found.where(providers.c.uuid > after)


async def read_providers(
    connection: asyncpg.Connection, statement: Select[Any] = PROVIDERS_BY_ID, **values: object
) -> tuple[dict[str, int], dict[str, Provider]]:
    """({uuid: id}, {uuid: provider}) of the rows that one of the statements above selects, in its order."""
    rows = await fetch(connection, statement, **values)
    numbers = [row[0] for row in rows]
    stocks: dict[int, dict[str, StoredInventory]] = {number: {} for number in numbers}
    used: dict[int, dict[str, int]] = {number: {} for number in numbers}
    for number, name, *inventory, amount in await fetch(connection, _STOCKS, ids=numbers):
        stocks[number][name] = StoredInventory(*inventory)
        if amount:
            used[number][name] = amount
    names: dict[int, list[str]] = {number: [] for number in numbers}
    lasting: dict[int, list[str]] = {number: [] for number in numbers}
    for number, name, lasts in await fetch(connection, _TRAITS, ids=numbers):
        names[number].append(name)
        if lasts:
            lasting[number].append(name)
    aggregates: dict[int, list[str]] = {number: [] for number in numbers}
    for number, aggregate in await fetch(connection, _AGGREGATES, ids=numbers):
        aggregates[number].append(aggregate)
    found = {
        row[1]: Provider(
            uuid=row[1],
            name=row[2],
            parent=row[3],
            root=row[4],
            generation=row[5],
            shape=row[6],
            inventories=stocks[row[0]],
            used=used[row[0]],
            traits=tuple(names[row[0]]),
            aggregates=tuple(aggregates[row[0]]),
            cell=row[7],
            lasting=tuple(lasting[row[0]]),
        )
        for row in rows
    }
    return {row[1]: row[0] for row in rows}, found


def transposed(rows: Sequence[tuple[object, ...]], width: int) -> list[list[object]]:
    """Return rows as columns; without rows, `width` empty columns."""
    return list(map(list, zip(*rows, strict=True))) if rows else [[] for _ in range(width)]
