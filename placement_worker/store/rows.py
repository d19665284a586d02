"""Selects of placement's tables by SQLAlchemy Core, which are not hot, and whole providers in one statement."""

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
ALLOCATED: FromClause = (
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


def seconds(table: sa.Table) -> sa.ColumnElement[float]:
    """When a row was last written, in seconds since the epoch."""
    return sa.cast(sa.extract("epoch", table.c.updated_at), sa.Double)


def one_of(column: sa.ColumnElement[Any], name: str) -> sa.ColumnElement[bool]:
    """Whether the column has one of the values of this parameter."""
    return column == sa.any_(sa.bindparam(name, type_=sa.ARRAY(column.type)))


class ProviderRows(Struct, array_like=True):
    """What the function `read_providers` returns, in the order of the providers' numbers.

    providers: (its number, its parent's, its root's, when it was last written (seconds since the epoch), uuid, name,
    parent, root, generation, spec_generation, cell). The others begin with the provider's number: inventories: class,
    amount used, and the fields of StoredInventory; traits: name, lasting; aggregates: uuid.
    """

    providers: list[tuple[int, int | None, int, float, str, str, str | None, str, int, int, str | None]]
    inventories: list[tuple[int, str, int, int, int, int, int, int, float, int, bool]]
    traits: list[tuple[int, str, bool]]
    aggregates: list[tuple[int, str]]

    def whole(self) -> dict[str, Provider]:
        """The whole providers by uuid."""
        stocks: dict[int, tuple[dict[str, StoredInventory], dict[str, int]]] = defaultdict(lambda: ({}, {}))
        traits: dict[int, list[str]] = defaultdict(list)
        lasting: dict[int, list[str]] = defaultdict(list)
        aggregates: dict[int, list[str]] = defaultdict(list)
        for stock in self.inventories:
            inventories, used = stocks[stock[0]]
            inventories[stock[1]] = StoredInventory(*stock[3:])
            if stock[2]:
                used[stock[1]] = stock[2]
        for number, name, lasts in self.traits:
            traits[number].append(name)
            if lasts:
                lasting[number].append(name)
        for number, aggregate in self.aggregates:
            aggregates[number].append(aggregate)
        found: dict[str, Provider] = {}
        for row in self.providers:
            names = tuple(traits[row[0]]), tuple(aggregates[row[0]])
            found[row[4]] = Provider(*row[4:10], *stocks[row[0]], *names, row[10], tuple(lasting[row[0]]))
        return found


_decode = msgspec.json.Decoder(ProviderRows).decode

READ_PROVIDERS = "SELECT read_providers($1::bigint[])"
READ_PROVIDER = "SELECT read_providers(ARRAY(SELECT id FROM providers WHERE uuid = $1))"


async def read_providers(connection: asyncpg.Connection, ids: Sequence[int]) -> dict[str, Provider]:
    """Whole providers by uuid, in the order of their numbers."""
    return _decode(await connection.fetchval(READ_PROVIDERS, ids)).whole()


async def read_provider(connection: asyncpg.Connection, uuid: str) -> tuple[Provider, float] | None:
    """One provider, and when it was last written; None when it does not exist."""
    rows = _decode(await connection.fetchval(READ_PROVIDER, uuid))
    return (rows.whole()[uuid], rows.providers[0][3]) if rows.providers else None


def allocations_by_consumer(rows: Iterable[Sequence[Any]]) -> dict[str, dict[str, dict[str, int]]]:
    """Return rows of (consumer, provider, class, amount) as {consumer: {provider: {class: amount}}}."""
    held: dict[str, dict[str, dict[str, int]]] = {}
    for consumer, provider, name, amount in rows:
        held.setdefault(consumer, {}).setdefault(provider, {})[name] = amount
    return held


def transposed(rows: Sequence[tuple[object, ...]], width: int) -> list[list[object]]:
    """Return rows as columns; without rows, `width` empty columns."""
    return list(map(list, zip(*rows, strict=True))) if rows else [[] for _ in range(width)]
