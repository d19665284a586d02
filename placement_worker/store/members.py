"""The members of server groups. Claims lock their group; schedulers query the members.

A row counts as long as its consumer holds allocations, and the consumer's hosts follow from its allocations
(`domain.server_groups.hosts_of`), so code that moves or releases allocations need not handle groups. A row that no
longer counts is used again when its consumer claims again, or a revert gives it back what it held; when its consumer is
deleted, it is trimmed.
"""

from __future__ import annotations

from placement_worker.domain.claim_group import MembersToLock
from placement_worker.domain.values import SHARING
from placement_worker.store.rows import transposed

# These locks come before those of consumers, in the order of the keys. Two groups with the same hash wait for each
# other, which does no harm.
LOCK = "SELECT pg_advisory_xact_lock(key) FROM unnest($1::bigint[]) AS key"
HASHED = "SELECT DISTINCT hashtextextended(key, 0) AS key FROM unnest($1::text[]) AS key ORDER BY key"

# The same rule as `hosts_of`: the roots of the consumer's providers; those of sharing providers count only if there are
# no others.
_HOSTS = f"""
array_remove(coalesce(
    array_agg(DISTINCT root.uuid) FILTER (WHERE p.id NOT IN (
        SELECT pt.provider_id FROM provider_traits pt JOIN traits t ON t.id = pt.trait_id WHERE t.name = '{SHARING}')),
    array_agg(DISTINCT root.uuid)), NULL) AS hosts
"""
_ALLOCATED = """
LEFT JOIN allocations a ON a.consumer = m.consumer
LEFT JOIN providers p ON p.id = a.provider_id LEFT JOIN providers root ON root.id = p.root_id
"""

# The members that a decision needs: those on the hosts that the claims name, found from the hosts' allocations, so that
# the size of the group does not matter; those that the same transaction may move there; and, of groups with affinity,
# enough members that at least one of them does not move. OFFSET 0 keeps the order of the joins: PostgreSQL expects few
# members of a group, and without it joins all of them to each of the hosts.
READ = f"""
WITH m AS (
    SELECT g.project_id, g.group_uuid, held.consumer
    FROM unnest($1::text[], $2::uuid[], $3::uuid[]) AS g (project_id, group_uuid, host)
    CROSS JOIN LATERAL (
        SELECT DISTINCT a.consumer FROM providers root JOIN providers p ON p.root_id = root.id
        JOIN allocations a ON a.provider_id = p.id WHERE root.uuid = g.host OFFSET 0
    ) AS held
    CROSS JOIN LATERAL (
        SELECT FROM group_members m
        WHERE m.project_id = g.project_id AND m.group_uuid = g.group_uuid AND m.consumer = held.consumer OFFSET 0
    ) AS m
    UNION
    SELECT c.project_id, c.group_uuid, c.consumer
    FROM unnest($4::text[], $5::uuid[], $6::uuid[]) AS c (project_id, group_uuid, consumer)
    CROSS JOIN LATERAL (
        SELECT FROM group_members m
        WHERE m.project_id = c.project_id AND m.group_uuid = c.group_uuid AND m.consumer = c.consumer OFFSET 0
    ) AS m
    UNION
    SELECT g.project_id, g.group_uuid, m.consumer FROM unnest($7::text[], $8::uuid[]) AS g (project_id, group_uuid)
    CROSS JOIN LATERAL (
        SELECT m.consumer FROM group_members m WHERE m.project_id = g.project_id AND m.group_uuid = g.group_uuid
            AND EXISTS (SELECT FROM allocations a WHERE a.consumer = m.consumer) LIMIT $9
    ) AS m
)
SELECT m.project_id, m.group_uuid, m.consumer, {_HOSTS} FROM m {_ALLOCATED}
GROUP BY m.project_id, m.group_uuid, m.consumer
"""

# An existing row is updated all the same, which locks it, so that it is not trimmed before the claim has committed.
WRITE = """
INSERT INTO group_members (project_id, group_uuid, consumer)
SELECT * FROM unnest($1::text[], $2::uuid[], $3::uuid[])
ON CONFLICT (project_id, group_uuid, consumer) DO UPDATE SET consumer = excluded.consumer
"""

# The members that a foreign control plane names: whoever claimed what they hold.
ENROLL = """
INSERT INTO group_members (project_id, group_uuid, consumer)
SELECT n.project_id, n.group_uuid, n.consumer FROM unnest($1::text[], $2::uuid[], $3::uuid[])
    AS n (project_id, group_uuid, consumer) WHERE EXISTS (SELECT FROM allocations a WHERE a.consumer = n.consumer)
ON CONFLICT (project_id, group_uuid, consumer) DO NOTHING
"""

# These are two statements, because the allocations are in another table: a statement that has waited for a row's lock
# still reads other tables as they were when the statement began.
LOCK_LEFT = """
SELECT m.project_id, m.group_uuid, m.consumer FROM group_members m
WHERE NOT EXISTS (SELECT FROM allocations a WHERE a.consumer = m.consumer)
    AND NOT EXISTS (SELECT FROM consumers c WHERE c.uuid = m.consumer) LIMIT $1 FOR UPDATE OF m SKIP LOCKED
"""
DELETE_LEFT = """
DELETE FROM group_members m USING unnest($1::text[], $2::uuid[], $3::uuid[]) AS n (project_id, group_uuid, consumer)
WHERE m.project_id = n.project_id AND m.group_uuid = n.group_uuid AND m.consumer = n.consumer
    AND NOT EXISTS (SELECT FROM allocations a WHERE a.consumer = m.consumer)
    AND NOT EXISTS (SELECT FROM consumers c WHERE c.uuid = m.consumer)
"""

COUNT = f"""
SELECT asked.at, counted.host, counted.members
FROM unnest($1::int[], $2::text[], $3::uuid[], $4::uuid[]) AS asked (at, project_id, group_uuid, besides)
CROSS JOIN LATERAL (
    SELECT host, count(*) AS members FROM (
        SELECT {_HOSTS} FROM group_members m {_ALLOCATED}
        WHERE m.project_id = asked.project_id AND m.group_uuid = asked.group_uuid
            AND m.consumer IS DISTINCT FROM asked.besides GROUP BY m.consumer
    ) AS member CROSS JOIN LATERAL unnest(member.hosts) AS host
    GROUP BY host ORDER BY host LIMIT $5
) AS counted ORDER BY asked.at, counted.host
"""

HOSTS = f"""
SELECT asked.at, a.consumer, {_HOSTS}
FROM unnest($1::int[], $2::text[], $3::uuid[]) AS asked (at, project_id, consumer)
JOIN allocations a ON a.consumer = asked.consumer
JOIN consumers c ON c.uuid = a.consumer AND c.project_id = asked.project_id
JOIN providers p ON p.id = a.provider_id JOIN providers root ON root.id = p.root_id
GROUP BY asked.at, a.consumer ORDER BY asked.at, a.consumer
"""

PAGE = f"""
SELECT member.consumer::text, array_agg(root.name ORDER BY root.name)
FROM (
    SELECT m.consumer, {_HOSTS} FROM (
        SELECT consumer FROM group_members
        WHERE project_id = $1 AND group_uuid = $2 AND ($3::uuid IS NULL OR consumer > $3)
            AND EXISTS (SELECT FROM allocations a WHERE a.consumer = group_members.consumer)
        ORDER BY consumer LIMIT $4
    ) AS m {_ALLOCATED} GROUP BY m.consumer
) AS member CROSS JOIN LATERAL unnest(member.hosts) AS host JOIN providers root ON root.uuid = host
GROUP BY member.consumer ORDER BY member.consumer
"""


def columns(wanted: MembersToLock) -> list[object]:
    """Return the columns of READ."""
    rows = ((wanted.hosts, 3), (wanted.moved, 3), (wanted.together, 2))
    return [*(column for some, width in rows for column in transposed(some, width)), wanted.most]
