"""Operators' objects as rows: the statements of the store's PostgreSQL adapter, and what its memory adapter keeps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import asyncpg
import msgspec
from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import RowMapping

from bus.contracts.objects import ChangedObject, ObjectKind, ObjectLogEntry, ObjectLogQuery, StoredObject
from scheduler_worker.domain.objects import ChangeAuthor, Key, RecordedObjects, applied
from scheduler_worker.store.rows import clean

# Entries of the log of changes that are kept; the oldest go.
MAX_LOG_ENTRIES = 100_000
BUILDS_WITH_A_MACHINE = ("accepted", "scheduled", "building", "active", "deleting")

KINDS = frozenset(kind.value for kind in ObjectKind)

_encode = msgspec.json.Encoder(order="deterministic").encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


REVISION = "SELECT revision FROM objects_revision"
NEXT_REVISION = "UPDATE objects_revision SET revision = revision + 1 RETURNING revision"
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


async def lock(connection: asyncpg.Connection) -> RecordedObjects:
    """All objects, locked until the end of the transaction. The row of the revision is the lock."""
    revision = await connection.fetchval(f"{REVISION} FOR UPDATE")
    return RecordedObjects(revision, await _objects(connection))


async def read(connection: asyncpg.Connection, unless: int) -> RecordedObjects | None:
    """All objects; None when the revision is `unless`."""
    # The revision is read first: a later change is newer than it, and is read again.
    revision = await connection.fetchval(REVISION)
    return None if revision == unless else RecordedObjects(revision, await _objects(connection))


async def write(connection: asyncpg.Connection, changed: Sequence[ChangedObject], author: ChangeAuthor) -> int:
    """Write objects that are locked, and their log. Five statements, whatever their number. Returns the revision."""
    kept = [one for one in changed if one.after is not None]
    gone = [one for one in changed if one.after is None]
    run = connection.execute
    revision = int(await connection.fetchval(NEXT_REVISION))
    who, why = clean(author.who), clean(author.why)
    await run(UPSERT, *_keys(kept), [_text(one.after) for one in kept], revision, author.at, who)
    await run(DELETE, *_keys(gone))
    before, after = [_text(one.before) for one in changed], [_text(one.after) for one in changed]
    await run(LOG, *_keys(changed), before, after, revision, author.at, who, why, author.forced)
    await run(TRIM, MAX_LOG_ENTRIES)
    return revision


def entries(found: Iterable[RowMapping]) -> list[ObjectLogEntry]:
    """Rows of the log of changes, without those of kinds that only a newer scheduler has."""
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
        if row["kind"] in KINDS
    ]


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
        if row["kind"] in KINDS  # a newer scheduler, side by side with this one, may have more fields
    }


def _keys(changed: Sequence[ChangedObject]) -> tuple[list[str], list[str]]:
    return [one.kind.value for one in changed], [one.name for one in changed]


def _text(body: Mapping[str, Any] | None) -> str | None:
    return None if body is None else _encode(body).decode()


def _body(text: str | None) -> dict[str, Any] | None:
    return None if text is None else _decode(text)


class MemoryObjects(Struct, frozen=True):
    """Objects on record with their log, newest first, as one value: a transaction replaces the whole."""

    present: RecordedObjects = RecordedObjects(0, {})
    entries: tuple[ObjectLogEntry, ...] = ()

    def changed(self, changed: Sequence[ChangedObject], author: ChangeAuthor) -> MemoryObjects:
        """These objects after a change."""
        kept = replace(author, who=clean(author.who), why=clean(author.why))
        after = applied(self.present, changed, kept)
        entries = [
            ObjectLogEntry(
                revision=after.revision,
                at=kept.at,
                who=kept.who,
                why=kept.why,
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
