"""The reads of placement in memory that no decision follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Any

from bus.contracts import placement_queries as queries
from bus.contracts.base import DatabaseMark
from bus.contracts.placement import COMPUTE_REPORTER, MAX_LOCATED_HOSTS, LocatePage, LocateRequest
from bus.persistence.memory_database import MemorySession
from placement_worker.domain.migration import is_migration
from placement_worker.domain.server_groups import hosts_of
from placement_worker.domain.values import ABOVE_CELLS, ConsumerState, Fit, Provider, fit, state_of
from placement_worker.store import port
from placement_worker.store.memory_table import ConsumerRow, MemoryPlacementTable


class MemoryReads:
    """`PlacementReads` over a MemoryPlacementTable."""

    def __init__(self, session: MemorySession, table: MemoryPlacementTable) -> None:
        self._session = session
        self._table = table

    async def locate(self, requested: Sequence[LocateRequest]) -> list[LocatePage]:
        """Return, for each request, the hosts on which consumers of a project hold allocations, and the members of a
        group by host.
        """
        return [await self._locate(one) for one in requested]

    async def _locate(self, requested: LocateRequest) -> LocatePage:
        table = self._table
        async with self._session.transaction():
            key = (requested.project_id, requested.server_group or "")
            alive = table.alive(key)
            counted = Counter(host for uuid, hosts in alive.items() if uuid != requested.excluding for host in hosts)
            hosts = {
                uuid: hosts_of(table.providers[provider] for provider in kept.consumer.allocations)
                for uuid in sorted(set(requested.consumers))
                if (kept := table.consumers.get(uuid)) is not None
                and kept.consumer.allocations
                and kept.consumer.project_id == requested.project_id
            }
            return LocatePage(members=dict(sorted(counted.items())[:MAX_LOCATED_HOSTS]), hosts=hosts)

    async def allocations(self, named: Sequence[str]) -> list[queries.ConsumerRecord]:
        """Return what each of these consumers holds, and whose it is, in the order of their uuids."""
        table = self._table
        async with self._session.transaction():
            kept = {uuid: row.consumer for uuid in sorted(set(named)) if (row := table.consumers.get(uuid))}
            return [_allocated(table, uuid, one) for uuid, one in kept.items() if one.allocations]

    async def consumers_in_cell(self, requested: queries.CellConsumersQuery) -> queries.CellConsumersPage:
        """Return a page of the consumers that hold something in a cell."""
        table = self._table
        async with self._session.transaction():
            kept = {uuid: row.consumer for uuid, row in table.consumers.items()}
            held = sorted(uuid for uuid, one in kept.items() if one.allocations and uuid > requested.after)
            page = held[: port.MAX_EXAMINED]
            cells = {requested.cell, ABOVE_CELLS, None}
            root = {one.uuid: table.providers[one.root] for one in table.providers.values()}
            named = (uuid for uuid in page if any(root[one].cell in cells for one in kept[uuid].allocations))
            found = tuple(islice(named, requested.limit))
            last = page[-1] if len(page) == port.MAX_EXAMINED else ""
            if len(found) == requested.limit:
                last = found[-1]
            mark = table.marks.get(requested.cell, DatabaseMark())
            return queries.CellConsumersPage(consumers=found, last=last, mark=mark)

    async def hosts_of_service(self, requested: queries.ServiceHostsQuery) -> queries.ServiceHostsPage:
        """Return the hosts that belong to a compute service by its reports."""
        table, mine = self._table, f"{COMPUTE_REPORTER}{requested.service}"
        async with self._session.transaction():
            roots = [
                root
                for (root, reporter), last in table.reporters.items()
                if reporter == mine and root in last.providers
            ]
            found = [table.providers[root] for root in roots if root in table.providers]
            hosts = sorted((one.name, one.uuid) for one in found if one.cell in (None, requested.cell))
            return queries.ServiceHostsPage(hosts={uuid: name for name, uuid in hosts[: requested.limit]})

    async def tree(self, requested: queries.HostTreeQuery) -> queries.HostTree:
        """Return the tree that a provider is in, and its holders with their allocations, as of one moment."""
        table = self._table
        async with self._session.transaction():
            if (known := table.providers.get(requested.provider)) is None:
                return queries.HostTree()
            every = sorted(uuid for uuid, one in table.providers.items() if one.root == known.root)
            shown = every[: queries.MAX_TREE]
            holders = [
                queries.TreeConsumer(
                    consumer=uuid,
                    project_id=state.project_id,
                    user_id=state.user_id,
                    consumer_type=state.consumer_type,
                    attempt=state.attempt,
                    allocations=held,
                )
                for uuid, row in sorted(table.consumers.items())
                if (state := row.consumer)
                and (held := {one: dict(state.allocations[one]) for one in every if one in state.allocations})
                and (requested.after is None or uuid > requested.after)
            ]
            return queries.HostTree(
                providers=tuple(state_of(table.providers[uuid]) for uuid in shown),
                consumers=tuple(holders[: requested.limit]),
                more=len(every) > queries.MAX_TREE or len(holders) > requested.limit,
            )

    async def members(self, requested: queries.GroupMembersQuery) -> queries.GroupMembersPage:
        """The members of a server group, and their hosts."""
        table = self._table
        async with self._session.transaction():
            alive = table.alive((requested.project_id, requested.server_group))
            found = [uuid for uuid in sorted(alive) if requested.after is None or uuid > requested.after]
            members = {
                uuid: tuple(sorted(table.providers[host].name for host in alive[uuid]))
                for uuid in found[: requested.limit]
            }
            return queries.GroupMembersPage(members=members, more=len(found) > requested.limit)

    async def usage(self, requested: queries.ProjectUsageQuery) -> queries.ProjectUsagePage:
        """The usage of projects, as of one moment."""
        async with self._session.transaction():
            usage: dict[str, dict[str, int]] = {}
            for project, held in sorted(self._table.project_usage.items()):
                if requested.projects and project not in requested.projects:
                    continue
                if (requested.after is None or project > requested.after) and any(held.values()):
                    usage[project] = {name: amount for name, amount in sorted(held.items()) if amount}
            shown = dict(list(usage.items())[: requested.limit])
            return queries.ProjectUsagePage(usage=shown, more=len(usage) > requested.limit)

    async def names(
        self, kind: port.NameKind, named: Sequence[str] | None = None, prefix: str = "", associated: bool | None = None
    ) -> list[port.NameRow]:
        """The classes or traits with one of these names and with this prefix, oldest first."""
        check_storable(prefix, *(named or ()))
        async with self._session.transaction():
            held = {trait for provider in self._table.providers.values() for trait in provider.traits}
            return [
                port.NameRow(name, self._table.made[kind, name])
                for name in self._table.names(kind)
                if (named is None or name in named)
                and name.startswith(prefix)
                and (associated is None or (name in held) is associated)
            ]

    async def providers(self, listing: port.Listing) -> Sequence[Sequence[Any]]:
        """Return the providers that meet the conditions, oldest first. Each is a sequence of the fields of
        ProviderRow.
        """
        check_storable(listing.name)
        table = self._table
        async with self._session.transaction():
            top = table.providers.get(listing.in_tree or "")
            return [
                (p.uuid, p.name, p.generation, p.parent, p.root, table.written[p.uuid])
                for p in table.providers.values()
                if (listing.in_tree is None or (top is not None and p.root == top.root)) and _is_listed(p, listing)
            ]

    async def provider(self, uuid: str) -> tuple[Provider, float] | None:
        """Return a provider and when it was last written, None when it does not exist."""
        table = self._table
        async with self._session.transaction():
            return (table.providers[uuid], table.written[uuid]) if uuid in table.providers else None

    async def allocations_of_consumer(self, uuid: str) -> list[port.AllocationRow]:
        """The allocations of a consumer, by provider and class."""
        table = self._table
        async with self._session.transaction():
            row = table.consumers.get(uuid)
            held = table.by_number(row.consumer.allocations) if row is not None else []
            return [each for provider in held if row is not None for each in self._allocations(uuid, row, provider)]

    async def allocations_of_provider(self, uuid: str) -> tuple[int, list[port.AllocationRow]] | None:
        """(generation, allocations of a provider, by consumer and class), None when it does not exist."""
        table = self._table
        async with self._session.transaction():
            if (provider := table.providers.get(uuid)) is None:
                return None
            held = [(name, row) for name, row in sorted(table.consumers.items()) if uuid in row.consumer.allocations]
            return provider.generation, [each for name, row in held for each in self._allocations(name, row, uuid)]

    def _allocations(self, consumer: str, row: ConsumerRow, provider: str) -> list[port.AllocationRow]:
        state = row.consumer
        return [
            port.AllocationRow(
                consumer,
                provider,
                self._table.providers[provider].generation,
                name,
                amount,
                state.generation,
                state.project_id,
                state.user_id,
                state.consumer_type,
                row.updated_at,
            )
            for name, amount in sorted(state.allocations[provider].items())
        ]

    async def totals(self, project_id: str, user_id: str | None, consumer_type: str | None) -> Sequence[port.UsageRow]:
        """The amounts that a project's (and user's, and type's) consumers hold, by type and class.

        "" is the unknown type.
        """
        check_storable(project_id, user_id, consumer_type)
        async with self._session.transaction():
            amounts: dict[tuple[str, str], int] = {}
            counts: dict[str, int] = {}
            for row in self._table.consumers.values():
                held = row.consumer
                wanted = held.project_id == project_id and user_id in (None, held.user_id)
                if not held.allocations or not wanted or consumer_type not in (None, held.consumer_type):
                    continue
                counts[held.consumer_type] = counts.get(held.consumer_type, 0) + 1
                for resources in held.allocations.values():
                    for name, amount in resources.items():
                        key = (held.consumer_type, name)
                        amounts[key] = amounts.get(key, 0) + amount
            return [port.UsageRow(kind, name, amount, counts[kind]) for (kind, name), amount in sorted(amounts.items())]


def check_storable(*texts: str | None) -> None:
    """Raise Unstorable for a text with a NUL, as PostgreSQL cannot store one."""
    if any(text is not None and "\x00" in text for text in texts):
        raise port.Unstorable("a text has a NUL in it")


def _is_listed(p: Provider, listing: port.Listing) -> bool:
    traits, aggregates = set(p.traits), set(p.aggregates)
    return (
        listing.uuid in (None, p.uuid)
        and listing.name in (None, p.name)
        and all(traits.intersection(group) for group in listing.required)
        and not traits.intersection(listing.forbidden)
        and all(aggregates.intersection(group) for group in listing.member_of)
        and not aggregates.intersection(listing.forbidden_aggregates)
        and all(_has_left(p, name, amount) for name, amount in listing.resources)
    )


def _has_left(provider: Provider, name: str, amount: int) -> bool:
    return fit(amount, provider.inventories.get(name), provider.used.get(name, 0), amount) is Fit.FITS


def _allocated(table: MemoryPlacementTable, uuid: str, consumer: ConsumerState) -> queries.ConsumerRecord:
    roots = sorted({table.providers[provider].root for provider in consumer.allocations})
    cells = [cell for root in roots if (cell := table.cell(root)) is not None and cell != ABOVE_CELLS]
    return queries.ConsumerRecord(
        consumer=uuid,
        project_id=consumer.project_id,
        claim_owner=consumer.claim_owner,
        attempt=0 if is_migration(consumer) else consumer.attempt,
        consumer_generation=consumer.generation,
        allocations={provider: dict(amounts) for provider, amounts in consumer.allocations.items()},
        hosts=tuple(roots),
        cell=min(cells, default=None),
    )
