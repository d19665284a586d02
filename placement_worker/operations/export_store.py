"""Reads all of placement as of one moment, and writes it in one transaction, as an `export.PlacementExport`.

The export does not contain the usage of projects, which an import computes from the consumers' allocations.
"""

from __future__ import annotations

import asyncpg
import sqlalchemy as sa
from msgspec.structs import replace

from bus.persistence.tables import fetch
from placement_worker.domain.allocation_migration import old_and_new
from placement_worker.domain.claim_ledger import Decision
from placement_worker.domain.reports import changes_of
from placement_worker.domain.server_groups import GroupMember
from placement_worker.domain.trees import TreesToLock
from placement_worker.domain.values import ConsumerState, GroupKey, Provider, is_custom
from placement_worker.operations.audit import COUNT_USED, LOCK_ALL
from placement_worker.operations.export import PlacementExport, checked
from placement_worker.service import NEW_HOLDER
from placement_worker.store import feed
from placement_worker.store.claims import COUNT_ANEW
from placement_worker.store.names import NameTable
from placement_worker.store.port import ClaimsToLock, ClaimWrites, TreeWrites
from placement_worker.store.postgres_rows import PostgresPlacementTransaction
from placement_worker.store.rows import ALLOCATED, CLASSES, allocations_by_consumer, one_of, read_providers
from placement_worker.store.tables import allocations, consumers, feed_head, group_members, providers

CHUNK = 2000  # rows in one statement

# This lock waits for claims that have read the old members of their server groups, and later claims wait for the
# import; otherwise a claim would be decided by members that no longer exist. As everywhere, it is taken after the lock
# of the writers of trees and before any provider's row.
HOLD_CLAIMS = sa.text("LOCK TABLE group_members, consumers IN ACCESS EXCLUSIVE MODE")
REPEATABLE = sa.text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")

# Rows of consumers without allocations no longer count, and are left to be trimmed.
_CONSUMER = consumers.c["uuid", "generation", "attempt", "project_id", "user_id", "consumer_type", "claim_owner"]
_MEMBERS = sa.select(group_members).where(sa.exists().where(allocations.c.consumer == group_members.c.consumer))
_DELETE_MEMBERS = sa.delete(group_members).where(one_of(group_members.c.consumer, "uuids"))
_ALL_IDS = sa.select(providers.c.id).order_by(providers.c.id)
_CONSUMERS = sa.select(*_CONSUMER).where(consumers.c.released_at.is_(None))
_ALLOCATIONS = (
    sa.select(allocations.c.consumer, providers.c.uuid, CLASSES.name, allocations.c.amount)
    .select_from(ALLOCATED)
    .order_by(allocations.c.consumer, providers.c.uuid, CLASSES.name)
)


async def read(connection: asyncpg.Connection, names: NameTable) -> PlacementExport:
    """Read placement as of one moment. The caller's transaction must not have run any statement yet."""
    await fetch(connection, REPEATABLE)
    return await _read(connection, names, _ALL_IDS)


async def _read(connection: asyncpg.Connection, names: NameTable, ids: sa.Select[int]) -> PlacementExport:
    numbers = [row[0] for row in await fetch(connection, ids)]
    providers: dict[str, Provider] = {}
    for start in range(0, len(numbers), CHUNK):
        providers.update(await read_providers(connection, numbers[start : start + CHUNK]))
    held = allocations_by_consumer(await fetch(connection, _ALLOCATIONS))
    consumers = {
        row[0]: ConsumerState(row[1], row[2], row[3], row[4], row[5], held[row[0]], row[6])
        for row in await fetch(connection, _CONSUMERS)
        if row[0] in held
    }
    classes = frozenset(filter(is_custom, names.class_ids))
    traits = frozenset(filter(is_custom, names.trait_ids))
    members = frozenset(GroupMember(*row) for row in await fetch(connection, _MEMBERS))
    return PlacementExport(classes, traits, providers, consumers, members)


async def assign(transaction: PostgresPlacementTransaction, wanted: PlacementExport, names: NameTable) -> int:
    """Replace placement by this one, inside the caller's transaction. Returns how many providers and consumers have
    changed.

    names: the transaction's; it knows every class and trait of placement. Shapes only increase, whatever the export
    contains. Raises InvalidExport.
    """
    wanted = checked(wanted)
    connection = transaction.connection
    spec_generation, _ = await transaction.lock_trees(TreesToLock(creating=list(wanted.providers)))
    await fetch(connection, HOLD_CLAIMS)
    before = await _read(connection, names, LOCK_ALL)
    was, now = before.consumers, wanted.consumers
    changed = sorted(uuid for uuid in was.keys() | now.keys() if was.get(uuid) != now.get(uuid))
    after = {
        uuid: _next(before.providers.get(uuid), provider, spec_generation)
        for uuid, provider in wanted.providers.items()
    }
    given = max((provider.spec_generation for provider in after.values()), default=spec_generation)
    last = sa.select(sa.column("last_value")).select_from(sa.table("spec_generations")).scalar_subquery()
    await fetch(connection, sa.select(sa.func.setval("spec_generations", sa.func.greatest(given, last))))
    with_inventories = {uuid: p for uuid, p in before.providers.items() if uuid in after}
    locked = await transaction.lock_claims(ClaimsToLock({uuid: now.get(uuid, NEW_HOLDER) for uuid in changed}, None))
    # Deletions come last, because consumers hold allocations of these providers until the allocations are replaced.
    await transaction.ids_of(before.providers)
    both = old_and_new(with_inventories, after)
    await transaction.write_trees(TreeWrites(with_inventories, both))
    ids = await transaction.ids_of(after)
    decision = Decision([], {uuid: now.get(uuid) for uuid in changed}, {}, {})
    await transaction.write_claims(ClaimWrites(decision, locked))
    used = {row[0] for row in await fetch(connection, COUNT_USED)}
    await transaction.write_trees(TreeWrites(both, after))
    gone = {uuid: p for uuid, p in before.providers.items() if uuid not in after}
    await transaction.write_trees(TreeWrites(gone, {}))
    await fetch(connection, COUNT_ANEW)
    regrouped = await _write_members(transaction, wanted, before, changed)
    moved = {ids[uuid] for uuid, p in after.items() if before.providers.get(uuid) is not p} | used
    states = await read_providers(connection, sorted(moved))
    if await feed.append(connection, changes_of(gone, states)):
        await fetch(connection, sa.update(feed_head).values(incarnation=sa.func.gen_random_uuid()))
    rewritten = {uuid for uuid, p in after.items() if before.providers.get(uuid) is not p}
    return len(regrouped.union(changed)) + len(gone) + len(rewritten)


def _next(old: Provider | None, new: Provider, spec_generation: int) -> Provider:
    """Return the provider as it is to be written, the same object as before when nothing of it changes.

    spec_generation: higher than any spec generation that this placement has given. The spec generation of the export
    may be higher still.
    """
    if old is None:
        return replace(new, used={}, spec_generation=max(spec_generation, new.spec_generation))
    # For an existing trait placement's own mark stays.
    lasting = {*old.own_traits}.intersection(new.traits).union({*new.own_traits}.difference(old.traits))
    new = replace(new, own_traits=tuple(sorted(lasting)))
    same = replace(new, spec_generation=old.spec_generation, used=old.used)
    if same == old:
        return old
    if replace(same, generation=old.generation) == old:
        return same
    return replace(same, spec_generation=max(spec_generation, new.spec_generation))


async def _write_members(
    transaction: PostgresPlacementTransaction, wanted: PlacementExport, before: PlacementExport, changed: list[str]
) -> set[str]:
    """Write the members of server groups. Returns the consumers whose server groups have changed."""
    if wanted.members is None:
        # The groups of consumers that held allocations are kept. A consumer that held none leaves its former group.
        new = [uuid for uuid in changed if uuid not in before.consumers]
        await fetch(transaction.connection, _DELETE_MEMBERS, uuids=new)
        return set()
    regrouped = {member.consumer for member in (before.members or frozenset()) ^ wanted.members}
    written = regrouped.union(changed)  # with the groups of the export, whatever their rows have
    await fetch(transaction.connection, _DELETE_MEMBERS, uuids=list(written))
    joined: dict[GroupKey, list[str]] = {}
    for member in sorted(wanted.members):
        if member.consumer in written:
            joined.setdefault((member.project, member.group), []).append(member.consumer)
    await transaction.join(joined)
    return regrouped
