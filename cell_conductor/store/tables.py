"""The schema `cell_<name>`: the instances of one cell.

Times are seconds since the epoch, where their type is a number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
from sqlalchemy import BigInteger, Boolean, Column, Double, Index, Integer, MetaData, Table, Text, text
from sqlalchemy.dialects.postgresql import JSON

from bus.persistence.tables import (
    FIRST_ROW,
    MOMENT,
    UUID,
    ZERO,
    identity_table,
    needed,
    only_row,
    outbox_tables,
)
from cell_conductor.domain.desires import EXPECTED_HERE, PURGED, PURGED_FAILED, in_sql, in_text
from cell_conductor.domain.instance import Instance

METADATA = MetaData()

# record: the instance as domain.Instance, in JSON; the columns beside it are what is searched by.
# newest: the highest attempt number given out, where that is not `attempt`.
# source_host_uuid, source_attempt: the other machine of an instance that moves.
# Only what the sweep, the reports and the purge of what ended long ago ask for is indexed: most rows at rest have no
# deadline.
instances = Table(
    "instances",
    METADATA,
    Column("uuid", UUID, primary_key=True),
    needed("state", Text),
    Column("host_uuid", UUID),
    needed("attempt", Integer),
    needed("newest", Integer, default=ZERO),
    Column("source_host_uuid", UUID),
    needed("source_attempt", Integer, default=ZERO),
    needed("since", Double),
    Column("deadline", Double),
    needed("record", JSON),
    Index("instances_deadline", "deadline", postgresql_where=text("deadline IS NOT NULL")),
    Index("instances_host", "host_uuid", postgresql_where=text(f"state IN ({in_sql(EXPECTED_HERE)})")),
    Index("instances_source", "source_host_uuid", postgresql_where=text("source_host_uuid IS NOT NULL")),
    Index("instances_over", "since", postgresql_where=text(f"state IN ({in_sql(PURGED)})")),
    Index("instances_failed", "since", postgresql_where=text(f"state IN ({in_sql(PURGED_FAILED)})")),
    postgresql_with={"fillfactor": 80},
)

# The identity of this cell's database marks every machine that the cell orders: an empty or another database never
# takes this one's machines for its own. origin: origin_of('instances') when the database was last looked at ('':
# never); one that was restored or promoted since has another. set_back_at: when that was last seen; a build that was
# requested before may have been handed in before.
identity = identity_table(METADATA, needed("origin", Text, default=""), needed("set_back_at", Double, default=ZERO))

# When this schema was made; an instance may have come from another cell before, into a schema that was here earlier.
made = Table(
    "made",
    METADATA,
    needed("at", Double, default=text("extract(epoch FROM clock_timestamp())")),
    only_row(),
    info={FIRST_ROW: {}},
)

# Machines that no record explains, and what an operator decided about each.
unexplained = Table(
    "unexplained",
    METADATA,
    Column("host_uuid", UUID, primary_key=True),
    Column("instance_uuid", UUID, primary_key=True),
    needed("attempt", Integer),
    needed("service", Text),
    needed("kind", Text),
    needed("why", Text),
    needed("first_seen", Double),
    needed("last_seen", Double),
    needed("verdict", Text, default=""),
    needed("decided_by", Text, default=""),
    needed("decided_at", Double, default=ZERO),
    Index("unexplained_instance", "instance_uuid"),
)

# The breakers of compute services.
breakers = Table("breakers", METADATA, Column("service", Text, primary_key=True), needed("record", JSON))

# What is believed of each compute service (cell_conductor.domain.leases). interval_s: how often it sends a heartbeat;
# since: when its state began; listed: the hosts of one that is down; era: the database's, when they were recorded.
leases = Table(
    "leases",
    METADATA,
    Column("service", Text, primary_key=True),
    needed("epoch", BigInteger),
    needed("interval_s", Double),
    needed("state", Text),
    needed("since", Double),
    needed("reason", Text),
    needed("listed", Text, default=""),
    needed("era", BigInteger, default=ZERO),
)

# The conductor that records and publishes the leases, until when; its term rises with each change of keeper.
lease_keeper = Table(
    "lease_keeper", METADATA, needed("process", Text), needed("term", BigInteger), needed("until", MOMENT), only_row()
)

# Hosts that an operator has fenced, and the machines that such a host has lost: no attempt up to this one is wanted
# there, and its allocation is given up. Who records a loss holds the fence's row; it goes when its host has no losses
# left. version: of the decision.
fences = Table(
    "fences",
    METADATA,
    Column("host_uuid", UUID, primary_key=True),
    needed("host", Text),
    needed("version", BigInteger),
    needed("lifting", Boolean),
    needed("reason", Text),
    needed("decided_by", Text),
    needed("at", Double),
)
fence_losses = Table(
    "fence_losses",
    METADATA,
    Column("host_uuid", UUID, primary_key=True),
    Column("instance_uuid", UUID, primary_key=True),
    needed("attempt", Integer),
    needed("service", Text),
    needed("at", Double),
)

# The decision that lifted a host's last fence: the message of an older one may be delivered again, which would fence a
# host that is used.
lifted_fences = Table(
    "lifted_fences", METADATA, Column("host_uuid", UUID, primary_key=True), needed("version", BigInteger)
)

outbox_tables(METADATA)


# --- An instance as a row, for every statement that writes one.

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
