"""A build as a row of `build_requests`: the statements that write one, and its columns. `{}` stands for a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import asyncpg
import msgspec

from bus.contracts.build import AttemptRecord, BuildRecord, BuildRequest, BuildState, FunnelStep, TimelineEntry
from bus.contracts.moves import CellMove, Condition, MoveKind, MoveRecord, MoveState
from bus.turns import InParts
from scheduler_worker.domain.builds import BuildDecision, BuildUpdate, Gang, NewBuild, RecordedBuild
from scheduler_worker.domain.recorded_moves import InstanceRecord, RecordedMove, record_of

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode
_histories = msgspec.json.Decoder(tuple[AttemptRecord, ...])
_funnels = msgspec.json.Decoder(tuple[FunnelStep, ...])
_timelines = msgspec.json.Decoder(TimelineEntry)

Columns = tuple[Sequence[Any], ...]

INSERT = """
INSERT INTO build_requests (instance_uuid, project_id, flavor, name, request, digest, state, sequence, terminal,
                            code, reason, run, timeline, gang, gang_min, created_at, updated_at)
SELECT n.*, t.now, t.now
FROM unnest({}::uuid[], {}::text[], {}::text[], {}::text[], {}::text[], {}::bytea[], {}::text[], {}::bigint[],
            {}::boolean[], {}::text[], {}::text[], {}::text[], {}::text[], {}::uuid[], {}::integer[]) n,
     (SELECT {}::float8 AS now) t
WHERE {met} ON CONFLICT (instance_uuid) DO NOTHING
RETURNING instance_uuid
"""

ARE_NEW = "NOT EXISTS (SELECT FROM build_requests WHERE instance_uuid = ANY({}::uuid[]))"

# If the statement is planned by key, as in an optimistic unit, the values are looked up one by one: rows are locked in
# the order of the values (tests/integration/scheduler/test_lock_order.py). A locking unit locks them before.
DECIDE = """
UPDATE build_requests
SET state = n.state, sequence = n.sequence, attempt = n.attempt, terminal = n.terminal, cell = n.cell, host = n.host,
    host_uuid = n.host_uuid, code = n.code, reason = n.reason, funnel = n.funnel,
    timeline = build_requests.timeline || n.timeline, updated_at = t.now
FROM unnest({}::uuid[], {}::text[], {}::bigint[], {}::integer[], {}::boolean[], {}::text[], {}::text[], {}::uuid[],
            {}::text[], {}::text[], {}::text[], {}::text[], {}::text[])
     n(instance_uuid, state, sequence, attempt, terminal, cell, host, host_uuid, code, reason, run, funnel, timeline),
     (SELECT {}::float8 AS now) t
WHERE build_requests.instance_uuid = n.instance_uuid AND build_requests.run = n.run
  AND build_requests.state = 'accepted' AND {met}
RETURNING build_requests.instance_uuid
"""

# The builds that a search examines, the newest first, for a column without an index.
MAX_SEARCHED = 100_000

RECORD = """b.instance_uuid, project_id, coalesce(nullif(i.flavor, ''), b.flavor) AS flavor, name, state, cell, host,
       code, reason, funnel, history, timeline, created_at, updated_at, i.condition, i.under_way, gang, gang_min"""

BUILD = """instance_uuid, project_id, state, sequence, attempt, terminal, cell, host, host_uuid, code, reason,
       history, run"""

UPDATE = """
UPDATE build_requests
SET state = n.state, sequence = n.sequence, attempt = n.attempt, terminal = n.terminal,
    cell = n.cell, host = n.host,
    host_uuid = n.host_uuid, code = n.code, reason = n.reason, history = n.history,
    timeline = build_requests.timeline || n.timeline, updated_at = t.now
FROM unnest({}::uuid[], {}::text[], {}::bigint[], {}::integer[], {}::boolean[], {}::text[],
            {}::text[], {}::uuid[], {}::text[], {}::text[], {}::text[], {}::text[])
     n(instance_uuid, state, sequence, attempt, terminal, cell, host, host_uuid, code, reason, history, timeline),
     (SELECT {}::float8 AS now) t
WHERE build_requests.instance_uuid = n.instance_uuid AND {met}
"""


MAX_VALUES = 16
ROWS_AT_ONCE = 64  # made in one turn of the event loop


def numbered(statement: str) -> str:
    """A statement with numbered placeholders, to send alone."""
    return statement.format(*(f"${number}" for number in range(1, 1 + MAX_VALUES)), met="true")


async def insert_columns(builds: Sequence[NewBuild]) -> Columns:
    """The columns of INSERT."""
    return await _columns(_insert_row, builds)


async def decide_columns(decisions: Sequence[BuildDecision]) -> Columns:
    """The columns of DECIDE."""
    return await _columns(_decide_row, decisions)


async def update_columns(updates: Sequence[BuildUpdate]) -> Columns:
    """The columns of UPDATE."""
    return await _columns(_update_row, updates)


async def _columns(row_of: Callable[[T], tuple[Any, ...]], items: Sequence[T]) -> Columns:
    found = [row_of(one) async for part in InParts(items, ROWS_AT_ONCE) for one in part]
    return tuple(zip(*found, strict=True))


def timeline_text(lines: Sequence[TimelineEntry]) -> str:
    """Timeline lines as they are appended."""
    return "".join(_encode(line).decode() + "\n" for line in lines)


def _insert_row(new: NewBuild) -> tuple[Any, ...]:
    request, build = new.request, new.build
    return (
        build.instance_uuid,
        build.project_id,
        clean(request.flavor),
        clean(request.name),
        clean(_encode(request).decode()),
        new.digest,
        build.state.value,
        build.sequence,
        build.terminal,
        build.code,
        clean(build.reason),
        build.run,
        timeline_text(new.timeline),
        new.gang and new.gang.uuid,
        new.gang and new.gang.min_count,
    )


def _decide_row(decision: BuildDecision) -> tuple[Any, ...]:
    build = decision.build
    return (
        build.instance_uuid,
        build.state.value,
        build.sequence,
        build.attempt,
        build.terminal,
        build.cell,
        build.host and clean(build.host),
        build.host_uuid,
        clean(build.code),
        clean(build.reason),
        build.run,
        _encode(decision.funnel).decode(),
        timeline_text(decision.timeline),
    )


def _update_row(update: BuildUpdate) -> tuple[Any, ...]:
    build = update.build
    return (
        build.instance_uuid,
        build.state.value,
        build.sequence,
        build.attempt,
        build.terminal,
        build.cell,
        build.host and clean(build.host),
        build.host_uuid,
        clean(build.code),
        clean(build.reason),
        _encode(build.history).decode(),
        timeline_text(update.timeline),
    )


def clean(text: str) -> str:
    """Text without the NUL character, which PostgreSQL does not store."""
    return text.replace("\x00", "")


def recorded(row: asyncpg.Record) -> RecordedBuild:
    """A row of BUILD."""
    return RecordedBuild(
        instance_uuid=row["instance_uuid"],
        project_id=row["project_id"],
        state=BuildState(row["state"]),
        sequence=row["sequence"],
        attempt=row["attempt"],
        terminal=row["terminal"],
        cell=row["cell"],
        host=row["host"],
        host_uuid=row["host_uuid"],
        code=row["code"],
        reason=row["reason"],
        history=_histories.decode(row["history"]),
        run=row["run"],
    )


def new_build(row: asyncpg.Record) -> NewBuild:
    """A row of BUILD with its request, as it was put on record. size: of its gang."""
    gang = row["gang"]
    return NewBuild(
        request=build_request(row["request"]),
        digest=row["digest"],
        build=recorded(row),
        gang=None if gang is None else Gang(uuid=gang, size=row["size"], min_count=row["gang_min"]),
        created_at=row["created_at"],
    )


def record(row: asyncpg.Record) -> BuildRecord:
    """A row of RECORD."""
    return BuildRecord(
        instance_uuid=row["instance_uuid"],
        project_id=row["project_id"],
        flavor=row["flavor"],
        state=BuildState(row["state"]),
        name=row["name"],
        cell=row["cell"],
        host=row["host"],
        code=row["code"],
        reason=row["reason"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        funnel=_funnels.decode(row["funnel"]),
        history=_histories.decode(row["history"]),
        timeline=tuple(_timelines.decode_lines(row["timeline"])) if row["timeline"] else (),
        condition=row["condition"] or "",
        under_way=row["under_way"],
        gang=row["gang"],
        gang_min=row["gang_min"] or 0,
    )


_commands = msgspec.json.Decoder(CellMove)
MOVE = """request_id, instance_uuid, project_id, kind, digest, state, sequence, terminal, cell, host, host_uuid, code,
       reason, funnel, history, created_at, command"""


def move(row: Mapping[str, Any]) -> RecordedMove:
    """A row of MOVE."""
    return RecordedMove(
        request_id=row["request_id"],
        instance_uuid=row["instance_uuid"],
        project_id=row["project_id"],
        kind=MoveKind(row["kind"]),
        digest=row["digest"],
        state=MoveState(row["state"]),
        sequence=row["sequence"],
        terminal=row["terminal"],
        cell=row["cell"],
        host=row["host"],
        host_uuid=row["host_uuid"],
        code=row["code"],
        reason=row["reason"],
        funnel=_funnels.decode(row["funnel"]),
        history=_histories.decode(row["history"]),
        created_at=row["created_at"],
        command=_commands.decode(row["command"]) if row["command"] else None,
    )


def move_record(row: Mapping[str, Any]) -> MoveRecord:
    """A row of MOVE, and when it was last written."""
    return record_of(move(row), row["updated_at"])


def move_row(one: RecordedMove, now: float) -> tuple[Any, ...]:
    """The values of a row of MOVE, and when it is written."""
    return (
        one.request_id,
        one.instance_uuid,
        one.project_id,
        one.kind.value,
        one.digest,
        one.state.value,
        one.sequence,
        one.terminal,
        one.cell,
        one.host and clean(one.host),
        one.host_uuid,
        clean(one.code),
        clean(one.reason),
        _encode(one.funnel).decode(),
        _encode(one.history).decode(),
        one.created_at,
        "" if one.command is None else clean(_encode(one.command).decode()),
        now,
    )


INSTANCE = "instance_uuid, condition, flavor, image, image_properties, under_way, sequence"

_properties = msgspec.json.Decoder(dict[str, dict[str, str]])


def instance(row: asyncpg.Record) -> InstanceRecord:
    """A row of INSTANCE."""
    return InstanceRecord(
        instance_uuid=row["instance_uuid"],
        condition=Condition(row["condition"]),
        flavor=row["flavor"],
        image=row["image"],
        image_properties=_properties.decode(row["image_properties"]),
        under_way=row["under_way"],
        sequence=row["sequence"],
    )


def instance_row(one: InstanceRecord) -> tuple[Any, ...]:
    """The values of a row of INSTANCE."""
    return (
        one.instance_uuid,
        one.condition.value,
        clean(one.flavor),
        clean(one.image),
        clean(_encode(one.image_properties).decode()),
        one.under_way,
        one.sequence,
    )


_requests = msgspec.json.Decoder(BuildRequest)


def build_request(text: str) -> BuildRequest:
    """The message of a build as it is kept."""
    return _requests.decode(text)
