"""The REST API's writes of providers: a group is one transaction, each write with its own outcome.

Same order of locks as every writer of trees: the advisory lock, the providers by id, the feed's counter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import asyncpg

from placement_worker.domain.reports import changes_of
from placement_worker.domain.trees import (
    CreateProvider,
    DeleteProvider,
    Grove,
    TreeOutcome,
    TreeWrite,
    UpdateProvider,
)
from placement_worker.domain.values import Provider
from placement_worker.store import feed
from placement_worker.store.inventory import ONE_WRITER_OF_TREES, write_providers
from placement_worker.store.names import Names
from placement_worker.store.rows import READ_PROVIDERS_BY_ID, read_providers

# Providers named by uuid or by name alone; of those that move or go, the whole tree.
LOCK = """
SELECT id FROM providers WHERE id IN (
    SELECT id FROM providers WHERE uuid = ANY($1::uuid[])
    UNION ALL SELECT id FROM providers WHERE name = ANY($2::text[])
    UNION ALL SELECT p.id FROM providers m JOIN providers p ON p.root_id = m.root_id WHERE m.uuid = ANY($3::uuid[])
) ORDER BY id FOR NO KEY UPDATE
"""
READ_IDS = "SELECT uuid, id FROM providers WHERE uuid = ANY($1::uuid[])"

# What these trees' sources said last no longer proves what the book holds.
UNSETTLE = "UPDATE sources SET settled = false WHERE root = ANY($1::uuid[]) AND settled"


async def apply(connection: asyncpg.Connection, writes: Sequence[TreeWrite], names: Names) -> list[TreeOutcome]:
    """Decide and write a group inside the caller's transaction."""
    await connection.execute(ONE_WRITER_OF_TREES)
    ids, before = await _load(connection, writes)
    grove = Grove(before, names.class_ids, names.trait_ids)
    outcomes = [grove.apply(write) for write in writes]
    await write_changes(connection, ids, before, grove.providers, names)
    return outcomes


async def write_changes(
    connection: asyncpg.Connection,
    ids: dict[str, int],
    before: Mapping[str, Provider],
    after: Mapping[str, Provider],
    names: Names,
) -> int:
    """Write what differs, and say it on the feed. Returns the feed number, 0 when nothing differs."""
    changes = changes_of(before, after)
    if not changes:
        return 0
    await complete_ids(connection, ids, before, after)
    await write_providers(connection, ids, before, after, names)
    await unsettle(connection, before, after)
    return await feed.append(connection, changes)


async def complete_ids(
    connection: asyncpg.Connection, ids: dict[str, int], before: Mapping[str, Provider], after: Mapping[str, Provider]
) -> None:
    """Numbers of parents and roots that are not among the providers loaded."""
    missing = {
        uuid
        for provider in after.values()
        if before.get(provider.uuid) is not provider
        for uuid in (provider.parent, provider.root)
        if uuid is not None and uuid not in ids and uuid not in after
    }
    if missing:
        ids.update((row[0], row[1]) for row in await connection.fetch(READ_IDS, list(missing)))


async def unsettle(
    connection: asyncpg.Connection, before: Mapping[str, Provider], after: Mapping[str, Provider]
) -> None:
    """The sources of every tree that changed are to look again with their next report."""
    roots = {p.root for p in after.values() if before.get(p.uuid) is not p}
    roots |= {p.root for uuid, p in before.items() if after.get(uuid) is not p}
    await connection.execute(UNSETTLE, list(roots))


async def _load(
    connection: asyncpg.Connection, writes: Sequence[TreeWrite]
) -> tuple[dict[str, int], dict[str, Provider]]:
    uuids: set[str] = set()
    provider_names: set[str] = set()
    trees: set[str] = set()
    for write in writes:
        uuids.add(write.uuid)
        if isinstance(write, CreateProvider | UpdateProvider):
            provider_names.add(write.name)
            if isinstance(write.parent, str):
                uuids.add(write.parent)
        if isinstance(write, UpdateProvider | DeleteProvider):
            trees.add(write.uuid)
            if isinstance(write, UpdateProvider) and isinstance(write.parent, str):
                trees.add(write.parent)
    locked = await connection.fetch(LOCK, list(uuids), list(provider_names), list(trees))
    return await read_providers(connection, READ_PROVIDERS_BY_ID, [row[0] for row in locked])
