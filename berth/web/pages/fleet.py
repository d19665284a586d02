"""Reads the state of hosts, services, workers, cells and queues for the HTTP API and the pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import structlog
from msgspec import Struct

from berth.bus_client.host_pages import read_hosts
from berth.client.types import CellView, HostClaims, HostDetail, InventoryView, ProviderView
from berth.config.site import bus_transports
from berth.web.api import ASK_TIMEOUT_S, MAX_HOSTS
from berth.web.problems import Problem
from bus.bus import API, Bus
from bus.clock import Clock
from bus.contracts.build import HostRecord, HostsQuery
from bus.contracts.feed import Change, ChangesPage, ChangesRequest
from bus.contracts.objects import CellRecord, CellsPage, CellsQuery
from bus.contracts.operations import ServiceRecord, ServicesPage, ServicesQuery
from bus.contracts.placement import ProviderState
from bus.contracts.placement_queries import HostTree, HostTreeQuery
from bus.contracts.queues import DEAD_LETTERS, QUEUES, Where
from bus.contracts.workers import WorkerRecord, WorkersPage, WorkersQuery
from bus.faults import Fault
from bus.service.environment import Environment
from bus.transport import BusError, QueueMissing, Transport

# Hosts are read anew at most so often, however many pages show them.
HOSTS_AGE_S = 2.0
# ... and where they are only counted, not until a service's count has changed, or after so long: at 2,000 hosts the
# answer is 0.4 MB and takes 6 ms of the scheduler, the services' counts next to nothing.
COUNTED_AGE_S = 10.0
WORKERS_AGE_S = 5.0
# A page waits so long for schedulers. After a request that none has answered pages show that for so long, instead of
# waiting one after the other.
PAGE_TIMEOUT_S = 5.0
FAILED_AGE_S = 5.0
MAX_SERVICES = 100_000
# A host's page looks through so many of the newest changes of placement for those of its tree, and shows so many.
CHANGES_LOOKED_AT = 2_000
CHANGES_SHOWN = 50
MAX_SEQUENCE = 2**62


class HostChange(Struct, frozen=True):
    """One change of a provider of a host's tree, by the number of placement's feed. causes: of REST requests."""

    sequence: int
    provider: str
    what: str
    causes: tuple[str, ...] = ()


class FleetReader:
    """Queries schedulers and placement about the fleet."""

    def __init__(self, bus: Bus, clock: Clock, cells: Sequence[str]) -> None:
        self._bus = bus
        self._clock = clock
        self._cells = tuple(cells)
        self._hosts: tuple[HostRecord, ...] = ()
        self._hosts_at = float("-inf")
        self._counts: dict[tuple[str, str], tuple[bool, int, int, int]] | None = None
        self._counted_at = float("-inf")
        self._reading = asyncio.Lock()
        self._failed: tuple[float, Fault | BusError] | None = None  # when the last reading of hosts failed, and how
        self._workers: tuple[WorkerRecord, ...] = ()
        self._workers_at = float("-inf")

    async def hosts(self, *, fresh: bool = False) -> tuple[HostRecord, ...]:
        """All hosts, at most HOSTS_AGE_S old. One request fetches them, the others wait for it. Raises Fault, BusError:
        also for FAILED_AGE_S after a request that nothing answered, unless fresh.
        """
        async with self._reading_hosts(fresh=fresh):
            if fresh or self._clock.monotonic() - self._hosts_at > HOSTS_AGE_S:
                await self._read_hosts()
        return self._hosts

    async def hosts_to_count(self) -> tuple[HostRecord, ...]:
        """All hosts, for a page that shows how many of each cell are up or disabled: that is at most HOSTS_AGE_S old.
        The rest of a record, how many are not reported, and what changed and changed back: at most COUNTED_AGE_S.
        Raises as `hosts` does.
        """
        async with self._reading_hosts():
            now = self._clock.monotonic()
            if now - max(self._counted_at, self._hosts_at) > HOSTS_AGE_S:
                query = ServicesQuery(limit=MAX_SERVICES)
                page = await self._bus.request(query, ServicesPage, timeout_s=PAGE_TIMEOUT_S)
                counts = {
                    (one.cell, one.name): (one.up, one.hosts, one.enabled, one.in_placement) for one in page.services
                }
                if counts != self._counts or now - self._hosts_at > COUNTED_AGE_S:
                    await self._read_hosts()
                self._counts, self._counted_at = counts, self._clock.monotonic()
        return self._hosts

    @asynccontextmanager
    async def _reading_hosts(self, *, fresh: bool = False) -> AsyncIterator[None]:
        async with self._reading:
            if not fresh and self._failed is not None and self._clock.monotonic() - self._failed[0] < FAILED_AGE_S:
                raise self._failed[1].with_traceback(None)
            try:
                yield
            except (Fault, BusError) as fault:
                self._failed = self._clock.monotonic(), fault
                raise
            self._failed = None

    async def _read_hosts(self) -> None:
        page = await read_hosts(self._bus, HostsQuery(limit=MAX_HOSTS), timeout_s=PAGE_TIMEOUT_S)
        self._hosts, self._hosts_at = page.hosts, self._clock.monotonic()

    async def host(self, ident: str, *, fresh: bool = False) -> HostRecord:
        """One host by uuid, or by a name that one host has. Raises Problem 404 or 409."""
        hosts = await self.hosts(fresh=fresh)
        found = [one for one in hosts if one.uuid == ident] or [one for one in hosts if one.name == ident]
        if not found:
            raise Problem(404, "host.unknown", f"no host {ident[:255]} is known")
        if len(found) > 1:
            raise Problem(409, "host.ambiguous", f"{len(found)} hosts are called {ident[:255]}: name it by its uuid")
        return found[0]

    async def detail(self, ident: str, *, fresh: bool = False) -> HostDetail:
        """One host with its tree and holders. Raises Problem 404 or 409."""
        host = await self.host(ident, fresh=fresh)
        tree = await self._bus.request(HostTreeQuery(provider=host.uuid), HostTree, timeout_s=ASK_TIMEOUT_S)
        return HostDetail(host=host, providers=tree_of(tree.providers), consumers=tree.consumers, more=tree.more)

    async def claims(self, ident: str, after: str | None) -> HostClaims:
        """A page of those with allocations on a host. Raises Problem 404 or 409."""
        host = await self.host(ident)
        query = HostTreeQuery(provider=host.uuid, after=after)
        tree = await self._bus.request(query, HostTree, timeout_s=ASK_TIMEOUT_S)
        return HostClaims(tree.consumers, tree.consumers[-1].consumer if tree.more and tree.consumers else None)

    async def changes(self, providers: Sequence[ProviderView]) -> list[HostChange]:
        """The newest changes of these providers, newest first, among the last CHANGES_LOOKED_AT of all of placement,
        or as many of them as the feed still has.
        """
        names = {one.uuid: one.name for one in providers}
        head = (await self._changes(MAX_SEQUENCE, 1)).head
        looked_at = CHANGES_LOOKED_AT
        page = await self._changes(max(0, head - looked_at), looked_at)
        while page.too_old and looked_at > CHANGES_SHOWN:  # the feed keeps fewer (`placement.feed_retention`)
            looked_at //= 2
            page = await self._changes(max(0, head - looked_at), looked_at)
        found = [
            HostChange(change.sequence, names[change.provider], _what_of(change), change.causes)
            for change in page.changes
            if change.provider in names
        ]
        return found[::-1][:CHANGES_SHOWN]

    async def _changes(self, after: int, limit: int) -> ChangesPage:
        query = ChangesRequest(after=after, limit=limit)
        return await self._bus.request(query, ChangesPage, timeout_s=ASK_TIMEOUT_S)

    async def services(self, query: ServicesQuery) -> tuple[ServiceRecord, ...]:
        """Compute services by cell and name."""
        return (await self._bus.request(query, ServicesPage, timeout_s=ASK_TIMEOUT_S)).services

    async def workers(self, query: WorkersQuery) -> WorkersPage:
        """Workers by role, bus and name."""
        return await self._bus.request(query, WorkersPage, timeout_s=ASK_TIMEOUT_S)

    async def known_workers(self) -> tuple[WorkerRecord, ...]:
        """All workers, at most WORKERS_AGE_S old."""
        if self._clock.monotonic() - self._workers_at > WORKERS_AGE_S:
            self._workers_at = self._clock.monotonic()  # before the query: another page does not query as well
            query = WorkersQuery(limit=MAX_SERVICES)
            try:
                self._workers = (await self._bus.request(query, WorkersPage, timeout_s=PAGE_TIMEOUT_S)).workers
            except (Fault, BusError):
                self._workers_at = self._clock.monotonic()
                raise
        return self._workers

    async def cells(self) -> tuple[CellView, ...]:
        """The cells that settings name, that operators have added or that services are in, by name."""
        services = await self.services(ServicesQuery(limit=MAX_SERVICES))
        page = await self._bus.request(CellsQuery(), CellsPage, timeout_s=ASK_TIMEOUT_S)
        return cells_of(self._cells, services, await self.hosts(), {one.name: one for one in page.cells})


def cells_of(
    configured: Sequence[str],
    services: Sequence[ServiceRecord],
    hosts: Sequence[HostRecord],
    known: Mapping[str, CellRecord],
) -> tuple[CellView, ...]:
    """Each cell with its counts and what is decided about it, by name."""
    names = {*configured, *known, *(one.cell for one in services), *(host.cell for host in hosts if host.cell)}
    found = []
    for name in sorted(names):
        of_cell = [one for one in services if one.cell == name]
        here = [host for host in hosts if host.cell == name]
        record = known.get(name, CellRecord(name=name, configured=False, in_use=False))
        found.append(
            CellView(
                name=name,
                configured=name in configured,
                state=record.state,
                reason=record.reason,
                version=record.version,
                by=record.by,
                at=record.at,
                in_use=record.in_use,
                bus=record.bus,
                link=record.link,
                problem=record.problem,
                services=len(of_cell),
                services_up=sum(one.up for one in of_cell),
                hosts=len(here),
                hosts_up=sum(host.up for host in here),
                hosts_enabled=sum(host.enabled for host in here),
            )
        )
    return tuple(found)


def tree_of(providers: Sequence[ProviderState]) -> tuple[ProviderView, ...]:
    """The providers of a tree, each after its parent, siblings by name. Of a tree that was cut off what is there."""
    known = {one.uuid: one for one in providers}
    children: dict[str | None, list[ProviderState]] = {}
    for one in sorted(providers, key=lambda one: (one.name, one.uuid)):
        children.setdefault(one.parent_uuid if one.parent_uuid in known else None, []).append(one)
    found: list[ProviderView] = []
    waiting = [(one, 0) for one in reversed(children.get(None, []))]
    while waiting:
        one, depth = waiting.pop()
        found.append(_view(one, depth))
        waiting += [(child, depth + 1) for child in reversed(children.get(one.uuid, []))]
    return tuple(found)


def _what_of(change: Change) -> str:
    if change.removed:
        return "removed"
    if change.used is not None:
        return "used now: " + ", ".join(f"{name} {amount}" for name, amount in sorted(change.used.items()))
    return "its inventory, traits, aggregates or parent"


def _view(one: ProviderState, depth: int) -> ProviderView:
    inventories = {}
    for name, (capacity, min_unit, max_unit, step_size, total, reserved, ratio) in sorted(one.inventories.items()):
        inventories[name] = InventoryView(
            total=total,
            reserved=reserved,
            allocation_ratio=ratio,
            capacity=capacity,
            min_unit=min_unit,
            max_unit=max_unit,
            step_size=step_size,
            used=one.used.get(name, 0),
        )
    return ProviderView(
        uuid=one.uuid,
        name=one.name,
        parent_uuid=one.parent_uuid,
        depth=depth,
        generation=one.generation,
        inventories=inventories,
        traits=one.traits,
        aggregates=one.aggregates,
    )


log = structlog.get_logger("web")

# Depths are read anew at most so often, however many pages show them: it is a request a queue, 72 with four cells. A
# broker that does not answer holds up no page.
AGE_S = 5.0
READ_TIMEOUT_S = 3.0


class QueueDepth(Struct, frozen=True):
    """How many messages wait in a queue of a bus, those that a worker has in hand not counted."""

    bus: str
    queue: str
    waiting: int


class Depths(Struct, frozen=True):
    """Queues in which something waits, longest first; dead letters of all buses. silent: buses without an answer."""

    queues: tuple[QueueDepth, ...] = ()
    dead_letters: int = 0
    silent: tuple[str, ...] = ()


class QueueReader:
    """Keeps a connection to each bus, from the first page that shows them."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._transports: dict[str, Transport] = {}
        self._known = Depths()
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    async def depths(self, services: Sequence[tuple[str, str]] = ()) -> Depths:
        """At most AGE_S old. services: (cell, compute service), for the queues that are theirs."""
        async with self._reading:
            if self._env.clock.monotonic() - self._read_at > AGE_S:
                self._known = await self._read(services)
                self._read_at = self._env.clock.monotonic()
        return self._known

    async def close(self) -> None:
        """Close the connections."""
        transports, self._transports = self._transports, {}
        for transport in transports.values():
            await transport.close()

    async def _read(self, services: Sequence[tuple[str, str]]) -> Depths:
        buses = await bus_transports(self._env)
        every = await asyncio.gather(*(self._read_bus(bus, make, services) for bus, make in buses.items()))
        found = [one for depths in every if depths is not None for one in depths[0] if one.waiting]
        return Depths(
            tuple(sorted(found, key=lambda one: (-one.waiting, one.bus, one.queue))),
            sum(depths[1] for depths in every if depths is not None),
            tuple(bus for bus, depths in zip(buses, every, strict=True) if depths is None),
        )

    async def _read_bus(
        self, bus: str, make: Callable[[], Transport], services: Sequence[tuple[str, str]]
    ) -> tuple[Sequence[QueueDepth], int] | None:
        """The depth of each queue of a bus and its dead letters; None: its broker does not answer."""
        here = Where.API if bus == API else Where.CELL
        rows = [row for row in QUEUES if row.where in (here, Where.BOTH) and "{" not in row.name]
        names = [f"compute.{service}" for cell, service in services if cell == bus]
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                transport = await self._transport(bus, make)
                found = [QueueDepth(bus, row.name, await _depth(transport.depth(row.name))) for row in rows]
                found += [QueueDepth(bus, name, await _depth(transport.depth(name))) for name in names]
                return found, await _depth(transport.depth(DEAD_LETTERS))
        except (TimeoutError, BusError, Fault) as error:
            log.info("web.depths_unread", bus=bus, error=type(error).__name__)
            return None

    async def _transport(self, bus: str, make: Callable[[], Transport]) -> Transport:
        transport = self._transports.get(bus)
        if transport is None:
            transport = make()
            await transport.open()
            self._transports[bus] = transport
        return transport


async def _depth(reading: Awaitable[int]) -> int:
    try:
        return await reading
    except QueueMissing:  # no worker of its role has been there yet
        return 0
