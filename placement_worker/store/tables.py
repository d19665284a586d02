"""The schema `placement`: the resource book, laid out for the whole Placement API, and its numbered change feed.

The hot tables (allocations, consumers) have no foreign keys: each would cost a look-up and a row lock per allocation
row. What they would guard is guarded by the provider's row lock and by inventories.used. The functions of the schema
are in `migrations/versions`.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Sequence,
    Table,
    Text,
    UniqueConstraint,
    false,
    func,
    text,
)

from bus.persistence.tables import FIRST_ROW, MOMENT, UUID, ZERO, identity_table, needed, only_row, store_as_it_is

METADATA = MetaData()


def _moments() -> tuple[Column[Any], Column[Any]]:
    return needed("created_at", MOMENT, default=func.now()), needed("updated_at", MOMENT, default=func.now())


def _names(table: str) -> Table:
    number = Column("id", Integer, Identity(always=True), primary_key=True)
    return Table(table, METADATA, number, needed("name", Text(collation="C")), *_moments(), UniqueConstraint("name"))


def _provider() -> Column[Any]:
    return Column("provider_id", BigInteger, ForeignKey("providers.id", ondelete="CASCADE"), primary_key=True)


resource_classes = _names("resource_classes")
traits = _names("traits")


# Providers and what they have

# generation: moves with every write. shape: moves with inventory, traits, aggregates and parentage only.
# cell: of a root, the cell whose bus first reported it. Until the next report the cell of a root may be unknown.
# fillfactor: every write of allocations updates the row; room on the page keeps the update out of the indexes.
# The name is checked at the end of a statement, so that one update can exchange the names of two providers.
providers = Table(
    "providers",
    METADATA,
    Column("id", BigInteger, Identity(always=False), primary_key=True),
    needed("uuid", UUID),
    needed("name", Text),
    Column("parent_id", BigInteger, ForeignKey("providers.id")),
    needed("root_id", BigInteger, ForeignKey("providers.id")),
    needed("generation", BigInteger, default=ZERO),
    needed("shape", BigInteger, default=ZERO),
    *_moments(),
    Column("cell", Text),
    UniqueConstraint("uuid"),
    UniqueConstraint("name", name="providers_name_key", deferrable=True, initially="IMMEDIATE"),
    Index("providers_root", "root_id"),
    Index("providers_parent", "parent_id", postgresql_where=text("parent_id IS NOT NULL")),
    postgresql_with={"fillfactor": 60},
)

# Shapes come from one counter of the book: no provider is ever given one that another of its uuid had.
shapes = Sequence("shapes", metadata=METADATA)

# capacity = (total - reserved) * allocation_ratio, computed when the inventory is written. Placement takes a ratio of
# 0 and below, which gives a capacity of 0.
# used: the sum of the allocations. stranded: no longer reported, kept while it is used.
inventories = Table(
    "inventories",
    METADATA,
    _provider(),
    Column("class_id", Integer, ForeignKey("resource_classes.id"), primary_key=True),
    needed("total", Integer, CheckConstraint("total >= 0")),
    needed("reserved", Integer, CheckConstraint("reserved >= 0")),
    needed("min_unit", Integer, CheckConstraint("min_unit >= 1")),
    needed("max_unit", Integer, CheckConstraint("max_unit >= 1")),
    needed("step_size", Integer, CheckConstraint("step_size >= 1")),
    needed("allocation_ratio", Double),
    needed("capacity", BigInteger, CheckConstraint("capacity >= 0")),
    needed("used", BigInteger, CheckConstraint("used >= 0"), default=ZERO),
    needed("stranded", Boolean, default=false()),
    *_moments(),
    Index("inventories_class", "class_id"),
    postgresql_with={"fillfactor": 60},
)

# lasting: set through the REST API; it outlasts the reports of the provider's source.
provider_traits = Table(
    "provider_traits",
    METADATA,
    _provider(),
    Column("trait_id", Integer, ForeignKey("traits.id"), primary_key=True),
    needed("lasting", Boolean, default=false()),
    Index("provider_traits_trait", "trait_id"),
)

provider_aggregates = Table(
    "provider_aggregates",
    METADATA,
    _provider(),
    Column("aggregate", UUID, primary_key=True),
    Index("provider_aggregates_aggregate", "aggregate"),
)

# The last report of each source for each root.
# settled: nothing of the report was left undone, so that the same report again needs no second look.
sources = Table(
    "sources",
    METADATA,
    Column("root", UUID, primary_key=True),
    Column("source", Text, primary_key=True),
    needed("version", BigInteger),
    needed("digest", LargeBinary),
    needed("settled", Boolean),
    needed("providers", ARRAY(UUID)),
    needed("updated_at", MOMENT, default=func.now()),
    Index("sources_unsettled", "root", postgresql_where=text("NOT settled")),  # read with every trimming
)


# Consumers and what they hold

# run: whose claim it is ('': unknown).
# released_at: the row holds nothing any more; it fences attempts up to its own, until it is trimmed.
consumers = Table(
    "consumers",
    METADATA,
    Column("uuid", UUID, primary_key=True),
    needed("project_id", Text),
    needed("user_id", Text),
    needed("consumer_type", Text),
    needed("generation", BigInteger),
    needed("attempt", Integer),
    needed("run", Text, default=""),
    Column("released_at", MOMENT),
    *_moments(),
    Index("consumers_released", "released_at", postgresql_where=text("released_at IS NOT NULL")),
    Index("consumers_project", "project_id", "user_id", postgresql_where=text("released_at IS NULL")),
)

allocations = Table(
    "allocations",
    METADATA,
    Column("consumer", UUID, primary_key=True),
    Column("provider_id", BigInteger, primary_key=True),
    Column("class_id", Integer, primary_key=True),
    needed("amount", BigInteger, CheckConstraint("amount > 0")),
    Index("allocations_provider", "provider_id"),
)

# Members of server groups. Their hosts follow from their allocations.
group_members = Table(
    "group_members",
    METADATA,
    Column("project_id", Text, primary_key=True),
    Column("group_uuid", UUID, primary_key=True),
    Column("consumer", UUID, primary_key=True),
)

# What each project holds by class, kept by every transaction that changes it. class_id -1: how many of the project's
# consumers hold something. The rows are updated all the time, in place where their page has room.
project_usage = Table(
    "project_usage",
    METADATA,
    Column("project_id", Text, primary_key=True),
    Column("class_id", Integer, primary_key=True),
    needed("amount", BigInteger),
    Index("project_usage_empty", "project_id", "class_id", postgresql_where=text("amount = 0")),
    postgresql_with={
        "fillfactor": 50,
        "autovacuum_vacuum_scale_factor": 0,
        "autovacuum_vacuum_threshold": 2000,
    },
)


# The change feed

# A row carries the changes of one transaction (or a slice of a large one), numbered first to last.
changes = Table(
    "changes",
    METADATA,
    Column("last", BigInteger, primary_key=True, autoincrement=False),
    needed("first", BigInteger),
    needed("body", LargeBinary),
    CheckConstraint("first <= last"),
)
store_as_it_is(changes, "body")

# The one row that every writing transaction locks last: number order is commit order.
# history: numbers of two histories do not compare. origin: what the history was given for (bus/persistence/origin.sql).
feed_head = Table(
    "feed_head",
    METADATA,
    only_row(),
    needed("number", BigInteger),
    needed("history", UUID, default=func.gen_random_uuid()),
    needed("origin", Text, default=""),
    info={FIRST_ROW: {"number": 0}},
)

# How far the feed is published. taken_until: a publisher is at work until then, without holding the row's lock.
feed_position = Table(
    "feed_position",
    METADATA,
    only_row(),
    needed("number", BigInteger),
    needed("taken_until", MOMENT, default=text("'-infinity'")),
    info={FIRST_ROW: {"number": 0}},
)

identity_table(METADATA)
