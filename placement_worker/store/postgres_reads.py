"""The reads of placement in PostgreSQL that no decision follows. Each read is of one moment: one statement, or a
transaction that sees one state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import asyncpg
import sqlalchemy as sa

from bus.contracts import placement_queries as queries
from bus.contracts.placement import COMPUTE_REPORTER, MAX_LOCATED_HOSTS, LocatePage, LocateRequest
from bus.persistence.marks import read_mark
from bus.persistence.tables import UUID, fetch
from placement_worker.domain.migration import MIGRATION_TYPES
from placement_worker.domain.values import ABOVE_CELLS, Provider, is_in_units, state_of
from placement_worker.store import claims, members, port
from placement_worker.store.names import NameRows, NameTable
from placement_worker.store.rows import (
    ALLOCATED,
    CLASSES,
    NAMES,
    PARENT,
    PROVIDERS,
    ROOT,
    allocations_by_consumer,
    one_of,
    read_provider,
    read_providers,
    seconds,
    transposed,
)
from placement_worker.store.tables import (
    allocations,
    consumers,
    inventories,
    project_usage,
    provider_aggregates,
    provider_traits,
    providers,
    reporters,
    resource_classes,
    traits,
)


class Reading(NameRows, Protocol):
    """The part of a transaction that reads need: see `postgres_rows.PostgresPlacementTransaction`."""

    connection: asyncpg.Connection


Opens = Callable[[], AbstractAsyncContextManager[Reading]]

NO_NUMBER = 0  # no class or trait has this id
FIRST_UUID = "00000000-0000-0000-0000-000000000000"  # before every consumer's

_ALLOCATION: sa.Select[Any] = sa.select(
    consumers.c.uuid,
    providers.c.uuid,
    providers.c.generation,
    CLASSES.name,
    allocations.c.amount,
    consumers.c.generation,
    consumers.c.project_id,
    consumers.c.user_id,
    consumers.c.consumer_type,
    seconds(consumers),
)
_THIS = providers.c.uuid == sa.bindparam("uuid", type_=UUID)
_BY_CONSUMER = (
    _ALLOCATION.select_from(ALLOCATED)
    .where(allocations.c.consumer == sa.bindparam("uuid", type_=UUID))
    .order_by(providers.c.id, CLASSES.name)
)
_BY_PROVIDER = (
    _ALLOCATION.select_from(
        providers.outerjoin(allocations, allocations.c.provider_id == providers.c.id)
        .outerjoin(consumers, consumers.c.uuid == allocations.c.consumer)
        .outerjoin(resource_classes, CLASSES.id == allocations.c.class_id)
    )
    .where(_THIS)
    .order_by(consumers.c.uuid, CLASSES.name)
)
_LISTED: sa.Select[Any] = (
    sa.select(
        providers.c.uuid,
        providers.c.name,
        providers.c.generation,
        PARENT.c.uuid,
        ROOT.c.uuid,
        seconds(providers),
    )
    .select_from(PROVIDERS)
    .order_by(providers.c.id)
)
_TREE = providers.alias("tree")
_SAME_TREE = sa.select(_TREE.c.root_id).where(_TREE.c.uuid == sa.bindparam("tree", type_=UUID)).scalar_subquery()
_TREE_IDS = sa.select(providers.c.id).where(providers.c.root_id == _SAME_TREE).order_by(providers.c.uuid)
_TREE_ALLOCATIONS = (
    sa.select(
        allocations.c.consumer,
        providers.c.uuid,
        CLASSES.name,
        allocations.c.amount,
        consumers.c.project_id,
        consumers.c.user_id,
        consumers.c.consumer_type,
        consumers.c.attempt,
    )
    .select_from(ALLOCATED)
    .where(one_of(allocations.c.provider_id, "ids"), one_of(allocations.c.consumer, "uuids"))
    .order_by(allocations.c.consumer, providers.c.uuid, CLASSES.name)
)
_MIGRATIONS = sa.literal(sorted(MIGRATION_TYPES), sa.ARRAY(sa.Text))
_ALLOCATIONS_OF = (
    sa.select(
        consumers.c.uuid,
        consumers.c.project_id,
        consumers.c.claim_owner,
        sa.case((consumers.c.consumer_type == sa.any_(_MIGRATIONS), 0), else_=consumers.c.attempt),
        consumers.c.generation,
        sa.func.array_agg(providers.c.uuid),
        sa.func.array_agg(CLASSES.name),
        sa.func.array_agg(allocations.c.amount),
        sa.func.array_agg(sa.distinct(ROOT.c.uuid)),
        sa.func.min(ROOT.c.cell).filter(ROOT.c.cell != ABOVE_CELLS),
    )
    .select_from(ALLOCATED.join(ROOT, ROOT.c.id == providers.c.root_id))
    .where(one_of(consumers.c.uuid, "uuids"))
    .group_by(consumers.c.uuid)
    .order_by(consumers.c.uuid)
)
_USAGE = sa.select(project_usage.c.project_id, project_usage.c.class_id, project_usage.c.amount).where(
    one_of(project_usage.c.project_id, "projects"), project_usage.c.amount > 0
)
_UP_TO, _AFTER = sa.bindparam("up_to", type_=sa.Integer), sa.bindparam("after", type_=UUID)
_EXAMINED = (
    sa.select(consumers.c.uuid)
    .where(consumers.c.uuid > _AFTER, consumers.c.released_at.is_(None))
    .order_by(consumers.c.uuid)
)
_PAGE = _EXAMINED.limit(_UP_TO).subquery()
# Of each consumer by itself: PostgreSQL would rather read all allocations of a small cell for each of its pages.
_CONSUMERS_IN_CELL = (
    sa.select(allocations.c.amount)
    .join(providers, providers.c.id == allocations.c.provider_id)
    .join(ROOT, ROOT.c.id == providers.c.root_id)
    .where(
        allocations.c.consumer == _PAGE.c.uuid,
        sa.or_(ROOT.c.cell == sa.bindparam("cell", type_=sa.Text), ROOT.c.cell == ABOVE_CELLS, ROOT.c.cell.is_(None)),
    )
    .limit(1)
    .lateral()
)
_IN_CELL = (
    sa.select(_PAGE.c.uuid)
    .join_from(_PAGE, _CONSUMERS_IN_CELL, sa.true())
    .order_by(_PAGE.c.uuid)
    .limit(sa.bindparam("most", type_=sa.Integer))
)
_LAST_EXAMINED = _EXAMINED.offset(_UP_TO - 1).limit(1)


class PostgresReads:
    """`PlacementReads` in PostgreSQL."""

    def __init__(self, transaction: Opens, snapshot: Opens, names: NameTable) -> None:
        self._transaction = transaction
        self._snapshot = snapshot
        self._names = names

    async def _fetch(self, statement: sa.Select[Any], **values: object) -> Sequence[asyncpg.Record]:
        async with self._transaction() as transaction:
            return await fetch(transaction.connection, statement, **values)

    async def locate(self, requested: Sequence[LocateRequest]) -> list[LocatePage]:
        """For each: on which hosts consumers are, and the members of a server group."""
        groups = [
            (at, one.project_id, one.server_group, one.excluding)
            for at, one in enumerate(requested)
            if one.server_group
        ]
        named = [
            (at, one.project_id, uuid) for at, one in enumerate(requested) for uuid in dict.fromkeys(one.consumers)
        ]
        async with self._transaction() as view:
            fetched = view.connection.fetch
            counted = await fetched(members.COUNT, *transposed(groups, 4), MAX_LOCATED_HOSTS) if groups else []
            found = await fetched(members.HOSTS, *transposed(named, 3)) if named else []
        pages = [LocatePage(members={}, hosts={}) for _ in requested]
        for at, host, count in counted:
            pages[at].members[host] = count
        for at, consumer, its_hosts in found:
            pages[at].hosts[consumer] = tuple(its_hosts)
        return pages

    async def allocations(self, named: Sequence[str]) -> list[queries.ConsumerRecord]:
        """Return what each of these consumers holds, and whose it is, in the order of their uuids."""
        return [
            queries.ConsumerRecord(
                consumer=uuid,
                project_id=project,
                claim_owner=run,
                attempt=attempt,
                consumer_generation=generation,
                allocations=allocations_by_consumer(
                    (uuid, *row) for row in zip(providers, names, amounts, strict=True)
                )[uuid],
                hosts=tuple(hosts),
                cell=cell,
            )
            for uuid, project, run, attempt, generation, providers, names, amounts, hosts, cell in await self._fetch(
                _ALLOCATIONS_OF, uuids=named
            )
        ]

    async def consumers_in_cell(self, requested: queries.CellConsumersQuery) -> queries.CellConsumersPage:
        """Return a page of the consumers that hold something in a cell. Along the primary key, so many at the most."""
        page = {"after": requested.after or FIRST_UUID, "up_to": port.MAX_EXAMINED}
        async with self._snapshot() as view:
            rows = await fetch(view.connection, _IN_CELL, cell=requested.cell, most=requested.limit, **page)
            found = tuple(row[0] for row in rows)
            mark = await read_mark(view.connection, requested.cell)
            if len(found) == requested.limit:
                return queries.CellConsumersPage(consumers=found, last=found[-1], mark=mark)
            last = await fetch(view.connection, _LAST_EXAMINED, **page)
        return queries.CellConsumersPage(consumers=found, last=last[0][0] if last else "", mark=mark)

    async def tree(self, requested: queries.HostTreeQuery) -> queries.HostTree:
        """Return the tree that a provider is in, and its holders with their allocations."""
        async with self._snapshot() as view:
            connection = view.connection
            numbers = [row[0] for row in await fetch(connection, _TREE_IDS, tree=requested.provider)]
            of_tree = await read_providers(connection, numbers[: queries.MAX_TREE])
            holding = [row[0] for row in await fetch(connection, _tree_consumers(requested), ids=numbers)]
            more = len(numbers) > queries.MAX_TREE or len(holding) > requested.limit
            holding = holding[: requested.limit]
            found: dict[str, queries.TreeConsumer] = {}
            for consumer, provider, name, amount, project, user, kind, attempt in await fetch(
                connection, _TREE_ALLOCATIONS, ids=numbers, uuids=holding
            ):
                holder = found.setdefault(
                    consumer,
                    queries.TreeConsumer(
                        consumer=consumer,
                        project_id=project,
                        user_id=user,
                        consumer_type=kind,
                        attempt=attempt,
                        allocations={},
                    ),
                )
                holder.allocations.setdefault(provider, {})[name] = amount
            states = tuple(state_of(of_tree[uuid]) for uuid in sorted(of_tree))
            return queries.HostTree(providers=states, consumers=tuple(found.values()), more=more)

    async def hosts_of_service(self, requested: queries.ServiceHostsQuery) -> queries.ServiceHostsPage:
        """Return the hosts that belong to a compute service by its reports."""
        rows = await self._fetch(_hosts_of_service(requested))
        return queries.ServiceHostsPage(hosts=dict(rows))

    async def members(self, requested: queries.GroupMembersQuery) -> queries.GroupMembersPage:
        """Return a page of the members of a server group, with their hosts."""
        parameters = (requested.project_id, requested.server_group, requested.after, requested.limit + 1)
        async with self._transaction() as view:
            rows = await view.connection.fetch(members.PAGE, *parameters)
        found = {consumer: tuple(hosts) for consumer, hosts in rows[: requested.limit]}
        return queries.GroupMembersPage(members=found, more=len(rows) > requested.limit)

    async def usage(self, requested: queries.ProjectUsageQuery) -> queries.ProjectUsagePage:
        """Return the usage of projects."""
        async with self._snapshot() as view:
            rows = await fetch(view.connection, _projects(requested))
            projects = [row[0] for row in rows[: requested.limit]]
            held = await fetch(view.connection, _USAGE, projects=projects)
            used = {row[1] for row in held if row[1] != claims.INSTANCES_ID}
            by_project = claims.by_project(held, await self._names.names_of(view, used))
        usage = {project: dict(sorted(by_project[project].items())) for project in projects}
        return queries.ProjectUsagePage(usage=usage, more=len(rows) > requested.limit)

    async def names(
        self, kind: port.NameKind, named: Sequence[str] | None = None, prefix: str = "", associated: bool | None = None
    ) -> list[port.NameRow]:
        """The classes or traits with one of these names and with this prefix, oldest first."""
        table = NAMES[kind]
        found = sa.select(table.c.name, seconds(table)).order_by(table.c.id)
        if named is not None:
            found = found.where(one_of(table.c.name, "named"))
        if prefix:
            found = found.where(sa.func.starts_with(table.c.name, prefix))
        if associated is not None:
            held = sa.exists().where(provider_traits.c.trait_id == traits.c.id)
            found = found.where(held if associated else ~held)
        return [port.NameRow(*row) for row in await self._fetch(found, named=named)]

    async def providers(self, listing: port.Listing) -> Sequence[Sequence[Any]]:
        """Return the providers that meet the conditions, oldest first, each as the fields of ProviderRow. A name that
        placement does not know matches nothing.
        """
        return await self._fetch(_LISTED.where(*_conditions(listing, self._names)), tree=listing.in_tree)

    async def provider(self, uuid: str) -> tuple[Provider, float] | None:
        """Return a provider and when it was last written, None when it does not exist."""
        async with self._transaction() as transaction:
            return await read_provider(transaction.connection, uuid)

    async def allocations_of_consumer(self, uuid: str) -> list[port.AllocationRow]:
        """The allocations of a consumer."""
        return [port.AllocationRow(*row) for row in await self._fetch(_BY_CONSUMER, uuid=uuid)]

    async def allocations_of_provider(self, uuid: str) -> tuple[int, list[port.AllocationRow]] | None:
        """(generation, allocations of a provider), None when it does not exist."""
        rows = await self._fetch(_BY_PROVIDER, uuid=uuid)
        return (rows[0][2], [port.AllocationRow(*row) for row in rows if row[0] is not None]) if rows else None

    async def totals(self, project_id: str, user_id: str | None, consumer_type: str | None) -> Sequence[port.UsageRow]:
        """The amounts that a project's (and user's, and type's) consumers hold, by type and class.

        "" is the unknown type.
        """
        return [port.UsageRow(*row) for row in await self._fetch(_totals(project_id, user_id, consumer_type))]


def _conditions(listing: port.Listing, names: NameTable) -> Iterator[sa.ColumnElement[bool]]:
    """Yield the conditions of a listing."""
    if listing.uuid is not None:
        yield providers.c.uuid == listing.uuid
    if listing.name is not None:
        yield providers.c.name == listing.name
    if listing.in_tree is not None:
        yield providers.c.root_id == _SAME_TREE
    for group in listing.required:
        yield _has_trait(group, names)
    if listing.forbidden:
        yield ~_has_trait(listing.forbidden, names)
    for group in listing.member_of:
        yield _is_member(group)
    if listing.forbidden_aggregates:
        yield ~_is_member(listing.forbidden_aggregates)
    for name, amount in listing.resources:
        left = inventories.c.capacity - inventories.c.used
        number = names.class_ids.get(name, NO_NUMBER)
        wanted = sa.literal(amount, sa.BigInteger)
        limits_of_one = (inventories.c.min_unit, inventories.c.max_unit, inventories.c.step_size)
        yield sa.exists().where(
            inventories.c.provider_id == providers.c.id,
            inventories.c.class_id == number,
            left >= wanted,
            is_in_units(wanted, *limits_of_one),
        )


def _has_trait(group: Sequence[str], names: NameTable) -> sa.ColumnElement[bool]:
    numbers = [names.trait_ids.get(name, NO_NUMBER) for name in group]
    return sa.exists().where(
        provider_traits.c.provider_id == providers.c.id,
        provider_traits.c.trait_id == sa.any_(sa.literal(numbers, sa.ARRAY(sa.Integer))),
    )


def _is_member(group: Sequence[str]) -> sa.ColumnElement[bool]:
    return sa.exists().where(
        provider_aggregates.c.provider_id == providers.c.id,
        provider_aggregates.c.aggregate == sa.any_(sa.literal(list(group), sa.ARRAY(UUID))),
    )


def _hosts_of_service(requested: queries.ServiceHostsQuery) -> sa.Select[Any]:
    """As `report_group.refuse_owned` decides whose a root is; it reads every row of `reporters`, once an order of an
    operator.
    """
    return (
        sa.select(providers.c.uuid, providers.c.name)
        .select_from(reporters.join(providers, providers.c.uuid == reporters.c.root))
        .where(
            reporters.c.reporter == f"{COMPUTE_REPORTER}{requested.service}",
            sa.func.coalesce(providers.c.cell, requested.cell) == requested.cell,
            reporters.c.root == sa.any_(reporters.c.providers),
        )
        .order_by(sa.collate(providers.c.name, "C"))
        .limit(requested.limit)
    )


def _projects(requested: queries.ProjectUsageQuery) -> sa.Select[Any]:
    """The projects of a page of usage, and one more."""
    name = sa.collate(project_usage.c.project_id, "C")
    found = sa.select(name).distinct().where(project_usage.c.amount > 0).order_by(name).limit(requested.limit + 1)
    if requested.projects:
        found = found.where(
            project_usage.c.project_id == sa.any_(sa.literal(list(requested.projects), sa.ARRAY(sa.Text)))
        )
    return found if requested.after is None else found.where(name > requested.after)


def _totals(project_id: str, user_id: str | None, consumer_type: str | None) -> sa.Select[Any]:
    """The amounts that a project's (and user's, and type's) consumers hold, by type and class, with the number of
    consumers of the type.
    """
    kind = consumers.c.consumer_type
    wanted = [consumers.c.released_at.is_(None), consumers.c.project_id == project_id]
    wanted += [] if user_id is None else [consumers.c.user_id == user_id]
    wanted += [] if consumer_type is None else [kind == consumer_type]
    held = consumers.join(allocations, allocations.c.consumer == consumers.c.uuid)
    counted = (
        sa.select(kind, sa.func.count(sa.distinct(allocations.c.consumer)).label("count"))
        .select_from(held)
        .where(*wanted)
        .group_by(kind)
        .subquery()
    )
    return (
        sa.select(kind, CLASSES.name, sa.cast(sa.func.sum(allocations.c.amount), sa.BigInteger), counted.c["count"])
        .select_from(
            held.join(counted, counted.c.consumer_type == kind).join(
                resource_classes, CLASSES.id == allocations.c.class_id
            )
        )
        .where(*wanted)
        .group_by(kind, CLASSES.name, counted.c["count"])
        .order_by(kind, CLASSES.name)
    )


def _tree_consumers(requested: queries.HostTreeQuery) -> sa.Select[Any]:
    """The consumers of a page of a tree's holders, and one more."""
    found = sa.select(allocations.c.consumer).distinct().where(one_of(allocations.c.provider_id, "ids"))
    found = found.order_by(allocations.c.consumer).limit(requested.limit + 1)
    return found if requested.after is None else found.where(allocations.c.consumer > requested.after)
