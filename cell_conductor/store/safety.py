"""The record of machines that no record of an instance explains, of the breakers, of fences and the machines that
these have lost, and of the leases of compute services and their keeper: the ports, and PostgreSQL.

Machines are recorded with each report that has them, and deleted when their host is seen without them. An operator's
verdict on a quarantined machine (`destroy`, `keep` or `adopt`, by whom and when) stands beside it.

One conductor of a cell is the keeper: it records the state of services, and publishes it. It holds one row for a few
seconds at a time, by the database's clock. Each change of keeper has a higher term, also after a backup was restored or
commits were lost: the digests of a former keeper that has not noticed yet are ignored, and its writes are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, Protocol

import asyncpg
import msgspec
from msgspec import Struct, convert
from msgspec.structs import replace

from bus.persistence.database import Database
from cell_conductor.domain.breaker import Breaker
from cell_conductor.domain.desires import AT_REST, EVACUATED, EVACUATED_IN_DOUBT, in_sql
from cell_conductor.domain.fences import Fence, Loss
from cell_conductor.domain.leases import Lease
from cell_conductor.domain.report import Unexplained, rescan_of

DESTROY = "destroy"
KEEP = "keep"
ADOPT = "adopt"

MachineKey = tuple[str, str]  # (host uuid, instance uuid)


class DecidedMachine(Struct, frozen=True):
    """The machines of an instance that a decision is about. host_uuid, attempt: only the one there, only while it has
    this attempt; None: any.
    """

    uuid: str
    host_uuid: str | None = None
    attempt: int | None = None


class UnexplainedRecord(Struct, frozen=True, kw_only=True):
    """One machine on record. verdict: an operator's, "" until there is one. is_new: recorded by this call."""

    machine: Unexplained
    service: str
    first_seen: float
    last_seen: float
    verdict: str = ""
    decided_by: str = ""
    decided_at: float = 0.0
    is_new: bool = False

    @property
    def place(self) -> MachineKey:
        """Where it is."""
        return self.machine.host_uuid, self.machine.uuid

    @property
    def rescan(self) -> str:
        """Of the rescan that shows whether it is there still."""
        return rescan_of("unexplained", *self.place, self.last_seen)


class Safety(Protocol):
    """Machines that no record explains, and breakers."""

    async def record(self, service: str, machines: Sequence[Unexplained], now: float) -> list[UnexplainedRecord]:
        """Put these on record, or record that they are still there. A verdict holds for one attempt only, but that a
        machine is kept: no attempt and no mark shows that it is gone.
        """

    async def records(self) -> list[UnexplainedRecord]:
        """All on record, by host and instance."""

    async def delete(self, records: Sequence[UnexplainedRecord]) -> list[MachineKey]:
        """Delete these, which are not there any more; returns those that were on record just so: no operator has
        decided about them meanwhile, and no report has listed them.
        """

    async def decide(self, machines: Sequence[DecidedMachine], verdict: str, by: str, now: float) -> list[MachineKey]:
        """Record an operator's verdict on those of these machines that are in quarantine; returns which they are."""

    async def breaker(self, service: str) -> Breaker | None:
        """The record of this service's breaker."""

    async def breakers(self) -> list[Breaker]:
        """All of them, by service."""

    async def trip(self, breaker: Breaker) -> None:
        """Put a breaker on record."""

    async def reset(self, service: str, by: str, now: float, *, tripped_at: float | None = None) -> bool:
        """Record that an operator resets it; False when it is not open. tripped_at: the one that the operator has seen,
        and no later one, which names other machines; None: any.
        """


def is_to_reset(breaker: Breaker, tripped_at: float | None) -> bool:
    """Whether it is open, and the one that is meant."""
    return breaker.is_open and tripped_at in (None, breaker.tripped_at)


class PostgresKeyed:
    """In the cell's schema."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def _fetch(self, statement: str, *values: object) -> list[asyncpg.Record]:
        async with self._database.raw() as connection:
            found: list[asyncpg.Record] = await connection.fetch(statement, *values)
        return found

    async def _fetchval(self, statement: str, *values: object) -> Any:
        async with self._database.raw() as connection:
            return await connection.fetchval(statement, *values)


def columns(rows: Iterable[object], *names: str) -> list[Sequence[object]]:
    """An array of each of these fields, for `unnest`."""
    return list(zip(*map(attrgetter(*names), rows), strict=True)) or [()] * len(names)


_ROW = "host_uuid::text, instance_uuid::text, attempt, service, kind, why, first_seen, last_seen"
_WORD = "verdict, decided_by, decided_at"
RECORD = f"""
INSERT INTO unexplained AS u (host_uuid, instance_uuid, attempt, service, kind, why, first_seen, last_seen)
SELECT h, i, a, $5, k, w, $6, $6
FROM unnest($1::uuid[], $2::uuid[], $3::int[], $4::text[], $7::text[]) AS n (h, i, a, k, w)
ORDER BY h, i
ON CONFLICT (host_uuid, instance_uuid) DO UPDATE SET
    attempt = excluded.attempt, service = excluded.service, kind = excluded.kind, why = excluded.why,
    last_seen = excluded.last_seen,
    verdict = CASE WHEN u.verdict = '{KEEP}' OR (u.attempt, u.kind) = (excluded.attempt, excluded.kind)
        THEN u.verdict ELSE '' END
RETURNING {_ROW}, {_WORD}, xmax = 0 AS is_new
"""
_RECORDS = f"SELECT {_ROW}, {_WORD}, false FROM unexplained {{}} ORDER BY host_uuid, instance_uuid"
RECORDS = _RECORDS.format("")
RECORDS_OF = _RECORDS.format("WHERE instance_uuid = ANY($1::uuid[])")
EXPLAINED = "NOT EXISTS (SELECT FROM unexplained WHERE instance_uuid = ANY({}::uuid[]))"
DELETE_UNEXPLAINED = """
DELETE FROM unexplained u USING unnest($1::uuid[], $2::uuid[], $3::text[], $4::float8[]) AS n (h, i, v, s)
WHERE (u.host_uuid, u.instance_uuid, u.verdict, u.last_seen) = (n.h, n.i, n.v, n.s)
RETURNING u.host_uuid::text, u.instance_uuid::text
"""
# Locked in the order in which RECORD writes them.
DECIDE = """
WITH decided AS (
    SELECT u.host_uuid, u.instance_uuid
    FROM unnest($1::uuid[], $2::uuid[], $3::int[]) AS n (i, h, a) JOIN unexplained u ON u.instance_uuid = n.i
    WHERE kind = 'quarantined' AND u.host_uuid = coalesce(n.h, u.host_uuid) AND u.attempt = coalesce(n.a, u.attempt)
    ORDER BY u.host_uuid, u.instance_uuid FOR UPDATE OF u
)
UPDATE unexplained u SET verdict = $4, decided_by = $5, decided_at = $6 FROM decided d
WHERE (u.host_uuid, u.instance_uuid) = (d.host_uuid, d.instance_uuid)
RETURNING u.host_uuid::text, u.instance_uuid::text
"""
TRIP = """
INSERT INTO breakers (service, record) VALUES ($1, $2::text::json)
ON CONFLICT (service) DO UPDATE SET record = excluded.record
"""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Breaker).decode


class PostgresSafety(PostgresKeyed):
    """In the cell's schema."""

    async def record(self, service: str, machines: Sequence[Unexplained], now: float) -> list[UnexplainedRecord]:
        """One statement."""
        rows = {(one.host_uuid, one.uuid): one for one in machines}.values()
        *places, why = columns(rows, "host_uuid", "uuid", "attempt", "kind", "why")
        return [record_of(row) for row in await self._fetch(RECORD, *places, service, now, why)]

    async def records(self) -> list[UnexplainedRecord]:
        """One statement."""
        return [record_of(row) for row in await self._fetch(RECORDS)]

    async def delete(self, records: Sequence[UnexplainedRecord]) -> list[MachineKey]:
        """One statement."""
        places = list(zip(*(one.place for one in records), strict=True)) or [(), ()]
        found = await self._fetch(DELETE_UNEXPLAINED, *places, *columns(records, "verdict", "last_seen"))
        return sorted((host, uuid) for host, uuid in found)

    async def decide(self, machines: Sequence[DecidedMachine], verdict: str, by: str, now: float) -> list[MachineKey]:
        """One statement."""
        named = columns(machines, *DecidedMachine.__struct_fields__)
        return sorted((host, uuid) for host, uuid in await self._fetch(DECIDE, *named, verdict, by, now))

    async def breaker(self, service: str) -> Breaker | None:
        """One statement."""
        record = await self._fetchval("SELECT record FROM breakers WHERE service = $1", service)
        return None if record is None else _decode(record)

    async def breakers(self) -> list[Breaker]:
        """One statement."""
        return [_decode(row[0]) for row in await self._fetch("SELECT record FROM breakers ORDER BY service")]

    async def trip(self, breaker: Breaker) -> None:
        """One statement."""
        await self._fetch(TRIP, breaker.service, _encode(breaker).decode())

    async def reset(self, service: str, by: str, now: float, *, tripped_at: float | None = None) -> bool:
        """Read with a lock and written back in one transaction."""
        async with self._database.raw() as connection:
            record = await connection.fetchval("SELECT record FROM breakers WHERE service = $1 FOR UPDATE", service)
            if record is None or not is_to_reset(breaker := _decode(record), tripped_at):
                return False
            await connection.execute(TRIP, service, _encode(replace(breaker, reset_at=now, reset_by=by)).decode())
        return True


def record_of(row: Sequence[object]) -> UnexplainedRecord:
    """Of a row of these statements."""
    host, instance, attempt, service, kind, why, first, last, verdict, by, at, is_new = row
    return msgspec.convert(
        {
            "machine": {"uuid": instance, "attempt": attempt, "host_uuid": host, "kind": kind, "why": why},
            "service": service,
            "first_seen": first,
            "last_seen": last,
            "verdict": verdict,
            "decided_by": by,
            "decided_at": at,
            "is_new": is_new,
        },
        UnexplainedRecord,
    )


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
# As `domain.move_steps.is_evacuated_from`.
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
        """Delete services that are down since before this time, oldest first, up to a bound; returns which. None in a
        database that was ever set back: a search waits for their answers, and an operator states that one is gone.
        """

    async def forget(self, service: str) -> bool:
        """Delete the lease of a service, whatever its state. False: there is none."""


KEEP_KEEPER = """
INSERT INTO lease_keeper AS k (process, term, until)
VALUES ($1, (extract(epoch FROM clock_timestamp()) * 1000)::bigint, clock_timestamp() + $2 * interval '1 s')
ON CONFLICT (one) DO UPDATE SET
    term = CASE WHEN k.process = $1 AND k.term = $3 AND k.until >= clock_timestamp() THEN k.term
                ELSE greatest(k.term + 1, $3 + 1, excluded.term) END,
    process = $1, until = excluded.until
WHERE k.process = $1 OR k.until < clock_timestamp()
RETURNING term
"""
LEASE = Lease.__struct_fields__
LEASES = f"SELECT {', '.join(LEASE)} FROM leases ORDER BY service"
# The keeper's row is locked: no newer term begins while this one writes. One statement is one transaction: a keeper
# that is paused holds no lock, and the next one does not wait for it.
_MINE = "mine AS MATERIALIZED (SELECT FROM lease_keeper WHERE term = $1 FOR SHARE)"
RECORD_LEASES = f"""
WITH {_MINE}, recorded AS (
    INSERT INTO leases ({", ".join(LEASE)})
    SELECT n.* FROM unnest($2::text[], $3::bigint[], $4::float8[], $5::text[], $6::float8[], $7::text[],
        $8::text[], $9::bigint[]) AS n
    WHERE EXISTS (SELECT FROM mine)
    ON CONFLICT (service) DO UPDATE SET epoch = excluded.epoch, interval_s = excluded.interval_s,
        state = excluded.state, since = excluded.since, reason = excluded.reason,
        listed = excluded.listed, era = excluded.era)
SELECT EXISTS (SELECT FROM mine)
"""
# In a database that was set back, recognised or not, every service is to be asked what the record has forgotten.
PURGE = f"""
WITH {_MINE}
DELETE FROM leases WHERE EXISTS (SELECT FROM mine)
    AND EXISTS (SELECT FROM identity WHERE set_back_at = 0 AND origin = origin_of('instances')) AND service IN (
    SELECT service FROM leases WHERE state <> 'up' AND since < $2 ORDER BY since LIMIT $3) RETURNING service
"""
FORGET = "DELETE FROM leases WHERE service = $1 RETURNING 1"


class PostgresLeases(PostgresKeyed):
    """In the cell's schema."""

    async def keep(self, process: str, for_s: float, term: int | None) -> int | None:
        """One statement."""
        async with self._database.single() as connection:
            kept: int | None = await connection.fetchval(KEEP_KEEPER, process, for_s, term)
        return kept

    async def leases(self) -> list[Lease]:
        """One statement."""
        return [convert(dict(row), Lease) for row in await self._fetch(LEASES)]

    async def record(self, term: int, leases: Sequence[Lease]) -> bool:
        """One statement."""
        ordered = sorted(leases, key=lambda lease: lease.service)
        async with self._database.single() as connection:
            recorded: bool = await connection.fetchval(RECORD_LEASES, term, *columns(ordered, *LEASE))
        return recorded

    async def purge(self, term: int, before: float, limit: int) -> list[str]:
        """One statement."""
        async with self._database.single() as connection:
            return sorted(row[0] for row in await connection.fetch(PURGE, term, before, limit))

    async def forget(self, service: str) -> bool:
        """One statement."""
        return await self._fetchval(FORGET, service) is not None
