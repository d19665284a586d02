"""Build requests in memory: their rows, transactions that lock what they read, and the rows of optimistic ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import structlog
from msgspec.structs import replace

from bus.clock import CLOCKS_APART_S
from bus.contracts.actions import ActionKind, ActionState
from bus.contracts.base import DatabaseMark
from bus.contracts.build import BuildRecord, TimelineEntry
from bus.contracts.objects import ChangedObject, ObjectKind
from bus.persistence.guarded_statement import PreconditionFailed
from bus.persistence.memory_database import MemoryDatabase, MemoryDatabaseTransaction, MemorySession
from bus.persistence.outbox import OutboxMessage
from bus.persistence.unit_of_work import Committed
from scheduler_worker.records.action_record import ActionContext, RecordedAction, RequestKey
from scheduler_worker.records.build_record import BuildUpdate, NewBuild, RecordedBuild
from scheduler_worker.records.drain_record import BegunMoves, EndedRequest
from scheduler_worker.records.object_records import ChangeActor, RecordedObjects
from scheduler_worker.store.object_rows import MemoryObjects
from scheduler_worker.store.port import BuildWrites
from scheduler_worker.store.tables import appended

log = structlog.get_logger(__name__)

OBJECTS = ("objects", "")  # the key of operators' objects, which have one lock


class MemoryBuildTable(MemoryDatabase):
    """The committed requests and the instance-to-cell map; they outlive the schedulers."""

    ROWS = (
        *MemoryDatabase.ROWS,
        "records",
        "recorded",
        "requested",
        "actions",
        "objects",
        "marks",
    )

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self.records: dict[str, BuildRecord] = {}
        self.recorded: dict[str, RecordedBuild] = {}
        self.requested: dict[str, NewBuild] = {}
        self.actions: dict[str, tuple[RecordedAction, float]] = {}  # and when it was last written
        self.objects = MemoryObjects()
        self.marks: dict[str, DatabaseMark] = {}  # of each cell's database, the highest


def key_of(uuid: str) -> tuple[str, str]:
    """The key by which a build is locked and its versions are counted."""
    return "build", uuid


def insert_build(table: MemoryBuildTable, new: NewBuild, now: float) -> None:
    """Insert a row with all columns."""
    request = new.request
    uuid = request.instance_uuid
    table.requested[uuid] = new
    table.records[uuid] = BuildRecord(
        instance_uuid=uuid,
        project_id=request.project_id,
        flavor=request.flavor,
        name=request.name,
        state=new.build.state,
        created_at=now,
        updated_at=now,
        gang=new.gang.uuid if new.gang else None,
        gang_min_count=new.gang.min_count if new.gang else 0,
    )
    update_build(table, new.build, new.timeline, now)


def decide_build(table: MemoryBuildTable, decision: BuildUpdate, now: float) -> None:
    """Write a decision."""
    uuid = decision.build.instance_uuid
    update_build(table, decision.build, decision.timeline, now)
    table.records[uuid] = replace(table.records[uuid], funnel=decision.funnel)


def update_build(
    table: MemoryBuildTable, build: RecordedBuild, timeline: tuple[TimelineEntry, ...], now: float
) -> None:
    """Replace a build's record and append to its timeline."""
    record = table.records[build.instance_uuid]
    table.recorded[build.instance_uuid] = build
    table.records[build.instance_uuid] = replace(
        record,
        project_id=build.project_id,
        state=build.state,
        cell=build.cell,
        host=build.host,
        code=build.code,
        reason=build.reason,
        history=build.history,
        timeline=appended(record.timeline, timeline),
        updated_at=now,
    )


def delete(table: MemoryBuildTable, builds: Sequence[str], actions: Sequence[str]) -> None:
    """Delete builds with all that belongs to them, and actions."""
    for uuid in builds:
        for column in (table.records, table.recorded, table.requested):
            column.pop(uuid, None)
    for one in actions:
        table.actions.pop(one, None)


class MemoryUnit:
    """One transaction, which locks what it reads."""

    def __init__(self, table: MemoryBuildTable, transaction: MemoryDatabaseTransaction) -> None:
        self._table = table
        self._transaction = transaction
        self.outbox: list[OutboxMessage] = []
        self.rows: Sequence[int] = ()

    async def insert(self, builds: Sequence[NewBuild], now: float) -> set[str]:
        """In uuid order; an insert of a row that another transaction is inserting waits for its end."""
        if not builds:
            return set()
        await self._transaction.statement()
        new = {build.build.instance_uuid: build for build in builds}
        # It reads only rows that exist: an insert that meets a committed row does not wait.
        await self._lock([uuid for uuid in new if uuid not in self._table.recorded])
        fresh = {uuid: build for uuid, build in new.items() if uuid not in self._table.recorded}
        for uuid, build in fresh.items():
            self._transaction.will(partial(insert_build, self._table, build, now), key_of(uuid))
        return set(fresh)

    async def read(self, instances: Sequence[str]) -> dict[str, RecordedBuild]:
        """Without locks."""
        if not instances:
            return {}
        await self._transaction.statement()
        recorded = self._table.recorded
        return {uuid: recorded[uuid] for uuid in instances if uuid in recorded}

    async def write_decisions(self, decisions: Sequence[BuildUpdate], now: float) -> set[str]:
        """The guard is what makes two schedulers with the same request dispatch it once."""
        if not decisions:
            return set()
        await self._transaction.statement()
        recorded = self._table.recorded
        by_uuid = {one.build.instance_uuid: one for one in decisions}
        await self._lock([uuid for uuid in by_uuid if uuid in recorded])
        written = {
            uuid: one
            for uuid, one in sorted(by_uuid.items())
            if uuid in recorded
            and recorded[uuid].awaits_decision
            and recorded[uuid].claim_owner == one.build.claim_owner
        }
        for uuid, one in written.items():
            self._transaction.will(partial(decide_build, self._table, one, now), key_of(uuid))
        return set(written)

    async def lock(self, instances: Sequence[str]) -> dict[str, RecordedBuild]:
        """In uuid order."""
        await self._transaction.statement()
        found = sorted(uuid for uuid in set(instances) if uuid in self._table.recorded)
        await self._lock(found)
        return {uuid: self._table.recorded[uuid] for uuid in found}

    async def update(self, updates: Sequence[BuildUpdate], now: float) -> None:
        """Rows that this unit has locked."""
        if updates:
            await self._transaction.statement()
            for update in updates:
                key = key_of(update.build.instance_uuid)
                self._transaction.will(partial(update_build, self._table, update.build, update.timeline, now), key)

    def emit(self, message: OutboxMessage) -> None:
        """Kept until the end of the unit, in the outbox."""
        self.outbox.append(message)

    async def first_time(self, handler: str, message_id: str) -> bool:
        """Among the handled messages."""
        return bool(await self._transaction.first_time(handler, [message_id]))

    async def is_handled(self, handler: str, message_id: str) -> bool:
        """Among the handled messages."""
        return await self._transaction.is_handled(handler, message_id)

    async def known(self, requests: Collection[RequestKey], *, lock: bool = False) -> dict[RequestKey, ActionContext]:
        """By the instances' builds, locked in uuid order before anything else is read."""
        await self._transaction.statement()
        table = self._table
        if lock:
            await self._lock([uuid for uuid in set(chain(*requests)) if uuid in table.recorded])
        return {
            (one, uuid): ActionContext(
                action=table.actions[one][0] if one in table.actions else None,
                build=table.recorded.get(uuid),
                build_request=table.requested[uuid].request if uuid in table.requested else None,
                names_instance=one in table.recorded,
            )
            for one, uuid in requests
        }

    async def insert_actions(self, actions: Sequence[RecordedAction], now: float) -> set[str]:
        """In order of the ids; an insert of a row that another transaction is inserting waits for its end."""
        await self._transaction.statement()
        await self._transaction.lock([("action", one) for one in sorted(action.request_id for action in actions)])
        new = {one.request_id: (one, now) for one in actions if one.request_id not in self._table.actions}
        self._transaction.will(lambda: self._table.actions.update(new))
        return set(new)

    async def update_actions(self, actions: Sequence[RecordedAction], now: float) -> None:
        """The instances must be locked by this unit."""
        await self._transaction.statement()
        after = {one.request_id: (one, now) for one in actions}
        self._transaction.will(lambda: self._table.actions.update(after))

    async def lock_objects(self) -> RecordedObjects:
        """All of them have one lock."""
        await self._transaction.statement()
        await self._transaction.lock([OBJECTS])
        return self._table.objects.present

    async def write_objects(self, changed: Sequence[ChangedObject], actor: ChangeActor) -> str:
        """Their one lock is held by this unit."""
        await self._transaction.statement()
        after = self._table.objects.changed(changed, actor)
        self._transaction.will(partial(setattr, self._table, "objects", after), OBJECTS)
        return after.present.token

    async def lock_object(self, kind: ObjectKind, name: str) -> dict[str, Any] | None:
        """By its name."""
        await self._transaction.statement()
        await self._transaction.lock([(kind.value, name)])
        stored = self._table.objects.present.objects.get((kind, name))
        return None if stored is None else stored.body

    async def begun(self, drain: str | None, now: float) -> BegunMoves:
        """A scan."""
        await self._transaction.statement()
        made = [one for one, _ in self._table.actions.values() if one.drain is not None]
        if drain is None:
            return BegunMoves(sum(one.kind is ActionKind.EVACUATE and not one.terminal for one in made))
        found = [one for one in made if one.drain == drain]
        made_at = [one.created_at for one in found if one.created_at <= now + CLOCKS_APART_S]
        return BegunMoves(sum(not one.terminal for one in found), max(made_at, default=0.0))

    async def ended(self, instances: Collection[str], limit: int) -> dict[str, list[EndedRequest]]:
        """A scan."""
        await self._transaction.statement()
        found: dict[str, list[EndedRequest]] = {}
        rows = self._table.actions.values()
        for one, at in sorted(rows, key=lambda row: (row[0].created_at, row[0].request_id), reverse=True):
            if one.terminal and one.instance_uuid in instances:
                fields = {name: getattr(one, name) for name in EndedRequest.__struct_fields__ if hasattr(one, name)}
                found.setdefault(one.instance_uuid, []).append(EndedRequest(**fields, updated_at=at))
        return {uuid: of[:limit] for uuid, of in found.items()}

    async def newest(self, drain: str, limit: int) -> list[RecordedAction]:
        """A scan."""
        await self._transaction.statement()
        made = [one for one, _ in self._table.actions.values() if one.drain == drain]
        found = {one.instance_uuid: one for one in sorted(made, key=lambda one: (one.created_at, one.request_id))}
        return [found[uuid] for uuid in sorted(found)[:limit]]

    async def moved_counts(self, drains: Collection[str]) -> dict[tuple[str, bool], int]:
        """A scan."""
        await self._transaction.statement()
        found = {
            (one.drain, one.terminal, one.instance_uuid)
            for one, _ in self._table.actions.values()
            if one.drain is not None and one.drain in drains and (one.state is ActionState.DONE or not one.terminal)
        }
        return Counter((drain, ended) for drain, ended, _ in found)

    async def _lock(self, uuids: Collection[str]) -> None:
        await self._transaction.lock([key_of(uuid) for uuid in sorted(uuids)])


class MemoryBuildRows:
    """The rows below an optimistic unit: a transaction that reads, and one that locks, compares and writes."""

    def __init__(self, table: MemoryBuildTable, session: MemorySession) -> None:
        self._table = table
        self._session = session

    async def read(self, keys: Collection[str]) -> Mapping[str, tuple[int, RecordedBuild]]:
        """Records with the versions of their rows, without locks."""
        async with self._session.transaction():
            table = self._table
            return {
                uuid: (table.row_versions[key_of(uuid)], table.recorded[uuid])
                for uuid in sorted(keys)
                if uuid in table.recorded
            }

    async def write(self, writes: BuildWrites) -> Committed:
        """Write all of it or nothing."""
        with self._session.flush_by_commit() as commit:
            written = await self._write(writes)
            if writes.durable:
                commit.is_done = True
        return written

    async def _write(self, writes: BuildWrites) -> Committed:
        versions = self._table.row_versions
        async with self._session.transaction() as transaction:
            transaction.durable = writes.durable
            unit = MemoryUnit(self._table, transaction)
            if len(await unit.insert(writes.inserts, writes.at)) != len(writes.inserts):
                raise PreconditionFailed
            if len(await unit.write_decisions(writes.decisions, writes.at)) != len(writes.decisions):
                raise PreconditionFailed
            if writes.versions and len(await unit.lock(list(writes.versions))) != len(writes.versions):
                raise PreconditionFailed
            if any(versions[key_of(uuid)] != version for uuid, version in writes.versions.items()):
                raise PreconditionFailed
            await unit.update(writes.updates, writes.at)
            rows = await transaction.send_later(writes.outbox)
        return Committed(transaction.number, rows)
