"""The REST API's writes of providers. A group of writes is one transaction; each write has its own outcome.

The order of locks is that of every writer of trees: the advisory lock, providers by id, the feed's counter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import asyncpg
import msgspec
from msgspec.structs import asdict

from placement_worker.domain.causes import caused
from placement_worker.domain.reports import changes_of
from placement_worker.domain.trees import (
    CreateProvider,
    DeleteProvider,
    DeleteTree,
    ProviderTrees,
    TreeOutcome,
    TreeWrite,
    UpdateProvider,
    deleted_trees,
    entries_of_tree,
)
from placement_worker.domain.values import Provider, StoredInventory
from placement_worker.offload import ROW_BYTES, OffloadThread, run_sized
from placement_worker.store import feed
from placement_worker.store.names import NameTable

# Both call functions of schema.sql, so that each takes one round trip. LOCK locks the providers that the writes name by
# uuid or name, and the whole tree of a provider that is updated or deleted.
LOCK = "SELECT lock_trees($1::uuid[], $2::text[], $3::uuid[], $4)"
WRITE = "SELECT write_trees($1, $2::bigint[], $3::bigint[], $4::bytea[])"
READ_IDS = "SELECT uuid, id FROM providers WHERE uuid = ANY($1::uuid[])"

# The trees have changed, so the last reports of their sources no longer prove what the book holds.
UNSETTLE = "UPDATE sources SET settled = false WHERE root = ANY($1::uuid[]) AND settled"

# A root that was deleted with its tree belongs to no source: the compute service that reports it next has it. The
# versions stay, so that a late copy of an older report does not bring it back.
DISOWN = "UPDATE sources SET digest = '', settled = false, providers = '{}' WHERE root = ANY($1::uuid[])"

_InventoryRow = tuple[str, int, int, int, int, int, float, int, bool, int]
_ProviderRow = tuple[
    int,
    str,
    str,
    int | None,
    str | None,
    int,
    str,
    int,
    int,
    str | None,
    list[_InventoryRow] | None,
    list[str] | None,
    list[str] | None,
]
_loaded = msgspec.json.Decoder(tuple[int, list[int], list[_ProviderRow]]).decode


async def apply(
    connection: asyncpg.Connection,
    writes: Sequence[TreeWrite],
    names: NameTable,
    offload: OffloadThread | None = None,
) -> list[TreeOutcome]:
    """Decide and write a group inside the caller's transaction. offload: where many rows are worked on."""
    answer = await _lock(connection, writes)

    def decided() -> tuple[list[TreeOutcome], list[object]]:
        """Return the outcomes and the arguments of WRITE, none when nothing changes."""
        shape, fresh_ids, ids, before = _taken(answer)
        provider_trees = ProviderTrees(before, names.class_ids, names.trait_ids, shape=shape)
        outcomes = [provider_trees.apply(write) for write in writes]
        changes = changes_of(before, provider_trees.providers)
        if not changes:
            return outcomes, []
        done = (write for write, outcome in zip(writes, outcomes, strict=True) if isinstance(outcome, Provider))
        changes = caused(changes, ((write.cause, (write.uuid,)) for write in done))
        ids.update(zip((uuid for uuid in provider_trees.providers if uuid not in before), fresh_ids, strict=False))
        written = msgspec.json.encode(rows_of(ids, before, provider_trees.providers, names)).decode()
        return outcomes, [written, *feed.rows(changes)]

    size = sum(map(entries_of_tree, writes)) + len(answer) // ROW_BYTES
    outcomes, arguments = await run_sized(offload, size, decided)
    if arguments:
        await connection.fetchval(WRITE, *arguments)
        if disowned := deleted_trees(writes, outcomes):
            await connection.execute(DISOWN, disowned)
    return outcomes


def rows_of(
    ids: Mapping[str, int], before: Mapping[str, Provider], after: Mapping[str, Provider], names: NameTable
) -> dict[str, object]:
    """Return the rows for the SQL function `write_trees`, by kind. A kind without rows is left out."""
    changed = [(before.get(uuid), new) for uuid, new in after.items() if before.get(uuid) is not new]
    gone = [ids[uuid] for uuid in before if uuid not in after]
    created = [_columns(ids, new) | {"uuid": new.uuid} for old, new in changed if old is None]
    kept = [_columns(ids, new) for old, new in changed if old is not None]
    renamed = any(old is not None and old.name != new.name for old, new in changed)
    dropped, inventories = _inventories(
        [(ids[n.uuid], o.inventories if o else _NO_INVENTORIES, n.inventories) for o, n in changed], names
    )
    trait_ids = names.trait_ids
    lost, won = difference([(ids[n.uuid], o.traits if o else (), n.traits) for o, n in changed], trait_ids.__getitem__)
    left, joined = difference([(ids[n.uuid], o.aggregates if o else (), n.aggregates) for o, n in changed], str)
    roots = {new.root for _, new in changed} | {p.root for uuid, p in before.items() if after.get(uuid) is not p}
    rows: dict[str, object] = {
        "created": created,
        "kept": kept,
        "gone": gone,
        "dropped": dropped,
        "inventories": inventories,
        "lost": lost,
        "won": won,
        "left": left,
        "joined": joined,
        "roots": sorted(roots),
        # Names may pass from one provider to another in any order; the constraint is then checked at the commit.
        "names_pass": (renamed or bool(gone)) and (renamed or bool(created)),
    }
    return {kind: value for kind, value in rows.items() if value}


_NO_INVENTORIES: Mapping[str, StoredInventory] = {}


def _columns(ids: Mapping[str, int], provider: Provider) -> dict[str, object]:
    parent = provider.parent
    return {
        "id": ids[provider.uuid],
        "name": provider.name,
        "parent_id": None if parent is None else ids[parent],
        "root_id": ids[provider.root],
        "generation": provider.generation,
        "shape": provider.shape,
        "cell": provider.cell,
    }


def _inventories(
    rows: Iterable[tuple[int, Mapping[str, StoredInventory], Mapping[str, StoredInventory]]], names: NameTable
) -> tuple[list[object], list[object]]:
    """Return (inventories to delete, inventories that are new or changed)."""
    class_ids = names.class_ids
    dropped: list[object] = []
    stored: list[object] = []
    for number, before, after in rows:
        dropped += [{"provider_id": number, "class_id": class_ids[name]} for name in before if name not in after]
        stored += [
            {"provider_id": number, "class_id": class_ids[name], **asdict(inventory)}
            for name, inventory in after.items()
            if before.get(name) != inventory
        ]
    return dropped, stored


def difference(
    rows: Iterable[tuple[int, Sequence[str], Sequence[str]]], number: Callable[[str], object]
) -> tuple[list[object], list[object]]:
    """Return (rows to delete, rows to insert) for the traits or aggregates of providers."""
    gone: list[object] = []
    come: list[object] = []
    for provider_id, before, after in rows:
        if before != after:
            old, new = set(before), set(after)  # there may be 26,000: compared pair by pair they took 10 s
            gone += [{"provider_id": provider_id, "member": number(member)} for member in before if member not in new]
            come += [{"provider_id": provider_id, "member": number(member)} for member in after if member not in old]
    return gone, come


async def complete_ids(
    connection: asyncpg.Connection, ids: dict[str, int], before: Mapping[str, Provider], after: Mapping[str, Provider]
) -> None:
    """Add the row ids of parents and roots that are not among the loaded providers."""
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
    """Mark the last reports of the sources of every changed tree as unsettled, so that the next report is compared with
    the book.
    """
    roots = {p.root for p in after.values() if before.get(p.uuid) is not p}
    roots |= {p.root for uuid, p in before.items() if after.get(uuid) is not p}
    await connection.execute(UNSETTLE, list(roots))


async def _lock(connection: asyncpg.Connection, writes: Sequence[TreeWrite]) -> str:
    """Lock the providers, and return what `_taken` decodes."""
    uuids: set[str] = set()
    provider_names: set[str] = set()
    trees: set[str] = set()
    creating = 0
    for write in writes:
        uuids.add(write.uuid)
        if isinstance(write, CreateProvider | UpdateProvider):
            provider_names.add(write.name)
            if isinstance(write.parent, str):
                uuids.add(write.parent)
        if isinstance(write, CreateProvider):
            creating += 1
        elif isinstance(write, UpdateProvider | DeleteProvider | DeleteTree):
            trees.add(write.uuid)
            if isinstance(write, UpdateProvider) and isinstance(write.parent, str):
                trees.add(write.parent)
    answer: str = await connection.fetchval(LOCK, list(uuids), list(provider_names), list(trees), creating)
    return answer


def _taken(answer: str) -> tuple[int, list[int], dict[str, int], dict[str, Provider]]:
    """Return (the new shape, row ids for new providers, {uuid: row id} of providers, parents and roots, the providers).

    All returned providers are locked.
    """
    shape, fresh_ids, rows = _loaded(answer)
    ids: dict[str, int] = {}
    before: dict[str, Provider] = {}
    for row in rows:
        _take(row, ids, before)
    return shape, fresh_ids, ids, before


def _take(row: _ProviderRow, ids: dict[str, int], before: dict[str, Provider]) -> None:
    number, uuid, name, parent_id, parent, root_id, root, generation, shape, cell, inventories, traits, aggregates = row
    ids[uuid] = number
    ids[root] = root_id
    if parent is not None and parent_id is not None:
        ids[parent] = parent_id
    before[uuid] = Provider(
        uuid,
        name,
        parent,
        root,
        generation,
        shape,
        {inventory[0]: StoredInventory(*inventory[1:9]) for inventory in inventories or ()},
        {inventory[0]: inventory[9] for inventory in inventories or () if inventory[9]},
        tuple(traits or ()),
        tuple(aggregates or ()),
        cell,
    )
