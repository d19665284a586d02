"""Reads the whole book as of one moment, and writes it in one transaction, as an `export.BookExport`.

The export does not contain the usage of projects, which an import computes from the consumers' allocations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import asyncpg
from msgspec.structs import replace

from placement_worker.domain.names import is_custom
from placement_worker.domain.reports import changes_of
from placement_worker.domain.server_groups import GroupMember
from placement_worker.domain.trees import WantedTrees
from placement_worker.domain.values import ConsumerState, Provider
from placement_worker.operations.export import BookExport, checked
from placement_worker.operations.repair import COUNT_USED
from placement_worker.store import feed, limits
from placement_worker.store.names import NameTable
from placement_worker.store.postgres_transaction import PostgresBookTransaction
from placement_worker.store.rows import READ_PROVIDERS_BY_ID, read_providers

CHUNK = 2000  # rows in one statement

# This lock waits for claims that have read the old members of their server groups, and later claims wait for the
# import; otherwise a claim would be decided by members that no longer exist. As everywhere, it is taken after the lock
# of the writers of trees and before any provider's row.
HOLD_CLAIMS = "LOCK TABLE group_members, consumers IN ACCESS EXCLUSIVE MODE"

# Rows of consumers without allocations no longer count, and are left to be trimmed.
READ_MEMBERS = """
SELECT m.project_id, m.group_uuid, m.consumer FROM group_members m
WHERE EXISTS (SELECT FROM allocations a WHERE a.consumer = m.consumer)
"""
DELETE_MEMBERS = "DELETE FROM group_members WHERE consumer = ANY($1::uuid[])"
INSERT_MEMBERS = """
INSERT INTO group_members (project_id, group_uuid, consumer)
SELECT * FROM unnest($1::text[], $2::uuid[], $3::uuid[])
"""
REPEATABLE = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"
ALL_IDS = "SELECT id FROM providers ORDER BY id FOR NO KEY UPDATE"
ALL_IDS_READ = "SELECT id FROM providers ORDER BY id"
READ_CONSUMERS = """
SELECT uuid, generation, attempt, project_id, user_id, consumer_type, run FROM consumers WHERE released_at IS NULL
"""
READ_ALLOCATIONS = """
SELECT a.consumer, p.uuid, c.name, a.amount FROM allocations a JOIN providers p ON p.id = a.provider_id
JOIN resource_classes c ON c.id = a.class_id ORDER BY a.consumer, p.uuid, c.name
"""
DELETE_CONSUMERS = "DELETE FROM consumers WHERE uuid = ANY($1::uuid[])"
DELETE_ALLOCATIONS = "DELETE FROM allocations WHERE consumer = ANY($1::uuid[])"
INSERT_CONSUMERS = """
INSERT INTO consumers (uuid, generation, attempt, project_id, user_id, consumer_type, run)
SELECT * FROM unnest($1::uuid[], $2::bigint[], $3::int[], $4::text[], $5::text[], $6::text[], $7::text[])
"""
INSERT_ALLOCATIONS = """
INSERT INTO allocations (consumer, provider_id, class_id, amount)
SELECT * FROM unnest($1::uuid[], $2::bigint[], $3::int[], $4::bigint[])
"""
# Record that shapes up to this one have been given.
GIVEN = "SELECT setval('shapes', GREATEST($1::bigint, (SELECT last_value FROM shapes)))"


async def read(connection: asyncpg.Connection, names: NameTable) -> BookExport:
    """Read the book as of one moment. The caller's transaction must not have run any statement yet."""
    await connection.execute(REPEATABLE)
    return await _read(connection, names, ALL_IDS_READ)


async def _read(connection: asyncpg.Connection, names: NameTable, ids: str) -> BookExport:
    numbers = [row[0] for row in await connection.fetch(ids)]
    providers: dict[str, Provider] = {}
    for start in range(0, len(numbers), CHUNK):
        providers.update((await read_providers(connection, READ_PROVIDERS_BY_ID, numbers[start : start + CHUNK]))[1])
    held: dict[str, dict[str, dict[str, int]]] = {}
    for consumer, provider, name, amount in await connection.fetch(READ_ALLOCATIONS):
        held.setdefault(consumer, {}).setdefault(provider, {})[name] = amount
    consumers = {
        row[0]: ConsumerState(row[1], row[2], row[3], row[4], row[5], held[row[0]], row[6])
        for row in await connection.fetch(READ_CONSUMERS)
        if row[0] in held
    }
    classes = frozenset(filter(is_custom, names.class_ids))
    traits = frozenset(filter(is_custom, names.trait_ids))
    return BookExport(classes, traits, providers, consumers, await _read_members(connection))


async def assign(transaction: PostgresBookTransaction, wanted: BookExport, names: NameTable) -> int:
    """Replace the book by this one, inside the caller's transaction. Returns how many providers and consumers have
    changed.

    names: the transaction's; it knows every class and trait of the book. Shapes only increase, whatever the export
    contains. Raises InvalidExport.
    """
    wanted = checked(wanted)
    connection = transaction.connection
    shape, _ = await transaction.lock_trees(WantedTrees(creating=list(wanted.providers)))
    await connection.execute(HOLD_CLAIMS)
    before = await _read(connection, names, ALL_IDS)
    changed = sorted(u for u in before.consumers.keys() | wanted.consumers.keys() if _differs(u, before, wanted))
    after = {uuid: _next(before.providers.get(uuid), provider, shape) for uuid, provider in wanted.providers.items()}
    await connection.execute(GIVEN, max((provider.shape for provider in after.values()), default=shape))
    with_inventories = {uuid: p for uuid, p in before.providers.items() if uuid in after}
    # Deletions come last, because consumers hold allocations of these providers until the allocations are replaced.
    await transaction.ids_of(before.providers)
    both = _with_old_inventories(with_inventories, after)
    await transaction.write_trees(with_inventories, both)
    ids = await transaction.ids_of(after)
    await _write_consumers(connection, wanted, changed, ids, names)
    used = {row[0] for row in await connection.fetch(COUNT_USED)}
    await transaction.write_trees(both, after)
    gone = {uuid: p for uuid, p in before.providers.items() if uuid not in after}
    await transaction.write_trees(gone, {})
    await connection.execute(limits.COUNT_ANEW)
    regrouped = await _write_members(connection, wanted, before, changed)
    moved = {ids[uuid] for uuid, p in after.items() if before.providers.get(uuid) is not p} | used
    _, states = await read_providers(connection, READ_PROVIDERS_BY_ID, sorted(moved))
    if await feed.append(connection, changes_of(gone, states)):
        await connection.execute(feed.NEW_HISTORY)
    rewritten = {uuid for uuid, p in after.items() if before.providers.get(uuid) is not p}
    return len(regrouped.union(changed)) + len(gone) + len(rewritten)


def _differs(uuid: str, before: BookExport, wanted: BookExport) -> bool:
    return before.consumers.get(uuid) != wanted.consumers.get(uuid)


def _next(old: Provider | None, new: Provider, shape: int) -> Provider:
    """Return the provider as it is to be written, the same object as before when nothing of it changes.

    shape: higher than any shape that this book has given. The shape of the export may be higher still.
    """
    if old is None:
        return replace(new, used={}, shape=max(shape, new.shape))
    # For an existing trait the book's own mark stays.
    lasting = {*old.lasting}.intersection(new.traits).union({*new.lasting}.difference(old.traits))
    new = replace(new, lasting=tuple(sorted(lasting)))
    same = replace(new, shape=old.shape, used=old.used)
    if same == old:
        return old
    if replace(same, generation=old.generation) == old:
        return same
    return replace(same, shape=max(shape, new.shape))


def _with_old_inventories(before: Mapping[str, Provider], after: Mapping[str, Provider]) -> dict[str, Provider]:
    """Return `after` with the inventories of `before` that it no longer has."""
    return {
        uuid: provider
        if uuid not in before or before[uuid].inventories.keys() <= provider.inventories.keys()
        else replace(provider, inventories={**before[uuid].inventories, **provider.inventories})
        for uuid, provider in after.items()
    }


async def _write_consumers(
    connection: asyncpg.Connection, wanted: BookExport, changed: list[str], ids: Mapping[str, int], names: NameTable
) -> None:
    await connection.execute(DELETE_ALLOCATIONS, changed)
    await connection.execute(DELETE_CONSUMERS, changed)
    new = [(uuid, wanted.consumers[uuid]) for uuid in changed if uuid in wanted.consumers]
    await connection.execute(
        INSERT_CONSUMERS,
        [uuid for uuid, _ in new],
        [c.generation for _, c in new],
        [c.attempt for _, c in new],
        [c.project_id for _, c in new],
        [c.user_id for _, c in new],
        [c.consumer_type for _, c in new],
        [c.run for _, c in new],
    )
    rows = [
        (uuid, ids[provider], names.class_ids[name], amount)
        for uuid, consumer in new
        for provider, resources in consumer.holding.items()
        for name, amount in resources.items()
    ]
    if rows:
        await connection.execute(INSERT_ALLOCATIONS, *map(list, zip(*rows, strict=True)))


async def _write_members(
    connection: asyncpg.Connection, wanted: BookExport, before: BookExport, changed: list[str]
) -> set[str]:
    """Write the members of server groups. Returns the consumers whose server groups have changed."""
    if wanted.members is None:
        await _drop_new_members(connection, changed, before.consumers)
        return set()
    regrouped = _regrouped(before.members or (), wanted.members)
    await _replace_members(connection, wanted.members, regrouped.union(changed))
    return regrouped


async def _read_members(connection: asyncpg.Connection) -> frozenset[GroupMember]:
    """Read all members that hold allocations."""
    return frozenset(GroupMember(*row) for row in await connection.fetch(READ_MEMBERS))


def _regrouped(before: Iterable[GroupMember], after: Iterable[GroupMember]) -> set[str]:
    """Return the consumers whose groups have changed."""
    return {member.consumer for member in frozenset(before) ^ frozenset(after)}


async def _replace_members(
    connection: asyncpg.Connection, wanted: Iterable[GroupMember], changed: Collection[str]
) -> None:
    """Set the groups of these consumers to those of the export, whatever their rows have."""
    await connection.execute(DELETE_MEMBERS, list(changed))
    rows = [(m.project, m.group, m.consumer) for m in sorted(wanted) if m.consumer in changed]
    if rows:
        await connection.execute(INSERT_MEMBERS, *map(list, zip(*rows, strict=True)))


async def _drop_new_members(
    connection: asyncpg.Connection, changed: Collection[str], before: Mapping[str, object]
) -> None:
    """Keep the groups of consumers that held allocations. A consumer that held none leaves its former group."""
    await connection.execute(DELETE_MEMBERS, [uuid for uuid in changed if uuid not in before])
