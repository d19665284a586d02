"""Machines that no record explains, and breakers, in memory. It passes the same suite as PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

from msgspec.structs import replace

from bus.persistence.memory_database import MemorySession
from cell_conductor.domain.breaker import Breaker
from cell_conductor.domain.report import Unexplained, UnexplainedKind

from .safety import DecidedMachine, MachineKey, UnexplainedRecord, is_to_reset


class Tables(Protocol):
    """The committed rows."""

    unexplained: dict[MachineKey, UnexplainedRecord]
    breakers: dict[str, Breaker]


class MemorySafety:
    """In a cell's tables."""

    def __init__(self, table: Tables, session: MemorySession) -> None:
        self._table = table
        self._session = session

    async def record(self, service: str, machines: Sequence[Unexplained], now: float) -> list[UnexplainedRecord]:
        """One transaction."""
        async with self._session.transaction() as transaction:
            await transaction.statement()
            await transaction.lock(_rows((machine.host_uuid, machine.uuid) for machine in machines))
            made: dict[MachineKey, UnexplainedRecord] = {}
            for machine in machines:
                record = UnexplainedRecord(machine=machine, service=service, first_seen=now, last_seen=now, is_new=True)
                before = self._table.unexplained.get(record.place)
                if before is not None:
                    is_same = (before.machine.attempt, before.machine.kind) == (machine.attempt, machine.kind)
                    verdict = before.verdict if is_same else ""
                    record = replace(before, machine=machine, service=service, last_seen=now, verdict=verdict)
                made[record.place] = record
            kept = {place: replace(record, is_new=False) for place, record in made.items()}
            transaction.will(partial(self._table.unexplained.update, kept))
            return list(made.values())

    async def records(self) -> list[UnexplainedRecord]:
        """All of them."""
        async with self._session.transaction() as transaction:
            await transaction.statement()
            return [record for _, record in sorted(self._table.unexplained.items())]

    async def delete(self, places: Sequence[MachineKey]) -> None:
        """One transaction."""
        async with self._session.transaction() as transaction:
            await transaction.statement()
            await transaction.lock(_rows(places))
            transaction.will(partial(_drop, self._table.unexplained, places))

    async def decide(self, machines: Sequence[DecidedMachine], verdict: str, by: str, now: float) -> list[MachineKey]:
        """One transaction."""
        async with self._session.transaction() as transaction:
            await transaction.statement()
            table = self._table.unexplained
            await transaction.lock(_rows(place for place, record in table.items() if _is_named(record, machines)))
            decided = {
                place: replace(record, verdict=verdict, decided_by=by, decided_at=now)
                for place, record in table.items()
                if ("unexplained", *place) in transaction.held and _is_named(record, machines)
            }
            transaction.will(partial(self._table.unexplained.update, decided))
            return sorted(decided)

    async def breaker(self, service: str) -> Breaker | None:
        """One of them."""
        async with self._session.transaction() as transaction:
            await transaction.statement()
            return self._table.breakers.get(service)

    async def breakers(self) -> list[Breaker]:
        """All of them."""
        async with self._session.transaction() as transaction:
            await transaction.statement()
            return [breaker for _, breaker in sorted(self._table.breakers.items())]

    async def trip(self, breaker: Breaker) -> None:
        """One transaction."""
        async with self._session.transaction() as transaction:
            await transaction.statement()
            await transaction.lock([("breakers", breaker.service)])
            transaction.will(partial(self._table.breakers.update, {breaker.service: breaker}))

    async def reset(self, service: str, by: str, now: float, *, tripped_at: float | None = None) -> bool:
        """One transaction."""
        async with self._session.transaction() as transaction:
            await transaction.statement()
            await transaction.lock([("breakers", service)])
            breaker = self._table.breakers.get(service)
            if breaker is None or not is_to_reset(breaker, tripped_at):
                return False
            made = replace(breaker, reset_at=now, reset_by=by)
            transaction.will(partial(self._table.breakers.update, {service: made}))
            return True


def _is_named(record: UnexplainedRecord, machines: Sequence[DecidedMachine]) -> bool:
    machine = record.machine
    return machine.kind is UnexplainedKind.QUARANTINED and any(
        (one.uuid, one.host_uuid or machine.host_uuid) == (machine.uuid, machine.host_uuid)
        and one.attempt in (None, machine.attempt)
        for one in machines
    )


def _rows(places: Iterable[MachineKey]) -> list[tuple[str, str, str]]:
    """The keys of their locks, in the order in which PostgreSQL's statements take them."""
    return [("unexplained", *place) for place in sorted(set(places))]


def _drop(rows: dict[MachineKey, UnexplainedRecord], places: Sequence[MachineKey]) -> None:
    for place in places:
        rows.pop(place, None)
