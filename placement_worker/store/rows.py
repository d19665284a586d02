"""Reads whole providers in four statements, however many providers there are."""

from __future__ import annotations

from collections.abc import Sequence

import asyncpg

from placement_worker.domain.values import Provider, StoredInventory

_PROVIDER = """
SELECT p.id, p.uuid, p.name, parent.uuid, root.uuid, p.generation, p.shape, p.cell
FROM providers p LEFT JOIN providers parent ON parent.id = p.parent_id JOIN providers root ON root.id = p.root_id
"""
READ_PROVIDERS_BY_ID = _PROVIDER + "WHERE p.id = ANY($1::bigint[]) ORDER BY p.id"
READ_PROVIDERS_AFTER = _PROVIDER + "WHERE $1::uuid IS NULL OR p.uuid > $1 ORDER BY p.uuid LIMIT $2"

READ_STOCKS = """
SELECT i.provider_id, c.name, i.total, i.reserved, i.min_unit, i.max_unit, i.step_size, i.allocation_ratio, i.capacity,
    i.stranded, i.used
FROM inventories i JOIN resource_classes c ON c.id = i.class_id
WHERE i.provider_id = ANY($1::bigint[]) ORDER BY i.provider_id, c.name
"""
READ_TRAITS = """
SELECT pt.provider_id, t.name, pt.lasting FROM provider_traits pt JOIN traits t ON t.id = pt.trait_id
WHERE pt.provider_id = ANY($1::bigint[]) ORDER BY pt.provider_id, t.name
"""
READ_AGGREGATES = """
SELECT provider_id, aggregate FROM provider_aggregates WHERE provider_id = ANY($1::bigint[])
ORDER BY provider_id, aggregate
"""


async def read_providers(
    connection: asyncpg.Connection, statement: str, *arguments: object
) -> tuple[dict[str, int], dict[str, Provider]]:
    """({uuid: id}, {uuid: provider}) of the rows that one of the statements above selects, in its order."""
    rows = await connection.fetch(statement, *arguments)
    numbers = [row[0] for row in rows]
    inventories: dict[int, dict[str, StoredInventory]] = {number: {} for number in numbers}
    used: dict[int, dict[str, int]] = {number: {} for number in numbers}
    for number, name, *inventory, amount in await connection.fetch(READ_STOCKS, numbers):
        inventories[number][name] = StoredInventory(*inventory)
        if amount:
            used[number][name] = amount
    traits: dict[int, list[str]] = {number: [] for number in numbers}
    lasting: dict[int, list[str]] = {number: [] for number in numbers}
    for number, name, lasts in await connection.fetch(READ_TRAITS, numbers):
        traits[number].append(name)
        if lasts:
            lasting[number].append(name)
    aggregates = await _members(connection, READ_AGGREGATES, numbers)
    providers = {
        row[1]: Provider(
            uuid=row[1],
            name=row[2],
            parent=row[3],
            root=row[4],
            generation=row[5],
            shape=row[6],
            inventories=inventories[row[0]],
            used=used[row[0]],
            traits=tuple(traits[row[0]]),
            aggregates=tuple(aggregates[row[0]]),
            cell=row[7],
            lasting=tuple(lasting[row[0]]),
        )
        for row in rows
    }
    return {row[1]: row[0] for row in rows}, providers


async def _members(connection: asyncpg.Connection, statement: str, numbers: Sequence[int]) -> dict[int, list[str]]:
    members: dict[int, list[str]] = {number: [] for number in numbers}
    for number, member in await connection.fetch(statement, numbers):
        members[number].append(member)
    return members


def transposed(rows: Sequence[tuple[object, ...]], width: int) -> list[list[object]]:
    """Return rows as columns; without rows, `width` empty columns."""
    return list(map(list, zip(*rows, strict=True))) if rows else [[] for _ in range(width)]


def count_of(tag: str) -> int:
    """Return the number of rows that a statement has changed."""
    return int(tag.rpartition(" ")[2])
