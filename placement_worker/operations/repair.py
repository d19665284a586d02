"""Writes of an operator: repairs of what `audit` finds, a host's move to another cell, and the claim of a bare-metal
node for the instance that already runs there. Each is inside the caller's transaction, with its changes of the feed.
"""

from __future__ import annotations

import asyncpg
import sqlalchemy as sa
from msgspec import Struct

from bus.contracts.placement import Swap
from bus.persistence.tables import fetch
from placement_worker.book import claim
from placement_worker.domain.claim_group import ClaimGroup
from placement_worker.domain.claim_ledger import ClaimReply
from placement_worker.domain.reports import changes_of
from placement_worker.domain.values import ABOVE_CELLS
from placement_worker.store import feed
from placement_worker.store.limits import COUNT_ANEW
from placement_worker.store.postgres_rows import PostgresBookTransaction
from placement_worker.store.rows import ROOT, one_of, read_providers
from placement_worker.store.tables import allocations, consumers, inventories, providers, sources
from placement_worker.store.trees import ONE_WRITER_OF_TREES

# Writers of consumers wait, readers do not. The lock is taken after that of the writers of trees and before any
# provider's row, as everywhere.
HOLD_CONSUMERS = sa.text("LOCK TABLE consumers IN EXCLUSIVE MODE")
LOCK_ALL = sa.select(providers.c.id).order_by(providers.c.id).with_for_update(key_share=True)

_HELD, _STOCK = allocations.c, inventories.c
_KNOWN = sa.exists().where(consumers.c.uuid == _HELD.consumer, consumers.c.released_at.is_(None))
_IN_STOCK = sa.exists().where(_STOCK.provider_id == _HELD.provider_id, _STOCK.class_id == _HELD.class_id)
# Allocations without a consumer, a provider or an inventory, which no client can release.
_DELETE_STRAYS = sa.delete(allocations).where(sa.or_(~_KNOWN, ~_IN_STOCK)).returning(_HELD.consumer)
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
