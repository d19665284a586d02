"""A build as a row, for every statement that reads or writes one. `{}` stands for a value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import asyncpg
import msgspec

from bus.contracts.build import AttemptRecord, BuildRecord, BuildState, FunnelStep, StoryLine
from scheduler_worker.domain.records import Standing
from scheduler_worker.store.port import Change, Decided, Kept, NewBuild

_encode = msgspec.json.Encoder().encode
_histories = msgspec.json.Decoder(tuple[AttemptRecord, ...])
_funnels = msgspec.json.Decoder(tuple[FunnelStep, ...])
_stories = msgspec.json.Decoder(StoryLine)

Columns = tuple[Sequence[Any], ...]

INSERT = """
INSERT INTO build_requests (instance_uuid, project_id, flavor, name, request, digest, state, sequence, terminal,
                            code, reason, story, created_at, updated_at)
SELECT n.*, t.now, t.now
FROM unnest({}::uuid[], {}::text[], {}::text[], {}::text[], {}::text[], {}::bytea[], {}::text[], {}::bigint[],
            {}::boolean[], {}::text[], {}::text[], {}::text[]) n, (SELECT {}::float8 AS now) t
ON CONFLICT (instance_uuid) DO NOTHING
RETURNING instance_uuid
"""

# Planned by key, as a unit that believes has it, the values are looked for one by one: rows are locked in the values'
# order (tests/integration/scheduler/test_lock_order.py). Anybody else locks them first.
DECIDE = """
UPDATE build_requests b
SET state = n.state, sequence = n.sequence, terminal = n.terminal, cell = n.cell, host = n.host, code = n.code,
    reason = n.reason, funnel = n.funnel, story = b.story || n.story, updated_at = t.now
FROM unnest({}::uuid[], {}::text[], {}::bigint[], {}::boolean[], {}::text[], {}::text[], {}::text[], {}::text[],
            {}::text[], {}::text[])
     n(instance_uuid, state, sequence, terminal, cell, host, code, reason, funnel, story), (SELECT {}::float8 AS now) t
WHERE b.instance_uuid = n.instance_uuid AND b.state = 'accepted' AND NOT b.delete_requested
RETURNING b.instance_uuid
"""

MAP = """
INSERT INTO instance_cells (instance_uuid, cell, host_uuid, mapped_at)
SELECT n.*, {3}::float8 FROM unnest({0}::uuid[], {1}::text[], {2}::uuid[]) n
ON CONFLICT (instance_uuid) DO NOTHING
RETURNING instance_uuid
"""

RECORD = """instance_uuid, project_id, flavor, name, state, cell, host, code, reason, funnel, history, story,
       created_at, updated_at"""

KEPT = "instance_uuid, project_id, state, sequence, terminal, cell, host, code, reason, history, delete_requested"

CHANGE = """
UPDATE build_requests b
SET state = n.state, sequence = n.sequence, terminal = n.terminal, delete_requested = n.delete_requested,
    cell = n.cell, host = n.host, code = n.code, reason = n.reason, history = n.history,
    story = b.story || n.story, updated_at = t.now
FROM unnest({}::uuid[], {}::text[], {}::bigint[], {}::boolean[], {}::boolean[], {}::text[], {}::text[], {}::text[],
            {}::text[], {}::text[], {}::text[])
     n(instance_uuid, state, sequence, terminal, delete_requested, cell, host, code, reason, history, story),
     (SELECT {}::float8 AS now) t
WHERE b.instance_uuid = n.instance_uuid
"""


def numbered(statement: str) -> str:
    """A statement as it is sent alone."""
    return statement.format(*(f"${number}" for number in range(1, 1 + MOST_VALUES)))


MOST_VALUES = 13


def new(builds: Sequence[NewBuild]) -> Columns:
    """The columns of INSERT."""
    return _columns(map(_new_row, builds))


def decided(ones: Sequence[Decided]) -> Columns:
    """The columns of DECIDE."""
    return _columns(map(_decided_row, ones))


def mapping(placed: Sequence[Decided]) -> Columns:
    """The columns of MAP."""
    return _columns((one.instance_uuid, one.cell, one.host_uuid) for one in placed)


def changed(changes: Sequence[Change]) -> Columns:
    """The columns of CHANGE."""
    return _columns(map(_changed_row, changes))


def _columns(found: Iterable[tuple[Any, ...]]) -> Columns:
    return tuple(zip(*found, strict=True))


def story_text(lines: Sequence[StoryLine]) -> str:
    """Story lines as they are appended."""
    return "".join(_encode(line).decode() + "\n" for line in lines)


def _new_row(build: NewBuild) -> tuple[Any, ...]:
    request = build.request
    return (
        request.instance_uuid,
        request.project_id,
        clean(request.flavor),
        clean(request.name),
        clean(_encode(request).decode()),
        build.digest,
        build.state.value,
        build.sequence,
        build.terminal,
        build.code,
        clean(build.reason),
        story_text(build.story),
    )


def _decided_row(one: Decided) -> tuple[Any, ...]:
    return (
        one.instance_uuid,
        one.state.value,
        one.sequence,
        one.terminal,
        one.cell,
        one.host and clean(one.host),
        clean(one.code),
        clean(one.reason),
        _encode(one.funnel).decode(),
        story_text(one.story),
    )


def _changed_row(change: Change) -> tuple[Any, ...]:
    standing = change.standing
    return (
        standing.instance_uuid,
        standing.state.value,
        standing.sequence,
        standing.terminal,
        change.delete_requested,
        standing.cell,
        standing.host and clean(standing.host),
        clean(standing.code),
        clean(standing.reason),
        _encode(standing.history).decode(),
        story_text(change.story),
    )


def clean(text: str) -> str:
    """Text that PostgreSQL takes: it has no room for the NUL character."""
    return text.replace("\x00", "")


def kept(row: asyncpg.Record) -> Kept:
    """A row of KEPT."""
    standing = Standing(
        instance_uuid=row["instance_uuid"],
        project_id=row["project_id"],
        state=BuildState(row["state"]),
        sequence=row["sequence"],
        terminal=row["terminal"],
        cell=row["cell"],
        host=row["host"],
        code=row["code"],
        reason=row["reason"],
        history=_histories.decode(row["history"]),
    )
    return Kept(standing=standing, delete_requested=row["delete_requested"])


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
        story=tuple(_stories.decode_lines(row["story"])) if row["story"] else (),
    )
