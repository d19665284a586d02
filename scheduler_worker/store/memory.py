"""Build requests in memory: for simulation and tests. It passes the same suite as PostgreSQL (tests/contract)."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial

from msgspec import convert
from msgspec.structs import replace

from bus.contracts.actions import ActionQuery, ActionRecord, ActionState, Condition
from bus.contracts.base import DatabaseMark
from bus.contracts.build import ENDED_WITHOUT_MACHINE, BuildQuery, BuildRecord, BuildRequest, BuildState
from bus.contracts.objects import ObjectLogEntry, ObjectLogQuery
from bus.persistence.memory_database import MemoryRows, MemorySession
from scheduler_worker.records.action_record import RecordedAction
from scheduler_worker.records.build_record import (
    MAY_HAVE_NO_HOST,
    OPEN,
    NewBuild,
    as_it_is,
    flavors_in_use,
    is_search,
    present_flavor,
)
from scheduler_worker.records.object_records import RecordedObjects
from scheduler_worker.store import tables
from scheduler_worker.store.memory_units import MemoryBuildRows, MemoryBuildTable, MemoryUnit, delete, key_of
from scheduler_worker.store.port import (
    FIRST_UUID,
    MAX_EXAMINED,
    CellInstances,
    OpenBuilds,
    ProjectsGroup,
    Purged,
    UnitStore,
    WithoutHost,
)


class MemoryBuilds(UnitStore):
    """One scheduler's view of the requests."""

    def __init__(self, session: MemorySession) -> None:
        assert isinstance(session.database, MemoryBuildTable)
        self._table = session.database
        super().__init__(session, MemoryBuildRows(self._table, session))
        self._session = session
        self.outbox = MemoryRows(session)
        self.database_id = session.database.database_id
        self.ready = False

    async def open(self) -> None:
        """Nothing to migrate."""
        self.ready = True

    async def close(self) -> None:
        """The connections are cut; the rows stay."""
        self.ready = False
        self._session.disconnect()

    @asynccontextmanager
    async def locking(self, durable: bool) -> AsyncIterator[MemoryUnit]:
        """One transaction."""
        async with self._session.transaction() as transaction:
            transaction.durable = durable
            unit = MemoryUnit(self._table, transaction)
            yield unit
            unit.rows = await transaction.send_later(unit.outbox)

    async def objects(self, unless: str | None = None) -> RecordedObjects | None:
        """Without a lock."""
        async with self._session.transaction():
            present = self._table.objects.present
            return None if present.token == unless else present

    async def object_log(self, query: ObjectLogQuery) -> list[ObjectLogEntry]:
        """Without a lock."""
        async with self._session.transaction():
            return self._table.objects.log(query)

    async def machines(
        self, limit: int, *, flavor: str | None = None, group: ProjectsGroup | None = None, cell: str | None = None
    ) -> int:
        """A scan."""
        async with self._session.transaction():
            coming = {
                action.instance_uuid: (action.transfer.home, action.transfer.away)
                for action, _ in self._table.actions.values()
                if not action.terminal and action.transfer is not None
            }
            found = [
                uuid
                for uuid, build in self._table.recorded.items()
                if build.state not in ENDED_WITHOUT_MACHINE
                and flavor in (None, *flavors_in_use(self._table.records[uuid].flavor, build.instance))
                and group in (None, _group_of(self._table.requested[uuid].request))
                and cell in (None, build.cell, *coming.get(uuid, ()))
            ]
            return min(len(found), limit)

    async def without_host(self, projects: Sequence[str]) -> list[WithoutHost]:
        """A scan."""
        async with self._session.transaction():
            found = Counter(
                (
                    build.project_id,
                    build.current.condition,
                    present_flavor(self._table.records[uuid].flavor, build.instance),
                )
                for uuid, build in self._table.recorded.items()
                if build.project_id in projects
                and build.state is BuildState.ACTIVE
                and build.current.condition in MAY_HAVE_NO_HOST
                and build.host is None
            )
            return [WithoutHost(*key, count) for key, count in found.items()]

    async def purge(self, before: float, limit: int, start_at: float = 0.0) -> Purged:
        """The records that no transaction holds."""
        table = self._table
        async with self._session.transaction() as transaction:
            await transaction.statement()
            over = [
                record
                for record in sorted(table.records.values(), key=lambda record: record.created_at)
                if record.created_at >= start_at
                and record.updated_at < before
                and record.state in ENDED_WITHOUT_MACHINE
            ]
            gone = [one for one in over if transaction.is_free(key_of(one.instance_uuid))][:limit]
            await transaction.lock([key_of(uuid) for uuid in sorted(one.instance_uuid for one in gone)])
            resized = {uuid for uuid, build in table.recorded.items() if build.current.condition is Condition.RESIZED}
            actions = [
                one.request_id
                for one, at in sorted(table.actions.values(), key=lambda kept: kept[0].created_at)
                if one.terminal and one.created_at < before and at < before and one.instance_uuid not in resized
            ][:limit]
            transaction.will(partial(delete, table, [one.instance_uuid for one in gone], actions))
            return Purged(len(gone), len(actions), gone[-1].created_at if gone else start_at)

    async def actions(self, query: ActionQuery) -> list[ActionRecord]:
        """One request, or a page of them, newest first."""
        async with self._session.transaction():
            found = [
                replace(convert(action, ActionRecord, from_attributes=True), updated_at=at)
                for action, at in self._table.actions.values()
                if query.request_id in (None, action.request_id)
                and query.instance_uuid in (None, action.instance_uuid)
                and query.project_id in (None, action.project_id)
                and query.under_way in (None, not action.terminal)
            ]
        return sorted(found, key=lambda record: record.created_at, reverse=True)[: query.limit]

    async def open_actions(self, after: str, limit: int) -> list[RecordedAction]:
        """A scan."""
        async with self._session.transaction():
            found = [
                action for action, _ in self._table.actions.values() if not action.terminal and action.cell is not None
            ]
        return sorted((one for one in found if one.request_id > after), key=lambda one: one.request_id)[:limit]

    async def open_builds(
        self, watched: Collection[str], after: tuple[float, str], unchanged_since: float, limit: int
    ) -> OpenBuilds:
        """A scan."""
        table = self._table
        async with self._session.transaction():
            page = [one for one in sorted(map(_newest, table.records.values())) if one > after][:limit]
            old = [uuid for _, uuid in page if table.records[uuid].updated_at < unchanged_since]
            found = [
                build
                for uuid in sorted({*watched, *old})
                if (build := table.recorded.get(uuid)) is not None and build.state in OPEN
            ]
        return OpenBuilds(found, page[-1] if len(page) == limit else None)

    async def in_cell(self, cell: str, after: str, limit: int) -> CellInstances:
        """A scan."""
        async with self._session.transaction():
            page = sorted(uuid for uuid in self._table.recorded if uuid > after)[:MAX_EXAMINED]
            builds = (self._table.recorded[uuid] for uuid in page)
            found = [one.instance_uuid for one in builds if one.cell == cell and one.state not in ENDED_WITHOUT_MACHINE]
        if len(found) >= limit:
            return CellInstances(found[:limit], found[limit - 1])
        return CellInstances(found, page[-1] if len(page) == MAX_EXAMINED else "")

    async def raise_mark(self, cell: str, mark: DatabaseMark) -> int:
        """One transaction."""
        async with self._session.transaction() as transaction:
            transaction.durable = False  # it is heard again
            await transaction.lock([("cell", cell)])
            highest = mark.joined(self._table.marks.get(cell, DatabaseMark()))
            transaction.will(partial(self._table.marks.update, {cell: highest}))
        return highest.database_incarnation

    async def mark_of(self, cell: str) -> DatabaseMark:
        """One transaction."""
        async with self._session.transaction():
            return self._table.marks.get(cell, DatabaseMark())

    async def actions_of(self, instances: Sequence[str], limit: int) -> dict[str, list[RecordedAction]]:
        """A scan."""
        async with self._session.transaction():
            actions = sorted((one for one, _ in self._table.actions.values()), key=lambda one: -one.created_at)
        found: dict[str, list[RecordedAction]] = {}
        for one in actions:
            if one.instance_uuid in instances:
                found.setdefault(one.instance_uuid, []).append(one)
        newest = {uuid: recorded[:MAX_EXAMINED] for uuid, recorded in found.items()}
        taken = {uuid: [one for one in them if one.state is not ActionState.REFUSED] for uuid, them in newest.items()}
        return {uuid: recorded[:limit] for uuid, recorded in taken.items() if recorded}

    async def requests_of(self, instances: Sequence[str]) -> list[NewBuild]:
        """A scan."""
        table = self._table
        async with self._session.transaction():
            gangs = {table.records[uuid].gang for uuid in instances if uuid in table.records}
            members = [one for one in table.records.values() if _is_of(one, instances, gangs)]
            members.sort(
                key=lambda one: (one.gang or one.instance_uuid, one.instance_uuid != one.gang, one.instance_uuid)
            )
            sizes = Counter(one.gang for one in members)
            found = []
            for one in members:
                new = table.requested[one.instance_uuid]
                gang = new.gang and replace(new.gang, size=sizes[one.gang])
                build = table.recorded[one.instance_uuid]
                found.append(replace(new, build=build, gang=gang, created_at=one.created_at))
            return found

    async def active_on(self, hosts: Sequence[str], limit: int, *, after: str = FIRST_UUID) -> list[str]:
        """A scan."""
        async with self._session.transaction():
            return sorted(
                uuid
                for uuid, build in self._table.recorded.items()
                if build.host_uuid in hosts and build.state is BuildState.ACTIVE and uuid > after
            )[:limit]

    async def builds(self, query: BuildQuery) -> list[BuildRecord]:
        """One build, or a page of them, newest first."""
        async with self._session.transaction():
            found = self._of_query(query)[: tables.MAX_SEARCHED if is_search(query) else query.limit]
            found = [as_it_is(record, self._table.recorded[record.instance_uuid].instance) for record in found]
        return [
            record
            for record in found
            if query.cell in (None, record.cell)
            and query.host in (None, record.host)
            and query.flavor in (None, record.flavor)
            and query.code in (None, record.code)
            and (query.name in (None, record.name) or record.instance_uuid.startswith(query.name or ""))
        ][: query.limit]

    async def count_builds(self, query: BuildQuery, most: int) -> int:
        """How many builds such a query has on all its pages, at most `most`; of no search."""
        async with self._session.transaction():
            return min(len(self._of_query(query)), most)

    async def builds_named(self, instances: Sequence[str]) -> dict[str, BuildRecord]:
        """The builds that are on record."""
        async with self._session.transaction():
            records, recorded = self._table.records, self._table.recorded
            return {uuid: as_it_is(records[uuid], recorded[uuid].instance) for uuid in instances if uuid in records}

    async def searched_to(self, query: BuildQuery) -> tuple[float, str] | None:
        """The last build that such a search looks at, and when it was requested; None: it looks at all."""
        async with self._session.transaction():
            found = self._of_query(query)
        return _newest(found[tables.MAX_SEARCHED - 1]) if len(found) >= tables.MAX_SEARCHED else None

    def _of_query(self, query: BuildQuery) -> list[BuildRecord]:
        """Newest first, by what PostgreSQL has indexes for."""
        found = [
            record
            for record in self._table.records.values()
            if query.instance_uuid in (None, record.instance_uuid)
            and query.project_id in (None, record.project_id)
            and query.state in (None, record.state)
            and (query.before is None or _newest(record) < (query.before, query.before_instance or ""))
            and (query.after is None or record.created_at >= query.after)
            and query.gang in (None, record.gang)
        ]
        return sorted(found, key=_newest, reverse=True)


def _newest(record: BuildRecord) -> tuple[float, str]:
    """The order of a page, backwards: several builds may have been requested at one time."""
    return record.created_at, record.instance_uuid


def _is_of(one: BuildRecord, instances: Collection[str], gangs: Collection[str | None]) -> bool:
    return one.instance_uuid in instances or (one.gang is not None and one.gang in gangs)


def _group_of(request: BuildRequest) -> ProjectsGroup | None:
    return None if request.server_group is None else (request.project_id, request.server_group.uuid)
