"""A group of claims as one transaction of a few set-based statements.

Locks are taken in one order by every writer: consumers by uuid, providers by id, the feed's counter last. Whoever
waits therefore waits for somebody further along, and there is no deadlock, swaps included.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import asyncpg

from bus.contracts.placement import Claim, ClaimOutcome, ClaimResult, Release, ReleaseResult, SwapResult
from bus.faults import BrokenInvariant
from placement_worker.domain.claims import Decision, Verdict, changes_of, decide
from placement_worker.domain.values import ABOVE_CELLS, NOTHING, ClaimedProvider, Consumer, Room
from placement_worker.store import feed
from placement_worker.store.names import Names
from placement_worker.store.port import ClaimItem, ClaimReply

# Locks and reads each named consumer; one that does not exist is written as it will most likely be, so that a plain
# claim costs one statement here and none later. xmax = 0 tells a row that this statement inserted.
LOCK_CONSUMERS = """
INSERT INTO consumers AS c (uuid, project_id, user_id, consumer_type, generation, attempt)
SELECT * FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::bigint[], $6::int[])
ON CONFLICT (uuid) DO UPDATE SET uuid = c.uuid
RETURNING c.uuid, c.generation, c.attempt, c.project_id, c.user_id, c.consumer_type,
    c.released_at IS NOT NULL AS released, c.xmax = 0 AS inserted
"""

READ_HOLDINGS = """
SELECT a.consumer, p.uuid, a.class_id, a.amount
FROM allocations a JOIN providers p ON p.id = a.provider_id
WHERE a.consumer = ANY($1::uuid[]) ORDER BY a.consumer, p.id, a.class_id
"""

LOCK_PROVIDERS = """
SELECT id, uuid, generation, shape FROM providers WHERE uuid = ANY($1::uuid[]) ORDER BY id FOR NO KEY UPDATE
"""

READ_ROOMS = """
SELECT provider_id, class_id, capacity, min_unit, max_unit, step_size, used
FROM inventories WHERE provider_id = ANY($1::bigint[])
"""

# What belongs to another cell than the one whose bus the claims came on: most often nothing.
FOREIGN = """
SELECT p.uuid FROM providers p JOIN providers root ON root.id = p.root_id
WHERE p.id = ANY($1::bigint[]) AND root.cell <> ALL($2::text[])
"""

DELETE_CONSUMERS = "DELETE FROM consumers WHERE uuid = ANY($1::uuid[])"

UPDATE_CONSUMERS = """
UPDATE consumers c SET project_id = n.project_id, user_id = n.user_id, consumer_type = n.consumer_type,
    generation = n.generation, attempt = n.attempt, updated_at = now(),
    released_at = CASE WHEN n.released THEN now() END
FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::bigint[], $6::int[], $7::bool[])
    AS n (uuid, project_id, user_id, consumer_type, generation, attempt, released)
WHERE c.uuid = n.uuid
"""

DELETE_HOLDINGS = "DELETE FROM allocations WHERE consumer = ANY($1::uuid[])"

INSERT_HOLDINGS = """
INSERT INTO allocations (consumer, provider_id, class_id, amount)
SELECT * FROM unnest($1::uuid[], $2::bigint[], $3::int[], $4::bigint[])
"""

# The database's own guard (invariant 1): usage may not rise past capacity, whatever the decision said.
UPDATE_USED = """
WITH moved AS (
    UPDATE providers p SET generation = n.generation, updated_at = now()
    FROM unnest($4::bigint[], $5::bigint[]) AS n (id, generation) WHERE p.id = n.id
)
UPDATE inventories i SET used = n.used
FROM unnest($1::bigint[], $2::int[], $3::bigint[]) AS n (provider_id, class_id, used)
WHERE i.provider_id = n.provider_id AND i.class_id = n.class_id AND (n.used <= i.capacity OR n.used <= i.used)
"""


async def apply(connection: asyncpg.Connection, items: Sequence[ClaimItem], names: Names, bus: str) -> list[ClaimReply]:
    """Decide and write one group that came on one bus, inside the caller's transaction."""
    inserted, consumers = await lock_consumers(connection, _expected(items), names)
    ids, providers = await lock_providers(connection, providers_of(items, consumers), names)
    foreign = await _foreign(connection, ids, bus)
    decision = decide(items, consumers, providers, names.class_ids, foreign)
    await write(connection, decision, consumers, inserted, ids=ids, names=names)
    sequence = await feed.append(connection, changes_of(decision))
    return [reply(item, verdict, sequence) for item, verdict in zip(items, decision.verdicts, strict=True)]


async def write(
    connection: asyncpg.Connection,
    decision: Decision,
    found: Mapping[str, Consumer],
    inserted: Mapping[str, Consumer],
    *,
    ids: Mapping[str, int],
    names: Names,
) -> None:
    """Write a decision about consumers and providers that `lock_consumers` and `lock_providers` have locked."""
    await _write_consumers(connection, decision, found, inserted)
    await _write_holdings(connection, decision, found, ids, names)
    await _write_usage(connection, decision, ids, names)


async def lock_consumers(
    connection: asyncpg.Connection, expected: Mapping[str, Consumer], names: Names
) -> tuple[dict[str, Consumer], dict[str, Consumer]]:
    """(rows this transaction inserted ahead, consumers that were there before).

    `expected`: each consumer as its row will most likely be if it is new.
    """
    rows = await connection.fetch(LOCK_CONSUMERS, *_columns(sorted(expected.items())))
    inserted: dict[str, Consumer] = {}
    found: dict[str, Consumer] = {}
    holders: list[str] = []
    for uuid, generation, attempt, project_id, user_id, consumer_type, released, is_new in rows:
        if is_new:
            inserted[uuid] = expected[uuid]
            continue
        found[uuid] = Consumer(generation, attempt, project_id, user_id, consumer_type)
        if not released:
            holders.append(uuid)
    if holders:
        holdings: dict[str, dict[str, dict[str, int]]] = {}
        held_rows = await connection.fetch(READ_HOLDINGS, holders)
        class_names = await names.names_of(connection, {row[2] for row in held_rows})
        for consumer, provider, class_id, amount in held_rows:
            holdings.setdefault(consumer, {}).setdefault(provider, {})[class_names[class_id]] = amount
        for uuid, held in holdings.items():
            old = found[uuid]
            found[uuid] = Consumer(old.generation, old.attempt, old.project_id, old.user_id, old.consumer_type, held)
    return inserted, found


def _expected(items: Sequence[ClaimItem]) -> dict[str, Consumer]:
    """Each named consumer as its row will be if it is new and the first word about it succeeds."""
    expected: dict[str, Consumer] = {}
    for item in items:
        if isinstance(item, Claim):
            if item.consumer not in expected:
                expected[item.consumer] = Consumer(1, item.attempt, item.project_id, item.user_id, item.consumer_type)
        elif isinstance(item, Release):
            expected.setdefault(item.consumer, Consumer(0, item.attempt or 0, "", "", ""))
        else:
            for entry in item.consumers:
                new = Consumer(1, 0, entry.project_id, entry.user_id, entry.consumer_type)
                expected.setdefault(entry.consumer, new)
    return expected


def _columns(rows: Sequence[tuple[str, Consumer]]) -> tuple[list[object], ...]:
    return (
        [uuid for uuid, _ in rows],
        [c.project_id for _, c in rows],
        [c.user_id for _, c in rows],
        [c.consumer_type for _, c in rows],
        [c.generation for _, c in rows],
        [c.attempt for _, c in rows],
    )


def providers_of(items: Sequence[ClaimItem], consumers: Mapping[str, Consumer]) -> set[str]:
    """Every provider that the items name or these consumers hold."""
    wanted: set[str] = set()
    for item in items:
        if isinstance(item, Claim):
            for option in item.options:
                wanted.update(option.allocations)
        elif not isinstance(item, Release):
            for entry in item.consumers:
                wanted.update(entry.allocations)
    for consumer in consumers.values():
        wanted.update(consumer.holding)
    return wanted


async def lock_providers(
    connection: asyncpg.Connection, wanted: Collection[str], names: Names
) -> tuple[dict[str, int], dict[str, ClaimedProvider]]:
    """({uuid: id}, {uuid: provider}) of those that exist, locked by id, as the locks' last holder left them."""
    if not wanted:
        return {}, {}
    rows = await connection.fetch(LOCK_PROVIDERS, list(wanted))
    ids = {row[1]: row[0] for row in rows}
    # A second statement, and so a second snapshot: the usage that the last holder of these locks committed.
    rooms: dict[int, dict[str, Room]] = {row[0]: {} for row in rows}
    stocked = await connection.fetch(READ_ROOMS, list(rooms))
    class_names = await names.names_of(connection, {row[1] for row in stocked})
    for provider_id, class_id, capacity, min_unit, max_unit, step_size, used in stocked:
        rooms[provider_id][class_names[class_id]] = Room(capacity, min_unit, max_unit, step_size, used)
    return ids, {row[1]: ClaimedProvider(row[2], row[3], rooms[row[0]]) for row in rows}


async def _foreign(connection: asyncpg.Connection, ids: Mapping[str, int], bus: str) -> frozenset[str]:
    """Of these providers, those of other cells; the API bus speaks for all cells."""
    if bus == ABOVE_CELLS or not ids:
        return frozenset()
    rows = await connection.fetch(FOREIGN, list(ids.values()), [ABOVE_CELLS, bus])
    return frozenset(row[0] for row in rows)


async def _write_consumers(
    connection: asyncpg.Connection,
    decision: Decision,
    found: Mapping[str, Consumer],
    inserted: Mapping[str, Consumer],
) -> None:
    """What differs from the rows as they are now: as found, or as inserted ahead."""
    changed = decision.consumers
    gone = [uuid for uuid in inserted if changed.get(uuid) is None]
    gone += [uuid for uuid in found if uuid in changed and changed[uuid] is None]
    rows = [
        (uuid, after)
        for uuid, after in changed.items()
        if after is not None and (uuid not in inserted or not after.holding or not _same(after, inserted[uuid]))
    ]
    if gone:
        await connection.execute(DELETE_CONSUMERS, gone)
    if rows:
        released = [not after.holding for _, after in rows]
        await connection.execute(UPDATE_CONSUMERS, *_columns(rows), released)


def _same(a: Consumer, b: Consumer) -> bool:
    return (a.generation, a.attempt, a.project_id, a.user_id, a.consumer_type) == (
        b.generation,
        b.attempt,
        b.project_id,
        b.user_id,
        b.consumer_type,
    )


async def _write_holdings(
    connection: asyncpg.Connection,
    decision: Decision,
    found: Mapping[str, Consumer],
    ids: Mapping[str, int],
    names: Names,
) -> None:
    stale = [uuid for uuid in decision.consumers if uuid in found and found[uuid].holding]
    if stale:
        await connection.execute(DELETE_HOLDINGS, stale)
    class_ids = names.class_ids
    rows = [
        (uuid, ids[provider], class_ids[name], amount)
        for uuid, consumer in decision.consumers.items()
        for provider, resources in (consumer.holding if consumer is not None else NOTHING).items()
        for name, amount in resources.items()
    ]
    if rows:
        await connection.execute(INSERT_HOLDINGS, *map(list, zip(*rows, strict=True)))


async def _write_usage(
    connection: asyncpg.Connection, decision: Decision, ids: Mapping[str, int], names: Names
) -> None:
    if not decision.generations:
        return
    class_ids = names.class_ids
    rows = [
        (ids[provider], class_ids[name], used)
        for provider, resources in decision.used.items()
        for name, used in resources.items()
    ]
    generations = [(ids[provider], generation) for provider, generation in decision.generations.items()]
    columns = (*zip(*rows, strict=True), *zip(*generations, strict=True))
    tag = await connection.execute(UPDATE_USED, *map(list, columns))
    if tag != f"UPDATE {len(rows)}":
        raise BrokenInvariant(f"usage past capacity, or an inventory is gone: {tag} of {len(rows)}")


def reply(item: ClaimItem, verdict: Verdict, sequence: int) -> ClaimReply:
    """What one item's asker is told."""
    number = sequence if verdict.changed else 0
    if isinstance(item, Claim):
        return ClaimResult(
            outcome=ClaimOutcome(verdict.outcome),
            option=verdict.option,
            outcomes=verdict.outcomes,
            consumer_generation=verdict.consumer_generation,
            generations=verdict.generations,
            sequence=number,
            reason=verdict.reason,
            holding={uuid: dict(amounts) for uuid, amounts in verdict.holding.items()},
        )
    if isinstance(item, Release):
        return ReleaseResult(outcome=verdict.outcome, sequence=number)
    return SwapResult(
        outcome=ClaimOutcome(verdict.outcome),
        consumer=verdict.consumer,
        generations=verdict.generations,
        sequence=number,
        reason=verdict.reason,
    )
