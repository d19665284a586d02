"""Instances in PostgreSQL: one row each, the whole record as JSON beside the columns that queries need.

Every statement takes a whole batch (`unnest`); a boot costs its share of two small transactions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import asyncpg
import msgspec
import structlog
from msgspec import DecodeError

from bus.contracts.base import DatabaseMark, SentSequences, reason_of
from bus.contracts.operations import FenceState, Losses
from bus.persistence import outbox
from bus.persistence.database import Database, check_identity
from bus.persistence.guarded_statement import Conflict, GuardedStatement
from bus.persistence.outbox import OutboxMessage, PostgresRows
from bus.persistence.unit_of_work import Committed, VersionCache
from cell_conductor import metrics
from cell_conductor.state.database_marks import NOTHING, RecordedMarks, Stated
from cell_conductor.state.desired_state import (
    ABANDONED_WITH_SERVICE,
    ABSENT_ON_CURRENT,
    AT_REST,
    ENDED_BY_FAILURE_OR_DELETE,
    EXPECTED_ON_CURRENT,
    phase_from_text,
    phases_as_sql,
)
from cell_conductor.state.instance import Instance, InstanceSummary, Phase, unreadable_summary
from cell_conductor.store import tables
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
from cell_conductor.store.keyed_tables import PROTECT, UNKNOWN_MACHINES, UnknownMachineRecord
from cell_conductor.store.port import (
    DatabaseChange,
    InstanceWrites,
    OptimisticTransaction,
    SeenStore,
    UnreadableRecords,
)
from cell_conductor.store.postgres_keyed import PostgresKeyed, PostgresKeyedRows, row_of, values_of
from cell_conductor.store.unknown_machines import Safety, rely_on

log = structlog.get_logger(__name__)
Found = TypeVar("Found")

MIGRATIONS = "cell_conductor.store.migrations"

_ROW = "uuid::text, state, record"
LOCK = f"SELECT {_ROW} FROM instances WHERE uuid = ANY($1::uuid[]) ORDER BY uuid FOR UPDATE"
LOCK_DUE = f"SELECT {_ROW} FROM instances WHERE deadline <= $1 ORDER BY deadline LIMIT $2 FOR UPDATE SKIP LOCKED"
# Of a row whose record cannot be read; the record stays as it is.
PUT_OFF = "UPDATE instances SET deadline = $2 WHERE uuid = ANY($1::uuid[])"
PUT_OFF_S = 60.0

IDENTITY = "SELECT database_id::text FROM identity"
RECORDED_MARKS = f"SELECT database_incarnation, {tables.SENT}, ended_incarnations FROM identity"
RECOGNISE = f"""
SELECT database_incarnation, {tables.SENT}, ended_incarnations, database_id::text,
    origin <> origin_of('instances'), state <> 'open'
FROM identity
"""
NOTHING_DUE = """
SELECT database_id::text = $2 AND origin = origin_of('instances') AND database_incarnation = $3 AND state = 'open'
    AND NOT EXISTS (SELECT FROM instances WHERE deadline <= $1)
FROM identity
"""
RECORD_ORIGIN = "UPDATE identity SET origin = origin_of('instances')"
# One begins at a time, and no commit of the incarnation before is under way any more: it would raise its counters.
HOLD = "SELECT FROM identity FOR UPDATE; LOCK TABLE sent IN SHARE ROW EXCLUSIVE MODE"
BEGIN = f"""
{RECORD_ORIGIN}, state = $1, losses = '{{}}', database_incarnation = $2, ended_incarnations = $3::text::json,
    absent = CASE $1 WHEN 'open' THEN absent ELSE '{{}}' END
"""
# What is kept stays so: nobody else has that on record, and a machine without it may be destroyed.
DELETE_EARLIER = f"""
DELETE FROM outbox;
DELETE FROM breakers;
DELETE FROM {UNKNOWN_MACHINES.name} WHERE decision IS DISTINCT FROM '{PROTECT}'
"""
RECOVERING = f"{tables.SAME_DATABASE.format('$1', '$2')} AND state <> 'open' FOR UPDATE"
ACCEPTED_LOSSES = "SELECT losses ->> 'count' FROM identity WHERE state = 'accepted'"
STOP_RECOVERY = "UPDATE identity SET state = 'recovering', losses = $1::text::json"
ACCEPT_LOSSES = """
UPDATE identity SET state = 'accepted'
WHERE state = 'recovering' AND losses::text = $1 AND database_incarnation = $2
"""
RECOVERY = "SELECT state, database_incarnation, losses::text, absent::text FROM identity"
ABSENT = "SELECT absent::text FROM identity FOR UPDATE"
STATE_WITHOUT = f"""
UPDATE identity SET absent = (absent::jsonb || jsonb_build_object($1::text, true))::json
WHERE absent::jsonb ? $1 OR (SELECT count(*) FROM json_object_keys(absent)) < {MAX_ABSENT}
"""
UUIDS = """
SELECT uuid::text FROM instances WHERE ($1 = '' OR uuid > $1::text::uuid) AND ($2 = '' OR uuid <= $2::text::uuid)
ORDER BY uuid LIMIT $3
"""
INSERT = tables.marked(tables.INSERT)
UPDATE = tables.marked(tables.UPDATE)

READ_VERSIONS = f"SELECT {_ROW}, xmin FROM instances WHERE uuid = ANY($1::uuid[])"

_SUMMARY = f"""
SELECT uuid, state, host_uuid,
    {tables.SERVICE} AS service,
    attempt, since, highest_attempt, source_host_uuid,
    coalesce(record #>> ARRAY['action', 'source', 'service'], '') AS source_service,
    source_attempt,
    CASE WHEN state IN ({phases_as_sql(ENDED_BY_FAILURE_OR_DELETE)}) THEN coalesce(record ->> 'code', '') ELSE '' END
        AS code,
    coalesce(k.hosts, '{{}}') AS kept, coalesce(record ->> 'blocked_reason', '') AS blocked_reason,
    coalesce(record ->> 'proves_from', '0') AS proves_from
FROM instances LEFT JOIN (
    SELECT instance_uuid, array_agg(host_uuid::text) AS hosts FROM unknown_machines WHERE decision = '{PROTECT}'
    GROUP BY instance_uuid) AS k ON k.instance_uuid = uuid
"""
# The states are a partial index's condition, here and in PURGE.
SUMMARIES_OF_HOSTS = f"""
{_SUMMARY} WHERE host_uuid = ANY($1::uuid[]) AND state IN ({phases_as_sql(EXPECTED_ON_CURRENT)})
UNION ALL
{_SUMMARY} WHERE source_host_uuid = ANY($1::uuid[]) AND source_host_uuid IS NOT NULL
"""
# Every build under way has a deadline, so the few such rows are found by its index.
BUILDING_AT = f"""
SELECT uuid, service FROM (
    SELECT uuid, {tables.SERVICE} AS service FROM instances
    WHERE deadline IS NOT NULL AND state IN ({phases_as_sql(ABANDONED_WITH_SERVICE)})) AS building
WHERE service = ANY($1::text[]) ORDER BY uuid
"""
FENCE_OF = f"SELECT FROM fences f WHERE f.record ->> 'state' <> '{FenceState.UNFENCED}' AND f.host_uuid"

# As `ownership_proof.has_machine_at`. The text is searched for the name first: parsing every record's JSON costs far
# more.
AT_SERVICE = f"""
SELECT uuid::text FROM instances
WHERE state NOT IN ({phases_as_sql(AT_REST)})
    AND strpos(record::text, to_json($1::text)::text) > 0 AND (
    ({tables.SERVICE} = $1 AND state NOT IN ({phases_as_sql(ABSENT_ON_CURRENT)})
        AND NOT EXISTS ({FENCE_OF} = instances.host_uuid))
    OR (record #>> '{{action,source,service}}' = $1
        AND NOT EXISTS ({FENCE_OF}::text = instances.record #>> '{{action,source,host_uuid}}')))
ORDER BY uuid LIMIT $2
"""
SUMMARIES_BY_UUID = f"{_SUMMARY} WHERE uuid = ANY($1::uuid[])"

EXPLAINED = "NOT EXISTS (SELECT FROM unknown_machines WHERE instance_uuid = ANY({}::uuid[]))"
OF_INSTANCES = f"""
SELECT {row_of(UNKNOWN_MACHINES)} FROM unknown_machines WHERE instance_uuid = ANY($1::uuid[]) ORDER BY host_uuid,
instance_uuid
"""

PURGE = """
DELETE FROM instances WHERE uuid IN (
    SELECT uuid FROM instances WHERE state IN ({states}) AND since < $1 ORDER BY since LIMIT $2 FOR UPDATE SKIP LOCKED)
"""


_decode_absent = msgspec.json.Decoder(dict[str, bool]).decode
_decode_ended = msgspec.json.Decoder(dict[int, SentSequences]).decode


def _marks(row: Sequence[Any]) -> RecordedMarks:
    """Of the first columns."""
    return RecordedMarks(DatabaseMark(row[0], tuple(row[1])), _decode_ended(row[2]))


def _summary(row: Sequence[Any]) -> InstanceSummary:
    state, next_state = phase_from_text(row[1])
    # Not cast by the statement: one that is of another type would fail it for all.
    fields = (*row[2:12], next_state, row[12], int(row[13]))
    return InstanceSummary(row[0], state, *fields)


def _instance(row: Sequence[Any]) -> Instance:
    return tables.decode(row[2])


def _readable(
    rows: Iterable[Sequence[Any]], read: Callable[[Sequence[Any]], Found]
) -> tuple[dict[str, Found], frozenset[str]]:
    """What these rows are (the first columns: uuid and state), and the instances of those that cannot be read."""
    found, unreadable = dict[str, Found](), set[str]()
    for row in rows:
        uuid, state = row[0], row[1]
        try:
            found[uuid] = read(row)
        except (DecodeError, ValueError) as error:  # of the record, or of the state
            unreadable.add(uuid)
            metrics.STEPS_FAILED.labels(state, "read").inc()
            log.error("instance.unreadable", instance=uuid, state=state, reason=reason_of(error), cause=uuid)
    return found, frozenset(unreadable)


def _all_readable(rows: Iterable[Sequence[Any]]) -> dict[str, Instance]:
    found, unreadable = _readable(rows, _instance)
    if unreadable:
        raise UnreadableRecords(unreadable)
    return found


class PostgresInstanceRows:
    """The rows of one connection outside of any transaction; the version of a row is its xmin, the id of its writer."""

    def __init__(self, connection: asyncpg.Connection, seen: DatabaseIdentity) -> None:
        self._connection = connection
        self._seen = seen

    async def read(self, keys: Collection[str]) -> Mapping[str, tuple[int, Instance]]:
        """Instances with the versions of their rows, without locks. Raises UnreadableRecords."""
        rows = await self._connection.fetch(READ_VERSIONS, keys)
        found = _all_readable(rows)
        return {row[0]: (row[3], found[row[0]]) for row in rows}

    async def write(self, writes: InstanceWrites) -> Committed:
        """Write all of it or nothing, in one statement. Messages come before instances, as with locks."""
        statement = GuardedStatement()
        statement.expect(f"EXISTS ({tables.OPEN})", *self._seen.state)
        if writes.message_ids:
            statement.expect(tables.NEVER_SEEN, writes.message_ids)
            statement.add("seen", tables.SEEN, writes.message_ids, rows=len(writes.message_ids))
        if writes.explained:
            statement.expect(EXPLAINED, writes.explained)
        updates = writes.updates
        guard = statement.hold("instances", "uuid", writes.versions, updates=len(updates))
        if writes.inserts:
            columns = tables.columns(writes.inserts)
            statement.add("inserted", f"{tables.INSERT} RETURNING 1", *columns, rows=len(writes.inserts))
        if updates:
            columns = tables.columns(updates)
            statement.add("updated", f"{tables.UPDATE} AND {guard} RETURNING 1", *columns, rows=len(updates))
        if writes.durable:
            statement.add("marked", tables.RAISE_SENT)
            statement.column("(SELECT slot FROM marked) AS slot, (SELECT sequence FROM marked) AS sequence")
        outbox.add_to(statement, writes.outbox)
        statement.column("pg_current_xact_id()::xid AS version")
        incarnation = self._seen.incarnation
        written = await statement.execute(self._connection, durable=writes.durable)
        if writes.durable:
            self._seen.record_sent(tables.mark_of(incarnation, written["slot"], written["sequence"]))
        return Committed(written["version"], written["outbox_rows"])


class PostgresTransaction:
    """One transaction on one connection, which locks what it reads."""

    def __init__(self, connection: asyncpg.Connection, cache: VersionCache[Instance], seen: DatabaseIdentity) -> None:
        self._connection = connection
        self._cache = cache
        self._seen = seen
        self.rows: Sequence[int] = ()
        self.durable = True
        self.recognised: RecordedMarks | None = None
        self.recovers: bool | None = None  # None: as before
        self.mark = DatabaseMark()  # once it has written instances

    async def recognise(self, stated: Stated = NOTHING) -> DatabaseChange | None:
        """Compare the database with what others state of it. Raises Unrecognised and Recovering."""
        seen, own = self._seen, self._seen.mark  # as of before the row is read
        recorded, is_on_other_server, is_recovering = await self._identity()
        if state_of(recorded, stated, own, is_on_other_server=is_on_other_server) is not DatabaseState.SAME:
            await self._hold()
            recorded, is_on_other_server, is_recovering = await self._identity()
            history = state_of(recorded, stated, own, is_on_other_server=is_on_other_server)
            if history is not DatabaseState.SAME:
                recovers = is_recovering or history is DatabaseState.BEHIND
                return await self._begin(recorded, stated, own, recovers=recovers)
        seen.load(recorded)
        seen.is_recovering = is_recovering
        if is_recovering:
            raise Recovering
        return None

    async def begin_recovery(self, stated: Stated = NOTHING) -> int:
        """Some statements, once a recovery."""
        own = self._seen.mark
        await self._hold()
        recorded, is_on_other_server, is_recovering = await self._identity()
        history = state_of(recorded, stated, own, is_on_other_server=is_on_other_server)
        if is_recovering and history is DatabaseState.SAME:
            self.recognised, self.recovers = recorded, True
            return recorded.incarnation
        return (await self._begin(recorded, stated, own, recovers=True)).incarnation

    async def _hold(self) -> None:
        await self._connection.execute(HOLD)

    async def _identity(self) -> tuple[RecordedMarks, bool, bool]:
        """The marks on record, whether it is on another server, and whether the cell recovers."""
        row = await self._connection.fetchrow(RECOGNISE) or (0, (), "{}", None, False, False)
        check_identity(row[3], self._seen.database_id)
        return _marks(row), row[4], row[5]

    async def _begin(
        self, recorded: RecordedMarks, stated: Stated, own: DatabaseMark, *, recovers: bool
    ) -> DatabaseChange:
        begun = recorded.begun(incarnation := stated.highest(recorded.own, own) + 1, recovers=recovers)
        state = "recovering" if recovers else "open"
        await self._connection.execute(BEGIN, state, incarnation, msgspec.json.encode(begun.ended).decode())
        if recovers:
            await self._connection.execute(DELETE_EARLIER)
        self.recognised, self.recovers = begun, recovers
        return DatabaseChange(self._seen.database_id, incarnation, recovers)

    async def expect_recovering(self) -> None:
        """One statement. Raises Unrecognised."""
        if not await self._connection.fetchval(RECOVERING, *self._seen.state):
            raise Unrecognised

    async def accepted_losses(self) -> int:
        """One statement."""
        return int(await self._connection.fetchval(ACCEPTED_LOSSES) or 0)

    async def stop_recovery(self, losses: Losses) -> None:
        """One statement."""
        await self._connection.execute(STOP_RECOVERY, tables.encode(losses))

    async def accept_losses(self, losses: Losses, incarnation: int) -> bool:
        """One statement."""
        if not losses.count:
            return False
        done: str = await self._connection.execute(ACCEPT_LOSSES, tables.encode(losses), incarnation)
        return done == "UPDATE 1"

    async def end_recovery(self, silent: Collection[str] = (), without: Collection[str] = ()) -> None:
        """Three statements."""
        await self._connection.execute("UPDATE identity SET state = 'open', losses = '{}'")
        absent = await self.absent_services()
        await self._write_absent(absent_with(absent, silent, without))
        self.recovers = False

    async def absent_services(self) -> dict[str, bool]:
        """One statement."""
        return _decode_absent(await self._connection.fetchval(ABSENT) or "{}")

    async def record_listed(self, services: Collection[str]) -> None:
        """Two statements."""
        absent = await self.absent_services()
        await self._write_absent({name: has_nothing for name, has_nothing in absent.items() if name not in services})

    async def _write_absent(self, absent: Mapping[str, bool]) -> None:
        record = msgspec.json.encode(absent).decode()
        await self._connection.execute("UPDATE identity SET absent = $1::text::json", record)

    async def state_without(self, service: str) -> bool:
        """One statement."""
        done: str = await self._connection.execute(STATE_WITHOUT, service)
        return done == "UPDATE 1"

    async def first_time(self, message_ids: Sequence[str]) -> set[str]:
        """Record handled messages; those not seen before."""
        return await outbox.first_time(self._connection, tables.HANDLER, sorted(set(message_ids)))

    async def lock(self, uuids: Sequence[str]) -> dict[str, Instance]:
        """The instances on record among these, locked until the end. Raises UnreadableRecords."""
        return _all_readable(await self._connection.fetch(LOCK, uuids))

    async def lock_due(self, now: float, limit: int) -> list[Instance]:
        """Instances whose deadline has passed, locked, without waiting for another lock. Those that cannot be read are
        looked at again later, so that they do not fill every batch.
        """
        due, unreadable = _readable(await self._connection.fetch(LOCK_DUE, now, limit), _instance)
        if unreadable:
            await self._connection.execute(PUT_OFF, sorted(unreadable), now + PUT_OFF_S)
        return list(due.values())

    async def unknown_machines(self, uuids: Collection[str]) -> list[UnknownMachineRecord]:
        """One statement, without locks."""
        return list(values_of(UNKNOWN_MACHINES, await self._connection.fetch(OF_INSTANCES, list(uuids))).values())

    async def insert(self, instances: Sequence[Instance]) -> None:
        """Record new instances. Raises Conflict when one is on record meanwhile."""
        if instances and await self._write(INSERT, instances) != len(instances):
            raise Conflict

    async def update(self, instances: Sequence[Instance]) -> None:
        """Write the new state of locked instances."""
        if instances:
            self._cache.invalidate([instance.uuid for instance in instances])
            await self._write(UPDATE, instances)

    async def _write(self, statement: str, instances: Sequence[Instance]) -> int:
        incarnation = self._seen.incarnation
        columns = tables.columns(instances)
        count, slot, sequence = await self._connection.fetchrow(statement, *columns, *self._seen.state)
        if slot is None:
            raise Unrecognised
        self.mark = self.mark.joined(tables.mark_of(incarnation, slot, sequence))
        return int(count)

    async def rely_on(
        self, hosts: Sequence[str], stale: Mapping[str, Sequence[str]], at: float, proofs: Sequence[str] = ()
    ) -> bool:
        """Hold the fences of these hosts until the end, and count what is stale there."""
        return await rely_on(PostgresKeyedRows(self._connection, self._seen), hosts, stale, at, proofs)

    async def send_later(self, outgoing: Sequence[OutboxMessage]) -> Sequence[int]:
        """Put messages into the outbox; the rows for the relay."""
        self.rows = await outbox.add(self._connection, outgoing)
        return self.rows


class PostgresInstances(SeenStore):
    """The instances of one cell, in that cell's schema."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._database = database
        self._cache: VersionCache[Instance] = VersionCache(database)
        keyed = PostgresKeyed(database, self._seen)
        self.safety, self.leases, self.fences = Safety(keyed), LeaseStore(keyed), FenceStore(keyed)
        self.outbox = PostgresRows(database)

    @property
    def ready(self) -> bool:
        """Whether it is open."""
        return self._database.ready

    async def open(self) -> None:
        """Migrate, and read the schema's identity. Waits for a database that is unavailable."""
        await self._database.open(MIGRATIONS)
        async with self._database.raw() as connection:
            await connection.execute(f"{RECORD_ORIGIN} WHERE origin = ''")
        await self.identify()

    async def identify(self) -> None:
        """Read the schema's identity, by which each write is guarded."""
        async with self._database.raw() as connection:
            self._seen.database_id = await connection.fetchval(IDENTITY)
            self._seen.load(_marks(await connection.fetchrow(RECORDED_MARKS)))

    async def recorded_marks(self) -> RecordedMarks:
        """What the database has on record. One statement."""
        async with self._database.single() as connection:
            return _marks(await connection.fetchrow(RECORDED_MARKS))

    async def close(self) -> None:
        """Close the pool."""
        await self._database.close()

    async def has_due(self, now: float) -> bool:
        """One statement. A database without its identity has been emptied: the sweep finds that out."""
        if self._seen.read is None:
            return True
        async with self._database.single() as connection:
            return await connection.fetchval(NOTHING_DUE, now, *self._seen.state) is not True

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[PostgresTransaction]:
        """Commits at the end, rolls back on an exception."""
        async with self._database.raw() as connection:
            transaction = PostgresTransaction(connection, self._cache, self._seen)
            yield transaction
        self._seen.record_sent(transaction.mark)
        if transaction.recognised is not None:
            self._seen.load(transaction.recognised)
        if transaction.recovers is not None:
            self._seen.is_recovering = transaction.recovers

    @asynccontextmanager
    async def optimistic(self, new: Collection[str]) -> AsyncIterator[OptimisticTransaction]:
        """The same in one round trip, on cached instances."""
        async with (
            self._database.single() as connection,
            OptimisticTransaction(PostgresInstanceRows(connection, self._seen), self._cache, new) as transaction,
        ):
            yield transaction

    async def summaries(self, host_uuids: Sequence[str], instance_uuids: Sequence[str]) -> list[InstanceSummary]:
        """The instances that should be on these hosts, and these instances in any state."""
        async with self._database.raw() as connection:
            found = await connection.fetch(SUMMARIES_OF_HOSTS, host_uuids)
            # Nearly always the same ones: each row costs its record's JSON read, so none is read twice.
            others = set(instance_uuids).difference(row[0] for row in found)
            if others:
                found += await connection.fetch(SUMMARIES_BY_UUID, list(others))
        summaries, unreadable = _readable(found, _summary)
        protected = {row[0]: row[11] for row in found}
        return [*summaries.values(), *(unreadable_summary(uuid, protected[uuid]) for uuid in sorted(unreadable))]

    async def building_at(self, services: Sequence[str]) -> list[tuple[str, str]]:
        """The instances that these compute services were commanded to build."""
        async with self._database.raw() as connection:
            return [(row[0], row[1]) for row in await connection.fetch(BUILDING_AT, list(services))]

    async def at_service(self, service: str, limit: int) -> list[str]:
        """The instances that have a machine at this compute service; it reads the whole table, once a command."""
        async with self._database.raw() as connection:
            return [row[0] for row in await connection.fetch(AT_SERVICE, service, limit)]

    async def uuids(self, after: str, last: str, limit: int) -> list[str]:
        """One statement."""
        async with self._database.raw() as connection:
            return [row[0] for row in await connection.fetch(UUIDS, after, last, limit)]

    async def purge(self, phases: frozenset[Phase], before: float, limit: int) -> int:
        """Those that no transaction holds."""
        async with self._database.raw() as connection:
            status: str = await connection.execute(PURGE.format(states=phases_as_sql(phases)), before, limit)
        return int(status.rpartition(" ")[2])
