"""The schema `ironic_sync`: sync positions, and which process is their one writer."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    Index,
    LargeBinary,
    MetaData,
    Table,
    Text,
    func,
    text,
)

from bus.persistence.tables import FIRST_ROW, MOMENT, UUID, ZERO, identity_table, needed

METADATA = MetaData()

# version: of the last report; published: the last version that placement has taken. report: the message, NULL once the
# node is gone. updated_at: Ironic's own text. read_at, due_at, absent_since: seconds since the epoch.
positions = Table(
    "positions",
    METADATA,
    Column("node", UUID, primary_key=True),
    needed("version", BigInteger),
    needed("published", BigInteger, default=ZERO),
    Column("report", LargeBinary),
    needed("digest", Text, default=""),
    needed("problem", Text, default=""),
    Column("state", Text),
    Column("updated_at", Text),
    Column("read_at", Double),
    Column("due_at", Double),
    Column("absent_since", Double),
    Index("positions_problem", "node", postgresql_where=text("problem <> ''")),
)

# The lease of the one writer. term: raised by each new writer; one whose term is older writes nothing.
leadership = Table(
    "leadership",
    METADATA,
    Column("one", Boolean, CheckConstraint("one"), primary_key=True),
    needed("term", BigInteger),
    needed("since", MOMENT, default=func.now()),
    needed("expires_at", MOMENT, default=func.now()),
    info={FIRST_ROW: {"one": True, "term": 0}},
)

identity_table(METADATA)
