"""The schema `cell_<name>`: the instances of one cell.

Times are seconds since the epoch, where their type is a number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from operator import attrgetter

import msgspec
from msgspec import Struct
from sqlalchemy import BigInteger, Column, Computed, Double, Index, Integer, MetaData, Table, Text, text
from sqlalchemy.dialects.postgresql import JSON

from bus.contracts.base import SENT_SLOTS, DatabaseMark
from bus.persistence.tables import FIRST_ROW, UUID, ZERO, identity_table, needed, only_row, outbox_tables
from cell_conductor.state.desired_state import AT_REST, PURGEABLE, PURGEABLE_FAILED, phase_to_text, phases_as_sql
from cell_conductor.state.instance import Instance
from cell_conductor.store.keyed_tables import KEYED, UNKNOWN_MACHINES

METADATA = MetaData()

# record: the instance as `state.instance.Instance`, in JSON; the columns beside it are what is searched by.
# highest_attempt: the highest attempt number given out, where that is not `attempt`.
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
    needed("highest_attempt", Integer, default=ZERO),
    Column("source_host_uuid", UUID),
    needed("source_attempt", Integer, default=ZERO),
    needed("since", Double),
    Column("deadline", Double),
    needed("record", JSON),
    Index("instances_deadline", "deadline", postgresql_where=text("deadline IS NOT NULL")),
    Index("instances_host", "host_uuid", postgresql_where=text(f"state NOT IN ({phases_as_sql(AT_REST)})")),
    Index("instances_source", "source_host_uuid", postgresql_where=text("source_host_uuid IS NOT NULL")),
    Index("instances_over", "since", postgresql_where=text(f"state IN ({phases_as_sql(PURGEABLE)})")),
    Index("instances_failed", "since", postgresql_where=text(f"state IN ({phases_as_sql(PURGEABLE_FAILED)})")),
    postgresql_with={"fillfactor": 80},
)

# The identity of this cell's database tags every machine that the cell commands: an empty or another database never
# takes this one's machines for its own. origin: origin_of('instances') when the database was last looked at ('':
# never); one that was restored or promoted since has another. database_incarnation: the number of this history, which
# every command and request of the cell carries. state: `open`, or `recovering`: no step is recorded; `accepted`: and an
# operator has accepted `losses`, which are more than a recovery makes by itself.
# ended_incarnations: {number: what `sent` had when this database left it}, of those since the last recovery. absent:
# {compute service: whether it has nothing by an operator's decision}, of those that had not listed when it ended.
identity = identity_table(
    METADATA,
    needed("origin", Text, default=""),
    needed("database_incarnation", Integer, default=text("1")),
    needed("state", Text, default="open"),
    needed("losses", JSON, default=text("'{}'")),
    needed("ended_incarnations", JSON, default=text("'{}'")),
    needed("absent", JSON, default=text("'{}'")),
)

# Each commit that waits for the disk raises one of these, and its messages state it afterwards. It takes one that is
# free: the row is held until the commit is on disk, and commits at once would wait for each other. Apart from the
# identity, which every write reads: while something reads for long, all versions of a row are looked through.
sent = Table(
    "sent",
    METADATA,
    Column("slot", Integer, primary_key=True, autoincrement=False),
    needed("sequence", BigInteger, default=ZERO),
    info={FIRST_ROW: [{"slot": slot} for slot in range(SENT_SLOTS)]},
    postgresql_with={"fillfactor": 10},
)

# Values, each as JSON under its key.
for one in KEYED:
    key = [Column(name, UUID if name.endswith("_uuid") else Text, primary_key=True) for name in one.columns]
    Table(one.name, METADATA, *key, needed("record", JSON))
unknown_machines = METADATA.tables[UNKNOWN_MACHINES.name]
Index("unknown_machines_instance", unknown_machines.c.instance_uuid)
# Every report reads all of them.
unknown_machines.append_column(Column("decision", Text, Computed("record ->> 'decision'", persisted=True)))

# The conductor that records and publishes the leases, until when; its term rises with each change of leader.
leader = Table(
    "leader",
    METADATA,
    needed("process", Text, default=""),
    needed("term", BigInteger, default=ZERO),
    needed("until", Double, default=ZERO),
    only_row(),
    info={FIRST_ROW: {}},
)

outbox_tables(METADATA)


# --- An instance as a row, for every statement that writes one.

HANDLER = "conductor"

NAMES = "uuid, state, host_uuid, attempt, highest_attempt, source_host_uuid, source_attempt, since, deadline, record"
GIVEN = (
    "unnest({}::uuid[], {}::text[], {}::uuid[], {}::int[], {}::int[], {}::uuid[], {}::int[], {}::float8[],"
    " {}::float8[], {}::text[]::json[])"
)
ASSIGNED = """
state = n.state, host_uuid = n.host_uuid, attempt = n.attempt, highest_attempt = n.highest_attempt,
source_host_uuid = n.source_host_uuid, source_attempt = n.source_attempt,
since = n.since, deadline = n.deadline, record = n.record
"""
NEVER_SEEN = f"NOT EXISTS (SELECT FROM handled WHERE handler = '{HANDLER}' AND message_id = ANY({{}}::text[]))"
SEEN = f"""
INSERT INTO handled (handler, message_id) SELECT '{HANDLER}', unnest({{}}::text[]) WHERE {{met}}
ON CONFLICT DO NOTHING RETURNING 1
"""

INCARNATION = "SELECT database_incarnation FROM identity"
# Part of every statement that writes: no step is recorded in a database whose set-back this process has not recognised,
SAME_DATABASE = """
SELECT 1 FROM identity WHERE database_id = {}::uuid AND origin = origin_of('instances') AND database_incarnation = {}
"""
# nor, of instances, while it recovers.
OPEN = f"{SAME_DATABASE} AND state = 'open'"

INSERT = f"INSERT INTO instances ({NAMES}) SELECT * FROM {GIVEN} AS n WHERE {{met}} ON CONFLICT (uuid) DO NOTHING"
UPDATE = f"UPDATE instances SET {ASSIGNED} FROM {GIVEN} AS n ({NAMES}) WHERE instances.uuid = n.uuid AND {{met}}"

# As `Instance.service`.
SERVICE = "coalesce(record #>> ARRAY['selections', coalesce(record ->> 'selection_index', '0'), 'service'], '')"

# After the rows of instances, as everywhere. Only where more commits than counters are at once does one wait. The free
# one is chosen apart: a condition is evaluated again on a row that has changed meanwhile, and would choose another.
RAISE_SENT = f"""
WITH free AS MATERIALIZED (SELECT coalesce((SELECT slot FROM sent ORDER BY slot LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED),
    pg_backend_pid() % {SENT_SLOTS}) AS slot)
UPDATE sent SET sequence = sequence + 1 FROM free WHERE {{met}} AND sent.slot = free.slot
RETURNING sent.slot, sequence
"""
SENT = "(SELECT array_agg(sequence ORDER BY slot) FROM sent)"


def marked(statement: str) -> str:
    """A statement that writes instances in a transaction with locks, and the mark of its commit: (how many it has
    written, the counter, its number). It counts nowhere (NULL) in another database or incarnation than the one given.
    """
    known = SAME_DATABASE.format("$11", "$12")
    raised = RAISE_SENT.format(met=f"(SELECT count(*) FROM written) >= 0 AND EXISTS ({known})")
    both = f"WITH written AS ({with_parameters(statement)} RETURNING 1), marked AS ({raised})"
    of_marked = "(SELECT slot FROM marked), (SELECT sequence FROM marked)"
    return f"{both} SELECT (SELECT count(*) FROM written), {of_marked}"


def mark_of(incarnation: int, slot: int, sequence: int) -> DatabaseMark:
    """Of one commit."""
    return DatabaseMark(incarnation, (*[0] * slot, sequence))


_encode = msgspec.json.Encoder().encode
_NUL = re.compile(r"(\\\\)|\\u0000")  # an escaped backslash, or the escape of U+0000
decode = msgspec.json.Decoder(Instance).decode


def with_parameters(statement: str) -> str:
    """A statement with `{}` for each of the columns, as it is sent alone."""
    return statement.format(*(f"${number}" for number in range(1, 11)), met="true")


def encode(value: Struct) -> str:
    """A record as JSON, without U+0000: PostgreSQL could not read it, nor the other records."""
    # A compute service's text may hold one; clients' are refused with it.
    record = _encode(value).decode()
    return _NUL.sub(r"\1", record) if r"\u0000" in record else record


_searched_by = attrgetter(
    "host_uuid", "attempt", "highest_attempt", "source_host_uuid", "source_attempt", "since", "deadline"
)


def columns(instances: Sequence[Instance]) -> tuple[Sequence[object], ...]:
    """Columns of some instances, in uuid order, which is the order of the locks an insert takes."""
    ordered = sorted(instances, key=lambda instance: instance.uuid)
    rows = [(one.uuid, phase_to_text(one.phase), *_searched_by(one), encode(one)) for one in ordered]
    return tuple(zip(*rows, strict=True))
