"""The REST API's reads in PostgreSQL. Each read is one statement, so that its rows are of one moment."""

from __future__ import annotations

from collections.abc import Sequence

import asyncpg

from placement_worker.domain.units import in_units_sql
from placement_worker.store.names import NameTable
from placement_worker.store.rest_port import AllocationRow, InventoryRecord, Listing, UsageRow

NO_NUMBER = 0  # no class or trait has this id

_PROVIDERS = """
SELECT p.uuid, p.name, p.generation, parent.uuid, root.uuid, extract(epoch FROM p.updated_at)::float8
FROM providers p LEFT JOIN providers parent ON parent.id = p.parent_id JOIN providers root ON root.id = p.root_id
"""
_INVENTORIES = """
SELECT p.generation, c.name, i.total, i.reserved, i.min_unit, i.max_unit, i.step_size, i.allocation_ratio,
    extract(epoch FROM i.updated_at)::float8
FROM providers p LEFT JOIN inventories i ON i.provider_id = p.id LEFT JOIN resource_classes c ON c.id = i.class_id
WHERE p.uuid = $1 ORDER BY c.name
"""
_USAGES = """
SELECT p.generation, c.name, i.used
FROM providers p LEFT JOIN inventories i ON i.provider_id = p.id LEFT JOIN resource_classes c ON c.id = i.class_id
WHERE p.uuid = $1 ORDER BY c.name
"""
_TRAITS = """
SELECT p.generation, t.name, extract(epoch FROM t.updated_at)::float8
FROM providers p LEFT JOIN provider_traits pt ON pt.provider_id = p.id LEFT JOIN traits t ON t.id = pt.trait_id
WHERE p.uuid = $1 ORDER BY t.name
"""
_AGGREGATES = """
SELECT p.generation, a.aggregate FROM providers p LEFT JOIN provider_aggregates a ON a.provider_id = p.id
WHERE p.uuid = $1 ORDER BY a.aggregate
"""
_ALLOCATION = """
SELECT c.uuid, p.uuid, p.generation, rc.name, a.amount, c.generation, c.project_id, c.user_id, c.consumer_type,
    extract(epoch FROM c.updated_at)::float8
"""
_BY_CONSUMER = (
    _ALLOCATION
    + """
FROM allocations a JOIN providers p ON p.id = a.provider_id JOIN consumers c ON c.uuid = a.consumer
JOIN resource_classes rc ON rc.id = a.class_id
WHERE a.consumer = $1 ORDER BY p.id, rc.name
"""
)
_BY_PROVIDER = (
    _ALLOCATION
    + """
FROM providers p LEFT JOIN allocations a ON a.provider_id = p.id LEFT JOIN consumers c ON c.uuid = a.consumer
LEFT JOIN resource_classes rc ON rc.id = a.class_id
WHERE p.uuid = $1 ORDER BY c.uuid, rc.name
"""
)
_TOTALS = """
WITH held AS (
    SELECT c.consumer_type, a.class_id, a.consumer, a.amount
    FROM consumers c JOIN allocations a ON a.consumer = c.uuid
    WHERE c.released_at IS NULL AND c.project_id = $1 AND ($2::text IS NULL OR c.user_id = $2)
        AND ($3::text IS NULL OR c.consumer_type = $3)
), counted AS (SELECT consumer_type, count(DISTINCT consumer) AS consumers FROM held GROUP BY consumer_type)
SELECT held.consumer_type, rc.name, sum(held.amount)::bigint, counted.consumers
FROM held JOIN counted USING (consumer_type) JOIN resource_classes rc ON rc.id = held.class_id
GROUP BY held.consumer_type, rc.name, counted.consumers ORDER BY held.consumer_type, rc.name
"""


async def providers(connection: asyncpg.Connection, listing: Listing, names: NameTable) -> list[asyncpg.Record]:
    """Return the providers that meet the conditions, oldest first. A name that the book does not know matches
    nothing.
    """
    conditions, arguments = _conditions(listing, names)
    where = f"WHERE {' AND '.join(conditions)} " if conditions else ""
    rows: list[asyncpg.Record] = await connection.fetch(f"{_PROVIDERS}{where}ORDER BY p.id", *arguments)
    return rows


def _conditions(listing: Listing, names: NameTable) -> tuple[list[str], list[object]]:
    """Return a listing as SQL conditions on `providers p`, and the arguments of their parameters $1 and following."""
    arguments: list[object] = []
    conditions: list[str] = []

    def add(condition: str, *values: object) -> None:
        for value in values:
            arguments.append(value)
            condition = condition.replace("?", f"${len(arguments)}", 1)
        conditions.append(condition)

    if listing.uuid is not None:
        add("p.uuid = ?::uuid", listing.uuid)
    if listing.name is not None:
        add("p.name = ?", listing.name)
    if listing.in_tree is not None:
        add("p.root_id = (SELECT root_id FROM providers WHERE uuid = ?::uuid)", listing.in_tree)
    trait_ids = names.trait_ids
    has_trait = "EXISTS (SELECT FROM provider_traits t WHERE t.provider_id = p.id AND t.trait_id = ANY(?::int[]))"
    for group in listing.required:
        add(has_trait, [trait_ids.get(name, NO_NUMBER) for name in group])
    if listing.forbidden:
        add(f"NOT {has_trait}", [trait_ids.get(name, NO_NUMBER) for name in listing.forbidden])
    is_member = "EXISTS (SELECT FROM provider_aggregates a WHERE a.provider_id = p.id AND a.aggregate = ANY(?::uuid[]))"
    for members in listing.member_of:
        add(is_member, list(members))
    if listing.forbidden_aggregates:
        add(f"NOT {is_member}", list(listing.forbidden_aggregates))
    for name, amount in listing.resources:
        add(
            "EXISTS (SELECT FROM inventories i WHERE i.provider_id = p.id AND i.class_id = ?::int AND "
            f"i.capacity - i.used >= ?::bigint AND {in_units_sql('?::bigint')})",
            names.class_ids.get(name, NO_NUMBER),
            amount,
            amount,
            amount,
            amount,
        )
    return conditions, arguments


async def inventories(connection: asyncpg.Connection, uuid: str) -> tuple[int, list[InventoryRecord]] | None:
    """(generation, inventories) of a provider, None when there is none."""
    rows = await connection.fetch(_INVENTORIES, uuid)
    return (rows[0][0], [InventoryRecord(*row[1:]) for row in rows if row[1] is not None]) if rows else None


async def usages(connection: asyncpg.Connection, uuid: str) -> tuple[int, dict[str, int]] | None:
    """(generation, {class: used}) of a provider, None when there is none."""
    rows = await connection.fetch(_USAGES, uuid)
    return (rows[0][0], {row[1]: row[2] for row in rows if row[1] is not None}) if rows else None


async def traits(connection: asyncpg.Connection, uuid: str) -> tuple[int, dict[str, float]] | None:
    """(generation, {trait: when it was made}) of a provider, None when there is none."""
    rows = await connection.fetch(_TRAITS, uuid)
    return (rows[0][0], {row[1]: row[2] for row in rows if row[1] is not None}) if rows else None


async def aggregates(connection: asyncpg.Connection, uuid: str) -> tuple[int, list[str]] | None:
    """(generation, aggregates) of a provider, None when there is none."""
    rows = await connection.fetch(_AGGREGATES, uuid)
    return (rows[0][0], [row[1] for row in rows if row[1] is not None]) if rows else None


async def allocations_of_consumer(connection: asyncpg.Connection, uuid: str) -> list[AllocationRow]:
    """The allocations of a consumer."""
    return [AllocationRow(*row) for row in await connection.fetch(_BY_CONSUMER, uuid)]


async def allocations_of_provider(connection: asyncpg.Connection, uuid: str) -> tuple[int, list[AllocationRow]] | None:
    """(generation, allocations of a provider), None when it does not exist."""
    rows = await connection.fetch(_BY_PROVIDER, uuid)
    return (rows[0][2], [AllocationRow(*row) for row in rows if row[0] is not None]) if rows else None


async def totals(
    connection: asyncpg.Connection, project_id: str, user_id: str | None, consumer_type: str | None
) -> Sequence[UsageRow]:
    """The amounts that a project's (and user's, and type's) consumers hold, by type and class.

    "" is the unknown type.
    """
    return [UsageRow(*row) for row in await connection.fetch(_TOTALS, project_id, user_id, consumer_type)]
