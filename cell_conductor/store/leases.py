"""The record of the leases of compute services, and of their keeper: a port, and PostgreSQL.

One conductor of a cell is the keeper: it records the state of services, and publishes it. It holds one row for a few
seconds at a time, by the database's clock. Each change of keeper has a higher term, also after a backup was restored or
commits were lost: the digests of a former keeper that has not noticed yet are ignored, and its writes are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import convert

from cell_conductor.domain.leases import Lease

from .keyed import PostgresKeyed, columns


class LeaseStore(Protocol):
    """The leases on record, and their keeper."""

    async def keep(self, process: str, for_s: float, term: int | None) -> int | None:
        """Become or remain the keeper for this long from now on, if no other is; returns the term,
        or None: another is.

        term: the caller's own (None: it is not the keeper). It remains so only if that is on record and not over: a
        record of an earlier term is of a former process of this name, or of a database that was set back.
        """

    async def leases(self) -> list[Lease]:
        """All on record, by service."""

    async def record(self, term: int, leases: Sequence[Lease]) -> bool:
        """Record these. False: there is a newer term, and nothing was recorded."""

    async def purge(self, term: int, before: float, limit: int) -> list[str]:
        """Delete services that are down since before this time, oldest first, up to a bound; returns which."""

    async def forget(self, service: str) -> bool:
        """Delete the lease of a service, whatever its state. False: there is none."""


KEEP = """
INSERT INTO lease_keeper AS k (process, term, until)
VALUES ($1, (extract(epoch FROM clock_timestamp()) * 1000)::bigint, clock_timestamp() + $2 * interval '1 s')
ON CONFLICT (one) DO UPDATE SET
    term = CASE WHEN k.process = $1 AND k.term = $3 AND k.until >= clock_timestamp() THEN k.term
                ELSE greatest(k.term + 1, $3 + 1, excluded.term) END,
    process = $1, until = excluded.until
WHERE k.process = $1 OR k.until < clock_timestamp()
RETURNING term
"""
COLUMNS = Lease.__struct_fields__
LEASES = f"SELECT {', '.join(COLUMNS)} FROM leases ORDER BY service"
# The keeper's row is locked: no newer term begins while this one writes. One statement is one transaction: a keeper
# that is paused holds no lock, and the next one does not wait for it.
_MINE = "mine AS MATERIALIZED (SELECT FROM lease_keeper WHERE term = $1 FOR SHARE)"
RECORD = f"""
WITH {_MINE}, recorded AS (
    INSERT INTO leases ({", ".join(COLUMNS)})
    SELECT n.* FROM unnest($2::text[], $3::bigint[], $4::float8[], $5::text[], $6::float8[], $7::text[]) AS n
    WHERE EXISTS (SELECT FROM mine)
    ON CONFLICT (service) DO UPDATE SET epoch = excluded.epoch, interval_s = excluded.interval_s,
        state = excluded.state, since = excluded.since, reason = excluded.reason)
SELECT EXISTS (SELECT FROM mine)
"""
PURGE = f"""
WITH {_MINE}
DELETE FROM leases WHERE EXISTS (SELECT FROM mine) AND service IN (
    SELECT service FROM leases WHERE state <> 'up' AND since < $2 ORDER BY since LIMIT $3) RETURNING service
"""
FORGET = "DELETE FROM leases WHERE service = $1 RETURNING 1"


class PostgresLeases(PostgresKeyed):
    """In the cell's schema."""

    async def keep(self, process: str, for_s: float, term: int | None) -> int | None:
        """One statement."""
        async with self._database.single() as connection:
            kept: int | None = await connection.fetchval(KEEP, process, for_s, term)
        return kept

    async def leases(self) -> list[Lease]:
        """One statement."""
        return [convert(dict(row), Lease) for row in await self._fetch(LEASES)]

    async def record(self, term: int, leases: Sequence[Lease]) -> bool:
        """One statement."""
        ordered = sorted(leases, key=lambda lease: lease.service)
        async with self._database.single() as connection:
            recorded: bool = await connection.fetchval(RECORD, term, *columns(ordered, *COLUMNS))
        return recorded

    async def purge(self, term: int, before: float, limit: int) -> list[str]:
        """One statement."""
        async with self._database.single() as connection:
            return sorted(row[0] for row in await connection.fetch(PURGE, term, before, limit))

    async def forget(self, service: str) -> bool:
        """One statement."""
        return await self._fetchval(FORGET, service) is not None
