"""The schema `scheduler`: build requests, the instance-to-cell map, what operators define, and drains.

Times are seconds since the epoch, where their type is a number.
"""

from __future__ import annotations

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

from bus.persistence.tables import FIRST_ROW, UUID, ZERO, identity_table, needed, outbox_tables

METADATA = MetaData()

# request: the message as it came, and digest: a digest of it. A repeat is distinguished from a clash, and a decision
# can be run again. timeline: JSON lines, only ever appended to, so that one statement appends without reading.
# run: names this row to placement; a scheduler claims and releases by it.
# attempt: that holds the claim, as the cell has announced it last (0: none was claimed).
# gang: the request that several were made by, gang_min: how many of them start together at least.
# fillfactor: a row is written three to five times in its first seconds; room on the page keeps these writes cheap.
# Nothing that changes is indexed, for the same reason.
build_requests = Table(
    "build_requests",
    METADATA,
    Column("instance_uuid", UUID, primary_key=True),
    needed("project_id", Text),
    needed("flavor", Text),
    needed("name", Text),
    needed("request", Text),
    needed("digest", LargeBinary),
    needed("state", Text),
    needed("sequence", BigInteger),
    needed("attempt", Integer, default=ZERO),
    needed("terminal", Boolean),
    needed("run", Text),
    Column("cell", Text),
    Column("host", Text),
    Column("host_uuid", UUID),
    needed("code", Text, default=""),
    needed("reason", Text, default=""),
    needed("funnel", Text, default="[]"),
    needed("history", Text, default="[]"),
    needed("timeline", Text, default=""),
    needed("created_at", Double),
    needed("updated_at", Double),
    Column("gang", UUID),
    Column("gang_min", Integer),
    Index("build_requests_newest", text("created_at DESC")),
    Index("build_requests_of_project", "project_id", text("created_at DESC")),
    Index("build_requests_of_gang", "gang", postgresql_where=text("gang IS NOT NULL")),
    postgresql_with={"fillfactor": 50},
)

# Requests about instances after their builds: one row each. digest: of the whole message. sequence: of the newest event
# of the request. cell: where it was dispatched to. command: JSON, what that cell is to do now, of a request that leads
# into another cell (NULL: of every other one). A row is written under the lock of its instance's row above.
moves = Table(
    "moves",
    METADATA,
    Column("request_id", UUID, primary_key=True),
    needed("instance_uuid", UUID),
    needed("project_id", Text),
    needed("kind", Text),
    needed("digest", LargeBinary),
    needed("state", Text),
    needed("sequence", BigInteger),
    needed("terminal", Boolean),
    Column("cell", Text),
    Column("host", Text),
    Column("host_uuid", UUID),
    needed("code", Text),
    needed("reason", Text),
    needed("funnel", Text),
    needed("history", Text),
    needed("created_at", Double),
    Column("command", Text),
    needed("updated_at", Double),
    Index("moves_of_instance", "instance_uuid", text("created_at DESC")),
    Index("moves_newest", text("created_at DESC")),
    Index("moves_under_way", "request_id", postgresql_where=text("NOT terminal")),
)

# What an instance has become since its build; without a row it is as it was built. flavor, image: '' = as built.
# image_properties: JSON, {image: {name: value}} of images that rebuilds named. under_way: the request without a
# terminal event. sequence: of the newest event that changed the row.
instances = Table(
    "instances",
    METADATA,
    Column("instance_uuid", UUID, primary_key=True),
    needed("condition", Text),
    needed("flavor", Text),
    needed("image", Text),
    needed("image_properties", Text),
    Column("under_way", UUID),
    needed("sequence", BigInteger),
    needed("stay", Integer),
)

# What operators define at run time, decisions about hosts included (bus.contracts.objects). body: JSON; version: the
# revision that it was last changed in. The one row of objects_revision is the lock of every change.
objects_revision = Table(
    "objects_revision",
    METADATA,
    Column("singleton", Boolean, CheckConstraint("singleton"), primary_key=True, server_default=true()),
    needed("revision", BigInteger),
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
    needed("who", Text),
    needed("why", Text, default=""),
    needed("forced", Boolean, default=false()),
)

# The instances of drains (objects of kind drain): one row each, written under the lock of the drain's object. position:
# in the order of the plan.
drain_moves = Table(
    "drain_moves",
    METADATA,
    Column("drain", UUID, primary_key=True),
    Column("instance_uuid", UUID, primary_key=True),
    needed("position", Integer),
    needed("source_uuid", UUID),
    needed("kind", Text),
    needed("state", Text),
    Column("host_uuid", UUID),
    needed("tries", Integer),
    needed("failures", Integer),
    needed("code", Text),
    needed("reason", Text),
    needed("due_at", Double),
    needed("begun_at", Double),
    Index("drain_moves_in_order", "drain", "state", "position"),
)

outbox_tables(METADATA)
identity_table(METADATA)
