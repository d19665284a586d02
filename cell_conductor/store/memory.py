"""Instances in memory: for simulation and tests. It passes the same suite as PostgreSQL (tests/contract)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

from msgspec import convert
from msgspec.structs import replace

from bus.contracts.base import SENT_SLOTS, DatabaseMark, SentSequences
from bus.contracts.operations import FenceState, Losses
from bus.persistence.database import check_identity
from bus.persistence.guarded_statement import Conflict, PreconditionFailed
from bus.persistence.memory_database import MemoryDatabaseTransaction, MemoryRows, MemorySession
from bus.persistence.outbox import OutboxMessage
from bus.persistence.unit_of_work import Committed, VersionCache
from cell_conductor.state.database_marks import NOTHING, RecordedMarks, Stated
from cell_conductor.state.desired_state import ABANDONED_WITH_SERVICE, ENDED_BY_FAILURE_OR_DELETE, EXPECTED_ON_CURRENT
from cell_conductor.state.fence import Fence
from cell_conductor.state.instance import Instance, InstanceSummary, Phase
from cell_conductor.state.ownership_proof import has_machine_at
from cell_conductor.store.fence_rows import FenceStore, LeaseStore
from cell_conductor.store.keyed import (
    MAX_ABSENT,
    DatabaseIdentity,
    DatabaseState,
    Recovering,
    Unrecognised,
    absent_with,
    state_of,
)
from cell_conductor.store.keyed_tables import PROTECT, UnknownMachineRecord
from cell_conductor.store.memory_keyed import MemoryKeyed, MemoryKeyedRows, MemoryKeyedTable, drop, is_same_database
from cell_conductor.store.port import DatabaseChange, InstanceWrites, OptimisticTransaction, SeenStore
from cell_conductor.store.unknown_machines import Safety, rely_on

HANDLER = "conductor"


class MemoryInstanceTable(MemoryKeyedTable):
    """The committed instances of one cell; it outlives the conductors."""

    ROWS = (
        *MemoryKeyedTable.ROWS,
        "recovers",
        "accepts",
        "losses",
        "ended_incarnations",
        "absent",
        "sent",
    )

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)
        self.recovers = self.accepts = False
        self.losses = Losses()
        self.ended_incarnations: dict[int, SentSequences] = {}
        self.absent: dict[str, bool] = {}
        self.sent: SentSequences = (0,) * SENT_SLOTS

    @property
    def marks(self) -> RecordedMarks:
        """On record."""
        return RecordedMarks(DatabaseMark(self.incarnation, self.sent), self.ended_incarnations)

    @property
    def fenced(self) -> dict[str, Fence]:
        """The fences in force, by host."""
        return {host: one for host, one in self.fences.items() if one.state is not FenceState.UNFENCED}


class MemoryTransaction:
    """One transaction."""

    def __init__(
        self, table: MemoryInstanceTable, transaction: MemoryDatabaseTransaction, seen: DatabaseIdentity
    ) -> None:
        self._table = table
        self._transaction = transaction
        self._seen = seen
        self.rows: Sequence[int] = ()
        self.durable = True

    async def recognise(self, stated: Stated = NOTHING) -> DatabaseChange | None:
        """Compare the table with what others state of it. Raises Unrecognised and Recovering."""
        table, seen, own = self._table, self._seen, self._seen.mark  # as of before the row is read
        await self._transaction.statement()
        if self._state(stated, own) is not DatabaseState.SAME:
            await self._hold()
            if (history := self._state(stated, own)) is not DatabaseState.SAME:
                return self._begin(stated, own, recovers=table.recovers or history is DatabaseState.BEHIND)
        _see(seen, table.marks, table.recovers)
        if table.recovers:
            raise Recovering
        return None

    async def begin_recovery(self, stated: Stated = NOTHING) -> int:
        """As in PostgreSQL."""
        table, own = self._table, self._seen.mark
        await self._transaction.statement()
        await self._hold()
        if self._state(stated, own) is DatabaseState.SAME and table.recovers:
            self._transaction.will(partial(_see, self._seen, table.marks, True))
            return table.incarnation
        return self._begin(stated, own, recovers=True).incarnation

    async def _hold(self) -> None:
        await self._transaction.lock(["identity", *(("sent", slot) for slot in range(SENT_SLOTS))])

    def _state(self, stated: Stated, own: DatabaseMark) -> DatabaseState:
        table = self._table
        check_identity(table.database_id, self._seen.database_id)
        return state_of(table.marks, stated, own, is_on_other_server=table.origin != table.place)

    def _begin(self, stated: Stated, own: DatabaseMark, *, recovers: bool) -> DatabaseChange:
        table, recorded = self._table, self._table.marks
        now = recorded.begun(incarnation := stated.highest(recorded.own, own) + 1, recovers=recovers)
        self._transaction.will(partial(_begin, table, now, recovers))
        self._transaction.will(partial(_see, self._seen, now, recovers))
        return DatabaseChange(table.database_id, incarnation, recovers)

    async def expect_recovering(self) -> None:
        """One statement, under a lock. Raises Unrecognised."""
        await self._transaction.statement()
        await self._transaction.lock(["identity"])
        if not is_same_database(self._table, self._seen) or not self._table.recovers:
            raise Unrecognised

    async def accepted_losses(self) -> int:
        """One statement."""
        await self._transaction.statement()
        return self._table.losses.count if self._table.accepts else 0

    async def stop_recovery(self, losses: Losses) -> None:
        """One statement."""
        self._transaction.will(partial(_await_acceptance, self._table, losses))

    async def accept_losses(self, losses: Losses, incarnation: int) -> bool:
        """One statement."""
        await self._transaction.lock(["identity"])
        table = self._table
        waits_for = table.incarnation, table.losses
        if not table.recovers or table.accepts or not losses.count or waits_for != (incarnation, losses):
            return False
        self._transaction.will(partial(setattr, table, "accepts", True))
        return True

    async def end_recovery(self, silent: Collection[str] = (), without: Collection[str] = ()) -> None:
        """One statement."""
        self._write_absent(absent_with(self._table.absent, silent, without))
        self._transaction.will(partial(_await_acceptance, self._table, Losses()))
        self._transaction.will(partial(setattr, self._table, "recovers", False))
        self._transaction.will(partial(setattr, self._seen, "is_recovering", False))

    async def absent_services(self) -> dict[str, bool]:
        """One statement."""
        await self._transaction.lock(["identity"])
        return dict(self._table.absent)

    async def record_listed(self, services: Collection[str]) -> None:
        """As in PostgreSQL."""
        absent = await self.absent_services()
        self._write_absent({name: has_nothing for name, has_nothing in absent.items() if name not in services})

    async def state_without(self, service: str) -> bool:
        """As in PostgreSQL."""
        absent = await self.absent_services()
        if service not in absent and len(absent) >= MAX_ABSENT:
            return False
        self._write_absent({**absent, service: True})
        return True

    def _write_absent(self, absent: dict[str, bool]) -> None:
        self._transaction.will(partial(setattr, self._table, "absent", absent))

    async def first_time(self, message_ids: Sequence[str]) -> set[str]:
        """Record handled messages; those not seen before."""
        return await self._transaction.first_time(HANDLER, message_ids)

    async def lock(self, uuids: Sequence[str]) -> dict[str, Instance]:
        """The instances on record among these, locked until the end."""
        await self._transaction.statement()
        instances = self._table.instances
        found = [uuid for uuid in sorted(set(uuids)) if uuid in instances]
        await self._transaction.lock([("instance", uuid) for uuid in found])
        return {uuid: instances[uuid] for uuid in found}

    async def lock_due(self, now: float, limit: int) -> list[Instance]:
        """Instances whose deadline has passed, oldest first, locked, without waiting for another lock."""
        await self._transaction.statement()
        due = sorted(
            (instance.deadline, uuid)
            for uuid, instance in self._table.instances.items()
            if instance.deadline is not None
            and instance.deadline <= now
            and self._transaction.is_free(("instance", uuid))
        )[:limit]
        await self._transaction.lock([("instance", uuid) for _, uuid in due])
        return [self._table.instances[uuid] for _, uuid in due]

    async def unknown_machines(self, uuids: Collection[str]) -> list[UnknownMachineRecord]:
        """Without locks."""
        await self._transaction.statement()
        return [one for _, one in sorted(self._table.unknown_machines.items()) if one.machine.uuid in uuids]

    async def insert(self, instances: Sequence[Instance]) -> None:
        """Record new instances. Raises Conflict when one is on record meanwhile."""
        if not instances:
            return
        await self._transaction.statement()
        ordered = sorted(instances, key=lambda instance: instance.uuid)
        await self._transaction.lock([("instance", instance.uuid) for instance in ordered])
        if any(instance.uuid in self._table.instances for instance in ordered):
            raise Conflict
        await self._write(ordered)

    async def update(self, instances: Sequence[Instance]) -> None:
        """Write the new state of locked instances."""
        if instances:
            await self._transaction.statement()
            await self._write(instances)

    async def rely_on(
        self, hosts: Sequence[str], stale: Mapping[str, Sequence[str]], at: float, proofs: Sequence[str] = ()
    ) -> bool:
        """Hold the fences of these hosts until the end, and count what is stale there."""
        return await rely_on(MemoryKeyedRows(self._table, self._transaction, self._seen), hosts, stale, at, proofs)

    async def send_later(self, outgoing: Sequence[OutboxMessage]) -> Sequence[int]:
        """Put messages into the outbox; the rows for the relay."""
        self.rows = await self._transaction.send_later(outgoing)
        return self.rows

    async def _write(self, instances: Sequence[Instance]) -> None:
        _keep(self._table, self._transaction, instances)
        await _raise_sent(self._table, self._transaction, self._seen)
        if not is_same_database(self._table, self._seen):
            raise Unrecognised


class MemoryInstanceRows:
    """The rows below an optimistic transaction. One of these reads, another locks, compares and writes."""

    def __init__(self, table: MemoryInstanceTable, session: MemorySession, seen: DatabaseIdentity) -> None:
        self._table = table
        self._session = session
        self._seen = seen

    async def read(self, keys: Collection[str]) -> Mapping[str, tuple[int, Instance]]:
        """Instances with the versions of their rows, without locks."""
        async with self._session.transaction():
            table = self._table
            return {
                uuid: (table.row_versions[_key(uuid)], table.instances[uuid])
                for uuid in sorted(keys)
                if uuid in table.instances
            }

    async def write(self, writes: InstanceWrites) -> Committed:
        """Write all of it or nothing. Raises PreconditionFailed: another transaction was first."""
        table = self._table
        async with self._session.transaction() as transaction:
            transaction.durable = writes.durable
            if not is_same_database(table, self._seen) or table.recovers:
                raise PreconditionFailed
            if writes.message_ids:
                fresh = await transaction.first_time(HANDLER, writes.message_ids)
                if len(fresh) != len(writes.message_ids):
                    raise PreconditionFailed
            if not {uuid for _, uuid in table.unknown_machines}.isdisjoint(writes.explained):
                raise PreconditionFailed
            await transaction.lock([_key(uuid) for uuid in sorted(writes.versions)])
            if any(uuid not in table.instances for uuid in writes.versions):
                raise PreconditionFailed
            if any(table.row_versions[_key(uuid)] != version for uuid, version in writes.versions.items()):
                raise PreconditionFailed
            new = sorted(instance.uuid for instance in writes.inserts)
            await transaction.lock([_key(uuid) for uuid in new])
            if any(uuid in table.instances for uuid in new):
                raise PreconditionFailed
            _keep(table, transaction, [*writes.inserts, *writes.updates])
            if writes.durable:
                await _raise_sent(table, transaction, self._seen)
                if not is_same_database(table, self._seen):  # its counter was waited for
                    raise PreconditionFailed
            rows = await transaction.send_later(writes.outbox)
        return Committed(transaction.number, rows)


def _begin(table: MemoryInstanceTable, now: RecordedMarks, recovers: bool) -> None:
    table.ended_incarnations, table.incarnation = dict(now.ended), now.incarnation
    table.origin, table.recovers = table.place, recovers
    _await_acceptance(table, Losses())
    if not recovers:
        return
    table.absent = {}
    table.outbox.clear()
    table.breakers.clear()
    drop(table.unknown_machines, [key for key, one in table.unknown_machines.items() if one.decision != PROTECT])


def _await_acceptance(table: MemoryInstanceTable, losses: Losses) -> None:
    table.accepts, table.losses = False, losses


def _see(seen: DatabaseIdentity, marks: RecordedMarks, recovers: bool) -> None:
    seen.load(marks)
    seen.is_recovering = recovers


def _key(uuid: str) -> tuple[str, str]:
    return "instance", uuid


def _keep(table: MemoryInstanceTable, transaction: MemoryDatabaseTransaction, instances: Sequence[Instance]) -> None:
    if instances:
        rows = {instance.uuid: instance for instance in instances}
        transaction.will(lambda: table.instances.update(rows), *map(_key, rows))


async def _raise_sent(
    table: MemoryInstanceTable, transaction: MemoryDatabaseTransaction, seen: DatabaseIdentity
) -> None:
    slot = next((one for one in range(SENT_SLOTS) if transaction.is_free(("sent", one))), 0)
    await transaction.lock([("sent", slot)])
    incarnation = seen.incarnation

    def raise_sent() -> None:
        sequence = table.sent[slot] + 1
        table.sent = (*table.sent[:slot], sequence, *table.sent[slot + 1 :])
        seen.record_sent(DatabaseMark(incarnation, (*[0] * slot, sequence)))

    transaction.will(raise_sent)


class MemoryInstances(SeenStore):
    """One conductor's view of a cell's instances."""

    def __init__(self, session: MemorySession) -> None:
        super().__init__(session)
        assert isinstance(session.database, MemoryInstanceTable)
        self._table = session.database
        self._session = session
        self._cache: VersionCache[Instance] = VersionCache(session)
        self.outbox = MemoryRows(session)
        keyed = MemoryKeyed(session.database, session, self._seen)
        self.safety, self.leases, self.fences = Safety(keyed), LeaseStore(keyed), FenceStore(keyed)
        self.ready = False

    async def open(self) -> None:
        """Nothing to migrate."""
        self._seen.database_id = self._table.database_id
        self._seen.load(self._table.marks)
        self.ready = True

    async def close(self) -> None:
        """The connections are closed; the rows stay."""
        self.ready = False
        self._session.disconnect()

    async def has_due(self, now: float) -> bool:
        """As in PostgreSQL: a look without locks."""
        async with self._session.transaction() as transaction:
            await transaction.statement()
            deadlines = (one.deadline for one in self._table.instances.values())
            is_open = is_same_database(self._table, self._seen) and not self._table.recovers
            return self._seen.read is None or not is_open or any(at is not None and at <= now for at in deadlines)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[MemoryTransaction]:
        """Commits at the end, rolls back on an exception."""
        async with self._session.transaction() as transaction:
            yield MemoryTransaction(self._table, transaction, self._seen)

    def optimistic(self, new: Collection[str]) -> AbstractAsyncContextManager[OptimisticTransaction]:
        """On cached instances."""
        return OptimisticTransaction(MemoryInstanceRows(self._table, self._session, self._seen), self._cache, new)

    async def recorded_marks(self) -> RecordedMarks:
        """What the table has. One statement."""
        async with self._session.transaction():
            return self._table.marks

    async def summaries(self, host_uuids: Sequence[str], instance_uuids: Sequence[str]) -> list[InstanceSummary]:
        """The instances that should be on these hosts, and these instances in any state."""
        async with self._session.transaction() as transaction:
            await transaction.statement()
            hosts, named = frozenset(host_uuids), frozenset(instance_uuids)
            return [
                _summary(one, self._table)
                for one in self._table.instances.values()
                if one.uuid in named
                or (one.phase in EXPECTED_ON_CURRENT and one.host_uuid in hosts)
                or (one.source_host_uuid is not None and one.source_host_uuid in hosts)
            ]

    async def building_at(self, services: Sequence[str]) -> list[tuple[str, str]]:
        """The instances that these compute services were commanded to build."""
        async with self._session.transaction() as transaction:
            await transaction.statement()
            named = frozenset(services)
            return [
                (uuid, instance.service)
                for uuid, instance in sorted(self._table.instances.items())
                if instance.phase in ABANDONED_WITH_SERVICE and instance.service in named
            ]

    async def at_service(self, service: str, limit: int) -> list[str]:
        """The instances that have a machine at this compute service."""
        async with self._session.transaction() as transaction:
            await transaction.statement()
            fenced = self._table.fenced
            found = sorted(self._table.instances.items())
            return [uuid for uuid, instance in found if has_machine_at(instance, service, fenced)][:limit]

    async def uuids(self, after: str, last: str, limit: int) -> list[str]:
        """One statement."""
        async with self._session.transaction() as transaction:
            await transaction.statement()
            return [one for one in sorted(self._table.instances) if after < one and (not last or one <= last)][:limit]

    async def purge(self, phases: frozenset[Phase], before: float, limit: int) -> int:
        """Those that no transaction holds."""
        async with self._session.transaction() as transaction:
            await transaction.statement()
            instances = self._table.instances
            over = [i for i in instances.values() if i.phase in phases and i.since < before]
            gone = [i.uuid for i in over if transaction.is_free(("instance", i.uuid))][:limit]
            await transaction.lock([("instance", uuid) for uuid in sorted(gone)])
            transaction.will(partial(drop, instances, gone))
            return len(gone)


def _summary(instance: Instance, table: MemoryInstanceTable) -> InstanceSummary:
    protected = [
        host
        for (host, uuid), one in table.unknown_machines.items()
        if uuid == instance.uuid and one.decision == PROTECT
    ]
    summary = replace(convert(instance, InstanceSummary, from_attributes=True), protected_hosts=protected)
    return summary if instance.phase in ENDED_BY_FAILURE_OR_DELETE else replace(summary, code="")
