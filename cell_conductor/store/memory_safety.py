"""Unexplained machines, breakers, fences, losses and leases in memory. They pass the same suite as PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from bus.clock import Clock
from bus.persistence.memory_database import MemoryDatabaseTransaction, MemorySession
from cell_conductor.domain.breaker import Breaker
from cell_conductor.domain.desires import AT_REST
from cell_conductor.domain.fences import Fence, Loss
from cell_conductor.domain.instance import Instance
from cell_conductor.domain.leases import Lease, LeaseState
from cell_conductor.domain.move_steps import is_evacuated_from
from cell_conductor.domain.report import Unexplained, UnexplainedKind

from .safety import KEEP, MAX_LOSSES, DecidedMachine, MachineKey, UnexplainedRecord, is_to_reset

Key = TypeVar("Key", bound="str | tuple[str, ...]")
Value = TypeVar("Value")


class Keeper(Struct, frozen=True):
    """The keeper of the leases, and until when."""

    process: str
    term: int
    until: float


class Tables(Protocol):
    """The committed rows."""

    clock: Clock
    place: int
    origin: int
    set_back_at: float
    instances: dict[str, Instance]
    unexplained: dict[MachineKey, UnexplainedRecord]
    breakers: dict[str, Breaker]
    fences: dict[str, Fence]
    lifted_fences: dict[str, int]
    fence_losses: dict[MachineKey, Loss]
    leases: dict[str, Lease]
    lease_keeper: dict[str, Keeper]


class MemoryKeyed:
    """In a cell's tables: the committed rows."""

    def __init__(self, table: Tables, session: MemorySession) -> None:
        self._table = table
        self._session = session

    @asynccontextmanager
    async def _begun(self, *keys: Hashable) -> AsyncIterator[MemoryDatabaseTransaction]:
        """A transaction after its first statement, which locks these rows in order."""
        async with self._session.transaction() as transaction:
            await transaction.statement()
            await transaction.lock(keys)
            yield transaction

    async def _read(self, rows: Mapping[Key, Value]) -> list[Value]:
        """All of a table, in the order of its keys."""
        async with self._begun():
            return [value for _, value in sorted(rows.items(), key=lambda item: item[0])]


def drop(rows: dict[Key, Value], keys: Iterable[Key]) -> None:
    """Delete these, where they are on record."""
    for key in keys:
        rows.pop(key, None)


class MemorySafety(MemoryKeyed):
    """In a cell's tables."""

    async def record(self, service: str, machines: Sequence[Unexplained], now: float) -> list[UnexplainedRecord]:
        """One transaction."""
        async with self._begun(*_rows((machine.host_uuid, machine.uuid) for machine in machines)) as transaction:
            made: dict[MachineKey, UnexplainedRecord] = {}
            for machine in machines:
                record = UnexplainedRecord(machine=machine, service=service, first_seen=now, last_seen=now, is_new=True)
                before = self._table.unexplained.get(record.place)
                if before is not None:
                    is_same = (before.machine.attempt, before.machine.kind) == (machine.attempt, machine.kind)
                    verdict = before.verdict if is_same or before.verdict == KEEP else ""
                    record = replace(before, machine=machine, service=service, last_seen=now, verdict=verdict)
                made[record.place] = record
            kept = {place: replace(record, is_new=False) for place, record in made.items()}
            transaction.will(partial(self._table.unexplained.update, kept))
            return list(made.values())

    async def records(self) -> list[UnexplainedRecord]:
        """All of them."""
        return await self._read(self._table.unexplained)

    async def delete(self, records: Sequence[UnexplainedRecord]) -> list[MachineKey]:
        """One transaction."""
        async with self._begun(*_rows(one.place for one in records)) as transaction:
            deleted = sorted(one.place for one in records if self._table.unexplained.get(one.place) == one)
            transaction.will(partial(drop, self._table.unexplained, deleted))
            return deleted

    async def decide(self, machines: Sequence[DecidedMachine], verdict: str, by: str, now: float) -> list[MachineKey]:
        """One transaction."""
        async with self._begun() as transaction:
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
        async with self._begun():
            return self._table.breakers.get(service)

    async def breakers(self) -> list[Breaker]:
        """All of them."""
        return await self._read(self._table.breakers)

    async def trip(self, breaker: Breaker) -> None:
        """One transaction."""
        async with self._begun(("breakers", breaker.service)) as transaction:
            transaction.will(partial(self._table.breakers.update, {breaker.service: breaker}))

    async def reset(self, service: str, by: str, now: float, *, tripped_at: float | None = None) -> bool:
        """One transaction."""
        async with self._begun(("breakers", service)) as transaction:
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


class MemoryFences(MemoryKeyed):
    """In a cell's tables."""

    async def fences(self) -> list[Fence]:
        """All of them."""
        return await self._read(self._table.fences)

    async def losses(self) -> list[Loss]:
        """All of them."""
        async with self._begun():
            return sorted(self._table.fence_losses.values(), key=lambda one: (one.at, one.place))[:MAX_LOSSES]

    async def put(self, fence: Fence) -> bool:
        """One transaction."""
        async with self._begun(_key(fence.host_uuid)) as transaction:
            known = self._table.fences.get(fence.host_uuid)
            newest = known.version if known is not None else self._table.lifted_fences.get(fence.host_uuid, 0)
            if newest >= fence.version:
                return False
            transaction.will(partial(self._table.fences.update, {fence.host_uuid: fence}))
            return True

    async def delete_losses(self, losses: Sequence[Loss]) -> None:
        """One transaction."""
        async with self._begun() as transaction:
            transaction.will(partial(_drop_losses, self._table.fence_losses, losses))

    async def lift(self, host_uuid: str, version: int) -> bool:
        """One transaction."""
        async with self._begun(_key(host_uuid)) as transaction:
            known = self._table.fences.get(host_uuid)
            if known is None or not known.lifting or known.version != version:
                return False
            if any(place[0] == host_uuid for place in self._table.fence_losses):
                return False
            if any(is_evacuated_from(one, host_uuid) for one in self._table.instances.values()):
                return False
            transaction.will(partial(_lift, self._table, host_uuid, version))
            return True

    async def lift_unknown(self, fence: Fence) -> None:
        """One transaction."""
        async with self._begun(_key(fence.host_uuid)) as transaction:
            newest = self._table.lifted_fences.get(fence.host_uuid, 0)
            if fence.host_uuid not in self._table.fences and newest < fence.version:
                transaction.will(partial(_lift, self._table, fence.host_uuid, fence.version))

    async def lifted(self, host_uuid: str) -> int:
        """One transaction."""
        async with self._begun():
            return 0 if host_uuid in self._table.fences else self._table.lifted_fences.get(host_uuid, 0)

    async def touching(self, host_uuid: str, after: str, limit: int) -> list[str]:
        """All of them are looked at."""
        async with self._begun():
            return [
                uuid
                for uuid, one in sorted(self._table.instances.items())
                if uuid > after and one.phase not in AT_REST and host_uuid in (one.host_uuid, one.source_host_uuid)
            ][:limit]


async def lose(
    table: Tables,
    transaction: MemoryDatabaseTransaction,
    hosts: Sequence[str],
    losses: Sequence[Loss],
    proofs: Sequence[str] = (),
) -> bool:
    """As `Transaction.lose`."""
    await transaction.statement()
    await transaction.lock([_key(host) for host in sorted(set(hosts))])
    if any(host not in table.fences for host in hosts) or any(table.fences[host].lifting for host in proofs):
        return False
    transaction.will(partial(_put, table.fence_losses, losses))
    return True


def _key(host_uuid: str) -> tuple[str, str]:
    return "fence", host_uuid


def _lift(table: Tables, host_uuid: str, version: int) -> None:
    table.fences.pop(host_uuid, None)
    table.lifted_fences[host_uuid] = version


def _put(rows: dict[MachineKey, Loss], losses: Sequence[Loss]) -> None:
    for loss in losses:
        known = rows.get(loss.place)
        if known is None or known.attempt <= loss.attempt:
            rows[loss.place] = loss


def _drop_losses(rows: dict[MachineKey, Loss], losses: Sequence[Loss]) -> None:
    for loss in losses:
        known = rows.get(loss.place)
        if known is not None and known.attempt <= loss.attempt:
            del rows[loss.place]


ONE = "one"
_ROW = ("lease_keeper", ONE)


class MemoryLeases(MemoryKeyed):
    """In a cell's tables."""

    async def keep(self, process: str, for_s: float, term: int | None) -> int | None:
        """One transaction."""
        async with self._begun(_ROW) as transaction:
            now = self._table.clock.time()
            held = self._table.lease_keeper.get(ONE)
            if held is not None and held.process != process and held.until >= now:
                return None
            if term is None or held is None or (held.process, held.term) != (process, term) or held.until < now:
                term = max(held.term + 1 if held is not None else 0, (term or 0) + 1, int(now * 1000))
            made = Keeper(process, term, now + for_s)
            transaction.will(partial(self._table.lease_keeper.update, {ONE: made}))
            return term

    async def leases(self) -> list[Lease]:
        """All of them."""
        return await self._read(self._table.leases)

    async def record(self, term: int, leases: Sequence[Lease]) -> bool:
        """One transaction."""
        async with self._begun(_ROW) as transaction:
            if not self._is_mine(term):
                return False
            transaction.will(partial(self._table.leases.update, {lease.service: lease for lease in leases}))
            return True

    async def purge(self, term: int, before: float, limit: int) -> list[str]:
        """One transaction."""
        async with self._begun(_ROW) as transaction:
            down = [one for one in self._table.leases.values() if one.state is not LeaseState.UP]
            gone = [one.service for one in sorted(down, key=lambda one: one.since) if one.since < before][:limit]
            was_set_back = self._table.set_back_at > 0 or self._table.origin != self._table.place
            if was_set_back or not self._is_mine(term):
                return []
            transaction.will(partial(drop, self._table.leases, gone))
            return sorted(gone)

    async def forget(self, service: str) -> bool:
        """One transaction."""
        async with self._begun() as transaction:
            transaction.will(partial(drop, self._table.leases, [service]))
            return service in self._table.leases

    def _is_mine(self, term: int) -> bool:
        held = self._table.lease_keeper.get(ONE)
        return held is not None and held.term == term
