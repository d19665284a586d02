"""Checks of the whole book, for `berth check` and for tests. They read and repair nothing."""

from __future__ import annotations

import asyncpg
from msgspec import Struct

from bus.contracts.placement import INSTANCES
from placement_worker.domain.server_groups import SHARING
from placement_worker.store import limits


class InventoryRow(Struct, frozen=True):
    """One inventory, with names instead of ids. stranded: its source no longer reports it, but it is in use."""

    provider: str
    resource_class: str
    total: int
    reserved: int
    allocation_ratio: float
    capacity: int
    used: int
    stranded: bool


class UsageMismatch(Struct, frozen=True):
    """An inventory whose `used` is not the sum of its allocations. used: None for allocations without an inventory."""

    provider: str
    resource_class: str
    used: int | None
    allocated: int


class FeedHole(Struct, frozen=True):
    """Two neighbouring rows of the feed whose numbers are not consecutive, or a last row whose number is not the
    head.
    """

    after: int
    before: int


INVENTORIES = """
SELECT p.uuid, c.name, i.total, i.reserved, i.allocation_ratio, i.capacity, i.used, i.stranded
FROM inventories i JOIN providers p ON p.id = i.provider_id JOIN resource_classes c ON c.id = i.class_id
"""
OVER_CAPACITY = INVENTORIES + "WHERE i.used > i.capacity"
IN_ORDER = " ORDER BY p.uuid, c.name"

ALLOCATIONS = """
SELECT a.consumer, coalesce(p.uuid::text, 'provider ' || a.provider_id), c.name, a.amount
FROM allocations a LEFT JOIN providers p ON p.id = a.provider_id JOIN resource_classes c ON c.id = a.class_id
ORDER BY a.consumer, a.provider_id, c.name
"""

MISMATCHES = """
SELECT coalesce(p.uuid::text, 'provider ' || coalesce(i.provider_id, s.provider_id)), c.name, i.used,
    coalesce(s.allocated, 0)
FROM inventories i
FULL JOIN (
    SELECT provider_id, class_id, sum(amount)::bigint AS allocated FROM allocations GROUP BY provider_id, class_id
) s ON s.provider_id = i.provider_id AND s.class_id = i.class_id
LEFT JOIN providers p ON p.id = coalesce(i.provider_id, s.provider_id)
JOIN resource_classes c ON c.id = coalesce(i.class_id, s.class_id)
WHERE i.used IS DISTINCT FROM coalesce(s.allocated, 0)
ORDER BY 1, 2
"""

HOLES = """
SELECT before, first FROM (SELECT lag(last) OVER (ORDER BY last) AS before, first FROM changes) neighbours
WHERE before IS NOT NULL AND first <> before + 1
UNION ALL
SELECT max(last), (SELECT number + 1 FROM feed_head) FROM changes HAVING max(last) <> (SELECT number FROM feed_head)
"""

# Consumers without allocations that are no fence, and allocations whose consumer is unknown or only a fence.
STRAYS = """
SELECT 'consumer ' || c.uuid || ' holds nothing' FROM consumers c
WHERE c.released_at IS NULL AND NOT EXISTS (SELECT FROM allocations a WHERE a.consumer = c.uuid)
UNION ALL
SELECT DISTINCT 'allocation of ' || a.consumer || ', whom the book does not know' FROM allocations a
WHERE NOT EXISTS (SELECT FROM consumers c WHERE c.uuid = a.consumer AND c.released_at IS NULL)
"""

DOUBLED = """
SELECT a.consumer, c.name, array_agg(DISTINCT r.uuid::text ORDER BY r.uuid::text)
FROM allocations a JOIN providers p ON p.id = a.provider_id JOIN providers r ON r.id = p.root_id
JOIN resource_classes c ON c.id = a.class_id
WHERE NOT EXISTS (
    SELECT FROM provider_traits pt JOIN traits t ON t.id = pt.trait_id WHERE pt.provider_id = p.id AND t.name = $1
)
GROUP BY a.consumer, c.name HAVING count(DISTINCT p.root_id) > 1 ORDER BY a.consumer, c.name
"""


PROJECTS = f"""
SELECT w.project_id, c.name, w.amount, w.held FROM ({limits.WRONG}) w LEFT JOIN resource_classes c ON c.id = w.class_id
ORDER BY w.project_id, c.name
"""


async def inventories(connection: asyncpg.Connection) -> list[InventoryRow]:
    """Return every inventory, by provider and class."""
    return [InventoryRow(*row) for row in await connection.fetch(INVENTORIES + IN_ORDER)]


async def over_capacity(connection: asyncpg.Connection) -> list[InventoryRow]:
    """Return inventories whose usage exceeds their capacity, which is only correct where the inventory has shrunk."""
    return [InventoryRow(*row) for row in await connection.fetch(OVER_CAPACITY + IN_ORDER)]


async def allocations(connection: asyncpg.Connection) -> dict[str, dict[str, dict[str, int]]]:
    """Return the allocations of every consumer: {consumer: {provider: {class: amount}}}."""
    held: dict[str, dict[str, dict[str, int]]] = {}
    for consumer, provider, name, amount in await connection.fetch(ALLOCATIONS):
        held.setdefault(consumer, {}).setdefault(provider, {})[name] = amount
    return held


async def usage_mismatches(connection: asyncpg.Connection) -> list[UsageMismatch]:
    """Return the inventories whose `used` is not the sum of the allocations."""
    return [UsageMismatch(*row) for row in await connection.fetch(MISMATCHES)]


async def strays(connection: asyncpg.Connection) -> list[str]:
    """Return consumers without allocations and allocations without consumers, one line each."""
    return [row[0] for row in await connection.fetch(STRAYS)]


async def feed_holes(connection: asyncpg.Connection) -> list[FeedHole]:
    """Return the holes in the part of the feed that is kept."""
    return [FeedHole(*row) for row in await connection.fetch(HOLES)]


async def doubled(connection: asyncpg.Connection) -> list[str]:
    """Return consumers that hold one class of two trees, neither of which shares it; one line each."""
    rows = await connection.fetch(DOUBLED, SHARING)
    return [f"{row[0]}: {row[1]} of {' and '.join(row[2])}" for row in rows]


async def project_usage(connection: asyncpg.Connection) -> list[str]:
    """Return projects whose recorded usage is not the sum of their consumers' allocations, one line for each project
    and class.
    """
    return [
        f"project {project} {INSTANCES if name is None else name}: {amount} counted, {held} held"
        for project, name, amount, held in await connection.fetch(PROJECTS)
    ]


async def findings(connection: asyncpg.Connection) -> list[str]:
    """Return all findings about the book, one line each; none when the book is consistent."""
    lines = [
        f"{wrong.provider} {wrong.resource_class}: used {wrong.used}, allocated {wrong.allocated}"
        for wrong in await usage_mismatches(connection)
    ]
    lines += await project_usage(connection)
    lines += await strays(connection)
    lines += [f"feed: nothing between {hole.after} and {hole.before}" for hole in await feed_holes(connection)]
    return lines
