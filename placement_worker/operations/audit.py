"""Checks of the whole book, for `berth check` and for tests, which change nothing; and an operator's writes: repairs of
what they find, a host's move to another cell, and the claim of a bare-metal node for the instance that already runs
there. Each write is inside the caller's transaction, with its changes of the feed.
"""

from __future__ import annotations

from typing import Any

import asyncpg
import sqlalchemy as sa
from msgspec import Struct
from sqlalchemy.dialects.postgresql import aggregate_order_by

from bus.contracts.placement import INSTANCES, Swap
from bus.persistence.tables import fetch
from placement_worker.book import claim
from placement_worker.domain.claim_group import ClaimGroup
from placement_worker.domain.claim_ledger import ClaimReply
from placement_worker.domain.reports import changes_of
from placement_worker.domain.values import ABOVE_CELLS
from placement_worker.store import feed, tables
from placement_worker.store.limits import COUNT_ANEW, WRONG
from placement_worker.store.postgres_rows import PostgresBookTransaction
from placement_worker.store.rows import CLASSES, ROOT, SHARES, holdings_of, one_of, read_providers
from placement_worker.store.tables import consumers, inventories, providers, sources
from placement_worker.store.trees import ONE_WRITER_OF_TREES

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


# Writers of consumers wait, readers do not. The lock is taken after that of the writers of trees and before any
# provider's row, as everywhere.
HOLD_CONSUMERS = sa.text("LOCK TABLE consumers IN EXCLUSIVE MODE")
LOCK_ALL = sa.select(providers.c.id).order_by(providers.c.id).with_for_update(key_share=True)

_KNOWN = sa.exists().where(consumers.c.uuid == _HELD.consumer, consumers.c.released_at.is_(None))
_IN_STOCK = sa.exists().where(_STOCK.provider_id == _HELD.provider_id, _STOCK.class_id == _HELD.class_id)
# Allocations without a consumer, a provider or an inventory, which no client can release.
_DELETE_STRAYS = sa.delete(tables.allocations).where(sa.or_(~_KNOWN, ~_IN_STOCK)).returning(_HELD.consumer)
_DELETE_EMPTY = (
    sa.delete(consumers)
    .where(consumers.c.released_at.is_(None), ~sa.exists().where(_HELD.consumer == consumers.c.uuid))
    .returning(consumers.c.uuid)
)
# Usage is the sum of the allocations.
_SUM = (
    sa.select(sa.func.coalesce(sa.cast(sa.func.sum(_HELD.amount), sa.BigInteger), 0))
    .where(_HELD.provider_id == _STOCK.provider_id, _HELD.class_id == _STOCK.class_id)
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


class Moved(Struct, frozen=True, kw_only=True):
    """The result of a move. outcome: moved | unchanged | unknown | in_use (holders: how many hold something there)."""

    outcome: str
    root: str = ""
    before: str | None = None
    holders: int = 0


async def move_host(connection: asyncpg.Connection, host: str, cell: str) -> Moved:
    """Move the tree of this provider (a uuid or a name) to another cell.

    The move is refused while a consumer holds allocations there: its instances belong to the old cell, which could no
    longer release them. The whole tree is locked, so that claims of its providers are decided before or after it.
    """
    await fetch(connection, ONE_WRITER_OF_TREES)
    meant = providers.alias("meant")
    named = sa.select(meant.c.root_id).where(sa.or_(sa.func.text(meant.c.uuid) == host, meant.c.name == host)).limit(1)
    tree = (
        sa.select(providers.c.id, ROOT.c.id, ROOT.c.uuid, ROOT.c.cell)
        .select_from(providers.join(ROOT, ROOT.c.id == providers.c.root_id))
        .where(providers.c.root_id == named.scalar_subquery())
        .order_by(providers.c.id)
        .with_for_update(key_share=True, of=providers)
    )
    rows = await fetch(connection, tree)
    if not rows:
        return Moved(outcome="unknown")
    _, root_id, root, before = rows[0]
    if before == cell:
        return Moved(outcome="unchanged", root=root, before=before)
    held = sa.select(sa.func.count(sa.distinct(_HELD.consumer))).where(one_of(_HELD.provider_id, "ids"))
    [(holders,)] = await fetch(connection, held, ids=[row[0] for row in rows])
    if holders:
        return Moved(outcome="in_use", root=root, before=before, holders=holders)
    await fetch(
        connection, sa.update(providers).where(providers.c.id == root_id).values(cell=cell, updated_at=sa.func.now())
    )
    # Versions of the new cell's reports do not compare with those of the old cell.
    await fetch(connection, sa.delete(sources).where(sources.c.root == root))
    return Moved(outcome="moved", root=root, before=before)


async def claim_occupied(transaction: PostgresBookTransaction, swap: Swap) -> ClaimReply:
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
    reserved = (_STOCK.total == 1, _STOCK.reserved == 1, _STOCK.used == 0, _STOCK.stranded.is_(False))
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
