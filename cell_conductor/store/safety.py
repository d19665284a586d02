"""The record of machines that no record of an instance explains, and of the breakers: a port, PostgreSQL and memory.

Machines are recorded with each report that has them, and deleted when their host is seen without them. An operator's
verdict on a quarantined machine (`destroy`, `keep` or `adopt`, by whom and when) stands beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from bus.persistence.database import Database
from cell_conductor.domain.breaker import Breaker
from cell_conductor.domain.report import Unexplained

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


class Safety(Protocol):
    """Machines that no record explains, and breakers."""

    async def record(self, service: str, machines: Sequence[Unexplained], now: float) -> list[UnexplainedRecord]:
        """Put these on record, or record that they are still there. A verdict holds for one attempt only."""

    async def records(self) -> list[UnexplainedRecord]:
        """All on record, by host and instance."""

    async def delete(self, places: Sequence[MachineKey]) -> None:
        """Delete these, which are not there any more."""

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
    verdict = CASE WHEN (u.attempt, u.kind) = (excluded.attempt, excluded.kind) THEN u.verdict ELSE '' END
RETURNING {_ROW}, {_WORD}, xmax = 0 AS is_new
"""
RECORDS = f"SELECT {_ROW}, {_WORD}, false FROM unexplained ORDER BY host_uuid, instance_uuid"
DELETE_UNEXPLAINED = """
DELETE FROM unexplained u USING unnest($1::uuid[], $2::uuid[]) AS n (h, i)
WHERE (u.host_uuid, u.instance_uuid) = (n.h, n.i)
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


class PostgresSafety:
    """In the cell's schema."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def record(self, service: str, machines: Sequence[Unexplained], now: float) -> list[UnexplainedRecord]:
        """One statement."""
        rows = {(one.host_uuid, one.uuid): one for one in machines}.values()
        columns = (
            [one.host_uuid for one in rows],
            [one.uuid for one in rows],
            [one.attempt for one in rows],
            [one.kind.value for one in rows],
        )
        async with self._database.raw() as connection:
            found = await connection.fetch(RECORD, *columns, service, now, [one.why for one in rows])
        return [_record_of(row) for row in found]

    async def records(self) -> list[UnexplainedRecord]:
        """One statement."""
        async with self._database.raw() as connection:
            return [_record_of(row) for row in await connection.fetch(RECORDS)]

    async def delete(self, places: Sequence[MachineKey]) -> None:
        """One statement."""
        async with self._database.raw() as connection:
            await connection.execute(
                DELETE_UNEXPLAINED, [host for host, _ in places], [instance for _, instance in places]
            )

    async def decide(self, machines: Sequence[DecidedMachine], verdict: str, by: str, now: float) -> list[MachineKey]:
        """One statement."""
        columns = (
            [one.uuid for one in machines],
            [one.host_uuid for one in machines],
            [one.attempt for one in machines],
        )
        async with self._database.raw() as connection:
            return sorted((host, uuid) for host, uuid in await connection.fetch(DECIDE, *columns, verdict, by, now))

    async def breaker(self, service: str) -> Breaker | None:
        """One statement."""
        async with self._database.raw() as connection:
            record = await connection.fetchval("SELECT record FROM breakers WHERE service = $1", service)
        return None if record is None else _decode(record)

    async def breakers(self) -> list[Breaker]:
        """One statement."""
        async with self._database.raw() as connection:
            return [_decode(row[0]) for row in await connection.fetch("SELECT record FROM breakers ORDER BY service")]

    async def trip(self, breaker: Breaker) -> None:
        """One statement."""
        async with self._database.raw() as connection:
            await connection.execute(TRIP, breaker.service, _encode(breaker).decode())

    async def reset(self, service: str, by: str, now: float, *, tripped_at: float | None = None) -> bool:
        """Read with a lock and written back in one transaction."""
        async with self._database.raw() as connection:
            record = await connection.fetchval("SELECT record FROM breakers WHERE service = $1 FOR UPDATE", service)
            if record is None or not is_to_reset(breaker := _decode(record), tripped_at):
                return False
            await connection.execute(TRIP, service, _encode(replace(breaker, reset_at=now, reset_by=by)).decode())
        return True


def _record_of(row: Sequence[object]) -> UnexplainedRecord:
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
