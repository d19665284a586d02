"""The statements that lock and write the rows of claims: a few for a group of any size.

Every writer takes locks in one order (`store.port`). The usage of projects has one row for each project and class.
Every transaction that changes allocations adds the difference to these rows at its end (`usage_rows`), with or without
limits, so that a claim with limits need not sum up allocations. Claims with limits take a shared lock on their projects
and decide concurrently. The write compares the new usage with the limit once more; a group that would exceed it is
rolled back (LimitExceeded) and repeated under an exclusive lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.sql.dml import ReturningDelete

from bus.contracts.placement import INSTANCES
from placement_worker.domain.claim_ledger import Decision
from placement_worker.domain.migration import MIGRATION_TYPE
from placement_worker.domain.server_groups import usage_changes
from placement_worker.domain.values import NOTHING, ClaimedProvider, ConsumerState, InventoryUsage
from placement_worker.store.port import Limits, Locked
from placement_worker.store.rows import allocations_by_consumer, transposed
from placement_worker.store.tables import allocations, consumers, project_usage

# They call functions of 0001_functions.sql, so that each takes one round trip.
LOCK = """
SELECT lock_claims($1::uuid[], $2::text[], $3::text[], $4::text[], $5::bigint[], $6::int[], $7::text[], $8::uuid[],
    $9::text[], $10, $11)
"""
WRITE = """
SELECT write_claims($1::uuid[],
    $2::uuid[], $3::text[], $4::text[], $5::text[], $6::bigint[], $7::int[], $8::text[], $9::bool[],
    $10::uuid[], $11::uuid[], $12::bigint[], $13::int[], $14::bigint[],
    $15::bigint[], $16::int[], $17::bigint[], $18::bool[], $19::bigint[], $20::bigint[],
    $21::bigint[], $22::bigint[], $23::bytea[],
    $24::text[], $25::int[], $26::bigint[], $27::bigint[])
"""
TAKE_NEW = """
SELECT take_new_claims($1::uuid[], $2::text[], $3::text[], $4::text[], $5::bigint[], $6::int[], $7::text[],
    $8::uuid[], $9::bigint[], $10::uuid[], $11::int[], $12::int[], $13::text[], $14::bigint[], $15::text[],
    $16::text[], $17::int[], $18::bigint[], $19::bigint[])
"""

_ConsumerRow = tuple[str, int, int, str, str, str, str]
_AllocationRow = tuple[str, str, int, int]
_InventoryRow = tuple[int, int, int, int, int, int]
_ProviderRow = tuple[int, str, int, int, str, str | None, list[_InventoryRow] | None, bool]
_UsageRow = tuple[str, int, int]
Rows = tuple[list[_ConsumerRow], list[_AllocationRow], list[_ProviderRow], list[_UsageRow], int]
decode = msgspec.json.Decoder(Rows).decode


def classes_used(rows: Rows) -> set[int]:
    """The classes that the rows name."""
    _, held, providers, usage, _ = rows
    used = {row[2] for row in held}
    used.update(room[0] for row in providers for room in row[6] or ())
    used.update(row[1] for row in usage if row[1] != INSTANCES_ID)
    return used


def as_locked(rows: Rows, expected: Mapping[str, ConsumerState], class_names: Mapping[int, str]) -> Locked:
    """The rows with the names of their classes."""
    consumers, held, providers, usage, incarnation = rows
    holdings = allocations_by_consumer(
        (consumer, uuid, class_names[number], amount) for consumer, uuid, number, amount in held
    )
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
        usage=by_project(usage, class_names),
        incarnation=incarnation,
    )


def columns(rows: Sequence[tuple[str, ConsumerState]]) -> list[list[object]]:
    """Return consumers as the columns that the statements take."""
    return transposed([_row_of(uuid, consumer) for uuid, consumer in rows], 7)


def _row_of(uuid: str, c: ConsumerState) -> tuple[object, ...]:
    return (uuid, c.project_id, c.user_id, c.consumer_type, c.generation, c.attempt, c.claim_owner)


def new_columns(
    consumers: Mapping[str, ConsumerState],
    spec_generations: Mapping[str, int | None],
    class_ids: Mapping[str, int],
    most: Limits,
) -> list[list[object]]:
    """Return the columns of TAKE_NEW."""
    places = {provider: place for place, provider in enumerate(spec_generations, 1)}
    held = [
        (uuid, places[provider], class_ids[name], name, amount)
        for uuid, consumer in consumers.items()
        for provider, resources in consumer.allocations.items()
        for name, amount in resources.items()
    ]
    new: list[list[object]] = [
        *columns(sorted(consumers.items())),
        list(spec_generations),
        list(spec_generations.values()),
    ]
    limited: list[object] = [*sorted({project for project, _ in most})]
    usage = transposed(usage_rows({}, consumers, class_ids, most), 4)
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
        and (uuid not in inserted or not after.allocations or _row_of(uuid, after) != _row_of(uuid, inserted[uuid]))
    ]
    stale: list[object] = [uuid for uuid in changed if uuid in found and found[uuid].allocations]
    held = [
        (uuid, ids[provider], class_ids[name], amount)
        for uuid, consumer in changed.items()
        if consumer is not None
        for provider, resources in consumer.allocations.items()
        for name, amount in resources.items()
    ]
    used = [
        (ids[provider], class_ids[name], amount, (provider, name) in decision.above)
        for provider, resources in decision.used.items()
        for name, amount in resources.items()
    ]
    generations = [(ids[provider], generation) for provider, generation in decision.generations.items()]
    released: list[object] = [not after.allocations for _, after in kept]
    return (
        *(gone, *columns(kept), released),
        *(stale, *transposed(held, 4)),
        *transposed(used, 4),
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


INSTANCES_ID = -1  # the class id of the row that counts the consumers with allocations

_EMPTY = project_usage.alias("empty")


def purge_empty(limit: int) -> ReturningDelete[Any]:
    """Delete rows whose amount is 0. Rows that another transaction has locked are skipped."""
    keys = sa.tuple_(project_usage.c.project_id, project_usage.c.class_id)
    empty = sa.select(_EMPTY.c.project_id, _EMPTY.c.class_id).where(_EMPTY.c.amount == 0).limit(limit)
    return (
        sa.delete(project_usage)
        .where(project_usage.c.amount == 0, keys.in_(empty.with_for_update(skip_locked=True)))
        .returning(project_usage.c.class_id)
    )


def _wrong() -> sa.Select[Any]:
    """(project, class id, recorded amount, correct amount) where the amounts differ."""
    usage, held = project_usage.c, allocations.c
    counts, holds = consumers.c.released_at.is_(None), sa.exists().where(held.consumer == consumers.c.uuid)
    by_class = (
        sa.select(
            consumers.c.project_id, held.class_id, sa.cast(sa.func.sum(held.amount), sa.BigInteger).label("amount")
        )
        .select_from(consumers.join(allocations, held.consumer == consumers.c.uuid))
        .where(counts)
        .group_by(consumers.c.project_id, held.class_id)
    )
    instances = (
        sa.select(consumers.c.project_id, sa.literal(INSTANCES_ID, sa.Integer), sa.func.count())
        .where(counts, holds, consumers.c.consumer_type != MIGRATION_TYPE)
        .group_by(consumers.c.project_id)
    )
    right = by_class.union_all(instances).subquery()
    same = sa.and_(right.c.project_id == usage.project_id, right.c.class_id == usage.class_id)
    recorded, correct = sa.func.coalesce(usage.amount, 0), sa.func.coalesce(right.c.amount, 0)
    return (
        sa.select(
            sa.func.coalesce(usage.project_id, right.c.project_id).label("project_id"),
            sa.func.coalesce(usage.class_id, right.c.class_id).label("class_id"),
            recorded.label("amount"),
            correct.label("held"),
        )
        .select_from(project_usage.join(right, same, full=True))
        .where(recorded != correct)
    )


WRONG = _wrong().subquery("wrong")
_ANEW = insert(project_usage).from_select(
    ["project_id", "class_id", "amount"], sa.select(WRONG.c.project_id, WRONG.c.class_id, WRONG.c.held)
)
# Correct the wrong rows. The caller ensures that no consumer changes meanwhile.
COUNT_ANEW = _ANEW.on_conflict_do_update(
    index_elements=["project_id", "class_id"], set_={"amount": _ANEW.excluded.amount}
).returning(project_usage.c.project_id)


def by_project(rows: Iterable[Sequence[Any]], class_names: Mapping[int, str]) -> dict[str, dict[str, int]]:
    """Return rows of (project, class id, amount) as {project: {class: amount}}."""
    held: dict[str, dict[str, int]] = {}
    for project, class_id, amount in rows:
        name = INSTANCES if class_id == INSTANCES_ID else class_names[class_id]
        held.setdefault(project, {})[name] = amount
    return held


def usage_rows(
    before: Mapping[str, ConsumerState],
    after: Mapping[str, ConsumerState | None],
    class_ids: Mapping[str, int],
    most: Mapping[tuple[str, str], int],
) -> list[tuple[str, int, int, int | None]]:
    """Return (project, class id, difference, limit) rows for the consumers that change, as the SQL function takes them.

    most: the limits to compare once more when the rows are written.
    """
    return [
        (project, INSTANCES_ID if name == INSTANCES else class_ids[name], more, most.get((project, name)))
        for (project, name), more in usage_changes(before, after).items()
    ]
