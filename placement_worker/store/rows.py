"""Selects of the book's tables by SQLAlchemy Core, which are not hot, and whole providers in one statement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import asyncpg
import msgspec
import sqlalchemy as sa
from sqlalchemy.sql.selectable import FromClause

from placement_worker.domain.values import SHARING, Provider
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


# A provider as the function `read_providers` returns it: with the numbers of its own, its parent's and its root's row,
# and when it was last written, in seconds since the epoch.
ProviderRow = tuple[int, int | None, int, Provider, float]
_decode = msgspec.json.Decoder(list[ProviderRow]).decode

READ_PROVIDERS = "SELECT read_providers($1::bigint[])"
READ_PROVIDER = "SELECT read_providers(ARRAY(SELECT id FROM providers WHERE uuid = $1))"


async def read_providers(connection: asyncpg.Connection, ids: Sequence[int]) -> dict[str, Provider]:
    """Whole providers by uuid, in the order of their numbers."""
    answer: str = await connection.fetchval(READ_PROVIDERS, ids)
    return {row[3].uuid: row[3] for row in _decode(answer)}


async def read_provider(connection: asyncpg.Connection, uuid: str) -> tuple[Provider, float] | None:
    """One provider, and when it was last written; None when it does not exist."""
    for *_, provider, updated_at in _decode(await connection.fetchval(READ_PROVIDER, uuid)):
        return provider, updated_at
    return None


def holdings_of(rows: Iterable[Sequence[Any]]) -> dict[str, dict[str, dict[str, int]]]:
    """Return rows of (consumer, provider, class, amount) as {consumer: {provider: {class: amount}}}."""
    held: dict[str, dict[str, dict[str, int]]] = {}
    for consumer, provider, name, amount in rows:
        held.setdefault(consumer, {}).setdefault(provider, {})[name] = amount
    return held


def transposed(rows: Sequence[tuple[object, ...]], width: int) -> list[list[object]]:
    """Return rows as columns; without rows, `width` empty columns."""
    return list(map(list, zip(*rows, strict=True))) if rows else [[] for _ in range(width)]
