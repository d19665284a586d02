"""Checks of all of placement, for `berth check` and for tests, which change nothing: also for allocations that a
consumer has twice, and usage beyond an inventory's capacity. And an operator's writes: repairs of what they find, a
host's move to another cell, and the claim of a bare-metal node for the instance that already runs there. Each write is
inside the caller's transaction, with its changes of the feed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import asyncpg
import sqlalchemy as sa
from msgspec import Struct
from sqlalchemy.dialects.postgresql import aggregate_order_by

from bus.contracts.base import Refusal
from bus.contracts.placement import INSTANCES, ConsumerAllocations, Swap, SwapResult
from bus.persistence.tables import UUID, fetch
from placement_worker.domain.claim_group import ClaimGroup
from placement_worker.domain.claim_ledger import ClaimReply
from placement_worker.domain.reports import changes_of
from placement_worker.domain.values import ABOVE_CELLS, ProviderAllocations
from placement_worker.service import PlacementService, claim
from placement_worker.store import feed, tables
from placement_worker.store.claims import COUNT_ANEW, WRONG
from placement_worker.store.postgres_rows import PostgresPlacementTransaction
from placement_worker.store.rows import CLASSES, ROOT, SHARES, STOCKS, allocations_by_consumer, one_of, read_providers
from placement_worker.store.tables import consumers, inventories, providers, reporters
from placement_worker.store.trees import ONE_WRITER_OF_TREES

_STOCK, _ALLOCATED, _FEED = tables.inventories.c, tables.allocations.c, tables.changes.c


def _place(provider_id: sa.ColumnElement[int]) -> sa.ColumnElement[str]:
    return sa.func.coalesce(sa.cast(tables.providers.c.uuid, sa.Text), sa.func.concat("provider ", provider_id))


# Allocations of a provider that does not exist, too.
_ALLOCATIONS = (
    sa.select(_ALLOCATED.consumer, _place(_ALLOCATED.provider_id), CLASSES.name, _ALLOCATED.amount)
    .select_from(
        tables.allocations.outerjoin(tables.providers, tables.providers.c.id == _ALLOCATED.provider_id).join(
            tables.resource_classes, CLASSES.id == _ALLOCATED.class_id
        )
    )
    .order_by(_ALLOCATED.consumer, _ALLOCATED.provider_id, CLASSES.name)
)


_PROJECTS = (
    sa.select(WRONG.c.project_id, CLASSES.name, WRONG.c.amount, WRONG.c.held)
    .select_from(WRONG.outerjoin(tables.resource_classes, CLASSES.id == WRONG.c.class_id))
    .order_by(WRONG.c.project_id, CLASSES.name)
)


def _mismatches() -> sa.Select[Any]:
    """Inventories whose `used` is not the sum of their allocations, and allocations without an inventory."""
    counted = (
        sa.select(
            _ALLOCATED.provider_id,
            _ALLOCATED.class_id,
            sa.cast(sa.func.sum(_ALLOCATED.amount), sa.BigInteger).label("amount"),
        )
        .group_by(_ALLOCATED.provider_id, _ALLOCATED.class_id)
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


def _feed_gaps() -> sa.CompoundSelect[Any]:
    """Neighbouring rows of the feed whose numbers are not consecutive, and a last row whose number is not the head."""
    head = sa.select(tables.feed_head.c.number).scalar_subquery()
    rows = sa.select(sa.func.lag(_FEED.last).over(order_by=_FEED.last).label("before"), _FEED.first).subquery()
    between = sa.select(rows.c.before, rows.c.first).where(rows.c.first != rows.c.before + 1)
    newest = sa.func.max(_FEED.last)
    return between.union_all(sa.select(newest, head + 1).having(newest != head))


def _strays() -> sa.CompoundSelect[Any]:
    """Consumers without allocations that were not released, and allocations whose consumer is unknown or was."""
    consumers = tables.consumers.c
    held = sa.exists().where(_ALLOCATED.consumer == consumers.uuid)
    known = sa.exists().where(consumers.uuid == _ALLOCATED.consumer, consumers.released_at.is_(None))
    empty = sa.select(sa.func.concat("consumer ", consumers.uuid, " holds nothing")).where(
        consumers.released_at.is_(None), ~held
    )
    unknown = sa.func.concat("allocation of ", _ALLOCATED.consumer, ", whom placement does not know")
    return empty.union_all(sa.select(unknown).distinct().where(~known))


def _duplicate() -> sa.Select[Any]:
    roots = sa.distinct(sa.cast(ROOT.c.uuid, sa.Text))
    return (
        sa.select(
            _ALLOCATED.consumer,
            CLASSES.name,
            sa.func.array_agg(aggregate_order_by(roots, sa.cast(ROOT.c.uuid, sa.Text))),
        )
        .select_from(
            tables.allocations.join(tables.providers, tables.providers.c.id == _ALLOCATED.provider_id)
            .join(ROOT, ROOT.c.id == tables.providers.c.root_id)
            .join(tables.resource_classes, CLASSES.id == _ALLOCATED.class_id)
        )
        .where(~SHARES)
        .group_by(_ALLOCATED.consumer, CLASSES.name)
        .having(sa.func.count(sa.distinct(tables.providers.c.root_id)) > 1)
        .order_by(_ALLOCATED.consumer, CLASSES.name)
    )


async def allocations(connection: asyncpg.Connection) -> dict[str, dict[str, dict[str, int]]]:
    """Return the allocations of every consumer: {consumer: {provider: {class: amount}}}."""
    return allocations_by_consumer(await fetch(connection, _ALLOCATIONS))


async def duplicates(connection: asyncpg.Connection) -> list[str]:
    """Return consumers that hold one class of two trees, neither of which shares it; one line each."""
    rows = await fetch(connection, _duplicate())
    return [f"{row[0]}: {row[1]} of {' and '.join(row[2])}" for row in rows]


async def findings(connection: asyncpg.Connection) -> list[str]:
    """Return all findings about placement, one line each; none when placement is consistent."""
    lines = [
        f"{provider} {name}: used {used}, allocated {allocated}"
        for provider, name, used, allocated in await fetch(connection, _mismatches())
    ]
    lines += [
        f"project {project} {INSTANCES if name is None else name}: {amount} counted, {held} held"
        for project, name, amount, held in await fetch(connection, _PROJECTS)
    ]
    lines += [row[0] for row in await fetch(connection, _strays())]
    lines += [f"feed: nothing between {after} and {before}" for after, before in await fetch(connection, _feed_gaps())]
    return lines


# Writers of consumers wait, readers do not. The lock is taken after that of the writers of trees and before any
# provider's row, as everywhere.
HOLD_CONSUMERS = sa.text("LOCK TABLE consumers IN EXCLUSIVE MODE")
LOCK_ALL = sa.select(providers.c.id).order_by(providers.c.id).with_for_update(key_share=True)

_KNOWN = sa.exists().where(consumers.c.uuid == _ALLOCATED.consumer, consumers.c.released_at.is_(None))
_IN_STOCK = sa.exists().where(_STOCK.provider_id == _ALLOCATED.provider_id, _STOCK.class_id == _ALLOCATED.class_id)
# Allocations without a consumer, a provider or an inventory, which no client can release.
_DELETE_STRAYS = sa.delete(tables.allocations).where(sa.or_(~_KNOWN, ~_IN_STOCK)).returning(_ALLOCATED.consumer)
_DELETE_EMPTY = (
    sa.delete(consumers)
    .where(consumers.c.released_at.is_(None), ~sa.exists().where(_ALLOCATED.consumer == consumers.c.uuid))
    .returning(consumers.c.uuid)
)
# Usage is the sum of the allocations.
_SUM = (
    sa.select(sa.func.coalesce(sa.cast(sa.func.sum(_ALLOCATED.amount), sa.BigInteger), 0))
    .where(_ALLOCATED.provider_id == _STOCK.provider_id, _ALLOCATED.class_id == _STOCK.class_id)
    .scalar_subquery()
)
COUNT_USED = sa.update(inventories).values(used=_SUM).where(_STOCK.used != _SUM).returning(_STOCK.provider_id)
_BUMP = (
    sa.update(providers)
    .where(one_of(providers.c.id, "ids"))
    .values(generation=providers.c.generation + 1, updated_at=sa.func.now())
)


async def repair(connection: asyncpg.Connection) -> list[str]:
    """Remove stray allocations and consumers and recompute the usage. Returns a line for each repair."""
    await fetch(connection, ONE_WRITER_OF_TREES)
    await fetch(connection, HOLD_CONSUMERS)
    await fetch(connection, LOCK_ALL)
    strays = len(await fetch(connection, _DELETE_STRAYS))
    empty = len(await fetch(connection, _DELETE_EMPTY))
    recounted = sorted({row[0] for row in await fetch(connection, COUNT_USED)})
    await fetch(connection, _BUMP, ids=recounted)
    after = await read_providers(connection, recounted)
    projects = sorted({row[0] for row in await fetch(connection, COUNT_ANEW)})
    await feed.append(connection, changes_of({}, after))
    done = ((strays, "allocations of no consumer removed"), (empty, "consumers without allocations removed"))
    lines = [f"{count} {what}" for count, what in done if count]
    lines += [f"{uuid}: usage recounted" for uuid in after]
    return lines + [f"project {project}: its allocations recounted" for project in projects]


class HostCellChange(Struct, frozen=True, kw_only=True):
    """The result of giving a host to another cell. outcome: changed | unchanged | unknown | in_use.

    consumers: how many hold something there.
    """

    outcome: str
    root: str = ""
    before: str | None = None
    consumers: int = 0


async def set_host_cell(connection: asyncpg.Connection, host: str, cell: str) -> HostCellChange:
    """Give the tree of this provider (a uuid or a name) to another cell.

    It is refused while a consumer holds allocations there: its instances belong to the old cell, which could no
    longer release them. The whole tree is locked, so that claims of its providers are decided before or after it.
    """
    await fetch(connection, ONE_WRITER_OF_TREES)
    of_host = providers.alias("of_host").c
    named = sa.select(of_host.root_id).where(sa.or_(sa.func.text(of_host.uuid) == host, of_host.name == host)).limit(1)
    tree = (
        sa.select(providers.c.id, ROOT.c.id, ROOT.c.uuid, ROOT.c.cell)
        .select_from(providers.join(ROOT, ROOT.c.id == providers.c.root_id))
        .where(providers.c.root_id == named.scalar_subquery())
        .order_by(providers.c.id)
        .with_for_update(key_share=True, of=providers)
    )
    rows = await fetch(connection, tree)
    if not rows:
        return HostCellChange(outcome="unknown")
    _, root_id, root, before = rows[0]
    if before == cell:
        return HostCellChange(outcome="unchanged", root=root, before=before)
    held = sa.select(sa.func.count(sa.distinct(_ALLOCATED.consumer))).where(one_of(_ALLOCATED.provider_id, "ids"))
    [(holders,)] = await fetch(connection, held, ids=[row[0] for row in rows])
    if holders:
        return HostCellChange(outcome="in_use", root=root, before=before, consumers=holders)
    await fetch(
        connection, sa.update(providers).where(providers.c.id == root_id).values(cell=cell, updated_at=sa.func.now())
    )
    # Versions of the new cell's reports do not compare with those of the old cell.
    await fetch(connection, sa.delete(reporters).where(reporters.c.root == root))
    return HostCellChange(outcome="changed", root=root, before=before)


async def swap_occupied(transaction: PostgresPlacementTransaction, swap: Swap) -> ClaimReply | Refusal:
    """Apply a swap as if the named nodes were not reserved.

    They are reserved again at the commit, so neither a claim nor a replica ever sees them free. Nodes have one unit of
    a class alone; on other hosts the reserved amount is not meant for instances. The caller has verified by the cell's
    records that the consumer runs there.
    """
    connection = transaction.connection
    await fetch(connection, ONE_WRITER_OF_TREES)
    await fetch(connection, HOLD_CONSUMERS)
    named = sorted({uuid for entry in swap.consumers for uuid in entry.allocations})
    locked = [row[0] for row in await fetch(connection, LOCK_ALL.where(one_of(providers.c.uuid, "uuids")), uuids=named)]
    reserved = (_STOCK.total == 1, _STOCK.reserved == 1, _STOCK.used == 0, _STOCK.orphaned.is_(False))
    opening = (
        sa.update(inventories)
        .where(one_of(_STOCK.provider_id, "ids"), *reserved)
        .values(reserved=0, capacity=_STOCK.total)
        .returning(_STOCK.provider_id, _STOCK.class_id)
    )
    opened = await fetch(connection, opening, ids=locked)
    [reply] = await claim(transaction, ClaimGroup([swap]), ABOVE_CELLS)
    for provider_id, class_id in opened:
        this = sa.tuple_(_STOCK.provider_id, _STOCK.class_id) == sa.tuple_(provider_id, class_id)
        await fetch(connection, sa.update(inventories).where(this).values(reserved=_STOCK.total, capacity=0))
    return reply


_SHARING_PROVIDERS = sa.select(tables.providers.c.uuid).where(SHARES)
_ALIVE = tables.consumers.c.released_at.is_(None)
_CONSUMER = sa.select(
    tables.consumers.c.project_id, tables.consumers.c.user_id, tables.consumers.c.consumer_type
).where(tables.consumers.c.uuid == sa.bindparam("uuid", type_=UUID), _ALIVE)
_GENERATIONS = sa.select(tables.consumers.c.uuid, tables.consumers.c.generation).where(_ALIVE)


def _over_capacity() -> sa.Select[Any]:
    """The newest consumers come first, because the last one found the host full or made it so. An inventory that is
    wholly reserved while it is in use (a bare-metal node with its instance) is correct, unless the usage exceeds its
    total.
    """
    held, consumers = tables.allocations.c, tables.consumers.c
    newest = (consumers.created_at.desc(), held.consumer)
    columns = (tables.providers.c.uuid, CLASSES.name, _STOCK.used, _STOCK.capacity, _STOCK.orphaned)
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
            sa.or_(_STOCK.orphaned, _STOCK.reserved < _STOCK.total, _STOCK.used > most),
        )
        .group_by(*columns)
        .order_by(tables.providers.c.uuid, CLASSES.name)
    )


class OverCapacity(Struct, frozen=True):
    """An inventory whose usage exceeds its capacity, and the newest consumers without which the usage would fit."""

    provider: str
    resource_class: str
    used: int
    capacity: int
    orphaned: bool
    newest: tuple[tuple[str, int], ...]

    def line(self) -> str:
        """Return the finding as a line of text."""
        place = f"{self.provider} {self.resource_class}: {self.used} of {self.capacity}"
        if self.orphaned:
            return f"{place}, no longer reported; it is removed when it is no longer used"
        return f"{place}; fits without {', '.join(f'{uuid} ({amount})' for uuid, amount in self.newest)}"


class Duplicate(Struct, frozen=True):
    """A consumer that runs on one host and holds allocations of the same classes on others, too. keeps: the allocations
    that it is to keep. generation: the consumer's generation, read before its allocations.
    """

    consumer: str
    host: str
    others: tuple[str, ...]
    keeps: ProviderAllocations
    generation: int

    def line(self) -> str:
        """Return the finding as a line of text."""
        return f"{self.consumer}: runs on {self.host}, holds {', '.join(self.others)}"


async def find_over_capacity(connection: asyncpg.Connection) -> list[OverCapacity]:
    """Return every inventory whose usage exceeds its capacity, by provider and class."""
    found = []
    for provider, name, used, capacity, orphaned, holders, amounts in await fetch(connection, _over_capacity()):
        newest: list[tuple[str, int]] = []
        left = used
        for consumer, amount in zip(holders, amounts, strict=True):
            if left <= capacity:
                break
            newest.append((consumer, amount))
            left -= amount
        found.append(OverCapacity(provider, name, used, capacity, orphaned, tuple(newest)))
    return found


async def sharing_providers(connection: asyncpg.Connection) -> frozenset[str]:
    """Return the sharing providers, whose allocations belong to no host."""
    return frozenset(row[0] for row in await fetch(connection, _SHARING_PROVIDERS))


async def generations(connection: asyncpg.Connection) -> dict[str, int]:
    """Return the generation of every consumer. Call it before anything else about the consumers is read."""
    return dict(await fetch(connection, _GENERATIONS))


def excess_of(  # noqa: PLR0917  (one question)
    consumer: str,
    host: str,
    allocations: ProviderAllocations,
    roots: Mapping[str, str],
    sharing: frozenset[str],
    generation: int,
) -> list[str | Duplicate]:
    """Find the allocations of a consumer on other hosts than `host`, where it runs, of classes that it holds on `host`,
    too. A consumer that holds only other classes elsewhere is described by a line, because nothing shows that they are
    excess.
    """
    places = {provider: roots.get(provider, provider) for provider in allocations if provider not in sharing}
    elsewhere = sorted({place for place in places.values() if place != host})
    own = {name for provider, place in places.items() if place == host for name in allocations[provider]}
    keeps = {
        provider: {n: amount for n, amount in resources.items() if places.get(provider, host) == host or n not in own}
        for provider, resources in allocations.items()
    }
    keeps = {provider: resources for provider, resources in keeps.items() if resources}
    if keeps != allocations:
        return [Duplicate(consumer, host, tuple(elsewhere), keeps, generation)]
    return [f"{consumer}: runs on {host}, holds {', '.join(elsewhere)} alone"] if elsewhere else []


async def reduce_allocations(
    store: PlacementService, connection: asyncpg.Connection, found: Sequence[Duplicate]
) -> list[str]:
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
