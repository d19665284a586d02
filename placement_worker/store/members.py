"""Who is in which server group, and where: locked while a group's members are claimed for, asked about by schedulers.

A row counts for as long as its consumer holds something, so nothing that gives allocations back has to know of groups;
rows that count no more are replaced, or trimmed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import asyncpg

from bus.contracts.placement import MAX_HOSTS_TOLD, Claim, WherePage, WhereRequest
from placement_worker.domain.company import group_key
from placement_worker.domain.values import GroupKey
from placement_worker.store.port import ClaimItem

# Before any consumer, in one order. Two groups whose keys hash alike only wait for each other.
LOCK = "SELECT pg_advisory_xact_lock(key) FROM unnest($1::bigint[]) AS key"
HASHED = "SELECT DISTINCT hashtextextended(key, 0) AS key FROM unnest($1::text[]) AS key ORDER BY key"

READ = """
SELECT m.project_id, m.group_uuid, m.consumer, m.host FROM group_members m
JOIN unnest($1::text[], $2::uuid[]) AS g (project_id, group_uuid) USING (project_id, group_uuid)
WHERE EXISTS (SELECT FROM allocations a WHERE a.consumer = m.consumer)
"""

WRITE = """
INSERT INTO group_members (project_id, group_uuid, consumer, host)
SELECT * FROM unnest($1::text[], $2::uuid[], $3::uuid[], $4::uuid[])
ON CONFLICT (project_id, group_uuid, consumer) DO UPDATE SET host = excluded.host
"""

# $1: how long they are kept, as the other statements that trim have it.
FORGET = """
DELETE FROM group_members WHERE ctid = ANY(ARRAY(
    SELECT m.ctid FROM group_members m
    WHERE $1::double precision >= 0 AND NOT EXISTS (SELECT FROM allocations a WHERE a.consumer = m.consumer) LIMIT $2))
"""

COUNT = """
SELECT m.host, count(*) FROM group_members m
WHERE m.project_id = $1 AND m.group_uuid = $2 AND m.consumer IS DISTINCT FROM $3
    AND EXISTS (SELECT FROM allocations a WHERE a.consumer = m.consumer)
GROUP BY m.host ORDER BY m.host LIMIT $4
"""

HOSTS = """
SELECT a.consumer, array_agg(DISTINCT root.uuid ORDER BY root.uuid) FROM allocations a
JOIN consumers c ON c.uuid = a.consumer AND c.project_id = $1
JOIN providers p ON p.id = a.provider_id JOIN providers root ON root.id = p.root_id
WHERE a.consumer = ANY($2::uuid[]) GROUP BY a.consumer ORDER BY a.consumer
"""


def keys_of(items: Sequence[ClaimItem]) -> list[GroupKey]:
    """The server groups that these items name, in the order of their locks."""
    return sorted({key for item in items if isinstance(item, Claim) and (key := group_key(item)) is not None})


async def lock(connection: asyncpg.Connection, items: Sequence[ClaimItem]) -> dict[GroupKey, dict[str, str]]:
    """Every named group's members, {consumer: host}, as the locks' last holders left them."""
    keys = keys_of(items)
    if not keys:
        return {}
    hashed = await connection.fetch(HASHED, ["/".join(key) for key in keys])
    await connection.execute(LOCK, [row["key"] for row in hashed])
    members: dict[GroupKey, dict[str, str]] = {key: {} for key in keys}
    for project, group, consumer, host in await connection.fetch(READ, *map(list, zip(*keys, strict=True))):
        members[project, group][consumer] = host
    return members


async def write(connection: asyncpg.Connection, joined: Mapping[GroupKey, Mapping[str, str]]) -> None:
    """Those who have joined, each once."""
    rows = [(*key, consumer, host) for key, members in joined.items() for consumer, host in members.items()]
    if rows:
        await connection.execute(WRITE, *map(list, zip(*rows, strict=True)))


async def where(connection: asyncpg.Connection, asked: WhereRequest) -> WherePage:
    """On which hosts they are."""
    members = (
        await connection.fetch(COUNT, asked.project_id, asked.server_group, asked.besides, MAX_HOSTS_TOLD)
        if asked.server_group
        else []
    )
    hosts = await connection.fetch(HOSTS, asked.project_id, list(asked.consumers)) if asked.consumers else []
    return WherePage(members={row[0]: row[1] for row in members}, hosts={row[0]: tuple(row[1]) for row in hosts})
