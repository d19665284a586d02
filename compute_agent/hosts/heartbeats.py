"""Publishes heartbeats and reports of hosts to the cell."""

# After a start a host is reported as disabled until the service has destroyed there the machines that it was commanded
# to destroy while it was not running (`startup_gate`). Announcements and heartbeats share one sequence and leave one
# after the other, so that a listener may drop a message that is older than the last one received.

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from typing import Protocol

import structlog

from bus.clock import Clock
from bus.contracts.cell import Heartbeat, HostReport, HostStates, Running
from bus.faults import Transient
from bus.transport import BusError
from bus.yielding import yield_to_loop
from compute_agent import metrics
from compute_agent.driver import DriverHost
from compute_agent.hosts.hash_ring import UNKNOWN, Ring
from compute_agent.hosts.host_conflicts import HostConflicts
from compute_agent.hosts.pending_reports import PendingHostReports, PendingPublisher, PublishingBus
from compute_agent.hosts.startup_gate import DESTROYING, StartupGate
from compute_agent.records.records import Records

log = structlog.get_logger()

HOSTS_PER_PAGE = 1000  # as the contract bounds it
HOSTS_AT_ONCE = 1000  # put into pages in one turn of the event loop
RUNNING_PER_PAGE = 5000  # keeps a page of full hosts below a megabyte


class HostScanner(Protocol):
    """The operations that the reporter needs of the scanner."""

    async def load_hosts(self) -> Sequence[DriverHost]:
        """Read from the driver which hosts there are."""

    async def running(self, hosts: Sequence[str] | None = None) -> dict[str, list[Running]]:
        """The machines of each host that was seen."""


class Reporter:
    """Publishes the state of one service and the hosts that it has."""

    def __init__(
        self,
        bus: PublishingBus,
        *,
        service: str,
        cell: str,
        scanner: HostScanner,
        records: Records,
        changes: PendingHostReports,
        startup_gate: StartupGate,
        clock: Clock,
        rng: random.Random,
        heartbeat_interval_s: float,
        report_interval_s: float,
        ring: Ring | None = None,
        host_conflicts: HostConflicts | None = None,
    ) -> None:
        self._bus = bus
        self._service = service
        self._cell = cell
        self._scanner = scanner
        self._records = records
        self._changes = changes
        self._startup_gate = startup_gate
        self._clock = clock
        self._heartbeat_interval_s = heartbeat_interval_s
        self._pending = PendingPublisher(changes.announcements, clock=clock, rng=rng, interval_s=report_interval_s)
        self._ring = ring
        self._host_conflicts = host_conflicts
        self._publishing = asyncio.Lock()
        self._sequence = 0

    def on_superseded(self, *, epoch: int = 0, version: int = 0) -> None:
        """The cell or placement has received a later number under this service's name than any of its own."""
        # Its clock was restored, its records are gone, or another process had the name while its clock was ahead. The
        # service holds the name: it continues above that epoch, and publishes everything again. A late copy changes
        # nothing.
        before = self._records.epoch
        if self._records.outgrow(epoch, version):
            log.warning(
                "compute.outdated", service=self._service, epoch=self._records.epoch, own_epoch=before, version=version
            )
            self._changes.on_reconnected()

    # --- side tasks

    async def send_heartbeats(self) -> None:
        """Send heartbeats, until cancelled. One that cannot be sent now is dropped."""
        while True:
            with contextlib.suppress(BusError, Transient):
                await self._heartbeat()
            await self._clock.sleep(self._heartbeat_interval_s)

    async def report_hosts(self) -> None:
        """Reports of hosts, until cancelled; none before the ring is known, for the free hosts would be missing."""
        await self._startup_gate.opened.wait()
        if self._ring is not None:
            await self._ring.known.wait()
        await self._pending.run(self._publish_hosts)

    async def leave(self) -> None:
        """The last heartbeat: this service stops on purpose."""
        with contextlib.suppress(BusError, Transient):
            await self._heartbeat(stopping=True)

    # --- messages

    async def _heartbeat(self, *, stopping: bool = False) -> None:
        async with self._publishing:
            self._sequence += 1
            await self._bus.publish(
                Heartbeat(
                    service=self._service,
                    cell=self._cell,
                    epoch=self._records.epoch,
                    sequence=self._sequence,
                    stopping=stopping,
                    interval_s=self._heartbeat_interval_s,
                    ring=None if self._ring is None else self._ring.name,
                    mark=self._records.mark,
                )
            )

    async def _publish_hosts(self, hosts: list[str] | None) -> None:
        # Before looking: a slow driver must not prove a young machine missing.
        scan, seen_at, rescans = self._records.begin_scan(), self._clock.time(), self._changes.rescans
        ring_term, ring_number = UNKNOWN if self._ring is None else self._ring.version
        # Read once: a host that is reported is one whose builds are taken.
        every = await self._scanner.load_hosts()
        known = [host for host in every if host.reported]
        if self._host_conflicts is not None:
            self._host_conflicts.keep({host.uuid for host in every})
        running = await self._scanner.running(hosts)
        if hosts is not None:
            wanted = frozenset(hosts)
            known = [host for host in known if host.uuid in wanted]
        else:
            self._changes.repeat_changed()
        pages = await self._pages(known, running)
        first_sequence = 0
        for number, page in enumerate(pages, 1):
            async with self._publishing:
                self._sequence += 1
                if hosts is None:
                    first_sequence = first_sequence or self._sequence
                await self._bus.publish(
                    HostStates(
                        service=self._service,
                        cell=self._cell,
                        epoch=self._records.epoch,
                        sequence=self._sequence,
                        hosts=tuple(page),
                        complete=hosts is None and number == len(pages),
                        seen_at=seen_at,
                        first_sequence=first_sequence,
                        pages=len(pages),
                        scan=scan,
                        ring_term=ring_term,
                        ring_number=ring_number,
                        rescans=rescans,
                    )
                )
            metrics.HOSTS_REPORTED.labels(self._service).inc(len(page))
        self._changes.clear_rescans(rescans)

    async def _pages(self, hosts: Sequence[DriverHost], running: dict[str, list[Running]]) -> list[list[HostReport]]:
        """Pages of hosts, bounded by hosts and by the machines that they run; one empty page when there are none."""
        pages: list[list[HostReport]] = [[]]
        instances = 0
        for number, host in enumerate(hosts, 1):
            if number % HOSTS_AT_ONCE == 0:
                await yield_to_loop()
            runs = running.get(host.uuid)  # None: it was not seen this time, which must not prove anything lost
            count = len(runs or ())
            if pages[-1] and (len(pages[-1]) >= HOSTS_PER_PAGE or instances + count > RUNNING_PER_PAGE):
                pages.append([])
                instances = 0
            instances += count
            is_ready = self._startup_gate.is_ready(host.uuid)
            pages[-1].append(
                HostReport(
                    uuid=host.uuid,
                    name=host.name,
                    enabled=host.enabled and is_ready,
                    disabled_reason=host.disabled_reason or ("" if is_ready else DESTROYING),
                    attributes=host.attributes,
                    failed_builds=self._records.failed_builds(host.uuid),
                    running=None if runs is None else tuple(runs),
                    owner=None if self._host_conflicts is None else self._host_conflicts.owner_of(host.uuid),
                )
            )
        return pages
