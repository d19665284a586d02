"""What operators define and ask, as rows: objects, the actions of drains, queries. The statements of the PostgreSQL
adapter, made by SQLAlchemy Core, and what the memory adapter keeps. A condition that a query does not name is no part
of its statement, so that PostgreSQL plans for those that it has.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import asyncpg
import msgspec
from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import (
    ARRAY,
    ColumnElement,
    Select,
    Text,
    all_,
    and_,
    any_,
    cast,
    func,
    literal,
    literal_column,
    or_,
    select,
    tuple_,
)
from sqlalchemy.dialects.postgresql import JSON

from bus.clock import CLOCKS_APART_S
from bus.contracts.actions import ActionQuery
from bus.contracts.build import ENDED_WITHOUT_MACHINE
from bus.contracts.objects import ChangedObject, ObjectKind, ObjectLogEntry, ObjectLogQuery, StoredObject
from scheduler_worker.records.action_record import RecordedAction
from scheduler_worker.records.drain_record import BegunMoves, EndedRequest
from scheduler_worker.records.object_records import ChangeActor, Key, RecordedObjects, applied
from scheduler_worker.store import tables
from scheduler_worker.store.port import ProjectsGroup
from scheduler_worker.store.tables import build_requests, clean, instance_actions, object_log

# Entries of the log of changes that are kept; the oldest go.
MAX_LOG_ENTRIES = 100_000

KINDS = frozenset(kind.value for kind in ObjectKind)

_encode = msgspec.json.Encoder(order="deterministic").encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


REVISION = "SELECT revision, token FROM objects_revision"
NEXT_REVISION = """
UPDATE objects_revision SET revision = revision + 1, token = gen_random_uuid() RETURNING revision, token
"""
OBJECTS = "SELECT kind, name, body, version, changed_at, changed_by FROM objects"
UPSERT = """
INSERT INTO objects (kind, name, body, version, changed_at, changed_by)
SELECT n.kind, n.name, n.body, $4, $5, $6 FROM unnest($1::text[], $2::text[], $3::text[]) n(kind, name, body)
ON CONFLICT (kind, name) DO UPDATE
SET body = excluded.body, version = excluded.version, changed_at = excluded.changed_at, changed_by = excluded.changed_by
"""
DELETE = "DELETE FROM objects USING unnest($1::text[], $2::text[]) n(k, v) WHERE kind = n.k AND name = n.v"
LOG = """
INSERT INTO object_log (revision, kind, name, before, after, at, actor, reason, forced)
SELECT $5, n.kind, n.name, n.before, n.after, $6, $7, $8, $9
FROM unnest($1::text[], $2::text[], $3::text[], $4::text[]) n(kind, name, before, after)
"""
TRIM = """
DELETE FROM object_log WHERE (revision, kind, name) IN (
    SELECT revision, kind, name FROM object_log ORDER BY revision DESC, kind, name OFFSET $1)
"""


async def read(connection: asyncpg.Connection, unless: str | None) -> RecordedObjects | None:
    """All objects; None when their token is `unless`."""
    # The revision is read first: a later change is newer than it, and is read again.
    revision, token = await connection.fetchrow(REVISION)
    return None if token == unless else RecordedObjects(revision, await _objects(connection), token)


def entries(found: Iterable[asyncpg.Record]) -> list[ObjectLogEntry]:
    """Rows of the log of changes, without those of kinds that only a newer scheduler has."""
    return [
        ObjectLogEntry(**{**_of_kind(row), "before": _body(row["before"]), "after": _body(row["after"])})
        for row in found
        if row["kind"] in KINDS
    ]


async def _objects(connection: asyncpg.Connection) -> dict[Key, StoredObject]:
    return {
        (ObjectKind(row["kind"]), row["name"]): StoredObject(**{**_of_kind(row), "body": _decode(row["body"])})
        for row in await connection.fetch(OBJECTS)
        if row["kind"] in KINDS  # a newer scheduler, side by side with this one, may have more fields
    }


def _of_kind(row: asyncpg.Record) -> dict[str, Any]:
    """The columns of an object: as they were written, not validated anew."""
    return {**row, "kind": ObjectKind(row["kind"])}


def _keys(changed: Sequence[ChangedObject]) -> tuple[list[str], list[str]]:
    return [one.kind.value for one in changed], [one.name for one in changed]


def _text(body: Mapping[str, Any] | None) -> str | None:
    return None if body is None else _encode(body).decode()


def _body(text: str | None) -> dict[str, Any] | None:
    return None if text is None else _decode(text)


_tokens = itertools.count()


class MemoryObjects(Struct, frozen=True):
    """Objects on record with their log, newest first, as one value: a transaction replaces the whole."""

    present: RecordedObjects = RecordedObjects(0, {})
    entries: tuple[ObjectLogEntry, ...] = ()

    def changed(self, changed: Sequence[ChangedObject], actor: ChangeActor) -> MemoryObjects:
        """These objects after a change."""
        kept = replace(actor, name=clean(actor.name), reason=clean(actor.reason))
        after = replace(applied(self.present, changed, kept), token=str(next(_tokens)))
        entries = [
            ObjectLogEntry(
                revision=after.revision,
                at=kept.at,
                actor=kept.name,
                reason=kept.reason,
                kind=one.kind,
                name=one.name,
                before=one.before,
                after=one.after,
                forced=kept.forced,
            )
            for one in sorted(changed, key=lambda one: (one.kind, one.name))
        ]
        return MemoryObjects(after, (*entries, *self.entries)[:MAX_LOG_ENTRIES])

    def log(self, query: ObjectLogQuery) -> list[ObjectLogEntry]:
        """Entries of the log of changes, newest first."""
        found = [
            entry
            for entry in self.entries
            if query.kind in (None, entry.kind)
            and query.name in (None, entry.name)
            and (query.before is None or entry.revision < query.before or _follows(entry, query))
        ]
        return found[: query.limit]


def _follows(entry: ObjectLogEntry, query: ObjectLogQuery) -> bool:
    """Whether it is of the revision that the last page ended in, after that page's last entry."""
    last = query.before_object
    return last is not None and entry.revision == query.before and (entry.kind.value, entry.name) > last


LOCK = "SELECT body FROM objects WHERE kind = $1 AND name = $2 FOR UPDATE"
BEGUN = """
SELECT (SELECT count(*) FROM instance_actions WHERE drain = $1 AND NOT terminal), coalesce(max(m.created_at), 0)
FROM (VALUES (true), (false)) t(ended) CROSS JOIN LATERAL (
    SELECT created_at FROM instance_actions WHERE drain = $1 AND terminal = t.ended AND created_at <= $2
    ORDER BY created_at DESC LIMIT 1) m
"""
EVACUATING = "SELECT count(*) FROM instance_actions WHERE NOT terminal AND kind = 'evacuate' AND drain IS NOT NULL"
ENDED = f"""
SELECT m.* FROM unnest($1::uuid[]) u(uuid) CROSS JOIN LATERAL (
    SELECT {", ".join(EndedRequest.__struct_fields__)} FROM instance_actions
    WHERE instance_uuid = u.uuid AND terminal ORDER BY created_at DESC, request_id DESC LIMIT $2) m
"""
NEWEST = f"""
SELECT DISTINCT ON (instance_uuid) {tables.ACTION} FROM instance_actions WHERE drain = $1
ORDER BY instance_uuid, created_at DESC, request_id DESC LIMIT $2
"""
MOVED_COUNTS = """
SELECT drain, terminal, count(DISTINCT instance_uuid) FROM instance_actions
WHERE drain = ANY($1::uuid[]) AND (state = 'done' OR NOT terminal) GROUP BY drain, terminal
"""


class ObjectRows:
    """The rows of objects and drains in one transaction on this connection."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    async def lock_objects(self) -> RecordedObjects:
        """The row of their revision is the lock."""
        revision, token = await self._connection.fetchrow(f"{REVISION} FOR UPDATE")
        return RecordedObjects(revision, await _objects(self._connection), token)

    async def write_objects(self, changed: Sequence[ChangedObject], actor: ChangeActor) -> str:
        """Five statements, whatever their number."""
        kept = [one for one in changed if one.after is not None]
        gone = [one for one in changed if one.after is None]
        run = self._connection.execute
        revision, token = await self._connection.fetchrow(NEXT_REVISION)
        name, reason = clean(actor.name), clean(actor.reason)
        await run(UPSERT, *_keys(kept), [_text(one.after) for one in kept], revision, actor.at, name)
        await run(DELETE, *_keys(gone))
        before, after = [_text(one.before) for one in changed], [_text(one.after) for one in changed]
        await run(LOG, *_keys(changed), before, after, revision, actor.at, name, reason, actor.forced)
        await run(TRIM, MAX_LOG_ENTRIES)
        return str(token)

    async def lock_object(self, kind: ObjectKind, name: str) -> dict[str, Any] | None:
        """By its row."""
        return _body(await self._connection.fetchval(LOCK, kind.value, name))

    async def begun(self, drain: str | None, now: float) -> BegunMoves:
        """Along the index of drains: those under way, and two rows. Evacuations: along that of all under way."""
        if drain is None:
            return BegunMoves(await self._connection.fetchval(EVACUATING))
        return BegunMoves(*await self._connection.fetchrow(BEGUN, drain, now + CLOCKS_APART_S))

    async def ended(self, instances: Collection[str], limit: int) -> dict[str, list[EndedRequest]]:
        """Along the index of instances."""
        found: dict[str, list[EndedRequest]] = {}
        for row in await self._connection.fetch(ENDED, sorted(instances), limit):
            found.setdefault(row["instance_uuid"], []).append(msgspec.convert(dict(row), EndedRequest))
        return found

    async def newest(self, drain: str, limit: int) -> list[RecordedAction]:
        """Along the index of drains."""
        return [tables.read(row, RecordedAction) for row in await self._connection.fetch(NEWEST, drain, limit)]

    async def moved_counts(self, drains: Collection[str]) -> dict[tuple[str, bool], int]:
        """Along the index of drains."""
        return {(drain, ended): n for drain, ended, n in await self._connection.fetch(MOVED_COUNTS, sorted(drains))}


def machines(limit: int, flavor: str | None, group: ProjectsGroup | None, cell: str | None) -> Select[int]:
    """How many builds may have a machine."""
    columns = build_requests.c
    ended = literal([one.value for one in ENDED_WITHOUT_MACHINE], ARRAY(Text))
    found: Any = select(literal(1)).where(columns.state != all_(ended))
    if flavor is not None:
        found = found.where(literal(flavor) == any_(literal_column(tables.FLAVORS, ARRAY(Text))))
    if group is not None:
        named = cast(columns.request, JSON)[("server_group", "uuid")].astext
        found = found.where(columns.project_id == group[0], named == group[1])
    if cell is not None:
        transfer = cast(instance_actions.c.transfer, JSON)
        leads_there = or_(transfer["home"].astext == cell, transfer["away"].astext == cell)
        coming = select(instance_actions.c.instance_uuid).where(~instance_actions.c.terminal, leads_there)
        found = found.where(or_(columns.cell == cell, columns.instance_uuid.in_(coming)))
    return select(func.count()).select_from(found.limit(limit).subquery())


def actions_of(query: ActionQuery) -> Select[Any]:
    """The requests that a query names, newest first: along the index that suits it."""
    found = select(instance_actions)
    for column in (instance_actions.c.request_id, instance_actions.c.instance_uuid, instance_actions.c.project_id):
        if (wanted := getattr(query, column.name)) is not None:
            found = found.where(column == wanted)
    if query.under_way is not None:
        found = found.where(instance_actions.c.terminal != query.under_way)
    return found.order_by(instance_actions.c.created_at.desc()).limit(query.limit)


def log_of(query: ObjectLogQuery) -> Select[Any]:
    """Entries of the log of changes, newest first: along the primary key."""
    columns = object_log.c
    found = select(object_log)
    if query.kind is not None:
        found = found.where(columns.kind == query.kind.value)
    if query.name is not None:
        found = found.where(columns.name == clean(query.name))
    if query.before is not None:
        earlier: ColumnElement[bool] = columns.revision < query.before
        if query.before_object:
            last = tuple_(*(literal(clean(word)) for word in query.before_object))
            earlier = or_(earlier, and_(columns.revision == query.before, tuple_(columns.kind, columns.name) > last))
        found = found.where(earlier)
    return found.order_by(columns.revision.desc(), columns.kind, columns.name).limit(query.limit)
