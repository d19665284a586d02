"""Checks what hosts report: the breakers and the quarantine, before all events that a report alone would end or
destroy; the reservations of machines in quarantine; and hosts that the book has as another compute service's.

A report without harmful events and unexplained machines costs nothing here, and a page of one of all hosts a read of
the service's breaker. The reservations are level-triggered: a
report names the machines that are reserved; if they differ from the record, the service is sent the right ones. So no
state is kept here, and any conductor of the cell does it. The book keeps which service has a host and refuses the
inventory of a second one; the conductor has the states and listings of the services. One conductor of the cell, the
keeper of its leases, notifies the owner of such a host, or releases the hosts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Sequence

import structlog
from msgspec.structs import replace

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.cell import (
    MAX_NAMED_MACHINES,
    BreakerTripped,
    ComputeHosts,
    Destroy,
    HostsContested,
    HostsReleased,
    MachinesUnexplained,
    ReserveMachines,
    UnexplainedMachine,
)
from bus.contracts.placement import COMPUTE_SOURCE, InventoryReleased

from . import metrics
from .config import ConductorConfig
from .domain.breaker import (
    Finding,
    Listings,
    PageFindings,
    RecentFindings,
    ScanFindings,
    assess,
    first_of,
    is_whole,
    key_of,
    misreserved,
    pages,
    reserved_on,
)
from .domain.events import Event, InstanceEvent
from .domain.instance import Instance
from .domain.report import (
    MAX_SERVICES,
    UNREADABLE,
    Differences,
    Unexplained,
    UnexplainedKind,
    is_ordered,
)
from .lease_keeper import LeaseKeeper
from .store.port import InstanceStore, UnreadableRecords
from .store.safety import ADOPT, DESTROY, KEEP, MachineKey, UnexplainedRecord

log = structlog.get_logger(__name__)

# Foreign machines kept on record of one service; a neighbour may have a hundred thousand. The others are counted.
MAX_FOREIGN = 1_000
MAX_KNOWN = 200_000  # unexplained machines remembered here, so that each is logged and counted once
LOGGED_PER_PAGE = 20  # new ones logged of one page; the others are counted in one line

# Of these events those that the table of states would act on now, with their records (`Engine.effective`).
Effective = Callable[[Sequence[InstanceEvent]], Awaitable[list[tuple[InstanceEvent, Instance]]]]


class Guard:
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
        self._scans: dict[tuple[str, bool], ScanFindings] = {}  # by service, of all its hosts or of some
        self._recent = RecentFindings(config.breaker_window_s)
        self._known: dict[Unexplained, None] = {}
        self._recorded: dict[MachineKey, str] = {}  # {machine: service} as on record
        self._read_at = 0  # the incarnation of the database that they were read of (0: not read yet)

    async def assess(self, report: ComputeHosts, found: Differences) -> Sequence[tuple[str, Event]]:
        """The events that may take effect, of those that this page, with the earlier pages of the same scan, found to
        be harmful.
        """
        self._log(report.service, found.unexplained)
        new = await self._note(report, found.unexplained)
        of, scan = self._scan_of(report)
        page = scan.pages.setdefault(report.sequence, PageFindings())
        page.findings = [Finding(uuid, event) for uuid, event in found.harmful]
        page.quarantined += tuple(new)  # new the first time that it comes
        if first_of(report):
            await self._end_reset(report, found)
        if not is_whole(report, scan.pages):
            return ()  # judged with the last page; if a page is lost, the next scan brings all of it again
        events = await self._decide(report, list(scan.pages.values()))
        del self._scans[of]
        return events

    async def _end_reset(self, report: ComputeHosts, found: Differences) -> None:
        """No reset allows what a report of all hosts finds as it is on record."""
        breaker = await self._store.safety.breaker(report.service)
        if breaker is None:
            return
        hosts = {host.uuid for host in report.hosts if host.running is not None}
        kept = {Finding(uuid, event).key for uuid, event in found.harmful}
        kept.update(key_of(uuid, host) for host, uuid in found.harmful_rescans)
        kept.update(key_of(one.uuid, one.host_uuid) for one in found.unexplained)
        left = breaker.after_scan(hosts, kept)
        if left != breaker:
            await self._store.safety.trip(left, over=breaker)

    async def forget(
        self,
        report: ComputeHosts,
        unexplained: Sequence[Unexplained],
        words: Container[MachineKey] = (),
        blocked: Container[str] = (),
    ) -> list[tuple[str, str]]:
        """Delete the record of machines that are not on the hosts of this report any more, or that the instances'
        records explain now. Before `assess`. words: what an operator keeps by those records (`Brief.kept`): a later
        word was not asked when they explained it. blocked: instances whose records explain nothing. What is kept is
        gone only by a scan from after it was last seen: returns (host, rescan) of these scans, none for what is listed.
        """
        await self._read()
        here, service = {(one.host_uuid, one.uuid) for one in unexplained}, report.service
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
            return place in words and one.deployment == self._store.deployment and not one.destroying

        async with self._store.transaction() as transaction:
            found = await transaction.unexplained({uuid for _, uuid in places})
        found = [one for one in found if one.place in places]
        gone = [one for one in found if one.verdict != KEEP or is_over(one.place, one.rescan)]
        left = {one.place for one in found}.difference(await self._store.safety.delete(gone))
        for place in places - left:
            del self._recorded[place]
        return [(one.place[0], one.rescan) for one in found if one not in gone and one.place not in listed]

    async def reserve(self, report: ComputeHosts, unexplained: Sequence[Unexplained]) -> None:
        """Send the machines to reserve for those hosts of a page that have others reserved."""
        wrong = misreserved(report, unexplained)
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
            order = ReserveMachines(
                service=report.service,
                epoch=report.epoch,
                sequence=report.sequence,
                hosts=tuple(reserved_on(host, wrong[host], records) for host in page),
            )
            await self._bus.publish(order, cause=report.service)

    async def is_open(self, service: str) -> bool:
        """Whether the breaker of this service holds all harmful events back."""
        breaker = await self._store.safety.breaker(service)
        return breaker is not None and breaker.is_open

    def _scan_of(self, report: ComputeHosts) -> tuple[tuple[str, bool], ScanFindings]:
        of, key = (report.service, bool(first_of(report))), (report.epoch, first_of(report) or report.sequence)
        scan = self._scans.pop(of, None)
        if scan is None or scan.key != key:
            scan = ScanFindings(key)
        self._scans[of] = scan
        if len(self._scans) > MAX_SERVICES:
            del self._scans[next(iter(self._scans))]
        return of, scan

    async def _decide(self, report: ComputeHosts, scan: Sequence[PageFindings]) -> Sequence[tuple[str, Event]]:
        findings = [one for page in scan for one in page.findings]
        quarantined = [one for page in scan for one in page.quarantined]
        # The comparison read without locks, and a busy cell's records are ahead of its reports: an event that the table
        # would ignore (a machine that came up after the scan) is no loss, and must not open a breaker.
        if findings:
            effective = await self._effective([InstanceEvent(f.uuid, f.event) for f in findings])
            findings = [
                Finding(one.uuid, one.event, ordered=is_ordered(instance, one.event)) for one, instance in effective
            ]
        if not findings and not quarantined:
            return ()
        service, safety, now = report.service, self._store.safety, self._clock.time()
        breaker = await safety.breaker(service)
        recent = self._recent.of(service, self._clock.monotonic())
        verdict = assess(service, findings, quarantined, breaker, limit=self._limit, now=now, recent=recent)
        self._recent.add(service, verdict.counted, self._clock.monotonic())
        if verdict.tripped is not None and breaker is not None and breaker.is_open:
            await safety.trip(verdict.tripped, over=breaker)  # a reset meanwhile was of fewer machines
        elif verdict.tripped is not None:
            await safety.trip(verdict.tripped)
            self._recent.clear(service)
            metrics.TRIPPED.labels(service).inc()
            log.error(
                "breaker.tripped",
                service=service,
                lost=verdict.tripped.lost,
                quarantined=verdict.tripped.quarantined,
                over=verdict.tripped.over,
                limit=self._limit,
                hint="nothing of this service is destroyed or taken for lost until `berth breaker reset`",
            )
            alarm = BreakerTripped(
                cell=report.cell,
                service=service,
                lost=verdict.tripped.lost,
                quarantined=verdict.tripped.quarantined,
                over=verdict.tripped.over,
                limit=self._limit,
                at=now,
            )
            await self._bus.publish(alarm, cause=service)
        if verdict.held:
            metrics.HELD.labels(service).inc(verdict.held)
        return [(finding.uuid, finding.event) for finding in verdict.go]

    async def _note(self, report: ComputeHosts, machines: Sequence[Unexplained]) -> list[Unexplained]:
        """Keep unexplained machines on record, and carry out an operator's verdict; returns those that are new in
        quarantine.
        """
        free_slots = MAX_FOREIGN - sum(service == report.service for service in self._recorded.values())
        kept: list[Unexplained] = []
        for one in machines:
            if one.kind is UnexplainedKind.FOREIGN and (one.host_uuid, one.uuid) not in self._recorded:
                free_slots -= 1
                if free_slots < 0:
                    continue
            kept.append(one)
        if not kept:
            return []
        records = await self._store.safety.record(report.service, kept, self._clock.time())
        self._recorded.update({row.place: report.service for row in records})
        quarantined = [row for row in records if row.machine.kind is UnexplainedKind.QUARANTINED]
        for row in quarantined:
            if row.verdict == DESTROY and row.machine.why != UNREADABLE:  # whatever it was that was decided on
                await self._destroy(row)
            elif row.verdict == ADOPT:
                self._adopt(row.machine.uuid)
        await self._announce(report, [row.machine for row in records if row.is_new])
        new = [row.machine for row in quarantined if row.is_new]
        if new:
            metrics.QUARANTINED.labels(report.service).inc(len(new))
        return new

    async def _read(self) -> None:
        """Read the record once, and again when the database was set back: a backup has machines that have been
        taken off the record since.
        """
        incarnation = self._store.set_back.incarnation
        if self._read_at == incarnation:
            return
        self._recorded = {record.place: record.service for record in await self._store.safety.records()}
        self._read_at = incarnation

    async def _announce(self, report: ComputeHosts, new: Sequence[Unexplained]) -> None:
        """Publish the machines that are newly on record; of several conductors the one that recorded them does."""
        if not new:
            return
        quarantined = [one for one in new if one.kind is UnexplainedKind.QUARANTINED]
        foreign = [one for one in new if one.kind is UnexplainedKind.FOREIGN]
        alarm = MachinesUnexplained(
            cell=report.cell,
            service=report.service,
            foreign=len(foreign),
            quarantined=len(quarantined),
            machines=tuple(
                UnexplainedMachine(instance_uuid=one.uuid, host_uuid=one.host_uuid, kind=one.kind.value, why=one.why)
                for one in (*quarantined, *foreign)[:MAX_NAMED_MACHINES]
            ),
            at=self._clock.time(),
        )
        await self._bus.publish(alarm, cause=report.service)

    async def _destroy(self, record: UnexplainedRecord) -> None:
        """Command a destruction that an operator has decided: with every report, until the host has taken it."""
        machine = record.machine
        log.warning(
            "quarantine.destroyed",
            instance=machine.uuid,
            host=machine.host_uuid,
            by=record.decided_by,
            cause=machine.uuid,
        )
        order = Destroy(
            instance_uuid=machine.uuid,
            attempt=machine.attempt,
            host_uuid=machine.host_uuid,
            service=record.service,
            deployment=self._store.deployment,
        )
        await self._bus.publish(order, cause=machine.uuid)

    def _log(self, service: str, machines: Sequence[Unexplained]) -> None:
        unseen = [one for one in machines if one not in self._known]
        self._known.update(dict.fromkeys(unseen))
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        for one in unseen[:LOGGED_PER_PAGE]:
            log.warning(
                "machine.unexplained",
                instance=one.uuid,
                host=one.host_uuid,
                attempt=one.attempt,
                kind=one.kind,
                why=one.why,
                service=service,
            )
        if len(unseen) > LOGGED_PER_PAGE:
            log.warning("machine.unexplained_more", service=service, machines=len(unseen) - LOGGED_PER_PAGE)
        for one in unseen:
            metrics.UNEXPLAINED.labels(one.kind).inc()


class HostOwners:
    """One conductor's answers to services that were refused hosts."""

    def __init__(self, bus: Bus, listings: Listings, leases: LeaseKeeper) -> None:
        self._bus = bus
        self._listings = listings
        self._leases = leases

    async def answer(self, report: ComputeHosts) -> ComputeHosts:
        """Answer a report's statements about other services' hosts; returns the report without them."""
        contested: dict[str, list[str]] = {}
        for host in report.hosts:
            if host.owner is not None and host.owner != report.service:
                contested.setdefault(host.owner, []).append(host.uuid)
        if not contested:
            return report
        if self._leases.is_keeper:
            for owner, hosts in contested.items():
                await self._answer(report, owner, hosts)
        own = tuple(replace(host, running=None) if host.owner is not None else host for host in report.hosts)
        return replace(report, hosts=own)

    def has_passed(self, host: str, owner: str) -> bool:
        """Whether its owner has given this host up, or is gone for good. That knows the keeper of the leases, and each
        conductor that the owner has listed hosts to.
        """
        knows = self._leases.is_keeper or self._listings.has_heard(owner)
        is_gone = knows and self._leases.is_gone(owner)
        return is_gone or not self._listings.may_have(owner, host)

    async def _answer(self, report: ComputeHosts, owner: str, hosts: list[str]) -> None:
        released = [host for host in hosts if self.has_passed(host, owner)]
        kept = [host for host in hosts if host not in set(released)]
        if released:
            # Placement first: the service's next report may follow at once, and is refused before this.
            proof = InventoryReleased(source=f"{COMPUTE_SOURCE}{owner}", roots=tuple(released))
            await self._bus.publish(proof, cause=report.service)
            log.warning("hosts.released", owner=owner, service=report.service, hosts=len(released), first=released[0])
            given = HostsReleased(service=report.service, owner=owner, hosts=tuple(released))
            await self._bus.publish(given, cause=report.service)
        if kept:
            contest = HostsContested(service=owner, other=report.service, hosts=tuple(kept))
            await self._bus.publish(contest, cause=report.service)
