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
    entries_of_allocations,
    expect,
    expected_rows,
    providers_held,
    touched,
)
from placement_worker.domain.causes import caused
from placement_worker.domain.claim_verdict import Decision
from placement_worker.domain.claims import changes_of as changes_of_usage
from placement_worker.domain.refusal import WriteRefusal
from placement_worker.domain.reports import changes_of
from placement_worker.domain.reshape import Reshape, Reshaped, reshape
from placement_worker.domain.values import ConsumerState, Provider
from placement_worker.offload import OffloadThread, run_sized
from placement_worker.store import feed
from placement_worker.store.claims import lock, lock_consumers, write
from placement_worker.store.inventory import ONE_WRITER_OF_TREES, write_providers
from placement_worker.store.names import NameTable
from placement_worker.store.rest_trees import complete_ids, unsettle
from placement_worker.store.rows import READ_PROVIDERS_BY_ID, read_providers

# The providers that a reshape reads or writes in one statement, and in one turn of the event loop.
RESHAPED_AT_ONCE = 500

LOCK_BY_UUID = "SELECT id FROM providers WHERE uuid = ANY($1::uuid[]) ORDER BY id FOR NO KEY UPDATE"


async def apply(
    connection: asyncpg.Connection,
    items: Sequence[AllocationWrite],
    names: NameTable,
    offload: OffloadThread | None = None,
) -> list[AllocationOutcome]:
    """Decide and write one group inside the caller's transaction. offload: where a large group is decided."""
    size = sum(map(entries_of_allocations, items))
    expected, wanted = await run_sized(offload, size, lambda: expected_rows(items))
    locked = await lock(connection, expected, wanted, names, offload=offload)

    def decided() -> tuple[list[AllocationOutcome], Decision, list[Change]]:
        outcomes, decision = decide(items, locked.found, locked.providers, names.class_ids)
        return outcomes, decision, caused(changes_of_usage(decision), touched(items, outcomes, locked.found))

    size += len(locked.found) + len(locked.providers)
    outcomes, decision, changes = await run_sized(offload, size, decided)
    await write(
        connection,
        decision,
        locked.found,
        locked.inserted,
        ids=locked.ids,
        names=names,
        changes=changes,
        offload=offload,
    )
    return outcomes


async def apply_reshape(
    connection: asyncpg.Connection, item: Reshape, names: NameTable, offload: OffloadThread | None = None
) -> WriteRefusal | None:
    """Decide and write one reshape inside the caller's transaction. Reshapes are not grouped, because they are rare and
    large.
    """
    shape = await connection.fetchval(ONE_WRITER_OF_TREES)
    expected: dict[str, ConsumerState] = {}
    wanted: set[str] = set(item.inventories)
    expect(item.writes, expected, wanted)
    inserted, consumers = await lock_consumers(connection, expected, names, offload=offload)
    locked = await connection.fetch(LOCK_BY_UUID, list(wanted | providers_held(consumers)))
    ids, before = await _read(connection, [row[0] for row in locked])
    outcome = await run_sized(
        offload, len(before) + len(expected), lambda: reshape(item, consumers, before, names.class_ids, shape=shape)
    )
    if isinstance(outcome, WriteRefusal):
        await write(connection, decide((), {}, {}, {})[1], consumers, inserted, ids=ids, names=names)
        return outcome
    old = await _write_reshaped(connection, outcome, (consumers, inserted), ids, names=names, offload=offload)

    def changes() -> list[Change]:
        usage = [each for each in changes_of_usage(outcome.decision) if each.provider not in outcome.final]
        return caused(changes_of(old, outcome.final) + usage, ((item.cause, ()),))

    await feed.append(connection, await run_sized(offload, len(before), changes), offload)
    return None


async def _read(connection: asyncpg.Connection, numbers: Sequence[int]) -> tuple[dict[str, int], dict[str, Provider]]:
    ids: dict[str, int] = {}
    providers: dict[str, Provider] = {}
    for begin in range(0, len(numbers), RESHAPED_AT_ONCE):
        part = numbers[begin : begin + RESHAPED_AT_ONCE]
        more_ids, more = await read_providers(connection, READ_PROVIDERS_BY_ID, part)
        ids |= more_ids
        providers |= more
    return ids, providers


async def _write_providers(
    connection: asyncpg.Connection,
    ids: dict[str, int],
    before: Mapping[str, Provider],
    after: Mapping[str, Provider],
    names: NameTable,
) -> None:
    """Write the differences between two states of the same providers."""
    uuids = list(after)
    for begin in range(0, len(uuids), RESHAPED_AT_ONCE):
        part = uuids[begin : begin + RESHAPED_AT_ONCE]
        old, new = {uuid: before[uuid] for uuid in part}, {uuid: after[uuid] for uuid in part}
        await write_providers(connection, ids, old, new, names)


async def _write_reshaped(
    connection: asyncpg.Connection,
    outcome: Reshaped,
    consumers: tuple[Mapping[str, ConsumerState], Mapping[str, ConsumerState]],
    ids: dict[str, int],
    *,
    names: NameTable,
    offload: OffloadThread | None,
) -> dict[str, Provider]:
    """Write what is reshaped. Returns the providers as they were."""
    old = {row.uuid: row for row in outcome.interim.values()}
    _, before = await _read(connection, sorted(ids[uuid] for uuid in old))
    await complete_ids(connection, ids, before, outcome.interim)
    await _write_providers(connection, ids, before, outcome.interim, names)
    found, inserted = consumers
    await write(connection, outcome.decision, found, inserted, ids=ids, names=names, offload=offload)
    await _write_providers(connection, ids, outcome.interim, outcome.final, names)
    await unsettle(connection, before, outcome.final)
    return before
