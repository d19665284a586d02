"""Reads every part of the system at once, each within its own time, for the list of what waits for a person."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import TypeVar

import structlog
from msgspec import Struct

from berth.audit import recoveries
from berth.audit.findings import Confirmed
from berth.audit.passes import findings_without_hosts
from berth.audit.quarantine import CellNeverStarted, on_database
from berth.bus_client.host_pages import read_hosts
from berth.client.status import Severity, StatusKind, StatusRow, SystemStatus
from berth.client.types import NodeRecord
from berth.config.settings import Settings
from berth.config.site import Site, cells_in_use
from berth.drain_follow import is_stuck
from berth.fencing.fencer import held_by_record, plan
from berth.status import rows
from berth.status.rows import INSTANCE_LOST, status_of
from bus.bus import API, Bus
from bus.consuming.dead_letters import list_dead
from bus.contracts.base import Message
from bus.contracts.build import BuildPage, BuildQuery, BuildState, HostRecord, HostsQuery
from bus.contracts.drains import DrainProgress, DrainsPage, DrainsQuery, DrainState
from bus.contracts.objects import CellBus
from bus.contracts.operations import ServicesPage, ServicesQuery
from bus.contracts.queues import DEAD_LETTERS
from bus.contracts.workers import WorkersPage, WorkersQuery
from bus.faults import DatabaseUnavailable, Fault, RequestTimeout, RequestUnconfirmed
from bus.persistence.database import Database
from bus.service.environment import Environment
from bus.transport import BusError, BusUnavailable, QueueMissing, Transport, Unroutable
from cell_conductor.state.unknown_machine import UnknownMachineKind
from cell_conductor.store.postgres_keyed import PostgresKeyed
from cell_conductor.store.unknown_machines import Safety

log = structlog.get_logger("status")

# Each part has so long. All begin at once, so the whole takes no longer when one is away.
PART_TIMEOUT_S = 0.9
# Of that a scheduler has so much for an answer, and the database for the names of cells that were added at run time.
ANSWER_SHARE, CELLS_SHARE = 0.8, 0.4
# A process that stays reads most parts so often, and what takes long less often.
AGE_S = 5.0
LONG_AGE_S = 60.0
MAX_RECORDS = 100_000
MAX_BUILDS = 1_000
MAX_DRAINS = 100
MAX_LOOKED_AT = 10  # running drains whose instances are looked at

AnyMessage = TypeVar("AnyMessage", bound=Message)
Faults = (Fault, BusError, TimeoutError, OSError)


class Server(StrEnum):
    """What a part is read from."""

    DATABASE = "database"
    SCHEDULER = "scheduler"
    BROKER = "broker"
    IRONIC = "ironic"


class Part(Struct, frozen=True):
    """One thing that is read. name: what is not known while it cannot be. bus: of a broker."""

    name: str
    server: Server
    read: Callable[[], Awaitable[list[StatusRow]]]
    bus: str = ""
    every_s: float = AGE_S


class StatusReader:
    """Reads all parts, and remembers each for as long as it is young."""

    def __init__(
        self,
        env: Environment,
        settings: Settings,
        bus: Bus,
        *,
        hosts: Callable[[], Awaitable[Sequence[HostRecord]]] | None = None,
        nodes: Callable[[], Awaitable[Sequence[NodeRecord]]] | None = None,
        opens: bool = False,
        timeout_s: float = PART_TIMEOUT_S,
    ) -> None:
        """bus: the API bus, open or connecting; opens: it is opened here. hosts: another reader of them. nodes: reads
        Ironic; None: there is none. timeout_s: of each part.
        """
        self._timeout_s = timeout_s
        self._answer_s = ANSWER_SHARE * timeout_s
        self._late: set[asyncio.Future[list[StatusRow]]] = set()
        self._env = env
        self._settings = settings
        self._bus = bus
        self._hosts = hosts or self._read_hosts
        self._nodes = nodes
        self._opening = asyncio.ensure_future(bus.open()) if opens else None
        self._transports: dict[str, Transport] = {}
        self._confirmed: Confirmed | None = None
        self._kept: dict[str, tuple[float, Part, list[StatusRow] | BaseException]] = {}
        self._first_seen: dict[tuple[StatusKind, str], float] = {}
        self._added: dict[str, CellBus] = {}
        self._reading = asyncio.Lock()

    async def read(self, *, anew: Server | None = None) -> SystemStatus:
        """All that waits. Whatever is away, this takes the time of one part at most, and never raises for it.
        anew: what this server has said is not to be remembered, because the caller has seen it fail since.
        """
        async with self._reading:
            now_s = self._env.clock.monotonic()
            self._kept = {name: kept for name, kept in self._kept.items() if kept[1].server is not anew}
            await self._read_parts(now_s)
            found = _rows_of([(part, result) for _, part, result in self._kept.values()])
            return status_of(self._dated(found), self._env.clock.time())

    async def close(self) -> None:
        """Close what was opened here."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
        if self._late:
            await asyncio.wait(self._late)
        transports, self._transports = self._transports, {}
        for transport in transports.values():
            await transport.close()

    def _dated(self, found: list[StatusRow]) -> list[StatusRow]:
        """Rows without a time have that since which this process, if it has looked before, sees them."""
        now = self._env.clock.time()
        keys = {(one.kind, one.subject) for one in found}
        self._first_seen = {key: self._first_seen.get(key, now) for key in keys}
        return [
            rows.since(one, first) if (first := self._first_seen[one.kind, one.subject]) < now else one for one in found
        ]

    async def _read_parts(self, now_s: float) -> None:
        parts = {part.name: part for part in self._parts()}
        due = {name: part for name, part in parts.items() if self._is_due(part, now_s)}
        under_way = {name: asyncio.ensure_future(part.read()) for name, part in due.items()}
        cells = Part("cells added at run time", Server.DATABASE, self._read_added)
        parts[cells.name] = cells
        if self._is_due(cells, now_s):
            self._kept[cells.name] = now_s, cells, await _rows_or_fault(cells, CELLS_SHARE * self._timeout_s)
        for name, where in self._added.items():
            for part in self._parts_of_cell(name, where):
                parts[part.name] = part
                if self._is_due(part, now_s):
                    due[part.name] = part
                    under_way[part.name] = asyncio.ensure_future(part.read())
        await self._within(list(under_way.values()), now_s + self._timeout_s - self._env.clock.monotonic())
        for name, task in under_way.items():
            self._kept[name] = now_s, due[name], self._result_of(due[name], task)
        self._kept = {name: kept for name, kept in self._kept.items() if name in parts}

    async def _read_added(self) -> list[StatusRow]:
        """Which cells operators have added: each is read as those of the settings are."""
        every = await cells_in_use(self._env)
        self._added = {name: where for name, where in every.items() if where is not None}
        return []

    async def _within(self, tasks: Sequence[asyncio.Future[list[StatusRow]]], timeout_s: float) -> None:
        """Wait for tasks, and no longer than so long; what is late is cancelled, and its end awaited on closing."""
        _, late = await asyncio.wait(tasks, timeout=max(0.0, timeout_s)) if tasks else (set(), set())
        for task in late:
            task.cancel()
            self._late.add(task)
            task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Future[list[StatusRow]]) -> None:
        """Read the outcome of a task whose time had run out: nobody else does."""
        self._late.discard(task)
        if not task.cancelled():
            task.exception()

    def _result_of(self, part: Part, task: asyncio.Future[list[StatusRow]]) -> list[StatusRow] | BaseException:
        if not task.done():
            if part.server is Server.SCHEDULER and (why := self._bus.unavailable_reason):
                return BusUnavailable(why)  # no scheduler was asked
            return TimeoutError(f"no answer within {self._timeout_s:g} s")
        if task.cancelled():
            return BusUnavailable("the connection is closed")
        fault = task.exception()
        if fault is None:
            return task.result()
        if not isinstance(fault, Faults):
            log.error("status.not_read", exc_info=fault)
        return fault

    def _is_due(self, part: Part, now_s: float) -> bool:
        kept = self._kept.get(part.name)
        if kept is None:
            return True
        every_s = AGE_S if isinstance(kept[2], BaseException) else part.every_s
        return now_s - kept[0] > every_s

    def _parts(self) -> list[Part]:
        found = [
            Part("workers", Server.SCHEDULER, self._read_workers),
            Part("compute services", Server.SCHEDULER, self._read_services),
            Part("fences and hosts", Server.SCHEDULER, self._read_of_hosts, every_s=2 * AGE_S),
            Part("drains", Server.SCHEDULER, self._read_drains),
            Part("lost instances", Server.SCHEDULER, self._read_losses, every_s=LONG_AGE_S),
            Part("audit", Server.DATABASE, self._read_audit, every_s=LONG_AGE_S),
            self._dead_letters_of(API, partial(self._env.transport, API)),
        ]
        if self._nodes is not None:
            found.append(Part("bare metal", Server.IRONIC, self._read_nodes, every_s=2 * AGE_S))
        for name in self._env.cells:
            found += self._parts_of_cell(name, None)
        return found

    def _parts_of_cell(self, cell: str, where: CellBus | None) -> list[Part]:
        return [
            Part(
                f"breakers, quarantine and recovery of {cell}",
                Server.DATABASE,
                partial(self._read_cell, cell),
                every_s=2 * AGE_S,
            ),
            self._dead_letters_of(cell, lambda: self._env.cell_bus(cell, where).transport),
        ]

    def _dead_letters_of(self, bus: str, make: Callable[[], Transport]) -> Part:
        return Part(f"dead letters of {bus}", Server.BROKER, partial(self._read_dead_letters, bus, make), bus=bus)

    # --- by a scheduler

    async def _ask(self, query: Message, answer: type[AnyMessage]) -> AnyMessage:
        if self._opening is not None:
            await asyncio.shield(self._opening)
        if why := self._bus.unavailable_reason:
            raise BusUnavailable(why)
        return await self._bus.request(query, answer, timeout_s=self._answer_s)

    async def _read_workers(self) -> list[StatusRow]:
        page = await self._ask(WorkersQuery(limit=MAX_RECORDS), WorkersPage)
        return rows.of_workers(page, self._env.cells, self._env.clock.time())

    async def _read_services(self) -> list[StatusRow]:
        page = await self._ask(ServicesQuery(limit=MAX_RECORDS), ServicesPage)
        return rows.of_services(page.services)

    async def _read_hosts(self) -> Sequence[HostRecord]:
        if self._opening is not None:
            await asyncio.shield(self._opening)
        page = await read_hosts(self._bus, HostsQuery(limit=MAX_RECORDS), timeout_s=self._answer_s)
        return page.hosts

    async def _read_of_hosts(self) -> list[StatusRow]:
        hosts = await self._hosts()
        found = rows.of_hosts(hosts)
        fencing = self._settings.fencing
        if not fencing.plugin:
            return found
        services = (await self._ask(ServicesQuery(limit=MAX_RECORDS), ServicesPage)).services
        planned = plan(hosts, services, {}, fencing, self._env.clock.monotonic())
        held = dict(planned.held)
        left = [host for host in hosts if host.uuid in planned.suspects and host.name not in held]
        if left:
            codes = await held_by_record(self._bus, hosts, left, fencing.max_per_hour, timeout_s=self._answer_s)
            held |= {host.name: codes[host.uuid] for host in left if codes[host.uuid]}
        return found + rows.of_held(held, hosts)

    async def _read_drains(self) -> list[StatusRow]:
        listed = (await self._ask(DrainsQuery(limit=MAX_DRAINS), DrainsPage)).drains
        running = [one for one in listed if one.state is DrainState.RUNNING][:MAX_LOOKED_AT]
        pages = await asyncio.gather(*(self._ask(DrainsQuery(drain=one.id), DrainsPage) for one in running))
        looked_at: list[DrainProgress] = [one for page in pages for one in page.drains]
        return rows.of_drains(looked_at, is_stuck)

    async def _read_losses(self) -> list[StatusRow]:
        query = BuildQuery(state=BuildState.FAILED, code=INSTANCE_LOST, limit=MAX_BUILDS)
        return rows.of_losses(await self._ask(query, BuildPage))

    # --- by the database

    async def _read_cell(self, cell: str) -> list[StatusRow]:
        try:
            return await on_database(self._env, cell, partial(self._of_cell, cell))
        except CellNeverStarted as fault:
            following = f"berth run conductor --cell {cell}"
            what = f"breakers, quarantine and recovery of {cell}"
            return [rows.not_read(what, fault.code, str(fault), following=following)]

    async def _of_cell(self, cell: str, database: Database) -> list[StatusRow]:
        safety = Safety(PostgresKeyed(database))
        machines = [
            one for one in await safety.records() if one.machine.kind is UnknownMachineKind.QUARANTINED
        ]  # fmt: skip
        recovery = await recoveries.of_cell(cell, database)
        return [
            *rows.of_breakers(cell, await safety.breakers()),
            *rows.of_quarantine(cell, machines),
            *rows.of_recovery(recovery),
        ]

    async def _read_audit(self) -> list[StatusRow]:
        """A finding counts once two passes in a row have it: the first reading makes both, if the first has any."""
        site = Site(self._settings, database_url=self._env.database_url, clock=self._env.clock)
        now_s = self._env.clock.monotonic
        found = await findings_without_hosts(site)
        if self._confirmed is None:
            self._confirmed = Confirmed()
            if found:
                self._confirmed.apply(found, now_s())
                found = await findings_without_hosts(site)
        self._confirmed.apply(found, now_s())
        return rows.of_findings(list(self._confirmed.found.values()))

    # --- by a broker, and by Ironic

    async def _read_dead_letters(self, bus: str, make: Callable[[], Transport]) -> list[StatusRow]:
        transport = self._transports.get(bus)
        if transport is None:
            transport = make()
            try:
                await transport.open()
            except BaseException:
                with contextlib.suppress(Exception):
                    await transport.close()
                raise
            self._transports[bus] = transport
        try:
            count = await transport.depth(DEAD_LETTERS)
            oldest = await list_dead(transport, limit=1) if count else []
        except QueueMissing:  # no worker has been on that bus yet
            return []
        first = next(iter(oldest), None)
        return rows.of_dead_letters(bus, count, None if first is None else (first.queue, first.code, first.died_at))

    async def _read_nodes(self) -> list[StatusRow]:
        assert self._nodes is not None
        return rows.of_nodes(await self._nodes())


async def _rows_or_fault(part: Part, timeout_s: float) -> list[StatusRow] | BaseException:
    try:
        async with asyncio.timeout(timeout_s):
            return await part.read()
    except Faults as fault:
        return fault


def _rows_of(read: Sequence[tuple[Part, list[StatusRow] | BaseException]]) -> list[StatusRow]:
    """The rows of what was read, one for each server that is away, and one for each part that is not known. A server of
    which any part was read is not away: a part of it was only too slow.
    """
    found: list[StatusRow] = []
    away: dict[tuple[StatusKind, str], list[tuple[Part, BaseException]]] = defaultdict(list)
    unread: dict[tuple[str, str], list[tuple[Part, BaseException]]] = defaultdict(list)
    answered = {(part.server, part.bus) for part, result in read if not isinstance(result, BaseException)}
    for part, result in read:
        if not isinstance(result, BaseException):
            found += result
            continue
        server, following = _server_away(part, result), _FOLLOWING[part.server]
        if server is not None and (part.server, part.bus) not in answered:
            away[server].append((part, result))
            following = rows.next_of(*server)
        unread[_code_of(result), following].append((part, result))
    for (kind, subject), parts in away.items():
        reason = f"{_code_of(parts[0][1])}: {parts[0][1]}"
        what = _AWAY[kind].format(subject)
        found.append(rows.row(kind, what, subject=subject, detail=reason, severity=Severity.CRITICAL))
    for (code, following), parts in unread.items():
        names = ", ".join(dict.fromkeys(part.name for part, _ in parts))
        found.append(rows.not_read(names, code, str(parts[0][1]), following=following))
    return found


_AWAY = {
    StatusKind.DATABASE_AWAY: "The database is out of reach",
    StatusKind.BUS_AWAY: "Bus {} is out of reach",
    StatusKind.SCHEDULER_AWAY: "No scheduler answers",
}
_FOLLOWING = {
    Server.DATABASE: "berth db check",
    Server.SCHEDULER: "berth worker list",
    Server.BROKER: "berth config",
    Server.IRONIC: "berth node list",
}


def _server_away(part: Part, fault: BaseException) -> tuple[StatusKind, str] | None:
    """The server that a fault shows to be away; None: it answers, or is none of ours."""
    if isinstance(fault, RequestUnconfirmed):
        return StatusKind.BUS_AWAY, API
    if isinstance(fault, DatabaseUnavailable):
        return StatusKind.DATABASE_AWAY, ""
    if isinstance(fault, RequestTimeout | Unroutable):
        return StatusKind.SCHEDULER_AWAY, ""
    if isinstance(fault, BusUnavailable):
        return StatusKind.BUS_AWAY, part.bus or API
    if isinstance(fault, TimeoutError | OSError) and part.server is not Server.IRONIC:
        of = {Server.DATABASE: StatusKind.DATABASE_AWAY, Server.BROKER: StatusKind.BUS_AWAY}
        return of.get(part.server, StatusKind.SCHEDULER_AWAY), part.bus
    return None


def _code_of(fault: BaseException) -> str:
    return "timeout" if isinstance(fault, TimeoutError) else str(getattr(fault, "code", type(fault).__name__))
