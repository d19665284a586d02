"""The reads of the book in PostgreSQL that no decision follows. Each read is of one moment: one statement, or a
transaction that sees one state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import asyncpg

from bus.contracts.book import (
    MAX_TREE,
    GroupMembersPage,
    GroupMembersQuery,
    HeldAllocation,
    HostTree,
    HostTreeQuery,
    ProjectUsagePage,
    ProjectUsageQuery,
    ServiceHostsPage,
    ServiceHostsQuery,
    TreeHolder,
)
from bus.contracts.placement import COMPUTE_SOURCE, LocatePage, LocateRequest
from placement_worker.domain.moves import MIGRATION_TYPES
from placement_worker.domain.names import STANDARD_CLASSES
from placement_worker.domain.units import in_units_sql
from placement_worker.domain.values import ABOVE_CELLS, state_of
from placement_worker.store import limits, members
from placement_worker.store.names import NameTable
from placement_worker.store.port import (
    AllocationRow,
    InventoryRecord,
    Listing,
    NameKind,
    NameRow,
    UsageRow,
)
from placement_worker.store.postgres_transaction import PostgresBookTransaction
from placement_worker.store.rows import READ_PROVIDERS_BY_ID, read_providers

Opens = Callable[[], AbstractAsyncContextManager[PostgresBookTransaction]]

_NAME = "name, extract(epoch FROM updated_at)::float8"
ASSOCIATED = "EXISTS (SELECT FROM provider_traits pt WHERE pt.trait_id = traits.id)"
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
TREE_IDS = """
SELECT id FROM providers WHERE root_id = (SELECT root_id FROM providers WHERE uuid = $1) ORDER BY uuid
"""
TREE_HOLDERS = """
SELECT DISTINCT a.consumer FROM allocations a
WHERE a.provider_id = ANY($1::bigint[]) AND ($3::uuid IS NULL OR a.consumer > $3) ORDER BY a.consumer LIMIT $2
"""
TREE_HELD = """
SELECT a.consumer::text, p.uuid::text, n.name, a.amount, c.project_id, c.user_id, c.consumer_type, c.attempt
FROM allocations a JOIN providers p ON p.id = a.provider_id JOIN resource_classes n ON n.id = a.class_id
JOIN consumers c ON c.uuid = a.consumer
WHERE a.provider_id = ANY($1::bigint[]) AND a.consumer = ANY($2::uuid[]) ORDER BY a.consumer, p.uuid, n.name
"""
HOLDING = """
SELECT c.uuid::text, c.project_id, c.run, CASE WHEN c.consumer_type = ANY($2::text[]) THEN 0 ELSE c.attempt END,
    c.generation, array_agg(p.uuid::text), array_agg(n.name), array_agg(a.amount),
    array_agg(DISTINCT root.uuid::text), min(root.cell) FILTER (WHERE root.cell <> $3)
FROM consumers c JOIN allocations a ON a.consumer = c.uuid JOIN resource_classes n ON n.id = a.class_id
JOIN providers p ON p.id = a.provider_id JOIN providers root ON root.id = p.root_id
WHERE c.uuid = ANY($1::uuid[]) GROUP BY c.uuid ORDER BY c.uuid
"""
USAGE_PROJECTS = """
SELECT DISTINCT project_id COLLATE "C" FROM project_usage
WHERE amount > 0 AND ($1::text[] = '{}' OR project_id = ANY($1)) AND ($2::text IS NULL OR project_id > $2 COLLATE "C")
ORDER BY 1 LIMIT $3
"""
# As `report_group.refuse_owned` decides whose a root is; it reads every row of `sources`, once an order of an operator.
HOSTS_OF_SERVICE = """
SELECT p.name FROM sources s JOIN providers p ON p.uuid = s.root
WHERE s.source = $1 AND coalesce(p.cell, $2) = $2 AND s.root = ANY(s.providers) ORDER BY p.name COLLATE "C" LIMIT $3
"""
USAGE_ROWS = "SELECT project_id, class_id, amount FROM project_usage WHERE project_id = ANY($1::text[]) AND amount > 0"


class PostgresReads:
    """`BookReads` in PostgreSQL."""

    def __init__(self, transaction: Opens, snapshot: Opens, names: NameTable) -> None:
        self._transaction = transaction
        self._snapshot = snapshot
        self._names = names

    async def _fetch(self, statement: str, *arguments: object) -> Sequence[asyncpg.Record]:
        async with self._transaction() as transaction:
            rows: Sequence[asyncpg.Record] = await transaction.connection.fetch(statement, *arguments)
            return rows

    async def locate(self, requested: Sequence[LocateRequest]) -> list[LocatePage]:
        """For each: on which hosts consumers are, and the members of a server group."""
        async with self._transaction() as transaction:
            return await members.where(transaction.connection, requested)

    async def holding(self, consumers: Sequence[str]) -> list[HeldAllocation]:
        """Return what each of these consumers holds, and whose it is, in the order of their uuids."""
        return [
            HeldAllocation(
                consumer=uuid,
                project_id=project,
                run=run,
                attempt=attempt,
                consumer_generation=generation,
                holding=_by_provider(providers, names, amounts),
                hosts=tuple(hosts),
                cell=cell,
            )
            for uuid, project, run, attempt, generation, providers, names, amounts, hosts, cell in await self._fetch(
                HOLDING, consumers, sorted(MIGRATION_TYPES), ABOVE_CELLS
            )
        ]

    async def tree(self, requested: HostTreeQuery) -> HostTree:
        """Return the tree that a provider is in, and its holders with their allocations."""
        async with self._snapshot() as view:
            return await _tree(view.connection, requested)

    async def hosts_of_service(self, requested: ServiceHostsQuery) -> ServiceHostsPage:
        """Return the hosts that belong to a compute service by its reports."""
        source = f"{COMPUTE_SOURCE}{requested.service}"
        rows = await self._fetch(HOSTS_OF_SERVICE, source, requested.cell, requested.limit)
        return ServiceHostsPage(hosts=tuple(row[0] for row in rows))

    async def members(self, requested: GroupMembersQuery) -> GroupMembersPage:
        """Return a page of the members of a server group, with their hosts."""
        async with self._transaction() as transaction:
            return await members.page(transaction.connection, requested)

    async def usage(self, requested: ProjectUsageQuery) -> ProjectUsagePage:
        """Return the usage of projects."""
        async with self._snapshot() as view:
            wanted = (list(requested.projects), requested.after, requested.limit + 1)
            rows = await view.connection.fetch(USAGE_PROJECTS, *wanted)
            projects = [row[0] for row in rows[: requested.limit]]
            held = await view.connection.fetch(USAGE_ROWS, projects)
            used = {row[1] for row in held if row[1] != limits.INSTANCES_ID}
            by_project = limits.by_project(held, await self._names.names_of(view, used))
        usage = {project: dict(sorted(by_project[project].items())) for project in projects}
        return ProjectUsagePage(usage=usage, more=len(rows) > requested.limit)

    async def name(self, kind: NameKind, name: str) -> NameRow | None:
        """A class or trait by name."""
        rows = await self._fetch(f"SELECT {_NAME} FROM {kind} WHERE name = $1", name)
        return NameRow(*rows[0]) if rows else None

    async def resource_classes(self) -> list[NameRow]:
        """All classes, standard ones first."""
        rows = await self._fetch(f"SELECT {_NAME} FROM resource_classes ORDER BY id")
        return sorted((NameRow(*row) for row in rows), key=lambda row: row.name not in STANDARD_CLASSES)

    async def trait_names(self, names: list[str] | None, prefix: str | None, associated: bool | None) -> list[NameRow]:
        """All traits with one of these names, with this prefix, that some provider has, or that none has."""
        held = "" if associated is None else f"AND {ASSOCIATED}" if associated else f"AND NOT {ASSOCIATED}"
        statement = f"""
            SELECT {_NAME} FROM traits WHERE ($1::text[] IS NULL OR name = ANY($1))
            AND ($2::text IS NULL OR starts_with(name, $2)) {held} ORDER BY id
        """
        return [NameRow(*row) for row in await self._fetch(statement, names, prefix)]

    async def providers(self, listing: Listing) -> Sequence[Sequence[Any]]:
        """Return the providers that meet the conditions, oldest first, each as the fields of ProviderRow. A name that
        the book does not know matches nothing.
        """
        conditions, arguments = _conditions(listing, self._names)
        where = f"WHERE {' AND '.join(conditions)} " if conditions else ""
        return await self._fetch(f"{_PROVIDERS}{where}ORDER BY p.id", *arguments)

    async def inventories(self, uuid: str) -> tuple[int, list[InventoryRecord]] | None:
        """(generation, inventories) of a provider, None when there is none."""
        rows = await self._fetch(_INVENTORIES, uuid)
        return (rows[0][0], [InventoryRecord(*row[1:]) for row in rows if row[1] is not None]) if rows else None

    async def usages(self, uuid: str) -> tuple[int, dict[str, int]] | None:
        """(generation, {class: used}) of a provider, None when there is none."""
        rows = await self._fetch(_USAGES, uuid)
        return (rows[0][0], {row[1]: row[2] for row in rows if row[1] is not None}) if rows else None

    async def traits(self, uuid: str) -> tuple[int, dict[str, float]] | None:
        """(generation, {trait: when it was made}) of a provider, None when there is none."""
        rows = await self._fetch(_TRAITS, uuid)
        return (rows[0][0], {row[1]: row[2] for row in rows if row[1] is not None}) if rows else None

    async def aggregates(self, uuid: str) -> tuple[int, list[str]] | None:
        """(generation, aggregates) of a provider, None when there is none."""
        rows = await self._fetch(_AGGREGATES, uuid)
        return (rows[0][0], [row[1] for row in rows if row[1] is not None]) if rows else None

    async def allocations_of_consumer(self, uuid: str) -> list[AllocationRow]:
        """The allocations of a consumer."""
        return [AllocationRow(*row) for row in await self._fetch(_BY_CONSUMER, uuid)]

    async def allocations_of_provider(self, uuid: str) -> tuple[int, list[AllocationRow]] | None:
        """(generation, allocations of a provider), None when it does not exist."""
        rows = await self._fetch(_BY_PROVIDER, uuid)
        return (rows[0][2], [AllocationRow(*row) for row in rows if row[0] is not None]) if rows else None

    async def totals(self, project_id: str, user_id: str | None, consumer_type: str | None) -> Sequence[UsageRow]:
        """The amounts that a project's (and user's, and type's) consumers hold, by type and class.

        "" is the unknown type.
        """
        return [UsageRow(*row) for row in await self._fetch(_TOTALS, project_id, user_id, consumer_type)]


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
    for group in listing.member_of:
        add(is_member, list(group))
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


def _by_provider(providers: Sequence[str], names: Sequence[str], amounts: Sequence[int]) -> dict[str, dict[str, int]]:
    held: dict[str, dict[str, int]] = {}
    for provider, name, amount in zip(providers, names, amounts, strict=True):
        held.setdefault(provider, {})[name] = amount
    return held


async def _tree(connection: asyncpg.Connection, requested: HostTreeQuery) -> HostTree:
    ids = [row[0] for row in await connection.fetch(TREE_IDS, requested.provider)]
    _, providers = await read_providers(connection, READ_PROVIDERS_BY_ID, ids[:MAX_TREE])
    consumers = [row[0] for row in await connection.fetch(TREE_HOLDERS, ids, requested.limit + 1, requested.after)]
    more, consumers = len(ids) > MAX_TREE or len(consumers) > requested.limit, consumers[: requested.limit]
    found: dict[str, TreeHolder] = {}
    for consumer, provider, name, amount, project, user, kind, attempt in await connection.fetch(
        TREE_HELD, ids, consumers
    ):
        holder = found.setdefault(
            consumer,
            TreeHolder(
                consumer=consumer, project_id=project, user_id=user, consumer_type=kind, attempt=attempt, holding={}
            ),
        )
        holder.holding.setdefault(provider, {})[name] = amount
    states = tuple(state_of(providers[uuid]) for uuid in sorted(providers))
    return HostTree(providers=states, holders=tuple(found.values()), more=more)
