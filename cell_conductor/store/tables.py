"""The schema `cell_<name>`: the instances of one cell.

Times are seconds since the epoch, where their type is a number.
"""

from __future__ import annotations

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
from cell_conductor.domain.desires import EXPECTED_HERE, PURGED, PURGED_FAILED, in_sql

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
)

# The breakers of compute services.
breakers = Table("breakers", METADATA, Column("service", Text, primary_key=True), needed("record", JSON))

# What is believed of each compute service (cell_conductor.domain.leases). interval_s: how often it sends a heartbeat;
# since: when its state began.
leases = Table(
    "leases",
    METADATA,
    Column("service", Text, primary_key=True),
    needed("epoch", BigInteger),
    needed("interval_s", Double),
    needed("state", Text),
    needed("since", Double),
    needed("reason", Text),
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
