"""Gathers the facts that the invariants are judged by: from PostgreSQL, and from the hosts' own reports."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from berth.audit.invariants import (
    ALIVE,
    AT_REST,
    ELSEWHERE,
    RESIZED,
    ActionFact,
    BreakerFact,
    Facts,
    GangFact,
    InstanceFact,
    InventoryFact,
    QuarantineFact,
    ReporterFact,
    RunningFact,
    ServiceDownFact,
)
from berth.config.site import Site, process_name, with_added_cells
from bus.clock import Clock
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.build import DELETE_REQUESTED, BuildEvent
from bus.contracts.cell import HostStates, ReportHosts
from bus.contracts.feed import Change
from bus.persistence.database import Database
from bus.persistence.tables import in_list
from cell_conductor.state.lease import Lease, LeaseState
from cell_conductor.state.unknown_machine import UnknownMachineKind
from cell_conductor.store.fence_rows import LeaseStore
from cell_conductor.store.keyed_tables import PROTECT
from cell_conductor.store.postgres_keyed import PostgresKeyed
from cell_conductor.store.tables import SERVICE
from cell_conductor.store.unknown_machines import Safety
from placement_worker.operations.audit import sharing_providers
from scheduler_worker.records.build_record import OPEN

# Hosts are waited for until each that should run something has reported, and each service that began a report of all
# its hosts has ended it; at most this long, in which 100,000 hosts report their machines even on a busy machine ...
REPORT_TIMEOUT_S = 60.0
# ... and for no page at all no longer than this: a service that is up begins to answer a request within it.
SILENCE_S = 8.0
# Hosts that should run nothing need not report: after this long without a page every service that is up has reported.
REPORT_QUIET_S = 0.5
FIRST_REPORT_S = 2.5
REST_POLL_S = 0.2

_INVENTORIES = """
SELECT p.uuid::text, c.name, i.total, i.reserved, i.allocation_ratio, i.capacity, i.used
FROM inventories i JOIN providers p ON p.id = i.provider_id JOIN resource_classes c ON c.id = i.class_id
"""
_EXCEEDED = f"{_INVENTORIES} WHERE i.used > i.capacity"
_ALLOCATIONS = """
SELECT a.consumer::text, p.uuid::text AS provider, c.name, a.amount
FROM allocations a JOIN providers p ON p.id = a.provider_id JOIN resource_classes c ON c.id = a.class_id
"""
_ROOTS = "SELECT p.uuid::text, r.uuid::text AS root FROM providers p JOIN providers r ON r.id = p.root_id"
_DUPLICATE_NAMES = """
SELECT n.host, n.name, p.uuid::text
FROM unnest($1::text[], $2::text[]) n(host, name) JOIN providers p ON p.name = n.name
WHERE NOT EXISTS (SELECT FROM providers h WHERE h.uuid = n.host::uuid)
"""
_FEED = "SELECT coalesce(min(first), 0), coalesce(max(last), 0), coalesce(sum(last - first + 1), 0)::int8 FROM changes"
# The usage that placement keeps beside each inventory against the sum of its allocations, both ways round.
_AUDIT = """
SELECT p.uuid::text AS provider, c.name, coalesce(i.used, 0) AS used, coalesce(a.amount, 0) AS amount
FROM inventories i
FULL JOIN (SELECT provider_id, class_id, sum(amount) AS amount FROM allocations GROUP BY 1, 2) a
  ON a.provider_id = i.provider_id AND a.class_id = i.class_id
LEFT JOIN providers p ON p.id = coalesce(i.provider_id, a.provider_id)
LEFT JOIN resource_classes c ON c.id = coalesce(i.class_id, a.class_id)
WHERE coalesce(i.used, 0) <> coalesce(a.amount, 0)
"""
_REQUESTS = "SELECT instance_uuid::text, state FROM build_requests"
_CELLS = "SELECT instance_uuid::text, cell FROM build_requests WHERE cell IS NOT NULL"
_INSTANCES = f"""
SELECT uuid::text, state, host_uuid::text, attempt, {SERVICE} FROM instances
WHERE state NOT IN ({in_list([RESIZED, *sorted(ELSEWHERE)])})
"""
# A move that has arrived and awaits its confirm has two machines.
_RESIZED = f"""
SELECT uuid::text, state, host_uuid::text, attempt, {SERVICE}, record #>> '{{action,request_id}}',
       record #>> '{{action,source,host_uuid}}', coalesce(record #>> '{{action,source_attempt}}', '0')::int,
       coalesce(record #>> '{{action,source,service}}', '')
FROM instances WHERE state = '{RESIZED}'
"""
# What has not had its time yet: since the last step began, as long as one may take, by the request or the settings.
_SETTLED = in_list(sorted(AT_REST))
_STEP_S = """greatest((record ->> 'build_timeout_s')::float8, (record #>> '{action,step_timeout_s}')::float8, $2)"""
_WITHIN_TIME = f"SELECT uuid::text FROM instances WHERE state NOT IN ({_SETTLED}) AND since + {_STEP_S} > $1"
IS_OPEN = f"state IN ({in_list(OPEN)})"
_REQUESTED = f"""
SELECT instance_uuid::text FROM build_requests WHERE {IS_OPEN} AND updated_at + $2 > $1
UNION SELECT instance_uuid::text FROM instance_actions WHERE NOT terminal AND updated_at + $2 > $1
"""
READ_DATABASE_ID = "SELECT database_id::text FROM identity"
_ACTIONS = "SELECT request_id::text, instance_uuid::text, kind, state, terminal FROM instance_actions"
# Whether a member was dispatched is in its timeline: the cell of one that was not may be that of an older allocation.
_SENT = """timeline LIKE '%"what":"dispatched"%'"""
_GANGS = f"""
SELECT gang::text, max(gang_min_count), count(*), count(*) FILTER (WHERE {_SENT}),
       count(*) FILTER (WHERE NOT {_SENT} AND state IN ({in_list(DELETE_REQUESTED)})), min(created_at)
FROM build_requests WHERE gang IS NOT NULL GROUP BY gang
"""
_UNSENT = "SELECT count(*) FROM outbox"

# Of a system at rest an instance still changes by itself when the time to confirm its move ends. If one has while the
# others were read, what was read does not belong together.
READS = 5


async def gather(
    site: Site,
    *,
    accepted: Sequence[str] = (),
    events: Sequence[BuildEvent] | None = None,
    changes: Sequence[Change] | None = None,
    connections: Sequence[tuple[str, str, bool]] | None = None,
    unread: Collection[str] = (),
    reports: bool = True,
) -> Facts:
    """Read everything. Facts that the caller received itself (events, changes) are passed through.

    unread: cells that are not read (`readable_cells.unreadable`). reports: the hosts are asked, too.
    """
    site = await with_added_cells(site, unread)
    environment = site.environment("check")
    placement, scheduler = (
        environment.database("placement", pool_size=2),
        environment.database("scheduler", pool_size=2),
    )
    cells = {cell: environment.database(f"cell_{cell}", pool_size=2) for cell in site.cells}
    try:
        facts = await _facts(site, placement, scheduler, cells, reports=reports)
        for _ in range(READS - 1):
            if _by_uuid(await _resized(cells)) == _by_uuid(one for one in facts.instances if one.state == RESIZED):
                break
            facts = await _facts(site, placement, scheduler, cells, reports=reports)
        return msgspec.structs.replace(
            facts,
            accepted=accepted,
            events=events,
            changes=changes,
            connections=connections,
            unread=frozenset(unread),
        )
    finally:
        for database in (placement, scheduler, *cells.values()):
            await database.close()


async def _facts(
    site: Site, placement: Database, scheduler: Database, cells: dict[str, Database], *, reports: bool
) -> Facts:
    """Read the databases and, for their reports, the hosts, one after the other."""
    step_s = site.settings.scheduler.build_timeout_s
    began = await _within_time(scheduler, cells, site.clock.time(), step_s)
    instances = await _instances(cells)
    leases = await _leases(cells)
    named: dict[str, str] = {}
    running: list[RunningFact] | None = None
    unheard: list[tuple[str, str]] | None = None
    down = _down(leases)
    if reports:
        running, down, named, unheard = await _running(site, cells, instances, leases)
    return Facts(
        inventories=await _inventories(placement, _INVENTORIES),
        allocations=_by_consumer(await _rows(placement, _ALLOCATIONS)),
        roots=await _roots(placement),
        duplicate_names=await _duplicate_names(placement, named),
        requests=dict(await _rows(scheduler, _REQUESTS)),
        cells=dict(await _rows(scheduler, _CELLS)),
        instances=instances,
        running=running,
        feed=await _feed(placement),
        audit=await _miscounted(placement),
        breakers=await _breakers(cells),
        quarantine=await _quarantine(cells),
        actions=[ActionFact(*row) for row in await _rows(scheduler, _ACTIONS)],
        gangs=await _gangs(scheduler, site.clock.time() - site.settings.scheduler.ended_retention_s),
        services=leases.keys() | down.keys(),
        down=[fact for _, fact in sorted(down.items())],
        under_way=began | await _within_time(scheduler, cells, site.clock.time(), step_s),
        unheard=unheard,
    )


async def of_placement(placement: Database) -> tuple[list[InventoryFact], list[str]]:
    """What is wrong by placement's own tables, however many hosts there are: the inventories whose capacity is
    exceeded, and where its usage is not the sum of its allocations.
    """
    return await _inventories(placement, _EXCEEDED), await _miscounted(placement)


async def _inventories(placement: Database, statement: str) -> list[InventoryFact]:
    return [InventoryFact(*row) for row in await _rows(placement, statement)]


async def _miscounted(placement: Database) -> list[str]:
    return [f"{p} {c}: placement has {u}, its allocations {a}" for p, c, u, a in await _rows(placement, _AUDIT)]


async def _roots(placement: Database) -> dict[str, str]:
    async with placement.raw() as connection:
        sharing = await sharing_providers(connection)
    return {provider: root for provider, root in await _rows(placement, _ROOTS) if provider not in sharing}


async def _within_time(scheduler: Database, cells: dict[str, Database], now: float, step_s: float) -> set[str]:
    rows = await _rows(scheduler, _REQUESTED, now, step_s)
    for database in cells.values():
        rows += await _rows(database, _WITHIN_TIME, now, step_s)
    return {str(uuid) for (uuid,) in rows}


def _by_uuid(instances: Iterable[InstanceFact]) -> dict[str, InstanceFact]:
    return {one.instance_uuid: one for one in instances}


async def _running(
    site: Site,
    cells: Mapping[str, Database],
    instances: Sequence[InstanceFact],
    leases: Mapping[tuple[str, str], Lease],
) -> tuple[list[RunningFact], dict[tuple[str, str], ServiceDownFact], dict[str, str], list[tuple[str, str]]]:
    """(the services' reports of hosts that have living instances, the services that are down or do not report, the
    names of the hosts that are reported, the services that are up and were not waited for).
    """
    down = _down(leases)
    there = [one for one in instances if one.state in ALIVE and (one.cell, one.service) not in down]
    wanted = {(one.cell, one.host_uuid): one.service for one in there if one.host_uuid is not None}
    reports, unreported = await _reports(site, wanted, {cell: await read_database_id(cells[cell]) for cell in cells})
    down.update(unreported)
    named = {host: name for one in reports for host, name in one.names.items()}
    of_cell = dict(zip(site.cells, reports, strict=True))
    unheard = [place for place in leases if place not in down and not of_cell[place[0]].has_whole(place[1])]
    return [fact for one in reports for fact in one.facts()], down, named, unheard


async def _duplicate_names(placement: Database, named: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(host, name, the host that has the name) of reported hosts that placement does not have."""
    rows = await _rows(placement, _DUPLICATE_NAMES, list(named), list(named.values()))
    return [(host, name, other) for host, name, other in rows]


async def rest(site: Site, *, timeout_s: float, unread: Collection[str] = ()) -> bool:
    """Wait until nothing is under way: every request and instance settled, every outbox empty. False: time ran out.

    Requests under way at a compute service that is down are not awaited. unread: cells that are not read.
    """
    site = await with_added_cells(site, unread)
    environment = site.environment("rest")
    scheduler = environment.database("scheduler", pool_size=1)
    cells = {cell: environment.database(f"cell_{cell}", pool_size=1) for cell in site.cells}
    deadline = site.clock.monotonic() + timeout_s
    try:
        while not await _at_rest(scheduler, cells):
            if site.clock.monotonic() > deadline:
                return False
            await site.clock.sleep(REST_POLL_S)
        return True
    finally:
        for database in (scheduler, *cells.values()):
            await database.close()


async def _at_rest(scheduler: Database, cells: dict[str, Database]) -> bool:
    open_requests = f"SELECT count(*) FROM build_requests WHERE {IS_OPEN}"
    # A record leaves out that a service is up.
    down_there = f"{SERVICE} IN (SELECT service FROM leases WHERE record ->> 'state' <> 'up')"
    under_way = f"SELECT count(*), count(*) FILTER (WHERE {down_there}) FROM instances WHERE state NOT IN ({_SETTLED})"
    unsent, stuck = (await _rows(scheduler, _UNSENT))[0][0], 0
    for database in cells.values():
        going, down = (await _rows(database, under_way))[0]
        unsent += (await _rows(database, _UNSENT))[0][0] + going - down
        stuck += down
    open_actions = "SELECT count(DISTINCT instance_uuid) FROM instance_actions WHERE NOT terminal"
    if (await _rows(scheduler, open_actions))[0][0] > stuck:
        return False
    return bool(unsent == 0 and (await _rows(scheduler, open_requests))[0][0] <= stuck)


async def _rows(database: Database, statement: str, *values: object) -> list[tuple[Any, ...]]:
    async with database.raw() as connection:
        return [tuple(row) for row in await connection.fetch(statement, *values)]


async def _gangs(scheduler: Database, after: float) -> list[GangFact]:
    """The gangs of which no member's record can have been purged: requested after that time, in seconds since the
    epoch.
    """
    return [
        GangFact(uuid=uuid, members=members, min_count=least, sent=sent, withdrawn=withdrawn)
        for uuid, least, members, sent, withdrawn, requested_at in await _rows(scheduler, _GANGS)
        if requested_at > after
    ]


async def _feed(placement: Database) -> tuple[int, int, int]:
    lowest, highest, rows = (await _rows(placement, _FEED))[0]
    return lowest, highest, rows


def _by_consumer(rows: Sequence[Sequence[Any]]) -> dict[str, dict[str, dict[str, int]]]:
    held: dict[str, dict[str, dict[str, int]]] = defaultdict(lambda: defaultdict(dict))
    for consumer, provider, name, amount in rows:
        held[str(consumer)][str(provider)][str(name)] = int(amount)
    return held


async def _instances(cells: dict[str, Database]) -> list[InstanceFact]:
    found: list[InstanceFact] = []
    for cell, database in cells.items():
        for uuid, state, host, attempt, service in await _rows(database, _INSTANCES):
            at = None if host is None else str(host)
            found.append(InstanceFact(str(uuid), cell, str(state), at, int(attempt), str(service)))
    return [*found, *await _resized(cells)]


async def _resized(cells: dict[str, Database]) -> list[InstanceFact]:
    """The instances that await their confirm, with their second machines."""
    return [
        InstanceFact(uuid, cell, state, host, int(attempt), service, ReporterFact(*source))
        for cell, database in cells.items()
        for uuid, state, host, attempt, service, *source in await _rows(database, _RESIZED)
    ]


async def _leases(cells: Mapping[str, Database]) -> dict[tuple[str, str], Lease]:
    """What the conductors have recorded of each compute service."""
    return {
        (cell, lease.service): lease
        for cell, database in cells.items()
        for lease in await LeaseStore(PostgresKeyed(database)).leases()
    }


def _down(leases: Mapping[tuple[str, str], Lease]) -> dict[tuple[str, str], ServiceDownFact]:
    """The compute services that are silent or stopped."""
    return {
        (cell, service): ServiceDownFact(
            cell=cell,
            service=service,
            reason=f"{lease.state} since {_clock_time(lease.since)} UTC: {lease.reason}",
            is_expected=lease.state is LeaseState.STOPPED,
        )
        for (cell, service), lease in leases.items()
        if lease.state is not LeaseState.UP
    }


def _clock_time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


async def read_database_id(database: Database) -> str:
    """The identity of a cell's database."""
    return str((await _rows(database, READ_DATABASE_ID))[0][0])


async def _breakers(cells: Mapping[str, Database]) -> list[BreakerFact]:
    return [
        BreakerFact(
            cell=cell,
            service=one.service,
            is_open=one.is_open,
            tripped_at=one.tripped_at,
            lost=one.lost,
            quarantined=one.quarantined,
            over=one.over,
        )
        for cell, database in cells.items()
        for one in await Safety(PostgresKeyed(database)).breakers()
    ]


async def _quarantine(cells: Mapping[str, Database]) -> list[QuarantineFact]:
    return [
        QuarantineFact(
            cell,
            one.service,
            one.machine.host_uuid,
            one.machine.uuid,
            one.machine.reason,
            one.decision,
            one.decision == PROTECT,
        )
        for cell, database in cells.items()
        for one in await Safety(PostgresKeyed(database)).records()
        if one.machine.kind is UnknownMachineKind.QUARANTINED
    ]


async def _reports(
    site: Site, wanted: Mapping[tuple[str, str], str], database_ids: Mapping[str, str], also: Collection[str] = ()
) -> tuple[list[Reports], dict[tuple[str, str], ServiceDownFact]]:
    """The reports of every host that answers, queried on each cell's own bus; and the services that did not answer.

    wanted: {(cell, host): service} of those that must answer. database_ids: the identity of each cell's database,
    by which the owner of a machine's tag is known. also: hosts of any cell that are waited for.
    """
    missing = {*also, *(host for _, host in wanted)}
    per_cell = await asyncio.gather(*(_cell_report(site, cell, missing, database_ids.get(cell)) for cell in site.cells))
    unreported: dict[tuple[str, str], ServiceDownFact] = {}
    for (cell, host), service in wanted.items():
        if host in missing and not per_cell[site.cells.index(cell)].has_whole(service):
            reason = f"it did not answer within {SILENCE_S:g} s"
            unreported[cell, service] = ServiceDownFact(cell=cell, service=service, reason=reason)
    return list(per_cell), unreported


async def reported(
    site: Site, wanted: Mapping[tuple[str, str], str], also: Collection[str]
) -> tuple[list[RunningFact], set[str]]:
    """The machines of every host that answers, and those hosts. wanted: {(cell, host): service} of those that are
    waited for. also: further hosts that are.
    """
    database_ids: dict[str, str] = {}
    for cell in sorted({cell for cell, _ in wanted}):
        database = site.environment("check").database(f"cell_{cell}", pool_size=1)
        try:
            database_ids[cell] = await read_database_id(database)
        finally:
            await database.close()
    reports, _ = await _reports(site, wanted, database_ids, also)
    return [fact for one in reports for fact in one.facts()], {host for one in reports for host in one.hosts()}


async def _cell_report(site: Site, cell: str, missing: set[str], database_id: str | None) -> Reports:
    bus = site.bus(process_name("check"), cell)  # two checks may be under way
    reports = Reports(site.clock, missing, database_id)
    consumer = Consumer(bus, "client.hosts.{process}", reports.take, concurrency=1, prefetch=1000)
    await bus.open()
    try:
        await consumer.start()
        await bus.publish(ReportHosts())
        await reports.whole()
        await consumer.drain(1.0)
        return reports
    finally:
        await bus.close()


class Reports:
    """Collects HostStates until they are whole. missing: hosts, of all cells, that have yet to report."""

    def __init__(self, clock: Clock, missing: set[str], database_id: str | None = None) -> None:
        self._clock = clock
        self._database_id = database_id
        self._missing = missing
        self._by_host: dict[str, tuple[tuple[int, int], list[RunningFact]]] = {}
        self._named: dict[str, set[str]] = defaultdict(set)  # {service: the hosts that it has named}
        self._pages: dict[str, tuple[tuple[int, int], set[int], int]] = {}  # {service: (report, pages received, pages)}
        self._received_at = clock.monotonic()
        self.names: dict[str, str] = {}  # of the hosts that were reported

    async def whole(self) -> None:
        """Wait for every host that must report and every report begun; in the end for quiet: who else lives?"""
        started = self._clock.monotonic()
        while (now := self._clock.monotonic()) - started < REPORT_TIMEOUT_S:
            quiet_s = now - (self._received_at if self._by_host else started)
            if quiet_s >= SILENCE_S:
                return
            enough_s = REPORT_QUIET_S if self._by_host else FIRST_REPORT_S
            if quiet_s >= enough_s and self.is_complete:
                return
            await self._clock.sleep(0.05)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is known to be missing."""
        return not self._missing and all(len(received) >= pages for _, received, pages in self._pages.values())

    def has_whole(self, service: str) -> bool:
        """Whether the newest report of this service has come, with all its pages, and each host that it has named was
        seen: what one runs that was named only is not known.
        """
        report = self._pages.get(service)
        return report is not None and len(report[1]) >= report[2] and self._named[service] <= self._by_host.keys()

    def hosts(self) -> set[str]:
        """Every host that has answered."""
        return set(self._by_host)

    def facts(self) -> list[RunningFact]:
        """Every machine reported, the newest report of each host."""
        return [fact for _, facts in self._by_host.values() for fact in facts]

    async def take(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """Pages as they come, in any order."""
        for received in batch:
            if isinstance(received.message, HostStates):
                self._fold(received.message)
        self._received_at = self._clock.monotonic()
        return [Done() for _ in batch]

    def _fold(self, page: HostStates) -> None:
        order = (page.epoch, page.sequence)
        if page.first_sequence:
            report = (page.epoch, page.first_sequence)
            last, received, _ = self._pages.get(page.service, (report, set(), 0))
            if report >= last:
                received = received if report == last else set()
                self._pages[page.service] = report, received | {page.sequence}, page.pages
        for host in page.hosts:
            self.names[host.uuid] = host.name
            self._named[page.service].add(host.uuid)
            # Unknown, or of a host that placement has as another service's: its cell judges nothing by either.
            if host.running is None or host.owner is not None:
                continue
            self._missing.discard(host.uuid)
            known = self._by_host.get(host.uuid)
            if known is None or known[0] <= order:
                machines = [
                    RunningFact(
                        r.instance_uuid, r.attempt, host.uuid, self._database_id in (None, r.database_id), r.stopped
                    )
                    for r in host.running
                ]
                self._by_host[host.uuid] = (order, machines)
