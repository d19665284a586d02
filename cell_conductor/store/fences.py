"""Fences of the cell's hosts and the machines that these have lost: a port, and PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol

from msgspec import convert

from cell_conductor.domain.desires import AT_REST, EVACUATED, EVACUATED_IN_DOUBT, in_sql
from cell_conductor.domain.fences import Fence, Loss

from .keyed import PostgresKeyed, columns

MAX_LOSSES = 100_000  # read at a time; the oldest are destroyed first


class FenceStore(Protocol):
    """The fences on record. The effects of a fence are recorded by `Transaction.lose`, which holds it."""

    async def fences(self) -> list[Fence]:
        """All of them, by host."""

    async def losses(self) -> list[Loss]:
        """The machines that fenced hosts still have to destroy, oldest first, at most MAX_LOSSES."""

    async def put(self, fence: Fence) -> bool:
        """Record a fence, or a newer decision about it. False: one at least as new is on record, or was lifted."""

    async def delete_losses(self, losses: Sequence[Loss]) -> None:
        """Delete these losses: the hosts have destroyed them, and all attempts below them."""

    async def lift(self, host_uuid: str, version: int) -> bool:
        """Lift a fence that is to be lifted by this decision, once its host has no losses and no evacuation from it has
        commanded a destination. False: it stays.
        """

    async def lift_unknown(self, fence: Fence) -> None:
        """Record this decision as lifted, where no fence and no newer decision is on record."""

    async def lifted(self, host_uuid: str) -> int:
        """The version of the decision that lifted this host's last fence; 0: none, or it is fenced."""

    async def touching(self, host_uuid: str, after: str, limit: int) -> list[str]:
        """The instances that have, or may have, a machine on this host: in order of uuids, above `after`."""


# Before what depends on both tables of fences: the statements that follow see what the one before has committed.
LOCK_HOST = "SELECT pg_advisory_xact_lock(hashtextextended(concat(current_schema(), '.fences.', $1::text), 0))"
FENCES = "SELECT host_uuid::text, host, version, lifting, reason, decided_by AS by, at FROM fences ORDER BY host_uuid"
LOSSES = """
SELECT host_uuid::text, instance_uuid::text, attempt, service, at FROM fence_losses
ORDER BY at, host_uuid, instance_uuid LIMIT $1
"""
PUT = """
INSERT INTO fences AS f (host_uuid, host, version, lifting, reason, decided_by, at)
VALUES ($1, $2, $3, $4, $5, $6, $7)
ON CONFLICT (host_uuid) DO UPDATE SET host = excluded.host, version = excluded.version, lifting = excluded.lifting,
    reason = excluded.reason, decided_by = excluded.decided_by, at = excluded.at
WHERE f.version < excluded.version RETURNING 1
"""
HOLD = """
SELECT host_uuid FROM fences WHERE host_uuid = ANY($1::uuid[]) AND NOT (lifting AND host_uuid = ANY($2::uuid[]))
ORDER BY host_uuid FOR SHARE
"""
LOSE = """
INSERT INTO fence_losses AS l (host_uuid, instance_uuid, attempt, service, at)
SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::int[], $4::text[], $5::float8[])
ON CONFLICT (host_uuid, instance_uuid) DO UPDATE SET
    attempt = greatest(l.attempt, excluded.attempt), service = excluded.service, at = excluded.at
"""
DELETE_LOSSES = """
DELETE FROM fence_losses l USING unnest($1::uuid[], $2::uuid[], $3::int[]) AS n (h, i, a)
WHERE (l.host_uuid, l.instance_uuid) = (n.h, n.i) AND l.attempt <= n.a
"""
_TO_LIFT = "SELECT 1 FROM fences WHERE host_uuid = $1 AND version = $2 AND lifting FOR UPDATE"
_LEFT = "SELECT 1 FROM fence_losses WHERE host_uuid = $1 LIMIT 1"
# As `domain.evacuations.is_evacuated_from`.
_EVACUATED = f"""
SELECT 1 FROM instances WHERE source_host_uuid = $1 AND record #>> '{{move,kind}}' = 'evacuate' AND (
    state IN ({in_sql(EVACUATED)})
    OR (state IN ({in_sql(EVACUATED_IN_DOUBT)}) AND record ->> 'doubted' = 'true')) LIMIT 1
"""
_DELETE = "DELETE FROM fences WHERE host_uuid = $1"
_FENCED = "SELECT 1 FROM fences WHERE host_uuid = $1"
LIFTED = """
INSERT INTO lifted_fences AS l (host_uuid, version) VALUES ($1, $2)
ON CONFLICT (host_uuid) DO UPDATE SET version = greatest(l.version, excluded.version)
"""
LIFTED_BY = """
SELECT version FROM lifted_fences l
WHERE host_uuid = $1 AND NOT EXISTS (SELECT FROM fences f WHERE f.host_uuid = l.host_uuid)
"""
# Instances that are over hold nothing there; the remains of a lost one are a loss already.
TOUCHING = f"""
SELECT uuid::text FROM instances
WHERE (host_uuid = $1 OR source_host_uuid = $1) AND uuid > $2::uuid
    AND state NOT IN ({in_sql(AT_REST)})
ORDER BY uuid LIMIT $3
"""


def loss_columns(losses: Sequence[Loss]) -> list[Sequence[object]]:
    """Column arrays for LOSE, each place once, in the order of the locks."""
    newest = {one.place: one for one in sorted(losses, key=lambda loss: loss.attempt)}
    return columns([one for _, one in sorted(newest.items())], *Loss.__struct_fields__)


_values = attrgetter(*Fence.__struct_fields__)


class PostgresFences(PostgresKeyed):
    """In the cell's schema."""

    async def fences(self) -> list[Fence]:
        """One statement."""
        return [convert(dict(row), Fence) for row in await self._fetch(FENCES)]

    async def losses(self) -> list[Loss]:
        """One statement."""
        return [convert(dict(row), Loss) for row in await self._fetch(LOSSES, MAX_LOSSES)]

    async def put(self, fence: Fence) -> bool:
        """One transaction."""
        async with self._database.raw() as connection:
            await connection.execute(LOCK_HOST, fence.host_uuid)
            if (await connection.fetchval(LIFTED_BY, fence.host_uuid) or 0) >= fence.version:
                return False
            return await connection.fetchval(PUT, *_values(fence)) is not None

    async def delete_losses(self, losses: Sequence[Loss]) -> None:
        """One statement."""
        await self._fetch(DELETE_LOSSES, *loss_columns(losses)[:3])

    async def lift(self, host_uuid: str, version: int) -> bool:
        """One transaction: the row is locked before its losses are read, and who records a loss locks it, too."""
        async with self._database.raw() as connection:
            await connection.execute(LOCK_HOST, host_uuid)
            if await connection.fetchval(_TO_LIFT, host_uuid, version) is None:
                return False
            if await connection.fetchval(_LEFT, host_uuid) is not None:
                return False
            if await connection.fetchval(_EVACUATED, host_uuid) is not None:
                return False
            await connection.execute(_DELETE, host_uuid)
            await connection.execute(LIFTED, host_uuid, version)
        return True

    async def lift_unknown(self, fence: Fence) -> None:
        """One transaction."""
        async with self._database.raw() as connection:
            await connection.execute(LOCK_HOST, fence.host_uuid)
            if await connection.fetchval(_FENCED, fence.host_uuid) is None:
                await connection.execute(LIFTED, fence.host_uuid, fence.version)

    async def lifted(self, host_uuid: str) -> int:
        """One statement."""
        return await self._fetchval(LIFTED_BY, host_uuid) or 0

    async def touching(self, host_uuid: str, after: str, limit: int) -> list[str]:
        """One statement; it reads the whole table, and fences are rare."""
        return [row[0] for row in await self._fetch(TOUCHING, host_uuid, after, limit)]
