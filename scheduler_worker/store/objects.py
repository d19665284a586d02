"""Operators' objects on record: the port, and its adapters on PostgreSQL and in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

import asyncpg
import msgspec
from msgspec import Struct

from bus.contracts.objects import ChangedObject, ObjectKind, ObjectLogEntry, ObjectLogQuery, StoredObject
from bus.persistence.database import Database
from scheduler_worker.domain.objects import Key
from scheduler_worker.store.rows import clean

# Entries of the log of changes that are kept; the oldest go.
MAX_LOG_ENTRIES = 100_000

_encode = msgspec.json.Encoder(order="deterministic").encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class ObjectsOnRecord(Struct, frozen=True):
    """All objects, and the revision that they are of. Revision 0: none was ever written."""

    revision: int
    objects: Mapping[Key, StoredObject]


class ObjectsUnit(Protocol):
    """One transaction that no other change of objects runs beside."""

    present: ObjectsOnRecord

    async def write(
        self, changed: Sequence[ChangedObject], *, who: str, why: str, at: float, forced: bool = False
    ) -> int:
        """Write objects and their log under the next revision, which it returns. At most once a unit."""


class ObjectStore(Protocol):
    """Objects of one system. Both adapters pass tests/contract/test_object_store.py."""

    def changing(self) -> AbstractAsyncContextManager[ObjectsUnit]:
        """A unit that holds the lock on all objects; what it has written is there when it ends without an exception."""

    async def read(self, unless: int = -1) -> ObjectsOnRecord | None:
        """All objects; None when the revision is `unless`."""

    async def log(self, query: ObjectLogQuery) -> list[ObjectLogEntry]:
        """Entries of the log, newest first."""

    async def builds_of(self, flavor: str, limit: int) -> int:
        """How many builds of a flavor have a machine, or may get one; counted up to `limit`."""


REVISION = "SELECT revision FROM objects_revision"
OBJECTS = "SELECT kind, name, body, version, changed_at, changed_by FROM objects"
UPSERT = """
INSERT INTO objects (kind, name, body, version, changed_at, changed_by)
SELECT n.kind, n.name, n.body, $4, $5, $6 FROM unnest($1::text[], $2::text[], $3::text[]) n(kind, name, body)
ON CONFLICT (kind, name) DO UPDATE
SET body = excluded.body, version = excluded.version, changed_at = excluded.changed_at, changed_by = excluded.changed_by
"""
DELETE = "DELETE FROM objects USING unnest($1::text[], $2::text[]) n(k, v) WHERE kind = n.k AND name = n.v"
LOG = """
INSERT INTO object_log (revision, kind, name, before, after, at, who, why, forced)
SELECT $5, n.kind, n.name, n.before, n.after, $6, $7, $8, $9
FROM unnest($1::text[], $2::text[], $3::text[], $4::text[]) n(kind, name, before, after)
"""
TRIM = """
DELETE FROM object_log WHERE (revision, kind, name) IN (
    SELECT revision, kind, name FROM object_log ORDER BY revision DESC, kind, name OFFSET $1)
"""
ENTRIES = """
SELECT revision, kind, name, before, after, at, who, why, forced FROM object_log
WHERE ($1::text IS NULL OR kind = $1) AND ($2::text IS NULL OR name = $2) AND ($3::bigint IS NULL OR revision < $3)
ORDER BY revision DESC, kind, name LIMIT $4
"""
BUILDS_OF = """
SELECT count(*) FROM (SELECT FROM build_requests WHERE flavor = $1
                      AND state = ANY('{accepted,scheduled,building,active,deleting}'::text[]) LIMIT $2) found
"""


class PostgresObjectsUnit:
    """One transaction, which has locked the revision."""

    def __init__(self, connection: asyncpg.Connection, present: ObjectsOnRecord) -> None:
        self._connection = connection
        self.present = present

    async def write(
        self, changed: Sequence[ChangedObject], *, who: str, why: str, at: float, forced: bool = False
    ) -> int:
        """Three statements, whatever their number."""
        revision = self.present.revision + 1
        kept = [one for one in changed if one.after is not None]
        gone = [one for one in changed if one.after is None]
        run = self._connection.execute
        await run("UPDATE objects_revision SET revision = $1", revision)
        who, why = clean(who), clean(why)
        await run(UPSERT, *_keys(kept), [_text(one.after) for one in kept], revision, at, who)
        await run(DELETE, *_keys(gone))
        before, after = [_text(one.before) for one in changed], [_text(one.after) for one in changed]
        await run(LOG, *_keys(changed), before, after, revision, at, who, why, forced)
        await run(TRIM, MAX_LOG_ENTRIES)
        return revision


class PostgresObjects:
    """The tables `objects` and `object_log` of schema `scheduler`. The database is opened by its other store."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[PostgresObjectsUnit]:
        """The row of the revision is the lock."""
        async with self._database.raw() as connection:
            revision = await connection.fetchval(f"{REVISION} FOR UPDATE")
            yield PostgresObjectsUnit(connection, ObjectsOnRecord(revision, await _objects(connection)))

    async def read(self, unless: int = -1) -> ObjectsOnRecord | None:
        """The revision first: what a later one has added is newer, and is read again."""
        async with self._database.raw() as connection:
            revision = await connection.fetchval(REVISION)
            return None if revision == unless else ObjectsOnRecord(revision, await _objects(connection))

    async def log(self, query: ObjectLogQuery) -> list[ObjectLogEntry]:
        """Entries of the log, newest first."""
        kind = None if query.kind is None else query.kind.value
        async with self._database.raw() as connection:
            found = await connection.fetch(ENTRIES, kind, query.name, query.before, query.limit)
        return [
            ObjectLogEntry(
                revision=row["revision"],
                at=row["at"],
                who=row["who"],
                why=row["why"],
                kind=ObjectKind(row["kind"]),
                name=row["name"],
                before=_body(row["before"]),
                after=_body(row["after"]),
                forced=row["forced"],
            )
            for row in found
        ]

    async def builds_of(self, flavor: str, limit: int) -> int:
        """Counted up to a limit."""
        async with self._database.raw() as connection:
            return int(await connection.fetchval(BUILDS_OF, flavor, limit))


async def _objects(connection: asyncpg.Connection) -> dict[Key, StoredObject]:
    return {
        (ObjectKind(row["kind"]), row["name"]): StoredObject(
            kind=ObjectKind(row["kind"]),
            name=row["name"],
            body=_decode(row["body"]),
            version=row["version"],
            changed_at=row["changed_at"],
            changed_by=row["changed_by"],
        )
        for row in await connection.fetch(OBJECTS)
    }


def _keys(changed: Sequence[ChangedObject]) -> tuple[list[str], list[str]]:
    return [one.kind.value for one in changed], [one.name for one in changed]


def _text(body: Mapping[str, Any] | None) -> str | None:
    return None if body is None else _encode(body).decode()


def _body(text: str | None) -> dict[str, Any] | None:
    return None if text is None else _decode(text)


class MemoryObjectsUnit:
    """One transaction in memory."""

    def __init__(self, present: ObjectsOnRecord) -> None:
        self.present = present
        self.written: ObjectsOnRecord | None = None
        self.entries: list[ObjectLogEntry] = []

    async def write(
        self, changed: Sequence[ChangedObject], *, who: str, why: str, at: float, forced: bool = False
    ) -> int:
        """Kept until the unit ends."""
        who, why = clean(who), clean(why)
        revision = self.present.revision + 1
        objects = dict(self.present.objects)
        for one in sorted(changed, key=lambda one: (one.kind, one.name)):
            key = (one.kind, one.name)
            if one.after is None:
                objects.pop(key, None)
            else:
                objects[key] = StoredObject(
                    kind=one.kind, name=one.name, body=one.after, version=revision, changed_at=at, changed_by=who
                )
            self.entries.append(
                ObjectLogEntry(
                    revision=revision,
                    at=at,
                    who=who,
                    why=why,
                    kind=one.kind,
                    name=one.name,
                    before=one.before,
                    after=one.after,
                    forced=forced,
                )
            )
        self.written = ObjectsOnRecord(revision, objects)
        return revision


class MemoryObjects:
    """Objects in memory, for tests. It shares no table of builds: `builds` counts them for it."""

    def __init__(self, builds: Mapping[str, int] | None = None) -> None:
        self._present = ObjectsOnRecord(0, {})
        self._log: list[ObjectLogEntry] = []
        self._lock = asyncio.Lock()
        self._builds = builds if builds is not None else {}

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[MemoryObjectsUnit]:
        """One at a time."""
        async with self._lock:
            unit = MemoryObjectsUnit(self._present)
            yield unit
            if unit.written is not None:
                self._present = unit.written
                self._log = [*unit.entries, *self._log][:MAX_LOG_ENTRIES]

    async def read(self, unless: int = -1) -> ObjectsOnRecord | None:
        """All objects; None when the revision is `unless`."""
        return None if self._present.revision == unless else self._present

    async def log(self, query: ObjectLogQuery) -> list[ObjectLogEntry]:
        """Entries of the log, newest first."""
        found = [
            entry
            for entry in self._log
            if query.kind in (None, entry.kind)
            and query.name in (None, entry.name)
            and (query.before is None or entry.revision < query.before)
        ]
        return found[: query.limit]

    async def builds_of(self, flavor: str, limit: int) -> int:
        """Counted up to a limit."""
        return min(self._builds.get(flavor, 0), limit)
