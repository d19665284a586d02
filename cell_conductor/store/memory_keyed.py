"""Keyed rows of a cell in memory, and the leader of its leases."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from bus.persistence.memory_database import MemoryDatabase, MemoryDatabaseTransaction, MemorySession
from cell_conductor.state.breaker import Breaker
from cell_conductor.state.desired_state import AT_REST
from cell_conductor.state.evacuation_proof import may_run_after_evacuation
from cell_conductor.state.fence import Fence
from cell_conductor.state.instance import Instance
from cell_conductor.state.lease import Leader, Lease
from cell_conductor.store.keyed import DatabaseIdentity, Key, KeyedTable, Lock, Unrecognised, Value
from cell_conductor.store.keyed_tables import KEYED, UnknownMachineRecord


class MemoryKeyedTable(MemoryDatabase):
    """The rows of one cell that are values under keys, and what guards them."""

    ROWS = (
        *MemoryDatabase.ROWS,
        "instances",
        "origin",
        "incarnation",
        "leader",
        *(one.name for one in KEYED),
    )

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self.place = 1  # no row: what a restore leaves behind, as a cluster and its timeline
        self.origin = self.place
        self.incarnation = 1
        self.instances: dict[str, Instance] = {}
        self.unknown_machines: dict[tuple[str, str], UnknownMachineRecord] = {}
        self.breakers: dict[str, Breaker] = {}
        self.leases: dict[str, Lease] = {}
        self.leader = Leader()
        self.fences: dict[str, Fence] = {}


class MemoryKeyedRows:
    """The rows of one transaction."""

    def __init__(self, table: MemoryKeyedTable, transaction: MemoryDatabaseTransaction, seen: DatabaseIdentity) -> None:
        self._table = table
        self._transaction = transaction
        self._seen = seen

    async def read(self, table: KeyedTable[Key, Value], limit: int | None = None) -> list[Value]:
        """One statement."""
        await self._transaction.statement()
        return [value for _, value in sorted(self._rows(table).items(), key=lambda row: row[0])][:limit]

    async def find(
        self, table: KeyedTable[Key, Value], keys: Collection[Key], lock: Lock = Lock.NONE
    ) -> dict[Key, Value]:
        """One statement. It locks absent rows too: who inserts one that another inserts waits for its end."""
        await self._transaction.statement()
        rows, ordered = self._rows(table), sorted(set(keys))
        if lock:
            await self._transaction.lock([(table.name, key) for key in ordered])
        return {key: rows[key] for key in ordered if key in rows}

    async def put(self, table: KeyedTable[Key, Value], values: Iterable[Value], over: Mapping[Key, Value]) -> None:
        """One statement."""
        await self._transaction.statement()
        self._transaction.will(partial(self._rows(table).update, {table.key(value): value for value in values}))

    async def delete(self, table: KeyedTable[Key, Any], keys: Collection[Key]) -> None:
        """One statement."""
        await self._transaction.statement()
        self._transaction.will(partial(drop, self._rows(table), list(keys)))

    async def expect_same_database(self) -> None:
        """One statement. Raises Unrecognised."""
        await self._transaction.statement()
        if not is_same_database(self._table, self._seen):
            raise Unrecognised

    async def incarnation(self) -> int:
        """One statement."""
        await self._transaction.statement()
        return self._table.incarnation

    async def is_needed(self, fence_of: str) -> bool:
        """One statement."""
        await self._transaction.statement()
        return any(may_run_after_evacuation(one, fence_of) for one in self._table.instances.values())

    async def touching(self, host_uuid: str, after: str, limit: int) -> list[str]:
        """One statement; all of them are looked at."""
        await self._transaction.statement()
        return [
            uuid
            for uuid, one in sorted(self._table.instances.items())
            if uuid > after and one.phase not in AT_REST and host_uuid in (one.host_uuid, one.source_host_uuid)
        ][:limit]

    def _rows(self, table: KeyedTable[Key, Value]) -> dict[Key, Value]:
        rows: dict[Key, Value] = getattr(self._table, table.name)
        return rows


class MemoryKeyed:
    """In a cell's tables."""

    def __init__(self, table: MemoryKeyedTable, session: MemorySession, seen: DatabaseIdentity) -> None:
        self._table = table
        self._session = session
        self._seen = seen

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[MemoryKeyedRows]:
        """Commits at the end, rolls back on an exception."""
        async with self._session.transaction() as transaction:
            yield MemoryKeyedRows(self._table, transaction, self._seen)

    async def leader(self) -> tuple[Leader, float]:
        """One transaction."""
        async with self._session.transaction() as transaction:
            await transaction.statement()
            return self._table.leader, self._table.clock.time()

    async def write_leader(self, before: Leader, after: Leader) -> bool:
        """One transaction."""
        write = partial(setattr, self._table, "leader", after)
        return await self._where(lambda on_record: on_record == before, write)

    async def record(self, term: int, leases: Mapping[str, Lease], removed: Collection[str]) -> bool:
        """One transaction."""
        writes = partial(self._table.leases.update, leases), partial(drop, self._table.leases, list(removed))
        return await self._where(lambda on_record: on_record.term == term, *writes)

    async def _where(self, is_met: Callable[[Leader], bool], *writes: Callable[[], None]) -> bool:
        async with self._session.transaction() as transaction:
            await transaction.lock(["leader"])
            if not is_same_database(self._table, self._seen) or not is_met(self._table.leader):
                return False
            for write in writes:
                transaction.will(write)
            return True


def is_same_database(table: MemoryKeyedTable, seen: DatabaseIdentity) -> bool:
    """Whether it is the one that this process has seen."""
    return table.origin == table.place and (table.database_id, table.incarnation) == seen.state


def drop(rows: dict[Any, Any], keys: Sequence[Any]) -> None:
    """Delete these, if they are there."""
    for key in keys:
        rows.pop(key, None)
