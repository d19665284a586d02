"""Applies inventory updates in one transaction of set-based statements.

An advisory lock serializes the writers of trees across all processes, so that two of them cannot create providers of
one name or move the same provider at once. Claims run concurrently and wait only for row locks, which both sides take
in the same order. Only a report that moves allocations may have to be retried (`allocation_migration`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import asyncpg
from msgspec.structs import astuple

from bus.contracts.placement import InventoryResult, InventoryUpdate
from placement_worker.domain.allocation_migration import migrating_classes
from placement_worker.domain.names import is_class, is_custom
from placement_worker.domain.report_group import RELEASED, TAKEN_OUT, Key, ReportGroup, ReportSource
from placement_worker.domain.reports import ReportRefusal, changes_of, flaw, plan
from placement_worker.domain.retired_trees import is_retired
from placement_worker.domain.values import ABOVE_CELLS, Provider
from placement_worker.store import allocation_migration, feed
from placement_worker.store.names import NameTable
from placement_worker.store.rows import READ_PROVIDERS_BY_ID, read_providers

# Take the lock and draw the shape for this transaction. The shape is drawn under the lock, so that a later writer has a
# higher one.
ONE_WRITER_OF_TREES = """
WITH writer AS MATERIALIZED (SELECT pg_advisory_xact_lock(hashtextextended('berth.placement.trees', 0)))
SELECT nextval('shapes') FROM writer
"""

READ_SOURCES = """
SELECT s.root, s.source, p.cell, s.version, s.digest, s.settled, s.providers
FROM sources s LEFT JOIN providers p ON p.uuid = s.root WHERE s.root = ANY($1::uuid[])
"""

RELEASE = """
UPDATE sources s SET digest = $3, settled = false FROM providers p
WHERE s.source = $1 AND s.root = ANY($2::uuid[]) AND s.digest <> $4 AND p.uuid = s.root AND p.cell = $5
"""

LOCK_TREES = """
SELECT id FROM providers
WHERE root_id IN (SELECT root_id FROM providers WHERE uuid = ANY($1::uuid[]) OR name = ANY($2::text[]))
ORDER BY id FOR NO KEY UPDATE
"""

# Names may pass from one provider to another in any order; the constraint is checked at the commit.
NAMES_MAY_PASS = "SET CONSTRAINTS providers_name_key DEFERRED"

DELETE_PROVIDERS = "DELETE FROM providers WHERE id = ANY($1::bigint[])"

NEW_IDS = "SELECT nextval(pg_get_serial_sequence('providers', 'id')) FROM generate_series(1, $1)"

INSERT_PROVIDERS = """
INSERT INTO providers (id, uuid, name, parent_id, root_id, generation, shape, cell)
SELECT * FROM unnest($1::bigint[], $2::uuid[], $3::text[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[],
    $8::text[])
"""

UPDATE_PROVIDERS = """
UPDATE providers p SET name = n.name, parent_id = n.parent_id, root_id = n.root_id, generation = n.generation,
    shape = n.shape, cell = n.cell, updated_at = now()
FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::text[])
    AS n (id, name, parent_id, root_id, generation, shape, cell)
WHERE p.id = n.id
"""

DELETE_STOCKS = """
DELETE FROM inventories i USING unnest($1::bigint[], $2::int[]) AS n (provider_id, class_id)
WHERE i.provider_id = n.provider_id AND i.class_id = n.class_id
"""

# `used` is left out, because only writes of allocations change it.
WRITE_STOCKS = """
INSERT INTO inventories AS i (provider_id, class_id, total, reserved, min_unit, max_unit, step_size, allocation_ratio,
    capacity, stranded)
SELECT * FROM unnest($1::bigint[], $2::int[], $3::int[], $4::int[], $5::int[], $6::int[], $7::int[], $8::float8[],
    $9::bigint[], $10::bool[])
ON CONFLICT (provider_id, class_id) DO UPDATE SET total = EXCLUDED.total, reserved = EXCLUDED.reserved,
    min_unit = EXCLUDED.min_unit, max_unit = EXCLUDED.max_unit, step_size = EXCLUDED.step_size,
    allocation_ratio = EXCLUDED.allocation_ratio, capacity = EXCLUDED.capacity, stranded = EXCLUDED.stranded,
    updated_at = now()
"""

DELETE_TRAITS = """
DELETE FROM provider_traits t USING unnest($1::bigint[], $2::int[]) AS n (provider_id, trait_id)
WHERE t.provider_id = n.provider_id AND t.trait_id = n.trait_id
"""
INSERT_TRAITS = """
INSERT INTO provider_traits (provider_id, trait_id, lasting)
SELECT * FROM unnest($1::bigint[], $2::int[], $3::bool[])
"""

DELETE_AGGREGATES = """
DELETE FROM provider_aggregates a USING unnest($1::bigint[], $2::uuid[]) AS n (provider_id, aggregate)
WHERE a.provider_id = n.provider_id AND a.aggregate = n.aggregate
"""
INSERT_AGGREGATES = """
INSERT INTO provider_aggregates (provider_id, aggregate) SELECT * FROM unnest($1::bigint[], $2::uuid[])
"""

WRITE_SOURCES = """
INSERT INTO sources (root, source, version, digest, settled, providers)
SELECT root, source, version, digest, settled, string_to_array(providers, ',')::uuid[]
FROM unnest($1::uuid[], $2::text[], $3::bigint[], $4::bytea[], $5::bool[], $6::text[])
    AS n (root, source, version, digest, settled, providers)
ON CONFLICT (root, source) DO UPDATE SET version = EXCLUDED.version, digest = EXCLUDED.digest,
    settled = EXCLUDED.settled, providers = EXCLUDED.providers, updated_at = now()
"""

# One source has changed the trees, so the last reports of their other sources no longer prove what the book holds.
UNSETTLE_OTHERS = """
UPDATE sources s SET settled = false FROM unnest($1::uuid[], $2::text[]) AS n (root, source)
WHERE s.root = n.root AND s.source <> n.source AND s.settled
"""

# Trees that their source removed while they were in use, that are no longer in use, and that no source has reported
# since.
FIND_RETIRED_TREES = """
SELECT s.root, s.source, s.version, s.digest, s.settled, s.providers
FROM sources s JOIN providers r ON r.uuid = s.root AND r.root_id = r.id
WHERE NOT s.settled AND s.digest = $1
    AND NOT EXISTS (SELECT FROM sources n
        WHERE n.root = s.root AND n.digest <> $1 AND n.updated_at >= s.updated_at)
    AND (SELECT bool_and(i.stranded AND i.used = 0) FROM providers p JOIN inventories i ON i.provider_id = p.id
        WHERE p.root_id = r.id)
ORDER BY s.root, s.source LIMIT $2
"""


async def know_names(updates: Sequence[InventoryUpdate], names: NameTable) -> None:
    """Create the classes and CUSTOM_ traits that the updates name, ahead of their transaction."""
    classes: set[str] = set()
    traits: set[str] = set()
    for update in updates:
        if flaw(update, names.trait_ids) is None:
            for report in update.providers:
                classes.update(filter(is_class, report.inventories))
                traits.update(filter(is_custom, report.traits))
    await names.ensure(classes, traits)


async def report(
    connection: asyncpg.Connection, updates: Sequence[InventoryUpdate], names: NameTable, bus: str
) -> list[InventoryResult | ReportRefusal]:
    """Decide and write a group of updates that came on one bus, inside the caller's transaction."""
    shape = await connection.fetchval(ONE_WRITER_OF_TREES)
    sources, cells = await _read_sources(connection, updates)
    group = ReportGroup(updates, sources, cells=cells, bus=bus)
    group.refuse_flawed(names.trait_ids)
    group.refuse_foreign()
    group.refuse_owned()
    group.sort_out_stale()
    sequence = await _apply(connection, group, names, shape)
    return group.answers(sequence)


async def release_roots(connection: asyncpg.Connection, source: str, roots: Sequence[str], bus: str) -> None:
    """Release these roots of the bus's cell: another compute service may take them over until the source reports them
    again.
    """
    await connection.execute(ONE_WRITER_OF_TREES)
    await connection.execute(RELEASE, source, roots, RELEASED, TAKEN_OUT, bus)


async def remove_retired_trees(connection: asyncpg.Connection, names: NameTable, limit: int) -> list[str]:
    """Remove retired trees, as if their sources had reported the removal again. Returns the roots.

    A source that has ended for good will not report again, so no report would remove them. The caller opens the
    transaction.
    """
    shape = await connection.fetchval(ONE_WRITER_OF_TREES)
    rows = await connection.fetch(FIND_RETIRED_TREES, TAKEN_OUT, limit)
    if not rows:
        return []
    sources = {(row[0], row[1]): ReportSource(*row[2:]) for row in rows}
    updates = [
        InventoryUpdate(source=source, version=s.version, root_uuid=root) for (root, source), s in sources.items()
    ]
    _, locked = await _lock_trees(connection, updates)
    trees: dict[str, list[Provider]] = {}
    for provider in locked.values():
        trees.setdefault(provider.root, []).append(provider)
    # A claim or a write of the REST API may have changed the tree before it was locked.
    empty = [update for update in updates if is_retired(trees.get(update.root_uuid, ()))]
    await _apply(connection, ReportGroup(empty, sources, cells={}, bus=ABOVE_CELLS), names, shape)
    return list(dict.fromkeys(update.root_uuid for update in empty))


async def _read_sources(
    connection: asyncpg.Connection, updates: Sequence[InventoryUpdate]
) -> tuple[dict[Key, ReportSource], dict[str, str | None]]:
    """Return (the last report of each source, the cell of every root that was ever reported)."""
    rows = await connection.fetch(READ_SOURCES, list({update.root_uuid for update in updates}))
    return {(row[0], row[1]): ReportSource(*row[3:]) for row in rows}, {row[0]: row[2] for row in rows}


async def _apply(connection: asyncpg.Connection, group: ReportGroup, names: NameTable, shape: int) -> int:
    """Plan the fresh updates and write the result. shape: the new shape of every provider that changes."""
    fresh = group.fresh()
    updates = [group.updates[number] for number in fresh]
    leaving = [pair for update in updates for pair in migrating_classes(update.providers)]
    consumers = await allocation_migration.lock_holders(
        connection, leaving, names
    )  # consumers before providers, as everywhere
    ids, before = await _lock_trees(connection, updates)
    consumers |= await allocation_migration.lock_late_holders(connection, leaving, consumers, names)
    holdings = {uuid: consumer.holding for uuid, consumer in consumers.items()}
    earlier = [group.earlier(number) for number in fresh]
    outcome = plan(updates, earlier, before, holdings, group.bus, shape=shape)
    group.settle(fresh, outcome.results)
    if outcome.moved:
        between = allocation_migration.between(before, outcome.after)
        await connection.execute(NAMES_MAY_PASS)
        await write_providers(connection, ids, before, between, names)
        await allocation_migration.write(connection, outcome, before, consumers, ids=ids, names=names)
        await write_providers(connection, ids, between, outcome.after, names)
    else:
        await write_providers(connection, ids, before, outcome.after, names)
    await _execute_rows(connection, WRITE_SOURCES, group.written)
    await _execute_rows(connection, UNSETTLE_OTHERS, group.changed)
    return await feed.append(connection, changes_of(before, outcome.after))


async def _lock_trees(
    connection: asyncpg.Connection, updates: Sequence[InventoryUpdate]
) -> tuple[dict[str, int], dict[str, Provider]]:
    """Lock every tree that contains a root, a provider or a name of the updates, then read the trees."""
    if not updates:
        return {}, {}
    uuids = {update.root_uuid for update in updates} | {r.uuid for update in updates for r in update.providers}
    provider_names = {r.name for update in updates for r in update.providers}
    locked = [row[0] for row in await connection.fetch(LOCK_TREES, list(uuids), list(provider_names))]
    return await read_providers(connection, READ_PROVIDERS_BY_ID, locked)


async def write_providers(
    connection: asyncpg.Connection,
    ids: dict[str, int],
    before: Mapping[str, Provider],
    after: Mapping[str, Provider],
    names: NameTable,
) -> None:
    """Write the differences between `before` and `after`; a provider that is the same object in both is skipped.

    ids: the row ids of every provider in `before` and of every parent and root of the written rows; those of new
    providers are added.
    """
    gone = [ids[uuid] for uuid in before if uuid not in after]
    changed = [(before.get(uuid), provider) for uuid, provider in after.items() if before.get(uuid) is not provider]
    created = [provider for old, provider in changed if old is None]
    kept = [provider for old, provider in changed if old is not None]
    if created or gone:
        await connection.execute(NAMES_MAY_PASS)
    if created:
        fresh_ids = await connection.fetch(NEW_IDS, len(created))
        ids.update((provider.uuid, row[0]) for provider, row in zip(created, fresh_ids, strict=True))
        rows = [(ids[p.uuid], p.uuid, *_columns(p, ids)[1:]) for p in created]
        await connection.execute(INSERT_PROVIDERS, *_transposed(rows))
    await _execute_rows(
        connection,
        UPDATE_PROVIDERS,
        [_columns(p, ids) for p in kept],
    )
    if gone:
        await connection.execute(DELETE_PROVIDERS, gone)
    await _write_inventories(connection, ids, changed, names)
    trait_ids = names.trait_ids
    traits = [(ids[new.uuid], old.traits if old else (), new.traits) for old, new in changed]
    lost, won = _difference([(i, [trait_ids[t] for t in a], [trait_ids[t] for t in b]) for i, a, b in traits])
    await _execute_rows(connection, DELETE_TRAITS, lost)
    lasting = {(ids[new.uuid], trait_ids[trait]) for _, new in changed for trait in new.lasting}
    await _execute_rows(connection, INSERT_TRAITS, [(*row, row in lasting) for row in won])
    left, joined = _difference([(ids[new.uuid], old.aggregates if old else (), new.aggregates) for old, new in changed])
    await _execute_rows(connection, DELETE_AGGREGATES, left)
    await _execute_rows(connection, INSERT_AGGREGATES, joined)


def _columns(provider: Provider, ids: Mapping[str, int]) -> tuple[object, ...]:
    p = provider
    return (ids[p.uuid], p.name, _id(ids, p.parent), ids[p.root], p.generation, p.shape, p.cell)


async def _write_inventories(
    connection: asyncpg.Connection,
    ids: Mapping[str, int],
    changed: Sequence[tuple[Provider | None, Provider]],
    names: NameTable,
) -> None:
    dropped: list[tuple[object, ...]] = []
    stored: list[tuple[object, ...]] = []
    for old, new in changed:
        provider_id = ids[new.uuid]
        inventories = old.inventories if old is not None else {}
        dropped += [(provider_id, names.class_ids[name]) for name in inventories if name not in new.inventories]
        stored += [
            (provider_id, names.class_ids[name], *astuple(inventory))
            for name, inventory in new.inventories.items()
            if inventories.get(name) != inventory
        ]
    await _execute_rows(connection, DELETE_STOCKS, dropped)
    await _execute_rows(connection, WRITE_STOCKS, stored)


def _difference(
    rows: Iterable[tuple[int, Sequence[object], Sequence[object]]],
) -> tuple[list[tuple[object, ...]], list[tuple[object, ...]]]:
    """Return (pairs to delete, pairs to insert) for the traits or aggregates of providers."""
    gone: list[tuple[object, ...]] = []
    come: list[tuple[object, ...]] = []
    for provider_id, before, after in rows:
        if before != after:
            old, new = set(before), set(after)
            gone += [(provider_id, member) for member in before if member not in new]
            come += [(provider_id, member) for member in after if member not in old]
    return gone, come


async def _execute_rows(connection: asyncpg.Connection, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
    if rows:
        await connection.execute(statement, *_transposed(rows))


def _id(ids: Mapping[str, int], uuid: str | None) -> int | None:
    return None if uuid is None else ids[uuid]


def _transposed(rows: Sequence[tuple[object, ...]]) -> list[list[object]]:
    return list(map(list, zip(*rows, strict=True)))
