"""The REST API's writes of allocations and its reshapes. A group of writes is one transaction; each write has its own
outcome.

The order of locks is that of claims: consumers by uuid, providers by id, the feed's counter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import asyncpg

from bus.contracts.placement import Change
from placement_worker.domain.allocations import (
    AllocationOutcome,
    AllocationWrite,
    decide,
    expect,
    expected_rows,
    providers_held,
    touched,
)
from placement_worker.domain.causes import caused
from placement_worker.domain.claims import changes_of as changes_of_usage
from placement_worker.domain.refusal import WriteRefusal
from placement_worker.domain.reports import changes_of
from placement_worker.domain.reshape import Reshape, Reshaped, reshape
from placement_worker.domain.values import ConsumerState
from placement_worker.store import feed
from placement_worker.store.claims import lock, lock_consumers, write
from placement_worker.store.inventory import ONE_WRITER_OF_TREES, write_providers
from placement_worker.store.names import NameTable
from placement_worker.store.rest_trees import complete_ids, unsettle
from placement_worker.store.rows import READ_PROVIDERS_BY_ID, read_providers

LOCK_BY_UUID = "SELECT id FROM providers WHERE uuid = ANY($1::uuid[]) ORDER BY id FOR NO KEY UPDATE"


async def apply(
    connection: asyncpg.Connection, items: Sequence[AllocationWrite], names: NameTable
) -> list[AllocationOutcome]:
    """Decide and write one group inside the caller's transaction."""
    expected, wanted = expected_rows(items)
    locked = await lock(connection, expected, wanted, names)
    outcomes, decision = decide(items, locked.found, locked.providers, names.class_ids)
    changes = caused(changes_of_usage(decision), touched(items, outcomes, locked.found))
    await write(connection, decision, locked.found, locked.inserted, ids=locked.ids, names=names, changes=changes)
    return outcomes


async def apply_reshape(connection: asyncpg.Connection, item: Reshape, names: NameTable) -> WriteRefusal | None:
    """Decide and write one reshape inside the caller's transaction. Reshapes are not grouped, because they are rare and
    large.
    """
    shape = await connection.fetchval(ONE_WRITER_OF_TREES)
    expected: dict[str, ConsumerState] = {}
    wanted: set[str] = set(item.inventories)
    expect(item.writes, expected, wanted)
    inserted, consumers = await lock_consumers(connection, expected, names)
    locked = await connection.fetch(LOCK_BY_UUID, list(wanted | providers_held(consumers)))
    ids, before = await read_providers(connection, READ_PROVIDERS_BY_ID, [row[0] for row in locked])
    outcome = reshape(item, consumers, before, names.class_ids, shape=shape)
    if isinstance(outcome, WriteRefusal):
        await write(connection, decide((), {}, {}, {})[1], consumers, inserted, ids=ids, names=names)
        return outcome
    changes = await _write_reshaped(connection, outcome, (consumers, inserted), ids, names)
    await feed.append(connection, caused(changes, ((item.cause, ()),)))
    return None


async def _write_reshaped(
    connection: asyncpg.Connection,
    outcome: Reshaped,
    consumers: tuple[Mapping[str, ConsumerState], Mapping[str, ConsumerState]],
    ids: dict[str, int],
    names: NameTable,
) -> list[Change]:
    old = {row.uuid: row for row in outcome.interim.values()}
    _, before = await read_providers(connection, READ_PROVIDERS_BY_ID, [ids[uuid] for uuid in old])
    await complete_ids(connection, ids, before, outcome.interim)
    await write_providers(connection, ids, before, outcome.interim, names)
    found, inserted = consumers
    await write(connection, outcome.decision, found, inserted, ids=ids, names=names)
    await write_providers(connection, ids, outcome.interim, outcome.final, names)
    await unsettle(connection, before, outcome.final)
    usage = [change for change in changes_of_usage(outcome.decision) if change.provider not in outcome.final]
    return changes_of(before, outcome.final) + usage
