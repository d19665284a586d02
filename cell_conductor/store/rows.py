"""An instance as a row, for every statement that writes one."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from cell_conductor.domain.desires import in_text
from cell_conductor.domain.instance import Instance

HANDLER = "conductor"

NAMES = "uuid, state, host_uuid, attempt, newest, source_host_uuid, source_attempt, since, deadline, record"
GIVEN = (
    "unnest({}::uuid[], {}::text[], {}::uuid[], {}::int[], {}::int[], {}::uuid[], {}::int[], {}::float8[],"
    " {}::float8[], {}::text[]::json[])"
)
ASSIGNED = """
state = n.state, host_uuid = n.host_uuid, attempt = n.attempt, newest = n.newest,
source_host_uuid = n.source_host_uuid, source_attempt = n.source_attempt,
since = n.since, deadline = n.deadline, record = n.record
"""
NEVER_SEEN = f"NOT EXISTS (SELECT FROM handled WHERE handler = '{HANDLER}' AND message_id = ANY({{}}::text[]))"
SEEN = f"""
INSERT INTO handled (handler, message_id) SELECT '{HANDLER}', unnest({{}}::text[]) WHERE {{met}}
ON CONFLICT DO NOTHING RETURNING 1
"""

INSERT = f"INSERT INTO instances ({NAMES}) SELECT * FROM {GIVEN} AS n WHERE {{met}} ON CONFLICT (uuid) DO NOTHING"
UPDATE = f"UPDATE instances SET {ASSIGNED} FROM {GIVEN} AS n ({NAMES}) WHERE instances.uuid = n.uuid AND {{met}}"

# As `Instance.service`.
SERVICE = """CASE WHEN coalesce(record ->> 'position', '0') <> '0' AND record #>> '{move,to_cell}' IS NOT NULL THEN ''
    ELSE coalesce(record #>> ARRAY['selections', coalesce(record ->> 'position', '0'), 'service'], '') END"""

_encode = msgspec.json.Encoder().encode
_NUL = re.compile(r"(\\\\)|\\u0000")  # an escaped backslash, or the escape of U+0000
decode = msgspec.json.Decoder(Instance).decode


def numbered(statement: str) -> str:
    """A statement with `{}` for each of the columns, as it is sent alone."""
    return statement.format(*(f"${number}" for number in range(1, 11)), met="true")


def encode(instance: Instance) -> str:
    """The record as JSON, without U+0000: PostgreSQL could not read it, nor the records beside it.

    A compute service's text may hold one; clients' are refused with it.
    """
    record = _encode(instance).decode()
    return _NUL.sub(r"\1", record) if r"\u0000" in record else record


def columns(instances: Sequence[Instance]) -> tuple[list[object], ...]:
    """Column arrays in uuid order, which is the order of the locks an insert takes."""
    ordered = sorted(instances, key=lambda instance: instance.uuid)
    return (
        [instance.uuid for instance in ordered],
        [in_text(instance.phase) for instance in ordered],
        [instance.host_uuid for instance in ordered],
        [instance.attempt for instance in ordered],
        [instance.newest for instance in ordered],
        [instance.source_host_uuid for instance in ordered],
        [instance.source_attempt for instance in ordered],
        [instance.since for instance in ordered],
        [instance.deadline for instance in ordered],
        [encode(instance) for instance in ordered],
    )
