"""The schemas of berth in one database: which there are, whose migrations make each, and at which revision each is."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import asyncpg
from alembic.script import ScriptDirectory
from msgspec import Struct

from bus.persistence.migrations import REVISION, config
from bus.persistence.revision import VERSION_TABLE

CELL_PREFIX = "cell_"
BOOK = "placement"
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
    newer: a newer berth made it. unknown: berth did not make it, or a version from before 0.1.0 did.
    """

    CURRENT = "current"
    BEHIND = "behind"
    NEWER = "newer"
    UNKNOWN = "unknown"
    ABSENT = "absent"


class SchemaRevision(Struct, frozen=True, kw_only=True):
    """One schema of a database. revision: "" when it has none. head: the newest revision that this berth knows."""

    schema: str
    revision: str
    head: str
    state: SchemaState


def package_of(schema: str) -> str | None:
    """The package of the migrations that make this schema; None: it is none of berth's."""
    roles = {BOOK: "placement_worker", SCHEDULER: "scheduler_worker", IRONIC_SYNC: "ironic_sync"}
    role = "cell_conductor" if schema.startswith(CELL_PREFIX) else roles.get(schema)
    if schema.startswith(IRONIC_SYNC_PREFIX):
        role = roles[IRONIC_SYNC]
    return f"{role}.store.migrations" if role is not None else None


def in_order(schemas: Sequence[str]) -> list[str]:
    """Cells first, the book last.

    So where schemas are copied one after another the book is the newest: room that a cell's record does not explain is
    held and reported. The other way round, machines would run on room that is offered.
    """
    ranks = {IRONIC_SYNC: 1, SCHEDULER: 2, BOOK: 3}
    return sorted(
        schemas,
        key=lambda schema: (
            ranks[IRONIC_SYNC] if schema.startswith(IRONIC_SYNC_PREFIX) else ranks.get(schema, 0),
            schema,
        ),
    )


def known_revisions(package: str) -> list[str]:
    """The revisions that a package's migrations can make, the newest first."""
    return [script.revision for script in ScriptDirectory.from_config(config(package)).walk_revisions()]


def assess(schema: str, revision: str, *, is_empty: bool) -> SchemaRevision:
    """How one schema stands. revision: that of its version table, "" when there is none."""
    package = package_of(schema)
    known = known_revisions(package) if package is not None else []
    head = known[0] if known else ""
    numbered = REVISION.fullmatch(revision)
    if not revision:
        state = SchemaState.ABSENT if is_empty else SchemaState.UNKNOWN
    elif revision == head:
        state = SchemaState.CURRENT
    elif revision in known:
        state = SchemaState.BEHIND
    elif numbered is not None and numbered[1] > head[:4]:
        state = SchemaState.NEWER
    else:
        state = SchemaState.UNKNOWN
    return SchemaRevision(schema=schema, revision=revision, head=head, state=state)


async def find_schemas(connection: asyncpg.Connection) -> list[SchemaRevision]:
    """All schemas of the database that have a name of berth's, in the order of `in_order`."""
    names = [row["nspname"] for row in await connection.fetch(_NAMES, [BOOK, SCHEDULER, IRONIC_SYNC], PREFIXES)]
    return [await read_revision(connection, name) for name in in_order(names)]


async def read_revision(connection: asyncpg.Connection, schema: str) -> SchemaRevision:
    """How one schema stands that is there."""
    relations = await relations_of(connection, schema)
    revision = ""
    if VERSION_TABLE in relations:
        revision = await connection.fetchval(f"SELECT version_num FROM {quoted(schema)}.{VERSION_TABLE}") or ""
    return assess(schema, revision, is_empty=not set(relations) - {VERSION_TABLE})


async def relations_of(connection: asyncpg.Connection, schema: str) -> list[str]:
    """Tables, views and sequences of a schema that is there."""
    return [row["relname"] for row in await connection.fetch(_RELATIONS, quoted(schema))]


def quoted(name: str) -> str:
    """A name as an identifier of SQL."""
    return '"' + name.replace('"', '""') + '"'
