"""What compute services have listed of their hosts, page by page, as one conductor has received it."""

# A host may pass from one service of its cell to another: the first then leaves it out. While a service that is up goes
# on listing it, the report of another one proves nothing about the machines that the first one has there.

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec import Struct

from bus.contracts.cell import HostStates
from cell_conductor.state.breaker import DestructiveDifference
from cell_conductor.state.unknown_machine import UnknownMachine


class PageDifferences(Struct):
    """The differences of one page of a scan, and the machines that it has newly put in quarantine."""

    differences: Sequence[DestructiveDifference] = ()
    quarantined: tuple[UnknownMachine, ...] = ()


class ScanDifferences(Struct):
    """The differences of the pages of one scan of a service's hosts, by their sequences. It is assessed as a whole."""

    key: tuple[int, int]  # the epoch, and the sequence of the first page
    pages: dict[int, PageDifferences] = {}


def first_page_of(report: HostStates) -> int:
    """The sequence of the first page of the report of all hosts that this page is of; 0: it is of none."""
    return report.first_sequence or (report.sequence if report.complete else 0)


def is_complete(report: HostStates, pages: Collection[int]) -> bool:
    """Whether a report has come as a whole with this page. pages: the sequences of those that have come: one that comes
    again is no other page. One that is not of all hosts is whole by itself.
    """
    return not first_page_of(report) or (report.complete and len(pages) == report.pages)


# At most this many hosts of all services are remembered; one that lists more counts as not having listed all.
MAX_HOSTS = 1_000_000
NO_RING = (0, 0)


class _Listed(Struct):
    """The listing of one service."""

    epoch: int
    hosts: dict[str, int]  # by uuid, the first sequence of the last report that had it
    first: int = 0  # sequence of the first page of the report of all hosts that is being received
    pages: set[int] = set()  # sequences of the pages of that report that came
    complete: bool = False  # whether one report of all hosts has come completely
    ring: tuple[int, int] = NO_RING  # term and number of the ring members by which it shares its free hosts


class HostListings:
    """The listings of one cell, as one conductor has received them."""

    def __init__(self) -> None:
        self._services: dict[str, _Listed] = {}
        self._reporting_services: dict[str, dict[str, None]] = {}  # by host

    def record(self, report: HostStates) -> None:
        """Apply one page of a report, newer than all earlier ones of its service."""
        listed = self._services.get(report.service)
        if listed is None or listed.epoch != report.epoch:
            if listed is not None:
                self._drop(report.service, listed, list(listed.hosts))
            listed = self._services[report.service] = _Listed(report.epoch, {})
        listed.ring = (report.ring_term, report.ring_number)
        first = first_page_of(report)
        if first and first != listed.first:
            listed.first, listed.pages = first, set()
        for host in report.hosts:
            if host.uuid not in self._reporting_services and len(self._reporting_services) >= MAX_HOSTS:
                return  # the page does not count as received: its service may have what is not remembered
            listed.hosts[host.uuid] = listed.first
            self._reporting_services.setdefault(host.uuid, {})[report.service] = None
        if not first:
            return
        listed.pages.add(report.sequence)
        if is_complete(report, listed.pages):
            listed.complete = True
            self._drop(report.service, listed, [uuid for uuid, at in listed.hosts.items() if at != first])

    def may_have(self, service: str, host: str) -> bool:
        """Whether the service lists the host, or has not listed all its hosts yet."""
        listed = self._services.get(service)
        return listed is None or not listed.complete or host in listed.hosts

    def has_report(self, service: str) -> bool:
        """Whether the service has listed any hosts to this conductor."""
        return service in self._services

    def reporting_services(self, host: str) -> tuple[str, ...]:
        """The services that list this host."""
        return tuple(self._reporting_services.get(host, ()))

    def conflicts(self, report: HostStates, up: Collection[str]) -> dict[str, str]:
        """{host of this report: another service that is up and lists it}, unless both are in a ring."""
        found: dict[str, str] = {}
        shares = (report.ring_term, report.ring_number) != NO_RING
        for host in report.hosts:
            for other in self.reporting_services(host.uuid):
                in_a_ring = shares and self._services[other].ring != NO_RING
                if other != report.service and other in up and not in_a_ring:
                    found[host.uuid] = other
        return found

    def _drop(self, service: str, listed: _Listed, hosts: list[str]) -> None:
        for uuid in hosts:
            del listed.hosts[uuid]
            reporting_services = self._reporting_services[uuid]
            reporting_services.pop(service, None)
            if not reporting_services:
                del self._reporting_services[uuid]


# At most this many compute services are remembered; the one that has been quiet longest is dropped first.
MAX_SERVICES = 100_000


class NewestReports:
    """Which report of each compute service is the newest handled. Older ones are ignored: they come late, or twice."""

    def __init__(self) -> None:
        self._newest: dict[str, tuple[int, int]] = {}

    def is_newer(self, report: HostStates) -> bool:
        """Whether it is newer than every report of its service that was handled."""
        last = self._newest.get(report.service)
        return last is None or (report.epoch, report.sequence) > last

    def epoch(self, service: str) -> int:
        """The sequence of the newest report of this service that was handled; 0 before there is one."""
        return self._newest.get(service, (0, 0))[0]

    def record(self, report: HostStates) -> None:
        """Record that the report has been handled."""
        # Not earlier: a report that met an outage comes again, and is still new then.
        at = (report.epoch, report.sequence)
        self._newest[report.service] = max(at, self._newest.pop(report.service, at))
        if len(self._newest) > MAX_SERVICES:
            del self._newest[next(iter(self._newest))]
