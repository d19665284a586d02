"""Publishes heartbeats, host announcements, and the inventory of each host's provider tree.

Inventory goes out at start, on change, now and then (so that a lost or undone update heals), and after each
reconnection. After a start a host is not offered before the service has destroyed there what it was ordered to destroy
while it was not running (`offering`). Announcements and heartbeats share one sequence and leave one after the other, so
that a listener may drop what is older than what it has received.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import structlog

from bus.clock import Clock
from bus.contracts.base import Message
from bus.contracts.cell import ComputeHosts, Heartbeat, HostReport, Running
from bus.contracts.placement import NEWER_FIELDS, InventoryUpdate
from bus.faults import Transient
from bus.port import BusError
from bus.retrying import Retrying, RetryPolicy, passes_with_time
from compute_sim import metrics
from compute_sim.domain.reserved import with_reserved
from compute_sim.driver import Driver, DriverHost, DriverUnavailable
from compute_sim.name import source_of
from compute_sim.offering import DESTROYING, Offering
from compute_sim.records import Records
from compute_sim.ring import UNKNOWN, Ring

log = structlog.get_logger()

HOSTS_PER_PAGE = 1000  # as the contract bounds it
RUNNING_PER_PAGE = 5000  # keeps a page of full hosts below a megabyte
TREES_PER_PUBLISH = 200
# Inventory travels on durable queues and is published when it changes: repeating it all is for the unforeseen, and for
# 100,000 hosts every minute it would cost the resource book as much as the boots do. One in so many report intervals.
INVENTORY_EVERY = 10
# The inventory of a host that changed is published once more with the first whole announcement after this: a report
# that another service made of it before, and that waited somewhere, may have undone the first one.
UNDONE_S = 15.0
GATHER_S = 0.1  # changes and questions that come within this are answered together
JITTER = 0.1  # share of the report interval, so that services started together drift apart
REPORTS = RetryPolicy(first_s=0.1, longest_s=10.0, least=0.0)  # until they are published


class PublishingBus(Protocol):
    """The part of a PublishingBus that is needed here."""

    async def publish(self, message: Message, *, cause: str = "") -> None:
        """Publish one message."""

    async def publish_all(self, messages: Sequence[tuple[Message, str]]) -> None:
        """Publish many messages."""


class HostSource(Protocol):
    """What the reporter needs from the agent."""

    async def load_hosts(self) -> Sequence[DriverHost]:
        """Ask the driver which hosts there are."""

    async def running(self, hosts: Sequence[str] | None = None) -> dict[str, list[Running]]:
        """What each host that was seen carries."""


class PendingReport:
    """What is to be reported: everything, or some hosts. Setting it wakes the waiting task."""

    def __init__(self) -> None:
        self.everything = True  # a start publishes everything
        self.hosts: dict[str, None] = {}
        self._some = asyncio.Event()
        self._some.set()

    def add(self, hosts: Sequence[str] | None = None) -> None:
        """These hosts, or everything."""
        if hosts is None:
            self.everything = True
        else:
            self.hosts.update(dict.fromkeys(hosts))
        self._some.set()

    async def wait(self, seconds: float) -> None:
        """Until something is wanted; after `seconds` everything is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._some.wait()
            return
        self.everything = True

    def take(self) -> list[str] | None:
        """What is wanted, None for everything; nothing is any more."""
        taken = None if self.everything else list(self.hosts)
        self.everything, self.hosts = False, {}
        self._some.clear()
        return taken


class Reporter:
    """Publishes what one service has to report."""

    def __init__(
        self,
        bus: PublishingBus,
        *,
        service: str,
        cell: str,
        driver: Driver,
        work: HostSource,
        records: Records,
        clock: Clock,
        rng: random.Random,
        heartbeat_interval_s: float,
        report_interval_s: float,
        ring: Ring | None = None,
        offering: Offering | None = None,
    ) -> None:
        self._bus = bus
        self._service = service
        self._cell = cell
        self._driver = driver
        self._work = work
        self._records = records
        self._clock = clock
        self._rng = rng
        self._retrying = Retrying(REPORTS, clock, rng)
        self._heartbeat_interval_s = heartbeat_interval_s
        self._report_interval_s = report_interval_s
        self._ring = ring
        self._offering = offering
        self._announce = PendingReport()
        self._inventory = PendingReport()
        self._changed: dict[str, float] = {}  # hosts whose inventory is due once more, and when they changed
        self._publishing = asyncio.Lock()
        self._sequence = 0

    # --- what causes a publication

    def on_request(self) -> None:
        """A listener has just started and wants to know everything."""
        self._announce.add()

    def on_host_changed(self, hosts: Sequence[str]) -> None:
        """The driver saw these hosts change."""
        self._announce.add(hosts)
        self._inventory.add(hosts)
        self._changed.update(dict.fromkeys(hosts, self._clock.monotonic()))

    def on_failures_changed(self, host: str) -> None:
        """This host's count of consecutive failed builds changed."""
        self._announce.add((host,))

    def on_reconnected(self) -> None:
        """The broker was unavailable: what was published meanwhile, or just before, may be lost."""
        self._announce.add()
        self._inventory.add()

    def outdated(self, *, epoch: int = 0, version: int = 0) -> None:
        """The cell or the book knows a later word under this service's name than any of its own.

        Its clock was set back, its records are gone, or another process had the name while its clock was ahead. Who is
        notified holds the name: it goes on above that epoch, and publishes everything again. A late copy changes
        nothing.
        """
        before = self._records.epoch
        if self._records.outgrow(epoch, version):
            log.warning(
                "compute.outdated", service=self._service, epoch=self._records.epoch, own_epoch=before, version=version
            )
            self.on_reconnected()

    # --- side tasks

    async def beat(self) -> None:
        """Send heartbeats, until cancelled. One that cannot be sent now is dropped."""
        while True:
            with contextlib.suppress(BusError, Transient):
                await self._heartbeat()
            await self._clock.sleep(self._heartbeat_interval_s)

    async def announce(self) -> None:
        """Host announcements, until cancelled; none before the ring is known, for the free hosts would be missing."""
        await self._offering_begun()
        if self._ring is not None:
            await self._ring.known.wait()
        await self._repeat(self._announce, self._publish_hosts, self._report_interval_s)

    async def report(self) -> None:
        """Inventory updates, until cancelled."""
        await self._offering_begun()
        await self._repeat(self._inventory, self._publish_inventory, self._report_interval_s * INVENTORY_EVERY)

    async def _offering_begun(self) -> None:
        if self._offering is not None:
            await self._offering.begun.wait()

    def _offers(self, host: str) -> bool:
        return self._offering is None or self._offering.offers(host)

    async def leave(self) -> None:
        """The last heartbeat: this service stops on purpose."""
        with contextlib.suppress(BusError, Transient):
            await self._heartbeat(stopping=True)

    async def _repeat(
        self, wanted: PendingReport, save: Callable[[list[str] | None], Awaitable[None]], interval_s: float
    ) -> None:
        while True:
            await wanted.wait(interval_s * self._rng.uniform(1 - JITTER, 1 + JITTER))
            taken = wanted.take()
            await self._persist(save, taken)
            await self._clock.sleep(GATHER_S)

    async def _persist(self, save: Callable[[list[str] | None], Awaitable[None]], hosts: list[str] | None) -> None:
        """Until it is published: a broker, a consumer or a driver that is away comes back with time."""
        await self._retrying.call(
            lambda: save(hosts),
            lambda error: passes_with_time(error) or isinstance(error, DriverUnavailable),
            on_failure=self._log_state,
        )

    def _log_state(self, error: BaseException, failures: int) -> None:
        log.warning("report.not_published", code=getattr(error, "code", ""), reason=str(error), attempt=failures)

    # --- speaking

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
                )
            )

    async def _publish_hosts(self, hosts: list[str] | None) -> None:
        # Before looking: a slow driver must not prove a young machine missing.
        scan, seen_at = self._records.begin_scan(), self._clock.time()
        ring_term, ring_number = UNKNOWN if self._ring is None else self._ring.version
        # Read once: a host that is announced is one whose builds are taken.
        known = [host for host in await self._work.load_hosts() if host.offered]
        running = await self._work.running(hosts)
        if hosts is not None:
            wanted = frozenset(hosts)
            known = [host for host in known if host.uuid in wanted]
        else:
            self._republish_changed()
        pages = self._pages(known, running)
        first_sequence = 0
        for number, page in enumerate(pages, 1):
            async with self._publishing:
                self._sequence += 1
                if hosts is None:
                    first_sequence = first_sequence or self._sequence
                await self._bus.publish(
                    ComputeHosts(
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
                    )
                )
            metrics.ANNOUNCED.labels(self._service).inc(len(page))

    def _republish_changed(self) -> None:
        before = self._clock.monotonic() - UNDONE_S
        due = [host for host, at in self._changed.items() if at <= before]
        for host in due:
            del self._changed[host]
        if due:
            self._inventory.add(due)

    def _pages(self, hosts: Sequence[DriverHost], running: dict[str, list[Running]]) -> list[list[HostReport]]:
        """Pages of hosts, bounded by hosts and by what they run; one empty page when there are none."""
        pages: list[list[HostReport]] = [[]]
        instances = 0
        for host in hosts:
            runs = running.get(host.uuid)  # None: it was not seen this time, which must not prove anything lost
            count = len(runs or ())
            if pages[-1] and (len(pages[-1]) >= HOSTS_PER_PAGE or instances + count > RUNNING_PER_PAGE):
                pages.append([])
                instances = 0
            instances += count
            offers = self._offers(host.uuid)
            pages[-1].append(
                HostReport(
                    uuid=host.uuid,
                    name=host.name,
                    enabled=host.enabled and offers,
                    disabled_reason=host.disabled_reason or ("" if offers else DESTROYING),
                    attributes=host.attributes,
                    failed_builds=self._records.failed_builds(host.uuid),
                    running=None if runs is None else tuple(runs),
                )
            )
        return pages

    async def _publish_inventory(self, hosts: list[str] | None) -> None:
        uuids = [host.uuid for host in await self._driver.hosts()] if hosts is None else hosts
        uuids = [uuid for uuid in uuids if self._offers(uuid)]
        for at in range(0, len(uuids), TREES_PER_PUBLISH):
            trees = await self._driver.inventory(uuids[at : at + TREES_PER_PUBLISH])
            if not trees:
                continue
            # Versions are taken after the driver looked and written down before they are used: a later scan has a
            # higher one, also after a restart.
            first = self._records.versions(len(trees), self._clock.time())
            cause = f"{self._service}:{self._records.epoch}"
            await self._bus.publish_all(
                [
                    (
                        InventoryUpdate(
                            source=source_of(self._service),
                            version=first + number,
                            root_uuid=tree[0].uuid,
                            providers=with_reserved(tree, self._records.reserved(tree[0].uuid)),
                            may_ignore=NEWER_FIELDS,
                        ),
                        cause,
                    )
                    for number, tree in enumerate(trees)
                ]
            )
            metrics.REPORTS.labels(self._service).inc(len(trees))
