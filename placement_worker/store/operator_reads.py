"""The queries that operators make of the book, in SQL: a tree with its holders, and the usage of projects."""

from __future__ import annotations

import asyncpg

from bus.contracts.book import (
    MAX_TREE,
    HostTree,
    HostTreeQuery,
    ProjectUsagePage,
    ProjectUsageQuery,
    ServiceHostsPage,
    ServiceHostsQuery,
    TreeHolder,
)
from bus.contracts.placement import COMPUTE_SOURCE
from placement_worker.domain.values import state_of
from placement_worker.store import limits
from placement_worker.store.names import NameTable
from placement_worker.store.rows import READ_PROVIDERS_BY_ID, read_providers

TREE_IDS = """
SELECT id FROM providers WHERE root_id = (SELECT root_id FROM providers WHERE uuid = $1) ORDER BY uuid
"""
HOLDERS = """
SELECT DISTINCT a.consumer FROM allocations a
WHERE a.provider_id = ANY($1::bigint[]) AND ($3::uuid IS NULL OR a.consumer > $3) ORDER BY a.consumer LIMIT $2
"""
HELD = """
SELECT a.consumer::text, p.uuid::text, n.name, a.amount, c.project_id, c.user_id, c.consumer_type, c.attempt
FROM allocations a JOIN providers p ON p.id = a.provider_id JOIN resource_classes n ON n.id = a.class_id
JOIN consumers c ON c.uuid = a.consumer
WHERE a.provider_id = ANY($1::bigint[]) AND a.consumer = ANY($2::uuid[]) ORDER BY a.consumer, p.uuid, n.name
"""
PROJECTS = """
SELECT DISTINCT project_id COLLATE "C" FROM project_usage
WHERE amount > 0 AND ($1::text[] = '{}' OR project_id = ANY($1)) AND ($2::text IS NULL OR project_id > $2 COLLATE "C")
ORDER BY 1 LIMIT $3
"""
# As `report_group.refuse_owned` decides whose a root is; it reads every row of `sources`, once an order of an operator.
HOSTS_OF_SERVICE = """
SELECT p.name FROM sources s JOIN providers p ON p.uuid = s.root
WHERE s.source = $1 AND coalesce(p.cell, $2) = $2 AND s.root = ANY(s.providers) ORDER BY p.name COLLATE "C" LIMIT $3
"""
USAGE = "SELECT project_id, class_id, amount FROM project_usage WHERE project_id = ANY($1::text[]) AND amount > 0"


async def tree(connection: asyncpg.Connection, requested: HostTreeQuery) -> HostTree:
    """Return a tree and its holders. The caller's transaction is REPEATABLE READ, so that both are of one moment."""
    ids = [row[0] for row in await connection.fetch(TREE_IDS, requested.provider)]
    _, providers = await read_providers(connection, READ_PROVIDERS_BY_ID, ids[:MAX_TREE])
    consumers = [row[0] for row in await connection.fetch(HOLDERS, ids, requested.limit + 1, requested.after)]
    more, consumers = len(ids) > MAX_TREE or len(consumers) > requested.limit, consumers[: requested.limit]
    found: dict[str, TreeHolder] = {}
    for consumer, provider, name, amount, project, user, kind, attempt in await connection.fetch(HELD, ids, consumers):
        holder = found.setdefault(
            consumer,
            TreeHolder(
                consumer=consumer, project_id=project, user_id=user, consumer_type=kind, attempt=attempt, holding={}
            ),
        )
        holder.holding.setdefault(provider, {})[name] = amount
    states = tuple(state_of(providers[uuid]) for uuid in sorted(providers))
    return HostTree(providers=states, holders=tuple(found.values()), more=more)


async def hosts_of_service(connection: asyncpg.Connection, requested: ServiceHostsQuery) -> ServiceHostsPage:
    """Return the hosts that belong to a compute service by its reports."""
    source = f"{COMPUTE_SOURCE}{requested.service}"
    rows = await connection.fetch(HOSTS_OF_SERVICE, source, requested.cell, requested.limit)
    return ServiceHostsPage(hosts=tuple(row[0] for row in rows))


async def usage(connection: asyncpg.Connection, requested: ProjectUsageQuery, names: NameTable) -> ProjectUsagePage:
    """Return the usage of projects. The caller's transaction is REPEATABLE READ."""
    rows = await connection.fetch(PROJECTS, list(requested.projects), requested.after, requested.limit + 1)
    projects = [row[0] for row in rows[: requested.limit]]
    held = await limits.by_project(connection, await connection.fetch(USAGE, projects), names)
    return ProjectUsagePage(
        usage={project: dict(sorted(held[project].items())) for project in projects}, more=len(rows) > requested.limit
    )
