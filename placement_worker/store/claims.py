"""The statements that lock and write the rows of claims: a few for a group of any size.

Every writer takes locks in one order (`store.port`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import asyncpg
import msgspec

from bus.contracts.feed import Change
from bus.contracts.placement import MAX_HOLDERS, ClaimHolder
from bus.faults import BrokenInvariant
from bus.turns import turn_for
from placement_worker.domain.claim_ledger import Decision, Lacking
from placement_worker.domain.values import NOTHING, ClaimedProvider, ConsumerState, InventoryUsage
from placement_worker.store import feed, limits
from placement_worker.store.port import Locked, PassedMeanwhile
from placement_worker.store.rows import transposed

# Both call functions of 0001_functions.sql, so that each takes one round trip.
LOCK = """
SELECT lock_claims($1::uuid[], $2::text[], $3::text[], $4::text[], $5::bigint[], $6::int[], $7::text[], $8::uuid[],
    $9::text[], $10)
"""
WRITE = """
SELECT write_claims($1::uuid[],
    $2::uuid[], $3::text[], $4::text[], $5::text[], $6::bigint[], $7::int[], $8::text[], $9::bool[],
    $10::uuid[], $11::uuid[], $12::bigint[], $13::int[], $14::bigint[],
    $15::bigint[], $16::int[], $17::bigint[], $18::bigint[], $19::bigint[],
    $20::bigint[], $21::bigint[], $22::bytea[],
    $23::text[], $24::int[], $25::bigint[], $26::bigint[])
"""

_ConsumerRow = tuple[str, int, int, str, str, str, str]
_HoldingRow = tuple[str, str, int, int]
_RoomRow = tuple[int, int, int, int, int, int]
_ProviderRow = tuple[int, str, int, int, str, str | None, list[_RoomRow] | None]
_UsageRow = tuple[str, int, int]
Rows = tuple[list[_ConsumerRow], list[_HoldingRow], list[_ProviderRow], list[_UsageRow]]
_rows = msgspec.json.Decoder(Rows).decode


async def lock(
    connection: asyncpg.Connection,
    expected: Mapping[str, ConsumerState],
    wanted: Collection[str] | None,
    *,
    limited: Sequence[str] = (),
    alone: bool = False,
) -> Rows:
    """Lock and read consumers by uuid, then providers by id; see `BookTransaction.lock_claims`."""
    uuids = None if wanted is None else list(wanted)
    answer: str = await connection.fetchval(LOCK, *columns(sorted(expected.items())), uuids, limited, alone)
    rows: Rows = _rows(answer)
    return rows


def classes_used(rows: Rows) -> set[int]:
    """The classes that the rows name."""
    _, held, providers, usage = rows
    used = {row[2] for row in held}
    used.update(room[0] for row in providers for room in row[6] or ())
    used.update(row[1] for row in usage if row[1] != limits.INSTANCES_ID)
    return used


def as_locked(rows: Rows, expected: Mapping[str, ConsumerState], class_names: Mapping[int, str]) -> Locked:
    """The rows with the names of their classes."""
    consumers, held, providers, usage = rows
    holdings: dict[str, dict[str, dict[str, int]]] = {}
    for consumer, provider, class_id, amount in held:
        holdings.setdefault(consumer, {}).setdefault(provider, {})[class_names[class_id]] = amount
    found = {row[0]: ConsumerState(*row[1:6], holdings.get(row[0], NOTHING), row[6]) for row in consumers}
    return Locked(
        inserted={uuid: consumer for uuid, consumer in expected.items() if uuid not in found},
        found=found,
        providers={
            row[1]: ClaimedProvider(
                row[2],
                row[3],
                {class_names[inventory[0]]: InventoryUsage(*inventory[1:]) for inventory in row[6] or ()},
                root=row[4],
            )
            for row in providers
        },
        cells={row[1]: row[5] for row in providers if row[5] is not None},
        usage=limits.by_project(usage, class_names),
    )


async def write(
    connection: asyncpg.Connection,
    decision: Decision,
    locked: Locked,
    changes: Sequence[Change],
    most: Mapping[tuple[str, str], int],
    *,
    ids: Mapping[str, int],
    class_ids: Mapping[str, int],
) -> int:
    """Write a decision and append the changes; see `BookTransaction.write_claims`. ids: the row ids of its providers.
    Raises PassedMeanwhile and BrokenInvariant.
    """
    size = len(decision.consumers) + len(decision.used) + len(locked.inserted)
    await turn_for(size)
    columns = _columns(decision, locked, ids, class_ids)
    if not any(columns) and not changes:
        return 0
    usage = transposed(limits.rows_of(locked.found, decision.consumers, class_ids, most), 4)
    answer = feed.rows(changes) if changes else ([], [], [])
    await turn_for(size)
    try:
        sequence, written = await connection.fetchval(WRITE, *columns, *answer, *usage)
    except asyncpg.RaiseError as error:
        raise PassedMeanwhile from error
    wanted = sum(map(len, decision.used.values()))
    if written != wanted:
        raise BrokenInvariant(f"usage past capacity, or an inventory is gone: {written} of {wanted}")
    number: int = sequence
    return number


def _columns(
    decision: Decision, locked: Locked, ids: Mapping[str, int], class_ids: Mapping[str, int]
) -> tuple[list[object], ...]:
    """Return the columns of WRITE's rows: consumers to delete, consumers to change, consumers whose allocations are
    deleted, allocations, usage, generations.
    """
    used = [
        (ids[provider], class_ids[name], amount)
        for provider, resources in decision.used.items()
        for name, amount in resources.items()
    ]
    generations = [(ids[provider], generation) for provider, generation in decision.generations.items()]
    return (
        *_consumer_columns(decision, locked.found, locked.inserted),
        *_holding_columns(decision, locked.found, ids, class_ids),
        *transposed(used, 3),
        *transposed(generations, 2),
    )


def columns(rows: Sequence[tuple[str, ConsumerState]]) -> tuple[list[object], ...]:
    """Return consumers as the columns that the statements take."""
    return (
        [uuid for uuid, _ in rows],
        [c.project_id for _, c in rows],
        [c.user_id for _, c in rows],
        [c.consumer_type for _, c in rows],
        [c.generation for _, c in rows],
        [c.attempt for _, c in rows],
        [c.run for _, c in rows],
    )


def _consumer_columns(
    decision: Decision, found: Mapping[str, ConsumerState], inserted: Mapping[str, ConsumerState]
) -> tuple[list[object], ...]:
    """Return the consumers to delete, and the columns of those whose rows differ from the found or inserted ones."""
    changed = decision.consumers
    gone: list[object] = [uuid for uuid in inserted if changed.get(uuid) is None]
    gone += [uuid for uuid in found if uuid in changed and changed[uuid] is None]
    rows = [
        (uuid, after)
        for uuid, after in changed.items()
        if after is not None and (uuid not in inserted or not after.holding or not _same(after, inserted[uuid]))
    ]
    return (gone, *columns(rows), [not after.holding for _, after in rows])


def _same(a: ConsumerState, b: ConsumerState) -> bool:
    return (a.generation, a.attempt, a.project_id, a.user_id, a.consumer_type, a.run) == (
        b.generation,
        b.attempt,
        b.project_id,
        b.user_id,
        b.consumer_type,
        b.run,
    )


def _holding_columns(
    decision: Decision, found: Mapping[str, ConsumerState], ids: Mapping[str, int], class_ids: Mapping[str, int]
) -> tuple[list[object], ...]:
    """Return the consumers whose allocations are deleted, and the columns of the new allocations."""
    stale: list[object] = [uuid for uuid in decision.consumers if uuid in found and found[uuid].holding]
    rows = [
        (uuid, ids[provider], class_ids[name], amount)
        for uuid, consumer in decision.consumers.items()
        for provider, resources in (consumer.holding if consumer is not None else NOTHING).items()
        for name, amount in resources.items()
    ]
    return (stale, *transposed(rows, 4))


# Allocations of one provider that are searched. For a provider with more, the newest holders are not looked up, because
# that would cost too much.
MAX_ALLOCATIONS = 1000

NEWEST = """
WITH lacking AS (
    SELECT n.claim, n.claimant, p.id, n.class_id
    FROM unnest($1::int[], $2::uuid[], $3::uuid[], $4::int[]) AS n (claim, claimant, provider, class_id)
    JOIN providers p ON p.uuid = n.provider
), held AS (
    SELECT DISTINCT l.claim, a.consumer FROM lacking l CROSS JOIN LATERAL (
        SELECT s.consumer, s.class_id, count(*) OVER () AS every
        FROM (SELECT consumer, class_id FROM allocations WHERE provider_id = l.id LIMIT $5 + 1) s
    ) a WHERE a.every <= $5 AND a.class_id = l.class_id AND a.consumer <> l.claimant
), ranked AS (
    SELECT h.claim, c.uuid, c.project_id,
        row_number() OVER (PARTITION BY h.claim ORDER BY c.updated_at DESC, c.uuid) AS place
    FROM held h JOIN consumers c ON c.uuid = h.consumer
)
SELECT claim, uuid::text, project_id FROM ranked WHERE place <= $6 ORDER BY claim, place
"""


async def newest_holders(
    connection: asyncpg.Connection, lost: Mapping[int, tuple[str, Lacking]], class_ids: Mapping[str, int]
) -> dict[int, tuple[ClaimHolder, ...]]:
    """Return, by place, the newest holders of the amounts that claims lacked."""
    rows = [
        (place, consumer, provider, class_ids[name])
        for place, (consumer, lacking) in lost.items()
        for provider, name in lacking
    ]
    found: dict[int, tuple[ClaimHolder, ...]] = {}
    for place, consumer, project in await connection.fetch(NEWEST, *transposed(rows, 4), MAX_ALLOCATIONS, MAX_HOLDERS):
        found[place] = (*found.get(place, ()), ClaimHolder(consumer=consumer, project_id=project))
    return found
