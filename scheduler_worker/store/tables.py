"""The schema `scheduler`: build requests, the instance-to-cell map, and what operators define.

Times are seconds since the epoch, where their type is a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    false,
    text,
    true,
)

from bus.contracts.actions import ActionRecord
from bus.contracts.build import AttemptRecord, BuildRecord, BuildRequest, FunnelStep, TimelineEntry
from bus.persistence.marks import cells_table
from bus.persistence.tables import DIALECT, FIRST_ROW, UUID, ZERO, identity_table, in_list, needed, outbox_tables
from bus.yielding import YieldingParts
from scheduler_worker.records.action_record import RecordedAction, Transfer
from scheduler_worker.records.build_record import (
    MAY_HAVE_NO_HOST,
    BuildUpdate,
    Gang,
    NewBuild,
    RecordedBuild,
    SinceBuild,
    as_it_is,
)

METADATA = MetaData()


def _request_columns() -> list[Column[Any]]:
    """The columns that every request has: a build, and one about an instance after it."""
    return [
        needed("project_id", Text),
        needed("digest", LargeBinary),
        needed("state", Text),
        needed("sequence", BigInteger),
        needed("terminal", Boolean),
        Column("cell", Text),
        Column("host", Text),
        Column("host_uuid", UUID),
        needed("code", Text, default=""),
        needed("reason", Text, default=""),
        needed("funnel", Text, default="[]"),
        needed("history", Text, default="[]"),
        needed("created_at", Double),
        needed("updated_at", Double),
    ]


# Of those that have no host: that is written with each build, and in no index.
IS_MAYBE_HOSTLESS = f"instance::json ->> 'condition' IN ({in_list(MAY_HAVE_NO_HOST)})"

# request: the message as it came, and digest: a digest of it. A repeat is distinguished from a clash, and a decision
# can be run again. timeline: JSON lines, which one statement appends to without reading; the oldest go (`APPENDED`).
# claim_owner: names this row to placement; a scheduler claims and releases by it.
# attempt: that holds the claim, as the cell has reported it last (0: none was claimed).
# gang: the request that several were made by, gang_min_count: how many of them start together at least.
# instance: JSON, what the instance has become since its build (NULL: it is as it was built). sequence: of its newest
# event, of the build or of a later request.
# fillfactor: a row is written three to five times in its first seconds; room on the page keeps these writes cheap.
# Nothing that changes by then is indexed, for the same reason.
build_requests = Table(
    "build_requests",
    METADATA,
    Column("instance_uuid", UUID, primary_key=True),
    *_request_columns(),
    needed("flavor", Text),
    needed("name", Text),
    needed("request", Text),
    needed("attempt", Integer, default=ZERO),
    needed("claim_owner", Text),
    needed("timeline", Text, default=""),
    Column("gang", UUID),
    Column("gang_min_count", Integer),
    Column("instance", Text),
    Index("build_requests_newest", text("created_at DESC")),
    Index("build_requests_of_project", "project_id", text("created_at DESC")),
    Index("build_requests_without_host", "project_id", postgresql_where=text(IS_MAYBE_HOSTLESS)),
    Index("build_requests_of_gang", "gang", postgresql_where=text("gang IS NOT NULL")),
    postgresql_with={"fillfactor": 50},
)

# Requests about instances after their builds: one row each. digest: of the whole message. sequence: of the newest event
# of the request. cell: where it was dispatched to. transfer: JSON, of a request that leads
# into another cell (NULL: of every other one). drain: that has made it, or the fence of a dead host, by an id that is
# made from it (NULL: a client has). A row is written under the lock of its instance's row above.
instance_actions = Table(
    "instance_actions",
    METADATA,
    Column("request_id", UUID, primary_key=True),
    needed("instance_uuid", UUID),
    needed("kind", Text),
    *_request_columns(),
    Column("transfer", Text),
    Column("drain", UUID),
    Index("instance_actions_of_instance", "instance_uuid", text("created_at DESC")),
    Index("instance_actions_newest", text("created_at DESC")),
    Index("instance_actions_under_way", "request_id", postgresql_where=text("NOT terminal")),
    Index(
        "instance_actions_of_drain",
        "drain",
        "terminal",
        text("created_at DESC"),
        postgresql_where=text("drain IS NOT NULL"),
    ),
)

# What operators define at run time, decisions about hosts included (bus.contracts.objects). body: JSON; version: the
# revision that it was last changed in. The one row of objects_revision is the lock of every change. token: made anew
# with each revision, because a database that was restored gives a number again.
objects_revision = Table(
    "objects_revision",
    METADATA,
    Column("singleton", Boolean, CheckConstraint("singleton"), primary_key=True, server_default=true()),
    needed("revision", BigInteger),
    needed("token", UUID, default=text("gen_random_uuid()")),
    info={FIRST_ROW: {"revision": 0}},
)
objects = Table(
    "objects",
    METADATA,
    Column("kind", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    needed("body", Text),
    needed("version", BigInteger),
    needed("changed_at", Double),
    needed("changed_by", Text),
)
object_log = Table(
    "object_log",
    METADATA,
    Column("revision", BigInteger, primary_key=True),
    Column("kind", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("before", Text),
    Column("after", Text),
    needed("at", Double),
    needed("actor", Text),
    needed("reason", Text, default=""),
    needed("forced", Boolean, default=false()),
)

# Web servers write it: `berth.web.history`.
fleet_history = Table(
    "fleet_history",
    METADATA,
    Column("minute", BigInteger, primary_key=True),
    needed("point", Text),
)

cells_table(METADATA)
outbox_tables(METADATA)
identity_table(METADATA)


# --- The rows of builds and of requests about instances: their columns, and the statements that write them. A record's
# fields have the names of their columns. `{}` stands for a value.

T = TypeVar("T")
NUL = "\x00"
Columns = tuple[Sequence[Any], ...]

ACTIONS = RecordedAction.__struct_fields__

# The columns of each record, and of each statement that writes a part of one.
BUILD = ", ".join(RecordedBuild.__struct_fields__)
_REACHED = ("state", "sequence", "terminal", "cell", "host", "host_uuid", "code", "reason")
DECIDED = ("instance_uuid", *_REACHED, "attempt")
# project_id: of a tombstone that becomes the record of another project's delete.
CHANGED = ("history", "project_id", "instance")
ACCEPTED = ("instance_uuid", "project_id", "state", "sequence", "terminal", "code", "reason", "claim_owner", "digest")
ACTION = ", ".join(ACTIONS)
EVENT_COLUMNS = ("request_id", *_REACHED, "history", "transfer")

_encoder = msgspec.json.Encoder()
_encode = _encoder.encode
_timelines = msgspec.json.Decoder(TimelineEntry)
build_request = msgspec.json.Decoder(BuildRequest).decode


def _timeline(text: str) -> tuple[TimelineEntry, ...]:
    return tuple(_timelines.decode_lines(text))


# Columns of JSON. NULL or '': the record has its default.
_JSON: Mapping[str, Callable[[str], Any]] = {
    "funnel": msgspec.json.Decoder(tuple[FunnelStep, ...]).decode,
    "history": msgspec.json.Decoder(tuple[AttemptRecord, ...]).decode,
    "instance": msgspec.json.Decoder(SinceBuild).decode,
    "timeline": _timeline,
    "transfer": msgspec.json.Decoder(Transfer).decode,
}
_READ: tuple[type[Any], ...] = (RecordedBuild, BuildRecord, RecordedAction, ActionRecord)
_JSON_OF = {kind: [name for name in kind.__struct_fields__ if name in _JSON] for kind in _READ}

ARE_NEW = "NOT EXISTS (SELECT FROM build_requests WHERE instance_uuid = ANY({}::uuid[]))"

# The builds that a search examines, the newest first, for a column without an index.
MAX_SEARCHED = 100_000

# As `build_record.present_flavor` and `build_record.flavors_in_use`.
FLAVOR = "coalesce(nullif(instance::json ->> 'flavor', ''), flavor)"
FLAVORS = f"ARRAY[{FLAVOR}, instance::json ->> 'new_flavor', instance::json ->> 'old_flavor']"
RECORD = """instance_uuid, project_id, flavor, name, state, cell, host, code, reason, funnel, history, timeline,
       created_at, updated_at, gang, coalesce(gang_min_count, 0) AS gang_min_count, instance"""

MAX_VALUES = 20
ROWS_AT_ONCE = 64  # made in one turn of the event loop


def numbered(statement: str) -> str:
    """A statement with numbered placeholders, to send alone."""
    return statement.format(*(f"${number}" for number in range(1, 1 + MAX_VALUES)), met="true")


def _named(columns: Sequence[str]) -> str:
    return ", ".join(columns)


def _insert(table: Table, columns: Sequence[str]) -> str:
    """An INSERT of many rows, which is followed by what is done where there is one."""
    named = _named(columns)
    return f"INSERT INTO {table.name} ({named}) SELECT * FROM unnest({_arrays(columns, table)}) ON CONFLICT "


def _assigned(columns: Sequence[str], of: str) -> str:
    return _named([f"{name} = {of}.{name}" for name in columns])


def _arrays(columns: Sequence[str], table: Table = build_requests) -> str:
    """An array of each column, one value a row."""
    kinds = [table.c[name].type.compile(dialect=DIALECT) for name in columns]
    return _named([f"{{}}::{kind}[]" for kind in kinds])


# The timeline of a build with new lines. A client may request as much of its instance as it likes, and every page of
# builds, which is one message, reads their timelines whole: of one that is longer than so many characters the oldest
# half goes first.
MAX_TIMELINE = 32_768
_NEWER = f"right(build_requests.timeline, {MAX_TIMELINE // 2})"
APPENDED = f"""CASE WHEN length(build_requests.timeline) <= {MAX_TIMELINE} THEN build_requests.timeline
    ELSE substr({_NEWER}, strpos({_NEWER}, chr(10)) + 1) END || n.timeline"""


def appended(lines: tuple[TimelineEntry, ...], more: tuple[TimelineEntry, ...]) -> tuple[TimelineEntry, ...]:
    """`APPENDED`, of the lines themselves."""
    text = timeline_text(lines)
    if len(text) > MAX_TIMELINE:
        lines = _timeline(text[-(MAX_TIMELINE // 2) :].partition("\n")[2])
    return (*lines, *more)


def _update(assigned: Sequence[str], *compared: str) -> str:
    """An UPDATE of many builds, which appends to their timelines. compared: columns that stay, and are as given."""
    given = (*assigned, *compared, "timeline")
    return f"""
UPDATE build_requests
SET {_assigned(assigned[1:], "n")}, timeline = {APPENDED}, updated_at = t.now
FROM unnest({_arrays(given)}) n({_named(given)}), (SELECT {{}}::float8 AS now) t
WHERE {" AND ".join(f"build_requests.{name} = n.{name}" for name in ("instance_uuid", *compared))} AND {{met}}
"""


_INSERTED = (*ACCEPTED, "flavor", "name", "request", "timeline", "gang", "gang_min_count")
INSERT = f"""
INSERT INTO build_requests ({_named(_INSERTED)}, created_at, updated_at)
SELECT n.*, t.now, t.now FROM unnest({_arrays(_INSERTED)}) n, (SELECT {{}}::float8 AS now) t
WHERE {{met}} ON CONFLICT (instance_uuid) DO NOTHING
RETURNING instance_uuid
"""

# If the statement is planned by key, as in an optimistic unit, the values are looked up one by one: rows are locked in
# the order of the values (tests/integration/scheduler_worker/test_app.py). A locking unit locks them before.
DECIDE = (
    _update((*DECIDED, "funnel"), "claim_owner")
    + "  AND build_requests.state = 'accepted' RETURNING build_requests.instance_uuid"
)
UPDATE = _update((*DECIDED, *CHANGED))
INSERT_ACTIONS = _insert(instance_actions, (*ACTIONS, "updated_at")) + "(request_id) DO NOTHING RETURNING request_id"
_EVENT_COLUMNS = (*EVENT_COLUMNS, "updated_at")
UPDATE_ACTIONS = f"""
UPDATE instance_actions SET {_assigned(_EVENT_COLUMNS[1:], "n")}
FROM unnest({_arrays(_EVENT_COLUMNS, instance_actions)}) n({_named(_EVENT_COLUMNS)})
WHERE instance_actions.request_id = n.request_id
"""


def columns(records: Sequence[object], names: Sequence[str], *more: object) -> Columns:
    """The columns of a statement that writes these fields. more: of each row, after them."""
    fields = attrgetter(*names)
    return tuple(zip(*((*_values(fields(one)), *more) for one in records), strict=True))


async def insert_columns(builds: Sequence[NewBuild]) -> Columns:
    """The columns of INSERT."""
    return await _columns(_insert_row, builds)


async def decide_columns(decisions: Sequence[BuildUpdate]) -> Columns:
    """The columns of DECIDE."""
    return await _columns(lambda one: (*_values(_decided(one)), timeline_text(one.timeline)), decisions)


async def update_columns(updates: Sequence[BuildUpdate]) -> Columns:
    """The columns of UPDATE."""
    return await _columns(lambda one: (*_values(_updated(one.build)), timeline_text(one.timeline)), updates)


async def _columns(row_of: Callable[[T], tuple[Any, ...]], items: Sequence[T]) -> Columns:
    found = [row_of(one) async for part in YieldingParts(items, ROWS_AT_ONCE) for one in part]
    return tuple(zip(*found, strict=True))


def _of(record: str, *names: str) -> list[str]:
    """The paths of a record's fields."""
    return [f"{record}.{name}" for name in names]


_inserted = attrgetter(*_of("build", *ACCEPTED), *_of("request", "flavor", "name"), "request")
_decided = attrgetter(*_of("build", *DECIDED), "funnel", *_of("build", "claim_owner"))
_updated = attrgetter(*DECIDED, *CHANGED)


def _insert_row(new: NewBuild) -> tuple[Any, ...]:
    gang = new.gang
    members = (None, None) if gang is None else (gang.uuid, gang.min_count)
    return (*_values(_inserted(new)), timeline_text(new.timeline), *members)


_PLAIN = (int, float, bytes, type(None))


def _values(fields: Sequence[object]) -> list[Any]:
    """Fields as their columns have them: what PostgreSQL has no type for is JSON. In one expression: a boot pays it."""
    return [
        one.replace(NUL, "") if isinstance(one, str) else one if isinstance(one, _PLAIN) else _encode(one).decode()
        for one in fields
    ]


def timeline_text(lines: Sequence[TimelineEntry]) -> str:
    """Timeline lines as they are appended."""
    return _encoder.encode_lines(lines).decode()


def clean(text: str) -> str:
    """Text without the NUL character, which PostgreSQL does not store."""
    return text.replace(NUL, "")


def read(row: Mapping[str, Any], kind: type[T]) -> T:
    """The record of a row that has at least its columns."""
    fields = dict(row)
    for name in _JSON_OF[kind]:
        text = fields.pop(name)
        if text:
            fields[name] = _JSON[name](text)
    return msgspec.convert(fields, kind)


def build_record(row: Mapping[str, Any]) -> BuildRecord:
    """A build as clients see it."""
    fields = dict(row)
    instance = fields.pop("instance")
    return as_it_is(read(fields, BuildRecord), None if instance is None else _JSON["instance"](instance))


def new_build(row: Mapping[str, Any]) -> NewBuild:
    """A build with its request, as it was put on record. size: of its gang."""
    gang = row["gang"]
    return NewBuild(
        request=build_request(row["request"]),
        build=read(row, RecordedBuild),
        gang=None if gang is None else Gang(uuid=gang, size=row["size"], min_count=row["gang_min_count"]),
        created_at=row["created_at"],
    )
