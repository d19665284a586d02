"""The statements that lock and write the rows of claims: a few for a group of any size.

Every writer takes locks in one order (`store.port`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from placement_worker.domain.claim_ledger import Decision
from placement_worker.domain.values import NOTHING, ClaimedProvider, ConsumerState, InventoryUsage
from placement_worker.store import limits
from placement_worker.store.port import Limits, Locked
from placement_worker.store.rows import holdings_of, transposed

# They call functions of 0001_functions.sql, so that each takes one round trip.
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
TAKE_NEW = """
SELECT take_new_claims($1::uuid[], $2::text[], $3::text[], $4::text[], $5::bigint[], $6::int[], $7::text[],
    $8::uuid[], $9::bigint[], $10::uuid[], $11::int[], $12::int[], $13::text[], $14::bigint[], $15::text[],
    $16::text[], $17::int[], $18::bigint[], $19::bigint[])
"""

_ConsumerRow = tuple[str, int, int, str, str, str, str]
_HoldingRow = tuple[str, str, int, int]
_RoomRow = tuple[int, int, int, int, int, int]
_ProviderRow = tuple[int, str, int, int, str, str | None, list[_RoomRow] | None, bool]
_UsageRow = tuple[str, int, int]
Rows = tuple[list[_ConsumerRow], list[_HoldingRow], list[_ProviderRow], list[_UsageRow]]
decode = msgspec.json.Decoder(Rows).decode


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
    holdings = holdings_of((consumer, uuid, class_names[number], amount) for consumer, uuid, number, amount in held)
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
                shares=row[7],
            )
            for row in providers
        },
        cells={row[1]: row[5] for row in providers if row[5] is not None},
        usage=limits.by_project(usage, class_names),
    )


def columns(rows: Sequence[tuple[str, ConsumerState]]) -> list[list[object]]:
    """Return consumers as the columns that the statements take."""
    return transposed([_row_of(uuid, consumer) for uuid, consumer in rows], 7)


def _row_of(uuid: str, c: ConsumerState) -> tuple[object, ...]:
    return (uuid, c.project_id, c.user_id, c.consumer_type, c.generation, c.attempt, c.run)


def new_columns(
    consumers: Mapping[str, ConsumerState], shapes: Mapping[str, int | None], class_ids: Mapping[str, int], most: Limits
) -> list[list[object]]:
    """Return the columns of TAKE_NEW."""
    places = {provider: place for place, provider in enumerate(shapes, 1)}
    held = [
        (uuid, places[provider], class_ids[name], name, amount)
        for uuid, consumer in consumers.items()
        for provider, resources in consumer.holding.items()
        for name, amount in resources.items()
    ]
    new: list[list[object]] = [*columns(sorted(consumers.items())), list(shapes), list(shapes.values())]
    limited: list[object] = [*sorted({project for project, _ in most})]
    usage = transposed(limits.rows_of({}, consumers, class_ids, most), 4)
    return [*new, *transposed(held, 5), limited, *usage]


def written_columns(
    decision: Decision, locked: Locked, ids: Mapping[str, int], class_ids: Mapping[str, int]
) -> tuple[list[object], ...]:
    """Return the columns of WRITE's rows: consumers to delete, consumers whose rows differ from the found or inserted
    ones, consumers whose allocations are deleted, allocations, usage, generations.
    """
    changed, found, inserted = decision.consumers, locked.found, locked.inserted
    gone: list[object] = [uuid for uuid in inserted if changed.get(uuid) is None]
    gone += [uuid for uuid in found if uuid in changed and changed[uuid] is None]
    kept = [
        (uuid, after)
        for uuid, after in changed.items()
        if after is not None
        and (uuid not in inserted or not after.holding or _row_of(uuid, after) != _row_of(uuid, inserted[uuid]))
    ]
    stale: list[object] = [uuid for uuid in changed if uuid in found and found[uuid].holding]
    held = [
        (uuid, ids[provider], class_ids[name], amount)
        for uuid, consumer in changed.items()
        if consumer is not None
        for provider, resources in consumer.holding.items()
        for name, amount in resources.items()
    ]
    used = [
        (ids[provider], class_ids[name], amount)
        for provider, resources in decision.used.items()
        for name, amount in resources.items()
    ]
    generations = [(ids[provider], generation) for provider, generation in decision.generations.items()]
    released: list[object] = [not after.holding for _, after in kept]
    return (
        *(gone, *columns(kept), released),
        *(stale, *transposed(held, 4)),
        *transposed(used, 3),
        *transposed(generations, 2),
    )


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
