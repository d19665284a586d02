"""The store on PostgreSQL: a few set-based statements a batch, whatever its size."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import chain

import asyncpg
import structlog

from bus.contracts.actions import ActionQuery, ActionRecord, ActionState, Condition
from bus.contracts.base import DatabaseMark
from bus.contracts.build import ENDED_WITHOUT_MACHINE, BuildQuery, BuildRecord, BuildState
from bus.contracts.objects import ObjectLogEntry, ObjectLogQuery
from bus.persistence import outbox
from bus.persistence.database import Database, read_identity
from bus.persistence.guarded_statement import Conflict, GuardedStatement
from bus.persistence.marks import raise_mark, read_mark
from bus.persistence.outbox import OutboxMessage, PostgresRows
from bus.persistence.tables import fetch
from bus.persistence.unit_of_work import Committed, VersionCache
from scheduler_worker.records.action_record import ActionContext, RecordedAction, RequestKey
from scheduler_worker.records.build_record import OPEN, BuildUpdate, NewBuild, RecordedBuild, is_search
from scheduler_worker.records.object_records import RecordedObjects
from scheduler_worker.store import object_rows as objects
from scheduler_worker.store import tables
from scheduler_worker.store.port import (
    FIRST_UUID,
    MAX_EXAMINED,
    BuildWrites,
    CellInstances,
    OpenBuilds,
    ProjectsGroup,
    Purged,
    UnitStore,
    WithoutHost,
)

log = structlog.get_logger(__name__)

MIGRATIONS = "scheduler_worker.store.migrations"

INSERT = tables.numbered(tables.INSERT)
DECIDE = tables.numbered(tables.DECIDE)
UPDATE = tables.numbered(tables.UPDATE)
INSERT_ACTIONS = tables.numbered(tables.INSERT_ACTIONS)
UPDATE_ACTIONS = tables.numbered(tables.UPDATE_ACTIONS)

READ_VERSIONS = f"SELECT xmin, {tables.BUILD} FROM build_requests WHERE instance_uuid = ANY($1::uuid[])"

# The order does not depend on the plan that an UPDATE gets: for a large batch it may scan the table, and lock in that
# order.
LOCK_ONLY = "SELECT FROM build_requests WHERE instance_uuid = ANY($1::uuid[]) ORDER BY instance_uuid FOR UPDATE"

READ = f"SELECT {tables.BUILD} FROM build_requests WHERE instance_uuid = ANY($1::uuid[])"
LOCK = f"{READ} ORDER BY instance_uuid FOR UPDATE"

# Along an index, whose order is that of the answer; builds that were requested together have one time. For a column
# without an index a bounded number of builds is examined.
OF_QUERY = """
SELECT * FROM build_requests
WHERE ($1::uuid IS NULL OR instance_uuid = $1) AND ($2::text IS NULL OR project_id = $2)
  AND ($3::text IS NULL OR state = $3)
  AND ($4::double precision IS NULL OR created_at <= $4 AND (created_at < $4 OR instance_uuid < $7::uuid))
  AND ($5::double precision IS NULL OR created_at >= $5) AND ($6::uuid IS NULL OR gang = $6)
ORDER BY created_at DESC, instance_uuid DESC
"""
BUILDS = f"""
SELECT {tables.RECORD} FROM ({OF_QUERY} LIMIT $8) b
WHERE ($10::text IS NULL OR cell = $10) AND ($11::text IS NULL OR host = $11)
  AND ($12::text IS NULL OR {tables.FLAVOR} = $12) AND ($13::text IS NULL OR code = $13)
  AND ($14::text IS NULL OR name = $14 OR starts_with(instance_uuid::text, $14))
ORDER BY created_at DESC, instance_uuid DESC LIMIT $9
"""
BUILDS_NAMED = f"SELECT {tables.RECORD} FROM build_requests WHERE instance_uuid = ANY($1::uuid[])"
SEARCHED_TO = f"SELECT created_at, instance_uuid::text FROM ({OF_QUERY} OFFSET $8 - 1 LIMIT 1) b"

COUNT = f"SELECT count(*) FROM ({OF_QUERY} LIMIT $8) b"


# Along the index on created_at: an index on a column that changes would make every write of a build dearer. Builds that
# live long are passed over, once a pass.
PURGE = f"""
WITH gone AS (
    DELETE FROM build_requests WHERE instance_uuid IN (
        SELECT instance_uuid FROM build_requests
        WHERE created_at >= $3 AND created_at < $1 AND updated_at < $1 AND state = ANY($4::text[])
        ORDER BY created_at LIMIT $2 FOR UPDATE SKIP LOCKED)
    RETURNING instance_uuid, created_at
), moved AS (
    DELETE FROM instance_actions WHERE request_id IN (
        SELECT request_id FROM instance_actions WHERE created_at < $1 AND updated_at < $1 AND terminal AND NOT EXISTS (
            SELECT FROM build_requests b
            WHERE b.instance_uuid = instance_actions.instance_uuid
                AND b.instance::json ->> 'condition' = '{Condition.RESIZED}')
        ORDER BY created_at LIMIT $2 FOR UPDATE SKIP LOCKED)
    RETURNING request_id
)
SELECT count(*), (SELECT count(*) FROM moved), coalesce(max(created_at), $3) FROM gone
"""

WITHOUT_HOST = f"""
SELECT project_id, instance::json ->> 'condition', {tables.FLAVOR}, count(*)
FROM build_requests
WHERE project_id = ANY($1::text[]) AND {tables.IS_MAYBE_HOSTLESS} AND host IS NULL AND state = '{BuildState.ACTIVE}'
GROUP BY 1, 2, 3
"""
ACTIVE_ON = """
SELECT instance_uuid FROM build_requests
WHERE host_uuid = ANY($1::uuid[]) AND state = 'active' AND instance_uuid > $3
ORDER BY instance_uuid LIMIT $2
"""
# One statement sees one state: nothing that is purged meanwhile makes the page end behind what it has looked at.
IN_CELL = """
WITH page AS MATERIALIZED (SELECT ARRAY(
    SELECT instance_uuid::text FROM (
        SELECT instance_uuid, cell, state FROM build_requests WHERE instance_uuid > $1 ORDER BY instance_uuid LIMIT $2
    ) b WHERE cell = $3 AND state <> ALL($4::text[]) ORDER BY instance_uuid LIMIT $5
) AS found)
SELECT found, CASE WHEN cardinality(found) < $5 THEN (
    SELECT instance_uuid::text FROM build_requests WHERE instance_uuid > $1 ORDER BY instance_uuid OFFSET $2 - 1 LIMIT 1
) ELSE found[$5] END FROM page
"""
NEWEST_ACTIONS = f"""
SELECT {tables.ACTION} FROM unnest($1::uuid[]) named(uuid) CROSS JOIN LATERAL (
    SELECT * FROM (SELECT * FROM instance_actions WHERE instance_uuid = named.uuid
        ORDER BY created_at DESC LIMIT $2) newest
    WHERE state <> $3 ORDER BY created_at DESC LIMIT $4) m
"""
ACTIONS_OF = f"SELECT {tables.ACTION} FROM instance_actions WHERE request_id = ANY($1::uuid[])"
OPEN_ACTIONS = f"""
SELECT {tables.ACTION} FROM instance_actions WHERE NOT terminal AND cell IS NOT NULL AND request_id > $1
ORDER BY request_id LIMIT $2
"""
# Along the index on created_at, as PURGE: an index on the state would make every write of a build dearer.
OLD_BUILDS = """
WITH page AS MATERIALIZED (
    SELECT created_at, instance_uuid, state, updated_at FROM build_requests
    WHERE created_at >= $1 AND (created_at > $1 OR instance_uuid > $2) ORDER BY created_at, instance_uuid LIMIT $3)
SELECT created_at, instance_uuid, (SELECT count(*) FROM page),
    ARRAY(SELECT instance_uuid FROM page WHERE state = ANY($5::text[]) AND updated_at < $4)
FROM page ORDER BY created_at DESC, instance_uuid DESC LIMIT 1
"""
OPEN_BUILDS = f"""
SELECT {tables.BUILD} FROM build_requests
WHERE instance_uuid = ANY($1::uuid[]) AND state = ANY($2::text[]) ORDER BY instance_uuid
"""
REQUESTS_OF = f"""
SELECT {tables.BUILD}, request, gang, gang_min_count, created_at, count(*) OVER (PARTITION BY gang) AS size
FROM build_requests WHERE instance_uuid = ANY($1::uuid[])
   OR gang IN (SELECT gang FROM build_requests WHERE instance_uuid = ANY($1::uuid[]) AND gang IS NOT NULL)
ORDER BY gang NULLS FIRST, instance_uuid <> gang, instance_uuid
"""
IS_HANDLED = "SELECT EXISTS (SELECT FROM handled WHERE handler = $1 AND message_id = $2)"


class PostgresBuildRows:
    """The rows outside of any transaction; the version of a row is its xmin, the id of its writer."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def read(self, keys: Collection[str]) -> Mapping[str, tuple[int, RecordedBuild]]:
        """Records with the versions of their rows, without locks."""
        async with self._database.single() as connection:
            found = await connection.fetch(READ_VERSIONS, keys)
        return {row["instance_uuid"]: (row["xmin"], tables.read(row, RecordedBuild)) for row in found}

    async def write(self, writes: BuildWrites) -> Committed:
        """Write all of it or nothing, in one statement. Raises Conflict."""
        statement, now = GuardedStatement(), writes.at
        if writes.inserts:
            inserts = sorted(writes.inserts, key=lambda new: new.build.instance_uuid)
            statement.expect(tables.ARE_NEW, [new.build.instance_uuid for new in inserts])
            statement.add("inserted", tables.INSERT, *await tables.insert_columns(inserts), now, rows=len(inserts))
        if writes.decisions:
            decisions = sorted(writes.decisions, key=lambda one: one.build.instance_uuid)
            statement.add("decided", tables.DECIDE, *await tables.decide_columns(decisions), now, rows=len(decisions))
        updates = writes.updates
        guard = statement.hold("build_requests", "instance_uuid", writes.versions, updates=len(updates))
        if updates:
            columns = await tables.update_columns(updates)
            statement.add("updated", f"{tables.UPDATE} AND {guard} RETURNING 1", *columns, now, rows=len(updates))
        outbox.add_to(statement, writes.outbox)
        statement.column("pg_current_xact_id()::xid AS version")
        async with self._database.single() as connection:
            if writes.versions and self._database.connection_losses != writes.connection_losses:
                raise Conflict
            with self._database.flush_by_commit(connection) as commit:
                written = await statement.execute(connection, durable=writes.durable)
                if writes.durable:
                    commit.is_done = True
        return Committed(written["version"], written["outbox_rows"])


class PostgresUnit(objects.ObjectRows):
    """One transaction on one connection, which locks what it reads."""

    def __init__(self, connection: asyncpg.Connection, cache: VersionCache[RecordedBuild]) -> None:
        super().__init__(connection)
        self._cache = cache
        self.outbox: list[OutboxMessage] = []
        self.rows: Sequence[int] = ()

    async def insert(self, builds: Sequence[NewBuild], now: float) -> set[str]:
        """In uuid order, so that two schedulers with the same requests never deadlock."""
        if not builds:
            return set()
        ordered = sorted(builds, key=lambda new: new.build.instance_uuid)
        return {row[0] for row in await self._connection.fetch(INSERT, *await tables.insert_columns(ordered), now)}

    async def read(self, instances: Sequence[str]) -> dict[str, RecordedBuild]:
        """Without locks."""
        if not instances:
            return {}
        found = await self._connection.fetch(READ, instances)
        return {row["instance_uuid"]: tables.read(row, RecordedBuild) for row in found}

    async def write_decisions(self, decisions: Sequence[BuildUpdate], now: float) -> set[str]:
        """The guard in the statement is what makes two schedulers with the same request dispatch it once.

        The rows are locked in uuid order first, so that those two never deadlock.
        """
        if not decisions:
            return set()
        ordered = sorted(decisions, key=lambda one: one.build.instance_uuid)
        if len(ordered) > 1:
            await self._connection.execute(LOCK_ONLY, [one.build.instance_uuid for one in ordered])
        written = {row[0] for row in await self._connection.fetch(DECIDE, *await tables.decide_columns(ordered), now)}
        self._cache.invalidate(written)
        return written

    async def lock(self, instances: Sequence[str]) -> dict[str, RecordedBuild]:
        """In uuid order."""
        found = await self._connection.fetch(LOCK, sorted(set(instances)))
        return {row["instance_uuid"]: tables.read(row, RecordedBuild) for row in found}

    async def update(self, updates: Sequence[BuildUpdate], now: float) -> None:
        """Rows that this unit has locked."""
        if updates:
            self._cache.invalidate([update.build.instance_uuid for update in updates])
            await self._connection.execute(UPDATE, *await tables.update_columns(updates), now)

    def emit(self, message: OutboxMessage) -> None:
        """Kept for the end, in the outbox."""
        self.outbox.append(message)

    async def first_time(self, handler: str, message_id: str) -> bool:
        """In the table of handled messages."""
        return bool(await outbox.first_time(self._connection, handler, [message_id]))

    async def is_handled(self, handler: str, message_id: str) -> bool:
        """In the table of handled messages."""
        return bool(await self._connection.fetchval(IS_HANDLED, handler, message_id))

    async def known(self, requests: Collection[RequestKey], *, lock: bool = False) -> dict[RequestKey, ActionContext]:
        """By the instances' builds, locked in uuid order before anything else is read."""
        uuids = sorted(set(chain(*requests)))
        # A request_id that is the uuid of an instance is found with it.
        builds = await self._connection.fetch(
            f"SELECT {tables.BUILD}, request FROM build_requests WHERE instance_uuid = ANY($1::uuid[]) "
            f"ORDER BY instance_uuid{' FOR UPDATE' if lock else ''}",
            uuids,
        )
        actions = await self._connection.fetch(ACTIONS_OF, [one for one, _ in requests])
        build_of = {row["instance_uuid"]: row for row in builds}
        action_of = {row["request_id"]: tables.read(row, RecordedAction) for row in actions}
        return {
            (one, uuid): ActionContext(
                action=action_of.get(one),
                build=tables.read(build_of[uuid], RecordedBuild) if uuid in build_of else None,
                build_request=tables.build_request(build_of[uuid]["request"]) if uuid in build_of else None,
                names_instance=one in build_of,
            )
            for one, uuid in requests
        }

    async def insert_actions(self, actions: Sequence[RecordedAction], now: float) -> set[str]:
        """In order of the ids, so that two schedulers with the same requests never deadlock."""
        ordered = sorted(actions, key=lambda action: action.request_id)
        found = await self._connection.fetch(INSERT_ACTIONS, *tables.columns(ordered, tables.ACTIONS, now))
        return {row[0] for row in found}

    async def update_actions(self, actions: Sequence[RecordedAction], now: float) -> None:
        """The columns that a cell can change."""
        if actions:
            await self._connection.execute(UPDATE_ACTIONS, *tables.columns(actions, tables.EVENT_COLUMNS, now))


class PostgresBuilds(UnitStore):
    """Schema `scheduler` of one database."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, PostgresBuildRows(database))
        self._database = database
        self.outbox = PostgresRows(database)
        self.database_id = ""

    @property
    def ready(self) -> bool:
        """Whether it is open."""
        return self._database.ready

    async def open(self) -> None:
        """Migrate, and read the identity of the database. Waits for a database that is unavailable."""
        await self._database.open(MIGRATIONS)
        self.database_id = await read_identity(self._database)

    async def close(self) -> None:
        """Close the pool."""
        await self._database.close()

    @asynccontextmanager
    async def locking(self, durable: bool) -> AsyncIterator[PostgresUnit]:
        """One transaction."""
        async with self._database.raw() as connection:
            if not durable:
                await connection.execute("SET LOCAL synchronous_commit = off")
            unit = PostgresUnit(connection, self._cache)
            yield unit
            unit.rows = await outbox.add(connection, unit.outbox)

    async def objects(self, unless: str | None = None) -> RecordedObjects | None:
        """One row when the token is `unless`."""
        async with self._database.raw() as connection:
            return await objects.read(connection, unless)

    async def object_log(self, query: ObjectLogQuery) -> list[ObjectLogEntry]:
        """Along the primary key."""
        async with self._database.raw() as connection:
            return objects.entries(await fetch(connection, objects.log_of(query)))

    async def machines(
        self, limit: int, *, flavor: str | None = None, group: ProjectsGroup | None = None, cell: str | None = None
    ) -> int:
        """A scan that ends at the limit."""
        async with self._database.raw() as connection:
            ((found,),) = await fetch(connection, objects.machines(limit, flavor, group, cell))
        return int(found)

    async def without_host(self, projects: Sequence[str]) -> list[WithoutHost]:
        """Along the index of them."""
        async with self._database.raw() as connection:
            rows = await connection.fetch(WITHOUT_HOST, projects)
        return [WithoutHost(project, Condition(condition), *more) for project, condition, *more in rows]

    async def purge(self, before: float, limit: int, start_at: float = 0.0) -> Purged:
        """One bounded statement."""
        states = [state.value for state in ENDED_WITHOUT_MACHINE]
        async with self._database.raw() as connection:
            row = await connection.fetchrow(PURGE, before, limit, start_at, states)
        return Purged(*row)

    async def actions(self, query: ActionQuery) -> list[ActionRecord]:
        """Along the index that suits the query."""
        async with self._database.raw() as connection:
            return [tables.read(row, ActionRecord) for row in await fetch(connection, objects.actions_of(query))]

    async def open_actions(self, after: str, limit: int) -> list[RecordedAction]:
        """Along the index of those under way."""
        async with self._database.raw() as connection:
            return [tables.read(row, RecordedAction) for row in await connection.fetch(OPEN_ACTIONS, after, limit)]

    async def open_builds(
        self, watched: Collection[str], after: tuple[float, str], unchanged_since: float, limit: int
    ) -> OpenBuilds:
        """Along the index on the time of the request."""
        states = [state.value for state in OPEN]
        async with self._database.raw() as connection:
            page = await connection.fetchrow(OLD_BUILDS, *after, limit, unchanged_since, states)
            uuids = {*watched, *(page[3] if page is not None else ())}
            found = await connection.fetch(OPEN_BUILDS, sorted(uuids), states) if uuids else ()
        last = (page[0], page[1]) if page is not None and page[2] == limit else None
        return OpenBuilds([tables.read(one, RecordedBuild) for one in found], last)

    async def requests_of(self, instances: Sequence[str]) -> list[NewBuild]:
        """By the primary key and the index on gangs."""
        async with self._database.raw() as connection:
            return [tables.new_build(row) for row in await connection.fetch(REQUESTS_OF, instances)]

    async def active_on(self, hosts: Sequence[str], limit: int, *, after: str = FIRST_UUID) -> list[str]:
        """A scan: an index on a column that changes would make every write of a build dearer."""
        async with self._database.raw() as connection:
            return [row[0] for row in await connection.fetch(ACTIVE_ON, hosts, limit, after)]

    async def in_cell(self, cell: str, after: str, limit: int) -> CellInstances:
        """Along the primary key."""
        states = [state.value for state in ENDED_WITHOUT_MACHINE]
        async with self._database.single() as connection:
            found, last = await connection.fetchrow(IN_CELL, after or FIRST_UUID, MAX_EXAMINED, cell, states, limit)
        return CellInstances(found, last or "")

    async def raise_mark(self, cell: str, mark: DatabaseMark) -> int:
        """One statement, once a second."""
        async with self._database.single() as connection:
            return await raise_mark(connection, cell, mark, alone=True)

    async def mark_of(self, cell: str) -> DatabaseMark:
        """One statement."""
        async with self._database.single() as connection:
            return await read_mark(connection, cell)

    async def actions_of(self, instances: Sequence[str], limit: int) -> dict[str, list[RecordedAction]]:
        """Along the index of each instance's."""
        refused = ActionState.REFUSED.value
        async with self._database.single() as connection:
            rows = await connection.fetch(NEWEST_ACTIONS, instances, MAX_EXAMINED, refused, limit)
        found: dict[str, list[RecordedAction]] = {}
        for action in (tables.read(row, RecordedAction) for row in rows):
            found.setdefault(action.instance_uuid, []).append(action)
        return found

    async def builds(self, query: BuildQuery) -> list[BuildRecord]:
        """One build with its whole timeline; a page of many comes with it too, at most `limit`."""
        most = tables.MAX_SEARCHED if is_search(query) else query.limit
        named = [one and tables.clean(one) for one in (query.cell, query.host, query.flavor, query.code, query.name)]
        async with self._database.raw() as connection:
            found = await connection.fetch(BUILDS, *_of_query(query), most, query.limit, *named)
        return [tables.build_record(row) for row in found]

    async def count_builds(self, query: BuildQuery, most: int) -> int:
        """How many builds such a query has on all its pages, at most `most`; of no search."""
        async with self._database.raw() as connection:
            return int(await connection.fetchval(COUNT, *_of_query(query), most))

    async def builds_named(self, instances: Sequence[str]) -> dict[str, BuildRecord]:
        """By the primary keys, without a transaction around it."""
        async with self._database.single() as connection:
            found = await connection.fetch(BUILDS_NAMED, instances)
        return {row["instance_uuid"]: tables.build_record(row) for row in found}

    async def searched_to(self, query: BuildQuery) -> tuple[float, str] | None:
        """The last build that such a search looks at, and when it was requested; None: it looks at all."""
        async with self._database.raw() as connection:
            found = await connection.fetchrow(SEARCHED_TO, *_of_query(query), tables.MAX_SEARCHED)
        return None if found is None else (found["created_at"], found["instance_uuid"])


def _of_query(query: BuildQuery) -> tuple[object, ...]:
    """The parameters of OF_QUERY."""
    state = query.state.value if query.state is not None else None
    before = query.before, query.after, query.gang, query.before_instance
    return query.instance_uuid, query.project_id, state, *before
