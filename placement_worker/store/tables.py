"""The schema `placement`: placement, laid out for the whole Placement API, and its numbered change feed.

The hot tables (allocations, consumers) have no foreign keys: each would cost a look-up and a row lock per allocation
row. What they would guard is guarded by the provider's row lock and by inventories.used. The functions of the schema
are in `migrations/versions`.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from bus.persistence.marks import cells_table
from bus.persistence.tables import FIRST_ROW, MOMENT, UUID, ZERO, identity_table, needed, only_row, store_as_it_is

METADATA = sa.MetaData()


def _moments() -> tuple[sa.Column[Any], sa.Column[Any]]:
    return needed("created_at", MOMENT, default=sa.func.now()), needed("updated_at", MOMENT, default=sa.func.now())


def _names(table: str) -> sa.Table:
    number = sa.Column("id", sa.Integer, sa.Identity(always=True), primary_key=True)
    return sa.Table(
        table, METADATA, number, needed("name", sa.Text(collation="C")), *_moments(), sa.UniqueConstraint("name")
    )


def _provider() -> sa.Column[Any]:
    return sa.Column("provider_id", sa.BigInteger, sa.ForeignKey("providers.id", ondelete="CASCADE"), primary_key=True)


resource_classes = _names("resource_classes")
traits = _names("traits")


# Providers and what they have

# generation: moves with every write. spec_generation: moves with inventory, traits, aggregates and parentage only.
# cell: of a root, the cell whose bus first reported it. Until the next report the cell of a root may be unknown.
# fillfactor: every write of allocations updates the row; room on the page keeps the update out of the indexes.
# The name is checked at the end of a statement, so that one update can exchange the names of two providers.
providers = sa.Table(
    "providers",
    METADATA,
    sa.Column("id", sa.BigInteger, sa.Identity(always=False), primary_key=True),
    needed("uuid", UUID),
    needed("name", sa.Text),
    sa.Column("parent_id", sa.BigInteger, sa.ForeignKey("providers.id")),
    needed("root_id", sa.BigInteger, sa.ForeignKey("providers.id")),
    needed("generation", sa.BigInteger, default=ZERO),
    needed("spec_generation", sa.BigInteger, default=ZERO),
    *_moments(),
    sa.Column("cell", sa.Text),
    sa.UniqueConstraint("uuid"),
    sa.UniqueConstraint("name", name="providers_name_key", deferrable=True, initially="IMMEDIATE"),
    sa.Index("providers_root", "root_id"),
    sa.Index("providers_parent", "parent_id", postgresql_where=sa.text("parent_id IS NOT NULL")),
    postgresql_with={"fillfactor": 60},
)

# Spec generations come from one counter of placement: no provider is ever given one that another of its uuid had.
spec_generations = sa.Sequence("spec_generations", metadata=METADATA)

# capacity = (total - reserved) * allocation_ratio, computed when the inventory is written. Placement takes a ratio of
# 0 and below, which gives a capacity of 0.
# used: the sum of the allocations. orphaned: no longer reported, kept while it is used.
inventories = sa.Table(
    "inventories",
    METADATA,
    _provider(),
    sa.Column("class_id", sa.Integer, sa.ForeignKey("resource_classes.id"), primary_key=True),
    needed("total", sa.Integer, sa.CheckConstraint("total >= 0")),
    needed("reserved", sa.Integer, sa.CheckConstraint("reserved >= 0")),
    needed("min_unit", sa.Integer, sa.CheckConstraint("min_unit >= 1")),
    needed("max_unit", sa.Integer, sa.CheckConstraint("max_unit >= 1")),
    needed("step_size", sa.Integer, sa.CheckConstraint("step_size >= 1")),
    needed("allocation_ratio", sa.Double),
    needed("capacity", sa.BigInteger, sa.CheckConstraint("capacity >= 0")),
    needed("used", sa.BigInteger, sa.CheckConstraint("used >= 0"), default=ZERO),
    needed("orphaned", sa.Boolean, default=sa.false()),
    sa.Index("inventories_class", "class_id"),
    postgresql_with={"fillfactor": 60},
)

# own_trait: set through the REST API; it outlasts the reports of the provider's reporter.
provider_traits = sa.Table(
    "provider_traits",
    METADATA,
    _provider(),
    sa.Column("trait_id", sa.Integer, sa.ForeignKey("traits.id"), primary_key=True),
    needed("own_trait", sa.Boolean, default=sa.false()),
    sa.Index("provider_traits_trait", "trait_id"),
)

provider_aggregates = sa.Table(
    "provider_aggregates",
    METADATA,
    _provider(),
    sa.Column("aggregate", UUID, primary_key=True),
    sa.Index("provider_aggregates_aggregate", "aggregate"),
)

# The last report of each reporter for each root.
# complete: nothing of the report was left undone, so that the same report again needs no second look.
reporters = sa.Table(
    "reporters",
    METADATA,
    sa.Column("root", UUID, primary_key=True),
    sa.Column("reporter", sa.Text, primary_key=True),
    needed("version", sa.BigInteger),
    needed("digest", sa.LargeBinary),
    needed("complete", sa.Boolean),
    needed("providers", sa.ARRAY(UUID)),
    needed("updated_at", MOMENT, default=sa.func.now()),
    sa.Index("reporters_incomplete", "root", postgresql_where=sa.text("NOT complete")),  # read with every trimming
    postgresql_with={"fillfactor": 60},  # every report updates its row
)


# Consumers and what they hold

# claim_owner: whose claim it is ('': unknown).
# released_at: the row holds nothing any more; attempts up to its own have ended and are refused, until it is trimmed.
consumers = sa.Table(
    "consumers",
    METADATA,
    sa.Column("uuid", UUID, primary_key=True),
    needed("project_id", sa.Text),
    needed("user_id", sa.Text),
    needed("consumer_type", sa.Text),
    needed("generation", sa.BigInteger),
    needed("attempt", sa.Integer),
    needed("claim_owner", sa.Text, default=""),
    sa.Column("released_at", MOMENT),
    *_moments(),
    sa.Index("consumers_released", "released_at", postgresql_where=sa.text("released_at IS NOT NULL")),
    sa.Index("consumers_project", "project_id", "user_id", postgresql_where=sa.text("released_at IS NULL")),
)

allocations = sa.Table(
    "allocations",
    METADATA,
    sa.Column("consumer", UUID, primary_key=True),
    sa.Column("provider_id", sa.BigInteger, primary_key=True),
    sa.Column("class_id", sa.Integer, primary_key=True),
    needed("amount", sa.BigInteger, sa.CheckConstraint("amount > 0")),
    sa.Index("allocations_provider", "provider_id"),
)

# Members of server groups. Their hosts follow from their allocations.
group_members = sa.Table(
    "group_members",
    METADATA,
    sa.Column("project_id", sa.Text, primary_key=True),
    sa.Column("group_uuid", UUID, primary_key=True),
    sa.Column("consumer", UUID, primary_key=True),
)

# What each project holds by class, kept by every transaction that changes it. class_id -1: how many of the project's
# consumers hold something. The rows are updated all the time, in place where their page has room.
project_usage = sa.Table(
    "project_usage",
    METADATA,
    sa.Column("project_id", sa.Text, primary_key=True),
    sa.Column("class_id", sa.Integer, primary_key=True),
    needed("amount", sa.BigInteger),
    sa.Index("project_usage_empty", "project_id", "class_id", postgresql_where=sa.text("amount = 0")),
    postgresql_with={
        "fillfactor": 50,
        "autovacuum_vacuum_scale_factor": 0,
        "autovacuum_vacuum_threshold": 2000,
    },
)


# The change feed

# A row carries the changes of one transaction (or a slice of a large one), numbered first to last.
changes = sa.Table(
    "changes",
    METADATA,
    sa.Column("last", sa.BigInteger, primary_key=True, autoincrement=False),
    needed("first", sa.BigInteger),
    needed("body", sa.LargeBinary),
    sa.CheckConstraint("first <= last"),
)
store_as_it_is(changes, "body")

# The one row that every writing transaction locks last: number order is commit order.
# incarnation: numbers of two incarnations do not compare. origin: what the incarnation was given for
# (bus/persistence/origin.sql).
feed_head = sa.Table(
    "feed_head",
    METADATA,
    only_row(),
    needed("number", sa.BigInteger),
    needed("incarnation", UUID, default=sa.func.gen_random_uuid()),
    needed("origin", sa.Text, default=""),
    info={FIRST_ROW: {"number": 0}},
)

# How far the feed is published. taken_until: a publisher is at work until then, without holding the row's lock.
feed_position = sa.Table(
    "feed_position",
    METADATA,
    only_row(),
    needed("number", sa.BigInteger),
    needed("taken_until", MOMENT, default=sa.text("'-infinity'")),
    info={FIRST_ROW: {"number": 0}},
)


# Cells

cells_table(METADATA)

identity_table(METADATA)
