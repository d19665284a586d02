"""Finds excess allocations: allocations that a consumer has twice, and usage beyond an inventory's capacity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import asyncpg
import sqlalchemy as sa
from msgspec import Struct
from sqlalchemy.dialects.postgresql import aggregate_order_by

from bus.contracts.placement import ConsumerAllocations, Swap, SwapResult
from bus.persistence.tables import UUID, fetch
from placement_worker.book import ResourceBook
from placement_worker.store import tables
from placement_worker.store.rows import CLASSES, SHARES, STOCKS

Holding = Mapping[str, Mapping[str, int]]

_STOCK = tables.inventories.c
_SHARERS = sa.select(tables.providers.c.uuid).where(SHARES)
_ALIVE = tables.consumers.c.released_at.is_(None)
_CONSUMER = sa.select(
    tables.consumers.c.project_id, tables.consumers.c.user_id, tables.consumers.c.consumer_type
).where(tables.consumers.c.uuid == sa.bindparam("uuid", type_=UUID), _ALIVE)
_GENERATIONS = sa.select(tables.consumers.c.uuid, tables.consumers.c.generation).where(_ALIVE)


def _beyond() -> sa.Select[Any]:
    """The newest consumers come first, because the last one found the host full or made it so. An inventory that is
    wholly reserved while it is in use (a bare-metal node with its instance) is correct, unless the usage exceeds its
    total.
    """
    held, consumers = tables.allocations.c, tables.consumers.c
    newest = (consumers.created_at.desc(), held.consumer)
    columns = (tables.providers.c.uuid, CLASSES.name, _STOCK.used, _STOCK.capacity, _STOCK.stranded)
    here = sa.and_(held.provider_id == _STOCK.provider_id, held.class_id == _STOCK.class_id)
    most = sa.func.floor(_STOCK.total * _STOCK.allocation_ratio)
    return (
        sa.select(
            *columns,
            sa.func.array_agg(aggregate_order_by(held.consumer, *newest)),
            sa.func.array_agg(aggregate_order_by(held.amount, *newest)),
        )
        .select_from(
            STOCKS.join(tables.providers)
            .join(tables.allocations, here)
            .join(tables.consumers, sa.and_(consumers.uuid == held.consumer, _ALIVE))
        )
        .where(
            _STOCK.used > _STOCK.capacity,
            sa.or_(_STOCK.stranded, _STOCK.reserved < _STOCK.total, _STOCK.used > most),
        )
        .group_by(*columns)
        .order_by(tables.providers.c.uuid, CLASSES.name)
    )


class Beyond(Struct, frozen=True):
    """An inventory whose usage exceeds its capacity, and the newest consumers without which the usage would fit."""

    provider: str
    resource_class: str
    used: int
    capacity: int
    stranded: bool
    newest: tuple[tuple[str, int], ...]

    def line(self) -> str:
        """Return the finding as a line of text."""
        place = f"{self.provider} {self.resource_class}: {self.used} of {self.capacity}"
        if self.stranded:
            return f"{place}, no longer reported; it is removed when it is no longer used"
        return f"{place}; fits without {', '.join(f'{uuid} ({amount})' for uuid, amount in self.newest)}"


class Doubled(Struct, frozen=True):
    """A consumer that runs on one host and holds allocations of the same classes on others, too. keeps: the allocations
    that it is to keep. generation: the consumer's generation, read before its allocations.
    """

    consumer: str
    host: str
    others: tuple[str, ...]
    keeps: Holding
    generation: int

    def line(self) -> str:
        """Return the finding as a line of text."""
        return f"{self.consumer}: runs on {self.host}, holds {', '.join(self.others)}"


async def beyond_capacity(connection: asyncpg.Connection) -> list[Beyond]:
    """Return every inventory whose usage exceeds its capacity, by provider and class."""
    found = []
    for provider, name, used, capacity, stranded, consumers, amounts in await fetch(connection, _beyond()):
        newest: list[tuple[str, int]] = []
        left = used
        for consumer, amount in zip(consumers, amounts, strict=True):
            if left <= capacity:
                break
            newest.append((consumer, amount))
            left -= amount
        found.append(Beyond(provider, name, used, capacity, stranded, tuple(newest)))
    return found


async def sharers(connection: asyncpg.Connection) -> frozenset[str]:
    """Return the sharing providers, whose allocations belong to no host."""
    return frozenset(row[0] for row in await fetch(connection, _SHARERS))


async def generations(connection: asyncpg.Connection) -> dict[str, int]:
    """Return the generation of every consumer. Call this function before anything else about the consumers is read (see
    `give_back`).
    """
    return dict(await fetch(connection, _GENERATIONS))


def doubled(  # noqa: PLR0917  (one question)
    consumer: str, host: str, holding: Holding, roots: Mapping[str, str], sharing: frozenset[str], generation: int
) -> list[str | Doubled]:
    """Find the allocations of a consumer on other hosts than `host`, where it runs, of classes that it holds on `host`,
    too. A consumer that holds only other classes elsewhere is described by a line, because nothing shows that they are
    excess.
    """
    places = {provider: roots.get(provider, provider) for provider in holding if provider not in sharing}
    elsewhere = sorted({place for place in places.values() if place != host})
    own = {name for provider, place in places.items() if place == host for name in holding[provider]}
    keeps = {
        provider: {n: amount for n, amount in resources.items() if places.get(provider, host) == host or n not in own}
        for provider, resources in holding.items()
    }
    keeps = {provider: resources for provider, resources in keeps.items() if resources}
    if keeps != holding:
        return [Doubled(consumer, host, tuple(elsewhere), keeps, generation)]
    return [f"{consumer}: runs on {host}, holds {', '.join(elsewhere)} alone"] if elsewhere else []


async def give_back(store: ResourceBook, connection: asyncpg.Connection, found: Sequence[Doubled]) -> list[str]:
    """Reduce each consumer to the allocations to keep. A consumer whose generation has changed meanwhile is skipped.
    Returns a line for each.
    """
    lines = []
    for each in found:
        rows = await fetch(connection, _CONSUMER, uuid=each.consumer)
        if not rows:
            continue
        entry = ConsumerAllocations(
            consumer=each.consumer,
            consumer_generation=each.generation,
            allocations={provider: dict(resources) for provider, resources in each.keeps.items()},
            project_id=rows[0][0],
            user_id=rows[0][1],
            consumer_type=rows[0][2],
        )
        [reply] = await store.apply([Swap(consumers=(entry,))])
        outcome = reply.outcome if isinstance(reply, SwapResult) else "refused"
        given = f"given back on {', '.join(each.others)}"
        lines.append(f"{each.consumer}: {given if outcome == 'claimed' else f'left alone, {outcome}'}")
    return lines
