"""Selects of the book's tables by SQLAlchemy Core, which are not hot, and whole providers in one statement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import asyncpg
import msgspec
import sqlalchemy as sa
from msgspec import Struct
from sqlalchemy.sql.selectable import FromClause

from placement_worker.domain.values import SHARING, Provider, StoredInventory
from placement_worker.store.port import NameKind
from placement_worker.store.tables import (
    allocations,
    consumers,
    inventories,
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
# Whether a provider shares with other trees.
SHARES = sa.exists().where(
    provider_traits.c.provider_id == providers.c.id,
    provider_traits.c.trait_id == traits.c.id,
    traits.c.name == SHARING,
)
NAMES = {NameKind.CLASS: resource_classes, NameKind.TRAIT: traits}


def columns_of(table: sa.Table, *names: str) -> list[sa.Column[Any]]:
    """These columns of a table."""
    return [table.c[name] for name in names]


def seconds(table: sa.Table) -> sa.ColumnElement[float]:
    """When a row was last written, in seconds since the epoch."""
    return sa.cast(sa.extract("epoch", table.c.updated_at), sa.Double)


def one_of(column: sa.ColumnElement[Any], name: str) -> sa.ColumnElement[bool]:
    """Whether the column has one of the values of this parameter."""
    return column == sa.any_(sa.bindparam(name, type_=sa.ARRAY(column.type)))


class ProviderRow(Struct, array_like=True):
    """A provider's row, with the numbers of its own, its parent's and its root's row. updated_at: seconds since the
    epoch.
    """

    id: int
    parent_id: int | None
    root_id: int
    updated_at: float
    uuid: str
    name: str
    parent: str | None
    root: str
    generation: int
    shape: int
    cell: str | None


class ProviderRows(Struct, array_like=True):
    """What the function `read_providers` returns. inventories: (provider's number, class, used, ...); traits:
    (provider's number, trait, lasting); aggregates: (provider's number, aggregate).
    """

    providers: list[ProviderRow]
    inventories: list[tuple[int, str, int, int, int, int, int, int, float, int, bool]]
    traits: list[tuple[int, str, bool]]
    aggregates: list[tuple[int, str]]

    def whole(self) -> dict[str, Provider]:
        """The whole providers by uuid, in the order of their numbers."""
        stocks: dict[int, tuple[dict[str, StoredInventory], dict[str, int]]] = defaultdict(lambda: ({}, {}))
        traits: dict[int, list[str]] = defaultdict(list)
        lasting: dict[int, list[str]] = defaultdict(list)
        aggregates: dict[int, list[str]] = defaultdict(list)
        for row in self.inventories:
            inventories, used = stocks[row[0]]
            inventories[row[1]] = StoredInventory(*row[3:])
            if row[2]:
                used[row[1]] = row[2]
        for number, name, lasts in self.traits:
            traits[number].append(name)
            if lasts:
                lasting[number].append(name)
        for number, aggregate in self.aggregates:
            aggregates[number].append(aggregate)
        return {
            one.uuid: Provider(
                one.uuid,
                one.name,
                one.parent,
                one.root,
                one.generation,
                one.shape,
                *stocks[one.id],
                tuple(traits[one.id]),
                tuple(aggregates[one.id]),
                one.cell,
                tuple(lasting[one.id]),
            )
            for one in self.providers
        }


_decode = msgspec.json.Decoder(ProviderRows).decode

READ_PROVIDERS = "SELECT read_providers($1::bigint[])"
READ_PROVIDER = "SELECT read_providers(ARRAY(SELECT id FROM providers WHERE uuid = $1))"


async def read_providers(connection: asyncpg.Connection, ids: Sequence[int]) -> dict[str, Provider]:
    """Whole providers by uuid, in the order of their numbers."""
    return _decode(await connection.fetchval(READ_PROVIDERS, ids)).whole()


async def read_provider(connection: asyncpg.Connection, uuid: str) -> tuple[Provider, float] | None:
    """One provider, and when it was last written; None when it does not exist."""
    rows = _decode(await connection.fetchval(READ_PROVIDER, uuid))
    return (rows.whole()[uuid], rows.providers[0].updated_at) if rows.providers else None


def holdings_of(rows: Iterable[Sequence[Any]]) -> dict[str, dict[str, dict[str, int]]]:
    """Return rows of (consumer, provider, class, amount) as {consumer: {provider: {class: amount}}}."""
    held: dict[str, dict[str, dict[str, int]]] = {}
    for consumer, provider, name, amount in rows:
        held.setdefault(consumer, {}).setdefault(provider, {})[name] = amount
    return held


def transposed(rows: Sequence[tuple[object, ...]], width: int) -> list[list[object]]:
    """Return rows as columns; without rows, `width` empty columns."""
    return list(map(list, zip(*rows, strict=True))) if rows else [[] for _ in range(width)]
