"""The reports of compute services about their hosts, compared with the records; what differs is repaired."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from bus.bus import Bus
from bus.clock import Clock
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.cell import MAX_RESCANS, HostStates, RescanHosts
from cell_conductor import metrics
from cell_conductor.config import ConductorConfig
from cell_conductor.engine import Engine, Listening
from cell_conductor.hosts.fence_cache import FenceCache
from cell_conductor.hosts.host_owners import HostOwners
from cell_conductor.hosts.lease_controller import LeaseController
from cell_conductor.hosts.stale_machines import StaleMachines
from cell_conductor.hosts.stated_marks import StatedMarks
from cell_conductor.pending_lookups import PendingLookups
from cell_conductor.reports.listings import HostListings, NewestReports
from cell_conductor.reports.report_diff import Differences, Rescans, differences
from cell_conductor.reports.report_guard import ReportGuard
from cell_conductor.state.events import Event, InstanceEvent, MachineRunning
from cell_conductor.store.port import InstanceStore

log = structlog.get_logger(__name__)

LOGGED_HOSTS = 10  # of one page


class HostHandlers:
    """Queue conductor.hosts.{process}: compare the machines of hosts with the record, and repair the difference."""

    def __init__(
        self,
        engine: Engine,
        store: InstanceStore,
        clock: Clock,
        config: ConductorConfig,
        bus: Bus,
        *,
        listings: HostListings,
        lookups: PendingLookups,
        fences: FenceCache,
        leases: LeaseController,
        marks: StatedMarks,
    ) -> None:
        """listings: what it receives. leases: which services are up, and which are gone for good."""
        self._engine = engine
        self._store = store
        self._clock = clock
        self._config = config
        self._newest = NewestReports()
        self._listings = listings
        self._host_conflicts: dict[str, frozenset[str]] = {}
        self._up, self._stated = leases.up, marks.stated
        self._record_superseded = leases.record_superseded
        self._fences = fences
        self._stale = StaleMachines(store, fences, clock, config)
        self._guard = ReportGuard(
            store, bus, clock, config, effective=engine.effective, adopt=lookups.add_adoption, may_have=self._may_have
        )
        self._bus = bus
        self._owners = HostOwners(bus, listings, leases)

    async def hosts(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """HostStates. Raises Listening."""
        if not self._stated().may_act:
            raise Listening
        for received in batch:
            message = received.message
            if not isinstance(message, HostStates):
                continue
            if self._store.is_recovering:  # by its records no machine is judged; another report comes
                self._listings.record(message)
                continue
            if self._newest.is_newer(message):
                await self._compare(message)
                self._newest.record(message)
            elif message.epoch < (newest := self._newest.epoch(message.service)):
                self._record_superseded(message.service, newest)
        return [Done()] * len(batch)

    async def _compare(self, report: HostStates) -> None:
        self._record_listed(report)
        report = await self._owners.answer(report)
        rescans: list[tuple[str, str]] = []
        listed = [host for host in report.hosts if host.running is not None]
        blocked = set[str]()
        if listed:
            running = sorted({one.instance_uuid for host in listed for one in host.running or ()})
            summaries = await self._store.summaries([host.uuid for host in listed], running)
            await self._fences.ensure_loaded()
            fenced = self._fences.fences
            rescans = await self._stale.compare(
                report, summaries, self._store.database_id, self._owners.has_changed_owner
            )
            protected = {(host, one.uuid) for one in summaries for host in one.protected_hosts}
            blocked = {one.uuid for one in summaries if one.blocked_reason}
            found = differences(
                report,
                summaries,
                now=self._clock.time(),
                grace_s=self._config.report_grace_s,
                database_id=self._store.database_id,
                may_have=self._may_have,
                fenced=fenced,
            )
        else:
            found, protected = Differences(), set()
        await self._take(report.service, found.events)
        await self._guard.reserve(report, found.unknown_machines)
        rescans += await self._guard.delete_resolved(report, found.unknown_machines, protected, blocked)
        destructive = await self._guard.assess(report, found)
        await self._take(report.service, destructive)
        rescans = [*rescans, *_of_hosts(found.rescans)]
        # A scan does not end a demand whose event is blocked: such demands would fill the bounded request, each time.
        if found.destructive_rescans and not await self._guard.is_open(report.service):
            rescans += _of_hosts(found.destructive_rescans)
        await self._request_rescan(report, rescans)

    def _may_have(self, service: str, host: str) -> bool:
        return not self._owners.has_changed_owner(host, service)

    def _record_listed(self, report: HostStates) -> None:
        """Log and count the hosts of this report that another service which is up lists, too, when that changes."""
        self._listings.record(report)
        found = self._listings.conflicts(report, self._up() or ())
        listed = {host.uuid for host in report.hosts}
        before = self._host_conflicts.get(report.service, frozenset())
        now = {uuid for uuid in before - listed if self._listings.may_have(report.service, uuid)} | found.keys()
        if now == before:
            return
        self._host_conflicts[report.service] = frozenset(now)
        metrics.HOST_CONFLICTS.labels(report.service).set(len(now))
        for host in sorted(found.keys() - before)[:LOGGED_HOSTS]:
            log.error(
                "host.reported_twice",
                host=host,
                service=report.service,
                other=found[host],
                hosts=len(found),
                cause=host,
                hint="two compute services that are up report a host of this uuid: stop one of them. Until then no"
                " report of one of them shows that a machine of the other one is lost",
            )

    async def _request_rescan(self, report: HostStates, rescans: Sequence[tuple[str, str]]) -> None:
        """Request a later scan of hosts that another service reported, if only that shows which machines are lost."""
        if not rescans:
            return
        bounded = rescans[:MAX_RESCANS]
        metrics.RESCANS.labels(report.service).inc(len(bounded))
        command = RescanHosts(
            service=report.service,
            hosts=tuple(dict.fromkeys(host for host, _ in bounded)),
            rescans=tuple(dict.fromkeys(rescan for _, rescan in bounded)),
        )
        await self._bus.publish(command, cause=report.service)

    async def _take(self, service: str, events: Sequence[tuple[str, Event]]) -> None:
        incoming = [InstanceEvent(uuid, event) for uuid, event in events]
        for start in range(0, len(incoming), self._config.max_batch):
            piece = incoming[start : start + self._config.max_batch]
            for instance_event in piece:
                kind = "runs" if isinstance(instance_event.event, MachineRunning) else "missing"
                metrics.REPAIRED.labels(kind).inc()
                log.info("instance.differs", instance=instance_event.uuid, kind=kind, service=service)
            flushed = await self._engine.take(piece, source="reports")
            if flushed is not None:
                await flushed


def _of_hosts(rescans: Rescans) -> list[tuple[str, str]]:
    return [(host, rescan) for (host, _), rescan in rescans.items()]
