"""Checks what hosts report before a report alone ends or destroys anything: breakers, quarantine, and reservations of
machines in quarantine.
"""

# A report without destructive events and unknown machines costs nothing here, and a page of one of all hosts a read of
# the service's breaker. The reservations are level-triggered: a report names the machines that are reserved; if they
# differ from the record, the service is sent the right ones. So no state is kept here, and any conductor of the cell
# does it.

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Sequence

import structlog

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.cell import (
    MAX_NAMED_MACHINES,
    BreakerTripped,
    Destroy,
    HostStates,
    ReserveMachines,
    UnknownMachineReport,
    UnknownMachinesFound,
)
from cell_conductor import metrics
from cell_conductor.config import ConductorConfig
from cell_conductor.reports.listings import MAX_SERVICES, PageDifferences, ScanDifferences, first_page_of, is_complete
from cell_conductor.reports.report_diff import Differences
from cell_conductor.reports.reserved_machines import pages, reserved_on, wrong_reservations
from cell_conductor.state.breaker import DestructiveDifference, RecentDifferences, assess, key_of
from cell_conductor.state.events import Event, InstanceEvent
from cell_conductor.state.instance import Instance
from cell_conductor.state.ownership_proof import is_commanded
from cell_conductor.state.unknown_machine import UNREADABLE, UnknownMachine, UnknownMachineKind
from cell_conductor.store.keyed_tables import ADOPT, DESTROY, PROTECT, MachineKey, UnknownMachineRecord
from cell_conductor.store.port import InstanceStore, UnreadableRecords

log = structlog.get_logger(__name__)

# Foreign machines kept on record of one service; a neighbour may have a hundred thousand. The others are counted.
MAX_FOREIGN = 1_000
MAX_TRACKED = 200_000  # unknown machines remembered here, so that each is logged and counted once
LOGGED_PER_PAGE = 20  # new ones logged of one page; the others are counted in one line

# Of these events those that the table of states would act on now, with their records (`Engine.effective`).
Effective = Callable[[Sequence[InstanceEvent]], Awaitable[list[tuple[InstanceEvent, Instance]]]]


class ReportGuard:
    """One conductor's; the records of breakers and quarantine are in the cell's schema, for all conductors."""

    def __init__(
        self,
        store: InstanceStore,
        bus: Bus,
        clock: Clock,
        config: ConductorConfig,
        *,
        effective: Effective,
        adopt: Callable[[str], None],
        may_have: Callable[[str, str], bool] = lambda _service, _host: False,
    ) -> None:
        """`adopt(uuid)`: give the machine of this instance to it, as an operator has decided. may_have: as
        `differences` has it.
        """
        self._may_have = may_have
        self._adopt = adopt
        self._store = store
        self._effective = effective
        self._bus = bus
        self._clock = clock
        self._limit = config.breaker_limit
        self._scans: dict[tuple[str, bool], ScanDifferences] = {}  # by service, of all its hosts or of some
        self._recent = RecentDifferences(config.breaker_window_s)
        self._known: dict[UnknownMachine, None] = {}
        self._recorded: dict[MachineKey, str] = {}  # {machine: service} as on record
        self._read_at = 0  # the incarnation of the database that they were read of (0: not read yet)

    async def assess(self, report: HostStates, found: Differences) -> Sequence[tuple[str, Event]]:
        """The events that may take effect, of those that this page, with the earlier pages of the same scan, found to
        be destructive.
        """
        self._log(report.service, found.unknown_machines)
        new = await self._record(report, found.unknown_machines)
        of, scan = self._scan_of(report)
        page = scan.pages.setdefault(report.sequence, PageDifferences())
        page.differences = [DestructiveDifference(uuid, event) for uuid, event in found.destructive]
        page.quarantined += tuple(new)  # new the first time that it comes
        if first_page_of(report):
            await self._end_reset(report, found)
        if not is_complete(report, scan.pages):
            return ()  # judged with the last page; if a page is lost, the next scan brings all of it again
        events = await self._decide(report, list(scan.pages.values()))
        del self._scans[of]
        return events

    async def _end_reset(self, report: HostStates, found: Differences) -> None:
        """No reset allows what a report of all hosts finds as it is on record."""
        breaker = await self._store.safety.breaker(report.service)
        if breaker is None:
            return
        hosts = {host.uuid for host in report.hosts if host.running is not None}
        kept = {DestructiveDifference(uuid, event).key for uuid, event in found.destructive}
        kept.update(key_of(uuid, host) for host, uuid in found.destructive_rescans)
        kept.update(key_of(one.uuid, one.host_uuid) for one in found.unknown_machines)
        left = breaker.after_scan(hosts, kept)
        if left != breaker:
            await self._store.safety.trip(left, over=breaker)

    async def delete_resolved(
        self,
        report: HostStates,
        unknown: Sequence[UnknownMachine],
        protected: Container[MachineKey] = (),
        blocked: Container[str] = (),
    ) -> list[tuple[str, str]]:
        """Delete the record of machines that left the hosts of this report, or that records explain now. Before
        `assess`. Returns (host, rescan) of the scans that are to show what is kept; none for what is listed.
        """
        # protected: what an operator protects by those records (`InstanceSummary.protected_hosts`): a later decision
        # was not read when they explained it. blocked: instances whose records explain nothing. What is kept is gone
        # only by a scan from after it was last seen.
        await self._read()
        here, service = {(one.host_uuid, one.uuid) for one in unknown}, report.service
        listed = {(host.uuid, one.instance_uuid): one for host in report.hosts for one in host.running or ()}
        seen = {host.uuid for host in report.hosts if host.running is not None}
        places = {
            place
            for place, owner in self._recorded.items()
            if place[0] in seen
            and place not in here
            and not (place in listed and place[1] in blocked)
            and (owner == service or not self._may_have(owner, place[0]))
        }
        if not places:
            return []

        def is_over(place: MachineKey, rescan: str) -> bool:
            if (one := listed.get(place)) is None:
                return rescan in report.rescans
            return place in protected and one.database_id == self._store.database_id and not one.destroying

        async with self._store.transaction() as transaction:
            found = await transaction.unknown_machines({uuid for _, uuid in places})
        found = [one for one in found if one.location in places]
        gone = [one for one in found if one.decision != PROTECT or is_over(one.location, one.rescan)]
        left = {one.location for one in found}.difference(await self._store.safety.delete(gone))
        for place in places - left:
            del self._recorded[place]
        return [(one.location[0], one.rescan) for one in found if one not in gone and one.location not in listed]

    async def reserve(self, report: HostStates, unknown: Sequence[UnknownMachine]) -> None:
        """Send the machines to reserve for those hosts of a page that have others reserved."""
        wrong = wrong_reservations(report, unknown)
        if not wrong:
            return
        uuids = sorted({one.instance_uuid for machines in wrong.values() for one in machines})
        async with self._store.transaction() as transaction:
            try:
                records = await transaction.lock(uuids) if uuids else {}
            except UnreadableRecords as unreadable:  # as of one without a record: it is not known what they take
                records = await transaction.lock(sorted(set(uuids) - unreadable.uuids))
        metrics.RESERVED.labels(report.service).inc()
        log.warning("quarantine.reserve", service=report.service, hosts=len(wrong), machines=len(uuids))
        for page in pages(wrong):
            command = ReserveMachines(
                service=report.service,
                epoch=report.epoch,
                sequence=report.sequence,
                hosts=tuple(reserved_on(host, wrong[host], records) for host in page),
            )
            await self._bus.publish(command, cause=report.service)

    async def is_open(self, service: str) -> bool:
        """Whether the breaker of this service blocks all destructive events."""
        breaker = await self._store.safety.breaker(service)
        return breaker is not None and breaker.is_open

    def _scan_of(self, report: HostStates) -> tuple[tuple[str, bool], ScanDifferences]:
        of, key = (
            (report.service, bool(first_page_of(report))),
            (report.epoch, first_page_of(report) or report.sequence),
        )
        scan = self._scans.pop(of, None)
        if scan is None or scan.key != key:
            scan = ScanDifferences(key)
        self._scans[of] = scan
        if len(self._scans) > MAX_SERVICES:
            del self._scans[next(iter(self._scans))]
        return of, scan

    async def _decide(self, report: HostStates, scan: Sequence[PageDifferences]) -> Sequence[tuple[str, Event]]:
        differences = [one for page in scan for one in page.differences]
        quarantined = [one for page in scan for one in page.quarantined]
        # The comparison read without locks, and a busy cell's records are ahead of its reports: an event that the table
        # would ignore (a machine that came up after the scan) is not lost, and must not open a breaker.
        if differences:
            effective = await self._effective([InstanceEvent(f.uuid, f.event) for f in differences])
            differences = [
                DestructiveDifference(one.uuid, one.event, commanded=is_commanded(instance, one.event))
                for one, instance in effective
            ]
        if not differences and not quarantined:
            return ()
        service, safety, now = report.service, self._store.safety, self._clock.time()
        breaker = await safety.breaker(service)
        recent = self._recent.of(service, self._clock.monotonic())
        decision = assess(service, differences, quarantined, breaker, limit=self._limit, now=now, recent=recent)
        self._recent.add(service, decision.counted, self._clock.monotonic())
        if decision.tripped is not None and breaker is not None and breaker.is_open:
            await safety.trip(decision.tripped, over=breaker)  # a reset meanwhile was of fewer machines
        elif decision.tripped is not None:
            await safety.trip(decision.tripped)
            self._recent.clear(service)
            metrics.TRIPPED.labels(service).inc()
            log.error(
                "breaker.tripped",
                service=service,
                lost=decision.tripped.lost,
                quarantined=decision.tripped.quarantined,
                over=decision.tripped.over,
                limit=self._limit,
                hint="nothing of this service is destroyed or taken for lost until `berth breaker reset`",
            )
            alarm = BreakerTripped(
                cell=report.cell,
                service=service,
                lost=decision.tripped.lost,
                quarantined=decision.tripped.quarantined,
                over=decision.tripped.over,
                limit=self._limit,
                at=now,
            )
            await self._bus.publish(alarm, cause=service)
        if decision.blocked:
            metrics.BLOCKED.labels(service).inc(decision.blocked)
        return [(difference.uuid, difference.event) for difference in decision.effective]

    async def _record(self, report: HostStates, machines: Sequence[UnknownMachine]) -> list[UnknownMachine]:
        """Keep unknown machines on record, and carry out an operator's decision; returns those that are new in
        quarantine.
        """
        free_slots = MAX_FOREIGN - sum(service == report.service for service in self._recorded.values())
        kept: list[UnknownMachine] = []
        for one in machines:
            if one.kind is UnknownMachineKind.FOREIGN and (one.host_uuid, one.uuid) not in self._recorded:
                free_slots -= 1
                if free_slots < 0:
                    continue
            kept.append(one)
        if not kept:
            return []
        records = await self._store.safety.record(report.service, kept, self._clock.time())
        self._recorded.update({row.location: report.service for row in records})
        quarantined = [row for row in records if row.machine.kind is UnknownMachineKind.QUARANTINED]
        for row in quarantined:
            if row.decision == DESTROY and row.machine.reason != UNREADABLE:  # whatever it was that was decided on
                await self._destroy(row)
            elif row.decision == ADOPT:
                self._adopt(row.machine.uuid)
        await self._publish_new(report, [row.machine for row in records if row.is_new])
        new = [row.machine for row in quarantined if row.is_new]
        if new:
            metrics.QUARANTINED.labels(report.service).inc(len(new))
        return new

    async def _read(self) -> None:
        """Read the record once, and again when the database was restored: a backup has machines that have been
        taken off the record since.
        """
        incarnation = self._store.incarnation
        if self._read_at == incarnation:
            return
        self._recorded = {record.location: record.service for record in await self._store.safety.records()}
        self._read_at = incarnation

    async def _publish_new(self, report: HostStates, new: Sequence[UnknownMachine]) -> None:
        """Publish the machines that are newly on record; of several conductors the one that recorded them does."""
        if not new:
            return
        quarantined = [one for one in new if one.kind is UnknownMachineKind.QUARANTINED]
        foreign = [one for one in new if one.kind is UnknownMachineKind.FOREIGN]
        alarm = UnknownMachinesFound(
            cell=report.cell,
            service=report.service,
            foreign=len(foreign),
            quarantined=len(quarantined),
            machines=tuple(
                UnknownMachineReport(
                    instance_uuid=one.uuid, host_uuid=one.host_uuid, kind=one.kind.value, reason=one.reason
                )
                for one in (*quarantined, *foreign)[:MAX_NAMED_MACHINES]
            ),
            at=self._clock.time(),
        )
        await self._bus.publish(alarm, cause=report.service)

    async def _destroy(self, record: UnknownMachineRecord) -> None:
        """Command a destruction that an operator has decided: with every report, until the host has taken it."""
        machine = record.machine
        log.warning(
            "quarantine.destroyed",
            instance=machine.uuid,
            host=machine.host_uuid,
            by=record.decided_by,
            cause=machine.uuid,
        )
        command = Destroy(
            instance_uuid=machine.uuid,
            attempt=machine.attempt,
            host_uuid=machine.host_uuid,
            service=record.service,
            database_id=self._store.database_id,
        )
        await self._bus.publish(command, cause=machine.uuid)

    def _log(self, service: str, machines: Sequence[UnknownMachine]) -> None:
        unseen = [one for one in machines if one not in self._known]
        self._known.update(dict.fromkeys(unseen))
        while len(self._known) > MAX_TRACKED:
            del self._known[next(iter(self._known))]
        for one in unseen[:LOGGED_PER_PAGE]:
            log.warning(
                "machine.unknown",
                instance=one.uuid,
                host=one.host_uuid,
                attempt=one.attempt,
                kind=one.kind,
                reason=one.reason,
                service=service,
            )
        if len(unseen) > LOGGED_PER_PAGE:
            log.warning("machine.unknown_more", service=service, machines=len(unseen) - LOGGED_PER_PAGE)
        for one in unseen:
            metrics.UNKNOWN_MACHINES.labels(one.kind).inc()
