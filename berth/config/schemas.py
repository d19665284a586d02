"""The schemas of berth in one database: which there are, whose migrations make each, and at which revision each is."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import asyncpg
from msgspec import Struct

from bus.persistence.revision import APPLIED, OLDEST, REVISION_TABLES, Revisions, known_revisions

CELL_PREFIX = "cell_"
PLACEMENT = "placement"
SCHEDULER = "scheduler"
IRONIC_SYNC = "ironic_sync"
IRONIC_SYNC_PREFIX = "ironic_sync_"  # one of several Ironics
PREFIXES = (CELL_PREFIX, IRONIC_SYNC_PREFIX)

_NAMES = "SELECT nspname FROM pg_namespace WHERE nspname = ANY($1) OR nspname ^@ ANY($2) ORDER BY nspname"
_RELATIONS = """
SELECT relname FROM pg_class WHERE relnamespace = $1::text::regnamespace AND relkind IN ('r', 'p', 'v', 'm', 'S')
ORDER BY relname
"""


class SchemaState(enum.StrEnum):
    """How a schema stands to this version of berth.

    absent: there is none, or it is empty. behind: `berth db upgrade` (or the start of a worker) brings it to head.
    ahead: a newer berth made it, and this one may run on it. newer: a newer berth made it, and this one may not.
    unknown: berth did not make it, or a version from before 0.1.0 did.
    """

    CURRENT = "current"
    BEHIND = "behind"
    AHEAD = "ahead"
    NEWER = "newer"
    UNKNOWN = "unknown"
    ABSENT = "absent"


class SchemaRevision(Struct, frozen=True, kw_only=True):
    """One schema of a database. revision: "" when it has none. head: the newest revision that this berth knows.

    oldest: the revision that the oldest version knows that may run on it.
    """

    schema: str
    revision: str
    oldest: str
    head: str
    state: SchemaState


def package_of(schema: str) -> str | None:
    """The package of the migrations that make this schema; None: it is none of berth's."""
    roles = {PLACEMENT: "placement_worker", SCHEDULER: "scheduler_worker", IRONIC_SYNC: "ironic_sync"}
    role = "cell_conductor" if schema.startswith(CELL_PREFIX) else roles.get(schema)
    if schema.startswith(IRONIC_SYNC_PREFIX):
        role = roles[IRONIC_SYNC]
    return f"{role}.store.migrations" if role is not None else None


def in_order(schemas: Sequence[str]) -> list[str]:
    """Cells first, placement last.

    So where schemas are copied one after another placement is the newest: room that a cell's record does not explain is
    held and reported. The other way round, machines would run on room that is offered.
    """
    ranks = {IRONIC_SYNC: 1, SCHEDULER: 2, PLACEMENT: 3}
    return sorted(
        schemas,
        key=lambda schema: (
            ranks[IRONIC_SYNC] if schema.startswith(IRONIC_SYNC_PREFIX) else ranks.get(schema, 0),
            schema,
        ),
    )


def assess(schema: str, revisions: Revisions, *, is_empty: bool) -> SchemaRevision:
    """How one schema stands, by the revisions that it has."""
    package = package_of(schema)
    known = known_revisions(package) if package is not None else [""]
    applied, oldest = revisions
    if not applied:
        state = SchemaState.ABSENT if is_empty else SchemaState.UNKNOWN
    elif applied == known[-1]:
        state = SchemaState.CURRENT
    elif applied in known:
        state = SchemaState.BEHIND
    elif revisions.are_later(known):
        state = SchemaState.AHEAD if revisions.allow(known) else SchemaState.NEWER
    else:
        state = SchemaState.UNKNOWN
    return SchemaRevision(schema=schema, revision=applied, oldest=oldest, head=known[-1], state=state)


async def find_schemas(connection: asyncpg.Connection) -> list[SchemaRevision]:
    """All schemas of the database that have a name of berth's, in the order of `in_order`."""
    names = [row["nspname"] for row in await connection.fetch(_NAMES, [PLACEMENT, SCHEDULER, IRONIC_SYNC], PREFIXES)]
    return [await read_revision(connection, name) for name in in_order(names)]


async def read_revision(connection: asyncpg.Connection, schema: str) -> SchemaRevision:
    """How one schema stands that is there."""
    relations = await relations_of(connection, schema)
    read = {
        table: await connection.fetchval(f"SELECT version_num FROM {quoted(schema)}.{table}") or ""
        for table in REVISION_TABLES
        if table in relations
    }
    revisions = Revisions(read.get(APPLIED, ""), read.get(OLDEST, ""))
    return assess(schema, revisions, is_empty=not set(relations) - set(REVISION_TABLES))


async def relations_of(connection: asyncpg.Connection, schema: str) -> list[str]:
    """Tables, views and sequences of a schema that is there."""
    return [row["relname"] for row in await connection.fetch(_RELATIONS, quoted(schema))]


def quoted(name: str) -> str:
    """A name as an identifier of SQL."""
    return '"' + name.replace('"', '""') + '"'
